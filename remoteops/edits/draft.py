"""A file on its way from its audited bytes to its planned ones, edit by edit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import libcst as cst

from remoteops.edits.blocks import (
    drop_statement,
    insert_after,
    insert_before,
    insert_method,
    replace_function,
    replace_statement,
)
from remoteops.edits.calls import add_keyword, drop_keyword, rename_keyword
from remoteops.edits.names import rename_attribute, rename_import, replace_expression
from remoteops.edits.source import Source, Splice, decode, encode
from remoteops.errors import AnchorNotFound, PatchError, UsageError

__all__ = ["KINDS", "Draft", "Edited"]

Request = Mapping[str, Any]
Span = tuple[int, int]

KINDS: dict[str, Callable[[Source, Request], list[Splice]]] = {
    "drop-keyword": drop_keyword,
    "add-keyword": add_keyword,
    "rename-keyword": rename_keyword,
    "rename-attribute": rename_attribute,
    "rename-import": rename_import,
    "replace-expression": replace_expression,
    "replace-statement": replace_statement,
    "insert-before": insert_before,
    "insert-after": insert_after,
    "replace-function": replace_function,
    "insert-method": insert_method,
    "drop-statement": drop_statement,
}


class Edited(NamedTuple):
    """``data``: the file's new bytes. ``changed``: for each edit, the 1-based line spans (first, last) in the new
    text that
    it wrote; empty for an edit that was done already."""

    data: bytes
    changed: list[list[Span]]


class _Pending(NamedTuple):
    edit: int
    splice: Splice


class Draft:
    """Edits of one file, in order. Positions in requests are those of the file as it was before any edit.

    Parsing is what costs, so edits of different statements are worked out on one parse; an edit that meets an earlier
    one's statement is worked out on a new parse of the text so far.
    """

    def __init__(self, data: bytes, name: str = "<text>") -> None:
        self.name = name
        self._encoded = decode(data, name)
        self._original = self._source = Source(self._encoded.text, name)
        self._moves: tuple[tuple[int, int, int], ...] = ()
        self._written: tuple[tuple[Span, ...], ...] = ()
        self._pending: tuple[_Pending, ...] = ()

    def copy(self) -> Draft:
        """A draft that goes its own way from here; what is parsed is shared."""
        twin = object.__new__(Draft)
        twin.__dict__.update(self.__dict__)
        return twin

    def apply(self, request: Request) -> bool:
        """One more edit; whether it changes anything. Raises AnchorNotFound, PatchError or UsageError, and is
        unchanged then.
        """
        kind = request.get("edit")
        if kind not in KINDS:
            raise UsageError(
                f"there is no edit {kind!r}", tried="plan a patch", hint="known edits: " + ", ".join(KINDS)
            )
        try:
            splices = self._work_out(KINDS[kind], request)
        except KeyError as error:
            raise UsageError(f"edit {kind} lacks {error.args[0]!r}", tried="plan a patch") from error
        number = len(self._written)
        self._written = (*self._written, ())
        self._pending = (*self._pending, *(_Pending(number, splice) for splice in splices))
        return bool(splices)

    def text(self) -> bytes:
        """The bytes so far, in UTF-8 and not parsed: for whoever only wants to read them."""
        return self._spliced()[0]

    def result(self) -> Edited:
        """The planned bytes. Raises PatchError when they do not parse (nothing that does not parse ever leaves)."""
        self._flush()
        position = self._source.position
        changed = [
            [(position(start)[0], position(max(start, end - 1))[0]) for start, end in sorted(spans)]
            for spans in self._written
        ]
        return Edited(encode(self._source.text, self._encoded, self.name), changed)

    def _work_out(self, function: Callable[[Source, Request], list[Splice]], request: Request) -> list[Splice]:
        if not self._pending:
            return function(self._source, self._moved(request))
        try:
            splices = function(self._source, self._moved(request))
        except AnchorNotFound:
            splices = None  # perhaps an earlier edit made the anchor
        if splices is None or self._touches(splices):
            self._flush()
            splices = function(self._source, self._moved(request))
        return splices

    def _touches(self, splices: Sequence[Splice]) -> bool:
        taken = [self._extent(pending.splice) for pending in self._pending]
        return any(
            start <= other_end and other_start <= end
            for start, end in map(self._extent, splices)
            for other_start, other_end in taken
        )

    def _extent(self, splice: Splice) -> Span:
        """The statement around a splice, with its lines; what another edit may have looked at."""
        start, end = splice.start, splice.end
        for node in self._source.of(cst.SimpleStatementLine):
            place = self._source.place(node)
            if place.start <= splice.end and splice.start <= place.end:
                start, end = min(start, place.start), max(end, place.end)
        return self._source.line_start(start), self._source.line_end(end)

    def _spliced(self) -> tuple[bytes, list[tuple[int, int, int]], list[list[Span]]]:
        """The text with what is pending, how positions moved, and the spans that each edit wrote."""
        text, moves = self._source.data, list(self._moves)
        written = [list(spans) for spans in self._written]
        for number, splice in sorted(self._pending, key=lambda p: (p.splice.start, p.splice.end, p.edit), reverse=True):
            new = splice.text.encode("utf-8")
            text = text[: splice.start] + new + text[splice.end :]
            grown = len(new) - (splice.end - splice.start)
            written = [[_shift(span, splice, grown) for span in spans] for spans in written]
            written[number].append((splice.start, splice.start + len(new)))
            moves.append((splice.start, splice.end, grown))
        return text, moves, written

    def _flush(self) -> None:
        """Put what is pending into the text and parse it."""
        if not self._pending:
            return
        text, moves, written = self._spliced()
        try:
            source = Source(text.decode("utf-8"), self.name, checked=True)
        except PatchError as error:
            raise PatchError(
                f"an edit would leave a file that does not parse: {error.message}",
                tried="plan a patch",
                hint="this is a defect of the recipe or of remoteops; nothing was written",
            ) from error
        self._source, self._moves, self._pending = source, tuple(moves), ()
        self._written = tuple(tuple(spans) for spans in written)

    def _moved(self, request: Request) -> Request:
        """The request with its position carried from the original text into the text that is parsed now."""
        if not self._moves or not request.get("line"):
            return request
        moved = dict(request)
        for line, column in (("line", "column"), ("end_line", "end_column")):
            if not request.get(line):
                continue
            at = self._original.offset(request[line], request.get(column) or 0)
            for start, end, grown in self._moves:
                if at >= end:
                    at += grown
                elif at > start:
                    at = start
            moved[line], found = self._source.position(max(0, at))
            if request.get(column) is not None:
                moved[column] = found
        return moved


def _shift(span: Span, splice: Splice, grown: int) -> Span:
    start, end = span
    return (
        start + grown if splice.end <= start else start,
        end + grown if splice.end <= end and splice.start < end else end,
    )
