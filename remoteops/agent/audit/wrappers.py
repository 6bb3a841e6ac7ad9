"""What a decorator function does with what it is given, read from its body."""

from __future__ import annotations

import ast
from typing import Any, Dict, List, NamedTuple, Optional

from remoteops.agent.audit.modules import Module, last_name
from remoteops.agent.audit.syntax import FunctionNode, walk_shallow


class Recipe(NamedTuple):
    """How a class gets its constructor. ``family``: plain, dataclass, pydantic, attrs. ``extra``: pydantic's
    setting, if given.
    ``doubt``: why the constructor may be another one, ``open``: why there may be more attributes, if so."""

    family: str = "plain"
    init: bool = True
    kw_only: bool = False
    extra: str = ""
    doubt: str = ""
    auto_attribs: bool = True
    open: str = ""


def constant(node: ast.expr) -> bool:
    """Whether a name passed to setattr is spelled out: a literal, or a constant in capitals."""
    return isinstance(node, ast.Constant) or last_name(node).isupper()


def rewrites(node: ast.AST, name: str) -> bool:
    """Whether a node changes the dict ``name`` (an item set or deleted, ``pop``, ``update``) or binds it anew."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
        return last_name(node.value) == name
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id == name
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and last_name(node.func.value) == name
        and node.func.attr in ("pop", "update", "setdefault", "clear")
    )


def injects(placed: FunctionNode) -> bool:
    """Whether a wrapper passes on more than it was given: ``return f(connection, *args, **kwargs)``."""
    star = placed.args.vararg.arg if placed.args.vararg is not None else ""
    given = {a.arg for a in placed.args.posonlyargs + placed.args.args + placed.args.kwonlyargs}
    for node in ast.walk(placed):
        if not isinstance(node, ast.Call):
            continue
        if not any(isinstance(a, ast.Starred) and last_name(a.value) == star for a in node.args):
            continue
        more = [a for a in node.args if not isinstance(a, ast.Starred) and last_name(a) not in given]
        if more or any(k.arg is not None for k in node.keywords):
            return True
    return False


def leading(placed: FunctionNode) -> int:
    """How many arguments of its own a wrapper puts before those it was given, where that is all it does; else -1.

    ``def inner(*args, **kwargs): return f(connection, *args, **kwargs)`` gives 1.
    """
    star, double = placed.args.vararg, placed.args.kwarg
    named = [a.arg for a in placed.args.posonlyargs + placed.args.args]
    calls = [
        node
        for node in ast.walk(placed)
        if isinstance(node, ast.Call)
        and any(isinstance(a, ast.Starred) and star is not None and last_name(a.value) == star.arg for a in node.args)
    ]
    if len(calls) != 1 or star is None or double is None or placed.args.kwonlyargs:
        return -1
    given, keywords = calls[0].args, calls[0].keywords
    before = [last_name(a) for a in given[: len(named)]] == named
    whole = isinstance(given[-1], ast.Starred) and sum(isinstance(a, ast.Starred) for a in given) == 1
    passed = len(keywords) == 1 and keywords[0].arg is None and last_name(keywords[0].value) == double.arg
    return len(given) - len(named) - 1 if before and whole and passed else -1


def wrapper(node: FunctionNode, applied: int, depth: int = 0) -> Any:
    """The function that a decorator puts in place, ``identity``, or None where that was not followed.

    ``applied``: how often the decorator's name and its results are still called: once for ``@d``, twice for
    ``@d(...)``.
    """
    if depth > 4:
        return None
    local = {s.name: s for s in walk_shallow(node.body) if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef))}
    first = [a.arg for a in node.args.posonlyargs + node.args.args][:1]
    choices: List[ast.expr] = []
    for statement in walk_shallow(node.body):
        if isinstance(statement, ast.Return) and statement.value is not None:
            value = statement.value
            choices += [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
    # `return wrap if f is None else wrap(f)`: the called form belongs to `@d`, the plain one to `@d()`.
    choices.sort(key=lambda c: isinstance(c, ast.Call) is (applied > 1))
    for choice in choices:
        found: Any = None
        if isinstance(choice, ast.Call):
            name = last_name(choice.func)
            if name in local:
                found = wrapper(local[name], applied, depth + 1)
            elif name in ("cast", "update_wrapper") and choice.args:
                inner = choice.args[-1] if name == "cast" else choice.args[0]
                found = local.get(last_name(inner)) or ("identity" if last_name(inner) in first else None)
            elif isinstance(choice.func, ast.Call) and last_name(choice.func.func) == "wraps" and choice.args:
                found = local.get(last_name(choice.args[0]))
        elif isinstance(choice, ast.Name) and choice.id in local:
            found = local[choice.id] if applied == 1 else wrapper(local[choice.id], applied - 1, depth + 1)
        elif isinstance(choice, ast.Name) and choice.id in first and applied == 1:
            found = "identity"
        if found is not None:
            return found
    return None


def with_options(
    recipe: Recipe, call: Optional[ast.Call], module: Module, outer: Optional[FunctionNode] = None
) -> Recipe:
    """A recipe changed by keywords of the decorator's call: init, kw_only, config."""
    for keyword in call.keywords if call is not None else []:
        value = keyword.value
        if keyword.arg in ("init", "kw_only", "auto_attribs") and isinstance(value, ast.Constant):
            changed: Dict[str, Any] = {keyword.arg: bool(value.value)}
            recipe = recipe._replace(**changed)
        elif keyword.arg == "config":
            extra = extra_setting(value, outer, module)
            recipe = recipe._replace(extra=extra or recipe.extra)
    return recipe


def extra_setting(value: Optional[ast.AST], outer: Optional[FunctionNode], module: Module) -> str:
    """The ``extra`` setting of a pydantic config expression: allow, ignore, forbid, or an empty string when not set."""
    if isinstance(value, ast.Name):
        places: List[ast.stmt] = list(walk_shallow(outer.body)) if outer is not None else []
        places += module.body.statements
        for statement in places:
            if isinstance(statement, (ast.Assign, ast.AnnAssign)):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                if any(isinstance(t, ast.Name) and t.id == value.id for t in targets):
                    found = (
                        extra_setting(statement.value, None, module)
                        if not isinstance(statement.value, ast.Name)
                        else ""
                    )
                    if found:
                        return found
        return ""
    if isinstance(value, ast.Call):
        for keyword in value.keywords:
            if keyword.arg == "extra":
                return _extra_word(keyword.value)
            if keyword.arg is None:
                found = extra_setting(keyword.value, outer, module)
                if found:
                    return found
    if isinstance(value, ast.Dict):
        for key, item in zip(value.keys, value.values):
            if isinstance(key, ast.Constant) and key.value == "extra":
                return _extra_word(item)
    if isinstance(value, ast.BinOp):
        return extra_setting(value.right, outer, module) or extra_setting(value.left, outer, module)
    return ""


def _extra_word(value: ast.expr) -> str:
    return str(value.value) if isinstance(value, ast.Constant) else last_name(value)
