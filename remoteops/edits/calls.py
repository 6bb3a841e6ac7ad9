"""Edits of a call's keyword arguments."""

from __future__ import annotations

import libcst as cst

from remoteops.edits import anchors, patterns
from remoteops.edits.anchors import Args
from remoteops.edits.listing import comma_of, opening, remove_item
from remoteops.edits.source import Source, Splice

__all__ = ["add_keyword", "drop_keyword", "rename_keyword"]


def drop_keyword(source: Source, args: Args) -> list[Splice]:
    """``call``, ``keyword``: take the keyword argument out. A comment that stands behind it stays."""
    node = anchors.call(source, args)
    found = _keyword(node, args["keyword"])
    if found is None:
        return []
    return remove_item(source, node.args, found)


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
    """``call``, ``keyword``, ``to``: give the keyword argument another name."""
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
    assert found.keyword is not None
    place = source.place(found.keyword)
    return [Splice(place.start, place.end, args["to"])]


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
