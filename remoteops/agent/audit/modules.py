"""What a module binds at its top level: imports, definitions, assignments, with the guards they stand under."""

from __future__ import annotations

import ast
import re
from typing import Dict, Iterator, List, Optional, Set, Tuple

from remoteops.agent.audit.packages import Tree
from remoteops.agent.audit.syntax import Body, Source, Unit, module_body, unit_of

TYPING = "typing"  # under `if TYPE_CHECKING`: not there at run time
TRY = "try"  # in the body of a try that catches ImportError
HANDLER = "handler"
BRANCH = "branch"

IMPORT_ERRORS = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException", "AttributeError"}


class Binding:
    """One way a name gets its value. ``kind``: import, from, def, class, assign, value (a loop or with target), del."""

    __slots__ = ("attr", "guards", "kind", "line", "module", "node", "unit")

    def __init__(
        self,
        kind: str,
        line: int,
        guards: Tuple[str, ...],
        *,
        module: str = "",
        attr: str = "",
        node: Optional[ast.AST] = None,
        unit: Optional[Unit] = None,
    ) -> None:
        self.kind = kind
        self.line = line
        self.guards = guards
        self.module = module
        self.attr = attr
        self.node = node
        self.unit = unit


class Module:
    """A module of the consumer or the provider. ``opaque`` says why its names cannot be known (a compiled file),
    if so.
    """

    def __init__(
        self, name: str, tree: Tree, path: str, source: Optional[Source], is_package: bool, opaque: Optional[str] = None
    ) -> None:
        self.name = name
        self.tree = tree
        self.path = path
        self.is_package = is_package
        self.opaque = opaque
        self.source = source if source is not None else Source("", path)
        self.body: Body = module_body(self.source) if source is not None else Body([], [])
        self._bindings: Optional[Dict[str, List[Binding]]] = None
        self.stars: List[Tuple[str, Tuple[str, ...]]] = []
        self.imported: List[Tuple[str, Tuple[str, ...]]] = []
        self.exports: Optional[List[str]] = None
        self.exports_known = True
        self.replaced = False
        self.dynamic = False
        self.tables: Optional[List[Tuple[str, ast.expr]]] = None
        self._strings: Optional[Set[str]] = None
        # Classes made by a call (namedtuple and its like), by the place of the call: see ``functional``.
        # Values of module-level names: see ``modulevalues``.
        self.values: Dict[Tuple[str, int], object] = {}
        self.made: Dict[Tuple[int, int], object] = {}

    @property
    def file(self) -> str:
        """Path relative to the folder that holds the package."""
        return self.tree.relative(self.path)

    @property
    def bindings(self) -> Dict[str, List[Binding]]:
        if self._bindings is None:
            self._bindings = {}
            for unit in self.body.units:
                self._bind(unit.name, Binding(unit.kind, 0, (), unit=unit))
            self._walk(self.body.statements, ())
            self._from_functions()
        return self._bindings

    def _from_functions(self) -> None:
        """Names that functions bind at module level: ``global x``, ``globals()[…] = …``."""
        text = self.source.masked
        if "global" not in text:
            return
        for match in re.finditer(r"^[ \t]+global[ \t]+([\w, \t]+)", text, re.M):
            for name in match.group(1).split(","):
                if name.strip() == "__all__":
                    self.exports_known = False
                if name.strip() and name.strip() not in self.bindings:
                    self._bind(name.strip(), Binding("value", 0, (BRANCH,)))
        if re.search(r"\bglobals\(\)\s*(?:\[[^\]\n]*\]\s*=(?!=)|\.update\b|\.setdefault\b)", text):
            self.dynamic = True

    def absolute(self, module: Optional[str], level: int) -> str:
        """Dotted name of an import's module."""
        if not level:
            return module or ""
        parts = self.name.split(".")
        keep = len(parts) - level + (1 if self.is_package else 0)
        base = ".".join(parts[: max(keep, 0)])
        return base + "." + module if module and base else module or base

    def parse_all(self) -> None:
        """Parses every function and class, so that ``source.errors`` is complete: before a name is called missing."""
        for unit in self.body.units:
            unit.node()

    def strings(self) -> Set[str]:
        """Every string constant of the top-level statements and of a module-level ``__getattr__``."""
        if self._strings is not None:
            return self._strings
        found: Set[str] = set()
        nodes: List[ast.AST] = list(self.body.statements)
        for unit in self.body.by_name.get("__getattr__", []):
            definition = unit.node()
            if definition is not None:
                nodes.append(definition)
        for node in nodes:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    found.add(inner.value)
        self._strings = found
        return found

    def _bind(self, name: str, binding: Binding) -> None:
        assert self._bindings is not None
        self._bindings.setdefault(name, []).append(binding)

    def _walk(self, statements: List[ast.stmt], guards: Tuple[str, ...]) -> None:
        for node in statements:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.imported.append((alias.name, guards))
                    if alias.asname:
                        self._bind(alias.asname, Binding("import", node.lineno, guards, module=alias.name, node=node))
                    else:
                        top = alias.name.split(".")[0]
                        self._bind(top, Binding("import", node.lineno, guards, module=top, node=node))
            elif isinstance(node, ast.ImportFrom):
                source = self.absolute(node.module, node.level)
                for alias in node.names:
                    if alias.name == "*":
                        self.stars.append((source, guards))
                    else:
                        self._bind(
                            alias.asname or alias.name,
                            Binding("from", node.lineno, guards, module=source, attr=alias.name, node=node),
                        )
                self.imported.append((source, guards))
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                unit = unit_of(self.source, node)
                assert unit is not None
                self._bind(node.name, Binding(unit.kind, node.lineno, guards, unit=unit))
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assign(target, node, guards)
            elif isinstance(node, ast.AnnAssign):
                if node.value is not None or isinstance(node.target, ast.Name):
                    self._assign(node.target, node, guards)
            elif isinstance(node, ast.AugAssign):
                self._augment(node)
            elif isinstance(node, ast.Expr):
                self._effect(node.value)
            elif isinstance(node, ast.If):
                typing = is_type_checking(node.test)
                self._walk(node.body, guards + ((TYPING,) if typing is True else (BRANCH,)))
                self._walk(
                    node.orelse, guards if typing is True else guards + ((TYPING,) if typing is False else (BRANCH,))
                )
            elif isinstance(node, ast.Try) or node.__class__.__name__ == "TryStar":
                caught = catches_import_error(node)  # type: ignore[arg-type]
                self._walk(node.body, guards + ((TRY,) if caught else ()))  # type: ignore[attr-defined]
                for handler in node.handlers:  # type: ignore[attr-defined]
                    self._walk(handler.body, (*guards, HANDLER))
                self._walk(node.orelse, guards)  # type: ignore[attr-defined]
                self._walk(node.finalbody, guards)  # type: ignore[attr-defined]
            elif isinstance(node, (ast.For, ast.AsyncFor)):
                self._values(node.target, node, guards)
                self._walk(node.body, (*guards, BRANCH))
                self._walk(node.orelse, (*guards, BRANCH))
            elif isinstance(node, ast.While):
                self._walk(node.body, (*guards, BRANCH))
            elif isinstance(node, (ast.With, ast.AsyncWith)):
                for item in node.items:
                    if item.optional_vars is not None:
                        self._values(item.optional_vars, node, guards)
                suppressed = any(_is_suppress(item.context_expr) for item in node.items)
                self._walk(node.body, (*guards, TRY) if suppressed else guards)
            elif isinstance(node, ast.Delete):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self._bind(target.id, Binding("del", node.lineno, guards, node=node))
            elif node.__class__.__name__ == "TypeAlias":
                self._bind(node.name.id, Binding("assign", node.lineno, guards, node=node))  # type: ignore[attr-defined]
            elif node.__class__.__name__ == "Match":
                for case in node.cases:  # type: ignore[attr-defined]
                    self._walk(case.body, (*guards, BRANCH))
            for name in _walrus(node):
                self._bind(name, Binding("value", node.lineno, guards, node=node))

    def _assign(self, target: ast.expr, node: ast.stmt, guards: Tuple[str, ...]) -> None:
        if isinstance(target, ast.Name):
            self._bind(target.id, Binding("assign", node.lineno, guards, node=node))
            if target.id == "__all__":
                self._exports(getattr(node, "value", None), replace=True)
        elif isinstance(target, (ast.Tuple, ast.List)):
            value = getattr(node, "value", None)
            parts = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
            matched = len(parts) == len(target.elts)
            for place, element in enumerate(target.elts):
                if isinstance(element, ast.Name) and matched:
                    single = ast.Assign(
                        targets=[element], value=parts[place], lineno=node.lineno, col_offset=node.col_offset
                    )
                    self._bind(element.id, Binding("assign", node.lineno, guards, node=single))
                else:
                    self._values(element, node, guards)
        elif isinstance(target, ast.Subscript):
            text = ast.dump(target.value)
            if "'globals'" in text or "'__dict__'" in text:
                self.dynamic = True
            elif isinstance(target.value, ast.Attribute) and target.value.attr == "modules":
                self.replaced = True
        elif isinstance(target, ast.Attribute) and target.attr == "__class__":
            self.replaced = True

    def _values(self, target: ast.AST, node: ast.stmt, guards: Tuple[str, ...]) -> None:
        for inner in ast.walk(target):
            if isinstance(inner, ast.Name):
                self._bind(inner.id, Binding("value", node.lineno, guards, node=node))

    def _augment(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name) and node.target.id == "__all__":
            self._exports(node.value, replace=False)

    def _exports(self, value: Optional[ast.AST], *, replace: bool) -> None:
        names = _string_list(value)
        if names is None:
            self.exports_known = False
            names = (
                [n.value for n in ast.walk(value) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
                if value is not None
                else []
            )
        self.exports = names if replace or self.exports is None else self.exports + names

    def _effect(self, value: ast.expr) -> None:
        if not isinstance(value, ast.Call):
            return
        function = value.func
        if isinstance(function, ast.Name) and function.id in ("exec", "eval"):
            self.dynamic = True
        elif isinstance(function, ast.Attribute):
            owner = function.value
            if isinstance(owner, ast.Name) and owner.id == "__all__":
                argument = value.args[0] if value.args else None
                if function.attr == "append" and isinstance(argument, ast.Constant):
                    self._exports(ast.List(elts=[argument], ctx=ast.Load()), replace=False)
                elif function.attr == "remove":
                    pass
                else:
                    self._exports(argument, replace=False)
            elif (
                function.attr == "update"
                and isinstance(owner, ast.Call)
                and isinstance(owner.func, ast.Name)
                and owner.func.id in ("globals", "vars")
            ):
                self.dynamic = True


def _string_list(value: Optional[ast.AST]) -> Optional[List[str]]:
    if isinstance(value, (ast.List, ast.Tuple, ast.Set)):
        names = [e.value for e in value.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)]
        return names if len(names) == len(value.elts) else None
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        left, right = _string_list(value.left), _string_list(value.right)
        return left + right if left is not None and right is not None else None
    return None


