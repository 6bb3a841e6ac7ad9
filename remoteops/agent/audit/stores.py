"""What statements bind: names in a class body, attributes on ``self``."""

from __future__ import annotations

import ast
import re
from typing import Dict, Iterator, List, Optional

from remoteops.agent.audit.modules import last_name
from remoteops.agent.audit.syntax import Unit, walk_shallow

SETTERS = ("setattr", "__setattr__", "register_buffer", "register_parameter", "add_module", "register_module")


NAMED = re.compile(r"(?:%s)\s*\(" % "|".join(SETTERS))


def targets(statement: ast.stmt) -> List[str]:
    names: List[str] = []
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return [(a.asname or a.name).split(".")[0] for a in statement.names]
    nodes: List[ast.AST] = []
    if isinstance(statement, ast.Assign):
        nodes = list(statement.targets)
    elif isinstance(statement, ast.For):
        nodes = [statement.target]
    elif isinstance(statement, ast.With):
        nodes = [i.optional_vars for i in statement.items if i.optional_vars is not None]
    for node in nodes:
        names.extend(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return names


def slots(statements: List[ast.stmt]) -> Iterator[str]:
    for statement in statements:
        if isinstance(statement, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "__slots__" for t in statement.targets
        ):
            for node in ast.walk(statement.value):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


_SET = re.compile(r"[ \t]*(?::[ \t]*[^=\s]|=(?!=)|[-+*/|&^%@]{1,2}=)")
_TARGETS = re.compile(r"[ \t]*[(\[*]?[\w., \t*\[\]]*$")
_SPREAD = re.compile(r"[ \t]*[,)\]][^=(]*=(?!=)")
_ALONE = re.compile(r"[ \t]*\w+$")
_ENDS = re.compile(r",?[ \t]*$")
_BOUND = re.compile(r"\b(?:for|as)[ \t][^=]*$")


def may_set(masked: str, start: int, end: int, name: str) -> bool:
    """Whether a span may set an attribute of that name: ``x.name =``, ``x.name: T``, ``x.name +=``, one of several
    targets
    (``a, x.name =``, also one a line), ``for x.name in``, ``as x.name``."""
    needle = "." + name
    at = masked.find(needle, start, end)
    while at >= 0:
        after = at + len(needle)
        stop = masked.find("\n", after, end)
        tail = masked[after : stop if stop >= 0 else end]
        if not tail[:1].isidentifier() and not tail[:1].isdigit():
            if _SET.match(tail):
                return True
            head = masked[max(masked.rfind("\n", 0, at) + 1, 0) : at]
            if (_SPREAD.match(tail) and _TARGETS.match(head)) or (_ENDS.match(tail) and _ALONE.match(head)):
                return True
            if _BOUND.search(head):
                return True
        at = masked.find(needle, after, end)
    return False


def stores_in(function: ast.AST, receiver: str) -> Dict[str, List[ast.AST]]:
    """Attribute -> statements of a function that set it on the receiver (nested functions included)."""
    found: Dict[str, List[ast.AST]] = {}
    pending: List[ast.AST] = [function]
    while pending:
        for node in walk_shallow(pending.pop().body):  # type: ignore[attr-defined]
            if isinstance(node, ast.Assign):
                targets: List[Optional[ast.expr]] = list(node.targets)
            elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.For, ast.AsyncFor)):
                targets = [node.target]
            elif isinstance(node, (ast.With, ast.AsyncWith)):
                targets = [item.optional_vars for item in node.items]
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                if last_name(node.value.func) in SETTERS:
                    for argument in node.value.args[:2]:
                        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                            found.setdefault(argument.value, []).append(node.value)
                continue
            else:
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    pending.append(node)
                continue
            while targets:
                target = targets.pop()
                if isinstance(target, (ast.Tuple, ast.List)):
                    targets.extend(target.elts)
                elif isinstance(target, ast.Starred):
                    targets.append(target.value)
                elif (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == receiver
                ):
                    found.setdefault(target.attr, []).append(node)
    return found


_SETS = re.compile(r"setattr\s*\(\s*(?:self|cls)\s*,\s*(\S)|__dict__\s*(?:\.\s*update\b|=(?!=))|vars\(self\)")


def computed(unit: Unit) -> bool:
    """Whether a class sets attributes of its objects under names that are not spelled out."""
    masked = unit.source.masked
    for word in ("setattr", "__dict__", "vars(self)"):
        at = masked.find(word, unit.start, unit.end)
        while at >= 0:
            match = _SETS.match(masked, at)
            if match and match.group(1) not in ('"', "'") and not (match.group(1) or "").isupper():
                return True
            at = masked.find(word, at + 1, unit.end)
    return False
