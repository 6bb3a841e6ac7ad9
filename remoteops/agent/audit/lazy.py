"""Reading modules that make their names on demand: tables, and what a module-level ``__getattr__`` does."""

from __future__ import annotations

import ast
from typing import List, Optional, Set, Tuple

from remoteops.agent.audit.modules import Module


def strings(node: Optional[ast.AST]) -> Set[str]:
    if node is None:
        return set()
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def tables(module: Module) -> List[Tuple[str, ast.expr]]:
    """Entries of the dicts that a module spells out at its top level."""
    if module.tables is None:
        module.tables = []
        for statement in module.body.statements:
            for node in ast.walk(statement):
                if isinstance(node, ast.Dict):
                    for key, value in zip(node.keys, node.values):
                        if isinstance(key, ast.Constant) and isinstance(key.value, str):
                            module.tables.append((key.value, value))
    return module.tables


def table_target(module: Module, name: str, value: ast.expr) -> Optional[Tuple[str, str]]:
    """(module, attribute) that a table entry names: ".mod:attr", ".mod", ("mod", "attr"), "pkg.mod.attr"."""
    texts = [n.value for n in ast.walk(value) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    if not texts or len(texts) > 2:
        return None
    path, attr = (
        (texts[0], texts[1]) if len(texts) == 2 else texts[0].split(":", 1) if ":" in texts[0] else (texts[0], "")
    )
    level = len(path) - len(path.lstrip("."))
    source = module.absolute(path.lstrip(".") or None, level) if level else path
    for candidate in (source, module.name + "." + source):
        if module.tree.find(candidate) is not None:
            return candidate, attr or name
    head, _, last = source.rpartition(".")
    return (head, last) if head and module.tree.find(head) is not None else None


def called(node: ast.Call) -> str:
    return (
        node.func.attr
        if isinstance(node.func, ast.Attribute)
        else node.func.id
        if isinstance(node.func, ast.Name)
        else ""
    )


def inside_raise(tree: ast.AST, wanted: ast.AST) -> bool:
    return any(isinstance(n, ast.Raise) and any(inner is wanted for inner in ast.walk(n)) for n in ast.walk(tree))


def guarded_by_table(tree: ast.AST, wanted: ast.AST) -> bool:
    """Whether the node stands in a branch whose condition asks for membership or equality of the name."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.If)
            and isinstance(node.test, ast.Compare)
            and any(isinstance(op, (ast.In, ast.Eq)) for op in node.test.ops)
        ):
            if any(inner is wanted for statement in node.body for inner in ast.walk(statement)):
                return True
    return False


def computes(node: ast.AST) -> bool:
    """Whether a module-level ``__getattr__`` looks inside the name (``name.startswith(…)``, ``re.match(…, name)``,
    ``name[4:]``): which names it serves cannot be listed then.
    """
    arguments = getattr(node, "args", None)
    names = {a.arg for a in arguments.args} if isinstance(arguments, ast.arguments) else set()
    for inner in ast.walk(node):
        looks = (
            isinstance(inner, (ast.Attribute, ast.Subscript))
            and isinstance(inner.value, ast.Name)
            and inner.value.id in names
        )
        matches = (
            isinstance(inner, ast.Call)
            and called(inner) in ("match", "fullmatch", "search", "fnmatch", "fnmatchcase")
            and any(isinstance(a, ast.Name) and a.id in names for a in inner.args)
        )
        if (looks or matches) and not inside_raise(node, inner):
            return True
    return False
