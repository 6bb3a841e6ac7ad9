"""Fields of classes whose constructor is made for them."""

from __future__ import annotations

import ast
from typing import NamedTuple, Optional, Tuple

from remoteops.agent.audit.index import ClassInfo
from remoteops.agent.audit.modules import last_name


class Field(NamedTuple):
    """One field of a generated constructor. ``default`` None: required; ``extra``: ``initvar`` where it is no
    attribute.
    """

    name: str
    default: Optional[str]
    annotation: Optional[ast.expr]
    kw_only: bool
    line: int
    owner: ClassInfo
    init: bool = True
    extra: str = ""
    default_node: Optional[ast.expr] = None
    alias: str = ""


def outer_name(node: ast.expr) -> str:
    """The outermost name of an annotation (``InitVar`` of ``InitVar[int]``), through a string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            node = ast.parse(node.value, mode="eval").body
        except (SyntaxError, ValueError):
            return ""
    return last_name(node.value) if isinstance(node, ast.Subscript) else last_name(node)


def annotated_call(node: ast.expr) -> Optional[ast.Call]:
    """The ``Field(...)`` of ``Annotated[int, Field(...)]``."""
    if isinstance(node, ast.Subscript) and last_name(node.value) == "Annotated":
        parts: Tuple[ast.AST, ...] = tuple(node.slice.elts) if isinstance(node.slice, ast.Tuple) else (node.slice,)
        for part in parts[1:]:
            if isinstance(part, ast.Call) and last_name(part.func) == "Field":
                return part
    return None
