"""Type expressions to values; the base of the evaluator's inheritance chain."""

from __future__ import annotations

import ast
import builtins
from typing import Any, Dict, List, Optional

from remoteops.agent.audit.classes import Classes
from remoteops.agent.audit.index import ClassInfo, Index, Symbol
from remoteops.agent.audit.modules import Module, last_name
from remoteops.agent.audit.values import (
    NONE,
    UNKNOWN,
    CallableValue,
    ClassValue,
    Const,
    External,
    ExternalInstance,
    Instance,
    Sequence,
    Unknown,
    Value,
    join,
    options,
)

SEQUENCES = {
    "list",
    "List",
    "set",
    "Set",
    "frozenset",
    "FrozenSet",
    "AbstractSet",
    "MutableSet",
    "Sequence",
    "MutableSequence",
    "Iterable",
    "Iterator",
    "Collection",
    "deque",
    "Deque",
    "Generator",
    "AsyncIterator",
    "AsyncIterable",
    "AsyncGenerator",
    "Reversible",
}
MAPPINGS = {"dict", "Dict", "Mapping", "MutableMapping", "defaultdict", "DefaultDict", "OrderedDict", "Counter"}
AWAITABLES = {"Awaitable", "Coroutine", "Future", "Task"}
TRANSPARENT = {"Annotated", "ClassVar", "InitVar", "Final", "Required", "NotRequired", "ReadOnly", "Unpack"}
MAX_NESTING = 12

Bindings = Dict[str, Value]


