"""The walk through the consumer: statements in order, with branches that cannot be taken left out."""

from __future__ import annotations

import ast
from typing import Any, Dict, FrozenSet, Iterator, List, Optional, Set, Tuple

from remoteops.agent.audit.classes import Classes
from remoteops.agent.audit.evaluate import Evaluator, Scope
from remoteops.agent.audit.index import ClassInfo, FunctionInfo, Index
from remoteops.agent.audit.modules import Module, handler_catches, is_type_checking, last_name
from remoteops.agent.audit.signatures import unparse
from remoteops.agent.audit.syntax import FunctionNode, Unit, unit_of
from remoteops.agent.audit.values import (
    NONE,
    UNKNOWN,
    ClassValue,
    Const,
    External,
    FunctionValue,
    Instance,
    Sequence,
    Union_,
    Unknown,
    Value,
    elements,
    join,
    options,
)

IMPORTS = frozenset({"ImportError", "ModuleNotFoundError"})
CAUGHT = (
    "ImportError",
    "ModuleNotFoundError",
    "AttributeError",
    "TypeError",
    "ValidationError",
    "ValueError",
    "RuntimeError",
    "Exception",
    "BaseException",
)


class FlowScope(Scope):
    """A scope whose names change as statements are walked. ``refined``: what conditions say about attribute chains."""

    def __init__(
        self,
        evaluator: Evaluator,
        module: Module,
        function: Optional[FunctionInfo] = None,
        *,
        receiver: Optional[Value] = None,
        outer: Optional[Scope] = None,
        owner: Optional[ClassInfo] = None,
    ) -> None:
        super().__init__(evaluator, module, function, receiver=receiver, outer=outer)
        if owner is not None:
            self.owner = owner
        self.refined: Dict[str, Value] = {}
        self.present: Set[Tuple[str, str]] = set()
        self.memo: Dict[int, Value] = {}
        self.node: Optional[ast.AST] = function.node if function is not None else None
        self.qualname = function.qualname if function is not None else ""
        # Where decorators, defaults and annotations of methods are evaluated: in the class body.
        self.place: Optional[FlowScope] = None

    def fork(self) -> FlowScope:
        """The same scope with its own copies of what may change."""
        other = FlowScope(
            self.evaluator, self.module, self.function, receiver=self.receiver, outer=self.outer, owner=self.owner
        )
        other.names = dict(self.names)
        other.refined = dict(self.refined)
        other.present = set(self.present)
        other.node, other.qualname, other.arguments = self.node, self.qualname, self.arguments
        return other

    def take(self, branches: List[FlowScope]) -> None:
        """Joins the states at the ends of branches into this one."""
        if not branches:
            return
        names: Dict[str, Value] = {}
        for name in {n for b in branches for n in b.names}:
            found = [b.names[name] for b in branches if name in b.names]
            names[name] = join(found)
        self.names = names
        self.refined = {
            k: v for k, v in branches[0].refined.items() if all(b.refined.get(k) == v for b in branches[1:])
        }
        self.present = set.intersection(*[b.present for b in branches])
        self.memo = {}

    def enclosing(self) -> FlowScope:
        """This scope, or for comprehensions and lambdas the one they stand in."""
        at: Any = self
        while at.node is None and isinstance(at.outer, FlowScope):
            at = at.outer
        return at  # type: ignore[no-any-return]


