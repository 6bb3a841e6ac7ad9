"""Text of a source file, split into units (functions, classes, statements) that are parsed only when asked for.

A module of 300 kB takes a tenth of a second to parse and most of it is never looked at. Splitting needs one pass of
two regular expressions. A syntax error (or syntax newer than the running Python) harms its own unit, not the file.
"""

from __future__ import annotations

import ast
import re
import tokenize
import warnings
from bisect import bisect_right
from itertools import accumulate
from typing import Dict, Iterator, List, Optional, Tuple, Union

MAX_BYTES = 16 * 1024 * 1024
MAX_FAILURES = 20
MAX_STATEMENTS = 400

FunctionNode = Union[ast.FunctionDef, ast.AsyncFunctionDef]

# Strings and comments. The loops are unrolled, so that an unterminated string costs linear time.
_TOKENS = re.compile(
    r"#[^\n]*"
    r'|"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""'
    r"|'''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'''"
    r'|"[^"\\\n]*(?:\\.[^"\\\n]*)*"'
    r"|'[^'\\\n]*(?:\\.[^'\\\n]*)*'",
    re.S,
)
_CONTINUES = r"(?:else|elif|except|finally)\b"
_DEF = re.compile(r"^[ \t]*(?:async[ \t]+)?def[ \t]+\w+", re.M)
_DEFINES = re.compile(r"(?:async[ \t]+)?def[ \t]+(\w+)|class[ \t]+(\w+)")


def _blank(match: re.Match[str]) -> str:
    text = match.group()
    if text[0] == "#":
        return " " * len(text)
    return text[0] + "\x01" * (len(text) - 2) + text[0]


def decode(data: bytes) -> Tuple[str, Optional[str]]:
    """Text with ``\\n`` line ends, and what is wrong with the bytes (None: nothing).

    Follows PEP 263 (byte order mark, coding cookie). Undecodable bytes become replacement characters.
    """
    problem = None
    lines = data.split(b"\n", 2)[:2]
    feed = iter([line + b"\n" for line in lines])
    try:
        encoding, _ = tokenize.detect_encoding(lambda: next(feed, b""))
    except SyntaxError as error:
        encoding, problem = "utf-8", str(error)
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
    encoding = "utf-8" if encoding == "utf-8-sig" else encoding
    try:
        text = data.decode(encoding)
    except (UnicodeDecodeError, LookupError) as error:
        problem = problem or "not valid %s: %s" % (encoding, error)
        text = data.decode("utf-8", "replace")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text, problem


