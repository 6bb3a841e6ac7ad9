"""Edits of a call's keyword arguments."""

from __future__ import annotations

import libcst as cst

from remoteops.edits import anchors, patterns
from remoteops.edits.anchors import Args
from remoteops.edits.listing import comma_of, opening, remove_item
from remoteops.edits.source import Source, Splice

__all__ = ["add_keyword", "drop_keyword", "rename_keyword"]


def drop_keyword(source: Source, args: Args) -> list[Splice]:
    """``call``, ``keyword``: take the keyword argument out, also from the same call further on in that line (a finding
    speaks of the line). A comment that stands behind it stays.
    """
    splices: list[Splice] = []
    for node in _on_line(source, args):
        found = _keyword(node, args["keyword"])
        if found is not None:
            splices += remove_item(source, node.args, found)
    return _outermost(splices)


def add_keyword(source: Source, args: Args) -> list[Splice]:
    """``call``, ``keyword``, ``value`` (an expression): add it as the last argument.

    Refuses when the keyword is there with another value, or when ``**mapping`` may already carry it.
    """
    node = anchors.call(source, args)
    given = {name: source.code(code) for name, code in anchors.bindings(source, args).items()}
    keyword, value = args["keyword"], patterns.fill(args["value"].strip(), given)
    wanted = patterns.expression(value)
    found = _keyword(node, keyword)
    if found is not None:
        if patterns.same(wanted, found.value):
            return []
        raise source.refuse(
            f"{args['call']}() already has {keyword}={source.code(found.value)}", at=source.place(node).start
        )
    if any(arg.star == "**" for arg in node.args):
        raise source.refuse(
            f"{args['call']}() takes a ** mapping that may already carry {keyword}", at=source.place(node).start
        )
    if len(node.args) == 1 and isinstance(node.args[0].value, cst.GeneratorExp) and not node.args[0].value.lpar:
        raise source.refuse(f"{args['call']}() takes a bare generator", at=source.place(node).start)
    return _append(source, node, f"{keyword}={value}")


def rename_keyword(source: Source, args: Args) -> list[Splice]:
    """``call``, ``keyword``, ``to``: give the keyword argument another name, in that line's other calls as well."""
    node = anchors.call(source, args)
    found, there = _keyword(node, args["keyword"]), _keyword(node, args["to"])
    if found is None:
        if there is not None:
            return []
        raise source.refuse(f"{args['call']}() has no keyword {args['keyword']}", at=source.place(node).start)
    if there is not None:
        raise source.refuse(
            f"{args['call']}() has both {args['keyword']} and {args['to']}", at=source.place(node).start
        )
    twins = [one for one in _on_line(source, args) if one is not node and _keyword(one, args["to"]) is None]
    names = [arg.keyword for arg in (found, *(_keyword(one, args["keyword"]) for one in twins)) if arg is not None]
    return [Splice(*source.place(name), args["to"]) for name in names if name is not None]


def _on_line(source: Source, args: Args) -> list[cst.Call]:
    """The call that the anchor means, and others of that very callee that begin on its line."""
    meant = anchors.call(source, args)
    if not args.get("line"):
        return [meant]
    inside, callee = anchors.within(source, args), source.code(meant.func)
    line = source.position(source.place(meant).start)[0]
    return [
        node
        for node in source.of(cst.Call)
        if node is meant
        or (inside(node) and source.position(source.place(node).start)[0] == line and source.code(node.func) == callee)
    ]


def _outermost(splices: list[Splice]) -> list[Splice]:
    """Without what lies inside another one (a call in the value of a keyword that goes)."""
    return [
        one
        for one in splices
        if not any(other is not one and other.start <= one.start and one.end <= other.end for other in splices)
    ]


def _keyword(node: cst.Call, name: str) -> cst.Arg | None:
    return next((arg for arg in node.args if arg.keyword is not None and arg.keyword.value == name), None)


def _append(source: Source, node: cst.Call, code: str) -> list[Splice]:
    if not node.args:
        return [Splice(opening(source, node), opening(source, node), code)]
    last = node.args[-1]
    start, end = source.place(last)
    comma = comma_of(source, last)
    own_line = not source.slice(source.line_start(start), start).strip()
    if comma is None:
        rest = source.slice(end, source.line_end(end))
        if own_line and (not rest.strip() or rest.lstrip().startswith("#")):
            at = source.line_end(end)
            if at == end:
                return [Splice(end, end, f",{source.newline}{source.indent(start)}{code}")]
            return [Splice(end, end, ","), Splice(at, at, f"{source.newline}{source.indent(start)}{code}")]
        return [Splice(end, end, f", {code}")]
    rest = source.slice(comma + 1, source.line_end(comma))
    if own_line and (not rest.strip() or rest.lstrip().startswith("#")):
        at = source.line_end(comma)
        return [Splice(at, at, f"{source.newline}{source.indent(start)}{code},")]
    return [Splice(comma + 1, comma + 1, f" {code},")]