class Flow(Evaluator):
    """Walks modules of the consumer. What is met is handed to ``on_…`` methods of the class below."""

    def __init__(self, index: Index, provider: str) -> None:
        super().__init__(index, provider)
        self.dead = 0
        self.muted = 0
        self.caught: List[FrozenSet[str]] = []
        self.version_guard = 0
        self.statement: Optional[ast.stmt] = None
        self.failed_imports: Set[int] = set()

    # -- hooks -------------------------------------------------------------------------------------------------------

    def on_attribute(self, node: ast.Attribute, base: Value, scope: FlowScope) -> Optional[Value]:
        raise NotImplementedError

    def on_call(self, node: ast.Call, value: Value, scope: FlowScope) -> None:
        raise NotImplementedError

    def on_import(self, node: Any, alias: ast.alias, scope: FlowScope) -> Value:
        raise NotImplementedError

    def on_store(self, node: ast.Attribute, value: Value, scope: FlowScope) -> None:
        raise NotImplementedError

    def on_class(self, info: ClassInfo, scope: FlowScope) -> None:
        raise NotImplementedError

    # -- modules, classes, functions ---------------------------------------------------------------------------------

    def walk_module(self, module: Module) -> None:
        """Walks a module's statements, then its functions and classes."""
        scope = FlowScope(self, module)
        self.walk(module.body.statements, scope)
        for unit in module.body.units:
            self._definition(unit, scope, "", None)

    def _definition(self, unit: Unit, scope: FlowScope, prefix: str, owner: Optional[ClassInfo]) -> None:
        if unit.kind == "class":
            self.walk_class(self.index.class_info(scope.module, unit, prefix, scope.function), scope)
        else:
            self.walk_function(self.index.function_info(scope.module, unit, prefix, owner, scope.function), scope)

    def walk_class(self, info: ClassInfo, outer: FlowScope) -> None:
        header = self.classes.header(info)
        if header is None:
            return
        for node in list(header.bases) + [k.value for k in header.keywords] + list(header.decorator_list):
            self.evaluate(node, outer)
        scope = FlowScope(self, info.module, None, outer=outer, owner=info)
        scope.qualname = info.qualname
        self.walk(info.unit.body().statements, scope)
        for unit in info.unit.body().units:
            inside = FlowScope(self, info.module, outer.function, outer=outer.outer, receiver=outer.receiver)
            inside.names, inside.qualname, inside.node = outer.names, outer.qualname, outer.node
            inside.place = scope
            self._definition(unit, inside, info.qualname + ".", info)
        self.on_class(info, outer)

    def walk_function(self, function: FunctionInfo, outer: FlowScope) -> None:
        node = function.node
        if node is None:
            return
        place = outer.place or outer
        for decorator in node.decorator_list:
            if last_name(decorator) not in ("setter", "getter", "deleter"):
                self.evaluate(decorator, place)
        for default in list(node.args.defaults) + [d for d in node.args.kw_defaults if d is not None]:
            self.evaluate(default, place)
        if not _postponed(function.module):
            arguments = (
                node.args.posonlyargs
                + node.args.args
                + node.args.kwonlyargs
                + [a for a in (node.args.vararg, node.args.kwarg) if a]
            )
            for annotation in [a.annotation for a in arguments] + [node.returns]:
                if annotation is not None and not isinstance(annotation, ast.Constant):
                    self.evaluate(annotation, place)
        receiver: Optional[Value] = None
        if function.owner is not None and self.decorators.flavour(function) in ("function", "property"):
            receiver = Instance(function.owner)
        closure = outer if (outer.function is not None or outer.owner is not None) else None
        scope = FlowScope(self, function.module, function, receiver=receiver, outer=closure)
        held, self.caught = self.caught, []
        self.walk(node.body, scope)
        self.caught = held

    # -- statements --------------------------------------------------------------------------------------------------

    def walk(self, statements: List[ast.stmt], scope: FlowScope) -> bool:
        """Walks statements; True when control does not come out at the end."""
        ended = False
        for statement in statements:
            if ended:
                self.dead += 1
            scope.memo = {}
            before, self.statement = self.statement, statement
            try:
                done = self._statement(statement, scope)
            finally:
                self.statement = before
            if ended:
                self.dead -= 1
            ended = ended or done
        return ended

    def _statement(self, node: ast.stmt, scope: FlowScope) -> bool:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                value = self.on_import(node, alias, scope)
                if alias.name != "*":
                    name = alias.asname or (alias.name.split(".")[0] if isinstance(node, ast.Import) else alias.name)
                    scope.names[name] = value
        elif isinstance(node, ast.Assign):
            value = self.evaluate(node.value, scope)
            for target in node.targets:
                self.assign(target, value, scope)
        elif isinstance(node, ast.AnnAssign):
            self._annotated(node, scope)
        elif isinstance(node, ast.AugAssign):
            self.evaluate(node.value, scope)
            if isinstance(node.target, ast.Attribute):
                self.evaluate(node.target.value, scope)
            elif isinstance(node.target, ast.Name):
                scope.names[node.target.id] = join([scope.get(node.target.id) or UNKNOWN])
        elif isinstance(node, ast.Expr):
            self.evaluate(node.value, scope)
        elif isinstance(node, (ast.Return, ast.Raise)):
            for field in ("value", "exc", "cause"):
                inner = getattr(node, field, None)
                if inner is not None:
                    self.evaluate(inner, scope)
            return True
        elif isinstance(node, (ast.Break, ast.Continue)):
            return True
        elif isinstance(node, ast.If):
            return self._if(node, scope)
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            value = self.iterated(self.evaluate(node.iter, scope))
            if isinstance(node, ast.AsyncFor):
                value = join(
                    [
                        self.awaited(o) if isinstance(o, Sequence) and o.kind == "awaitable" else o
                        for o in options(value)
                    ]
                )
            self.assign(node.target, elements(value), scope)
            self._loop(node.body, node.orelse, scope)
        elif isinstance(node, ast.While):
            self.evaluate(node.test, scope)
            inside = scope.fork()
            self.narrow(node.test, True, inside)
            self._loop(node.body, node.orelse, scope, inside)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            return self._with(node, scope)
        elif isinstance(node, ast.Try) or node.__class__.__name__ == "TryStar":
            return self._try(node, scope)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self._nested(node, scope)
        elif isinstance(node, ast.Assert):
            self.evaluate(node.test, scope)
            self.narrow(node.test, True, scope)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    scope.names.pop(target.id, None)
        elif node.__class__.__name__ == "Match":
            self._match(node, scope)
        return False

    def _annotated(self, node: ast.AnnAssign, scope: FlowScope) -> None:
        value = self.evaluate(node.value, scope) if node.value is not None else UNKNOWN
        if scope.function is None and not _postponed(scope.module) and not isinstance(node.annotation, ast.Constant):
            self.evaluate(node.annotation, scope)
        declared = self.annotation(node.annotation, scope.module, scope.owner)
        exact = [o for o in options(value) if isinstance(o, Instance) and o.exact]
        if node.value is not None or isinstance(node.target, ast.Name):
            self.assign(node.target, value if declared == UNKNOWN or exact else declared, scope)

    def assign(self, target: ast.expr, value: Value, scope: FlowScope) -> None:
        """Stores a value into a target, and reports stores into attributes."""
        if isinstance(target, ast.Name):
            scope.names[target.id] = value
            for key in [k for k in scope.refined if k == target.id or k.startswith(target.id + ".")]:
                del scope.refined[key]
        elif isinstance(target, (ast.Tuple, ast.List)):
            for place, element in enumerate(target.elts):
                if isinstance(element, ast.Starred):
                    self.assign(element.value, Sequence("list", None, elements(value)), scope)
                else:
                    self.assign(element, self.item(value, place, len(target.elts)), scope)
        elif isinstance(target, ast.Attribute):
            self.on_store(target, value, scope)
            key = unparse(target)
            for other in [k for k in scope.refined if k.startswith(key + ".")]:
                del scope.refined[other]
            scope.refined[key] = value
        elif isinstance(target, ast.Subscript):
            self.evaluate(target.value, scope)
            self.evaluate(target.slice, scope)

    def _if(self, node: ast.If, scope: FlowScope) -> bool:
        typing = is_type_checking(node.test)
        held = self.version_guard
        if typing is not None and last_name(getattr(node.test, "operand", node.test)) == "TYPE_CHECKING":
            outcome: Value = Const(not typing)
            # Imports for the type checker: names are known, but nothing happens there at run time.
            self._typing_block(node.body if typing else node.orelse, scope)
            return self.walk(node.orelse if typing else node.body, scope)
        outcome = self.evaluate(node.test, scope)
        if isinstance(outcome, Unknown) and outcome.via == "version":
            self.version_guard += 1
        ends: List[FlowScope] = []
        closed = []
        for truth, body in ((True, node.body), (False, node.orelse)):
            inside = scope.fork()
            possible = self.narrow(node.test, truth, inside)
            dead = not possible or (isinstance(outcome, Const) and bool(outcome.value) is not truth)
            if dead:
                self.dead += 1
            ended = self.walk(body, inside)
            if dead:
                self.dead -= 1
            closed.append(ended or dead)
            if not ended and not dead:
                ends.append(inside)
        self.version_guard = held
        if ends:
            scope.take(ends)
        return all(closed)

    def _typing_block(self, body: List[ast.stmt], scope: FlowScope) -> None:
        for statement in body:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                for alias in statement.names:
                    name = alias.asname or alias.name.split(".")[0]
                    scope.names[name] = self.imported_name(statement, name, scope.module)

    def _loop(
        self, body: List[ast.stmt], orelse: List[ast.stmt], scope: FlowScope, inside: Optional[FlowScope] = None
    ) -> None:
        inner = inside or scope.fork()
        self.walk(body, inner)
        scope.take([scope.fork(), inner])
        self.walk(orelse, scope)

    def _with(self, node: Any, scope: FlowScope) -> bool:
        guards: Set[str] = set()
        for item in node.items:
            value = self.evaluate(item.context_expr, scope)
            call = item.context_expr
            if isinstance(call, ast.Call) and last_name(call.func) in ("suppress", "raises"):
                guards.update(last_name(a) for a in call.args)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, self.entered(value), scope)
        if guards:
            self.caught.append(frozenset(guards))
        ended = self.walk(node.body, scope)
        if guards:
            self.caught.pop()
            return False
        return ended

    def _try(self, node: Any, scope: FlowScope) -> bool:
        names = frozenset(n for n in CAUGHT for h in node.handlers if handler_catches(h, {n}))
        before = scope.fork()
        inside = scope.fork()
        failed = len(self.failed_imports)
        self.caught.append(names)
        ended = self.walk(node.body, inside)
        self.caught.pop()
        broken = len(self.failed_imports) > failed
        ends: List[FlowScope] = []
        if not ended and not broken:
            ended = self.walk(node.orelse, inside)
            if not ended:
                ends.append(inside)
        elif broken:
            self.dead += 1
            self.walk(node.orelse, inside)
            self.dead -= 1
        for handler in node.handlers:
            after = before.fork()
            for name, value in inside.names.items():
                after.names.setdefault(name, value)
            unreachable = not broken and self._only_our_imports(node, handler)
            if handler.name:
                after.names[handler.name] = UNKNOWN
            if unreachable:
                self.dead += 1
            done = self.walk(handler.body, after)
            if unreachable:
                self.dead -= 1
            elif not done:
                ends.append(after)
        if ends:
            scope.take(ends)
        closed = not ends
        return self.walk(node.finalbody, scope) or closed

    def _only_our_imports(self, node: Any, handler: ast.ExceptHandler) -> bool:
        """Whether a handler is there for imports from our trees, all of which succeed."""
        if handler_catches(handler, {"ValueError", "KeyError"}) and not handler_catches(handler, {"ImportError"}):
            return False
        if not handler_catches(handler, set(IMPORTS)):
            return False
        sources: List[str] = []
        for statement in node.body:
            if isinstance(statement, ast.Import):
                sources.extend(a.name for a in statement.names)
            elif isinstance(statement, ast.ImportFrom):
                sources.append(statement.module or "" if not statement.level else self.provider)
            elif not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr)) or any(
                isinstance(n, ast.Call) for n in ast.walk(statement)
            ):
                return False
        return bool(sources) and all(s.split(".")[0] == self.provider for s in sources)

    def _nested(self, node: Any, scope: FlowScope) -> None:
        unit = unit_of(scope.module.source, node)
        assert unit is not None
        inside_class = scope.function is None and scope.owner is not None
        prefix = (
            scope.owner.qualname + "."
            if inside_class and scope.owner is not None
            else scope.qualname + ".<locals>."
            if scope.qualname
            else ""
        )
        owner = scope.owner if inside_class else None
        if unit.kind == "class":
            info = self.index.class_info(scope.module, unit, prefix, scope.function)
            scope.names[node.name] = ClassValue(info)
            self.walk_class(info, scope)
        else:
            function = self.index.function_info(scope.module, unit, prefix, owner, scope.function)
            scope.names[node.name] = FunctionValue(function)
            self.walk_function(function, scope)

    def _match(self, node: Any, scope: FlowScope) -> None:
        self.evaluate(node.subject, scope)
        ends = [scope.fork()]
        for case in node.cases:
            inside = scope.fork()
            for inner in ast.walk(case.pattern):
                name = getattr(inner, "name", None)
                if isinstance(name, str):
                    inside.names[name] = UNKNOWN
                if isinstance(inner, ast.expr) and not isinstance(inner, ast.Constant):
                    self.evaluate(inner, inside)
            if case.guard is not None:
                self.evaluate(case.guard, inside)
            if not self.walk(case.body, inside):
                ends.append(inside)
        scope.take(ends)

    # -- expressions that need the flow ------------------------------------------------------------------------------

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
        return self.call(value, node, scope)

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

    # -- conditions --------------------------------------------------------------------------------------------------

    def narrow(self, test: ast.expr, truth: bool, scope: FlowScope) -> bool:
        """Writes into a scope what holds when a condition came out so. False when it cannot come out so."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.narrow(test.operand, not truth, scope)
        if isinstance(test, ast.BoolOp):
            if isinstance(test.op, ast.And) is truth:
                return all([self.narrow(part, truth, scope) for part in test.values])
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
                self._none(test.left, truth, scope)
            elif isinstance(test.ops[0], (ast.IsNot, ast.NotEq)):
                self._none(test.left, not truth, scope)
        elif isinstance(test, (ast.Name, ast.Attribute)) and truth:
            self._none(test, False, scope)
        return True

    def _none(self, node: ast.expr, is_none: bool, scope: FlowScope) -> None:
        target = node.target if isinstance(node, ast.NamedExpr) else node
        if not isinstance(target, (ast.Name, ast.Attribute)):
            return
        value = self.quiet(target, scope)
        if is_none:
            self.refine(target, NONE, scope)
        elif isinstance(value, Union_) and NONE in value.options:
            self.refine(target, join([o for o in value.options if o != NONE]), scope)

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


def _postponed(module: Module) -> bool:
    return "from __future__ import annotations" in module.source.text


__all__ = ["Classes", "Flow", "FlowScope"]
