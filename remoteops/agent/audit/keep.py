"""Keeping the record of the walk: sites, their judgements, and imports."""

from __future__ import annotations

import ast
from typing import Any, Dict, List, Optional, Set, Tuple

from remoteops.agent.audit import sites as S
from remoteops.agent.audit.callees import Callee
from remoteops.agent.audit.flow import Flow, FlowScope
from remoteops.agent.audit.handed import HandingOn
from remoteops.agent.audit.index import ClassInfo, Index
from remoteops.agent.audit.modules import Module
from remoteops.agent.audit.sites import Problem, Site
from remoteops.agent.audit.values import (
    UNKNOWN,
    ClassValue,
    External,
    FunctionValue,
    Instance,
    ModuleValue,
    SuperValue,
    Union_,
    Unknown,
    Value,
    options,
)

ORDER = {S.DEAD: 0, S.OK: 1, S.GUARDED: 2, S.UNRESOLVED: 3, S.RISK: 4, S.BREAK: 5}
BROAD = {"Exception", "BaseException"}


class Store:
    """A function put in the place of a provider's attribute (``base.forward = …``), or a binding whose receiver is
    not known.
    """

    def __init__(self, node: ast.Attribute, base: Value, value: Value, scope: FlowScope, site: Optional[Site]) -> None:
        self.node = node
        self.base = base
        self.value = value
        self.module = scope.module
        self.scope = scope
        self.site = site


def _alias_place(node: ast.stmt, alias: ast.alias, module: Module) -> ast.AST:
    """The place of an imported name for Pythons whose trees do not give it (before 3.10)."""
    import re

    place: Any = ast.Name(id=alias.name)
    place.lineno, place.col_offset = node.lineno, node.col_offset
    for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
        text = module.source.line(number)
        begin = text.find("import") + 6 if number == node.lineno and "import" in text else 0
        found = re.compile(r"(?<![\w.])%s(?![\w.])" % re.escape(alias.name)).search(text, begin)
        if found:
            place.lineno, place.col_offset = number, found.start()
            place.end_lineno, place.end_col_offset = number, found.end()
            break
    made: ast.AST = place
    return made


