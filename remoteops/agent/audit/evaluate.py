"""Expressions to values, on demand: names are looked up, assignments and returned expressions followed where asked for."""

from __future__ import annotations

import ast
import builtins
from typing import Any, Dict, List, Optional, Set, Tuple

from remoteops.agent.audit.calls import Calls
from remoteops.agent.audit.classes import Classes
from remoteops.agent.audit.constructors import Constructors
from remoteops.agent.audit.decorators import Decorators
from remoteops.agent.audit.index import ClassInfo, FunctionInfo, Index
from remoteops.agent.audit.modules import Module
from remoteops.agent.audit.signatures import unparse
from remoteops.agent.audit.syntax import unit_of, walk_shallow
from remoteops.agent.audit.values import (
    UNKNOWN,
    ClassValue,
    Const,
    External,
    ExternalInstance,
    FunctionValue,
    Instance,
    LambdaValue,
    Sequence,
    Unknown,
    Value,
    Version,
    elements,
    join,
    options,
    reaches,
)

MAX_STEPS = 24


class Scope:
    """Where names are looked up: a module, or a function whose assignments are followed when a name is asked for."""

    def __init__(
        self,
        evaluator: Evaluator,
        module: Module,
        function: Optional[FunctionInfo] = None,
        *,
        receiver: Optional[Value] = None,
        arguments: Optional[Dict[str, Value]] = None,
        outer: Optional[Scope] = None,
    ) -> None:
        self.evaluator = evaluator
        self.module = module
        self.function = function
        self.owner: Optional[ClassInfo] = function.owner if function is not None else None
        self.receiver = receiver
        self.arguments = arguments or {}
        self.outer = outer
        self.names: Dict[str, Value] = {}
        self._table: Optional[Dict[str, List[Tuple[str, ast.AST]]]] = None
        self._busy: Set[str] = set()

    def get(self, name: str) -> Optional[Value]:
        """The value of a name, or None where nothing binds it."""
        if name in self.names:
            return self.names[name]
        if self.function is not None:
            if name in self._busy:
                return UNKNOWN
            self._busy.add(name)
            try:
                found = self._local(name)
            finally:
                self._busy.discard(name)
            if found is not None:
                self.names[name] = found
                return found
        if self.outer is not None:
            return self.outer.get(name)
        return self.evaluator.global_name(self.module, name)

    def _local(self, name: str) -> Optional[Value]:
        function = self.function
        node = function.head if function is not None else None
        if function is None or node is None:
            return None
        found: List[Value] = []
        parameter = self._parameter(name, node.args, function)
        if parameter is not None:
            found.append(parameter)
            if parameter != UNKNOWN and not isinstance(parameter, Unknown):
                return parameter
        for kind, place in self.table().get(name, []):
            found.append(self.evaluator.bound_by(kind, place, name, self))
        return join(found) if found else None

    def table(self) -> Dict[str, List[Tuple[str, ast.AST]]]:
        """Name -> statements of the function that bind it."""
        if self._table is None:
            node = self.function.node if self.function is not None else None
            facts = self.function.facts if self.function is not None else {}
            if "names" not in facts:
                facts["names"] = binding_table(node.body) if node is not None else {}
            self._table = facts["names"]  # type: ignore[assignment]
        return self._table or {}

    def _parameter(self, name: str, arguments: ast.arguments, function: FunctionInfo) -> Optional[Value]:
        plain = arguments.posonlyargs + arguments.args
        for place, argument in enumerate(plain + arguments.kwonlyargs):
            if argument.arg != name:
                continue
            if (
                place == 0
                and function.owner is not None
                and self.evaluator.decorators.flavour(function) != "staticmethod"
            ):
                if self.receiver is not None:
                    return self.receiver
                if self.evaluator.decorators.flavour(function) == "classmethod" or function.name == "__new__":
                    return ClassValue(function.owner, False)
                return Instance(function.owner)
            if name in self.arguments and not isinstance(self.arguments[name], Unknown):
                return self.arguments[name]
            reach = self.evaluator.in_provider(self.module)
            declared = self.evaluator.annotation(argument.annotation, self.module, self.owner, receiver=self.receiver)
            passed = function.facts.get("passed", {})
            if declared == UNKNOWN and name in passed:  # type: ignore[operator]
                return passed[name]  # type: ignore[index]
            if isinstance(declared, (Unknown, External, ExternalInstance)):
                default = _default_of(arguments, argument)
                value = (
                    self.evaluator.evaluate(default, self.evaluator.module_scope(self.module))
                    if default is not None
                    else UNKNOWN
                )
                if isinstance(value, (ClassValue, FunctionValue)):
                    return value
            return Unknown(reach, name) if declared == UNKNOWN and reach else declared
        if arguments.vararg is not None and arguments.vararg.arg == name:
            return Sequence(
                "tuple", None, self.evaluator.annotation(arguments.vararg.annotation, self.module, self.owner)
            )
        if arguments.kwarg is not None and arguments.kwarg.arg == name:
            return Sequence(
                "dict", None, self.evaluator.annotation(arguments.kwarg.annotation, self.module, self.owner)
            )
        return None


