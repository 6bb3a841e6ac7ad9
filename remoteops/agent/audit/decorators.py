"""What decorators make of a function's parameters and of a class's constructor."""

from __future__ import annotations

import ast
from typing import Any, Dict, List, Optional, Tuple

from remoteops.agent.audit.classes import Classes
from remoteops.agent.audit.index import ClassInfo, FunctionInfo
from remoteops.agent.audit.modules import Module, last_name
from remoteops.agent.audit.signatures import POSITIONAL, VAR_KEYWORD, VAR_POSITIONAL, Signature, from_arguments
from remoteops.agent.audit.syntax import FunctionNode, walk_shallow
from remoteops.agent.audit.wrappers import (
    Recipe,
    constant,
    extra_setting,
    injects,
    leading,
    rewrites,
    with_options,
    wrapper,
)

KEEPS = {
    "staticmethod",
    "classmethod",
    "abstractmethod",
    "override",
    "final",
    "overload",
    "lru_cache",
    "cache",
    "wraps",
    "contextmanager",
    "asynccontextmanager",
    "no_grad",
    "inference_mode",
    "enable_grad",
    "deprecated",
    "no_type_check",
    "singledispatch",
    "jit",
    "compile",
    "njit",
    "disable",
    "unused",
    "ignore",
    "export",
    "runtime_checkable",
    "total_ordering",
    "unique",
    "dataclass_transform",
    "cached",
    "coroutine",
    "record",
    "set_grad_enabled",
    "fixture",
    "register",
    "retry",
    "field_validator",
    "model_validator",
    "field_serializer",
    "model_serializer",
    "validator",
    "root_validator",
    "validate_call",
    "with_config",
    "hookimpl",
    "hookspec",
    "deprecate",
    "update_wrapper",
    "profile",
    "add_start_docstrings",
    "add_end_docstrings",
    "doc",
    "Substitution",
    "Appender",
    "register_fake",
    "custom_op",
    "beartype",
    "lru_cache_with_self",
    "abstractproperty",
    "preserve_module_specs",
}
PROPERTIES = {
    "property",
    "cached_property",
    "abstractproperty",
    "computed_field",
    "lazyproperty",
    "lazy_property",
    "classproperty",
    "hybrid_property",
    "functools_cached_property",
    "reify",
}
DATACLASS = {"dataclasses.dataclass": "dataclass", "pydantic.dataclasses.dataclass": "pydantic"}
for _package in ("attr", "attrs"):
    for _name in ("s", "attrs", "attributes", "define", "mutable", "frozen", "dataclass"):
        DATACLASS["%s.%s" % (_package, _name)] = "attrs"


