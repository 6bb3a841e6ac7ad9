"""Names in strings: methods that are called by name on other objects, and classes given by dotted path.

A parameter that takes a name is recognised in the provider's source: it is declared ``str | Callable``, or the
callee does
``getattr(x, parameter)``. The classes that the name is looked up on are those that define the names which the
provider itself
passes there. A class path whose keyword the provider uses beside ``__bases__`` is mixed into the class found there.
"""

from __future__ import annotations

import ast
import re
from typing import Dict, List, Optional, Tuple

from remoteops.agent.audit import sites as S
from remoteops.agent.audit.callees import Callee
from remoteops.agent.audit.flow import FlowScope
from remoteops.agent.audit.index import ClassInfo, FunctionInfo
from remoteops.agent.audit.modules import last_name
from remoteops.agent.audit.record import Recorder
from remoteops.agent.audit.signatures import Arguments, Parameter, bind, unparse
from remoteops.agent.audit.sites import Problem, Site
from remoteops.agent.audit.subclasses import Subclasses
from remoteops.agent.audit.values import ClassValue, Const, FunctionValue, Instance, Sequence, Value, options

Met = Tuple[Site, ast.Call, Value, Callee, FlowScope]
LIKELY = 0.5


class Strings:
    def __init__(self, recorder: Recorder, subclasses: Subclasses) -> None:
        self.recorder = recorder
        self.subclasses = subclasses
        self.provider = recorder.provider
        self.mixins: Dict[int, ClassInfo] = {}
        self._targets: Dict[str, List[ClassInfo]] = {}

    # -- classes given by path ---------------------------------------------------------------------------------------

    def find_hosts(self) -> None:
        """Sets, for each consumer class given by path, the provider's classes that it is mixed into."""
        for _site, node, _option, callee, scope in self.recorder.calls_met:
            for name, value in self._constants(node, callee, scope):
                klass = self._consumer_class(value)
                if klass is not None and id(klass) not in self.mixins:
                    self.mixins[id(klass)] = klass
                    hosts = self._hosts(name)
                    if hosts:
                        self.recorder.hosts[id(klass)] = hosts
        if not self.mixins:
            return
        for _site, node, _option, callee, scope in self.recorder.calls_met:
            for parameter, value in self._named_methods(node, callee, scope):
                for klass in self.mixins.values():
                    if self.recorder.classes.member(klass, value) is not None and not self.recorder.hosts.get(
                        id(klass)
                    ):
                        self.recorder.hosts[id(klass)] = self._targets_of(callee, parameter)

    def _constants(self, node: ast.Call, callee: Callee, scope: FlowScope) -> List[Tuple[str, str]]:
        """(parameter, string) of the string arguments of a call."""
        found: List[Tuple[str, str]] = []
        parameters = callee.signature.parameters if callee.signature is not None else ()
        pairs = [(k.arg, k.value) for k in node.keywords if k.arg]
        pairs += [(p.name, a) for p, a in zip(parameters, node.args) if not isinstance(a, ast.Starred)]
        for name, argument in pairs:
            value = self.recorder.quiet(argument, scope)
            if isinstance(value, Const) and isinstance(value.value, str):
                found.append((str(name), value.value))
        return found

    def _consumer_class(self, text: str) -> Optional[ClassInfo]:
        path = text.replace(":", ".")
        if (
            path.count(".") < 1
            or not re.match(r"^[\w.]+$", path)
            or path.split(".")[0] == self.provider
            or not self.recorder.index.knows(path)
        ):
            return None
        module, rest = self.recorder.index.split(path)
        symbol = self.recorder.index.lookup(module, rest[0]) if module is not None and len(rest) == 1 else None
        return symbol.klass if symbol is not None else None

    def _hosts(self, keyword: str) -> List[ClassInfo]:
        """The classes whose ``__bases__`` the provider extends where it uses a keyword."""
        for module_name, _path in self.recorder.index.grep(self.provider, b"__bases__"):
            module = self.recorder.index.module(module_name)
            if module is None or keyword not in module.source.text:
                continue
            for unit in module.body.units:
                methods = (
                    [(unit, None)] if unit.kind == "def" else [(u, unit) for u in unit.body().units if u.kind == "def"]
                )
                for method, owner in methods:
                    if not (method.mentions(keyword) and method.mentions("__bases__")):
                        continue
                    holder = self.recorder.index.class_info(module, owner) if owner is not None else None
                    function = self.recorder.index.function_info(
                        module, method, owner.name + "." if owner is not None else "", holder
                    )
                    found = self._extended(function)
                    if found:
                        return found
        return []

    def _extended(self, function: FunctionInfo) -> List[ClassInfo]:
        found: List[ClassInfo] = []
        node = function.node
        for inner in ast.walk(node) if node is not None else []:
            if (
                isinstance(inner, ast.Assign)
                and isinstance(inner.targets[0], ast.Attribute)
                and inner.targets[0].attr == "__bases__"
            ):
                value = self.recorder.evaluate(inner.targets[0].value, self.recorder.lazy_scope(function))
                for option in options(value):
                    if isinstance(option, ClassValue):
                        found += [option.info] + ([] if option.exact else self.subclasses.below(option.info))
        return found

    # -- methods called by name --------------------------------------------------------------------------------------

    def judge(self) -> None:
        """Checks every name that is passed where a method's name is expected, and every path into the provider."""
        for site, node, _option, callee, scope in list(self.recorder.calls_met):
            for parameter, name in self._named_methods(node, callee, scope):
                self._judge_name(site, node, callee, parameter, name, scope)
            for _parameter, text in self._constants(node, callee, scope):
                if re.match(r"^%s(\.\w+)+$" % re.escape(self.provider), text) and text.count(".") > 1:
                    self._judge_path(site, node, text, scope)
                elif self._consumer_class(text) is not None:
                    self.recorder.site("string", node, scope, symbol=text, reached=text, extra=text)

    def _named_methods(self, node: ast.Call, callee: Callee, scope: FlowScope) -> List[Tuple[Parameter, str]]:
        found: List[Tuple[Parameter, str]] = []
        if callee.signature is None:
            return found
        for name, value in self._constants(node, callee, scope):
            parameter = callee.signature.get(name)
            if (
                parameter is not None
                and value.isidentifier()
                and (_takes_name(parameter) or self._looked_up(callee, name))
            ):
                found.append((parameter, value))
        return found

    def _looked_up(self, callee: Callee, name: str) -> Optional[ast.expr]:
        """The object on which the callee looks a parameter up with ``getattr``."""
        node = callee.function.node if callee.function is not None and "getattr(" in callee.function.unit.text else None
        for inner in ast.walk(node) if node is not None else []:
            if (
                isinstance(inner, ast.Call)
                and last_name(inner.func) == "getattr"
                and len(inner.args) == 2
                and (isinstance(inner.args[1], ast.Name) and inner.args[1].id == name)
            ):
                return inner.args[0]
        return None

    def _targets_of(self, callee: Callee, parameter: Parameter) -> List[ClassInfo]:
        """The classes on which a name given for this parameter is looked up."""
        key = "%s:%s" % (callee.symbol, parameter.name)
        if key not in self._targets:
            found: List[ClassInfo] = []
            place = self._looked_up(callee, parameter.name)
            if place is not None and callee.function is not None:
                value = self.recorder.evaluate(place, self.recorder.lazy_scope(callee.function))
                for option in options(value):
                    if isinstance(option, Instance):
                        found += [option.info] + ([] if option.exact else self.subclasses.below(option.info))
            self._targets[key] = found or self._by_peers(callee.symbol.rsplit(".", 1)[-1], callee.symbol)
        return self._targets[key]

    def _by_peers(self, method: str, home: str) -> List[ClassInfo]:
        """Classes that define the names which the provider itself passes to a method."""
        index = self.recorder.index
        tree = index.trees[self.provider]
        home = ".".join(home.split(".")[:2]) if home.count(".") > 3 else self.provider
        calls = re.compile(rb"\.%s\(\s*[\"'](\w+)[\"']" % re.escape(method.encode()))
        peers = set()
        needle = (".%s(" % method).encode()
        for _module, path in self._nearby(home, method):
            data = index.data(tree, path)
            if needle in data:
                peers.update(calls.findall(data))
        if len(peers) < 2:
            return []
        score: Dict[str, int] = {}
        defined = re.compile(rb"\bdef (%s)\(" % b"|".join(sorted(re.escape(p) for p in peers)))
        for module, path in self._nearby(home, method):
            count = len(set(defined.findall(index.data(tree, path))))
            if count >= 2:
                score[module] = count
        best = max(score.values(), default=0)
        found: List[Tuple[int, ClassInfo]] = []
        for module, name, _bases in self._class_headers(score, best):
            klass = self.subclasses.class_named(module, name)
            if klass is None or self.recorder.classes.member(klass, method) is not None:
                continue  # whatever sends the names is not what they are looked up on
            own = sum(self.recorder.classes.member(klass, p.decode()) is not None for p in peers)
            if own >= 2:
                found.append((own, klass))
        top = max((n for n, _k in found), default=0)
        return [k for n, k in found if n >= LIKELY * top]

    def _nearby(self, home: str, method: str) -> List[Tuple[str, str]]:
        """Files of the subpackage in which a method is defined: names are looked up on classes that belong to it."""
        near = [
            (m, p) for m, p in self.recorder.index.trees[self.provider].files() if m == home or m.startswith(home + ".")
        ]
        return near

    def _class_headers(self, score: Dict[str, int], best: int) -> List[Tuple[str, str, str]]:
        found: List[Tuple[str, str, str]] = []
        for module_name in sorted(score):
            if score[module_name] < LIKELY * best:
                continue
            module = self.recorder.index.module(module_name)
            found += [
                (module_name, u.name, "")
                for u in (module.body.units if module is not None else [])
                if u.kind == "class"
            ]
        return found

    def _judge_name(
        self, site: Site, node: ast.Call, callee: Callee, parameter: Parameter, name: str, scope: FlowScope
    ) -> None:
        classes = self.recorder.classes
        targets = self._targets_of(callee, parameter)
        mixed = [k for k in self.mixins.values() if classes.member(k, name) is not None]
        home = targets[0].dotted if targets else callee.symbol
        made = self.recorder.site(
            "string", node, scope, symbol="%s.%s" % (home, name), reached="%s.%s" % (home, name), extra=name
        )
        made.guards = site.guards
        if mixed:
            made.symbol = made.reached = "%s.%s" % (mixed[0].dotted, name)
            return
        having = [k for k in targets if classes.member(k, name) is not None or classes.assigned(k, name)]
        if having:
            made.symbol = made.reached = "%s.%s" % (having[0].dotted, name)
            self._judge_arguments(made, node, name, having, scope)
        elif not targets:
            self.recorder.settle(
                made, S.UNRESOLVED, "a method called by name; which classes of %s have it is not known" % self.provider
            )
        elif any(classes.fallback(k) for k in targets):
            reason = next(classes.fallback(k) for k in targets if classes.fallback(k))
            if all(classes.fallback(k) for k in targets):
                self.recorder.settle(made, S.UNRESOLVED, reason)
                return
            self._missing(made, name, targets)
        else:
            self._missing(made, name, targets)

    def _missing(self, made: Site, name: str, targets: List[ClassInfo]) -> None:
        made.receiver = Instance(targets[0])
        labels = sorted({k.name for k in targets})
        self.recorder.settle(
            made,
            S.BREAK,
            "",
            (
                Problem(
                    "missing-attribute",
                    name,
                    error="AttributeError",
                    message="'%s' object has no attribute '%s'" % (targets[0].name, name),
                    now="no class that it is looked up on has it: %s" % ", ".join(labels[:8]),
                    now_at="%s:%d" % (targets[0].module.file, targets[0].unit.line),
                    extra={"classes": labels},
                ),
            ),
        )

    def _judge_arguments(
        self, made: Site, node: ast.Call, name: str, having: List[ClassInfo], scope: FlowScope
    ) -> None:
        """Binds ``args=(…)`` and ``kwargs={…}`` of the call to the method that is named."""
        given = {k.arg: self.recorder.quiet(k.value, scope) for k in node.keywords if k.arg in ("args", "kwargs")}
        positional = given.get("args")
        keywords = given.get("kwargs")
        count = (
            len(positional.parts)
            if isinstance(positional, Sequence) and positional.parts is not None
            else 0
            if positional is None
            else -1
        )
        names = (
            tuple(str(k) for k in keywords.keys)
            if isinstance(keywords, Sequence) and keywords.keys is not None
            else ()
            if keywords is None
            else None
        )
        if count < 0 or names is None or not ({"args", "kwargs"} & set(given)):
            return
        failing: List[str] = []
        problem: Optional[Problem] = None
        for klass in having:
            hit = self.recorder.attribute(Instance(klass, True), name).hits[0]
            callee = self.recorder.callee(hit.value) if isinstance(hit.value, FunctionValue) else None
            if callee is None or callee.signature is None or callee.signature.doubt:
                return
            outcome = bind(callee.signature, Arguments(count, names))
            if not outcome.fits:
                failing.append(klass.name)
                kind = outcome.problems[0].kind
                problem = Problem(
                    "too-many-positional" if kind == "repeated" else kind,
                    outcome.problems[0].name,
                    error="TypeError",
                    message="%s() does not take this call: %s %s" % (name, kind, outcome.problems[0].name),
                    now=name + callee.signature.text(),
                    now_at="%s:%d" % (callee.file, callee.line),
                )
        if problem is not None:
            problem.sure = len(failing) == len(having)
            self.recorder.settle(
                made,
                S.BREAK if problem.sure else S.RISK,
                "" if problem.sure else "not of %s" % ", ".join(failing[:8]),
                (problem,),
            )

    def _judge_path(self, site: Site, node: ast.Call, text: str, scope: FlowScope) -> None:
        made = self.recorder.site("string", node, scope, symbol=text, reached=text, extra=text)
        made.guards = site.guards
        module, rest = self.recorder.index.split(text)
        symbol = self.recorder.index.lookup(module, rest[0]) if module is not None and rest else None
        if module is None or (rest and symbol is None):
            problem = Problem(
                "missing-symbol",
                text.rsplit(".", 1)[-1],
                error="ImportError",
                message="cannot import '%s'" % text,
                sure=False,
            )
            self.recorder.settle(made, S.RISK, "a dotted path in a string that leads nowhere", (problem,))
        elif symbol is not None and not symbol.certain:
            self.recorder.settle(made, S.UNRESOLVED, symbol.reason)


def _takes_name(parameter: Parameter) -> bool:
    """Whether a parameter is declared to take a string or something callable."""
    text = unparse(parameter.annotation)
    return "Callable" in text and re.search(r"\bstr\b", text) is not None
