"""Calls of the consumer into the provider: does each fit what is there?"""

from __future__ import annotations

import ast
from typing import Any, Dict, List, Optional, Set, Tuple

from remoteops.agent.audit import sites as S
from remoteops.agent.audit.abstract import left_open
from remoteops.agent.audit.callees import Callee
from remoteops.agent.audit.contents import fixed_in_module, loose_names
from remoteops.agent.audit.flow import FlowScope
from remoteops.agent.audit.handed import HandingOn, handed_text
from remoteops.agent.audit.keep import Keeper
from remoteops.agent.audit.signatures import (
    Arguments,
    Outcome,
    Signature,
    bind_ways,
    unparse,
)
from remoteops.agent.audit.sites import Problem, Site
from remoteops.agent.audit.values import (
    BoundMethod,
    CallableValue,
    ClassValue,
    Const,
    External,
    ExternalInstance,
    FunctionValue,
    Instance,
    LambdaValue,
    ModuleValue,
    PartialValue,
    Sequence,
    Unknown,
    Value,
    options,
)


class CallSites(Keeper):
    """Judges calls as they are met."""

    handing: HandingOn
    _loose: Dict[int, Set[str]]

    def on_call(self, node: ast.Call, value: Value, scope: FlowScope) -> None:
        if value == External("setattr") and len(node.args) == 3 and isinstance(node.args[1], ast.Constant):
            self.note_put(self.quiet(node.args[0], scope), str(node.args[1].value))
        judged: List[Tuple[Value, Callee]] = []
        for option in options(value):
            if isinstance(option, ClassValue):
                self.made.add(id(option.info))
            callee = self.provider_callee(option)
            if callee is not None:
                judged.append((option, callee))
        if not judged:
            if not self._not_callable(node, value, scope):
                self._not_known(node, value, scope)
            return
        option, callee = judged[0]
        site = self.site(
            "call", node, scope, symbol=callee.symbol, reached=self._reached_call(node, option, callee, scope)
        )
        if self.replacing and site.callee is not None and not site.replaced:
            return  # judged already: it does not depend on the receiver
        site.replaced = self.replacing
        site.callee, site.receiver = callee, option
        site.shape = self.shape(node, callee, scope)
        outcomes: List[Tuple[Callee, Outcome]] = []
        doubt = ""
        either = 0
        for _option, each in judged:
            if each.signature is None:
                doubt = doubt or each.reason
                continue
            outcome, same = bind_ways(each.signature, self.shape(node, each, scope))
            either += not same
            asked = [p.name for p in outcome.problems if p.kind == "unknown-kwarg" and _asked(p.name, scope)]
            if asked:
                doubt = doubt or "%s is given only where a signature that was looked at has it" % ", ".join(asked)
                continue
            if not outcome.fits and each.signature.doubt:
                doubt = doubt or "%s does not fit, but: %s" % (
                    ", ".join(p.name for p in outcome.problems),
                    each.signature.doubt,
                )
                continue
            outcomes.append((each, outcome))
        failing = [(c, o) for c, o in outcomes if not o.fits]
        if failing:
            worst, outcome = failing[0]
            site.callee = worst
            everywhere = len(failing) == len(judged) and len(judged) == len(
                [o for o in options(value) if not isinstance(o, Unknown)]
            )
            everywhere = everywhere and not either
            # Of several definitions, what fails in each is sure; if each fails otherwise, the first tells.
            common = [p for p in outcome.problems if all(p in o.problems for _c, o in failing)]
            common = common or list(outcome.problems)
            problems = tuple(call_problem(worst, p, everywhere and p in common) for p in outcome.problems)
            if self.replacing:
                problems = self._override_problems(failing, len(judged), everywhere)
            self.settle(
                site,
                S.BREAK if everywhere else S.RISK,
                ""
                if everywhere
                else "what is passed depends on a condition"
                if either
                else "%d of %d possible callees do not take this call" % (len(failing), len(judged)),
                problems,
            )
        elif doubt:
            self.settle(site, S.UNRESOLVED, doubt)
        elif any(o.open for _c, o in outcomes):
            self.settle(site, S.UNRESOLVED, "arguments are passed on as *args or **kwargs whose content is not known")
        elif self._hands_on(site, judged, node, scope):
            pass
        elif not self._abstract(site, judged):
            self.settle(site, S.OK)
            signatures = [c.signature for c, _o in outcomes if c.signature is not None]
            dropped = [name for signature in signatures for name in _dropped(signature, site.shape)]
            if dropped:
                note = "it takes any keyword and drops what it does not know"
                problems = tuple(
                    Problem("unknown-kwarg", n, error="none", message=note, now=callee.signature.text(), sure=False)
                    for n in dropped
                    if callee.signature is not None
                )
                self.settle(site, S.RISK, note, problems)
        if not self.muted and not self.dead:
            self.calls_met.append((site, node, option, callee, scope))

    def _abstract(self, site: Site, judged: List[Tuple[Value, Callee]]) -> bool:
        """A class of the provider is made whose abstract methods nobody defines."""
        option = judged[0][0]
        if len(judged) != 1 or not isinstance(option, ClassValue) or not option.exact:
            return False
        if not self.in_provider(option.info.module):
            return False
        line = self.classes.lineage(option.info)
        missing = [] if line.open else left_open(self.classes, option.info, list(line.classes))
        if not missing:
            return False
        name, unit = missing[0].name, missing[0].unit
        text = "Can't instantiate abstract class %s without an implementation for abstract method '%s'"
        at = "%s:%d" % (missing[0].owner.module.file, unit.line if unit is not None else 1)
        now = "%s is abstract in %s" % (name, missing[0].owner.name)
        message = text % (option.info.name, name)
        problem = Problem("override-mismatch", name, error="TypeError", message=message, now=now, now_at=at)
        self.settle(site, S.BREAK, "", (problem,))
        return True

    def _hands_on(self, site: Site, judged: List[Tuple[Value, Callee]], node: ast.Call, scope: FlowScope) -> bool:
        """Judges what the callees hand on as ``*args`` and ``**kwargs``. True when that settles the call."""
        handed = [(c, self.handing.judge(o, c, self.shape(node, c, scope))) for o, c in judged]
        failing = [(c, h) for c, h in handed if h.problems]
        if failing:
            callee, first = failing[0]
            assert first.callee is not None
            sure = len(failing) == len(handed) and all(h.sure for _c, h in failing)
            problems = tuple(call_problem(first.callee, p, sure) for p in first.problems)
            for problem in problems:
                problem.now = handed_text(callee, first.callee)
            reason = "" if sure else "what it hands on is taken on some ways only"
            self.settle(site, S.BREAK if sure else S.RISK, reason, problems)
        elif any(h.reason for _c, h in handed):
            self.settle(site, S.UNRESOLVED, next(h.reason for _c, h in handed if h.reason))
            return True
        return bool(failing)

    def content_known(self, node: ast.Name, scope: Any) -> bool:
        at = scope.enclosing() if isinstance(scope, FlowScope) else scope
        place = getattr(at, "node", None)
        if place is not None and node.id in at.names:
            if id(place) not in self._loose:
                self._loose[id(place)] = loose_names(place)
            return node.id not in self._loose[id(place)]
        return (
            isinstance(scope, FlowScope)
            and at.outer is None
            and scope.module.tree.package != self.provider
            and fixed_in_module(scope.module, node.id)
        )

    def _not_callable(self, node: ast.Call, value: Value, scope: FlowScope) -> bool:
        """A property of the provider that is called: what it gives is called, and that may be nothing to call."""
        if not isinstance(node.func, ast.Attribute) or self.muted:
            return False
        base = self.quiet(node.func.value, scope)
        hits = [h for h in self.attribute(base, node.func.attr).hits if self.touches(h.option)]
        functions = [
            self.classes.function(h.member) for h in hits if h.member is not None and h.member.kind == "method"
        ]
        if not functions or any(f is None or self.decorators.flavour(f) != "property" for f in functions):
            return False
        if not all(self._surely_no_function(o) for o in options(value)):
            return False
        reached = self.path_to(hits[0].option) + "." + node.func.attr
        site = self.site("call", node, scope, symbol=hits[0].target, reached=reached)
        message = "'%s' object is not callable: %s is a property" % (_type_name(options(value)[0]), node.func.attr)
        at = "%s:%d" % (functions[0].module.file, functions[0].unit.line) if functions[0] is not None else ""
        problem = Problem("missing-attribute", "__call__", error="TypeError", message=message, now=message, now_at=at)
        self.settle(site, S.BREAK, "", (problem,))
        return True

    def _not_known(self, node: ast.Call, value: Value, scope: FlowScope) -> None:
        """Something of the provider is called of which the sources do not tell what it takes: never called fine."""
        if not any(isinstance(o, (CallableValue, Unknown)) for o in options(value)):
            return
        name = unparse(node.func)
        if isinstance(node.func, ast.Attribute):
            end = str(getattr(node.func, "end_col_offset", ""))
            place = (scope.module.name, node.func.lineno, node.func.col_offset, "attribute" + end, "")
            looked_up = self.sites.get(place)
            if looked_up is None or looked_up.status != S.OK or looked_up.receiver is None:
                return
            hits = self.attribute(looked_up.receiver, node.func.attr).hits
            if all(h.member is None and not isinstance(h.option, ModuleValue) for h in hits):
                return  # of a base from another library, or super()
            name = looked_up.reached
        elif not isinstance(node.func, ast.Name) or (scope.module.name, name) not in self.unknown_imports:
            return
        site = self.site("call", node, scope, symbol=name, reached=name)
        self.settle(site, S.UNRESOLVED, "what %s takes does not show in the sources" % name)

    def _surely_no_function(self, option: Value) -> bool:
        if isinstance(option, Instance):
            return self.classes.has(option.info, "__call__")[0] is False
        if isinstance(option, ExternalInstance):
            return option.dotted in ("int", "str", "bool", "float", "bytes", "dict", "list", "tuple", "set")
        return isinstance(option, (Sequence, Const)) and not (isinstance(option, Const) and option.value is None)

    def _override_problems(
        self, failing: List[Tuple[Callee, Outcome]], total: int, everywhere: bool
    ) -> Tuple[Problem, ...]:
        """A function that stands in for a method calls what some of the classes it meets do not take: one problem
        a parameter.
        """
        grouped: Dict[str, List[Tuple[Callee, Outcome]]] = {}
        for callee, outcome in failing:
            for problem in outcome.problems:
                grouped.setdefault(problem.name, []).append((callee, outcome))
        found: List[Problem] = []
        for name, group in sorted(grouped.items()):
            callee, outcome = group[0]
            one = call_problem(callee, next(p for p in outcome.problems if p.name == name), False)
            classes = sorted(
                {c.function.owner.name for c, _o in group if c.function is not None and c.function.owner is not None}
            )
            text = "%d of %d classes take no such call: %s" % (len(classes), total, ", ".join(classes[:12]))
            found.append(
                Problem(
                    "override-mismatch",
                    name,
                    error="TypeError",
                    message=one.message,
                    now=text,
                    now_at=one.now_at,
                    sure=everywhere and len(group) == len(failing),
                    extra={"classes": classes},
                )
            )
        return tuple(found)

    def provider_callee(self, option: Value) -> Optional[Callee]:
        if isinstance(option, (External, Unknown, ExternalInstance)):
            return None
        if isinstance(option, (FunctionValue, PartialValue, BoundMethod, Instance, LambdaValue)):
            callee = self.callee(option) if self.touches(option) or isinstance(option, PartialValue) else None
            return callee if callee is not None and callee.provider else None
        if isinstance(option, ClassValue):
            made = self.constructors.of(option.info)
            if self.in_provider(made.where.module) or self.in_provider(option.info.module):
                return self.callee(option)
        return None

    def _reached_call(self, node: ast.Call, option: Value, callee: Callee, scope: FlowScope) -> str:
        if isinstance(option, ClassValue):
            path = self.path_to(option)
            last = callee.symbol.rsplit(".", 1)[-1]
            return (
                path + "." + last
                if last in ("__init__", "__new__") and callee.symbol.startswith(option.info.dotted)
                else path
            )
        if isinstance(option, FunctionValue):
            receiver = option.bound
            if isinstance(receiver, (Instance, ClassValue)) and self.in_provider(receiver.info.module):
                return self.path_to(receiver) + "." + option.info.name
            return self.reached.get(id(option.info), callee.symbol)
        return callee.symbol


