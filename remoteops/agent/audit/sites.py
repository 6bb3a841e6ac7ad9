"""A site: one place where the consumer reaches into the provider, and what was found out about it."""

from __future__ import annotations

import ast
from typing import Any, Dict, List, Optional, Tuple

from remoteops.agent.audit.callees import Callee
from remoteops.agent.audit.modules import Module
from remoteops.agent.audit.signatures import Arguments
from remoteops.agent.audit.values import Value

OK = "ok"
BREAK = "break"
RISK = "risk"
UNRESOLVED = "unresolved"
DEAD = "dead"
GUARDED = "guarded"


class Problem:
    """What is wrong at a site. ``kind`` and ``detail`` as in a finding; ``sure`` False: a risk."""

    __slots__ = ("detail", "error", "extra", "kind", "message", "now", "now_at", "sure", "was")

    def __init__(
        self,
        kind: str,
        detail: str,
        *,
        error: str,
        message: str = "",
        now: str = "",
        now_at: str = "",
        was: str = "",
        sure: bool = True,
        extra: Optional[Dict[str, Any]] = None,
    ) -> None:
        self.kind = kind
        self.detail = detail
        self.error = error
        self.message = message
        self.now = now
        self.now_at = now_at
        self.was = was
        self.sure = sure
        self.extra = extra or {}


class Site:
    """``kind``: import, call, attribute, string, override, patch. ``symbol``: where the definition stands;
    ``reached``: the
    dotted path by which the consumer comes to it. ``value``: what the expression evaluates to."""

    def __init__(
        self,
        kind: str,
        node: ast.AST,
        module: Module,
        *,
        symbol: str,
        reached: str,
        scope: str,
        function: Optional[ast.AST],
        owner: str = "",
    ) -> None:
        self.kind = kind
        self.node = node
        self.module = module
        self.symbol = symbol
        self.reached = reached
        self.scope = scope
        self.function = function
        self.owner = owner
        self.status = OK
        self.reason = ""
        self.problems: List[Problem] = []
        self.guards: Tuple[str, ...] = ()
        self.when = ""
        self.callee: Optional[Callee] = None
        self.shape: Optional[Arguments] = None
        self.receiver: Optional[Value] = None
        self.value: Optional[Value] = None
        self.statement: Optional[ast.stmt] = None
        self.replaced = False

    @property
    def file(self) -> str:
        return self.module.file

    @property
    def line(self) -> int:
        return int(getattr(self.node, "lineno", 1))

    @property
    def column(self) -> int:
        return int(getattr(self.node, "col_offset", 0))

    @property
    def end_line(self) -> int:
        return int(getattr(self.node, "end_lineno", None) or self.line)

    @property
    def end_column(self) -> int:
        return int(getattr(self.node, "end_col_offset", None) or self.column)

    @property
    def in_class(self) -> str:
        """Qualified name of the class that the site stands in, or an empty string."""
        return self.owner

    @property
    def keywords(self) -> Dict[str, ast.expr]:
        return {k.arg: k.value for k in self.node.keywords if k.arg} if isinstance(self.node, ast.Call) else {}

    @property
    def positional(self) -> List[ast.expr]:
        return list(self.node.args) if isinstance(self.node, ast.Call) else []

    def record(self) -> Dict[str, Any]:
        """The site as plain data, for ``--all``."""
        return {
            "kind": self.kind,
            "symbol": self.reached or self.symbol,
            "defined": self.symbol,
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "scope": self.scope,
            "status": self.status,
            "reason": self.reason,
        }

    def __repr__(self) -> str:
        return "<%s %s %s:%d %s>" % (self.kind, self.reached or self.symbol, self.file, self.line, self.status)
