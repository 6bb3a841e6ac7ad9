"""The parameters that a call must fit."""

from __future__ import annotations

import ast
from typing import Any, List, NamedTuple, Optional, Set, Tuple

from remoteops.agent.audit.calls import Calls
from remoteops.agent.audit.index import FunctionInfo
from remoteops.agent.audit.signatures import Arguments, Signature, arguments_of, from_arguments
from remoteops.agent.audit.values import (
    BoundMethod,
    ClassValue,
    FunctionValue,
    Instance,
    LambdaValue,
    PartialValue,
    Sequence,
    Value,
    options,
)


class Callee(NamedTuple):
    """A callable as a call meets it: its parameters (None: not known, ``reason`` says why) and where they are
    written.
    """

    signature: Optional[Signature]
    symbol: str
    reason: str = ""
    file: str = ""
    line: int = 0
    function: Optional[FunctionInfo] = None
    provider: bool = False
    extra: Tuple[int, Tuple[str, ...]] = (0, ())
    more: Tuple[Signature, ...] = ()


class Callees(Calls):
    """Signatures of values that are called."""

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
            module, line = option.scope.module, int(option.node.lineno)
            name = option.name or module.name + ".<lambda>"
            reach = self.in_provider(module)
            return Callee(from_arguments(option.node.args), name, "", module.file, line, provider=reach)
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
        """The arguments of a call, with those a partial has filled already and ``**kwargs`` of known keys spelled
        out.
        """
        shape = arguments_of(node)
        count, names = callee.extra
        if shape.double_star:
            shape = self._keywords_known(node, shape, scope)
        if shape.star:
            shape = self._places_known(node, shape, scope)
        fresh = tuple(n for n in names if n not in shape.keywords)
        return shape._replace(positional=shape.positional + count, keywords=shape.keywords + fresh)

    def _keywords_known(self, node: ast.Call, shape: Arguments, scope: Any) -> Arguments:
        """``**x`` spelled out, where the keys of every x are known."""
        always: List[str] = []
        sometimes: List[str] = []
        for keyword in node.keywords:
            passed = keyword.value
            if keyword.arg is not None or (isinstance(passed, ast.Dict) and all(passed.keys)):
                continue
            made = isinstance(passed, ast.Call) and isinstance(passed.func, ast.Name) and passed.func.id == "dict"
            if not made and not (isinstance(passed, ast.Name) and self.content_known(passed, scope)):
                return shape
            tables = [_keys(o) for o in options(self.evaluate(passed, scope))]
            keys: List[Set[str]] = [set(t) for t in tables if t is not None]
            if len(keys) != len(tables):
                return shape
            common = keys[0].intersection(*keys[1:])
            always += sorted(common)
            sometimes += sorted(keys[0].union(*keys[1:]) - common)
        return shape._replace(double_star=False, keywords=shape.keywords + tuple(always), maybe=tuple(sometimes))

    def _places_known(self, node: ast.Call, shape: Arguments, scope: Any) -> Arguments:
        """``*x`` counted, where every x is a tuple or list of known length."""
        count = 0
        for argument in node.args:
            if not isinstance(argument, ast.Starred):
                count += 1
                continue
            value = self.evaluate(argument.value, scope)
            if not isinstance(value, Sequence) or value.parts is None or value.kind not in ("tuple", "list"):
                return shape
            passed = argument.value
            named = isinstance(passed, ast.Name) and self.content_known(passed, scope)
            if value.kind == "list" and not named and not isinstance(passed, ast.List):
                return shape
            count += len(value.parts)
        return shape._replace(star=False, positional=count)

    def content_known(self, node: ast.Name, scope: Any) -> bool:
        """Whether nothing unseen may have changed the dict or list of that name."""
        return False


def _keys(value: Value) -> Optional[Tuple[str, ...]]:
    if not isinstance(value, Sequence) or value.kind != "dict" or value.keys is None:
        return None
    return tuple(str(k) for k in value.keys) if all(isinstance(k, str) for k in value.keys) else None
