"""Classes made by a call: ``namedtuple(…)``, ``NamedTuple(…)``, ``Enum("F", "P Q")``, ``make_dataclass(…)``,
``TypedDict(…)``.

Each is written out as the class statement that means the same, and is a class like any other from then on.
"""

from __future__ import annotations

import ast
import keyword
from typing import Dict, List, Optional, Tuple

from remoteops.agent.audit.definitions import ClassInfo
from remoteops.agent.audit.modules import Module
from remoteops.agent.audit.syntax import Source, Unit
from remoteops.agent.audit.wrappers import Recipe

ENUMS = ("enum.Enum", "enum.IntEnum", "enum.StrEnum", "enum.Flag", "enum.IntFlag")
MAKERS = {
    "collections.namedtuple": "typing.NamedTuple",
    "typing.NamedTuple": "typing.NamedTuple",
    "typing_extensions.NamedTuple": "typing.NamedTuple",
    "dataclasses.make_dataclass": "",
    "typing.TypedDict": "typing.TypedDict",
    "typing_extensions.TypedDict": "typing.TypedDict",
    **{name: name for name in ENUMS},
}
Fields = List[Tuple[str, str]]  # name, and the source of a default (empty: none)


def makes_class(maker: str, call: ast.Call) -> bool:
    """Whether a call of that external name makes a class (``Enum("F")`` of one argument looks a member up)."""
    named = any(k.arg == "names" for k in call.keywords)
    return maker in MAKERS and (maker not in ENUMS or len(call.args) > 1 or named)


def made_class(maker: str, call: ast.Call, module: Module) -> Optional[ClassInfo]:
    """The class that a call of one of MAKERS returns; None where its fields are not spelled out."""
    place = (call.lineno, call.col_offset)
    if place not in module.made:
        module.made[place] = _made_class(maker, call, module)
    return module.made[place]  # type: ignore[return-value]


def _made_class(maker: str, call: ast.Call, module: Module) -> Optional[ClassInfo]:
    name = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
    if not isinstance(name, str) or not name.isidentifier() or any(k.arg is None for k in call.keywords):
        return None
    fields = _fields(maker, call)
    if fields is None or not all(n.isidentifier() and not keyword.iskeyword(n) for n, _default in fields):
        return None
    if maker in ENUMS:
        lines = [" %s = %s" % (n, default or number) for number, (n, default) in enumerate(fields, 1)]
    else:
        lines = [" %s: object%s" % (n, " = " + default if default else "") for n, default in fields]
    head = "\n" * (call.lineno - 1) + "class %s:\n" % name
    text = head + "\n".join(lines or [" pass"]) + "\n"
    unit = Unit(Source(text, module.path), call.lineno - 1, len(text), "class", name)
    info = ClassInfo(module, name, unit)
    info.facts["bases"] = [(MAKERS[maker], None)] if MAKERS[maker] else []
    if maker == "dataclasses.make_dataclass":
        keywords = {k.arg: getattr(k.value, "value", None) for k in call.keywords}
        doubt = "make_dataclass with bases or members" if {"bases", "namespace"} & set(keywords) else ""
        info.facts["recipe"] = Recipe(
            "dataclass",
            init=keywords.get("init") is not False,
            kw_only=keywords.get("kw_only") is True,
            doubt=doubt,
            open=doubt,
        )
    return info


def _fields(maker: str, call: ast.Call) -> Optional[Fields]:
    given = {k.arg: k.value for k in call.keywords}
    listed = call.args[1] if len(call.args) > 1 else given.get(_second(maker))
    if listed is None and maker == "typing.NamedTuple":
        return [(str(n), "") for n in given]
    if maker == "collections.namedtuple":
        return _tuple_fields(listed, given)
    if maker.endswith("TypedDict"):
        return _names(list(listed.keys)) if isinstance(listed, ast.Dict) else None
    if maker in ENUMS and isinstance(listed, ast.Dict):
        return _names(list(listed.keys))
    if isinstance(listed, ast.Constant) and isinstance(listed.value, str) and maker in ENUMS:
        return [(n, "") for n in listed.value.replace(",", " ").split()]
    found: Fields = []
    for element in listed.elts if isinstance(listed, (ast.List, ast.Tuple)) else [None]:
        parts = list(element.elts) if isinstance(element, (ast.Tuple, ast.List)) else [element]
        first = parts[0] if parts else None
        if not isinstance(first, ast.Constant) or not isinstance(first.value, str):
            return None
        default = parts[2] if len(parts) > 2 else None
        found.append((first.value, ast.unparse(default) if default is not None else ""))
    return found


def _second(maker: str) -> str:
    return {"collections.namedtuple": "field_names", "dataclasses.make_dataclass": "fields"}.get(
        maker, "names" if maker in ENUMS else "fields"
    )


def _tuple_fields(listed: Optional[ast.expr], given: Dict[Optional[str], ast.expr]) -> Optional[Fields]:
    if isinstance(listed, ast.Constant) and isinstance(listed.value, str):
        found: Optional[Fields] = [(n, "") for n in listed.value.replace(",", " ").split()]
    else:
        found = _names(list(listed.elts)) if isinstance(listed, (ast.List, ast.Tuple)) else None
    rename, defaults = given.get("rename"), given.get("defaults")
    if found is None or (rename is not None and getattr(rename, "value", None) is not False):
        return None
    if defaults is None:
        return found
    if not isinstance(defaults, (ast.List, ast.Tuple)) or len(defaults.elts) > len(found):
        return None
    first = len(found) - len(defaults.elts)
    return [(n, ast.unparse(defaults.elts[i - first]) if i >= first else "") for i, (n, _d) in enumerate(found)]


def _names(nodes: List[Optional[ast.expr]]) -> Optional[Fields]:
    names = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return [(n, "") for n in names] if len(names) == len(nodes) else None
