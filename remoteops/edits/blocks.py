"""Edits of whole statements and functions."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import libcst as cst

from remoteops.edits import anchors, patterns
from remoteops.edits.anchors import Args
from remoteops.edits.source import Source, Splice
from remoteops.errors import UsageError

__all__ = ["drop_statement", "insert_after", "insert_before", "insert_method", "replace_function", "replace_statement"]

Bound = dict[str, cst.CSTNode]


def replace_statement(source: Source, args: Args) -> list[Splice]:
    """``old`` (pattern of one statement), ``code`` (statements; may use the pattern's holes)."""
    found = anchors.statements(source, args, args["old"])
    done = _runs(source, args)
    spans = [(source.place(run[0]).start, source.place(run[-1]).end) for run in done]
    left = [
        (node, bound)
        for node, bound in found
        if not any(start <= source.place(node).start < end for start, end in spans)
    ]
    if done and not left:
        return []
    node, bound = _chosen(source, args, left)
    start, end = _extent(source, node)
    return [Splice(start, end, _code(source, args["code"], bound, source.indent(start)))]


def insert_before(source: Source, args: Args) -> list[Splice]:
    """``statement`` (pattern of one statement), ``code``: put the code in front of it, as its sibling."""
    return _insert(source, args, after=False)


def insert_after(source: Source, args: Args) -> list[Splice]:
    """``statement`` (pattern of one statement), ``code``: put the code behind it, as its sibling."""
    return _insert(source, args, after=True)


def replace_function(source: Source, args: Args) -> list[Splice]:
    """``function`` (qualified name), ``code`` (the whole new definition), ``expects`` (expressions the old one must
    hold).

    Decorators and the comments above it stay.
    """
    name = args["function"]
    scope, _, short = name.rpartition(".")
    found = [node for node in source.of(cst.FunctionDef) if node.name.value == short and source.scope(node) == scope]
    node = anchors.one(source, args, found, f"function {name}")
    wanted = patterns.statement(args["code"])
    if not isinstance(wanted, cst.FunctionDef) or wanted.name.value != short:
        raise UsageError(f"the new code must define {short}", tried="read a recipe")
    if patterns.same(wanted.with_changes(decorators=()), node.with_changes(decorators=())):
        return []
    for text in args.get("expects", ()):
        pattern = patterns.expression(text)
        if not any(patterns.match(pattern, inner, {}) is not None for inner in _inside(node)):
            raise source.refuse(f"{name} does not hold {text}", at=source.place(node.name).start)
    start, end = _extent(source, node)
    if node.decorators:  # "def" stands on the line of the name; decorators and comments above it stay
        name_at = source.place(node.name).start
        start = source.line_start(name_at) + len(source.indent(name_at).encode())
    return [Splice(start, end, _code(source, args["code"], {}, source.indent(start)))]


def drop_statement(source: Source, args: Args) -> list[Splice]:
    """``statement`` (pattern of one simple statement): take it out, with its line; its comment stays.

    Nothing to take out is nothing to do, as long as the scope is there.
    """
    found = anchors.statements(source, args, args["statement"])
    if not found:
        inside = anchors.within(source, args)
        if not any(inside(node) for node in source.nodes()):
            raise source.refuse(f"found no {args['scope']}")
        return []
    node, _ = _chosen(source, args, found)
    start, end = _extent(source, node)
    if len(_siblings(source, node)) == 1:
        return [Splice(start, end, "pass")]
    line_start, line_end = source.line_start(start), source.line_end(end)
    rest = source.slice(end, line_end)
    if rest.strip() or source.slice(line_start, start).strip() or line_end == len(source.data):
        return [
            Splice(start, end + len(rest) - len(rest.lstrip()) if rest.strip() else end, "" if rest.strip() else "pass")
        ]
    newline = 2 if source.data[line_end : line_end + 2] == b"\r\n" else 1
    return [Splice(line_start, line_end + newline, "")]


def insert_method(source: Source, args: Args) -> list[Splice]:
    """``class`` (qualified name), ``code`` (one definition): add the method at the end of the class."""
    name = args["class"]
    scope, _, short = name.rpartition(".")
    found = [node for node in source.of(cst.ClassDef) if node.name.value == short and source.scope(node) == scope]
    node = anchors.one(source, {}, found, f"class {name}")
    wanted = patterns.statement(args["code"])
    if not isinstance(wanted, cst.FunctionDef):
        raise UsageError("insert-method needs one definition", tried="read a recipe")
    body = list(node.body.body)
    if not isinstance(node.body, cst.IndentedBlock) or not body:
        raise source.refuse(f"class {name} has its body on one line", at=source.place(node).start)
    for method in body:
        if isinstance(method, cst.FunctionDef) and method.name.value == wanted.name.value:
            if patterns.same(wanted, method):
                return []
            raise source.refuse(f"class {name} has another {wanted.name.value}()", at=source.place(method).start)
    start, _ = _extent(source, body[-1])
    end = source.line_end(_extent(source, body[-1])[1])
    indent = source.indent(start)
    return [Splice(end, end, f"{source.newline}{source.newline}{indent}{_code(source, args['code'], {}, indent)}")]


def _insert(source: Source, args: Args, *, after: bool) -> list[Splice]:
    found = anchors.statements(source, args, args["statement"])
    pattern = patterns.statement(args["statement"])
    for added in _parsed(args["code"]):
        if patterns.match(pattern, added, {}) is not None:
            raise UsageError(
                "the inserted code matches its own anchor: it would be inserted again each time", tried="read a recipe"
            )
    done = [node for node, bound in found if _adjacent(source, node, args, bound, after=after)]
    left = [(node, bound) for node, bound in found if node not in done]
    if done and (not left or _begins_at(source, args, done, args["code"], after=after)):
        return []
    node, bound = _chosen(source, args, left)
    start, end = _extent(source, node)
    indent = source.indent(start)
    code = _code(source, args["code"], bound, indent)
    if after:
        at = source.line_end(end)
        return [Splice(at, at, f"{source.newline}{indent}{code}")]
    return [Splice(start, start, f"{code}{source.newline}{indent}")]


def _begins_at(source: Source, args: Args, done: Sequence[cst.CSTNode], code: str, *, after: bool) -> bool:
    """Whether the anchor's position is that of a node which has its insertion already (it moved down when that was
    done).
    """
    if not args.get("line"):
        return False
    shift = 0 if after else len(textwrap.dedent(code).strip("\n").splitlines())
    return any(source.position(source.place(node).start)[0] in (args["line"], args["line"] + shift) for node in done)


def _siblings(source: Source, node: cst.CSTNode) -> list[cst.CSTNode]:
    block = source.parent(node)
    return list(block.body) if isinstance(block, cst.Module | cst.IndentedBlock) else [node]


def _adjacent(source: Source, node: cst.CSTNode, args: Args, bound: Bound, *, after: bool) -> bool:
    wanted = _parsed(args["code"])
    body = _siblings(source, node)
    at = body.index(node)
    run = body[at + 1 : at + 1 + len(wanted)] if after else body[max(0, at - len(wanted)) : at]
    return len(run) == len(wanted) and all(
        patterns.match(a, b, bound) is not None for a, b in zip(wanted, run, strict=True)
    )


def _runs(source: Source, args: Args) -> list[list[cst.CSTNode]]:
    """Runs of siblings, in the scope, that are the new code already."""
    wanted = _parsed(args["code"])
    inside = anchors.within(source, args)
    found = []
    for node in source.of(type(wanted[0])) if wanted else ():
        if not inside(node):
            continue
        body = _siblings(source, node)
        run = body[body.index(node) :][: len(wanted)]
        bound: Bound | None = {}
        for a, b in zip(wanted, run, strict=False):
            bound = patterns.match(a, b, bound) if bound is not None else None
        if bound is not None and len(run) == len(wanted):
            found.append(run)
    return found


def _parsed(code: str) -> list[cst.BaseStatement]:
    text = textwrap.dedent(code).strip("\n")
    found: list[cst.BaseStatement] = []
    module = cst.parse_module(patterns.python(text) + "\n")
    for node in module.body:
        assert isinstance(node, cst.BaseStatement)
        found.append(node)
    return found


def _chosen(source: Source, args: Args, left: list[tuple[cst.CSTNode, Bound]]) -> tuple[cst.CSTNode, Bound]:
    what = "statement " + " ".join(str(args.get("old") or args["statement"]).split())
    node = anchors.one(source, args, [node for node, _ in left], what)
    return node, next(bound for other, bound in left if other is node)


def _extent(source: Source, node: cst.CSTNode) -> tuple[int, int]:
    """First byte and end of a statement, without the white space, comment and newline behind it."""
    start, end = source.place(node)
    if isinstance(node, cst.SimpleStatementLine):
        end = source.place(node.body[-1]).end
    else:
        text = source.data[start:end]
        end -= len(text) - len(text.rstrip())
    return start, end


def _inside(node: cst.CSTNode) -> list[cst.CSTNode]:
    found, todo = [], [node]
    while todo:
        current = todo.pop()
        found.append(current)
        todo += current.children
    return found


def _code(source: Source, code: str, bound: Bound, indent: str) -> str:
    """The code with its holes filled, in the file's own indentation and line ends; its first line is not indented."""
    text = patterns.fill(textwrap.dedent(code).strip("\n"), {name: source.code(node) for name, node in bound.items()})
    lines = []
    for line in text.split("\n"):
        body = line.lstrip(" ")
        depth, rest = divmod(len(line) - len(body), 4)
        lines.append(source.module.default_indent * depth + " " * rest + body if body else "")
    return source.newline.join([lines[0], *[indent + line if line else "" for line in lines[1:]]])
