"""Comparing versions and constants, where the outcome is sure."""

from __future__ import annotations

import ast
from typing import Any, Optional, Tuple

from remoteops.agent.audit.values import (
    UNKNOWN,
    Const,
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
    return UNKNOWN


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
    import re

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
