"""What a call returns: annotations, and where they say nothing, the returned expressions."""

from __future__ import annotations

import ast
from typing import Any, Dict, List, Optional

from remoteops.agent.audit.index import FunctionInfo, Symbol
from remoteops.agent.audit.known import CONTAINERS, Known
from remoteops.agent.audit.modules import Module, last_name
from remoteops.agent.audit.syntax import walk_shallow
from remoteops.agent.audit.values import (
    NONE,
    UNKNOWN,
    BoundMethod,
    CallableValue,
    ClassValue,
    Const,
    External,
    ExternalInstance,
    FunctionValue,
    Instance,
    LambdaValue,
    PartialValue,
    Sequence,
    Unknown,
    Value,
    each,
    elements,
    join,
    options,
    reaches,
)
from remoteops.agent.audit.values import key as value_key
from remoteops.agent.audit.versions import text_result

MAX_RETURNS = 5
MAX_CASES = 24  # of arguments for which the result of one function is worked out


class Calls(Known):
    """Results of calls and the signatures that calls must fit."""

    _returning: Dict[Any, bool]

    def call(self, value: Value, node: ast.Call, scope: Any) -> Value:
        """The result of calling a value with the arguments of a call node."""
        found = [self._call_one(option, node, scope) for option in options(value) if option != NONE]
        return join(found) if found else UNKNOWN

    def _call_one(self, option: Value, node: ast.Call, scope: Any) -> Value:
        if isinstance(option, ClassValue):
            if any(n in ("typing.TypedDict",) for n in self.classes.lineage(option.info).external):
                return Sequence("dict", None, None)
            if len(node.args) > 1 and self.classes.is_enum(option.info):
                return Unknown(self.in_provider(option.info.module), "a class made by %s" % option.info.name)
            made = self._made_by_new(option)
            if made is not None:
                return made
            return Instance(
                option.info,
                option.exact,
                self._first_items(node, scope) if self.classes.lineage(option.info).external else None,
            )
        if isinstance(option, FunctionValue):
            return self._function_result(option, node, scope)
        if isinstance(option, Instance):
            return self.result_of_method(option, "__call__", "forward")
        if isinstance(option, PartialValue):
            return self._call_one(option.target, node, scope)
        if isinstance(option, BoundMethod):
            if isinstance(option.function, FunctionValue):
                return self.returned(option.function.info, option.receiver)
            if isinstance(option.function, External):
                given = [self.evaluate(a, scope) for a in node.args]
                return text_result(option.function.dotted, option.receiver, given)
            if isinstance(option.function, LambdaValue):
                return self._lambda_result(option.function, node, scope, option.receiver)
            return UNKNOWN
        if isinstance(option, CallableValue):
            return option.result
        if isinstance(option, LambdaValue):
            return self._lambda_result(option, node, scope)
        if isinstance(option, External):
            return self._external_result(option, node, scope)
        return Unknown(reaches(option), "the result of a call that was not followed")

    def _lambda_result(self, option: LambdaValue, node: ast.Call, scope: Any, *bound: Value) -> Value:
        """A lambda's expression with its parameters filled: a global of the same name is not meant."""
        given = option.node.args
        inner = type(self.module_scope(option.scope.module))(self, option.scope.module, None, outer=option.scope)
        for argument in [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]:
            if argument is not None:
                inner.names[argument.arg] = UNKNOWN
        starred = any(isinstance(a, ast.Starred) for a in node.args)
        passed = list(bound) + [self.evaluate(a, scope) for a in node.args if not starred]
        inner.names.update({a.arg: v for a, v in zip(given.posonlyargs + given.args, passed)})
        return self.evaluate(option.node.body, inner)

    def _made_by_new(self, option: ClassValue) -> Optional[Value]:
        """What a class's own ``__new__`` returns, where it returns objects of other classes."""
        member = self.classes.member(option.info, "__new__")
        function = self.classes.function(member) if member is not None else None
        if function is None or not self.in_provider(function.module):
            return None
        value = self.returned(function, option)
        others = [o for o in options(value) if isinstance(o, Instance) and o.info is not option.info]
        if not others:
            return None
        return join([o for o in options(value) if isinstance(o, Instance)])

    def _first_items(self, node: ast.Call, scope: Any) -> Optional[Value]:
        if not node.args:
            return None
        value = self.evaluate(node.args[0], scope)
        return elements(value) if isinstance(value, Sequence) else None

    def result_of_method(self, instance: Instance, *names: str) -> Value:
        """What calling a method of an object returns, for the first name it has."""
        for name in names:
            hit = self.attribute(instance, name).hits[0]
            if hit.status == "found" and isinstance(hit.value, FunctionValue):
                return self.returned(hit.value.info, hit.value.bound)
        return Unknown(self.in_provider(instance.info.module), names[0])

    def _function_result(self, option: FunctionValue, node: ast.Call, scope: Any) -> Value:
        function = option.info
        passed = self.passed(function, option.bound, node, scope)
        if function.module.tree.package != self.provider:
            store: Dict[str, Value] = function.facts.setdefault("passed", {})  # type: ignore[assignment]
            for name, value in passed.items():
                if value != UNKNOWN:
                    store[name] = join([store[name], value]) if name in store else value
        return self.returned(function, option.bound, passed)

    def passed(self, function: FunctionInfo, bound: Optional[Value], node: ast.Call, scope: Any) -> Dict[str, Value]:
        """Parameter name -> value for the arguments of a call that are spelled out."""
        definition = function.head
        if definition is None:
            return {}
        names = [a.arg for a in definition.args.posonlyargs + definition.args.args]
        if bound is not None or (function.owner is not None and self.decorators.flavour(function) == "classmethod"):
            names = names[1:]
        found: Dict[str, Value] = {}
        for name, argument in zip(names, node.args):
            if isinstance(argument, ast.Starred):
                break
            found[name] = self.evaluate(argument, scope)
        for keyword in node.keywords:
            if keyword.arg is not None:
                found[keyword.arg] = self.evaluate(keyword.value, scope)
        return found

    def returned(
        self, function: FunctionInfo, bound: Optional[Value], arguments: Optional[Dict[str, Value]] = None
    ) -> Value:
        """The result of a function: its annotation, else its returned expressions."""
        node = function.head
        reach = self.in_provider(function.module)
        if node is None:
            return Unknown(reach, function.dotted)
        value = self._declared_result(function, bound, arguments)
        if value is not None and arguments:
            value = self.carried_through(value, arguments)
        if value == ExternalInstance("bool") and not reach:
            inferred = self._inferred_result(function, bound, arguments)
            value = inferred if isinstance(inferred, (Const, Unknown)) else value
        if value is None:
            value = self._inferred_result(function, bound, arguments)
        if value == UNKNOWN and reach:
            value = Unknown(True, "the result of %s" % function.name)
        for decorator in node.decorator_list:
            if last_name(decorator) in ("contextmanager", "asynccontextmanager"):
                return Sequence("context", None, elements(value))
        if isinstance(node, ast.AsyncFunctionDef) and not ("yield" in function.unit.text and _yields(function.node)):
            return Sequence("coroutine", None, value)
        return value

    def carried_through(self, declared: Value, arguments: Dict[str, Value]) -> Value:
        """A declared external type made precise: given an object of a class derived from it, a function most likely
        returns that.

        ``def wrap(m: nn.Module) -> nn.Module``, called with a ``Layer(nn.Module)``, gives a ``Layer``.
        """
        if not any(isinstance(o, (ExternalInstance, Sequence)) for o in options(declared)):
            return declared
        carried: List[Instance] = []
        for argument in arguments.values():
            carried.extend(self._objects_in(argument))
        return self._replaced(declared, carried) if carried else declared

    def _objects_in(self, value: Value) -> List[Instance]:
        found: List[Instance] = []
        for option in options(value):
            if isinstance(option, Instance):
                found.append(option)
            elif isinstance(option, LambdaValue):
                found.extend(
                    o for o in options(self.evaluate(option.node.body, option.scope)) if isinstance(o, Instance)
                )
            elif isinstance(option, Sequence) and option.kind != "dict":
                found.extend(o for o in options(elements(option)) if isinstance(o, Instance))
            elif isinstance(option, ClassValue):
                found.append(Instance(option.info, option.exact))
        return found

    def _replaced(self, declared: Value, carried: List[Instance]) -> Value:
        found: List[Value] = []
        for option in options(declared):
            if isinstance(option, Sequence):
                parts = tuple(self._replaced(p, carried) for p in option.parts) if option.parts is not None else None
                found.append(
                    Sequence(
                        option.kind,
                        parts,
                        self._replaced(option.each, carried) if option.each is not None else None,
                        option.keys,
                    )
                )
            elif isinstance(option, ExternalInstance) and option.dotted.rsplit(".", 1)[-1] in CONTAINERS:
                found.append(option._replace(items=join(carried)))
            elif isinstance(option, ExternalInstance):
                same: List[Value] = [c for c in carried if option.dotted in self.classes.lineage(c.info).external]
                found.extend(same or [option])
            else:
                found.append(option)
        return join(found)

    def _declared_result(
        self, function: FunctionInfo, bound: Optional[Value], arguments: Optional[Dict[str, Value]]
    ) -> Optional[Value]:
        node = function.head
        if node is None or node.returns is None:
            return None
        variables = self.annotations_variables(function)
        bindings: Dict[str, Value] = {}
        if variables and arguments:
            for argument in node.args.posonlyargs + node.args.args + node.args.kwonlyargs:
                if argument.arg in arguments:
                    self.match(argument.annotation, arguments[argument.arg], variables, bindings)
        receiver = (
            bound
            if isinstance(bound, Instance)
            else Instance(bound.info, bound.exact)
            if isinstance(bound, ClassValue)
            else None
        )
        value = self.annotation(node.returns, function.module, function.owner, bindings=bindings, receiver=receiver)
        if value == UNKNOWN or (
            all(isinstance(o, (Unknown, External)) or o == NONE for o in options(value)) and value != NONE
        ):
            return None
        if value == NONE and not isinstance(node.returns, ast.Constant):
            return None
        if (
            isinstance(value, Instance)
            and not value.exact
            and value.info.module.tree.package == self.provider
            and self.classes.is_abstract(value.info)
        ):
            return value
        return value

    def annotations_variables(self, function: FunctionInfo) -> List[str]:
        """Type variables in a function's return annotation (also those of PEP 695)."""
        if "variables" not in function.facts:
            node = function.head
            found = self.type_variables(node.returns, function.module) if node is not None else []
            found += [str(p.name) for p in getattr(node, "type_params", [])]
            function.facts["variables"] = found
        return function.facts["variables"]  # type: ignore[return-value]

    def _inferred_result(
        self, function: FunctionInfo, bound: Optional[Value], arguments: Optional[Dict[str, Value]]
    ) -> Value:
        key = id(function)
        self._returning = getattr(self, "_returning", {})
        if self._returning.get(key) or len(self._returning) > MAX_RETURNS:
            self.cut += 1
            return UNKNOWN
        memo: Dict[Any, Value] = function.facts.setdefault("returned", {})  # type: ignore[assignment]
        # Numbers and objects of other libraries tell nothing about what comes back: one case for all of them.
        arguments = {n: v for n, v in (arguments or {}).items() if not _says_little(v)}
        if len(memo) > MAX_CASES:
            arguments = {}
        case = (
            value_key(bound) if bound is not None else None,
            tuple(sorted((n, value_key(v)) for n, v in arguments.items())),
        )
        if case in memo:
            return memo[case]
        node = function.node
        if node is None:
            return UNKNOWN
        self._returning[key] = True
        try:
            scope = self.lazy_scope(function, bound, arguments)
            found: List[Value] = []
            for statement in walk_shallow(node.body):
                if isinstance(statement, ast.Return):
                    found.append(self.evaluate(statement.value, scope) if statement.value is not None else NONE)
                elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Yield):
                    found.append(Sequence("iterable", None, self.evaluate(statement.value.value, scope)))
            value = join(found) if found else NONE
        finally:
            del self._returning[key]
        memo[case] = value
        return value

    def awaited(self, value: Value) -> Value:
        """What awaiting a value gives."""
        return join(
            [
                each(o)
                if isinstance(o, Sequence) and o.kind in ("awaitable", "coroutine")
                else Unknown(reaches(o), "an awaited result")
                for o in options(value)
            ]
        )

    def entered(self, value: Value) -> Value:
        """What ``with value as x`` binds."""
        found: List[Value] = []
        for option in options(value):
            if isinstance(option, Sequence):
                found.append(each(option))
            elif isinstance(option, Instance):
                result = self.result_of_method(option, "__enter__", "__aenter__")
                inner = (
                    self.awaited(result)
                    if isinstance(result, Sequence) and result.kind in ("awaitable", "coroutine")
                    else result
                )
                found.append(
                    option
                    if isinstance(inner, Unknown) and self.classes.member(option.info, "__enter__") is None
                    else inner
                )
            else:
                found.append(Unknown(reaches(option), "a context"))
        return join(found)

    def iterated(self, value: Value) -> Value:
        """A value as something to loop over: objects with ``__iter__`` or ``__next__`` give what these return."""
        found: List[Value] = []
        for option in options(value):
            if isinstance(option, Instance) and option.items is None:
                if self.classes.is_enum(option.info):
                    found.append(option)
                    continue
                result = self.result_of_method(option, "__iter__", "__aiter__", "__getitem__")
                found.append(result if isinstance(result, (Sequence, Unknown)) else UNKNOWN)
            elif isinstance(option, ClassValue) and self.classes.is_enum(option.info):
                found.append(Sequence("list", None, Instance(option.info, True)))
            else:
                found.append(option)
        return join(found)

    def module_symbol(self, module: Module) -> Symbol:
        return Symbol("module", module.name, module=module)

    # -- functions whose meaning is known ----------------------------------------------------------------------------

    # -- signatures --------------------------------------------------------------------------------------------------


def _says_little(value: Value) -> bool:
    if isinstance(value, Const):
        return not isinstance(value.value, str)
    return isinstance(value, (Unknown, ExternalInstance))


def _yields(node: Optional[ast.AST]) -> bool:
    return node is not None and any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in ast.walk(node))