def _default_of(arguments: ast.arguments, wanted: ast.arg) -> Optional[ast.expr]:
    plain = arguments.posonlyargs + arguments.args
    defaults: List[Optional[ast.expr]] = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    for argument, default in list(zip(plain, defaults)) + list(zip(arguments.kwonlyargs, arguments.kw_defaults)):
        if argument is wanted:
            return default
    return None


def binding_table(body: List[ast.stmt]) -> Dict[str, List[Tuple[str, ast.AST]]]:
    """Name -> (kind, node) of everything in a function body that binds it; nested functions are entries, not looked into."""
    table: Dict[str, List[Tuple[str, ast.AST]]] = {}

    def add(kind: str, target: Optional[ast.AST], node: ast.AST) -> None:
        if isinstance(target, ast.Name):
            table.setdefault(target.id, []).append((kind, node))
        elif isinstance(target, (ast.Tuple, ast.List)):
            for element in target.elts:
                add(kind, element.value if isinstance(element, ast.Starred) else element, node)

    for statement in walk_shallow(body):
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            table.setdefault(statement.name, []).append(("def", statement))
            continue
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                add("assign", target, statement)
        elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
            add("assign", statement.target, statement)
        elif isinstance(statement, (ast.For, ast.AsyncFor)):
            add("for", statement.target, statement)
        elif isinstance(statement, (ast.With, ast.AsyncWith)):
            for item in statement.items:
                add("with", item.optional_vars, item)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            for alias in statement.names:
                table.setdefault((alias.asname or alias.name).split(".")[0], []).append(("import", statement))
        for expression in _own_expressions(statement):
            for inner in ast.walk(expression):
                if isinstance(inner, ast.NamedExpr):
                    add("walrus", inner.target, inner)
    return table


def _own_expressions(statement: ast.stmt) -> List[ast.AST]:
    return [
        v for v in (getattr(statement, f, None) for f in ("test", "value", "iter", "exc")) if isinstance(v, ast.AST)
    ]


