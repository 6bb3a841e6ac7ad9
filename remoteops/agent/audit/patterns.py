"""Patterns over Python source, written as Python source.

A pattern is one expression or statement with three additions:

* ``$NAME`` stands for any expression, identifier, attribute or keyword name; the same name twice must match equal code.
* ``...`` stands for any expression; among arguments, elements or statements it stands for any number of them.
* a string that starts with ``~`` is a regular expression searched in a string (of an f-string, in its fixed parts).

A call pattern without ``...`` names all arguments. What a pattern leaves out elsewhere (decorators, annotations,
``else`` branches, docstrings, the parameters of ``def name(): ...``) is not compared: it is a shape, not a layout.
"""

from __future__ import annotations

import ast
import re
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple

Bindings = Dict[str, Any]

_META = "META__"
# Fields that say how a node is used or annotated, not what it is.
_IGNORED = {"ctx", "type_comment", "decorator_list", "returns", "type_params", "kind", "annotation"}
_CACHE: Dict[str, ast.AST] = {}


class PatternError(ValueError):
    """A pattern of a contract that is no Python; the message names it."""


def compile_pattern(text: str) -> ast.AST:
    """The node of a pattern. Raises PatternError."""
    if text not in _CACHE:
        # A regular expression keeps its backslashes: its string is read raw.
        plain = re.sub(r"(?<![\w\"'])([\"'])~", r"r\1~", text.strip())
        try:
            body = ast.parse(re.sub(r"\$([A-Za-z_]\w*)", _META + r"\1", plain)).body
        except SyntaxError as error:
            raise PatternError("pattern %r is not Python: %s" % (text, error.msg)) from None
        if len(body) != 1:
            raise PatternError("pattern %r must be one expression or one statement" % text)
        node: ast.AST = body[0]
        _CACHE[text] = node.value if isinstance(node, ast.Expr) else node
    return _CACHE[text]


def find(
    text: str, root: ast.AST, bound: Optional[Bindings] = None, nodes: Optional[Iterable[ast.AST]] = None
) -> Iterator[Tuple[ast.AST, Bindings]]:
    """Every node under ``root`` (itself included, source order) that matches, with what the names stand for.

    ``nodes`` may give the candidates (in source order) when the caller has them sorted by kind already.
    """
    pattern = compile_pattern(text)
    wanted = kinds(pattern)
    for node in walk(root) if nodes is None else nodes:
        if wanted and type(node) not in wanted:
            continue
        bindings = match(pattern, node, dict(bound or {}))
        if bindings is not None:
            yield node, bindings


def kinds(pattern: ast.AST) -> Tuple[type, ...]:
    """The node types that a pattern can match; empty for any."""
    if _meta(pattern) is not None or _is_dots(pattern):
        return ()
    return (ast.FunctionDef, ast.AsyncFunctionDef) if isinstance(pattern, ast.FunctionDef) else (type(pattern),)


def needle(text: str) -> str:
    """The longest name that a pattern asks for: a text without it cannot match and need not be parsed."""
    plain = re.sub(r"\$\w+|\"~[^\"]*\"|'~[^']*'", " ", text)
    return max(re.findall(r"[A-Za-z_]\w+", plain), key=len, default="")


def walk(root: ast.AST) -> Iterator[ast.AST]:
    """Depth first in source order (``ast.walk`` is breadth first, which mixes up which match is the first)."""
    stack: List[ast.AST] = [root]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(list(ast.iter_child_nodes(node))))


