"""Scopes: where a name is looked up, and what in a function binds it."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Dict, List, Optional, Set, Tuple

from remoteops.agent.audit.index import ClassInfo, FunctionInfo
from remoteops.agent.audit.modules import Module
from remoteops.agent.audit.syntax import walk_shallow
from remoteops.agent.audit.values import (
    UNKNOWN,
    ClassValue,
    External,
    ExternalInstance,
    FunctionValue,
    Instance,
    Sequence,
    Unknown,
    Value,
    join,
)

if TYPE_CHECKING:
    from remoteops.agent.audit.evaluate import Evaluator


class Scope:
    """Where names are looked up: a module, or a function whose assignments are followed when a name is asked for."""

    def __init__(
        self,
        evaluator: Evaluator,
        module: Module,
        function: Optional[FunctionInfo] = None,
        *,
        receiver: Optional[Value] = None,
        arguments: Optional[Dict[str, Value]] = None,
        outer: Optional[Scope] = None,
    ) -> None:
        self.evaluator = evaluator
        self.module = module
        self.function = function
        self.owner: Optional[ClassInfo] = function.owner if function is not None else None
        self.receiver = receiver
        self.arguments = arguments or {}
        self.outer = outer
        self.names: Dict[str, Value] = {}
        self._table: Optional[Dict[str, List[Tuple[str, ast.AST]]]] = None
        self._busy: Set[str] = set()

    def get(self, name: str) -> Optional[Value]:
        """The value of a name, or None where nothing binds it."""
        if name in self.names:
            return self.names[name]
        if self.function is not None:
            if name in self._busy:
                self.evaluator.cut += 1
                return UNKNOWN
            self._busy.add(name)
            try:
                found = self._local(name)
            finally:
                self._busy.discard(name)
            if found is not None:
                self.names[name] = found
                return found
        if self.outer is not None:
            return self.outer.get(name)
        return self.evaluator.global_name(self.module, name)

    def _local(self, name: str) -> Optional[Value]:
        function = self.function
        node = function.head if function is not None else None
        if function is None or node is None:
            return None
        found: List[Value] = []
        parameter = self._parameter(name, node.args, function)
        if parameter is not None:
            found.append(parameter)
            if parameter != UNKNOWN and not isinstance(parameter, Unknown):
                return parameter
        for kind, place in self.table().get(name, []):
            found.append(self.evaluator.bound_by(kind, place, name, self))
        return join(found) if found else None

    def table(self) -> Dict[str, List[Tuple[str, ast.AST]]]:
        """Name -> statements of the function that bind it."""
        if self._table is None:
            node = self.function.node if self.function is not None else None
            facts = self.function.facts if self.function is not None else {}
            if "names" not in facts:
                facts["names"] = (
                    binding_table(node.body, ":=" in self.function.unit.text)
                    if node is not None and self.function is not None
                    else {}
                )
            self._table = facts["names"]  # type: ignore[assignment]
        return self._table or {}

    def _parameter(self, name: str, arguments: ast.arguments, function: FunctionInfo) -> Optional[Value]:
        plain = arguments.posonlyargs + arguments.args
        for place, argument in enumerate(plain + arguments.kwonlyargs):
            if argument.arg != name:
                continue
            if (
                place == 0
                and function.owner is not None
                and self.evaluator.decorators.flavour(function) != "staticmethod"
            ):
                if self.receiver is not None:
                    return self.receiver
                if self.evaluator.decorators.flavour(function) == "classmethod" or function.name == "__new__":
                    return ClassValue(function.owner, False)
                return Instance(function.owner)
            if name in self.arguments and not isinstance(self.arguments[name], Unknown):
                return self.arguments[name]
            reach = self.evaluator.in_provider(self.module)
            declared = self.evaluator.annotation(argument.annotation, self.module, self.owner, receiver=self.receiver)
            passed: Dict[str, Value] = function.facts.get("passed", {})  # type: ignore[assignment]
            if declared == UNKNOWN and name in passed:
                return passed[name]
            if isinstance(declared, (Unknown, External, ExternalInstance)):
                default = _default_of(arguments, argument)
                value = (
                    self.evaluator.evaluate(default, self.evaluator.module_scope(self.module))
                    if default is not None
                    else UNKNOWN
                )
                if isinstance(value, (ClassValue, FunctionValue)):
                    return value
            return Unknown(reach, name) if declared == UNKNOWN and reach else declared
        if arguments.vararg is not None and arguments.vararg.arg == name:
            return Sequence(
                "tuple", None, self.evaluator.annotation(arguments.vararg.annotation, self.module, self.owner)
            )
        if arguments.kwarg is not None and arguments.kwarg.arg == name:
            return Sequence(
                "dict", None, self.evaluator.annotation(arguments.kwarg.annotation, self.module, self.owner)
            )
        return None


def _default_of(arguments: ast.arguments, wanted: ast.arg) -> Optional[ast.expr]:
    plain = arguments.posonlyargs + arguments.args
    defaults: List[Optional[ast.expr]] = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    for argument, default in list(zip(plain, defaults)) + list(zip(arguments.kwonlyargs, arguments.kw_defaults)):
        if argument is wanted:
            return default
    return None


def binding_table(body: List[ast.stmt], walrus: bool = True) -> Dict[str, List[Tuple[str, ast.AST]]]:
    """Name -> (kind, node) of everything in a function body that binds it; nested functions are entries, not
    looked into.
    """
    table: Dict[str, List[Tuple[str, ast.AST]]] = {}

    def add(kind: str, target: Optional[ast.AST], node: ast.AST) -> None:
        if isinstance(target, ast.Name):
            table.setdefault(target.id, []).append((kind, node))
        elif isinstance(target, (ast.Tuple, ast.List)):
            for element in target.elts:
                add(kind, element.value if isinstance(element, ast.Starred) else element, node)

    for statement in walk_shallow(body):
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            table.setdefault(statement.name, []).append(("def", statement))
            continue
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                add("assign", target, statement)
        elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
            add("assign", statement.target, statement)
        elif isinstance(statement, (ast.For, ast.AsyncFor)):
            add("for", statement.target, statement)
        elif isinstance(statement, (ast.With, ast.AsyncWith)):
            for item in statement.items:
                add("with", item.optional_vars, item)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            for alias in statement.names:
                table.setdefault((alias.asname or alias.name).split(".")[0], []).append(("import", statement))
        for expression in _own_expressions(statement) if walrus else []:
            for inner in ast.walk(expression):
                if isinstance(inner, ast.NamedExpr):
                    add("walrus", inner.target, inner)
    return table


def _own_expressions(statement: ast.stmt) -> List[ast.AST]:
    return [
        v for v in (getattr(statement, f, None) for f in ("test", "value", "iter", "exc")) if isinstance(v, ast.AST)
    ]
