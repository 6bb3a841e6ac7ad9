"""Calls of the consumer into the provider: does each fit what is there?"""

from __future__ import annotations

import ast
from typing import Any, Dict, List, Optional, Tuple

from remoteops.agent.audit import sites as S
from remoteops.agent.audit.callees import Callee
from remoteops.agent.audit.flow import FlowScope
from remoteops.agent.audit.keep import Keeper
from remoteops.agent.audit.signatures import (
    POSITIONAL,
    POSITIONAL_ONLY,
    VAR_KEYWORD,
    VAR_POSITIONAL,
    Arguments,
    Outcome,
    Signature,
    bind,
    unparse,
)
from remoteops.agent.audit.sites import Problem
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
    PartialValue,
    Sequence,
    SuperValue,
    Unknown,
    Value,
    options,
)


class CallSites(Keeper):
    """Judges calls as they are met."""

    def on_call(self, node: ast.Call, value: Value, scope: FlowScope) -> None:
        if value == External("setattr") and len(node.args) == 3 and isinstance(node.args[1], ast.Constant):
            self.note_put(self.quiet(node.args[0], scope), str(node.args[1].value))
        judged: List[Tuple[Value, Callee]] = []
        for option in options(value):
            if isinstance(option, ClassValue):
                self.made.add(id(option.info))
            callee = self._provider_callee(option)
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
        for _option, each in judged:
            if each.signature is None:
                doubt = doubt or each.reason
                continue
            outcome = bind(each.signature, self.shape(node, each, scope))
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
            # Of several definitions, what fails in each is sure; if each fails otherwise, the first tells.
            common = [p for p in outcome.problems if all(p in o.problems for _c, o in failing)]
            common = common or list(outcome.problems)
            problems = tuple(call_problem(worst, p, everywhere and p in common) for p in outcome.problems)
            if self.replacing:
                problems = self._override_problems(failing, len(judged), everywhere)
            self.settle(
                site,
                S.BREAK if everywhere else S.RISK,
                "" if everywhere else "%d of %d possible callees do not take this call" % (len(failing), len(judged)),
                problems,
            )
        elif doubt:
            self.settle(site, S.UNRESOLVED, doubt)
        elif any(o.open for _c, o in outcomes):
            self.settle(site, S.UNRESOLVED, "arguments are passed on as *args or **kwargs whose content is not known")
        elif passed_on := next(filter(None, (_passed_on(c, site.shape) for c, _o in outcomes)), ""):
            self.settle(site, S.UNRESOLVED, passed_on)
        else:
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
        if not any(isinstance(o, CallableValue) or (isinstance(o, Unknown) and o.reach) for o in options(value)):
            return
        name = unparse(node.func)
        if isinstance(node.func, ast.Attribute):
            end = str(getattr(node.func, "end_col_offset", ""))
            place = (scope.module.name, node.func.lineno, node.func.col_offset, "attribute" + end, "")
            looked_up = self.sites.get(place)
            if looked_up is None or looked_up.status != S.OK or looked_up.receiver is None:
                return
            if isinstance(looked_up.receiver, SuperValue):
                return
            name = looked_up.reached
        elif not isinstance(node.func, ast.Name) or not any(isinstance(o, Unknown) for o in options(value)):
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

    def _provider_callee(self, option: Value) -> Optional[Callee]:
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


def _passed_on(callee: Callee, shape: Arguments) -> str:
    """What this call gives that the function takes as ``*args`` or ``**kwargs`` and hands to another: whether it fits
    there is not judged, so the call is not called fine. Empty: nothing of the kind.
    """
    signature, node = callee.signature, callee.function.node if callee.function is not None else None
    if signature is None or node is None:
        return ""
    rest = {p.kind: p.name for p in signature.parameters if p.kind in (VAR_POSITIONAL, VAR_KEYWORD)}
    places = sum(p.kind in (POSITIONAL_ONLY, POSITIONAL) for p in signature.parameters)
    names = [name for name in shape.keywords if VAR_KEYWORD in rest and signature.get(name) is None]
    more = VAR_POSITIONAL in rest and shape.positional > places
    for call in ast.walk(node) if names or more else ():
        if not isinstance(call, ast.Call):
            continue
        starred = [a.value for a in call.args if isinstance(a, ast.Starred)]
        doubled = [k.value for k in call.keywords if k.arg is None]
        if (more and _names(starred, rest[VAR_POSITIONAL])) or (names and _names(doubled, rest[VAR_KEYWORD])):
            given = ", ".join(names) or "more positional arguments"
            return "%s is only passed on to %s(), which was not judged with it" % (given, ast.unparse(call.func))
    return ""


def _names(values: List[ast.expr], name: str) -> bool:
    return any(isinstance(value, ast.Name) and value.id == name for value in values)


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