class Evaluator(Calls):
    """Expression evaluation over an index. Nothing is executed; what cannot be told is Unknown."""

    def __init__(self, index: Index, provider: str) -> None:
        super().__init__(index, Classes(index), provider)
        self.decorators = Decorators(self.classes)
        self.constructors = Constructors(self.classes, self.decorators)
        self.classes.decorated = lambda info: self.decorators.recipe(info).open
        self.hosts = {}
        self._scopes: Dict[str, Scope] = {}
        self._depth = 0

    def module_scope(self, module: Module) -> Scope:
        if module.name not in self._scopes:
            self._scopes[module.name] = Scope(self, module)
        return self._scopes[module.name]

    def forget_scopes(self) -> None:
        """Drops what was worked out about module-level names."""
        self._scopes = {}

    def lazy_scope(
        self, function: FunctionInfo, receiver: Optional[Value] = None, arguments: Optional[Dict[str, Value]] = None
    ) -> Scope:
        outer = self.lazy_scope(function.outer) if function.outer is not None else None
        if receiver is None and not arguments:
            if "scope" not in function.facts:
                function.facts["scope"] = Scope(self, function.module, function, outer=outer)
            return function.facts["scope"]  # type: ignore[return-value]
        return Scope(self, function.module, function, receiver=receiver, arguments=arguments, outer=outer)

    def global_name(self, module: Module, name: str) -> Optional[Value]:
        symbol = self.index.lookup(module, name)
        if symbol is not None:
            return self.of_symbol(symbol)
        if hasattr(builtins, name):
            return External(name)
        typed = self.index.lookup(module, name, typing=True)
        return self.of_symbol(typed) if typed is not None else None

    # -- expressions -------------------------------------------------------------------------------------------------

    def evaluate(self, node: Optional[ast.expr], scope: Scope) -> Value:
        """The value of an expression; UNKNOWN beyond a bounded depth."""
        if node is None or self._depth > MAX_STEPS:
            return UNKNOWN
        self._depth += 1
        try:
            return self._evaluate(node, scope)
        finally:
            self._depth -= 1

    def _evaluate(self, node: ast.expr, scope: Scope) -> Value:
        if isinstance(node, ast.Name):
            found = scope.get(node.id)
            return UNKNOWN if found is None else found
        if isinstance(node, ast.Constant):
            return Const(node.value)
        if isinstance(node, ast.Attribute):
            return self.eval_attribute(node, scope)
        if isinstance(node, ast.Call):
            return self.eval_call(node, scope)
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            kind = {"List": "list", "Tuple": "tuple", "Set": "set"}[type(node).__name__]
            if any(isinstance(e, ast.Starred) for e in node.elts):
                return Sequence(
                    kind,
                    None,
                    join(
                        [
                            elements(self.evaluate(e.value, scope))
                            if isinstance(e, ast.Starred)
                            else self.evaluate(e, scope)
                            for e in node.elts
                        ]
                    ),
                )
            return Sequence(kind, tuple(self.evaluate(e, scope) for e in node.elts))
        if isinstance(node, ast.Dict):
            values = tuple(self.evaluate(v, scope) for v in node.values)
            for key in node.keys:
                self.evaluate(key, scope)
            plain = all(isinstance(k, ast.Constant) for k in node.keys)
            keys = tuple(k.value for k in node.keys) if plain else None  # type: ignore[union-attr]
            return (
                Sequence("dict", values, None, keys)
                if plain
                else Sequence("dict", None, join(values) if values else None)
            )
        if isinstance(node, ast.IfExp):
            return self.eval_conditional(node, scope)
        if isinstance(node, ast.BoolOp):
            return self.eval_boolean(node, scope)
        if isinstance(node, ast.Compare):
            return self.eval_compare(node, scope)
        if isinstance(node, ast.NamedExpr):
            value = self.evaluate(node.value, scope)
            self.bind_name(node.target, value, scope)
            return value
        if isinstance(node, ast.Subscript):
            return self._subscripted(node, scope)
        if isinstance(node, ast.Await):
            return self.awaited(self.evaluate(node.value, scope))
        if isinstance(node, ast.Lambda):
            self.enter_lambda(node, scope)
            return LambdaValue(node, scope)
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            return self._comprehension(node, scope)
        if isinstance(node, ast.JoinedStr):
            for part in node.values:
                if isinstance(part, ast.FormattedValue):
                    self.evaluate(part.value, scope)
            return ExternalInstance("str")
        if isinstance(node, ast.BinOp):
            left, right = self.evaluate(node.left, scope), self.evaluate(node.right, scope)
            if isinstance(node.op, ast.Mult) and isinstance(left, Sequence):
                return Sequence(left.kind, None, elements(left))
            if isinstance(node.op, ast.Add) and isinstance(left, Sequence):
                return Sequence(left.kind, None, join([elements(left), elements(right)]))
            if (
                isinstance(node.op, ast.Add)
                and isinstance(left, Const)
                and isinstance(right, Const)
                and isinstance(left.value, str)
                and isinstance(right.value, str)
            ):
                return Const(left.value + right.value)
            return (
                Unknown(reaches(left) or reaches(right), "an arithmetic result")
                if reaches(left) and reaches(right)
                else UNKNOWN
            )
        if isinstance(node, ast.UnaryOp):
            value = self.evaluate(node.operand, scope)
            if isinstance(node.op, ast.Not) and isinstance(value, Const):
                return Const(not value.value)
            if isinstance(node.op, ast.USub) and isinstance(value, Const) and isinstance(value.value, (int, float)):
                return Const(-value.value)
            return UNKNOWN
        if isinstance(node, (ast.Yield, ast.YieldFrom)):
            self.evaluate(node.value, scope)
            return UNKNOWN
        if isinstance(node, ast.Starred):
            return self.evaluate(node.value, scope)
        if isinstance(node, ast.Slice):
            for part in (node.lower, node.upper, node.step):
                self.evaluate(part, scope)
        return UNKNOWN

    def eval_attribute(self, node: ast.Attribute, scope: Scope) -> Value:
        return self.attribute(self.evaluate(node.value, scope), node.attr).value

    def eval_call(self, node: ast.Call, scope: Scope) -> Value:
        return self.call(self.evaluate(node.func, scope), node, scope)

    def eval_conditional(self, node: ast.IfExp, scope: Scope) -> Value:
        return join([self.evaluate(node.body, scope), self.evaluate(node.orelse, scope)])

    def eval_boolean(self, node: ast.BoolOp, scope: Scope) -> Value:
        return join([self.evaluate(v, scope) for v in node.values])

    def eval_compare(self, node: ast.Compare, scope: Scope) -> Value:
        left = self.evaluate(node.left, scope)
        rights = [self.evaluate(c, scope) for c in node.comparators]
        if len(rights) == 1:
            return compare(left, node.ops[0], rights[0])
        return UNKNOWN

    def bind_name(self, target: ast.expr, value: Value, scope: Scope) -> None:
        """An assignment expression; scopes that follow assignments on demand need nothing."""

    def enter_lambda(self, node: ast.Lambda, scope: Scope) -> None:
        """A lambda is met; the walk looks into it."""

    def _subscripted(self, node: ast.Subscript, scope: Scope) -> Value:
        value = self.evaluate(node.value, scope)
        index = self.evaluate(node.slice, scope)
        found: List[Value] = []
        for option in options(value):
            if isinstance(node.slice, ast.Slice):
                found.append(
                    Sequence(option.kind, None, elements(option))
                    if isinstance(option, Sequence)
                    else Unknown(reaches(option), "a slice")
                )
            elif isinstance(option, Sequence) and option.kind == "dict":
                if (
                    option.keys is not None
                    and isinstance(index, Const)
                    and index.value in option.keys
                    and option.parts is not None
                ):
                    found.append(option.parts[option.keys.index(index.value)])
                else:
                    found.append(option.each if option.each is not None else join(option.parts or ()))
            elif (
                isinstance(option, Sequence)
                and option.parts is not None
                and isinstance(index, Const)
                and isinstance(index.value, int)
                and (-len(option.parts) <= index.value < len(option.parts))
            ):
                found.append(option.parts[index.value])
            elif isinstance(option, (ClassValue, External)) and not isinstance(index, Const):
                found.append(option)
            elif isinstance(option, Instance):
                found.append(self.result_of_method(option, "__getitem__"))
            else:
                found.append(elements(option))
        return join(found)

    def _comprehension(self, node: Any, scope: Scope) -> Value:
        inner = self.comprehension_scope(scope)
        for generator in node.generators:
            value = elements(self.iterated(self.evaluate(generator.iter, inner)))
            self.bind_target(generator.target, value, inner)
            for condition in generator.ifs:
                self.evaluate(condition, inner)
        if isinstance(node, ast.DictComp):
            self.evaluate(node.key, inner)
            return Sequence("dict", None, self.evaluate(node.value, inner))
        kind = {"ListComp": "list", "SetComp": "set", "GeneratorExp": "iterable"}[type(node).__name__]
        return Sequence(kind, None, self.evaluate(node.elt, inner))

    def comprehension_scope(self, scope: Scope) -> Scope:
        return Scope(self, scope.module, None, outer=scope)

    def bind_target(self, target: ast.expr, value: Value, scope: Scope) -> None:
        """Binds the target of a loop or comprehension in a scope."""
        if isinstance(target, ast.Name):
            scope.names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            for place, element in enumerate(target.elts):
                if isinstance(element, ast.Starred):
                    self.bind_target(element.value, Sequence("list", None, elements(value)), scope)
                else:
                    self.bind_target(element, self.item(value, place, len(target.elts)), scope)

    def bound_by(self, kind: str, node: Any, name: str, scope: Scope) -> Value:
        """The value that a statement of a function gives to a name."""
        if kind == "def":
            unit = unit_of(scope.module.source, node)
            assert unit is not None
            prefix = (scope.function.qualname + ".<locals>.") if scope.function is not None else ""
            if unit.kind == "class":
                return ClassValue(self.index.class_info(scope.module, unit, prefix, scope.function))
            return FunctionValue(self.index.function_info(scope.module, unit, prefix, None, scope.function))
        if kind == "import":
            return self.imported_name(node, name, scope.module)
        if kind == "walrus":
            return self.evaluate(node.value, scope)
        if kind == "with":
            return self._within(node.optional_vars, self.entered(self.evaluate(node.context_expr, scope)), name)
        if kind == "for":
            return self._within(node.target, elements(self.iterated(self.evaluate(node.iter, scope))), name)
        if isinstance(node, ast.AnnAssign):
            declared = self.annotation(node.annotation, scope.module, scope.owner)
            return declared if declared != UNKNOWN else self.evaluate(node.value, scope)
        if isinstance(node, ast.AugAssign):
            return UNKNOWN
        value = self.evaluate(node.value, scope)
        return join([self._within(t, value, name) for t in node.targets if _binds(t, name)])

    def _within(self, target: Any, value: Value, name: str) -> Value:
        if isinstance(target, ast.Name):
            return value if target.id == name else UNKNOWN
        if isinstance(target, (ast.Tuple, ast.List)):
            for place, element in enumerate(target.elts):
                inner = element.value if isinstance(element, ast.Starred) else element
                if _binds(inner, name):
                    return self._within(inner, self.item(value, place, len(target.elts)), name)
        return UNKNOWN

    def imported_name(self, node: Any, name: str, module: Module) -> Value:
        """What an import statement inside a function binds."""
        for alias in node.names:
            if (alias.asname or alias.name.split(".")[0]) != name and not (
                isinstance(node, ast.ImportFrom) and alias.name == name
            ):
                continue
            if isinstance(node, ast.Import):
                dotted = alias.name if alias.asname else alias.name.split(".")[0]
                target = self.index.module(dotted)
                return self.of_symbol(self.module_symbol(target)) if target is not None else External(dotted)
            source = module.absolute(node.module, node.level)
            if not self.index.knows(source):
                return External(source + "." + alias.name)
            target = self.index.module(source)
            symbol = self.index.lookup(target, alias.name) if target is not None else None
            return (
                self.of_symbol(symbol)
                if symbol is not None
                else Unknown(source.split(".")[0] == self.provider, source + "." + alias.name)
            )
        return UNKNOWN


