"""What a call returns: annotations, and where they say nothing, the returned expressions."""

from __future__ import annotations

import ast
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from remoteops.agent.audit.attributes import Attributes
from remoteops.agent.audit.index import FunctionInfo, Symbol
from remoteops.agent.audit.modules import Module, last_name
from remoteops.agent.audit.signatures import Arguments, Signature, arguments_of, from_arguments
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
    ModuleValue,
    PartialValue,
    Sequence,
    SuperValue,
    Unknown,
    Value,
    Version,
    each,
    elements,
    join,
    options,
    reaches,
)
from remoteops.agent.audit.values import key as value_key

PASS_THROUGH = {
    "list",
    "tuple",
    "sorted",
    "reversed",
    "iter",
    "set",
    "frozenset",
    "islice",
    "chain",
    "cycle",
    "deque",
    "tqdm",
    "track",
    "shuffle",
    "copy",
    "deepcopy",
}
CONTAINERS = {"ModuleList", "Sequential", "ParameterList"}
MAX_RETURNS = 5


class Callee(NamedTuple):
    """A callable as a call meets it: its parameters (None: not known, ``reason`` says why) and where they are written."""

    signature: Optional[Signature]
    symbol: str
    reason: str = ""
    file: str = ""
    line: int = 0
    function: Optional[FunctionInfo] = None
    provider: bool = False
    extra: Tuple[int, Tuple[str, ...]] = (0, ())
    more: Tuple[Signature, ...] = ()


