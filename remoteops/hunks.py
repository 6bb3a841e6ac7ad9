"""Unified diffs whose hunks know which changes they hold."""

from __future__ import annotations

import difflib
import io
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

__all__ = ["Lines", "Piece", "carry", "pieces"]

Lines = tuple[int, int]  # first and last line, 1-based
Owner = TypeVar("Owner")


class Piece(NamedTuple):
    """One hunk: its text with header, and the lines of the new file that it covers."""

    text: str
    new: Lines


def _split(data: bytes) -> list[str]:
    """Lines as diff counts them: only a newline ends one (str.splitlines also stops at form feeds and the like)."""
    return list(io.StringIO(data.decode("utf-8", "replace"), newline="\n"))


def pieces(before: bytes, after: bytes, context: int = 3) -> list[Piece]:
    """The hunks of a unified diff of two files."""
    old, new = _split(before), _split(after)
    found = []
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(context):
        first, last = group[0], group[-1]
        lines = [f"@@ -{_range(first[1], last[2])} +{_range(first[3], last[4])} @@\n"]
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                lines += [" " + line for line in old[i1:i2]]
            else:
                lines += ["-" + line for line in old[i1:i2]] + ["+" + line for line in new[j1:j2]]
        text = "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)
        found.append(Piece(text, (first[3] + 1, last[4])))
    return found


def carry(spans: Sequence[tuple[Owner, Lines]], before: bytes, after: bytes) -> list[tuple[Owner, Lines]]:
    """Where lines of one text are in a later one (lines that changed again: where their replacement is)."""
    codes = difflib.SequenceMatcher(None, _split(before), _split(after), autojunk=False).get_opcodes()

    def moved(line: int) -> int:
        for tag, i1, i2, j1, j2 in codes:
            if i1 <= line - 1 < i2:
                return j1 + line - i1 if tag == "equal" else max(1, min(j1 + line - i1, j2))
        return line

    return [(owner, (moved(start), moved(end))) for owner, (start, end) in spans]


def _range(start: int, stop: int) -> str:
    """A hunk header's range, as diff writes it."""
    length = stop - start
    return f"{start + 1}" if length == 1 else f"{start if length == 0 else start + 1},{length}"
