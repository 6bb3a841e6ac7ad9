"""One source file, decoded so that it can be put back byte for byte, with its syntax tree and offsets.

Offsets are bytes of the UTF-8 form of the text without its byte order mark; that is what LibCST reports. An edit is a
list of splices in those offsets, so whatever lies outside a splice cannot change.
"""

from __future__ import annotations

import bisect
import codecs
import io
import re
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeVar

import libcst as cst
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper

from remoteops.errors import AnchorNotFound, PatchError

__all__ = ["Place", "Source", "Splice", "decode", "encode"]


Node = TypeVar("Node", bound=cst.CSTNode)
_NO_ANCHORS = re.compile(
    r"whitespace|lines|header|footer|^[lr](par|bracket|brace)$|^(comma|semicolon|equal|colon|dot)$"
)


@cache
def _fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    """The fields of a node type below which anchors may be."""
    return tuple(name for name in kind.__dataclass_fields__ if not _NO_ANCHORS.search(name))


class Splice(NamedTuple):
    """Replace the bytes [start, end) by ``text``."""

    start: int
    end: int
    text: str


class Place(NamedTuple):
    """Where an anchor lies, in offsets."""

    start: int
    end: int


@dataclass(frozen=True)
class Encoded:
    """How a file's bytes map to its text: ``encoding`` (PEP 263) and whether a UTF-8 byte order mark leads."""

    text: str
    encoding: str
    bom: bool


def decode(data: bytes, name: str) -> Encoded:
    """The text of a Python file. Line ends stay as they are. Raises PatchError when the bytes are not in its
    encoding.
    """
    bom = data.startswith(codecs.BOM_UTF8)
    body = data[len(codecs.BOM_UTF8) :] if bom else data
    try:
        encoding = "utf-8" if bom else tokenize.detect_encoding(io.BytesIO(body).readline)[0]
        text = body.decode(encoding)
        if text.encode(encoding) != body:
            raise ValueError(f"{encoding} does not give the same bytes back")
    except (SyntaxError, ValueError, LookupError) as error:
        raise PatchError(
            f"{name}: the file cannot be decoded: {error}",
            tried="edit the file",
            hint="edit it by hand, or reinstall the package",
        ) from error
    return Encoded(text, encoding, bom)


def encode(text: str, like: Encoded, name: str) -> bytes:
    """The bytes of an edited text, in the file's own encoding and with its byte order mark."""
    try:
        body = text.encode(like.encoding)
    except UnicodeEncodeError as error:
        raise PatchError(
            f"{name}: the edit needs a character that {like.encoding} lacks: {error}",
            tried="encode the edited file",
            hint="use ASCII in the recipe",
        ) from error
    return (codecs.BOM_UTF8 if like.bom else b"") + body


