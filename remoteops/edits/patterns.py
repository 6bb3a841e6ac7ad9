"""Code patterns with holes: ``$result[0]`` matches any subscript by 0 and binds what stands before it.

A pattern is Python with ``$name`` where any expression may stand. The same hole twice must match the same code. A block
that is only ``...`` matches any block.
White space, comments, parentheses and quotes do not count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

import libcst as cst

from remoteops.errors import UsageError

__all__ = ["expression", "fill", "holes", "match", "python", "same", "statement"]

_HOLE = re.compile(r"\$([a-z][a-z0-9_]*)")
_PREFIX = "__hole_"
_IGNORED = frozenset(
    {
        "lpar",
        "rpar",
        "comma",
        "semicolon",
        "equal",
        "lbracket",
        "rbracket",
        "leading_lines",
        "header",
        "footer",
        "lines_after_decorators",
        "trailing_whitespace",
        "leading_lines_after_decorators",
    }
)


def python(text: str) -> str:
    """The pattern as Python that a parser takes: holes become names."""
    return _HOLE.sub(lambda found: _PREFIX + found.group(1), text)


@cache
def expression(text: str) -> cst.BaseExpression:
    """Parse an expression pattern. Raises UsageError (a recipe is wrong) when it is no expression."""
    try:
        return cst.parse_expression(python(text.strip()))
    except cst.ParserSyntaxError as error:
        raise UsageError(f"not an expression: {text!r}: {error.message}", tried="read a recipe") from error


@cache
def statement(text: str) -> cst.BaseStatement:
    """Parse a pattern of exactly one statement."""
    try:
        body = cst.parse_module(python(text.strip()) + "\n").body
    except cst.ParserSyntaxError as error:
        raise UsageError(f"not a statement: {text!r}: {error.message}", tried="read a recipe") from error
    if len(body) != 1:
        raise UsageError(f"a pattern must be one statement: {text!r}", tried="read a recipe")
    found = body[0]
    assert isinstance(found, cst.BaseStatement)
    return found


def holes(text: str) -> set[str]:
    return set(_HOLE.findall(text))


def match(pattern: cst.CSTNode, node: cst.CSTNode, bound: Mapping[str, cst.CSTNode]) -> dict[str, cst.CSTNode] | None:
    """The bindings under which ``node`` is an instance of ``pattern``, starting from ``bound``; None when it is not."""
    found = dict(bound)
    return found if _match(pattern, node, found) else None


def same(a: cst.CSTNode, b: cst.CSTNode) -> bool:
    """Equal but for white space, comments, outer parentheses and how strings are quoted."""
    return _match(a, b, {})


def _match(pattern: cst.CSTNode, node: cst.CSTNode, bound: dict[str, cst.CSTNode]) -> bool:
    if isinstance(pattern, cst.Name) and pattern.value.startswith(_PREFIX):
        name = pattern.value[len(_PREFIX) :]
        if name in bound:
            return _match(bound[name], node, {})
        if not isinstance(node, cst.BaseExpression):
            return False
        bound[name] = node
        return True
    if _any_block(pattern) and isinstance(node, cst.BaseSuite):
        return True
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, cst.SimpleString) and isinstance(node, cst.SimpleString):
        return pattern.evaluated_value == node.evaluated_value
    for field in pattern.__dataclass_fields__:
        if field in _IGNORED or "whitespace" in field:
            continue
        ours, theirs = getattr(pattern, field), getattr(node, field)
        if not _match_value(ours, theirs, bound):
            return False
    return True


def _any_block(pattern: cst.CSTNode) -> bool:
    if not isinstance(pattern, cst.IndentedBlock) or len(pattern.body) != 1:
        return False
    line = pattern.body[0]
    return (
        isinstance(line, cst.SimpleStatementLine)
        and len(line.body) == 1
        and isinstance(line.body[0], cst.Expr)
        and isinstance(line.body[0].value, cst.Ellipsis)
    )


def _match_value(ours: object, theirs: object, bound: dict[str, cst.CSTNode]) -> bool:
    if isinstance(ours, cst.CSTNode):
        return isinstance(theirs, cst.CSTNode) and _match(ours, theirs, bound)
    if isinstance(ours, list | tuple):
        return (
            isinstance(theirs, list | tuple)
            and len(ours) == len(theirs)
            and all(_match_value(a, b, bound) for a, b in zip(ours, theirs, strict=True))
        )
    if isinstance(ours, cst.MaybeSentinel) or isinstance(theirs, cst.MaybeSentinel):
        return True
    return ours == theirs


def fill(text: str, bound: Mapping[str, str]) -> str:
    """The template with each hole replaced by code. Raises UsageError for a hole that nothing binds."""

    def code(found: re.Match[str]) -> str:
        if found.group(1) not in bound:
            raise UsageError(f"${found.group(1)} is bound by nothing", tried="fill a recipe's template")
        return bound[found.group(1)]

    return _HOLE.sub(code, text)