class Annotations:
    """Turns annotations into values. Names are looked up where the annotation stands."""

    def __init__(self, index: Index, classes: Classes, provider: str) -> None:
        self.index = index
        self.classes = classes
        self.provider = provider

    def in_provider(self, module: Optional[Module]) -> bool:
        return module is not None and module.tree.package == self.provider

    def annotation(
        self,
        node: Optional[ast.expr],
        module: Module,
        owner: Optional[ClassInfo] = None,
        *,
        bindings: Optional[Bindings] = None,
        receiver: Optional[Value] = None,
        depth: int = 0,
    ) -> Value:
        """The value that a type expression describes; UNKNOWN where it says nothing (``Any``, an unresolved name)."""
        if node is None or depth > MAX_NESTING:
            return UNKNOWN
        more: Dict[str, Any] = {"bindings": bindings, "receiver": receiver, "depth": depth + 1}
        if isinstance(node, ast.Constant):
            if node.value is None:
                return NONE
            if isinstance(node.value, str):
                try:
                    inner = ast.parse(node.value.strip(), mode="eval").body
                except (SyntaxError, ValueError, RecursionError):
                    return UNKNOWN
                return self.annotation(inner, module, owner, **more)
            return UNKNOWN
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return join(
                [self.annotation(node.left, module, owner, **more), self.annotation(node.right, module, owner, **more)]
            )
        if isinstance(node, ast.Subscript):
            return self._subscript(node, module, owner, more)
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self._name(node, module, owner, more)
        return UNKNOWN

    def _subscript(
        self, node: ast.Subscript, module: Module, owner: Optional[ClassInfo], more: Dict[str, Any]
    ) -> Value:
        name = last_name(node.value)
        inner = node.slice
        if inner.__class__.__name__ == "Index":  # Python 3.8 trees
            inner = inner.value  # type: ignore[attr-defined]
        parts: List[ast.expr] = list(inner.elts) if isinstance(inner, ast.Tuple) else [inner]

        def of(part: ast.expr) -> Value:
            return self.annotation(part, module, owner, **more)

        if name == "Optional":
            return join([of(parts[0]), NONE])
        if name == "Union":
            return join([of(p) for p in parts])
        if name in TRANSPARENT:
            return of(parts[0])
        if name in ("tuple", "Tuple"):
            if len(parts) == 2 and isinstance(parts[1], ast.Constant) and parts[1].value is Ellipsis:
                return Sequence("tuple", None, of(parts[0]))
            return Sequence("tuple", tuple(of(p) for p in parts))
        if name in ("type", "Type"):
            described = of(parts[0])
            return join(
                [
                    ClassValue(o.info, False)
                    if isinstance(o, Instance)
                    else External(o.dotted, o.reach)
                    if isinstance(o, ExternalInstance)
                    else UNKNOWN
                    for o in options(described)
                ]
            )
        if name == "Literal":
            return join([Const(p.value) for p in parts if isinstance(p, ast.Constant)])
        if name == "Callable":
            return CallableValue(of(parts[-1]))
        if name in AWAITABLES:
            return Sequence("awaitable", None, of(parts[-1]))
        symbol = self.classes.symbol_in(module, node.value, owner)
        if symbol is not None and symbol.kind == "class" and symbol.klass is not None:
            return Instance(symbol.klass)
        if name in SEQUENCES:
            return Sequence("list" if name in ("list", "List") else "iterable", None, of(parts[0]))
        if name in MAPPINGS:
            return Sequence("dict", None, of(parts[-1]) if len(parts) > 1 else UNKNOWN)
        if name in ("TypeGuard", "TypeIs"):
            return ExternalInstance("bool")
        if name in ("AbstractContextManager", "ContextManager", "AbstractAsyncContextManager", "AsyncContextManager"):
            return Sequence("context", None, of(parts[0]))
        if symbol is not None and symbol.kind == "external":
            return ExternalInstance(symbol.name)
        return UNKNOWN

    def _name(self, node: ast.expr, module: Module, owner: Optional[ClassInfo], more: Dict[str, Any]) -> Value:
        name = last_name(node)
        bindings: Optional[Bindings] = more["bindings"]
        if isinstance(node, ast.Name) and bindings and name in bindings:
            return bindings[name]
        if name == "Self" and (owner is not None or more["receiver"] is not None):
            return (
                more["receiver"] if more["receiver"] is not None else Instance(owner) if owner is not None else UNKNOWN
            )
        symbol = self.classes.symbol_in(module, node, owner)
        return self.described(symbol, more)

    def described(self, symbol: Optional[Symbol], more: Dict[str, Any]) -> Value:
        """An object of the type that a symbol names."""
        if symbol is None:
            return UNKNOWN
        if symbol.kind == "class" and symbol.klass is not None:
            typed = any(name.endswith(".TypedDict") for name in self.classes.lineage(symbol.klass).external)
            return Sequence("dict") if typed else Instance(symbol.klass)
        if symbol.kind == "external":
            last = symbol.name.rsplit(".", 1)[-1]
            if last in ("Any", "object", "TypeVar", "Incomplete"):
                return UNKNOWN
            if symbol.name in ("None", "types.NoneType"):
                return NONE
            if last in SEQUENCES | MAPPINGS | {"tuple", "Tuple"}:
                return Sequence(
                    "dict" if last in MAPPINGS else "tuple" if last in ("tuple", "Tuple") else "list", None, None
                )
            if last == "Callable":
                return CallableValue(UNKNOWN)
            return ExternalInstance(symbol.name)
        if symbol.kind == "variable" and symbol.binding is not None and symbol.module is not None:
            return self._alias(symbol, more)
        return UNKNOWN

    def _alias(self, symbol: Symbol, more: Dict[str, Any]) -> Value:
        assert symbol.binding is not None and symbol.module is not None
        value = getattr(symbol.binding.node, "value", None)
        if isinstance(value, ast.Call):
            maker = last_name(value.func)
            if maker == "TypeVar":
                bound = next((k.value for k in value.keywords if k.arg == "bound"), None)
                if bound is not None:
                    return self.annotation(bound, symbol.module, None, **more)
                return (
                    join([self.annotation(a, symbol.module, None, **more) for a in value.args[1:]])
                    if len(value.args) > 1
                    else UNKNOWN
                )
            if maker == "NewType" and len(value.args) > 1:
                return self.annotation(value.args[1], symbol.module, None, **more)
            return UNKNOWN
        if isinstance(value, (ast.Subscript, ast.BinOp, ast.Name, ast.Attribute)) or (
            isinstance(value, ast.Constant) and isinstance(value.value, str)
        ):
            return self.annotation(value, symbol.module, None, **more)
        return UNKNOWN

    def type_variables(self, node: Optional[ast.expr], module: Module) -> List[str]:
        """Names in an annotation that are type variables."""
        found: List[str] = []
        for inner in ast.walk(node) if node is not None else []:
            if isinstance(inner, ast.Name) and not hasattr(builtins, inner.id):
                symbol = self.index.lookup(module, inner.id, typing=True)
                value = (
                    getattr(symbol.binding.node, "value", None)
                    if symbol is not None and symbol.kind == "variable" and symbol.binding
                    else None
                )
                if isinstance(value, ast.Call) and last_name(value.func) == "TypeVar":
                    found.append(inner.id)
        return found

    def match(self, pattern: Optional[ast.expr], value: Value, names: List[str], into: Bindings) -> None:
        """Binds type variables of a parameter's annotation to an argument: ``T`` and ``type[T]``, ``list[T]``,
        ``Callable[..., T]``.
        """
        if pattern is None:
            return
        if isinstance(pattern, ast.Name) and pattern.id in names:
            if not (isinstance(value, Unknown) and not value.reach):
                into.setdefault(pattern.id, value)
            return
        if isinstance(pattern, ast.BinOp):
            self.match(pattern.left, value, names, into)
            self.match(pattern.right, value, names, into)
        if isinstance(pattern, ast.Subscript):
            inner: Any = pattern.slice
            outer = last_name(pattern.value)
            if outer in ("type", "Type") and isinstance(value, ClassValue):
                self.match(inner, Instance(value.info, value.exact), names, into)
            elif outer in SEQUENCES and isinstance(value, Sequence):
                self.match(inner, value.each or (join(value.parts) if value.parts else UNKNOWN), names, into)
            elif outer in ("Optional", "Annotated"):
                self.match(inner.elts[0] if isinstance(inner, ast.Tuple) else inner, value, names, into)
            elif outer == "Callable" and isinstance(inner, ast.Tuple) and isinstance(value, CallableValue):
                self.match(inner.elts[-1], value.result, names, into)
