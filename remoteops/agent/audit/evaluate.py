"""Expressions to values, on demand: names are looked up, assignments and returned expressions followed where asked
for.
"""

from __future__ import annotations

import ast
import builtins
from typing import Any, Dict, List, Optional, Tuple

from remoteops.agent.audit.callees import Callees
from remoteops.agent.audit.classes import Classes
from remoteops.agent.audit.constructors import Constructors
from remoteops.agent.audit.decorators import Decorators
from remoteops.agent.audit.index import FunctionInfo, Index
from remoteops.agent.audit.modules import Module
from remoteops.agent.audit.scopes import Scope
from remoteops.agent.audit.syntax import unit_of
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
    elements,
    join,
    options,
    reaches,
)
from remoteops.agent.audit.versions import compare

MAX_STEPS = 24


class Evaluator(Callees):
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
            self.cut += node is not None
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
            value = self.evaluate(node.value, scope)
            self.on_operation(node, value, ("__await__",), scope)
            return self.awaited(value)
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
            for bound in (node.lower, node.upper, node.step):
                self.evaluate(bound, scope)
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
        outcome = compare(left, node.ops[0], rights[0]) if len(rights) == 1 else UNKNOWN
        return Unknown(False, "version") if outcome == UNKNOWN and _names_version(node) else outcome

    def bind_name(self, target: ast.expr, value: Value, scope: Scope) -> None:
        """An assignment expression; scopes that follow assignments on demand need nothing."""

    def enter_lambda(self, node: ast.Lambda, scope: Scope) -> None:
        """A lambda is met; the walk looks into it."""

    def on_operation(self, node: ast.AST, value: Value, names: Tuple[str, ...], scope: Scope) -> None:
        """An operation that needs one of several special methods is met."""

    def _subscripted(self, node: ast.Subscript, scope: Scope) -> Value:
        value = self.evaluate(node.value, scope)
        self.on_operation(node, value, ("__getitem__",), scope)
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


def _names_version(node: ast.AST) -> bool:
    return any("version" in str(getattr(n, "attr", getattr(n, "id", ""))).lower() for n in ast.walk(node))


def _binds(target: ast.AST, name: str) -> bool:
    if isinstance(target, ast.Name):
        return target.id == name
    return any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(target))


__all__ = ["Evaluator", "Scope"]
