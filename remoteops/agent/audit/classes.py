"""Classes: method resolution order across modules, members, attributes set in methods."""

from __future__ import annotations

import ast
import builtins
import re
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

from remoteops.agent.audit import stores
from remoteops.agent.audit.bases import base_names, known_base
from remoteops.agent.audit.functional import made_class, makes_class
from remoteops.agent.audit.index import ClassInfo, FunctionInfo, Index, Symbol, is_overload
from remoteops.agent.audit.modules import is_type_checking, last_name
from remoteops.agent.audit.syntax import Unit, unit_of, walk_shallow

_OBJECT = set(dir(object)) | {
    "__dict__",
    "__module__",
    "__annotations__",
    "__weakref__",
    "__slots__",
    "__name__",
    "__qualname__",
    "__mro__",
    "__bases__",
    "__subclasses__",
    "__wrapped__",
    "__orig_bases__",
    "__dataclass_fields__",
}


class Member(NamedTuple):
    """``kind``: method, class, field (class-level annotation without value), value (class-level assignment),
    attribute (set in a method).
    """

    kind: str
    name: str
    owner: ClassInfo
    unit: Optional[Unit] = None
    node: Optional[ast.AST] = None
    method: Optional[Unit] = None


class Lineage(NamedTuple):
    """``classes``: the order in which attributes are looked up; ``external``: dotted names of bases without source;
    ``open``: why there may be attributes that the sources do not show, if so."""

    classes: Tuple[ClassInfo, ...]
    external: Tuple[str, ...]
    open: str


