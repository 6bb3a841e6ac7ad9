"""Calls of Python's own functions and of a few others whose meaning is known."""

from __future__ import annotations

import ast
from typing import Any, List

from remoteops.agent.audit.attributes import Attributes
from remoteops.agent.audit.functional import made_class, makes_class
from remoteops.agent.audit.values import (
    UNKNOWN,
    BoundMethod,
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
    elements,
    join,
    options,
    reaches,
)

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


class Known(Attributes):
    """Results of external calls. What needs the following of calls comes from the class below."""

    def call(self, value: Value, node: ast.Call, scope: Any) -> Value:
        raise NotImplementedError

    def awaited(self, value: Value) -> Value:
        raise NotImplementedError

    def iterated(self, value: Value) -> Value:
        raise NotImplementedError

    def _external_result(self, option: External, node: ast.Call, scope: Any) -> Value:
        name = option.dotted.rsplit(".", 1)[-1]
        arguments = [self.evaluate(a.value if isinstance(a, ast.Starred) else a, scope) for a in node.args]
        first = arguments[0] if arguments else UNKNOWN
        if makes_class(option.dotted, node):
            made = made_class(option.dotted, node, scope.module)
            reach = self.in_provider(scope.module)
            return ClassValue(made) if made is not None else Unknown(reach, "a class made by %s" % name)
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
            dotted = first.value.split(".")[0] if option.dotted == "__import__" else first.value
            target = self.index.module(dotted) if self.index.knows(dotted) else None
            return ModuleValue(target) if target is not None else External(dotted)
        if name in ("version", "get_distribution") and isinstance(first, Const) and isinstance(first.value, str):
            return self._version_of(first.value)
        if name in ("parse", "Version", "LooseVersion", "StrictVersion", "parse_version", "get_version") and isinstance(
            first, (Version, Const)
        ):
            return first
        if name in CONTAINERS:
            return ExternalInstance(option.dotted, option.reach, elements(join(arguments)) if arguments else None)
        if option.dotted == "dict" and not node.args and node.keywords and all(k.arg for k in node.keywords):
            given = tuple(self.evaluate(k.value, scope) for k in node.keywords)
            return Sequence("dict", given, None, tuple(k.arg for k in node.keywords))
        if name in ("dict", "defaultdict", "OrderedDict"):
            return first if isinstance(first, Sequence) else Sequence("dict", None, None)
        if option.dotted == "int" and isinstance(first, Const) and str(first.value).isdigit():
            return Const(int(first.value))
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
        if isinstance(value, LambdaValue):
            return self.in_provider(value.scope.module)
        return reaches(value)
