"""Expressions in the flow: each evaluated once, with what conditions say about the objects in them."""

from __future__ import annotations

import ast
from typing import Any, Dict, Iterator, List, Optional

from remoteops.agent.audit.contents import after
from remoteops.agent.audit.evaluate import Evaluator, Scope
from remoteops.agent.audit.flowscope import FlowScope
from remoteops.agent.audit.modules import last_name
from remoteops.agent.audit.plain import NOTHING
from remoteops.agent.audit.signatures import unparse
from remoteops.agent.audit.syntax import FunctionNode
from remoteops.agent.audit.values import (
    NONE,
    UNKNOWN,
    ClassValue,
    Const,
    External,
    ExternalInstance,
    FunctionValue,
    Instance,
    Sequence,
    Union_,
    Unknown,
    Value,
    join,
    options,
)

# Expressions that name one of these list the parameters or fields that a callable takes.
_PARAMETERS = {
    "signature",
    "getfullargspec",
    "co_varnames",
    "__dataclass_fields__",
    "model_fields",
    "__struct_fields__",
    "__annotations__",
    "get_type_hints",
}


class Conditions(Evaluator):
    """Evaluation in a FlowScope. What is met is handed to ``on_attribute`` and ``on_call`` of the class below."""

    dead: int
    muted: int

    def on_attribute(self, node: ast.Attribute, base: Value, scope: FlowScope) -> Optional[Value]:
        raise NotImplementedError

    def on_call(self, node: ast.Call, value: Value, scope: FlowScope) -> None:
        raise NotImplementedError

    def evaluate(self, node: Optional[ast.expr], scope: Scope) -> Value:
        if node is None or not isinstance(scope, FlowScope):
            return super().evaluate(node, scope)
        if id(node) in scope.memo:
            return scope.memo[id(node)]
        if scope.refined and isinstance(node, (ast.Name, ast.Attribute)):
            found = scope.refined.get(unparse(node))
            if found is not None:
                if isinstance(node, ast.Attribute):
                    self.eval_attribute(node, scope)
                return found
        value = super().evaluate(node, scope)
        scope.memo[id(node)] = value
        return value

    def eval_attribute(self, node: ast.Attribute, scope: Scope) -> Value:
        if not isinstance(scope, FlowScope):
            return super().eval_attribute(node, scope)
        base = self.evaluate(node.value, scope)
        found = self.on_attribute(node, base, scope)
        return self.attribute(base, node.attr).value if found is None else found

    def eval_call(self, node: ast.Call, scope: Scope) -> Value:
        if not isinstance(scope, FlowScope):
            return super().eval_call(node, scope)
        value = self.evaluate(node.func, scope)
        for argument in node.args:
            self.evaluate(argument.value if isinstance(argument, ast.Starred) else argument, scope)
        for keyword in node.keywords:
            self.evaluate(keyword.value, scope)
        self.on_call(node, value, scope)
        result = self.call(value, node, scope)
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            given = {str(n): self.evaluate(a, scope) for n, a in enumerate(node.args)}
            given.update({k.arg: self.evaluate(k.value, scope) for k in node.keywords if k.arg})
            self.change(node.func.value, node, given, scope)
        return result

    def change(self, target: ast.expr, node: ast.AST, given: Dict[str, Value], scope: FlowScope) -> None:
        """Writes into a scope what a statement does to the dict or list of a name."""
        if isinstance(target, ast.Name) and target.id in scope.names:
            old = scope.names[target.id]
            if any(isinstance(o, Sequence) and o.kind in ("dict", "list") for o in options(old)):
                scope.names[target.id] = join([after(o, node, given) for o in options(old)])

    def eval_conditional(self, node: ast.IfExp, scope: Scope) -> Value:
        if not isinstance(scope, FlowScope):
            return super().eval_conditional(node, scope)
        outcome = self.evaluate(node.test, scope)
        found: List[Value] = []
        for truth, part in ((True, node.body), (False, node.orelse)):
            inside = scope.fork()
            possible = self.narrow(node.test, truth, inside)
            dead = not possible or (isinstance(outcome, Const) and bool(outcome.value) is not truth)
            self.dead += dead
            value = self.evaluate(part, inside)
            self.dead -= dead
            if not dead:
                found.append(value)
        return join(found)

    def eval_boolean(self, node: ast.BoolOp, scope: Scope) -> Value:
        if not isinstance(scope, FlowScope):
            return super().eval_boolean(node, scope)
        conjunction = isinstance(node.op, ast.And)
        inside = scope.fork()
        found: List[Value] = []
        dead = 0
        for part in node.values:
            inside.memo = {}
            value = self.evaluate(part, inside)
            scope.names.update(inside.names)
            if not dead:
                found.append(value)
            if not self.narrow(part, conjunction, inside) or (
                isinstance(value, Const) and bool(value.value) is not conjunction
            ):
                dead += 1
                self.dead += 1
        self.dead -= dead
        constants = [v for v in found if isinstance(v, Const)]
        if dead and found and isinstance(found[-1], Const) and bool(found[-1].value) is not conjunction:
            return found[-1]
        if len(constants) == len(node.values):
            return constants[-1]
        if any(isinstance(v, Unknown) and v.via == "version" for v in found):
            return Unknown(False, "version")
        return join(found)

    def bind_name(self, target: ast.expr, value: Value, scope: Scope) -> None:
        at: Any = scope
        while isinstance(at, FlowScope) and at.node is None and at.function is None and isinstance(at.outer, FlowScope):
            at = at.outer
        if isinstance(target, ast.Name) and isinstance(at, FlowScope):
            at.names[target.id] = value
            if isinstance(scope, FlowScope):
                scope.names[target.id] = value

    def comprehension_scope(self, scope: Scope) -> Scope:
        if not isinstance(scope, FlowScope):
            return super().comprehension_scope(scope)
        inner = FlowScope(self, scope.module, None, outer=scope, owner=scope.owner)
        inner.refined, inner.present, inner.qualname = scope.refined, scope.present, scope.qualname
        inner.node = None
        return inner

    def enter_lambda(self, node: ast.Lambda, scope: Scope) -> None:
        if not isinstance(scope, FlowScope):
            return
        inner = self.comprehension_scope(scope)
        for argument in (
            node.args.posonlyargs
            + node.args.args
            + node.args.kwonlyargs
            + [a for a in (node.args.vararg, node.args.kwarg) if a]
        ):
            inner.names[argument.arg] = UNKNOWN
        self.evaluate(node.body, inner)

    def narrow(self, test: ast.expr, truth: bool, scope: FlowScope) -> bool:
        """Writes into a scope what holds when a condition came out so. False when it cannot come out so."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.narrow(test.operand, not truth, scope)
        if isinstance(test, ast.BoolOp):
            if isinstance(test.op, ast.And) is truth:
                outcomes = [self.narrow(part, truth, scope) for part in test.values]
                return all(outcomes)
            return True
        if isinstance(test, ast.NamedExpr):
            return self.narrow(test.target, truth, scope)
        if isinstance(test, ast.Call):
            return self._narrow_call(test, truth, scope)
        if (
            isinstance(test, ast.Compare)
            and len(test.ops) == 1
            and isinstance(test.comparators[0], ast.Constant)
            and test.comparators[0].value is None
        ):
            if isinstance(test.ops[0], (ast.Is, ast.Eq)):
                return self._none(test.left, truth, scope)
            if isinstance(test.ops[0], (ast.IsNot, ast.NotEq)):
                return self._none(test.left, not truth, scope)
        elif isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], (ast.In, ast.NotIn)):
            if isinstance(test.ops[0], ast.In) is truth:
                self._asked_for(test.left, test.comparators[0], scope)
        elif isinstance(test, (ast.Name, ast.Attribute)) and truth:
            return self._none(test, False, scope)
        return True

    def _asked_for(self, left: ast.expr, right: ast.expr, scope: FlowScope) -> None:
        """``"x" in dir(obj)`` and ``"x" in inspect.signature(f).parameters`` came out true."""
        if not isinstance(left, ast.Constant) or not isinstance(left.value, str):
            return
        if isinstance(right, ast.Call) and last_name(right.func) == "dir" and len(right.args) == 1:
            scope.present.add((unparse(right.args[0]), left.value))
        elif any(_lists_parameters(expression) for expression in (right, *_written(right, scope))):
            scope.present.add(("()", left.value))

    def _none(self, node: ast.expr, is_none: bool, scope: FlowScope) -> bool:
        """Writes in that something is None, or is not. False when it cannot be so."""
        target = node.target if isinstance(node, ast.NamedExpr) else node
        if not isinstance(target, (ast.Name, ast.Attribute)):
            return True
        value = self.quiet(target, scope)
        if isinstance(value, ExternalInstance) and value.dotted == NOTHING:
            return is_none
        if is_none:
            self.refine(target, NONE, scope)
        elif isinstance(value, Union_) and NONE in value.options:
            self.refine(target, join([o for o in value.options if o != NONE]), scope)
        return True

    def refine(self, target: ast.expr, value: Value, scope: FlowScope) -> None:
        if isinstance(target, ast.Name):
            scope.names[target.id] = value
        else:
            scope.refined[unparse(target)] = value

    def quiet(self, node: ast.expr, scope: FlowScope) -> Value:
        """Evaluates without reporting sites."""
        self.muted += 1
        held, scope.memo = scope.memo, dict(scope.memo)
        try:
            return self.evaluate(node, scope)
        finally:
            scope.memo = held
            self.muted -= 1

    def _narrow_call(self, test: ast.Call, truth: bool, scope: FlowScope) -> bool:
        name = last_name(test.func)
        if (
            name == "hasattr"
            and len(test.args) == 2
            and isinstance(test.args[1], ast.Constant)
            and isinstance(test.args[1].value, str)
        ):
            attr = test.args[1].value
            if truth:
                scope.present.add((unparse(test.args[0]), attr))
            hits = self.attribute(self.quiet(test.args[0], scope), attr).hits
            if hits and all(h.status == "missing" for h in hits):
                return not truth
            if hits and all(h.status == "found" for h in hits):
                return truth
            return True
        if (
            name == "isinstance"
            and len(test.args) == 2
            and truth
            and isinstance(test.args[0], (ast.Name, ast.Attribute))
        ):
            kinds = self.quiet(test.args[1], scope)
            parts = [p for o in options(kinds) for p in (o.parts or () if isinstance(o, Sequence) else (o,))]
            if self._cannot_be(self.quiet(test.args[0], scope), parts):
                return False
            if parts and all(isinstance(p, (ClassValue, External)) for p in parts):
                self.refine(
                    test.args[0],
                    join([Instance(p.info) if isinstance(p, ClassValue) else UNKNOWN for p in parts]),
                    scope,
                )
            return True
        if test.args and isinstance(test.args[0], (ast.Name, ast.Attribute)):
            self._type_guard(test, truth, scope)
        return True

    def _cannot_be(self, value: Value, kinds: List[Value]) -> bool:
        """Whether objects whose classes are known exactly are of none of some classes."""
        wanted = {id(k.info) for k in kinds if isinstance(k, ClassValue)}
        lines = [
            self.classes.lineage(o.info) for o in options(value) if isinstance(o, Instance) and o.exact and not o.items
        ]
        if len(wanted) != len(kinds) or not kinds or len(lines) != len(options(value)):
            return False
        return not any(line.open or any(id(c) in wanted for c in line.classes) for line in lines)

    def _type_guard(self, test: ast.Call, truth: bool, scope: FlowScope) -> None:
        """A function declared ``-> TypeGuard[X]`` or ``TypeIs[X]`` that came out true says what its argument is."""
        value = self.quiet(test.func, scope)
        if not truth or not isinstance(value, FunctionValue):
            return
        node: Optional[FunctionNode] = value.info.node
        found: List[Value] = []
        for inner in _guards(node.returns) if node is not None else []:
            declared = self.annotation(inner, value.info.module, value.info.owner)
            found.extend(o for o in options(declared) if isinstance(o, Instance))
        if found:
            self.refine(test.args[0], join(found), scope)


def _lists_parameters(node: ast.expr) -> bool:
    return any(getattr(n, "attr", getattr(n, "id", "")) in _PARAMETERS for n in ast.walk(node))


def _written(node: ast.expr, scope: FlowScope) -> List[ast.expr]:
    """What the function (or module) that a condition stands in assigns to the name in the condition."""
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return []
    text, function = unparse(node), scope.enclosing().node
    places = [function] if function is not None else scope.module.body.statements
    return [
        inner.value
        for place in places
        for inner in ast.walk(place)
        if isinstance(inner, ast.Assign) and any(unparse(target) == text for target in inner.targets)
    ]


def _guards(node: Optional[ast.expr]) -> Iterator[ast.expr]:
    """What stands inside ``TypeGuard[…]`` and ``TypeIs[…]`` of a return annotation, which may be a string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            node = ast.parse(node.value, mode="eval").body
        except (SyntaxError, ValueError, RecursionError):
            return
    for inner in ast.walk(node) if node is not None else []:
        if isinstance(inner, ast.Subscript) and last_name(inner.value) in ("TypeGuard", "TypeIs"):
            yield inner.slice
