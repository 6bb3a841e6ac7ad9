"""The walk through the consumer: statements in order, with branches that cannot be taken left out."""

from __future__ import annotations

import ast
from typing import Any, FrozenSet, List, Optional, Set

from remoteops.agent.audit.conditions import Conditions
from remoteops.agent.audit.contents import after
from remoteops.agent.audit.flowscope import FlowScope, exceptions, only_our_imports
from remoteops.agent.audit.index import ClassInfo, FunctionInfo, Index
from remoteops.agent.audit.modules import Module, handler_catches, is_type_checking, last_name
from remoteops.agent.audit.signatures import unparse
from remoteops.agent.audit.syntax import Unit, unit_of
from remoteops.agent.audit.values import (
    UNKNOWN,
    ClassValue,
    Const,
    FunctionValue,
    Instance,
    Sequence,
    Unknown,
    Value,
    elements,
    join,
    options,
)

CAUGHT = tuple(
    "ImportError ModuleNotFoundError AttributeError TypeError ValidationError ValueError RuntimeError Exception "
    "BaseException".split()
)


class Flow(Conditions):
    """Walks modules of the consumer. What is met is handed to ``on_…`` methods of the class below."""

    def __init__(self, index: Index, provider: str) -> None:
        super().__init__(index, provider)
        self.dead = 0
        self.muted = 0
        self.caught: List[FrozenSet[str]] = []
        self.version_guard = 0
        self.handling = 0  # in the type of an except clause, which is looked up only when something is raised
        self.statement: Optional[ast.stmt] = None
        self.failed_imports: Set[int] = set()

    # -- hooks -------------------------------------------------------------------------------------------------------

    def on_import(self, node: Any, alias: ast.alias, scope: FlowScope) -> Value:
        raise NotImplementedError

    def on_store(self, node: ast.Attribute, value: Value, scope: FlowScope) -> None:
        raise NotImplementedError

    def on_class(self, info: ClassInfo, scope: FlowScope) -> None:
        raise NotImplementedError

    def on_use(self, node: ast.Attribute, scope: FlowScope) -> None:
        """An attribute is deleted or added to: it must be there."""
        raise NotImplementedError

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
                self.on_use(node.target, scope)
            elif isinstance(node.target, ast.Name):
                scope.names[node.target.id] = after(scope.get(node.target.id) or UNKNOWN, node, {})
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
            value = self.evaluate(node.iter, scope)
            wanted = ("__aiter__",) if isinstance(node, ast.AsyncFor) else ("__iter__", "__getitem__")
            self.on_operation(node.iter, value, wanted, scope)
            value = self.iterated(value)
            if isinstance(node, ast.AsyncFor):
                value = join(
                    [
                        self.awaited(o) if isinstance(o, Sequence) and o.kind in ("awaitable", "coroutine") else o
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
                elif isinstance(target, ast.Attribute):
                    self.on_use(target, scope)
                elif isinstance(target, ast.Subscript):
                    self.change(target.value, target, {}, scope)
        elif node.__class__.__name__ == "Match":
            self._match(node, scope)
        return False

    def _annotated(self, node: ast.AnnAssign, scope: FlowScope) -> None:
        value = self.evaluate(node.value, scope) if node.value is not None else UNKNOWN
        if scope.function is None and not _postponed(scope.module) and not isinstance(node.annotation, ast.Constant):
            self.evaluate(node.annotation, scope)
        declared = self.annotation(node.annotation, scope.module, scope.owner)
        exact = [o for o in options(value) if (isinstance(o, Instance) and o.exact) or getattr(o, "keys", None)]
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
            if "(" not in key:  # each call makes another object
                scope.refined[key] = value
        elif isinstance(target, ast.Subscript):
            self.evaluate(target.value, scope)
            self.evaluate(target.slice, scope)
            self.change(target.value, target, {"value": value}, scope)

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
            wanted = "__aenter__" if isinstance(node, ast.AsyncWith) else "__enter__"
            self.on_operation(call, value, (wanted,), scope)
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
            unreachable = not broken and only_our_imports(node, handler, self.provider)
            if unreachable:
                self.dead += 1
            self.handling += 1
            raised = self.evaluate(handler.type, after)
            self.handling -= 1
            if handler.name:
                grouped = node.__class__.__name__ == "TryStar"
                after.names[handler.name] = UNKNOWN if grouped else exceptions(raised)
            done = self.walk(handler.body, after)
            if unreachable:
                self.dead -= 1
            elif not done:
                ends.append(after)
        if ends:
            scope.take(ends)
        closed = not ends
        return self.walk(node.finalbody, scope) or closed

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


def _postponed(module: Module) -> bool:
    return "from __future__ import annotations" in module.source.text


__all__ = ["Flow", "FlowScope"]