class Classes:
    """Facts about classes of an index; kept on the ClassInfo objects."""

    def __init__(self, index: Index) -> None:
        self.index = index
        # Why a class's decorators may give it more attributes: set by the evaluator, which knows decorators.
        self.decorated: Callable[[ClassInfo], str] = lambda info: ""
        self._stored: Dict[Unit, Dict[str, List[ast.AST]]] = {}

    # -- bases -------------------------------------------------------------------------------------------------------

    def header(self, info: ClassInfo) -> Optional[ast.ClassDef]:
        return info.unit.body().header

    def resolve(self, info: ClassInfo, node: ast.expr) -> Optional[Symbol]:
        """The symbol of a dotted expression at the place where the class is defined."""
        if isinstance(node, ast.Subscript):
            node = node.value
        if (
            isinstance(node, ast.Call)
            and last_name(node.func) in ("with_metaclass", "add_metaclass")
            and len(node.args) > 1
        ):
            node = node.args[1]
        return self.symbol_in(info.module, node, info)

    def symbol_in(self, module: Any, node: ast.expr, info: Optional[ClassInfo] = None) -> Optional[Symbol]:
        if isinstance(node, ast.Attribute):
            owner = self.symbol_in(module, node.value, info)
            if owner is None:
                return None
            if owner.kind == "module" and owner.module is not None:
                return self.index.lookup(owner.module, node.attr, typing=True)
            if owner.kind == "external":
                return Symbol("external", owner.name + "." + node.attr)
            if owner.kind == "class" and owner.klass is not None:
                for member in self.own(owner.klass, node.attr):
                    if member.kind == "class" and member.unit is not None:
                        nested = self.index.class_info(owner.klass.module, member.unit, owner.klass.qualname + ".")
                        return Symbol("class", nested.dotted, module=nested.module, klass=nested)
            return None
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                return self.symbol_in(module, ast.parse(node.value, mode="eval").body, info)
            except (SyntaxError, ValueError, RecursionError):
                return None
        if not isinstance(node, ast.Name):
            return None
        if info is not None and info.scope is not None:
            local = _local_definition(info.scope, node.id)
            if local is not None:
                unit = unit_of(info.module.source, local)
                if unit is not None and unit.kind == "class":
                    nested = self.index.class_info(info.module, unit, info.scope.qualname + ".<locals>.", info.scope)
                    return Symbol("class", nested.dotted, module=info.module, klass=nested)
        found = self.index.lookup(module, node.id, typing=True)
        if found is None and hasattr(builtins, node.id):
            return Symbol("external", node.id)
        if found is not None and found.kind == "variable" and found.binding is not None and found.module is not None:
            value = getattr(found.binding.node, "value", None)
            if isinstance(value, (ast.Name, ast.Attribute)) and not (
                isinstance(value, ast.Name) and value.id == node.id
            ):
                return self.symbol_in(found.module, value) or found
            if isinstance(value, ast.Subscript) and isinstance(value.value, (ast.Name, ast.Attribute)):
                target = self.symbol_in(found.module, value.value)
                if target is not None and target.kind == "class":
                    return target
        return found

    def bases(self, info: ClassInfo) -> List[Tuple[str, Optional[ClassInfo]]]:
        """Each base: its dotted name and its class, where the source is at hand."""
        if "bases" not in info.facts:
            info.facts["bases"] = []
            header = self.header(info)
            found: List[Tuple[str, Optional[ClassInfo]]] = []
            for base in header.bases if header is not None else []:
                symbol = self.resolve(info, base)
                if symbol is not None and symbol.kind == "class":
                    found.append((symbol.name, symbol.klass))
                elif symbol is not None and symbol.kind == "external":
                    found.append((symbol.name, None))
                else:
                    made = self._made_base(info, base, symbol)
                    found.append(made or ("?" + last_name(base) if last_name(base) else "?", None))
            info.facts["bases"] = found
        return info.facts["bases"]  # type: ignore[return-value]

    def _made_base(
        self, info: ClassInfo, base: ast.expr, symbol: Optional[Symbol]
    ) -> Optional[Tuple[str, Optional[ClassInfo]]]:
        """``class X(NamedTuple("X", …))`` and ``Base = object if … else …``: what can be said of it."""
        value: Optional[ast.AST] = base
        if symbol is not None and symbol.kind == "variable" and symbol.binding is not None:
            value = getattr(symbol.binding.node, "value", None)
        if isinstance(value, ast.Call) and last_name(value.func) in ("namedtuple", "NamedTuple"):
            module = symbol.module if symbol is not None and symbol.module is not None else info.module
            maker = self.symbol_in(module, value.func)
            if maker is not None and makes_class(maker.name, value):
                made = made_class(maker.name, value, module)
                return (made.dotted, made) if made is not None else None
        return None

    def lineage(self, info: ClassInfo) -> Lineage:
        """The method resolution order (C3; a plain depth-first order where the bases do not linearise)."""
        if "lineage" not in info.facts:
            info.facts["lineage"] = Lineage((info,), (), "a class that derives from itself")
            info.facts["lineage"] = self._lineage(info)
        return info.facts["lineage"]  # type: ignore[return-value]

    def _lineage(self, info: ClassInfo) -> Lineage:
        external: Dict[str, None] = {}
        reason = ""
        parents: List[Lineage] = []
        direct: List[ClassInfo] = []
        header = self.header(info)
        if header is None:
            return Lineage((info,), (), "%s:%d cannot be parsed" % (info.module.file, info.unit.line))
        for name, klass in self.bases(info):
            if klass is None or klass is info:
                external[name] = None
                if not known_base(name):
                    reason = reason or (
                        "base %s is worked out at run time" % name[1:]
                        if name.startswith("?")
                        else "base %s is not at hand" % name
                    )
            else:
                line = self.lineage(klass)
                parents.append(line)
                direct.append(klass)
                external.update(dict.fromkeys(line.external))
                reason = reason or line.open
        for keyword in header.keywords:
            if keyword.arg == "metaclass":
                symbol = self.resolve(info, keyword.value)
                name = symbol.name if symbol is not None else last_name(keyword.value)
                if name not in ("abc.ABCMeta", "enum.EnumMeta", "enum.EnumType", "type") and (
                    symbol is None or symbol.kind != "class"
                ):
                    reason = reason or "metaclass %s is not at hand" % name
        merged = _merge([list(p.classes) for p in parents] + [direct])
        return Lineage((info, *merged), tuple(external), reason)

    def derives(self, info: ClassInfo, name: str) -> bool:
        """Whether a class has a base of that dotted name (in a tree or external)."""
        line = self.lineage(info)
        return name in line.external or any(c.dotted == name for c in line.classes)

    def is_enum(self, info: ClassInfo) -> bool:
        return any(name.startswith("enum.") for name in self.lineage(info).external)

    def is_abstract(self, info: ClassInfo) -> bool:
        return any(
            name in ("abc.ABC", "typing.Protocol", "typing_extensions.Protocol") for name, _ in self.bases(info)
        ) or any(
            k.arg == "metaclass" and last_name(k.value) == "ABCMeta" for k in getattr(self.header(info), "keywords", [])
        )

    # -- members -----------------------------------------------------------------------------------------------------

    def own(self, info: ClassInfo, name: str) -> List[Member]:
        """What the class body itself defines under a name (not what its methods set)."""
        table: Dict[str, List[Member]] = info.facts.setdefault("own", {})  # type: ignore[assignment]
        if "own done" not in info.facts:
            info.facts["own done"] = True
            body = info.unit.body()
            for unit in body.units:
                table.setdefault(unit.name, []).append(
                    Member("class" if unit.kind == "class" else "method", unit.name, info, unit=unit)
                )
            for statement in walk_shallow(body.statements):
                if isinstance(statement, ast.If) and is_type_checking(statement.test) is True:
                    continue
                nested = unit_of(info.module.source, statement)
                if nested is not None:
                    table.setdefault(nested.name, []).append(
                        Member("class" if nested.kind == "class" else "method", nested.name, info, unit=nested)
                    )
                elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    kind = "field" if statement.value is None else "value"
                    table.setdefault(statement.target.id, []).append(
                        Member(kind, statement.target.id, info, node=statement)
                    )
                elif isinstance(statement, (ast.Assign, ast.For, ast.With, ast.Import, ast.ImportFrom)):
                    for target in stores.targets(statement):
                        table.setdefault(target, []).append(Member("value", target, info, node=statement))
            for slot in stores.slots(body.statements):
                table.setdefault(slot, []).append(Member("field", slot, info))
        return table.get(name, [])

    def own_names(self, info: ClassInfo) -> List[str]:
        self.own(info, "")
        table: Dict[str, List[Member]] = info.facts["own"]  # type: ignore[assignment]
        return list(table)

    def effective(self, members: List[Member]) -> Optional[Member]:
        """The member that counts at run time: the last one that is no ``@overload`` (the getter of a property, not
        its setter).
        """
        methods = [m for m in members if m.kind == "method" and m.unit is not None and not is_overload(m.unit)]
        if methods:
            getters = [m for m in methods if m.unit is not None and not _is_setter(m.unit)]
            return (getters or methods)[-1]
        return members[-1] if members else None

    def member(self, info: ClassInfo, name: str) -> Optional[Member]:
        """The first definition in the class body of the class or its bases."""
        for klass in self.lineage(info).classes:
            found = self.effective(self.own(klass, name))
            if found is not None:
                return found
        return None

    def assigned(self, info: ClassInfo, name: str) -> List[Member]:
        """Places in methods of the class or its bases that set ``self.name``; of the nearest class that has any."""
        for klass in self.lineage(info).classes:
            found = self.own_assigned(klass, name)
            if found:
                return found
        return []

    def own_assigned(self, klass: ClassInfo, name: str) -> List[Member]:
        facts: Dict[str, List[Member]] = klass.facts.setdefault("assigned", {})  # type: ignore[assignment]
        if name not in facts:
            facts[name] = list(self._assignments(klass, name))
        return facts[name]

    def _assignments(self, klass: ClassInfo, name: str) -> Iterator[Member]:
        if not klass.unit.mentions(name):
            return
        masked = klass.unit.source.masked
        for unit in klass.unit.body().units:
            if unit.kind != "def" or not unit.mentions(name):
                continue
            quoted = stores.NAMED.search(masked, unit.start, unit.end) and (
                unit.mentions('"%s"' % name) or unit.mentions("'%s'" % name)
            )
            if not quoted and not stores.may_set(masked, unit.start, unit.end, name):
                continue
            for node in self._stores(unit).get(name, []):
                yield Member("attribute", name, klass, node=node, method=unit)

    def _stores(self, unit: Unit) -> Dict[str, List[ast.AST]]:
        """Attribute -> statements of a method that set it on the receiver."""
        if unit not in self._stored:
            function = unit.function()
            first = (function.args.posonlyargs + function.args.args)[:1] if function is not None else []
            self._stored[unit] = stores.stores_in(function, first[0].arg) if function is not None and first else {}
        return self._stored[unit]

    def sets(self, klass: ClassInfo, name: str) -> bool:
        """Whether a class's own methods set an attribute; told from the text where that is plain."""
        if "assigned" in klass.facts and name in klass.facts["assigned"]:  # type: ignore[operator]
            return bool(klass.facts["assigned"][name])  # type: ignore[index]
        if not klass.unit.mentions(name):
            return False
        plain = re.compile(r"\bself\.%s[ \t]*(?::[^=\n]+)?=(?!=)" % re.escape(name))
        if plain.search(klass.unit.source.masked, klass.unit.start, klass.unit.end):
            return True
        return bool(self.own_assigned(klass, name))

    def fallback(self, info: ClassInfo) -> str:
        """Why any attribute may exist on instances (``__getattr__``, setattr with computed names …), or an empty
        string.
        """
        if "fallback" not in info.facts:
            info.facts["fallback"] = self._fallback(info)
        return str(info.facts["fallback"])

    def _fallback(self, info: ClassInfo) -> str:
        line = self.lineage(info)
        for klass in line.classes:
            if self.decorated(klass):
                return self.decorated(klass)
            for name in ("__getattr__", "__getattribute__"):
                if self.own(klass, name):
                    return "%s defines %s" % (klass.dotted, name)
            if stores.computed(klass.unit):
                return "%s sets attributes under computed names" % klass.dotted
        return line.open

    def has(self, info: ClassInfo, name: str, *, instance: bool = True) -> Tuple[Optional[bool], str]:
        """Whether an object of exactly this class has an attribute. (None, why) when the sources cannot tell."""
        memo: Dict[Tuple[str, bool], Tuple[Optional[bool], str]] = info.facts.setdefault("has", {})  # type: ignore[assignment]
        if (name, instance) not in memo:
            memo[name, instance] = self._has(info, name, instance)
        return memo[name, instance]

    def _has(self, info: ClassInfo, name: str, instance: bool) -> Tuple[Optional[bool], str]:
        if name in _OBJECT or self.member(info, name) is not None:
            return True, ""
        if instance and any(self.sets(klass, name) for klass in self.lineage(info).classes):
            return True, ""
        for base in self.lineage(info).external:
            if name in base_names(base):
                return True, ""
        reason = self.fallback(info)
        return (None, reason) if reason else (False, "")

    def function(self, member: Member) -> Optional[FunctionInfo]:
        if member.kind != "method" or member.unit is None:
            return None
        return self.index.function_info(
            member.owner.module, member.unit, member.owner.qualname + ".", member.owner, member.owner.scope
        )


def _merge(lists: List[List[ClassInfo]]) -> List[ClassInfo]:
    pending = [list(line) for line in lists if line]
    order: List[ClassInfo] = []
    while pending:
        for line in pending:
            head = line[0]
            if not any(head in other[1:] for other in pending):
                break
        else:
            head = pending[0][0]
        order.append(head)
        pending = [[c for c in line if c is not head] for line in pending]
        pending = [line for line in pending if line]
    return order


def _is_setter(unit: Unit) -> bool:
    masked = unit.source.masked
    decorators = masked[unit.start : max(masked.find("def ", unit.start, unit.end), unit.start)]
    return re.search(r"@\w+\.(?:setter|deleter)\b", decorators) is not None


def _local_definition(function: FunctionInfo, name: str) -> Optional[ast.stmt]:
    node = function.node
    if node is None or name not in function.unit.text:
        return None
    for statement in walk_shallow(node.body):
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and statement.name == name:
            return statement
    return _local_definition(function.outer, name) if function.outer is not None else None
