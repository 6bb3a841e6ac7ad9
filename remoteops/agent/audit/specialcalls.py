"""Calls of Python's own functions that reach into the provider: ``getattr(lib, "x")``, ``import_module("lib.x")``,
``dataclasses.replace(obj, x=1)``.
"""

from __future__ import annotations

import ast
from typing import Any, List, Optional, Tuple

from remoteops.agent.audit import sites as S
from remoteops.agent.audit.callees import Callee
from remoteops.agent.audit.callsites import CallSites, call_problem
from remoteops.agent.audit.flow import FlowScope
from remoteops.agent.audit.index import ClassInfo
from remoteops.agent.audit.signatures import (
    KEYWORD_ONLY,
    POSITIONAL,
    POSITIONAL_ONLY,
    VAR_POSITIONAL,
    Arguments,
    Signature,
    arguments_of,
    bind,
)
from remoteops.agent.audit.values import Const, External, Instance, Value, options

IMPORTERS = ("importlib.import_module", "__import__")
REPLACERS = ("dataclasses.replace", "copy.replace", "attr.evolve", "attrs.evolve")


class SpecialCalls(CallSites):
    """Judges what such a call looks up, as if it were written out."""

    def looked_up(
        self, node: ast.expr, receiver: ast.expr, name: str, base: Value, scope: FlowScope
    ) -> Optional[Value]:
        """Judges ``receiver.name`` at a node."""
        raise NotImplementedError

    def on_call(self, node: ast.Call, value: Value, scope: FlowScope) -> None:
        super().on_call(node, value, scope)
        if isinstance(value, External) and node.args:
            if value.dotted == "getattr" and len(node.args) == 2 and not node.keywords:
                self._getattr_site(node, scope)
            elif value.dotted == "len":
                self.on_operation(node, self.quiet(node.args[0], scope), ("__len__",), scope)
            elif value.dotted in IMPORTERS:
                self._import_site(node, scope)
            elif value.dotted == "functools.partial":
                self._partial_site(node, scope)
            elif value.dotted in REPLACERS and node.keywords:
                self._replace_site(node, self.quiet(node.args[0], scope), scope, value.dotted)
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "_replace" and node.keywords:
            self._replace_site(node, self.quiet(node.func.value, scope), scope, "_replace")

    def _getattr_site(self, node: ast.Call, scope: FlowScope) -> None:
        base, name = self.quiet(node.args[0], scope), self.quiet(node.args[1], scope)
        texts = [o.value for o in options(name) if isinstance(o, Const) and isinstance(o.value, str)]
        if len(texts) == 1 == len(options(name)):
            self.looked_up(node, node.args[0], texts[0], base, scope)
        elif any(self.touches(o) for o in options(base)):
            reached = self.path_to(options(base)[0]) + ".?"
            site = self.site("attribute", node, scope, symbol=reached, reached=reached)
            self.settle(site, S.UNRESOLVED, "getattr with a name that is worked out at run time")

    def _import_site(self, node: ast.Call, scope: FlowScope) -> None:
        name = self.quiet(node.args[0], scope)
        text = name.value if isinstance(name, Const) and isinstance(name.value, str) else ""
        begins = text or _beginning(node.args[0])
        if begins.split(".")[0] != self.provider or scope.module.tree.package == self.provider:
            return
        site = self.site("import", node, scope, symbol=begins, reached=begins)
        if not text:
            self.settle(site, S.UNRESOLVED, "a module whose name is worked out at run time")
        elif not self.index.exists(text):
            self._import_failed(site, text, text, scope)

    def _partial_site(self, node: ast.Call, scope: FlowScope) -> None:
        """What ``partial(f, x=1)`` fills in already: it fails as soon as it is called."""
        target = self.quiet(node.args[0], scope)
        callee = self.provider_callee(target)
        if callee is None or callee.signature is None or callee.signature.doubt:
            return
        shape = arguments_of(node)
        shape = shape._replace(positional=max(shape.positional - 1, 0))
        filled = [p for p in bind(callee.signature, shape).problems if p.kind != "missing-required"]
        site = self.site("call", node, scope, symbol=callee.symbol, reached=callee.symbol, extra="partial")
        site.callee, site.shape = callee, shape
        if filled:
            self.settle(
                site, S.RISK, "fails when it is called", tuple(call_problem(callee, p, False) for p in filled)
            )

    def _replace_site(self, node: ast.Call, base: Value, scope: FlowScope, through: str) -> None:
        """``replace(obj, x=1)`` calls the constructor with every field: what it does not take is an error."""
        objects = [o for o in options(base) if isinstance(o, Instance) and self.in_provider(o.info.module)]
        wanted = ("tuple",) if through == "_replace" else ("dataclass", "pydantic", "attrs")
        if not objects or len(objects) != len(options(base)):
            return
        option = objects[0]
        if self.constructors.family(option.info) not in wanted:
            return
        made = self.constructors.of(option.info)
        symbol = option.info.dotted
        site = self.site("call", node, scope, symbol=symbol, reached=self.path_to(option), extra=through)
        if made.signature is None:
            return self.settle(site, S.UNRESOLVED, "its constructor cannot be parsed")
        shape = arguments_of(node)._replace(positional=0)
        signature = _all_optional(made.signature)
        outcome = bind(signature, shape)
        callee = Callee(signature, symbol, "", made.where.module.file, made.line, provider=True)
        site.callee, site.shape = callee, shape
        if outcome.fits:
            status = S.UNRESOLVED if shape.double_star else S.OK
            self.settle(site, status, "keywords that are not known are passed" if shape.double_star else "")
        elif signature.doubt or (not option.exact and self._taken_below(option.info, shape)):
            self.settle(site, S.UNRESOLVED, signature.doubt or "a class derived from %s takes it" % option.info.name)
        else:
            problems = tuple(call_problem(callee, p, len(objects) == 1) for p in outcome.problems)
            self.settle(site, S.BREAK if len(objects) == 1 else S.RISK, "", problems)
        return None

    def _taken_below(self, info: ClassInfo, shape: Arguments) -> bool:
        below = self.descend(info) if self.descend is not None else []
        signatures = [self.constructors.of(k).signature for k in below]
        return any(s is not None and bind(_all_optional(s), shape).fits for s in signatures)


def _all_optional(signature: Signature) -> Signature:
    """A constructor's parameters as ``replace`` passes them: by keyword, those left out taken from the object."""
    parameters: List[Any] = []
    for parameter in signature.parameters:
        if parameter.kind in (POSITIONAL, POSITIONAL_ONLY, KEYWORD_ONLY):
            parameters.append(parameter._replace(kind=KEYWORD_ONLY, default=parameter.default or "..."))
        elif parameter.kind != VAR_POSITIONAL:
            parameters.append(parameter)
    found: Tuple[Any, ...] = tuple(parameters)
    return signature._replace(parameters=found)


def _beginning(node: ast.expr) -> str:
    """The literal text before the first computed part of ``f"lib.{name}"`` and ``"lib." + name``."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mod)):
        return _beginning(node.left)
    if isinstance(node, ast.JoinedStr) and node.values:
        return _beginning(node.values[0])
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
