"""Taking an item out of a comma-separated list (arguments, imported names) without disturbing its neighbours."""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

from remoteops.edits.source import Source, Splice

__all__ = ["comma_of", "opening", "remove_item"]

_TO_COMMA = re.compile(rb"(?:[\s\\]|#[^\r\n]*)*,")
_TO_PAREN = re.compile(rb"(?:[\s\\)]|#[^\r\n]*)*\(")

Item = cst.Arg | cst.ImportAlias


def comma_of(source: Source, item: Item) -> int | None:
    """Offset of the comma behind an item, or None."""
    if not isinstance(item.comma, cst.Comma):
        return None
    found = _TO_COMMA.match(source.data, source.place(item).end)
    assert found is not None
    return found.end() - 1


def opening(source: Source, call: cst.Call) -> int:
    """Offset behind the parenthesis that opens a call's arguments."""
    found = _TO_PAREN.match(source.data, source.place(call.func).end)
    assert found is not None
    return found.end()


def remove_item(source: Source, items: Sequence[Item], item: Item) -> list[Splice]:
    """The splices that remove ``item``: its whole line where it stands alone on it, else just itself and one comma.

    Comments outside the item always stay, also the one behind it: it may speak of its neighbours or to a linter.
    """
    start, end = source.place(item)
    index = list(items).index(item)
    comma = comma_of(source, item)
    before = source.slice(source.line_start(start), start)
    if comma is not None and source.slice(end, comma).strip():
        return [Splice(start, end, ""), Splice(comma, comma + 1, "")]  # a comment stands before its comma
    stop = end if comma is None else comma + 1
    if comma is None and index > 0:
        # the last one, with no comma of its own: the comma before it goes too, unless a comment is in between
        previous = comma_of(source, items[index - 1])
        assert previous is not None
        if "#" not in source.slice(previous + 1, start):
            return [Splice(previous, stop, "")]
    after = source.slice(stop, source.line_end(stop))
    blank = len(after.encode()) - len(after.lstrip(" \t").encode())
    alone = not before.strip()
    if alone and not after.strip():
        line_end = source.line_end(stop)
        newline = 2 if source.data[line_end : line_end + 2] == b"\r\n" else 1
        return [Splice(source.line_start(start), line_end + newline, "")]
    if alone and after.lstrip().startswith("#"):
        return [Splice(start, stop + blank, "")]
    if after.strip() and not after.lstrip().startswith(("#", ")")):
        return [Splice(start, stop + blank, "")]
    trailing = len(before.encode()) - len(before.rstrip(" \t").encode())
    return [Splice(start if alone else start - trailing, stop, "")]
