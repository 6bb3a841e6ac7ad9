"""What a function takes as ``*args`` and ``**kwargs`` and hands on to another one: does it fit there?"""

from __future__ import annotations

import ast
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from remoteops.agent.audit.callees import Callee
from remoteops.agent.audit.calls import Calls
from remoteops.agent.audit.constructors import Constructors
from remoteops.agent.audit.index import FunctionInfo
from remoteops.agent.audit.modules import last_name
from remoteops.agent.audit.signatures import (
    POSITIONAL,
    POSITIONAL_ONLY,
    VAR_KEYWORD,
    VAR_POSITIONAL,
    Arguments,
    Problem,
    bind,
)
from remoteops.agent.audit.syntax import FunctionNode
from remoteops.agent.audit.values import BoundMethod, ClassValue, FunctionValue, Instance, SuperValue, Value, options

MAX_HANDS = 4


class Handed(NamedTuple):
    """``problems``: why the last callee does not take it; ``sure``: the way there has no condition on it;
    ``reason``: why it was not judged, if it was not and something was handed on."""

    callee: Optional[Callee] = None
    problems: Tuple[Problem, ...] = ()
    sure: bool = True
    reason: str = ""


FINE = Handed()


class HandingOn:
    """Follows calls from a function's rest parameters. ``evaluator``: what evaluates expressions."""

    def __init__(self, evaluator: Any) -> None:
        self.evaluator: Any = evaluator
        self.constructors: Constructors = evaluator.constructors

    def judge(self, option: Value, callee: Callee, shape: Arguments, depth: int = 0) -> Handed:
        """The judgement on what a call of ``option`` that fits its own parameters hands on."""
        function, receiver = self._function(option, callee)
        signature, node = callee.signature, function.node if function is not None else None
        if function is None or signature is None or node is None or depth > MAX_HANDS:
            return FINE
        rest = {p.kind: p.name for p in signature.parameters if p.kind in (VAR_POSITIONAL, VAR_KEYWORD)}
        own = {VAR_POSITIONAL: node.args.vararg, VAR_KEYWORD: node.args.kwarg}
        if not rest or any(own[kind] is None or own[kind].arg != name for kind, name in rest.items()):  # type: ignore[union-attr]
            return FINE  # a decorator's parameters, not those of the body
        places = sum(p.kind in (POSITIONAL_ONLY, POSITIONAL) for p in signature.parameters)
        names = [n for n in (*shape.keywords, *shape.maybe) if VAR_KEYWORD in rest and signature.get(n) is None]
        more = max(shape.positional - places, 0) if VAR_POSITIONAL in rest else 0
        given = ", ".join(names) or ("more positional arguments" if more else "")
        found: List[Handed] = []
        for call in ast.walk(node):
            passes = _passes(call, rest) if isinstance(call, ast.Call) else (False, False)
            if isinstance(call, ast.Call) and any(passes):
                found.append(self._one(function, receiver, call, passes, rest, names, more, shape, depth, given))
        failing = [h for h in found if h.problems]
        if not failing:
            return next((h for h in found if h.reason), FINE)
        return failing[0]._replace(sure=failing[0].sure and len(found) == 1)

    def _one(
        self,
        function: FunctionInfo,
        receiver: Optional[Value],
        call: ast.Call,
        passes: Tuple[bool, bool],
        rest: Dict[str, str],
        names: List[str],
        more: int,
        shape: Arguments,
        depth: int,
        given: str,
    ) -> Handed:
        node = function.node
        assert node is not None
        text = ast.unparse(call.func)
        doubtful = Handed(reason="%s is only passed on to %s(), which was not judged with it" % (given, text))
        doubtful = doubtful if given else FINE
        star, double = rest.get(VAR_POSITIONAL, ""), rest.get(VAR_KEYWORD, "")
        taken, added, changed = _changes(node, double)
        others = any(isinstance(a, ast.Starred) and last_name(a.value) != star for a in call.args)
        if changed or others or any(isinstance(n, ast.Name) and n.id == star and _stored(n) for n in ast.walk(node)):
            return doubtful
        inner, target = self._target(function, receiver, call)
        if inner is None or inner.signature is None or inner.signature.doubt:
            return doubtful
        extra = tuple(n for n in names if n not in taken and n not in added) if passes[1] else ()
        arguments = Arguments(
            sum(not isinstance(a, ast.Starred) for a in call.args) + (more if passes[0] else 0),
            tuple(k.arg for k in call.keywords if k.arg) + extra + (tuple(added) if passes[1] else ()),
            shape.star and passes[0],
            (shape.double_star and passes[1])
            or any(k.arg is None and last_name(k.value) != double for k in call.keywords),
        )
        sure = _unconditional(node.body, call)
        outcome = bind(inner.signature, arguments)
        if outcome.problems:
            return Handed(inner, outcome.problems, sure and not shape.maybe)
        below = self.judge(target, inner, arguments, depth + 1)
        return below._replace(sure=below.sure and sure)

    def _function(self, option: Value, callee: Callee) -> Tuple[Optional[FunctionInfo], Optional[Value]]:
        """The function whose body runs, and what its first parameter is."""
        if isinstance(option, ClassValue):
            made = self.constructors.of(option.info)
            member = self.constructors.classes.effective(self.constructors.classes.own(made.where, made.name))
            function = self.constructors.classes.function(member) if member is not None else None
            return (function, Instance(option.info, option.exact)) if made.name == "__init__" else (None, None)
        if isinstance(option, BoundMethod):
            return callee.function, option.receiver
        return callee.function, option.bound if isinstance(option, FunctionValue) else None

    def _target(
        self, function: FunctionInfo, receiver: Optional[Value], call: ast.Call
    ) -> Tuple[Optional[Callee], Value]:
        calls: Calls = self.evaluator
        value = calls.evaluate(call.func, calls.lazy_scope(function, receiver))
        if isinstance(call.func, ast.Attribute) and isinstance(receiver, Instance):
            base = calls.evaluate(call.func.value, calls.lazy_scope(function, receiver))
            if isinstance(base, SuperValue):
                line = calls.classes.lineage(receiver.info).classes
                after = line[line.index(base.info) + 1 :] if base.info in line else ()
                if after != calls.classes.lineage(base.info).classes[1:]:
                    return None, value
                if call.func.attr == "__init__" and not isinstance(value, FunctionValue):
                    return self._generated(receiver, after), value
        return (self.evaluator.callee(value), value) if len(options(value)) == 1 else (None, value)

    def _generated(self, receiver: Instance, after: Any) -> Optional[Callee]:
        """The constructor that ``super().__init__`` reaches where nobody wrote one."""
        model = self.constructors.family(receiver.info) == "model"
        base = self.constructors.of(after[0]) if after else None
        made = self.constructors.generated(receiver.info) if model else base
        if made is None or made.name in ("__init__", "__new__"):
            return None
        return Callee(made.signature, made.where.dotted, "", made.where.module.file, made.line)


