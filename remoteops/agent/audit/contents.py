"""Dicts and lists whose content is known: what statements add to them, and whether anything unseen may change them."""

from __future__ import annotations

import ast
import re
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

from remoteops.agent.audit.modules import Module, last_name
from remoteops.agent.audit.values import Const, Sequence, Value, join

_READS = {"get", "items", "keys", "values", "copy", "index", "count"}
_CHANGES = {"pop", "update", "setdefault", "append", "extend"}
_LOOKS = {"len", "print", "dict", "repr", "str", "bool", "sorted", "list", "set", "tuple", "debug", "info", "warning"}
_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def loose_names(place: ast.AST) -> Set[str]:
    """Names in a function (or module) whose content may be changed out of sight or out of order: they are handed to
    others, get a second name, or are changed in a loop or an inner function.
    """
    loose: Set[str] = set()
    for node, parents in _walk(place):
        if not isinstance(node, ast.Name):
            continue
        change = _use(node, parents)
        if change is None or (change and any(isinstance(p, (*_LOOPS, *_COMPREHENSIONS)) for p in parents[1:])):
            loose.add(node.id)
    return loose


def _walk(place: ast.AST) -> Iterator[Tuple[ast.AST, List[ast.AST]]]:
    pending: List[Tuple[ast.AST, List[ast.AST]]] = [(place, [])]
    while pending:
        node, parents = pending.pop()
        yield node, parents
        pending.extend((child, [*parents, node]) for child in ast.iter_child_nodes(node))


def _use(node: ast.Name, parents: List[ast.AST]) -> Optional[bool]:
    """True: the statement changes it in a way that ``after`` understands; False: it only looks; None: anything."""
    above = parents[-1] if parents else node
    if isinstance(node.ctx, ast.Store):
        spelled = isinstance(above, (ast.Assign, ast.AnnAssign)) and _spelled_out(above.value)
        return False if spelled else True if isinstance(above, ast.AugAssign) else None
    if isinstance(above, ast.Subscript) and above.value is node:
        return not isinstance(above.ctx, ast.Load)
    if isinstance(above, ast.Attribute) and len(parents) > 1 and isinstance(parents[-2], ast.Call):
        called = parents[-2].func is above
        return above.attr in _CHANGES if called and above.attr in _READS | _CHANGES else None
    if isinstance(above, ast.keyword):
        return False if above.arg is None else None
    if isinstance(above, ast.Call):
        return False if last_name(above.func) in _LOOKS else None
    looks = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.If, ast.IfExp, ast.FormattedValue, ast.Return, ast.Starred)
    unpacked = isinstance(above, ast.Dict) and any(k is None and v is node for k, v in zip(above.keys, above.values))
    return False if isinstance(above, looks) or unpacked else None


def _spelled_out(value: Optional[ast.expr]) -> bool:
    """A display, or ``dict(a=1)``: anything else may be shared with others, or made by steps that are not followed."""
    made = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "dict"
    return made or isinstance(value, (ast.Dict, ast.List, ast.Tuple, ast.Constant))


def fixed_in_module(module: Module, name: str) -> bool:
    """Whether a module-level name is bound once and only unpacked and looked at in its module."""
    text = module.source.masked
    uses = len(re.findall(r"\b%s\b" % re.escape(name), text))
    bound = r"^{0}[ \t]*(?::[^=\n]+)?=[ \t]*(?:\{{|\(|dict\()"
    looks = r"\*\*?[ \t]*{0}\b(?![ \t]*[.\[(])|\bin {0}\b|\b{0}\.(?:get|items|keys|values)\("
    found = re.findall((bound + "|" + looks).format(re.escape(name)), text, re.M)
    return uses == len(found) and "global" not in text


def after(value: Value, node: ast.AST, evaluated: Dict[str, Value]) -> Value:
    """A dict or list of known content after a statement that changes it. ``evaluated``: values of the arguments."""
    if not isinstance(value, Sequence):
        return value
    unknown = Sequence(value.kind, None, join([*(value.parts or ()), *([value.each] if value.each else [])]))
    if value.kind == "list":
        given = evaluated.get("0")
        appends = isinstance(node, ast.Call) and last_name(node.func) == "append"
        if appends and value.parts is not None and given is not None:
            return value._replace(parts=(*value.parts, given))
        return unknown
    if value.kind != "dict" or value.keys is None or value.parts is None:
        return value if value.kind == "dict" and value.keys is None else unknown
    table: Dict[Any, Value] = dict(zip(value.keys, value.parts))
    if isinstance(node, ast.Subscript):
        if not isinstance(node.slice, ast.Constant):
            return unknown
        if isinstance(node.ctx, ast.Del):
            table.pop(node.slice.value, None)
        else:
            table[node.slice.value] = evaluated.get("value", Const(None))
    elif isinstance(node, ast.Call):
        changed = _called(node, table, evaluated)
        if changed is None:
            return unknown
        table = changed
    else:
        return unknown
    return Sequence("dict", tuple(table.values()), None, tuple(table))


def _called(node: ast.Call, table: Dict[Any, Value], evaluated: Dict[str, Value]) -> Optional[Dict[Any, Value]]:
    name = last_name(node.func)
    first = evaluated.get("0")
    if name in ("pop", "setdefault"):
        if not isinstance(first, Const):
            return None
        if name == "pop":
            return {k: v for k, v in table.items() if k != first.value}
        return {first.value: evaluated.get("1", Const(None)), **table}
    if name == "update":
        more: Dict[Any, Value] = {}
        if node.args:
            if not isinstance(first, Sequence) or first.keys is None or first.parts is None:
                return None
            more.update(zip(first.keys, first.parts))
        for keyword in node.keywords:
            if keyword.arg is None:
                return None
            more[keyword.arg] = evaluated[keyword.arg]
        return {**table, **more}
    return table if name in _READS else None