class Decorators:
    """Reads decorators by their names and, where their source is at hand, by their bodies."""

    def __init__(self, classes: Classes) -> None:
        self.classes = classes
        self._recipes: Dict[int, Optional[Recipe]] = {}

    # -- classes -----------------------------------------------------------------------------------------------------

    def recipe(self, info: ClassInfo) -> Recipe:
        """The effect of a class's decorators on its constructor (bases not looked at)."""
        if "recipe" not in info.facts:
            header = self.classes.header(info)
            result = Recipe()
            for decorator in reversed(header.decorator_list if header is not None else []):
                made = self._class_decorator(info, decorator)
                if made.family != "plain":
                    doubt = made.doubt or result.doubt
                    result = made._replace(doubt=doubt)
                elif made.doubt or made.open:
                    result = result._replace(doubt=result.doubt or made.doubt, open=result.open or made.open)
            info.facts["recipe"] = result
        return info.facts["recipe"]  # type: ignore[return-value]

    def _class_decorator(self, info: ClassInfo, node: ast.expr) -> Recipe:
        call = node if isinstance(node, ast.Call) else None
        target = call.func if call is not None else node
        symbol = self.classes.symbol_in(info.module, target, info)
        name = symbol.name if symbol is not None else last_name(target)
        made = self._of(name, symbol.function if symbol is not None else None, 0)
        if made is None:
            if last_name(target) in KEEPS or name.split(".")[0] in (
                "typing",
                "typing_extensions",
                "functools",
                "abc",
                "enum",
            ):
                return Recipe()
            if last_name(target).endswith("dataclass"):
                return Recipe("dataclass", doubt="decorator %s is not at hand" % name)
            return Recipe(
                doubt="decorator %s is not at hand" % (name or "?"), open="decorator %s is not at hand" % (name or "?")
            )
        return with_options(made, call, info.module) if made.family != "plain" else made

    def _of(self, name: str, function: Optional[FunctionInfo], depth: int) -> Optional[Recipe]:
        family = DATACLASS.get(name)
        if family:
            return Recipe(family, auto_attribs=not name.endswith((".s", ".attrs", ".attributes")))
        if function is None or depth > 4:
            return None
        if id(function) not in self._recipes:
            self._recipes[id(function)] = Recipe(doubt="decorator %s calls itself" % function.name)
            self._recipes[id(function)] = self._from_body(function, depth)
        return self._recipes[id(function)]

    def _from_body(self, function: FunctionInfo, depth: int) -> Recipe:
        node = function.node
        if node is None:
            return Recipe(doubt="decorator %s cannot be parsed" % function.name)
        doubt = ""
        if ".__init__ =" in function.unit.text:
            doubt = "decorator %s replaces __init__" % function.name
        found = self._returned(node, node, function.module, depth)
        adds = any(
            isinstance(n, ast.Call) and last_name(n.func) == "setattr" and len(n.args) > 1 and not constant(n.args[1])
            for n in ast.walk(node)
        )
        opened = (
            "decorator %s sets attributes under computed names" % function.name
            if adds
            else next((r.open for r in found if r.open), "")
        )
        families = [r for r in found if r.family != "plain"]
        if families:
            return families[0]._replace(doubt=families[0].doubt or doubt, open=opened)
        transformed = any(
            last_name(d.func if isinstance(d, ast.Call) else d) == "dataclass_transform" for d in node.decorator_list
        )
        if transformed and not found:
            return Recipe("dataclass", doubt=doubt or "decorator %s is only declared a dataclass maker" % function.name)
        doubts = [r.doubt for r in found if r.doubt]
        text = doubts[0] if doubts else "" if found else "decorator %s returns something else" % function.name
        return Recipe(doubt=doubt or text, open=opened or ("" if found else text))

    def _returned(self, node: FunctionNode, outer: FunctionNode, module: Module, depth: int) -> List[Recipe]:
        """Recipes of everything a decorator function may return; a plain recipe means that the class comes back as
        it was.
        """
        found: List[Recipe] = []
        local = {s.name: s for s in walk_shallow(outer.body) if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef))}
        local.update(
            {s.name: s for s in walk_shallow(node.body) if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef))}
        )
        first = (node.args.posonlyargs + node.args.args)[:1]
        parameter = first[0].arg if first else ""
        assigned: Dict[str, ast.expr] = {}
        for statement in walk_shallow(node.body):
            if (
                isinstance(statement, ast.Assign)
                and len(statement.targets) == 1
                and isinstance(statement.targets[0], ast.Name)
            ):
                assigned[statement.targets[0].id] = statement.value
        for statement in walk_shallow(node.body):
            if isinstance(statement, ast.Return) and statement.value is not None:
                found.extend(self._expression(statement.value, node, outer, module, parameter, local, assigned, depth))
        return found

    def _expression(
        self,
        value: ast.expr,
        node: FunctionNode,
        outer: FunctionNode,
        module: Module,
        parameter: str,
        local: Dict[str, FunctionNode],
        assigned: Dict[str, ast.expr],
        depth: int,
    ) -> List[Recipe]:
        again: Tuple[Any, ...] = (node, outer, module, parameter, local, assigned, depth + 1)
        if depth > 6:
            return []
        if isinstance(value, ast.IfExp):
            return self._expression(value.body, *again) + self._expression(value.orelse, *again)
        if isinstance(value, ast.Name):
            if value.id in assigned:
                rest = {k: v for k, v in assigned.items() if k != value.id}
                return self._expression(assigned[value.id], node, outer, module, parameter, local, rest, depth + 1)
            if value.id == parameter:
                return [Recipe()]
            if value.id in local and local[value.id] is not node:
                return self._returned(local[value.id], outer, module, depth + 1)
            return []
        if isinstance(value, ast.Call):
            if isinstance(value.func, ast.Name) and value.func.id in local and local[value.func.id] is not node:
                return self._returned(local[value.func.id], outer, module, depth + 1)
            inner = value.func.func if isinstance(value.func, ast.Call) else value.func
            if last_name(inner) == "cast" and len(value.args) == 2:
                return self._expression(value.args[1], *again)
            if last_name(inner) == "partial" and value.args:
                inner = value.args[0]
            symbol = self.classes.symbol_in(module, inner)
            made = self._of(symbol.name, symbol.function, depth + 1) if symbol is not None else None
            if made is None:
                return [
                    Recipe(
                        doubt="decorator calls %s, which is not at hand" % (last_name(inner) or "?"),
                        open="decorator calls %s, which is not at hand" % (last_name(inner) or "?"),
                    )
                ]
            if made.family == "plain":
                return [made]
            options = value.func if isinstance(value.func, ast.Call) else value
            return [with_options(made, options, module, outer)]
        return []

    # -- functions ---------------------------------------------------------------------------------------------------

    def flavour(self, function: FunctionInfo) -> str:
        """function, staticmethod, classmethod or property."""
        if "flavour" not in function.facts:
            flavour = "function"
            node = function.head
            for decorator in node.decorator_list if node is not None else []:
                name = last_name(decorator.func if isinstance(decorator, ast.Call) else decorator)
                if name in ("staticmethod", "classmethod"):
                    flavour = name
                elif name in PROPERTIES or name.endswith("property"):
                    flavour = "property"
                elif name in ("setter", "getter", "deleter"):
                    flavour = "property"
            if function.owner is not None and function.name in ("__new__", "__init_subclass__", "__class_getitem__"):
                flavour = "staticmethod" if function.name == "__new__" else "classmethod"
            function.facts["flavour"] = flavour
        return str(function.facts["flavour"])

    def signature(self, function: FunctionInfo) -> Optional[Signature]:
        """Parameters as a caller meets them (the receiver included), or None when the source cannot be parsed."""
        if "signature" not in function.facts:
            node = function.head
            result = from_arguments(node.args) if node is not None else None
            if node is not None and result is not None:
                for decorator in reversed(node.decorator_list):
                    result = self._function_decorator(function, decorator, result)
            function.facts["signature"] = result
        return function.facts["signature"]  # type: ignore[return-value]

    def _function_decorator(self, function: FunctionInfo, node: ast.expr, before: Signature) -> Signature:
        target = node.func if isinstance(node, ast.Call) else node
        name = last_name(target)
        if name in KEEPS or name in PROPERTIES or name in ("setter", "getter", "deleter") or name.endswith("property"):
            return before
        symbol = self.classes.symbol_in(function.module, target, function.owner)
        if symbol is None or symbol.kind != "function" or symbol.function is None:
            return before._replace(doubt=before.doubt or "decorated with %s, which is not at hand" % (name or "?"))
        maker = symbol.function.node
        placed = wrapper(maker, 2 if isinstance(node, ast.Call) else 1) if maker is not None else None
        if placed == "identity":
            return before
        if isinstance(placed, (ast.FunctionDef, ast.AsyncFunctionDef)):
            shape = from_arguments(placed.args)
            star = placed.args.kwarg.arg if placed.args.kwarg is not None else ""
            rewritten = star and any(rewrites(inner, star) for inner in ast.walk(placed))
            ahead, mine = leading(placed), len(placed.args.posonlyargs + placed.args.args)
            if ahead > 0 and not rewritten and all(p.kind == POSITIONAL for p in before.parameters[: mine + ahead]):
                return before._replace(parameters=before.parameters[:mine] + before.parameters[mine + ahead :])
            if rewritten or injects(placed):
                return before._replace(doubt=before.doubt or "%s may change the arguments" % name)
            if any(p.kind == VAR_POSITIONAL for p in shape.parameters) and any(
                p.kind == VAR_KEYWORD for p in shape.parameters
            ):
                named = [p for p in shape.parameters if p.kind == POSITIONAL]
                return (
                    before
                    if len(named) <= 1 or len(before.parameters) >= len(named)
                    else before._replace(doubt="wrapped by %s" % name)
                )
            return shape._replace(doubt=before.doubt)
        return before._replace(doubt=before.doubt or "wrapped by %s in a way that was not followed" % name)


__all__ = ["Decorators", "Recipe", "extra_setting"]
