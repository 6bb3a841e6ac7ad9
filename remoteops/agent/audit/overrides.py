"""Methods of the provider that the consumer overrides or replaces: do the provider's own calls still fit them?"""

from __future__ import annotations

import ast
from typing import Dict, Iterator, List, Optional, Set, Tuple

from remoteops.agent.audit import sites as S
from remoteops.agent.audit.abstract import is_abstract, left_open
from remoteops.agent.audit.flow import FlowScope
from remoteops.agent.audit.index import ClassInfo, FunctionInfo
from remoteops.agent.audit.record import Recorder, Store
from remoteops.agent.audit.signatures import (
    KEYWORD_ONLY,
    POSITIONAL,
    POSITIONAL_ONLY,
    VAR_KEYWORD,
    VAR_POSITIONAL,
    Signature,
    arguments_of,
    bind,
)
from remoteops.agent.audit.sites import Problem, Site
from remoteops.agent.audit.syntax import Unit
from remoteops.agent.audit.values import ClassValue, FunctionValue, Instance, ModuleValue, options

MAX_FILES = 40


class Overrides:
    def __init__(self, recorder: Recorder, baseline: Optional[Recorder] = None) -> None:
        self.recorder = recorder
        self.baseline = baseline
        self.classes = recorder.classes

    def judge(self) -> None:
        """Checks every class of the consumer that derives from the provider, and every function put in a
        provider's place.
        """
        made = self._instantiated()
        derived: Set[int] = set()
        for info in self.recorder.classes_met.values():
            derived.update(id(c) for c in self.classes.lineage(info).classes[1:])
        for info in list(self.recorder.classes_met.values()):
            bases = [c for c in self.classes.lineage(info).classes[1:] if self.recorder.in_provider(c.module)]
            if not bases:
                continue
            for unit in info.unit.body().units:
                if unit.kind == "def":
                    self._method(info, unit, bases)
            if id(info) not in derived:
                self._abstract(info, bases, id(info) in made)
        for store in self.recorder.stores:
            self._replacement(store)

    def _instantiated(self) -> Set[int]:
        return {
            id(option.info) for _s, _n, option, _c, _sc in self.recorder.calls_met if isinstance(option, ClassValue)
        } | self.recorder.made

    # -- overriding --------------------------------------------------------------------------------------------------

    def _method(self, info: ClassInfo, unit: Unit, bases: List[ClassInfo]) -> None:
        name = unit.name
        if name.startswith("__") and name.endswith("__"):
            return
        member = next(
            (m for m in (self.classes.effective(self.classes.own(b, name)) for b in bases) if m is not None), None
        )
        function = self.recorder.index.function_info(info.module, unit, info.qualname + ".", info)
        node = function.node
        if node is None:
            return
        scope = FlowScope(self.recorder, info.module, function)
        if member is None:
            self._vanished(info, unit, bases, scope, node)
            return
        base = self.classes.function(member)
        mine, theirs = (
            self.recorder.decorators.signature(function),
            self.recorder.decorators.signature(base) if base is not None else None,
        )
        path = self.recorder.reached.get(id(bases[0]), bases[0].dotted) + "." + name
        site = self.recorder.site(
            "override", node, scope, symbol=member.owner.dotted + "." + name, reached=path, extra=name
        )
        self.recorder.settle(site, S.OK)
        if mine is None or theirs is None or mine.doubt:
            return
        static = self.recorder.decorators.flavour(function) == "staticmethod"
        mine = mine if static else mine.without_first()
        theirs = (
            theirs
            if base is not None and self.recorder.decorators.flavour(base) == "staticmethod"
            else theirs.without_first()
        )
        found = self._misfit(bases, name, mine, theirs)
        if found is not None:
            detail, text, at, always = found
            note = "" if always else "only some of the provider's calls pass it"
            problem = self._problem(info, name, detail, text, at, always)
            self.recorder.settle(site, S.BREAK if always else S.RISK, note, (problem,))
            return
        doubt = _narrower(mine, theirs)
        if doubt:
            at = "%s:%d" % (member.owner.module.file, base.unit.line if base is not None else 1)
            text = "%s%s overrides %s%s" % (name, mine.text(), name, theirs.text())
            self.recorder.settle(
                site,
                S.RISK,
                "no call of it was found that does not fit",
                (self._problem(info, name, doubt, text, at, False),),
            )

    def _problem(self, info: ClassInfo, name: str, detail: str, text: str, at: str, sure: bool) -> Problem:
        return Problem(
            "override-mismatch",
            detail,
            error="TypeError",
            message="%s.%s() does not take %s" % (info.name, name, detail),
            now=text,
            now_at=at,
            sure=sure,
        )

    def _misfit(
        self, bases: List[ClassInfo], name: str, mine: Signature, theirs: Signature
    ) -> Optional[Tuple[str, str, str, bool]]:
        """The first call in the provider that fits its own method and not the overriding one; last, whether most
        do so.
        """
        first: Optional[Tuple[str, str, str]] = None
        failing = fitting = 0
        for place, call in self._calls(bases, name):
            shape = arguments_of(call)
            if not bind(theirs, shape).fits:
                continue
            outcome = bind(mine, shape)
            failing, fitting = failing + (not outcome.fits), fitting + outcome.fits
            if not outcome.fits and first is None:
                first = (outcome.problems[0].name, "called at %s" % place, place)
        return (*first, failing >= fitting) if first is not None else None

    def _calls(self, bases: List[ClassInfo], name: str) -> Iterator[Tuple[str, ast.Call]]:
        """Calls ``self.name(…)`` in the provider's base classes, and ``x.name(…)`` elsewhere where x is known to
        be one of them.
        """
        for base in bases:
            for unit in base.unit.body().units:
                if unit.kind == "def" and ".%s(" % name in unit.text:
                    yield from self._calls_in(unit, base, bases, name)
        needle = (".%s(" % name).encode()
        names = {b.name.encode() for b in bases}
        seen = 0
        for module_name, path in self.recorder.index.grep(self.recorder.provider, needle):
            data = self.recorder.index.data(self.recorder.index.trees[self.recorder.provider], path)
            if not any(n in data for n in names):
                continue
            seen += 1
            module = self.recorder.index.module(module_name)
            if module is None or seen > MAX_FILES:
                continue
            for top in module.body.units:
                units = (
                    [(top, None)]
                    if top.kind == "def"
                    else [(u, self.recorder.index.class_info(module, top)) for u in top.body().units if u.kind == "def"]
                )
                for unit, owner in units:
                    if ".%s(" % name in unit.text and owner not in bases:
                        function = self.recorder.index.function_info(
                            module, unit, owner.qualname + "." if owner else "", owner
                        )
                        yield from self._calls_on(function, bases, name)

    def _calls_in(
        self, unit: Unit, base: ClassInfo, bases: List[ClassInfo], name: str
    ) -> Iterator[Tuple[str, ast.Call]]:
        node = unit.node()
        for inner in ast.walk(node) if node is not None else []:
            if (
                isinstance(inner, ast.Call)
                and isinstance(inner.func, ast.Attribute)
                and inner.func.attr == name
                and isinstance(inner.func.value, ast.Name)
                and inner.func.value.id == "self"
            ):
                yield "%s:%d" % (base.module.file, inner.lineno), inner

    def _calls_on(self, function: FunctionInfo, bases: List[ClassInfo], name: str) -> Iterator[Tuple[str, ast.Call]]:
        node = function.node
        for inner in ast.walk(node) if node is not None else []:
            if not (isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr == name):
                continue
            value = self.recorder.evaluate(inner.func.value, self.recorder.lazy_scope(function))
            if any(isinstance(o, Instance) and not o.exact and o.info in bases for o in options(value)):
                yield "%s:%d" % (function.module.file, inner.lineno), inner

    def _vanished(self, info: ClassInfo, unit: Unit, bases: List[ClassInfo], scope: FlowScope, node: ast.AST) -> None:
        """A method that overrode something in the baseline and overrides nothing now: it is never called."""
        if self.baseline is None:
            return
        for base in bases:
            module, rest = self.baseline.index.split(base.dotted)
            symbol = self.baseline.index.lookup(module, rest[0]) if module is not None and rest else None
            old = (
                self.baseline.classes.member(symbol.klass, unit.name)
                if symbol is not None and symbol.klass is not None
                else None
            )
            if old is None or old.kind != "method":
                continue
            path = self.recorder.reached.get(id(base), base.dotted) + "." + unit.name
            site = self.recorder.site(
                "override", node, scope, symbol=base.dotted + "." + unit.name, reached=path, extra=unit.name
            )
            text = "%s has no %s any more: the override is not called" % (base.name, unit.name)
            self.recorder.settle(
                site,
                S.RISK,
                text,
                (
                    Problem(
                        "override-mismatch",
                        unit.name,
                        error="none",
                        message=text,
                        now=text,
                        sure=False,
                        now_at="%s:%d" % (base.module.file, base.unit.line),
                    ),
                ),
            )
            return

    # -- abstract methods --------------------------------------------------------------------------------------------

    def _abstract(self, info: ClassInfo, bases: List[ClassInfo], made: bool) -> None:
        missing = left_open(self.classes, info, bases)
        if not missing or any(is_abstract(u) for u in info.unit.body().units if u.kind == "def"):
            return
        header = self.classes.header(info)
        assert header is not None
        scope = FlowScope(self.recorder, info.module, None, owner=info)
        scope.qualname = info.qualname
        for member in missing:
            path = self.recorder.reached.get(id(member.owner), member.owner.dotted) + "." + member.name
            site = self.recorder.site(
                "override",
                header,
                scope,
                symbol=member.owner.dotted + "." + member.name,
                reached=path,
                extra="abstract " + member.name,
            )
            unit = member.unit
            problem = Problem(
                "override-mismatch",
                member.name,
                error="TypeError",
                sure=made,
                message="Can't instantiate abstract class %s without an implementation for abstract method '%s'"
                % (info.name, member.name),
                now="%s is abstract in %s" % (member.name, member.owner.name),
                now_at="%s:%d" % (member.owner.module.file, unit.line if unit is not None else 1),
            )
            self.recorder.settle(
                site, S.BREAK if made else S.RISK, "" if made else "the consumer does not create it itself", (problem,)
            )

    # -- replacing ---------------------------------------------------------------------------------------------------

    def _replacement(self, store: Store) -> None:
        """``provider.module.function = mine`` and ``ProviderClass.method = mine``."""
        site: Optional[Site] = store.site
        bases = [o for o in options(store.base) if isinstance(o, (ModuleValue, ClassValue))]
        functions = [o.info for o in options(store.value) if isinstance(o, FunctionValue)]
        if (
            site is None
            or site.status != S.OK
            or not bases
            or not functions
            or self.recorder.in_provider(functions[0].module)
        ):
            return
        old = self.recorder.attribute(bases[0], store.node.attr).value
        theirs = self.recorder.decorators.signature(old.info) if isinstance(old, FunctionValue) else None
        mine = self.recorder.decorators.signature(functions[0])
        if mine is None or theirs is None or mine.doubt or theirs.doubt or not isinstance(old, FunctionValue):
            return
        doubt = _narrower(mine, theirs)
        if doubt:
            at = "%s:%d" % (old.info.module.file, old.info.unit.line)
            text = "%s%s is put in the place of %s%s" % (functions[0].name, mine.text(), old.info.name, theirs.text())
            self.recorder.settle(
                site,
                S.RISK,
                text,
                (
                    Problem(
                        "override-mismatch",
                        doubt,
                        error="TypeError",
                        message="%s() does not take %s" % (functions[0].name, doubt),
                        now=text,
                        now_at=at,
                        sure=False,
                    ),
                ),
            )


