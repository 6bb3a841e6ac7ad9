"""YAML that knows on which line each key stands; whatever makes a file unreadable is told as file and line."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from remoteops.errors import InventoryError

Where = tuple[str | int, ...]
"""Keys and indices from the top of a document to a value."""


def mistake(
    file: Path | None, line: int | None, message: str, hint: str, key: str | None = None
) -> InventoryError:
    """The error for a place in the file (data: file, line, key); its text begins with the place."""
    place = "" if file is None else f"{file}: " if line is None else f"{file}:{line}: "
    return InventoryError(place + message, file=str(file) if file else None, line=line, key=key, hint=hint)


def read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        told = f"cannot be read: {error.strerror}"
        raise mistake(file, None, told, "check REMOTEOPS_INVENTORY and the file's permissions") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        told = f"not UTF-8 text (byte {error.object[error.start]:#04x})"
        raise mistake(file, line, told, "save the file as UTF-8") from None


def parse(file: Path, text: str) -> Any:
    """The document as ruamel's commented tree, which knows where each key stands."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError
    from ruamel.yaml.reader import ReaderError

    try:
        tree = YAML(typ="rt").load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = (error.problem or "not YAML").split("\n")[0]
        raise mistake(file, mark.line + 1 if mark else None, problem, _hint(problem)) from None
    except ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise mistake(file, line, error.reason, "remove the control character") from None
    except (YAMLError, RecursionError, ValueError) as error:
        told = f"not usable YAML: {type(error).__name__}"
        raise mistake(file, None, told, "check the file with a YAML linter") from None
    if tree is None:
        raise mistake(file, 1, "the file is empty", "add 'hosts:'")
    if not isinstance(tree, Mapping):
        keys = "the top level has the keys default, defaults, profiles, groups, hosts"
        raise mistake(file, 1, "the file holds no mapping", keys)
    return tree


def _hint(problem: str) -> str:
    if "duplicate key" in problem:
        return "a key may stand once in each mapping: remove one of the two"
    if "\\t" in problem or "token" in problem:
        return "indent with spaces, and quote values that start with a special character"
    return "check the indentation and the colons on this line and the one before it"


def plain(node: Any, depth: int = 0, budget: list[int] | None = None) -> Any:
    """The tree as plain dicts, lists and scalars. Anchors that would blow up the document are refused."""
    budget = budget if budget is not None else [100_000]
    budget[0] -= 1
    if depth > 50 or budget[0] < 0:
        told = "the inventory nests too deep or is too large"
        raise mistake(None, None, told, "use fewer anchors and aliases")
    if isinstance(node, Mapping):
        return {str(key): plain(value, depth + 1, budget) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [plain(value, depth + 1, budget) for value in node]
    if isinstance(node, str):
        return str(node)
    if isinstance(node, bool) or node is None:
        return node
    if isinstance(node, int):
        return int(node)
    return float(node) if isinstance(node, float) else str(node)


def walk(node: Any, where: Where, seen: set[int] | None = None) -> Iterator[tuple[Where, Any]]:
    """Every value with its place; what several aliases share is visited once, so that no document can blow this up."""
    seen = seen if seen is not None else set()
    if isinstance(node, Mapping | list):
        if id(node) in seen:
            return
        seen.add(id(node))
    items: Any = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*where, key), value
        yield from walk(value, (*where, key), seen)


def line_of(tree: Any, where: Where) -> int | None:
    """Line (from 1) of the deepest part of a location that stands in the file."""
    node, line = tree, None
    for step in where:
        position = getattr(node, "lc", None)
        try:
            if isinstance(node, Mapping) and step in node and position is not None:
                line = position.key(step)[0] + 1
            elif isinstance(node, list) and isinstance(step, int) and position is not None:
                line = position.item(step)[0] + 1
            else:
                continue
        except (KeyError, TypeError, AttributeError):
            pass  # merged in through an anchor: it has no place of its own
        node = node[step]
    return line


def dotted(where: Where) -> str:
    return ".".join(str(part) for part in where)


def exists(tree: Any, part: str | int, loc: tuple[str | int, ...]) -> bool:
    """Pydantic puts names of union members into a location; only real keys and indices are kept."""
    node = tree
    for step in loc:
        here = step in node if isinstance(node, Mapping) else isinstance(node, list) and isinstance(step, int)
        if step is part:
            return here
        if here and (isinstance(node, Mapping) or len(node) > int(step)):
            node = node[step]
    return False


def nearest(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    return "did you mean " + " or ".join(f"'{name}'" for name in close) + "?" if close else ""
