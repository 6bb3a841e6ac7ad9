"""Functions of the consumer that are put in the place of a provider's method, judged over every class they may meet.

``base.forward = types.MethodType(patched, base)``: inside ``patched``, ``self`` is whatever ``base`` was. Where its
class is
chosen at run time, all classes that can stand there are tried: those that the flow found, else those of the
provider that have
the method, hang under the same attribute, and have most of what the function asks of ``self``.
"""

from __future__ import annotations

import ast
import re
from typing import Dict, List, Optional, Set, Tuple

from remoteops.agent.audit import sites as S
from remoteops.agent.audit.flow import FlowScope
from remoteops.agent.audit.index import ClassInfo, FunctionInfo
from remoteops.agent.audit.modules import last_name
from remoteops.agent.audit.record import Recorder, Store
from remoteops.agent.audit.signatures import Signature, arguments_of, bind
from remoteops.agent.audit.sites import Problem
from remoteops.agent.audit.subclasses import Subclasses
from remoteops.agent.audit.syntax import walk_shallow
from remoteops.agent.audit.values import UNKNOWN, BoundMethod, FunctionValue, Instance, Value, join, options

ENOUGH = 0.6  # of the attributes that the function asks for


class Ducks:
    def __init__(self, recorder: Recorder, subclasses: Subclasses) -> None:
        self.recorder = recorder
        self.subclasses = subclasses
        self.provider = recorder.provider

    def judge(self) -> None:
        """Walks every replacing function once more, with its receiver known, and checks the provider's calls of it."""
        merged: Dict[Tuple[int, str], List[Store]] = {}
        for store in self.recorder.stores:
            function = _function(store.value)
            if function is not None and function.module.tree.package != self.provider:
                merged.setdefault((id(function), store.node.attr), []).append(store)
        for stores in merged.values():
            function = _function(stores[0].value)
            assert function is not None
            self._judge(function, stores)

    def _judge(self, function: FunctionInfo, stores: List[Store]) -> None:
        receivers: List[ClassInfo] = []
        owners: List[ClassInfo] = []
        paths: Set[str] = set()
        for store in stores:
            receivers += [o.info for o in options(store.base) if isinstance(o, Instance)]
            path, holders = self._path(store)
            paths |= {path} if path else set()
            owners += holders
        given = self._given(stores)
        if not receivers and not any(self._belongs(s) for s in stores):
            return  # nothing says that it is put on an object of this provider
        if not receivers:
            receivers, owners = self._search(function, stores[0].node.attr, paths, set(given))
        unique = self._plausible(
            function, list({id(c): c for c in receivers}.values()), stores[0].node.attr, set(given)
        )
        # The class that most others derive from first: it is the one that a reader knows.
        unique.sort(key=lambda c: (-self.subclasses.popularity(c.name), c.name))
        bound = any(isinstance(o, BoundMethod) for s in stores for o in options(s.value))
        node = function.node
        if node is None or not unique:
            self._undecided(function, stores[0])
            return
        if bound and node.args.args:
            self._walk(function, node.args.args[0].arg, join([Instance(c, True) for c in unique]), given)
        self._calls_of(function, stores[0].node.attr, unique, owners, paths, bound)

    def _belongs(self, store: Store) -> bool:
        store.module.bindings  # noqa: B018 - fills imported
        imported = any(source.split(".")[0] == self.provider for source, _guards in store.module.imported)
        return imported or any(self.recorder.touches(o) for o in options(store.base))

    def _asked(self, function: FunctionInfo, given: Set[str]) -> List[str]:
        """Attributes that the function reads off its first parameter and nobody in the consumer puts there."""
        node = function.node
        if node is None or not node.args.args:
            return []
        first = node.args.args[0].arg
        return sorted(
            {
                n.attr
                for n in ast.walk(node)
                if isinstance(n, ast.Attribute)
                and isinstance(n.value, ast.Name)
                and n.value.id == first
                and isinstance(n.ctx, ast.Load)
            }
            - given
        )

    def _plausible(
        self, function: FunctionInfo, classes: List[ClassInfo], method: str, given: Set[str]
    ) -> List[ClassInfo]:
        """Without those that lack the replaced method or most of what is asked of them: the function was not
        written for them.
        """
        asked = self._asked(function, given)
        needed = round(len(asked) * ENOUGH)
        has = self.recorder.classes.has
        return [
            c
            for c in classes
            if has(c, method)[0] is not False and sum(has(c, a)[0] is not False for a in asked) >= needed
        ]

    def _undecided(self, function: FunctionInfo, store: Store) -> None:
        site = self.recorder.site(
            "override",
            function.node or store.node,
            self._scope(function),
            symbol=store.node.attr,
            reached="." + store.node.attr,
        )
        self.recorder.settle(
            site, S.UNRESOLVED, "which classes of %s this function is bound to is not known" % self.provider
        )

    def _scope(self, function: FunctionInfo) -> FlowScope:
        return FlowScope(self.recorder, function.module, function)

    def _walk(self, function: FunctionInfo, first: str, receiver: Value, given: Dict[str, Value]) -> None:
        scope = self._scope(function)
        scope.names[first] = receiver
        scope.present = {(first, name) for name in given}
        scope.refined = {"%s.%s" % (first, name): value for name, value in given.items() if value != UNKNOWN}
        node = function.node
        assert node is not None
        self.recorder.replacing = True
        try:
            self.recorder.walk(node.body, scope)
        finally:
            self.recorder.replacing = False

    def _given(self, stores: List[Store]) -> Dict[str, Value]:
        """Attributes that the consumer itself puts on the receiver, and what they are."""
        found: Dict[str, Value] = {}
        for store in stores:
            at = store.scope.enclosing().node
            name = ast.dump(store.node.value)
            for node in ast.walk(at) if at is not None else []:
                if not isinstance(node, ast.Assign):
                    continue
                for target in node.targets:
                    if isinstance(target, ast.Attribute) and ast.dump(target.value) == name:
                        found[target.attr] = self.recorder.quiet(node.value, store.scope)
            found.setdefault(store.node.attr, UNKNOWN)
        return found

    def _path(self, store: Store) -> Tuple[str, List[ClassInfo]]:
        """The attribute under which the receiver hangs (``model`` of ``x.model``), and the classes that hold it."""
        node: ast.expr = store.node.value
        at = store.scope.enclosing().node
        if isinstance(node, ast.Name):
            values = [
                s.value
                for s in (walk_shallow(at.body) if isinstance(at, (ast.FunctionDef, ast.AsyncFunctionDef)) else [])
                if isinstance(s, ast.Assign) and any(isinstance(t, ast.Name) and t.id == node.id for t in s.targets)
            ]
            chains = [v for v in values if isinstance(v, ast.Attribute)]
            if not chains:
                return "", []
            node = chains[-1]
        if not isinstance(node, ast.Attribute):
            return "", []
        holder = self.recorder.quiet(node.value, store.scope)
        found: List[ClassInfo] = []
        for option in options(holder):
            if isinstance(option, Instance) and self.recorder.in_provider(option.info.module):
                found.append(option.info)
                if not option.exact:
                    found += self.subclasses.below(option.info)
        return node.attr, found

    # -- receivers by what they have ---------------------------------------------------------------------------------

    def _search(
        self, function: FunctionInfo, method: str, paths: Set[str], given: Set[str]
    ) -> Tuple[List[ClassInfo], List[ClassInfo]]:
        """Classes that define the replaced method, have most of what the function asks for, and hang under the path."""
        asked = self._asked(function, given)
        if len(asked) < 2 or not paths:
            return [], []
        needed = max(2, round(len(asked) * ENOUGH))
        defines = ("def %s(" % method).encode()
        tree = self.recorder.index.trees[self.provider]
        held: Set[str] = set()
        holds = re.compile(
            rb"\bself\.(?:%s)\s*(?::[^=\n]+)?=\s*\(?\s*([A-Z]\w+)\s*\("
            % b"|".join(re.escape(p.encode()) for p in sorted(paths))
        )
        chosen: List[str] = []
        for module, path in tree.files():
            data = self.recorder.index.data(tree, path)
            for match in holds.finditer(data):
                held.add(match.group(1).decode())
            if defines in data and sum(a.encode() in data for a in asked) >= needed:
                chosen.append(module)
        found: List[ClassInfo] = []
        model = self.subclasses.only
        for module, name, _bases in self.subclasses.headers():
            if module not in chosen or name not in held:
                continue
            if model and not self._of_model(module, model):
                continue
            klass = self.subclasses.class_named(module, name)
            if klass is None or not self.recorder.classes.member(klass, method):
                continue
            if sum(self.recorder.classes.has(klass, a)[0] is not False for a in asked) >= needed:
                found.append(klass)
        return found, []

    def _of_model(self, module: str, model: str) -> bool:
        tree = self.recorder.index.trees[self.provider]
        found = tree.find(module)
        return found is not None and ("class %s(" % model).encode() in self.recorder.index.data(tree, found[1])

    # -- who calls the replaced method -------------------------------------------------------------------------------

    def _calls_of(
        self,
        function: FunctionInfo,
        method: str,
        classes: List[ClassInfo],
        owners: List[ClassInfo],
        paths: Set[str],
        bound: bool,
    ) -> None:
        """Checks the provider's own calls of the method against the function that replaces it."""
        signature = self.recorder.decorators.signature(function)
        if signature is None:
            return
        signature = signature.without_first() if bound else signature
        site = self.recorder.site(
            "override",
            function.node or ast.Pass(),
            self._scope(function),
            symbol=classes[0].dotted + "." + method,
            reached=classes[0].dotted + "." + method,
            extra=method,
        )
        self.recorder.settle(site, S.OK)
        bad: Dict[str, str] = {}
        total = 0
        chosen = {id(c) for c in classes}
        for owner in {id(o): o for o in owners}.values():
            held = [self.recorder.attribute(Instance(owner, True), p).value for p in paths]
            if not any(isinstance(o, Instance) and id(o.info) in chosen for v in held for o in options(v)):
                continue
            total += 1
            text = self._misfit(owner, method, paths, signature)
            if text:
                bad[owner.name] = text
        for klass in classes:
            text = self._misfit(klass, method, set(), signature)
            if text:
                bad[klass.name] = text
        grouped: Dict[str, List[str]] = {}
        for name, text in bad.items():
            grouped.setdefault(text.split(" ")[0], []).append(name)
        everywhere = total > 0 and len(bad) >= total
        problems = []
        for detail, names in sorted(grouped.items()):
            text = bad[names[0]]
            told = "%d of %d classes call it in a way it does not take: %s" % (
                len(names),
                max(total, len(bad)),
                ", ".join(sorted(names)[:12]),
            )
            problems.append(
                Problem(
                    "override-mismatch",
                    detail,
                    error="TypeError",
                    message="%s() does not take %s" % (function.name, text),
                    now=told,
                    now_at=text.split("(")[-1].rstrip(")"),
                    sure=everywhere and len(names) == len(bad),
                    extra={"classes": sorted(names)},
                )
            )
        if problems:
            self.recorder.settle(site, S.BREAK if everywhere else S.RISK, problems[0].now, tuple(problems))

    def _misfit(self, owner: ClassInfo, method: str, paths: Set[str], signature: Signature) -> str:
        """What the first call ``self.path(...)`` or ``self.path.method(...)`` in a class passes that does not fit."""
        wanted = sorted(paths) or [method]
        for klass in self.recorder.classes.lineage(owner).classes:
            if not self.recorder.in_provider(klass.module):
                continue
            for unit in klass.unit.body().units:
                if unit.kind != "def" or not any(
                    "self.%s(" % w in unit.text or "self.%s.%s(" % (w, method) in unit.text for w in wanted
                ):
                    continue
                node = unit.node()
                for inner in ast.walk(node) if node is not None else []:
                    if isinstance(inner, ast.Call) and _is_call_of(inner.func, wanted, method):
                        outcome = bind(signature, arguments_of(inner))
                        if not outcome.fits:
                            return "%s (%s:%d)" % (outcome.problems[0].name, klass.module.file, inner.lineno)
        return ""


def _is_call_of(node: ast.expr, wanted: List[str], method: str) -> bool:
    if not isinstance(node, ast.Attribute):
        return False
    if isinstance(node.value, ast.Name) and node.value.id == "self":
        return node.attr in wanted
    return (
        node.attr == method
        and isinstance(node.value, ast.Attribute)
        and last_name(node.value) in wanted
        and isinstance(node.value.value, ast.Name)
        and node.value.value.id == "self"
    )


def _function(value: Value) -> Optional[FunctionInfo]:
    for option in options(value):
        inner = option.function if isinstance(option, BoundMethod) else option
        if isinstance(inner, FunctionValue):
            return inner.info
    return None