def _dropped(signature: Signature, shape: Arguments) -> List[str]:
    """Keywords that a constructor takes and forgets (pydantic's ``extra="ignore"``)."""
    if not signature.drops_unknown:
        return []
    return [name for name in shape.keywords if signature.get(name) is None]


def _type_name(option: Value) -> str:
    if isinstance(option, Instance):
        return option.info.name
    return option.dotted if isinstance(option, ExternalInstance) else getattr(option, "kind", "value")


def call_problem(callee: Callee, problem: Any, sure: bool) -> Problem:
    signature = callee.signature
    assert signature is not None
    name = (
        callee.symbol.rsplit(".", 1)[-1]
        if not callee.symbol.endswith(("__init__", "__new__"))
        else ".".join(callee.symbol.rsplit(".", 2)[-2:])
    )
    texts = {
        "unknown-kwarg": "%s() got an unexpected keyword argument '%s'" % (name, problem.name),
        "missing-required": "%s() missing 1 required argument: '%s'" % (name, problem.name),
        "too-many-positional": "%s() takes at most %s positional arguments" % (name, problem.name),
        "repeated": "%s() got multiple values for argument '%s'" % (name, problem.name),
    }
    kind = "too-many-positional" if problem.kind == "repeated" else problem.kind
    return Problem(
        kind,
        problem.name,
        error=signature.error,
        message=texts[problem.kind],
        now=name + signature.text(),
        now_at="%s:%d" % (callee.file, callee.line),
        sure=sure,
    )


def _asked(keyword: str, scope: FlowScope) -> bool:
    """Whether a condition around the call has looked for the keyword in a signature."""
    at: Any = scope
    while isinstance(at, FlowScope):
        if ("()", keyword) in at.present:
            return True
        at = at.outer
    return False