def _narrower(mine: Signature, theirs: Signature) -> str:
    """The first parameter by which one signature takes less than another; an empty string when it takes all."""
    names: Dict[str, str] = {p.name: p.kind for p in mine.parameters}
    star = any(p.kind == VAR_POSITIONAL for p in mine.parameters)
    double = any(p.kind == VAR_KEYWORD for p in mine.parameters)
    places = [p for p in mine.parameters if p.kind in (POSITIONAL, POSITIONAL_ONLY)]
    others = [p for p in theirs.parameters if p.kind in (POSITIONAL, POSITIONAL_ONLY)]
    if (
        len(places) < len(others)
        and not star
        and not (double and all(p.name not in names for p in others[len(places) :]))
    ):
        lost = next((p for p in others if p.name not in names), None)
        if lost is not None:
            return lost.name
    for parameter in theirs.parameters:
        if parameter.kind == KEYWORD_ONLY and parameter.name not in names and not double:
            return parameter.name
    known = {p.name for p in theirs.parameters}
    flexible = any(p.kind in (VAR_POSITIONAL, VAR_KEYWORD) for p in theirs.parameters)
    for number, parameter in enumerate(places):
        if parameter.required and number >= len(others) and parameter.name not in known and not flexible:
            return parameter.name
    for parameter in mine.parameters:
        if parameter.kind == KEYWORD_ONLY and parameter.required and parameter.name not in known and not flexible:
            return parameter.name
    return ""