def handed_text(first: Callee, last: Callee) -> str:
    """Both signatures, for a reader."""
    texts = [c.symbol.rsplit(".", 1)[-1] + (c.signature.text() if c.signature else "(…)") for c in (first, last)]
    return "%s hands it on to %s" % tuple(texts)


def _passes(call: ast.Call, rest: Dict[str, str]) -> Tuple[bool, bool]:
    star, double = rest.get(VAR_POSITIONAL), rest.get(VAR_KEYWORD)
    starred = [a.value for a in call.args if isinstance(a, ast.Starred)]
    doubled = [k.value for k in call.keywords if k.arg is None]
    return _names(starred, star), _names(doubled, double)


def _names(values: List[ast.expr], name: Optional[str]) -> bool:
    return any(isinstance(value, ast.Name) and value.id == name for value in values)


def _stored(node: ast.Name) -> bool:
    return isinstance(node.ctx, (ast.Store, ast.Del))


def _changes(node: FunctionNode, name: str) -> Tuple[List[str], List[str], bool]:
    """(names taken out of the dict, names put in, whether it is changed in any other way)."""
    taken: List[str] = []
    added: List[str] = []
    changed = False
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id == name and _stored(inner):
            changed = True
        elif isinstance(inner, ast.Subscript) and last_name(inner.value) == name:
            if not isinstance(inner.ctx, ast.Load):
                (taken if isinstance(inner.ctx, ast.Del) else added).append(_text(inner.slice))
        elif isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
            if last_name(inner.func.value) != name:
                continue
            if inner.func.attr in ("pop", "setdefault") and inner.args:
                (taken if inner.func.attr == "pop" else added).append(_text(inner.args[0]))
            elif inner.func.attr in ("update", "clear", "popitem"):
                changed = True
    return taken, added, changed or "" in taken or "" in added


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _unconditional(body: List[ast.stmt], call: ast.Call) -> bool:
    """Whether control that enters a body surely comes to a call in it."""
    for statement in body:
        inside = list(ast.walk(statement))
        if any(inner is call for inner in inside):
            if isinstance(statement, (ast.With, ast.AsyncWith)):
                return _unconditional(statement.body, call)
            plain = isinstance(statement, (ast.Return, ast.Expr, ast.Assign, ast.AnnAssign))
            around = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.DictComp, ast.GeneratorExp, ast.SetComp)
            return plain and not any(isinstance(n, around) and call in list(ast.walk(n)) for n in inside)
        if any(isinstance(n, (ast.Return, ast.Raise, ast.Yield, ast.YieldFrom)) for n in inside):
            return False
    return False