def _binds(target: ast.AST, name: str) -> bool:
    return any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(target))


def compare(left: Value, operator: ast.cmpop, right: Value) -> Value:
    """The outcome of a comparison of constants or versions, where it is sure."""
    if isinstance(left, Version) or isinstance(right, Version):
        one, two = _version_key(left), _version_key(right)
        if one is None or two is None:
            return Unknown(False, "version")
        return Const(_order(one, operator, two))
    if isinstance(left, Const) and isinstance(right, Const):
        if isinstance(operator, (ast.Is, ast.Eq)):
            return Const(left.value == right.value)
        if isinstance(operator, (ast.IsNot, ast.NotEq)):
            return Const(left.value != right.value)
    return UNKNOWN


def _order(one: Any, operator: ast.cmpop, two: Any) -> Any:
    table = {
        "Lt": one < two,
        "LtE": one <= two,
        "Gt": one > two,
        "GtE": one >= two,
        "Eq": one == two,
        "NotEq": one != two,
    }
    return table.get(type(operator).__name__, True)


def _version_key(value: Value) -> Optional[Tuple[Any, ...]]:
    text = value.text if isinstance(value, Version) else value.value if isinstance(value, Const) else None
    if (
        isinstance(value, Sequence)
        and value.parts
        and all(isinstance(p, Const) and isinstance(p.value, int) for p in value.parts)
    ):
        text = ".".join(str(p.value) for p in value.parts if isinstance(p, Const))
    return version_key(text) if isinstance(text, str) else None


def version_key(text: str) -> Optional[Tuple[Any, ...]]:
    """A sort key for a release number as PEP 440 orders it (dev < a < b < rc < release < post); None for something else."""
    import re

    match = re.match(
        r"^v?(\d+(?:\.\d+)*)(?:[._-]?(a|b|rc|alpha|beta|c|pre)[._-]?(\d*))?(?:[._-]?(post|rev|r)[._-]?(\d*))?(?:[._-]?(dev)[._-]?(\d*))?(?:\+.*)?$",
        text.strip(),
        re.I,
    )
    if not match:
        return None
    numbers = [int(n) for n in match.group(1).split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    pre = match.group(2)
    stage = (
        {"a": 1, "alpha": 1, "b": 2, "beta": 2, "rc": 3, "c": 3, "pre": 3}[pre.lower()]
        if pre
        else (0 if match.group(6) and not match.group(4) else 4)
    )
    return (
        tuple(numbers),
        stage,
        int(match.group(3) or 0),
        int(match.group(5) or 0) + (1 if match.group(4) else 0),
        0 if match.group(6) else 1,
        int(match.group(7) or 0),
    )


__all__ = ["Evaluator", "Scope", "compare", "unparse", "version_key"]