class Source:
    """One file's text. ``masked`` has the same length with comments blanked and the insides of strings filled."""

    def __init__(self, text: str, path: str, problem: Optional[str] = None) -> None:
        self.text = text
        self.path = path
        self.errors: List[Tuple[int, str]] = []
        if problem:
            self.errors.append((1, problem))
        self._masked: Optional[str] = None
        self._starts: Optional[List[int]] = None

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> Source:
        if len(data) > MAX_BYTES:
            source = cls("", path)
            source.errors.append((1, "larger than %d MB, not read" % (MAX_BYTES >> 20)))
            return source
        text, problem = decode(data)
        return cls(text, path, problem)

    @property
    def masked(self) -> str:
        if self._masked is None:
            self._masked = _TOKENS.sub(_blank, self.text)
        return self._masked

    def line_of(self, offset: int) -> int:
        """1-based line of a character offset."""
        if self._starts is None:
            starts = list(accumulate(map((1).__add__, map(len, self.text.split("\n"))), initial=0))
            starts.pop()
            self._starts = starts
        return bisect_right(self._starts, offset)

    def offset_of(self, line: int, column: int) -> int:
        """Character offset of a 1-based line and a column in UTF-8 bytes (as ast counts)."""
        self.line_of(0)
        assert self._starts is not None
        start = self._starts[min(line, len(self._starts)) - 1]
        if column == 0:
            return start
        end = self.text.find("\n", start)
        row = self.text[start : end if end >= 0 else len(self.text)]
        return start + (column if row.isascii() else len(row.encode("utf-8")[:column].decode("utf-8", "ignore")))

    def line(self, number: int) -> str:
        """Text of a 1-based line, without its end."""
        start = self.offset_of(number, 0)
        end = self.text.find("\n", start)
        return self.text[start : end if end >= 0 else len(self.text)]

    def parse(self, text: str, first_line: int) -> Optional[ast.Module]:
        """The tree of ``text`` with line numbers as if it stood at ``first_line``; None after noting the error."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ast.parse("\n" * (first_line - 1) + text, self.path)
        except SyntaxError as error:
            self._note(error.lineno or first_line, "syntax error: %s" % error.msg)
        except ValueError as error:
            self._note(first_line, "cannot be parsed: %s" % error)
        except (RecursionError, MemoryError):
            self._note(first_line, "nested too deeply to parse")
        return None

    def _note(self, line: int, message: str) -> None:
        if (line, message) not in self.errors:
            self.errors.append((line, message))


class Unit:
    """A function or class by its span in a source; parsed on demand. ``kind`` is ``def``, ``class`` or ``stmt``."""

    __slots__ = ("_body", "_head", "_node", "_parsed", "end", "kind", "name", "source", "start")

    def __init__(self, source: Source, start: int, end: int, kind: str, name: str) -> None:
        self.source = source
        self.start = start
        self.end = end
        self.kind = kind
        self.name = name
        self._parsed = False
        self._node: Optional[ast.stmt] = None
        self._body: Optional[Body] = None
        self._head: Optional[FunctionNode] = None

    @property
    def line(self) -> int:
        """Line of the ``def`` or ``class`` keyword (after decorators)."""
        masked = self.source.masked
        at = self.start
        if masked[at : at + 1] in "@ \t":
            found = re.compile(r"^[ \t]*(?:async[ \t]+)?(?:def|class)\b", re.M).search(masked, at, self.end)
            at = found.end() if found else at
        return self.source.line_of(at)

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.end]

    def mentions(self, word: str) -> bool:
        """Whether the unit's text has ``word`` anywhere (strings and comments included)."""
        return self.source.text.find(word, self.start, self.end) >= 0

    def _wrap(self, text: str) -> Optional[ast.stmt]:
        line = self.source.line_of(self.start)
        begin = self.source.offset_of(line, 0)
        lead = self.source.text[begin : self.start]
        if lead and not lead.isspace():
            return None
        if lead:
            tree = self.source.parse("if 1:\n" + lead + text, line - 1)
            return tree.body[0].body[0] if tree is not None else None  # type: ignore[attr-defined]
        tree = self.source.parse(text, line)
        return tree.body[0] if tree is not None and tree.body else None

    def node(self) -> Optional[ast.stmt]:
        """The whole unit as a tree (a class with everything in it), or None when it cannot be parsed."""
        if not self._parsed:
            self._parsed = True
            self._node = self._wrap(self.text)
        return self._node

    def function(self) -> Optional[FunctionNode]:
        node = self.node()
        return node if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else None

    def head(self) -> Optional[FunctionNode]:
        """A function's decorators, parameters and return annotation, with an empty body (the body is not parsed
        for it).
        """
        if self._parsed:
            return self.function()
        if self._head is None:
            masked = self.source.masked
            keyword = _DEF.search(masked, self.start, self.end)
            colon = _header_end(masked, keyword.end(), self.end) if keyword else -1
            node = self._wrap(self.source.text[self.start : colon] + " pass") if colon > 0 else None
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return self.function()
            self._head = node
        return self._head

    def body(self) -> Body:
        """Members and plain statements of a class."""
        if self._body is None:
            self._body = _class_body(self)
        return self._body


class Body:
    """What a module or class holds: ``statements`` (plain ones, parsed), ``units`` (functions, classes), ``header``."""

    def __init__(self, statements: List[ast.stmt], units: List[Unit], header: Optional[ast.ClassDef] = None) -> None:
        self.statements = statements
        self.header = header
        self.units = units
        self.by_name: Dict[str, List[Unit]] = {}
        for unit in units:
            self.by_name.setdefault(unit.name, []).append(unit)


def _spans(source: Source, begin: int, end: int, indent: str) -> List[Unit]:
    """Units that start in a column; a decorator belongs to the definition after it."""
    masked = source.masked
    starts = re.compile(r"^%s(?=[^\s)\]}\"'])(?!%s)" % (re.escape(indent), _CONTINUES), re.M)
    at = [match.end() for match in starts.finditer(masked, begin, end)]
    units: List[Unit] = []
    decorated = -1
    for number, start in enumerate(at):
        stop = at[number + 1] if number + 1 < len(at) else end
        if masked[start] == "@":
            decorated = start if decorated < 0 else decorated
            continue
        found = _DEFINES.match(masked, start)
        first, decorated = (decorated if decorated >= 0 else start), -1
        if found:
            units.append(
                Unit(source, first, stop, "def" if found.group(1) else "class", found.group(1) or found.group(2))
            )
        else:
            units.append(Unit(source, first, stop, "stmt", ""))
    return units


