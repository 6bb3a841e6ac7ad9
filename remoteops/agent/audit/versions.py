"""Comparing versions and constants, where the outcome is sure."""

from __future__ import annotations

import ast
import re
from typing import Any, List, Optional, Tuple

from remoteops.agent.audit.values import (
    UNKNOWN,
    BoundMethod,
    CallableValue,
    Const,
    External,
    Sequence,
    Unknown,
    Value,
    Version,
)


def compare(left: Value, operator: ast.cmpop, right: Value) -> Value:
    """The outcome of a comparison of constants or versions, where it is sure."""
    if isinstance(left, Version) or isinstance(right, Version):
        one, two = _version_key(left), _version_key(right)
        if one is None or two is None:
            return Unknown(False, "version")
        return Const(_order(one, operator, two))
    if isinstance(left, Const) and isinstance(right, Const):
        if isinstance(operator, (ast.Is, ast.Eq)):
            return Const(left.value == right.value)
        if isinstance(operator, (ast.IsNot, ast.NotEq)):
            return Const(left.value != right.value)
        if isinstance(left.value, int) and isinstance(right.value, int):
            return Const(_order(left.value, operator, right.value))
    return UNKNOWN


def text_method(value: Value, name: str) -> Value:
    """A method of a text, bound to it, where its result can be told."""
    return BoundMethod(External("str." + name), value) if name in ("startswith", "split") else CallableValue(UNKNOWN)


def text_result(method: str, value: Value, arguments: List[Value]) -> Value:
    """What a method made by ``text_method`` returns."""
    text = value.text if isinstance(value, Version) else value.value if isinstance(value, Const) else None
    first = arguments[0] if arguments else None
    given = [p for p in (first.parts or ()) if isinstance(p, Const)] if isinstance(first, Sequence) else [first]
    if not isinstance(text, str) or not all(isinstance(g, Const) and isinstance(g.value, str) for g in given):
        return Unknown(False, "version") if isinstance(value, Version) else UNKNOWN
    words = tuple(str(g.value) for g in given if isinstance(g, Const))
    if method == "str.startswith" and words:
        return Const(text.startswith(words))
    if method == "str.split" and len(words) == 1 and len(arguments) == 1:
        return Sequence("list", tuple(Const(part) for part in text.split(words[0])))
    return UNKNOWN


def version_part(version: Version, name: str) -> Value:
    """An attribute of a version: of the text, or of a ``packaging.version.Version``."""
    if name in ("base_version", "public"):
        return version
    if name in ("startswith", "split"):
        return text_method(version, name)
    found = re.match(r"v?(\d+)(?:\.(\d+))?(?:\.(\d+))?", version.text or "")
    numbers = [Const(int(part or 0)) for part in found.groups()] if found else []
    if found and name in ("major", "minor", "micro"):
        return numbers[("major", "minor", "micro").index(name)]
    return Unknown(False, "version") if name in ("major", "minor", "micro", "release") else UNKNOWN


def _order(one: Any, operator: ast.cmpop, two: Any) -> Any:
    table = {
        "Lt": one < two,
        "LtE": one <= two,
        "Gt": one > two,
        "GtE": one >= two,
        "Eq": one == two,
        "NotEq": one != two,
    }
    return table.get(type(operator).__name__, True)


def _version_key(value: Value) -> Optional[Tuple[Any, ...]]:
    text = value.text if isinstance(value, Version) else value.value if isinstance(value, Const) else None
    if (
        isinstance(value, Sequence)
        and value.parts
        and all(isinstance(p, Const) and isinstance(p.value, int) for p in value.parts)
    ):
        text = ".".join(str(p.value) for p in value.parts if isinstance(p, Const))
    return version_key(text) if isinstance(text, str) else None


def version_key(text: str) -> Optional[Tuple[Any, ...]]:
    """A sort key for a release number as PEP 440 orders it (dev < a < b < rc < release < post); None for something
    else.
    """
    match = re.match(
        r"^v?(\d+(?:\.\d+)*)(?:[._-]?(a|b|rc|alpha|beta|c|pre)[._-]?(\d*))?(?:[._-]?(post|rev|r)[._-]?(\d*))?(?:[._-]?(dev)[._-]?(\d*))?(?:\+.*)?$",
        text.strip(),
        re.I,
    )
    if not match:
        return None
    numbers = [int(n) for n in match.group(1).split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    pre = match.group(2)
    stage = (
        {"a": 1, "alpha": 1, "b": 2, "beta": 2, "rc": 3, "c": 3, "pre": 3}[pre.lower()]
        if pre
        else (0 if match.group(6) and not match.group(4) else 4)
    )
    return (
        tuple(numbers),
        stage,
        int(match.group(3) or 0),
        int(match.group(5) or 0) + (1 if match.group(4) else 0),
        0 if match.group(6) else 1,
        int(match.group(7) or 0),
    )
