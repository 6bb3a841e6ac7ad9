"""A scope whose names change as statements are walked."""

from __future__ import annotations

import ast
from typing import Any, Dict, List, Optional, Set, Tuple

from remoteops.agent.audit.evaluate import Evaluator, Scope
from remoteops.agent.audit.index import ClassInfo, FunctionInfo
from remoteops.agent.audit.modules import Module, handler_catches
from remoteops.agent.audit.values import (
    UNKNOWN,
    ClassValue,
    External,
    ExternalInstance,
    Instance,
    Sequence,
    Unknown,
    Value,
    join,
    options,
)

IMPORTS = frozenset({"ImportError", "ModuleNotFoundError"})


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
        other = FlowScope.__new__(FlowScope)
        other.__dict__.update(self.__dict__)
        other.names = dict(self.names)
        other.refined = dict(self.refined)
        other.present = set(self.present)
        other.memo, other.place = {}, None
        return other  # with the same names under work, so that a circle through a fork is seen as one

    def take(self, branches: List[FlowScope]) -> None:
        """Joins the states at the ends of branches into this one."""
        if not branches:
            return
        names: Dict[str, Value] = {}
        for name in {n for b in branches for n in b.names}:
            found = [b.names[name] for b in branches if name in b.names]
            same = all(value is found[0] for value in found)
            names[name] = found[0] if same else join(found)
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


def exceptions(raised: Value) -> Value:
    """What ``except raised as e`` binds: an object of the class, or of one derived from it."""
    found: List[Value] = []
    for option in options(raised):
        if isinstance(option, Sequence) and option.parts is not None:
            found += [exceptions(part) for part in option.parts]
        elif isinstance(option, ClassValue):
            found.append(Instance(option.info))
        elif isinstance(option, External):
            found.append(ExternalInstance(option.dotted))
        else:
            found.append(option if isinstance(option, Unknown) else UNKNOWN)
    return join(found)


def only_our_imports(node: Any, handler: ast.ExceptHandler, provider: str) -> bool:
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
            sources.append(statement.module or "" if not statement.level else provider)
        elif not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr)) or any(
            isinstance(n, ast.Call) for n in ast.walk(statement)
        ):
            return False
    return bool(sources) and all(s.split(".")[0] == provider for s in sources)
