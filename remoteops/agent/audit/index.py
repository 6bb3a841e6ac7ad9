"""Modules of several trees, read when first asked for, and the resolution of names through them."""

from __future__ import annotations

import ast
import re
from typing import Dict, Iterable, Iterator, List, Optional, Set, Tuple, Union

from remoteops.agent.audit import lazy
from remoteops.agent.audit.bases import standard_exports
from remoteops.agent.audit.definitions import ClassInfo, FunctionInfo, Symbol, is_overload
from remoteops.agent.audit.modules import BRANCH, HANDLER, TYPING, Binding, Module
from remoteops.agent.audit.packages import Tree
from remoteops.agent.audit.syntax import Source, Unit

MAX_DEPTH = 40
MIRROR = 8  # names that make a table or a block of imports a list of all that is served


class Index:
    """Lazy access to the modules of the given trees."""

    def __init__(self, trees: Iterable[Tree]) -> None:
        self.trees: Dict[str, Tree] = {tree.package: tree for tree in trees}
        self._modules: Dict[str, Optional[Module]] = {}
        self._infos: Dict[Tuple[int, str], Union[ClassInfo, FunctionInfo]] = {}
        self._texts: Dict[str, bytes] = {}
        self._cache: Dict[Tuple[str, str, bool], Optional[Symbol]] = {}

    def knows(self, dotted: str) -> bool:
        return dotted.split(".", 1)[0] in self.trees

    def exists(self, dotted: str) -> bool:
        """Whether there is a module of that name (nothing is read)."""
        tree = self.trees.get(dotted.split(".", 1)[0])
        return tree is not None and tree.find(dotted) is not None

    def module(self, dotted: str) -> Optional[Module]:
        """The module, or None when its tree has none of that name."""
        if dotted not in self._modules:
            self._modules[dotted] = self._load(dotted)
        return self._modules[dotted]

    def loaded(self) -> List[Module]:
        """Every module read so far."""
        return [m for m in self._modules.values() if m is not None]

    def _load(self, dotted: str) -> Optional[Module]:
        tree = self.trees.get(dotted.split(".", 1)[0])
        found = tree.find(dotted) if tree is not None else None
        if tree is None or found is None:
            return None
        kind, path = found
        if kind == "namespace":
            return Module(dotted, tree, path, None, True)
        if kind == "extension":
            return Module(dotted, tree, path, None, False, opaque="%s is compiled" % path.rsplit("/", 1)[-1])
        try:
            data = tree.read(path)
        except OSError as error:
            return Module(dotted, tree, path, None, False, opaque="cannot be read: %s" % error)
        if b"\0" in data:
            return Module(dotted, tree, path, None, False, opaque="contains null bytes, which Python refuses")
        is_package = path.endswith(("__init__.py", "__init__.pyi"))
        module = Module(dotted, tree, path, Source.from_bytes(data, path), is_package)
        stub = path + "i"
        if "attach_stub" in module.source.text and tree.find(dotted):
            try:
                text = tree.read(stub)
            except OSError:
                return module
            extra = Module(dotted, tree, stub, Source.from_bytes(text, stub), is_package)
            for name, bindings in extra.bindings.items():
                module.bindings.setdefault(name, bindings)
        return module

    def infos(self) -> List[Union[ClassInfo, FunctionInfo]]:
        """Every class and function that was looked at so far."""
        return list(self._infos.values())

    # -- definitions -------------------------------------------------------------------------------------------------

    def class_info(
        self, module: Module, unit: Unit, prefix: str = "", scope: Optional[FunctionInfo] = None
    ) -> ClassInfo:
        key = (unit.start, module.name)
        if key not in self._infos:
            self._infos[key] = ClassInfo(module, prefix + unit.name, unit, scope)
        info = self._infos[key]
        return info if isinstance(info, ClassInfo) else ClassInfo(module, prefix + unit.name, unit, scope)

    def function_info(
        self,
        module: Module,
        unit: Unit,
        prefix: str = "",
        owner: Optional[ClassInfo] = None,
        outer: Optional[FunctionInfo] = None,
    ) -> FunctionInfo:
        key = (unit.start, module.name)
        if key not in self._infos:
            self._infos[key] = FunctionInfo(module, prefix + unit.name, unit, owner, outer)
        info = self._infos[key]
        return info if isinstance(info, FunctionInfo) else FunctionInfo(module, prefix + unit.name, unit, owner, outer)

    # -- names -------------------------------------------------------------------------------------------------------

    def lookup(self, module: Module, name: str, *, typing: bool = False) -> Optional[Symbol]:
        """What ``name`` is as an attribute of the module at run time (``typing``: as a type checker sees it).

        None: surely not there. A Symbol of kind ``dynamic`` with a reason: cannot be told.
        """
        key = (module.name, name, typing)
        if key not in self._cache:
            self._cache[key] = self._lookup(module, name, typing, set())
        return self._cache[key]

    def unreadable(self, module: Module) -> str:
        """Why a name that was not found may still be there: an error anywhere in the file. Parses the whole of it."""
        module.parse_all()
        if not module.source.errors:
            return ""
        line, message = module.source.errors[0]
        return "%s:%d: %s" % (module.file, line, message)

    def _lookup(self, module: Module, name: str, typing: bool, seen: Set[Tuple[str, str]]) -> Optional[Symbol]:
        if (module.name, name) in seen or len(seen) > MAX_DEPTH:
            return None
        seen = seen | {(module.name, name)}
        dotted = module.name + "." + name
        if module.opaque:
            return Symbol("dynamic", dotted, module=module, reason=module.opaque)
        bindings = module.bindings.get(name, [])
        found = self._from_bindings(
            module, name, [b for b in bindings if typing or TYPING not in b.guards], typing, seen
        )
        if found is not None:
            return found
        if self.exists(dotted):
            return Symbol("module", dotted, module=self.module(dotted))
        if name in ("__name__", "__file__", "__doc__", "__package__", "__loader__", "__spec__", "__dict__") or (
            name in ("__path__",) and module.is_package
        ):
            return Symbol("dynamic", dotted, module=module)
        found, unsure = self._from_stars(module, name, typing, seen, False)
        if found is not None:
            return found
        found = self._from_getattr(module, name, bindings, seen)
        if found is not None and found.certain:
            return found
        fallback, maybe = self._from_stars(module, name, typing, seen, True)
        if fallback is not None or found is not None:
            return fallback or found
        unsure = unsure or maybe
        if unsure is not None:
            return unsure
        if module.dynamic:
            return Symbol("dynamic", dotted, module=module, reason="%s fills its globals at run time" % module.name)
        if module.source.errors:
            line, message = module.source.errors[0]
            return Symbol("dynamic", dotted, module=module, reason="%s:%d: %s" % (module.file, line, message))
        return None

    def _from_bindings(
        self, module: Module, name: str, bindings: List[Binding], typing: bool, seen: Set[Tuple[str, str]]
    ) -> Optional[Symbol]:
        if bindings and bindings[-1].kind == "del" and not bindings[-1].guards:
            return None
        order = {"class": 0, "def": 0, "from": 1, "import": 1, "assign": 2, "value": 3, "del": 9}
        defined = [b for b in bindings if b.kind in ("class", "def")]
        defined.reverse()
        ranked = sorted(defined, key=lambda b: HANDLER in b.guards)
        ranked += sorted(
            [b for b in bindings if b.kind not in ("class", "def", "del")],
            key=lambda b: (HANDLER in b.guards, order[b.kind]),
        )
        fallback: Optional[Symbol] = None
        for binding in ranked:
            symbol = self._symbol(module, name, binding, typing, seen)
            if symbol is None:
                continue
            if symbol.kind == "variable" and _is_none(binding) and binding is not ranked[-1]:
                fallback = fallback or symbol
                continue
            if symbol.certain:
                others = [b for b in ranked if b is not binding]
                return self._with_alternatives(module, name, symbol, others, typing, seen)
            fallback = fallback or symbol
        return fallback

    def _with_alternatives(
        self, module: Module, name: str, symbol: Symbol, others: List[Binding], typing: bool, seen: Set[Tuple[str, str]]
    ) -> Symbol:
        """Adds the definitions that stand under another condition than the one found."""
        chosen = symbol.binding
        if chosen is None or not chosen.guards or symbol.kind not in ("function", "class"):
            return symbol
        for binding in others:
            if binding.kind in ("def", "class") or (binding.kind == "from" and BRANCH in binding.guards):
                other = self._symbol(module, name, binding, typing, seen)
                if other is not None and other.kind in ("function", "class"):
                    symbol.alternatives.append(other)
        return symbol

    def _symbol(
        self, module: Module, name: str, binding: Binding, typing: bool, seen: Set[Tuple[str, str]]
    ) -> Optional[Symbol]:
        dotted = module.name + "." + name
        if binding.kind == "class":
            assert binding.unit is not None
            return Symbol("class", dotted, module=module, klass=self.class_info(module, binding.unit), binding=binding)
        if binding.kind == "def":
            assert binding.unit is not None
            return Symbol(
                "function",
                dotted,
                module=module,
                function=self.function_info(module, self._implementation(module, binding)),
                binding=binding,
            )
        if binding.kind == "import":
            if not self.knows(binding.module):
                return Symbol("external", binding.module, binding=binding)
            target = self.module(binding.module)
            return Symbol("module", binding.module, module=target, binding=binding) if target is not None else None
        if binding.kind == "from":
            if not self.knows(binding.module):
                return Symbol("external", binding.module + "." + binding.attr, binding=binding)
            target = self.module(binding.module)
            if target is None:
                return None
            if target.name == module.name and binding.attr == name:
                inner = target.name + "." + name
                return Symbol("module", inner, module=self.module(inner)) if self.exists(inner) else None
            return self._lookup(target, binding.attr, typing, seen)
        return Symbol("variable", dotted, module=module, binding=binding)

    def _implementation(self, module: Module, binding: Binding) -> Unit:
        """The definition that counts: the last one that is no ``@overload`` (of several at the top level)."""
        assert binding.unit is not None
        same = module.body.by_name.get(binding.unit.name, [])
        if binding.unit not in same:
            return binding.unit
        for unit in reversed(same):
            if unit.kind == "def" and not is_overload(unit):
                return unit
        return binding.unit

    def _from_star(self, star: str, name: str, typing: bool, seen: Set[Tuple[str, str]]) -> Optional[Symbol]:
        if not self.knows(star):
            exported = standard_exports(star)
            if exported is not None:
                return Symbol("external", star + "." + name) if name in exported else None
            return Symbol(
                "dynamic",
                star + "." + name,
                reason="may come from `from %s import *`, whose source is not at hand" % star,
            )
        target = self.module(star)
        if target is None:
            return None
        target.bindings  # noqa: B018 - fills exports
        if target.exports is not None and target.exports_known and name not in target.exports:
            return None
        if target.exports is None and name.startswith("_"):
            return None
        return self._lookup(target, name, typing, seen)

    def _from_stars(
        self, module: Module, name: str, typing: bool, seen: Set[Tuple[str, str]], fallback: bool
    ) -> Tuple[Optional[Symbol], Optional[Symbol]]:
        """(found, perhaps found) through ``from x import *``; ``fallback``: those in except clauses, which come
        last.
        """
        unsure: Optional[Symbol] = None
        for star, guards in module.stars:
            if (HANDLER in guards) is not fallback or (TYPING in guards and not typing and not self._lazy(module)):
                continue
            found = self._from_star(star, name, typing, seen)
            if found is not None and found.certain:
                return found, None
            unsure = unsure or found
        return None, unsure

    def _lazy(self, module: Module) -> bool:
        return "__getattr__" in module.bindings or module.replaced

    def _from_getattr(
        self, module: Module, name: str, bindings: List[Binding], seen: Set[Tuple[str, str]]
    ) -> Optional[Symbol]:
        """Names served by a module-level ``__getattr__`` or by an object put in the module's place."""
        if not self._lazy(module):
            return None
        dotted = module.name + "." + name
        for key, value in lazy.tables(module):
            if key == name:
                target = lazy.table_target(module, name, value)
                symbol = self._dotted(target[0], target[1], seen) if target else None
                return symbol or Symbol("dynamic", dotted, module=module)
            if name in lazy.strings(value) and isinstance(key, str):
                inner = module.absolute(key.lstrip("."), 1) if not self.exists(key) else key
                symbol = self._dotted(inner, name, seen) if self.exists(inner) else None
                return symbol or Symbol("dynamic", dotted, module=module)
        typed = [b for b in bindings if TYPING in b.guards]
        if typed and not module.replaced and name not in module.strings() and self._getattr_refuses(module):
            return None
        if typed:
            return self._from_bindings(module, name, typed, True, seen) or Symbol("dynamic", dotted, module=module)
        imported = self._returned_by_getattr(module, name, seen)
        if imported is not None:
            return imported
        if name in module.strings():
            return Symbol("dynamic", dotted, module=module)
        if not module.replaced and self._getattr_refuses(module):
            return None
        if self._spelled_out(module) and not re.search(r"\b%s\b" % re.escape(name), module.source.text):
            return None
        return Symbol("dynamic", dotted, module=module, reason="%s makes attributes at run time" % module.name)

    def _spelled_out(self, module: Module) -> bool:
        """Whether a lazy module names what it serves: in a table, or in imports for the type checker that mirror it."""
        mirrored = sum(any(TYPING in b.guards for b in bindings) for bindings in module.bindings.values())
        return not module.dynamic and (mirrored >= MIRROR or len(lazy.tables(module)) >= MIRROR)

    def _dotted(self, module: str, name: str, seen: Set[Tuple[str, str]]) -> Optional[Symbol]:
        target = self.module(module)
        if target is None:
            return None
        return self._lookup(target, name, False, seen) if name else Symbol("module", module, module=target)

    def _returned_by_getattr(self, module: Module, name: str, seen: Set[Tuple[str, str]]) -> Optional[Symbol]:
        """``if name == "X": from .y import X`` (or ``from .y import Z; return Z``) in the body of ``__getattr__``."""
        for unit in module.body.by_name.get("__getattr__", []):
            node = unit.node()
            for inner in ast.walk(node) if node is not None else []:
                if not isinstance(inner, ast.If) or name not in lazy.strings(inner.test):
                    continue
                for statement in inner.body:
                    if isinstance(statement, ast.ImportFrom) and len(statement.names) == 1:
                        source = module.absolute(statement.module, statement.level)
                        symbol = self._dotted(source, statement.names[0].name, seen)
                        if symbol is not None:
                            return symbol
        return None

    def _getattr_refuses(self, module: Module) -> bool:
        """Whether ``__getattr__`` looks only into tables we can see and raises AttributeError for the rest."""
        units = module.body.by_name.get("__getattr__", [])
        node = units[-1].node() if units else None
        if node is None:
            return False
        raises = any(isinstance(n, ast.Raise) for n in ast.walk(node))
        loads = any(isinstance(n, ast.JoinedStr) and not lazy.inside_raise(node, n) for n in ast.walk(node))
        delegates = any(
            isinstance(n, ast.Call)
            and lazy.called(n) in ("getattr", "import_module", "__import__", "hasattr", "find_spec")
            and not lazy.guarded_by_table(node, n)
            for n in ast.walk(node)
        )
        return raises and not loads and not delegates and not lazy.computes(node)

    # -- dotted paths ------------------------------------------------------------------------------------------------

    def split(self, dotted: str) -> Tuple[Optional[Module], List[str]]:
        """The longest prefix that is a module, and what is left."""
        parts = dotted.split(".")
        if parts[0] not in self.trees or not self.exists(parts[0]):
            return None, parts
        depth = 1
        while depth < len(parts) and self.exists(".".join(parts[: depth + 1])):
            depth += 1
        return self.module(".".join(parts[:depth])), parts[depth:]

    # -- text search -------------------------------------------------------------------------------------------------

    def grep(self, package: str, needle: bytes, *, near: str = "") -> Iterator[Tuple[str, str]]:
        """(module, path) of every file of a tree that has the bytes; ``near``: modules below that name only."""
        tree = self.trees[package]
        for name, path in tree.files():
            if near and not (name == near or name.startswith(near + ".")):
                continue
            if needle in self.data(tree, path):
                yield name, path

    def data(self, tree: Tree, path: str) -> bytes:
        """Bytes of a file; kept, because several searches may run over the same tree."""
        if path not in self._texts:
            try:
                self._texts[path] = tree.read(path)
            except OSError:
                self._texts[path] = b""
        return self._texts[path]


def _is_none(binding: Binding) -> bool:
    value = getattr(binding.node, "value", None)
    return isinstance(value, ast.Constant) and value.value is None


__all__ = ["ClassInfo", "FunctionInfo", "Index", "Symbol", "is_overload"]