def match(pattern: Any, node: Any, bound: Bindings) -> Optional[Bindings]:
    """The bindings under which ``node`` is an instance of ``pattern``, or None."""
    if _is_dots(pattern):
        return bound
    name = _meta(pattern)
    if name is not None:
        return _bind(name, node, bound)
    if isinstance(pattern, ast.Constant) and isinstance(pattern.value, str) and pattern.value.startswith("~"):
        text = literal_text(node)
        return bound if text is not None and re.search(pattern.value[1:], text) else None
    if isinstance(pattern, ast.AST):
        if isinstance(pattern, ast.FunctionDef) and isinstance(node, ast.AsyncFunctionDef):
            pass
        elif type(pattern) is not type(node):
            return None
        if isinstance(pattern, ast.arguments) and not ast.unparse(pattern):
            return bound  # ``def name(): ...`` asks for a function of that name, whatever it takes
        if isinstance(pattern, ast.Call):
            return _call(pattern, node, bound)
        for field in pattern._fields:
            if field in _IGNORED:
                continue
            mine = getattr(pattern, field, None)
            theirs = getattr(node, field, None)
            if mine is None or (mine == [] and field in ("orelse", "finalbody", "keywords", "bases", "handlers")):
                continue
            result = match(mine, theirs, bound)
            if result is None:
                return None
            bound = result
        return bound
    if isinstance(pattern, list):
        return _sequence(pattern, node, bound) if isinstance(node, list) else None
    if isinstance(pattern, str) and pattern.startswith(_META):
        return _bind(pattern[len(_META) :], node, bound)
    return bound if pattern == node and type(pattern) is type(node) else None


def literal_text(node: Any) -> Optional[str]:
    """The fixed text of a string or f-string node (replacement fields left out), else None."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value for part in node.values if isinstance(part, ast.Constant) and isinstance(part.value, str)
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = literal_text(node.left), literal_text(node.right)
        return left + right if left is not None and right is not None else None
    return None


def same(left: Any, right: Any) -> bool:
    """Whether two pieces of code are equal, whatever their position."""
    if isinstance(left, ast.AST) and isinstance(right, ast.AST):
        return code_key(left) == code_key(right)
    return bool(left == right)


def code_key(node: ast.AST) -> str:
    """A text that is equal for equal code: loads and stores of one name count as the same."""
    return re.sub(r"ctx=(Load|Store|Del)\(\)", "", ast.dump(node))


def _is_dots(node: Any) -> bool:
    if isinstance(node, ast.Expr):
        node = node.value
    return isinstance(node, ast.Constant) and node.value is Ellipsis


def _meta(node: Any) -> Optional[str]:
    if isinstance(node, ast.Expr):
        node = node.value
    if isinstance(node, ast.Name) and node.id.startswith(_META):
        return node.id[len(_META) :]
    return None


def _bind(name: str, node: Any, bound: Bindings) -> Optional[Bindings]:
    if name in bound:
        return bound if same(bound[name], node) else None
    return {**bound, name: node}


def _sequence(pattern: List[Any], nodes: List[Any], bound: Bindings) -> Optional[Bindings]:
    """Match lists; ``...`` swallows any number of elements (backtracking, lists in patterns are short)."""
    if not pattern:
        return bound if not nodes else None
    if _is_dots(pattern[0]):
        for skip in range(len(nodes) + 1):
            result = _sequence(pattern[1:], nodes[skip:], bound)
            if result is not None:
                return result
        return None
    if not nodes:
        return None
    result = match(pattern[0], nodes[0], bound)
    return None if result is None else _sequence(pattern[1:], nodes[1:], result)


def _call(pattern: ast.Call, node: ast.Call, bound: Bindings) -> Optional[Bindings]:
    """Arguments: keywords in any order; with ``...`` among the arguments more of both kinds may follow."""
    result = match(pattern.func, node.func, bound)
    if result is None:
        return None
    is_open = any(_is_dots(argument) for argument in pattern.args)
    result = _sequence(list(pattern.args), list(node.args), result)
    if result is None:
        return None
    left = list(node.keywords)
    for keyword in pattern.keywords:
        for candidate in left:
            attempt = match(keyword.arg, candidate.arg, result)
            attempt = None if attempt is None else match(keyword.value, candidate.value, attempt)
            if attempt is not None:
                result = attempt
                left.remove(candidate)
                break
        else:
            return None
    return result if is_open or not left else None