class Source:
    """A parsed text.

    ``name`` is used in messages. Raises PatchError when the text does not parse or does not survive a round trip
    through the parser (then nothing can be promised about what an edit leaves alone).
    """

    def __init__(self, text: str, name: str = "<text>", *, checked: bool = False) -> None:
        """``checked``: the text comes from one that survived the round trip, which costs as much as parsing."""
        self.name = name
        self.text = text
        self.data = text.encode("utf-8")
        try:
            self.module = cst.parse_module(text)
        except cst.ParserSyntaxError as error:
            raise PatchError(
                f"{name}:{error.raw_line}: the file does not parse: {error.message}",
                tried="parse the file",
                hint="repair it or reinstall the package",
            ) from error
        if not checked and self.module.code != text:
            raise PatchError(
                f"{name}: the parser does not give the same text back", tried="parse the file", hint="edit it by hand"
            )

    @cached_property
    def _spans(self) -> Mapping[cst.CSTNode, Any]:
        return MetadataWrapper(self.module, unsafe_skip_copy=True).resolve(ByteSpanPositionProvider)

    @cached_property
    def _line_starts(self) -> list[int]:
        starts, at = [0], 0
        for line in self.data.splitlines(keepends=True):  # \n, \r\n and a lone \r, as Python
            at += len(line)
            starts.append(at)
        return starts

    @cached_property
    def newline(self) -> str:
        return self.module.default_newline

    @cached_property
    def _tree(self) -> dict[cst.CSTNode, tuple[str, cst.CSTNode | None]]:
        """Every node that can be an anchor -> (scope, parent)."""
        found: dict[cst.CSTNode, tuple[str, cst.CSTNode | None]] = {}

        def walk(node: cst.CSTNode, scope: str, parent: cst.CSTNode | None) -> None:
            found[node] = (scope, parent)
            inner = scope
            if isinstance(node, cst.FunctionDef | cst.ClassDef):
                inner = f"{scope}.{node.name.value}" if scope else node.name.value
            for name in _fields(type(node)):
                value = getattr(node, name)
                # decorators, defaults, bases and annotations belong to the outer scope
                around = inner if name == "body" else scope
                if isinstance(value, cst.CSTNode):
                    walk(value, around, node)
                elif isinstance(value, list | tuple):
                    for child in value:
                        if isinstance(child, cst.CSTNode):
                            walk(child, around, node)

        walk(self.module, "", None)
        return found

    @cached_property
    def _kinds(self) -> dict[type[cst.CSTNode], list[cst.CSTNode]]:
        found: dict[type[cst.CSTNode], list[cst.CSTNode]] = {}
        for node in self._tree:
            found.setdefault(type(node), []).append(node)
        return found

    def nodes(self) -> Iterable[cst.CSTNode]:
        """Every node that can be an anchor (white space, comments and punctuation cannot)."""
        return self._tree

    def of(self, kind: type[Node]) -> list[Node]:
        """Those of exactly one type."""
        return self._kinds.get(kind, [])  # type: ignore[return-value]

    def scope(self, node: cst.CSTNode) -> str:
        """Qualified name of the function or class around a node ("" at module level)."""
        return self._tree[node][0]

    def place(self, node: cst.CSTNode) -> Place:
        span = self._spans[node]
        return Place(span.start, span.start + span.length)

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        return self._tree[node][1]

    def code(self, node: cst.CSTNode) -> str:
        return self.module.code_for_node(node)

    def slice(self, start: int, end: int) -> str:
        return self.data[start:end].decode("utf-8")

    def offset(self, line: int, column: int) -> int:
        """Offset of a 1-based line and a 0-based column in UTF-8 bytes (as Python's ``ast`` counts), or -1."""
        if not 1 <= line < len(self._line_starts):
            return -1
        return self._line_starts[line - 1] + column

    def position(self, offset: int) -> tuple[int, int]:
        """1-based line and 0-based column of an offset."""
        line = bisect.bisect_right(self._line_starts, offset)
        return line, offset - self._line_starts[line - 1]

    def line_start(self, offset: int) -> int:
        return self._line_starts[self.position(offset)[0] - 1]

    def line_end(self, offset: int) -> int:
        """Offset of the line's end, before its newline."""
        ends = [at for at in (self.data.find(b"\n", offset), self.data.find(b"\r", offset)) if at >= 0]
        return min(ends, default=len(self.data))

    def indent(self, offset: int) -> str:
        """The white space that leads the line of an offset."""
        start = self.line_start(offset)
        line = self.slice(start, offset)
        return line[: len(line) - len(line.lstrip(" \t\f"))]

    def refuse(self, message: str, *, at: int | None = None, hint: str = "") -> AnchorNotFound:
        """The error of an edit that would have to guess."""
        where = f"{self.name}:{self.position(at)[0]}" if at is not None and at >= 0 else self.name
        return AnchorNotFound(
            f"{where}: {message}",
            tried="place an edit",
            hint=hint or "the file differs from what the recipe expects: look at it, then patch by hand",
            file=self.name,
            line=self.position(at)[0] if at is not None and at >= 0 else None,
        )
