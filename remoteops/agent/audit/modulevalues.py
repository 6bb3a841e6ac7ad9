"""Attributes of modules, and the value of a module-level name."""

from __future__ import annotations

import ast
from typing import Any, Dict, NamedTuple, Optional, Tuple

from remoteops.agent.audit.annotations import Annotations
from remoteops.agent.audit.classes import Member
from remoteops.agent.audit.index import FunctionInfo, Symbol
from remoteops.agent.audit.modules import Module
from remoteops.agent.audit.values import (
    NONE,
    UNKNOWN,
    CallableValue,
    ClassValue,
    Const,
    External,
    FunctionValue,
    LambdaValue,
    ModuleValue,
    Sequence,
    Unknown,
    Value,
    Version,
    join,
)
from remoteops.agent.audit.versions import text_method

SHALLOW = 6  # steps of evaluation below which what was cut off is not worked out again


class Hit(NamedTuple):
    """One option of a receiver, judged. ``status``: found, missing, unsure, partly (``lacking`` of ``among``
    derived classes). ``target``: the dotted place of the definition.
    """

    option: Value
    status: str
    value: Value = UNKNOWN
    target: str = ""
    reason: str = ""
    member: Optional[Member] = None
    symbol: Optional[Symbol] = None
    lacking: Tuple[str, ...] = ()
    among: int = 0


class Access(NamedTuple):
    """The whole of ``receiver.name``: the joined value and the judgement on each option (None objects left out)."""

    value: Value
    hits: Tuple[Hit, ...]


def sequence_method(option: Sequence, name: str) -> Value:
    element = option.each if option.each is not None else join(option.parts) if option.parts else UNKNOWN
    if name in ("pop", "popleft", "get", "setdefault", "__getitem__", "__next__", "result"):
        return CallableValue(join([element, NONE]) if name == "get" else element)
    if name in ("values", "copy", "__iter__", "union", "difference"):
        return CallableValue(
            Sequence("list", None if name == "values" else option.parts, element) if name == "values" else option
        )
    if name == "items":
        return CallableValue(Sequence("list", None, Sequence("tuple", (UNKNOWN, element))))
    return CallableValue(UNKNOWN)


def const_method(option: Const, name: str) -> Value:
    if isinstance(option.value, str) and name in ("lower", "upper", "strip", "lstrip", "rstrip"):
        return CallableValue(Const(getattr(option.value, name)()))
    return text_method(option, name) if isinstance(option.value, str) else CallableValue(UNKNOWN)


class ModuleValues(Annotations):
    """Names of modules as values. ``evaluate`` (an expression in a scope) comes from the class below.

    ``cut`` counts evaluations that ended early (too deep, or in a circle).
    """

    cut = 0
    _depth = 0

    def evaluate(self, node: Optional[ast.expr], scope: Any) -> Value:
        raise NotImplementedError

    def lazy_scope(
        self, function: FunctionInfo, receiver: Optional[Value] = None, arguments: Optional[Dict[str, Value]] = None
    ) -> Any:
        raise NotImplementedError

    def module_scope(self, module: Module) -> Any:
        raise NotImplementedError

    def returned(
        self, function: FunctionInfo, bound: Optional[Value], arguments: Optional[Dict[str, Value]] = None
    ) -> Value:
        raise NotImplementedError

    def _of_module(self, option: ModuleValue, name: str) -> Hit:
        symbol = self.index.lookup(option.module, name)
        target = option.module.name + "." + name
        if symbol is None and self.index.unreadable(option.module):
            return Hit(option, "unsure", Unknown(True, target), target, self.index.unreadable(option.module))
        if symbol is None:
            return Hit(option, "missing", Unknown(self.in_provider(option.module), target), target)
        reach = self.in_provider(option.module)
        value = self.of_symbol(symbol)
        if not symbol.certain:
            return Hit(option, "unsure", Unknown(reach, target), symbol.name, symbol.reason, symbol=symbol)
        return Hit(option, "found", value, symbol.name, symbol=symbol)

    def of_symbol(self, symbol: Optional[Symbol]) -> Value:
        """The value that a name at module level has."""
        if symbol is None:
            return UNKNOWN
        if symbol.alternatives:
            first = ClassValue(symbol.klass) if symbol.klass is not None else FunctionValue(symbol.function)  # type: ignore[arg-type]
            return join([first, *(self.of_symbol(other) for other in symbol.alternatives)])
        if symbol.kind == "module" and symbol.module is not None:
            return ModuleValue(symbol.module)
        if symbol.kind == "class" and symbol.klass is not None:
            return ClassValue(symbol.klass)
        if symbol.kind == "function" and symbol.function is not None:
            return FunctionValue(symbol.function)
        if symbol.kind == "external":
            return External(symbol.name)
        reach = self.in_provider(symbol.module)
        if symbol.kind == "variable" and symbol.module is not None and symbol.binding is not None:
            memo, key = symbol.module.values, (symbol.name, id(symbol.binding))
            if key not in memo:
                held, self.cut = self.cut, 0
                value = self._variable(symbol, reach)
                if self.cut and self._depth > SHALLOW:
                    self.cut += held
                    return value  # worked out too deep inside something else to be all of it
                memo[key] = value
                self.cut = held
            return memo[key]  # type: ignore[return-value]
        return Unknown(reach, symbol.name)

    def _variable(self, symbol: Symbol, reach: bool) -> Value:
        assert symbol.module is not None and symbol.binding is not None
        node = symbol.binding.node
        last = symbol.name.rsplit(".", 1)[-1]
        if last in ("__version__", "VERSION") or (last == "version" and symbol.module.name.count(".") <= 1):
            if symbol.module.name.split(".")[0] == self.provider:
                return Version(self.index.trees[self.provider].version, self.provider)
        if isinstance(node, ast.AnnAssign):
            value = self.annotation(node.annotation, symbol.module)
            if value != UNKNOWN:
                return value
        expression = getattr(node, "value", None) if symbol.binding.kind == "assign" else None
        if expression is None:
            return Unknown(reach, symbol.name)
        found = self.evaluate(expression, self.module_scope(symbol.module))
        others = [b for b in symbol.module.bindings.get(last, []) if b.kind == "assign" and b is not symbol.binding]
        if others and not isinstance(found, (ClassValue, FunctionValue)):
            scope = self.module_scope(symbol.module)
            found = join([found] + [self.evaluate(getattr(b.node, "value", None), scope) for b in others])
        if isinstance(found, LambdaValue):
            return found._replace(name=symbol.name)
        return Unknown(reach, symbol.name) if found == UNKNOWN and reach else found