class Keeper(Flow):
    """The walk with its record. ``sites`` is keyed by place, so that a site met twice (two passes, a loop) counts
    once.
    """

    def __init__(self, index: Index, provider: str) -> None:
        super().__init__(index, provider)
        self.sites: Dict[Tuple[str, int, int, str, str], Site] = {}
        self.reached: Dict[int, str] = {}
        self.stores: List[Store] = []
        self.classes_met: Dict[int, ClassInfo] = {}
        self.calls_met: List[Tuple[Site, ast.Call, Value, Callee, FlowScope]] = []
        self.made: Set[int] = set()
        self.put_on: Set[Tuple[int, str]] = set()
        self.unknown_imports: Set[Tuple[str, str]] = set()  # (module, name): there, but the sources do not tell what
        self.handing = HandingOn(self)
        self._loose: Dict[int, Set[str]] = {}  # of functions, by id of the tree: see ``contents.loose_names``
        self.recording = True
        self.replacing = False

    def site(self, kind: str, node: ast.AST, scope: FlowScope, *, symbol: str, reached: str, extra: str = "") -> Site:
        at = scope.enclosing()
        owner = at.owner.qualname if at.owner is not None else ""
        made = Site(
            kind,
            node,
            scope.module,
            symbol=symbol,
            reached=reached,
            scope=at.qualname.replace(".<locals>", ""),
            function=at.node,
            owner=owner,
        )
        made.guards = tuple(sorted({n for names in self.caught for n in names}))
        made.statement = self.statement
        place = (scope.module.name, made.line, made.column, kind + str(getattr(node, "end_col_offset", "")), extra)
        if not self.recording or self.muted:
            return made
        if self.dead:
            made.status = S.DEAD
        old = self.sites.get(place)
        if old is None or (old.status == S.DEAD and made.status != S.DEAD):
            self.sites[place] = made
            return made
        return old if made.status != S.DEAD else made

    def settle(self, site: Site, status: str, reason: str = "", problems: Tuple[Problem, ...] = ()) -> None:
        """Writes a judgement into a site; the worse of two stays."""
        if site.status == S.DEAD:
            return
        if status in (S.BREAK, S.RISK):
            caught = set(site.guards)
            errors = {p.error for p in problems} | (
                {"ImportError"} if "ModuleNotFoundError" in {p.error for p in problems} else set()
            )
            if errors & caught or (site.kind == "import" and caught & BROAD):
                status, reason, problems = (
                    S.GUARDED,
                    "the consumer catches %s" % ", ".join(sorted(errors & caught) or sorted(caught & BROAD)),
                    (),
                )
            elif status == S.BREAK and (self.version_guard or self.handling or caught & BROAD):
                status = S.RISK
                reason = (
                    "stands under a condition on a version that was not decided"
                    if self.version_guard
                    else "it is looked up only when an exception comes through here"
                    if self.handling
                    else "the consumer catches every exception here"
                )
                for problem in problems:
                    problem.sure = False
        if ORDER[status] >= ORDER[site.status]:
            site.status, site.reason = status, reason
            if problems:
                known = {(p.kind, p.detail) for p in site.problems}
                site.problems.extend(p for p in problems if (p.kind, p.detail) not in known)

    def note_put(self, base: Value, name: str) -> None:
        """The consumer sets an attribute of an object: from then on it is there."""
        for option in options(base):
            if isinstance(option, (Instance, ClassValue)):
                self.put_on.add((id(option.info), name))
            elif isinstance(option, ModuleValue):
                self.put_on.add((id(option.module), name))

    def path_to(self, value: Value) -> str:
        """The dotted path by which the consumer reaches a definition: as imported, else where it is defined."""
        if isinstance(value, (ClassValue, Instance, FunctionValue)):
            return self.reached.get(id(value.info), value.info.dotted)
        if isinstance(value, ModuleValue):
            return value.module.name
        if isinstance(value, SuperValue):
            bases = [c for c in self.classes.lineage(value.info).classes if self.in_provider(c.module)]
            return self.reached.get(id(bases[0]), bases[0].dotted) if bases else value.info.dotted
        if isinstance(value, Union_):
            return self.path_to(value.options[0])
        return getattr(value, "dotted", "") or getattr(value, "via", "")

    def on_import(self, node: Any, alias: ast.alias, scope: FlowScope) -> Value:
        place = alias if hasattr(alias, "lineno") else _alias_place(node, alias, scope.module)
        if isinstance(node, ast.Import):
            return self._import_module(place, alias, scope)
        source = scope.module.absolute(node.module, node.level)
        reached = source + "." + alias.name if alias.name != "*" else source
        if source.split(".")[0] != self.provider or scope.module.tree.package == self.provider:
            if alias.name == "*":
                return UNKNOWN
            return self.imported_name(
                ast.ImportFrom(module=source, names=[alias], level=0), alias.asname or alias.name, scope.module
            )
        site = self.site("import", place, scope, symbol=reached, reached=reached, extra=alias.name)
        target = self.index.module(source)
        if target is None:
            return self._import_failed(site, reached, source, scope)
        if alias.name == "*":
            return UNKNOWN
        symbol = self.index.lookup(target, alias.name)
        if symbol is None and self.index.unreadable(target):
            self.settle(site, S.UNRESOLVED, self.index.unreadable(target))
            return Unknown(True, reached)
        if symbol is None:
            return self._import_failed(site, reached, "", scope)
        site.symbol = symbol.name
        value = self.of_symbol(symbol)
        site.value = value
        if isinstance(value, (ClassValue, FunctionValue)):
            self.reached.setdefault(id(value.info), reached)
        if not symbol.certain:
            self.settle(site, S.UNRESOLVED, symbol.reason)
            return Unknown(True, reached)
        if isinstance(value, Unknown):
            self.unknown_imports.add((scope.module.name, alias.asname or alias.name))
        return value

    def _import_module(self, place: ast.AST, alias: ast.alias, scope: FlowScope) -> Value:
        top = alias.name.split(".")[0]
        if not self.index.knows(alias.name):
            return External(alias.name if alias.asname else top)
        module = self.index.module(alias.name)
        if top == self.provider and scope.module.tree.package != self.provider:
            site = self.site("import", place, scope, symbol=alias.name, reached=alias.name, extra=alias.name)
            if module is None:
                return self._import_failed(site, alias.name, alias.name, scope)
        wanted = module if alias.asname else self.index.module(top)
        return ModuleValue(wanted) if wanted is not None else Unknown(top == self.provider, alias.name)

    def _import_failed(self, site: Site, reached: str, module: str, scope: FlowScope) -> Value:
        if not self.dead:
            self.failed_imports.add(id(site.node) if self.caught else 0)
            if self.caught:
                self.failed_imports.add(len(self.failed_imports) + 1000)
        error = "ModuleNotFoundError" if module else "ImportError"
        built = module and self._built(module)
        if built:
            self.settle(
                site,
                S.UNRESOLVED,
                "%s is made when %s is built (its own code imports it); it is not in this tree"
                % (module, self.provider),
            )
            return Unknown(True, reached)
        if module:
            message = "No module named '%s'" % module
        else:
            source, _, name = reached.rpartition(".")
            message = "cannot import name '%s' from '%s'" % (name, source)
        self.settle(
            site, S.BREAK, "", (Problem("missing-symbol", reached.rsplit(".", 1)[-1], error=error, message=message),)
        )
        return Unknown(False, "import " + reached)

    def _built(self, module: str) -> bool:
        """Whether the provider's own code imports a module that is not in its tree (a compiled or generated one)."""
        head, _, last = module.rpartition(".")
        for number, (name, _path) in enumerate(self.index.grep(self.provider, last.encode())):
            if number > 30:
                break
            loaded = self.index.module(name)
            if loaded is None:
                continue
            loaded.bindings  # noqa: B018 - fills imported
            if any(
                source == module or (source == head and last in loaded.bindings) for source, _guards in loaded.imported
            ):
                return True
        return False