def _erase(source: Source, begin: int, end: int, units: List[Unit]) -> str:
    """The text of a span with its functions and classes replaced by empty lines (line numbers stay)."""
    parts, at = [], begin
    for unit in units:
        if unit.kind == "stmt":
            continue
        parts.append(source.text[at : unit.start])
        parts.append("pass;" + "\n" * source.text.count("\n", unit.start, unit.end))
        # The next unit's indentation stands before its start: give back what follows the last newline.
        parts.append(source.text[source.text.rfind("\n", unit.start, unit.end) + 1 : unit.end])
        at = unit.end
    parts.append(source.text[at:end])
    return "".join(parts)


def _from_nodes(source: Source, nodes: List[ast.stmt]) -> Tuple[List[ast.stmt], List[Unit]]:
    plain, units = [], []
    for node in nodes:
        unit = unit_of(source, node)
        if unit is None:
            plain.append(node)
        else:
            units.append(unit)
    return plain, units


def unit_of(source: Source, node: ast.AST) -> Optional[Unit]:
    """A unit for a definition that was parsed as part of something larger."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return None
    first = min([node.lineno] + [d.lineno for d in node.decorator_list])
    if first < node.lineno:
        start = source.offset_of(first, 0)
        start = source.text.index("@", start)
    else:
        start = source.offset_of(node.lineno, node.col_offset)
    end = source.offset_of(node.end_lineno or node.lineno, node.end_col_offset or 0)
    unit = Unit(source, start, end, "class" if isinstance(node, ast.ClassDef) else "def", node.name)
    unit._parsed, unit._node = True, node
    return unit


def module_body(source: Source) -> Body:
    """Splits a file. A file that splits badly is parsed whole; one that cannot be parsed keeps what can."""
    units = _spans(source, 0, len(source.text), "")
    head = source.parse(_erase(source, 0, len(source.text), units), 1)
    if head is not None:
        plain = [s for s in head.body if not isinstance(s, ast.Pass)]
        return Body(plain, [u for u in units if u.kind != "stmt"])
    whole = source.parse(source.text, 1)
    if whole is not None:
        source.errors = [e for e in source.errors if "syntax error" not in e[1]]
        plain, found = _from_nodes(source, whole.body)
        return Body(plain, found)
    # Broken somewhere: keep what can be read, statement by statement, up to a number of errors.
    statements: List[ast.stmt] = []
    failures = 0
    for unit in [u for u in units if u.kind == "stmt"][:MAX_STATEMENTS]:
        if failures < MAX_FAILURES:
            tree = source.parse(unit.text, source.line_of(unit.start))
            failures += tree is None
            statements.extend(tree.body if tree is not None else [])
    return Body(statements, [u for u in units if u.kind != "stmt"])


def _header_end(masked: str, start: int, end: int) -> int:
    """Offset just after the colon that ends a class header, or -1."""
    depth = 0
    for match in re.compile(r"[()\[\]{}:]").finditer(masked, start, end):
        mark = match.group()
        if mark in "([{":
            depth += 1
        elif mark in ")]}":
            depth -= 1
        elif depth == 0:
            return match.end()
    return -1


def _class_body(unit: Unit) -> Body:
    source, masked = unit.source, unit.source.masked
    keyword = re.compile(r"\bclass[ \t]+\w+").search(masked, unit.start, unit.end)
    colon = _header_end(masked, keyword.end(), unit.end) if keyword else -1
    if (
        unit._parsed
        or colon < 0
        or masked[colon : masked.find("\n", colon) if "\n" in masked[colon : unit.end] else unit.end].strip()
    ):
        return _parsed_body(unit)
    first = re.compile(r"\n([ \t]+)(?=[^\s])").search(masked, colon, unit.end)
    if not first:
        return _parsed_body(unit)
    members = _spans(source, first.start(1), unit.end, first.group(1))
    text = source.text[unit.start : first.start(1)] + _erase(source, first.start(1), unit.end, members)
    node = unit._wrap(text)
    if isinstance(node, ast.ClassDef):
        return Body(
            [s for s in node.body if not isinstance(s, ast.Pass)], [m for m in members if m.kind != "stmt"], node
        )
    return _parsed_body(unit)


def _parsed_body(unit: Unit) -> Body:
    node = unit.node()
    if not isinstance(node, ast.ClassDef):
        return Body([], [])
    plain, units = _from_nodes(unit.source, node.body)
    return Body(plain, units, node)


def walk_shallow(statements: List[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements including those nested in if, try, with and loops, but not inside functions and classes."""
    for statement in statements:
        yield statement
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from walk_shallow(getattr(statement, field, []) or [])
        for handler in getattr(statement, "handlers", []) or []:
            yield from walk_shallow(handler.body)
        for case in getattr(statement, "cases", []) or []:
            yield from walk_shallow(case.body)