def _walrus(node: ast.AST) -> Iterator[str]:
    tests = [getattr(node, "test", None), getattr(node, "value", None)]
    for test in tests:
        if isinstance(test, ast.AST):
            for inner in ast.walk(test):
                if isinstance(inner, ast.NamedExpr) and isinstance(inner.target, ast.Name):
                    yield inner.target.id


def _is_suppress(node: ast.expr) -> bool:
    function = node.func if isinstance(node, ast.Call) else None
    name = (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
    return name == "suppress" and isinstance(node, ast.Call) and any(last_name(a) in IMPORT_ERRORS for a in node.args)


def last_name(node: Optional[ast.AST]) -> str:
    """The last part of a dotted expression, or an empty string."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def catches_import_error(node: ast.Try) -> bool:
    return any(handler_catches(handler, IMPORT_ERRORS) for handler in node.handlers)


def handler_catches(handler: ast.ExceptHandler, names: Set[str]) -> bool:
    """Whether an except clause takes one of the exception names (a bare one takes all)."""
    if handler.type is None:
        return True
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(last_name(t) in names for t in types)


def is_type_checking(test: ast.expr) -> Optional[bool]:
    """True for ``TYPE_CHECKING``, False for ``not TYPE_CHECKING``, None for any other condition."""
    if last_name(test) == "TYPE_CHECKING":
        return True
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) and last_name(test.operand) == "TYPE_CHECKING":
        return False
    if isinstance(test, ast.Constant) and test.value in (False, 0):
        return True
    return None