class Calls(Attributes):
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
            return UNKNOWN
        if isinstance(option, CallableValue):
            return option.result
        if isinstance(option, LambdaValue):
            return self.evaluate(option.node.body, option.scope)
        if isinstance(option, External):
            return self._external_result(option, node, scope)
        return Unknown(reaches(option), "the result of a call that was not followed")

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
            return Sequence("awaitable", None, value)
        return value

    def carried_through(self, declared: Value, arguments: Dict[str, Value]) -> Value:
        """A declared external type made precise: given an object of a class derived from it, a function most likely returns that.

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
                same = [c for c in carried if option.dotted in self.classes.lineage(c.info).external]
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
            return UNKNOWN
        memo: Dict[Any, Value] = function.facts.setdefault("returned", {})  # type: ignore[assignment]
        case = (
            value_key(bound) if bound is not None else None,
            tuple(sorted((n, value_key(v)) for n, v in (arguments or {}).items())),
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
                if isinstance(o, Sequence) and o.kind == "awaitable"
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
                inner = self.awaited(result) if isinstance(result, Sequence) and result.kind == "awaitable" else result
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

    def _external_result(self, option: External, node: ast.Call, scope: Any) -> Value:
        name = option.dotted.rsplit(".", 1)[-1]
        arguments = [self.evaluate(a.value if isinstance(a, ast.Starred) else a, scope) for a in node.args]
        first = arguments[0] if arguments else UNKNOWN
        if option.dotted == "super":
            return self._super(scope, arguments)
        if option.dotted == "getattr" and len(node.args) >= 2:
            return self._getattr(node, first, arguments)
        if option.dotted == "type" and len(arguments) == 1:
            return join(
                [
                    ClassValue(o.info, o.exact) if isinstance(o, Instance) else Unknown(reaches(o), "a type")
                    for o in options(first)
                ]
            )
        if name in PASS_THROUGH and arguments:
            if name in ("copy", "deepcopy"):
                return first
            value = elements(self.iterated(first))
            if name == "chain" and len(arguments) > 1:
                value = join([elements(self.iterated(a)) for a in arguments])
            return Sequence("list", None, value)
        if name in ("enumerate", "zip"):
            parts = [elements(self.iterated(a)) for a in arguments]
            return Sequence(
                "list",
                None,
                Sequence(
                    "tuple",
                    (ExternalInstance("int"), parts[0] if parts else UNKNOWN) if name == "enumerate" else tuple(parts),
                ),
            )
        if name in ("next", "anext", "min", "max") and len(arguments) == 1:
            return elements(self.iterated(first))
        if (name == "run" and option.dotted.startswith("asyncio")) or name in (
            "wait_for",
            "create_task",
            "ensure_future",
            "shield",
        ):
            result = self.awaited(first)
            return result if name == "run" else Sequence("awaitable", None, result)
        if name == "gather":
            return Sequence("awaitable", None, Sequence("list", tuple(self.awaited(a) for a in arguments)))
        if name == "map" and len(arguments) > 1:
            return Sequence("list", None, self.call(first, ast.Call(func=node.func, args=[], keywords=[]), scope))
        if option.dotted in ("typing.cast", "cast", "typing_extensions.cast") and len(arguments) == 2:
            declared = self.annotation(node.args[0], scope.module)
            return declared if declared != UNKNOWN else arguments[1]
        if option.dotted in ("functools.partial", "functools.partialmethod") and arguments:
            keywords = tuple(k.arg for k in node.keywords if k.arg)
            hidden = any(k.arg is None for k in node.keywords) or any(isinstance(a, ast.Starred) for a in node.args)
            return join([PartialValue(o, len(node.args) - 1, keywords, hidden) for o in options(first)])
        if option.dotted == "types.MethodType" and len(arguments) == 2:
            return BoundMethod(first, arguments[1])
        if (
            option.dotted in ("importlib.import_module", "import_module", "__import__")
            and isinstance(first, Const)
            and isinstance(first.value, str)
        ):
            target = self.index.module(first.value) if self.index.knows(first.value) else None
            return ModuleValue(target) if target is not None else External(first.value)
        if name in ("version", "get_distribution") and isinstance(first, Const) and isinstance(first.value, str):
            return self._version_of(first.value)
        if name in ("parse", "Version", "LooseVersion", "StrictVersion", "parse_version", "get_version") and isinstance(
            first, (Version, Const)
        ):
            return first
        if name in CONTAINERS:
            return ExternalInstance(option.dotted, option.reach, elements(join(arguments)) if arguments else None)
        if name in ("dict", "defaultdict", "OrderedDict"):
            return first if isinstance(first, Sequence) else Sequence("dict", None, None)
        if option.dotted in ("property",) and arguments:
            return UNKNOWN
        if name[:1].isupper() and not option.reach:
            return ExternalInstance(option.dotted)
        return Unknown(option.reach, "the result of %s" % option.dotted)

    def _version_of(self, distribution: str) -> Value:
        tree = self.index.trees[self.provider]
        same = distribution.lower().replace("-", "_") in (
            self.provider.lower(),
            (tree.distribution or "").lower().replace("-", "_"),
        )
        return Version(tree.version, self.provider) if same else Version(None, distribution)

    def _super(self, scope: Any, arguments: List[Value]) -> Value:
        if len(arguments) == 2 and isinstance(arguments[0], ClassValue):
            return SuperValue(arguments[0].info, arguments[1])
        at = scope
        while at is not None and at.owner is None:
            at = at.outer
        if at is None or at.owner is None:
            return UNKNOWN
        function = at.function
        static = function is not None and (
            self.decorators.flavour(function) == "classmethod" or function.name == "__new__"
        )
        return SuperValue(at.owner, ClassValue(at.owner, False) if static else at.receiver or Instance(at.owner))

    def _getattr(self, node: ast.Call, first: Value, arguments: List[Value]) -> Value:
        name = arguments[1]
        if isinstance(name, Const) and isinstance(name.value, str):
            access = self.attribute(first, name.value)
            found = [h.value for h in access.hits if h.status != "missing"]
            return join(found + arguments[2:]) if found or len(arguments) > 2 else Unknown(reaches(first), name.value)
        reach = any(self.touches(o) for o in options(first))
        return Unknown(reach, "getattr with a computed name")

    def touches(self, value: Value) -> bool:
        """Whether an option belongs to the provider."""
        if isinstance(value, (Instance, ClassValue, FunctionValue, SuperValue)):
            return self.in_provider(value.info.module)
        if isinstance(value, ModuleValue):
            return self.in_provider(value.module)
        if isinstance(value, (PartialValue,)):
            return self.touches(value.target)
        if isinstance(value, BoundMethod):
            return self.touches(value.function)
        return reaches(value)

    # -- signatures --------------------------------------------------------------------------------------------------

    def callee(self, option: Value) -> Optional[Callee]:
        """The parameters that a call to this value must fit; None for values that say nothing."""
        if isinstance(option, FunctionValue):
            return self._function_callee(option)
        if isinstance(option, ClassValue):
            made = self.constructors.of(option.info)
            reach = self.in_provider(option.info.module)
            symbol = made.where.dotted + "." + made.name if made.name in ("__init__", "__new__") else option.info.dotted
            if made.name in ("__init__", "__new__") and self.in_provider(option.info.module):
                symbol = option.info.dotted + "." + made.name
            signature = made.signature
            if signature is not None and not option.exact:
                signature = signature._replace(doubt=signature.doubt or "a subclass may be called")
            return Callee(
                signature,
                symbol,
                "" if signature else "its constructor cannot be parsed",
                made.where.module.file,
                made.line,
                provider=reach,
            )
        if isinstance(option, Instance):
            for name in ("__call__", "forward"):
                hit = self.attribute(option, name).hits[0]
                if hit.status == "found" and isinstance(hit.value, FunctionValue):
                    if name == "__call__" or any("nn." in b for b in self.classes.lineage(option.info).external):
                        return self._function_callee(hit.value)
            return None
        if isinstance(option, PartialValue):
            inner = self.callee(option.target)
            if inner is None or inner.signature is None:
                return inner
            count, names = inner.extra
            doubt = "partial with unknown arguments" if option.open else inner.signature.doubt
            return inner._replace(
                extra=(count + option.positional, names + option.keywords),
                signature=inner.signature._replace(doubt=doubt),
            )
        if isinstance(option, BoundMethod):
            inner = self.callee(option.function)
            return (
                inner._replace(signature=inner.signature.without_first())
                if inner is not None and inner.signature is not None
                else inner
            )
        if isinstance(option, LambdaValue):
            return Callee(from_arguments(option.node.args), "<lambda>")
        return None

    def _function_callee(self, option: FunctionValue) -> Callee:
        function = option.info
        signature = self.decorators.signature(function)
        reach = self.in_provider(function.module)
        place = (function.module.file, function.unit.line)
        if signature is None:
            return Callee(None, function.dotted, "it cannot be parsed", place[0], place[1], function, reach)
        if option.bound is not None:
            signature = signature.without_first()
        symbol = function.dotted
        receiver = option.bound
        if (
            isinstance(receiver, (Instance, ClassValue))
            and function.owner is not None
            and self.in_provider(receiver.info.module)
        ):
            symbol = receiver.info.dotted + "." + function.name
        return Callee(signature, symbol, "", place[0], place[1], function, reach)

    def shape(self, node: ast.Call, callee: Callee, scope: Any) -> Arguments:
        """The arguments of a call, with those a partial has filled already and ``**kwargs`` of known keys spelled out."""
        shape = arguments_of(node)
        count, names = callee.extra
        if shape.double_star:
            keys: List[str] = []
            for keyword in node.keywords:
                if keyword.arg is None and not isinstance(keyword.value, ast.Dict):
                    value = self.evaluate(keyword.value, scope)
                    if not (
                        isinstance(value, Sequence)
                        and value.keys is not None
                        and all(isinstance(k, str) for k in value.keys)
                    ):
                        break
                    keys.extend(str(k) for k in value.keys)
                elif keyword.arg is None:
                    break
            else:
                if not any(isinstance(k.value, ast.Name) and k.arg is None for k in node.keywords):
                    shape = shape._replace(double_star=False, keywords=shape.keywords + tuple(keys))
        fresh = tuple(n for n in names if n not in shape.keywords)
        return shape._replace(positional=shape.positional + count, keywords=shape.keywords + fresh)


def _yields(node: Optional[ast.AST]) -> bool:
    return node is not None and any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in ast.walk(node))
