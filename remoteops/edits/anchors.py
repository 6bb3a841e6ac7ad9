"""Finding the one node that an edit means. Missing or ambiguous: AnchorNotFound with the place, never a guess.

An anchor says what the node is (a callee, an attribute, a pattern) and narrows it by ``scope`` (qualified name of the
function around it) and by ``line``/``column`` (1-based, 0-based UTF-8 bytes, as audited). A position is a help among
several candidates, and no condition: it moves when the text above it is edited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import libcst as cst

from remoteops.edits import patterns
from remoteops.edits.source import Source

__all__ = ["Args", "bindings", "call", "dotted", "one", "statements", "within"]

Args = Mapping[str, Any]
Node = TypeVar("Node", bound=cst.CSTNode)


def dotted(node: cst.CSTNode) -> str:
    """``a.b.c`` of a name or an attribute chain that begins with a name; else the last attribute alone; else ""."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr.value}" if head else node.attr.value
    return ""


def within(source: Source, args: Args) -> Callable[[cst.CSTNode], bool]:
    """Whether a node lies in the scope that the anchor names (everything does when it names none)."""
    scope = args.get("scope")
    if scope is None:
        return lambda node: True
    wanted = scope.replace("<locals>.", "").replace("<module>", "")
    return lambda node: source.scope(node) == wanted or (bool(wanted) and source.scope(node).startswith(wanted + "."))


def narrowed(source: Source, args: Args, candidates: Sequence[Node]) -> Sequence[Node]:
    """Those of the candidates that lie exactly where the anchor says; all of them when none does."""
    line, column = args.get("line"), args.get("column")
    if not line:
        return candidates
    on_line = [
        node
        for node in candidates
        if source.position(source.place(node).start)[0] <= line <= source.position(source.place(node).end)[0]
    ]
    if column is not None:
        offset = source.offset(line, column)
        exact = [node for node in on_line if source.place(node).start == offset]
        if args.get("end_line") and len(exact) > 1:
            end = source.offset(args["end_line"], args["end_column"])
            exact = [node for node in exact if source.place(node).end == end] or exact
        if exact:
            return exact
    return on_line or candidates


def one(source: Source, args: Args, candidates: Iterable[Node], what: str) -> Node:
    """The candidate that the anchor means."""
    found = list(candidates)
    left = narrowed(source, args, found)
    if len(left) == 1:
        return left[0]
    scope = f" in {args['scope']}" if args.get("scope") else ""
    if not left:
        line = args.get("line")
        raise source.refuse(f"found no {what}{scope}", at=source.offset(line, 0) if line else None)
    lines = ", ".join(str(source.position(source.place(node).start)[0]) for node in left)
    raise source.refuse(f"{what}{scope} is there {len(left)} times (lines {lines})", at=source.place(left[0]).start)


def call(source: Source, args: Args) -> cst.Call:
    """The call that ``args["call"]`` names: a callee's last name or a dotted tail of it (``core.Scheduler``).

    Where nothing in the scope has that name (``from x import Scheduler as S``), the call that lies exactly where the
    anchor says.
    """
    name = args["call"]
    inside = within(source, args)
    calls = [node for node in source.of(cst.Call) if inside(node)]
    found = [node for node in calls if _is_callee(node, name)]
    if not found and args.get("line") and args.get("column") is not None:
        offset = source.offset(args["line"], args["column"])
        found = [node for node in calls if source.place(node).start == offset]
    return one(source, args, found, f"call of {name}()")


def _is_callee(node: cst.Call, name: str) -> bool:
    chain = dotted(node.func)
    return chain == name or chain.endswith("." + name)


def bindings(source: Source, args: Args) -> dict[str, cst.CSTNode]:
    """The values of ``bind``: hole -> code, ``{"target-of": callee}`` (the name that the anchored call's result is
    assigned
    to) or ``{"argument": keyword}`` (what the anchored call passes for it)."""
    found: dict[str, cst.CSTNode] = {}
    for name, what in (args.get("bind") or {}).items():
        if isinstance(what, str):
            found[name] = patterns.expression(what)
        elif "target-of" in what:
            found[name] = _target(source, call(source, {**args, "call": what["target-of"]}))
        else:
            node = call(source, args)
            value = next(
                (arg.value for arg in node.args if arg.keyword and arg.keyword.value == what["argument"]), None
            )
            if value is None:
                raise source.refuse(f"{args['call']}() passes no {what['argument']}=", at=source.place(node).start)
            found[name] = value
    return found


def _target(source: Source, node: cst.Call) -> cst.BaseExpression:
    parent = source.parent(node)
    if isinstance(parent, cst.Assign) and len(parent.targets) == 1 and isinstance(parent.targets[0].target, cst.Name):
        return parent.targets[0].target
    raise source.refuse("the call's result is not assigned to a name", at=source.place(node).start)


def statements(source: Source, args: Args, pattern: str) -> list[tuple[cst.CSTNode, dict[str, cst.CSTNode]]]:
    """Statements (with their bindings) that match a pattern, in the anchor's scope, in the order of the text."""
    wanted = patterns.statement(pattern)
    inside = within(source, args)
    found: list[tuple[cst.CSTNode, dict[str, cst.CSTNode]]] = []
    for node in source.of(type(wanted)):
        if not inside(node):
            continue
        bound = patterns.match(wanted, node, {})
        if bound is not None:
            found.append((node, bound))
    return found
