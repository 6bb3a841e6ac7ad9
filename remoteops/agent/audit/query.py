"""What a finished walk knows, for the layers that judge meaning: sites, trees, and questions about both."""

from __future__ import annotations

import ast
import fnmatch
import hashlib
import re
from typing import Any, Dict, List, Optional, Set

from remoteops.agent.audit import findings
from remoteops.agent.audit import sites as S
from remoteops.agent.audit.callees import Callee
from remoteops.agent.audit.index import ClassInfo, Index
from remoteops.agent.audit.modules import Module
from remoteops.agent.audit.moved import Moved
from remoteops.agent.audit.packages import Tree
from remoteops.agent.audit.record import Recorder
from remoteops.agent.audit.sites import Site
from remoteops.agent.audit.values import ClassValue, FunctionValue, Instance


class Context:
    """``sites`` in source order; ``undecided`` and ``extra`` are filled by later layers (entries of
    ``unresolved``, keys of the document).
    """

    def __init__(
        self,
        request: Dict[str, Any],
        index: Index,
        recorder: Recorder,
        consumer: Tree,
        provider: Tree,
        modules: List[Module],
        baseline: Optional[Recorder] = None,
    ) -> None:
        self.request = request
        self.index = index
        self.recorder = recorder
        self.consumer = consumer
        self.provider = provider
        self.modules = modules
        self.sites: List[Site] = sorted(recorder.sites.values(), key=lambda s: (s.file, s.line, s.column))
        self.undecided: List[Dict[str, Any]] = []
        self.extra: Dict[str, Any] = {}
        self.moved = Moved(recorder, baseline)
        self._start: Optional[Set[str]] = None

    @property
    def reached_at_start(self) -> Set[str]:
        """Qualified names of methods that constructors of their class call (directly or through one another)."""
        if self._start is None:
            self._start = _called_by_constructors(self.modules)
        return self._start

    def unresolved_files(self) -> List[Dict[str, Any]]:
        """Entries for files of either side that could not be read whole and were needed."""
        found: List[Dict[str, Any]] = []
        for module in self.modules:
            if module.opaque:
                found.append(
                    {"file": module.file, "line": 1, "symbol": module.name, "reason": module.opaque, "scope": ""}
                )
            for line, message in module.source.errors:
                found.append({"file": module.file, "line": line, "symbol": module.name, "reason": message, "scope": ""})
        return found

    def contract_modules(self) -> List[Module]:
        """Every module of the consumer: contracts may be about text that names the provider in no import."""
        loaded = [self.index.module(name) for name, _path in self.consumer.files()]
        return [m for m in loaded if m is not None]

    def file_hashes(self) -> Dict[str, str]:
        """sha256 of every consumer file that holds a site, by path relative to the folder that holds the package."""
        paths = {s.file: s.module.path for s in self.sites}
        return {
            file: hashlib.sha256(self.index.data(self.consumer, path)).hexdigest()
            for file, path in sorted(paths.items())
        }

    def calls(self, pattern: str = "*") -> List[Site]:
        """Call sites whose definition or reached path matches a file-name pattern."""
        return [
            s
            for s in self.sites
            if s.kind == "call"
            and s.status != S.DEAD
            and (fnmatch.fnmatch(s.symbol, pattern) or fnmatch.fnmatch(s.reached, pattern))
        ]

    def passes(self, site: Site, name: str) -> Optional[ast.expr]:
        """The expression that a call passes for a parameter, by keyword or by place."""
        if name in site.keywords:
            return site.keywords[name]
        signature = site.callee.signature if site.callee is not None else None
        places = (
            [p.name for p in signature.parameters if p.kind.startswith("positional")] if signature is not None else []
        )
        arguments = site.positional
        at = places.index(name) if name in places else -1
        return arguments[at] if 0 <= at < len(arguments) else None

    def when(self, site: Site) -> str:
        return findings.when(site, self)

    def finding(self, site: Site, **fields: Any) -> Dict[str, Any]:
        """A finding at a site with all its keys (see ``findings.make``)."""
        fields.setdefault("kind", "behaviour")
        fields.setdefault("confidence", "contract")
        fields.setdefault("when", self.when(site))
        return findings.make(site, **fields)


def callable_at(recorder: Recorder, dotted: str) -> Optional[Callee]:
    """The callable at a dotted path (a function, a method through base classes, a class's constructor), or None."""
    if dotted.endswith((".__init__", ".__new__")):
        dotted = dotted.rsplit(".", 1)[0]
    module, rest = recorder.index.split(dotted)
    if module is None or not rest:
        return None
    symbol = recorder.index.lookup(module, rest[0])
    if symbol is None:
        return None
    if symbol.function is not None and len(rest) == 1:
        return recorder.callee(FunctionValue(symbol.function))
    if symbol.klass is None:
        return None
    klass: ClassInfo = symbol.klass
    if len(rest) == 1:
        return recorder.callee(ClassValue(klass))
    value = recorder.attribute(Instance(klass, True), rest[1]).value
    return recorder.callee(value) if isinstance(value, FunctionValue) and len(rest) == 2 else None


def _called_by_constructors(modules: List[Module]) -> Set[str]:
    found: Set[str] = set()
    call = re.compile(r"\bself\s*\.\s*(\w+)\s*\(")
    for module in modules:
        for unit in module.body.units:
            if unit.kind != "class":
                continue
            methods = {u.name: u for u in unit.body().units if u.kind == "def"}
            pending = [n for n in ("__init__", "__post_init__", "__new__") if n in methods]
            seen: Set[str] = set()
            while pending:
                name = pending.pop()
                if name in seen:
                    continue
                seen.add(name)
                method = methods[name]
                pending.extend(n for n in call.findall(module.source.masked, method.start, method.end) if n in methods)
            found.update("%s.%s" % (unit.name, n) for n in seen)
    return found
