"""The signature of calling a class: explicit, or made by dataclass, pydantic, msgspec, attrs, NamedTuple, Enum."""

from __future__ import annotations

import ast
import builtins
from typing import Dict, List, NamedTuple, Optional

from remoteops.agent.audit.classes import Classes
from remoteops.agent.audit.decorators import Decorators, Recipe, extra_setting
from remoteops.agent.audit.fields import Field, annotated_call, outer_name
from remoteops.agent.audit.index import ClassInfo
from remoteops.agent.audit.modules import last_name
from remoteops.agent.audit.signatures import (
    KEYWORD_ONLY,
    POSITIONAL,
    VAR_KEYWORD,
    VAR_POSITIONAL,
    Parameter,
    Signature,
    unparse,
)
from remoteops.agent.audit.syntax import walk_shallow

ANYTHING = (Parameter("args", VAR_POSITIONAL), Parameter("kwargs", VAR_KEYWORD))
_MODELS = (
    "pydantic.BaseModel",
    "pydantic.main.BaseModel",
    "pydantic.v1.BaseModel",
    "pydantic_settings.BaseSettings",
    "pydantic.BaseSettings",
)
_NAMED = ("typing.NamedTuple", "typing_extensions.NamedTuple")
_EMPTY = {
    "object",
    "abc.ABC",
    "typing.Generic",
    "typing.Protocol",
    "typing_extensions.Protocol",
    "typing_extensions.Generic",
}
MISSING = "?"


class Constructed(NamedTuple):
    """``where``: the class that supplies the constructor, ``name``: ``__init__``, ``__new__`` or the generated kind."""

    signature: Optional[Signature]
    where: ClassInfo
    name: str
    line: int


class Constructors:
    def __init__(self, classes: Classes, decorators: Decorators) -> None:
        self.classes = classes
        self.decorators = decorators

    def of(self, info: ClassInfo) -> Constructed:
        """The constructor of a class, without the receiver."""
        if "constructor" not in info.facts:
            info.facts["constructor"] = Constructed(None, info, "", info.unit.line)
            info.facts["constructor"] = self._of(info)
        return info.facts["constructor"]  # type: ignore[return-value]

    def family(self, info: ClassInfo) -> str:
        """What makes the constructor of this class if it has no explicit one: plain, dataclass, pydantic, attrs,
        model, struct, tuple, typed-dict.
        """
        recipe = self.decorators.recipe(info)
        if recipe.family != "plain":
            return recipe.family
        for name in self.classes.lineage(info).external:
            if name in _MODELS:
                return "model"
            if name == "msgspec.Struct":
                return "struct"
            if name in ("typing.TypedDict", "typing_extensions.TypedDict"):
                return "typed-dict"
        if any(name in _NAMED for name, _ in self.classes.bases(info)):
            return "tuple"
        return "plain"

    def _of(self, info: ClassInfo) -> Constructed:
        line = self.classes.lineage(info)
        if self.classes.is_enum(info):
            value = Parameter("value", POSITIONAL)
            return Constructed(Signature((value, *ANYTHING), doubt="an enum"), info, "enum", info.unit.line)
        doubt = self.decorators.recipe(info).doubt or self._metaclass(info)
        for klass in line.classes:
            for name in ("__init__", "__new__"):
                member = self.classes.effective(self.classes.own(klass, name))
                if member is None or member.kind != "method":
                    continue
                function = self.classes.function(member)
                signature = self.decorators.signature(function) if function is not None else None
                if signature is not None:
                    signature = signature.without_first()
                    if name == "__init__" and (klass is not info and self.decorators.recipe(klass).doubt):
                        doubt = doubt or self.decorators.recipe(klass).doubt
                    return Constructed(
                        signature._replace(doubt=signature.doubt or doubt),
                        klass,
                        name,
                        function.unit.line if function else klass.unit.line,
                    )
                return Constructed(None, klass, name, klass.unit.line)
            family = self.family(klass)
            recipe = self.decorators.recipe(klass)
            if family in ("dataclass", "pydantic", "attrs") and recipe.init:
                return Constructed(self._generated(klass, family, recipe, doubt), klass, family, klass.unit.line)
            if family in ("model", "struct", "tuple"):
                return Constructed(self._generated(klass, family, recipe, doubt), klass, family, klass.unit.line)
            if family == "typed-dict":
                return Constructed(Signature(ANYTHING), klass, family, klass.unit.line)
        return Constructed(self._external(info, doubt), info, "__init__", info.unit.line)

    def _metaclass(self, info: ClassInfo) -> str:
        """Why a metaclass may take other arguments than the constructor, if it may."""
        for klass in self.classes.lineage(info).classes:
            for keyword in getattr(self.classes.header(klass), "keywords", []):
                symbol = self.classes.resolve(klass, keyword.value) if keyword.arg == "metaclass" else None
                if symbol is not None and symbol.klass is not None and self.classes.member(symbol.klass, "__call__"):
                    return "metaclass %s defines __call__" % symbol.klass.name
        return ""

    def _external(self, info: ClassInfo, doubt: str) -> Signature:
        line = self.classes.lineage(info)
        rest = [name for name in line.external if name not in _EMPTY]
        if line.open or doubt:
            return Signature(ANYTHING, doubt=line.open or doubt)
        if not rest:
            return Signature(())
        found = getattr(builtins, rest[0], None)
        if isinstance(found, type) and issubclass(found, BaseException):
            return Signature(ANYTHING)
        return Signature(ANYTHING, doubt="" if rest[0] in ("torch.nn.Module",) else "constructor of %s" % rest[0])

    # -- generated ---------------------------------------------------------------------------------------------------

    def generated(self, info: ClassInfo) -> Constructed:
        """The constructor that a class would have if it had no explicit one."""
        family, recipe = self.family(info), self.decorators.recipe(info)
        return Constructed(self._generated(info, family, recipe, recipe.doubt), info, family, info.unit.line)

    def _generated(self, info: ClassInfo, family: str, recipe: Recipe, doubt: str) -> Signature:
        fields = [f for f in self.fields(info) if f.init]
        keyword = family == "model"
        plain = [f for f in fields if not (f.kw_only or keyword)]
        named = [f for f in fields if f.kw_only or keyword]
        parameters: List[Parameter] = []
        for field, kind in [(f, POSITIONAL) for f in plain] + [(f, KEYWORD_ONLY) for f in named]:
            name = field.alias or field.name
            parameters.append(
                Parameter(name, kind, field.default, field.annotation, field.line, field.default_node, field.extra)
            )
            if field.alias and family in ("model", "pydantic"):
                parameters.append(
                    Parameter(field.name, KEYWORD_ONLY, MISSING, field.annotation, field.line, None, "alias")
                )
        line = self.classes.lineage(info)
        if family not in ("model", "struct"):
            doubt = doubt or line.open
        elif line.open and not all(
            b in _MODELS or b == "msgspec.Struct" or b.startswith(("typing.", "abc.")) for b in line.external
        ):
            doubt = doubt or line.open
        ignores = drops = False
        if family in ("model", "pydantic"):
            extra = self._extra(info, recipe)
            ignores = extra != "forbid"
            drops = extra == "ignore"
            if self._before_validator(info):
                doubt = doubt or "a validator that runs before may change what is passed"
            if any(f.alias for f in fields):
                doubt = doubt or "fields have aliases"
        return Signature(
            tuple(parameters),
            doubt=doubt,
            ignores_unknown=ignores,
            drops_unknown=drops,
            error="ValidationError" if family in ("model", "pydantic") else "TypeError",
        )

    def fields(self, info: ClassInfo) -> List[Field]:
        """Fields of a generated constructor in order, bases first."""
        if "fields" in info.facts:
            return info.facts["fields"]  # type: ignore[return-value]
        family = self.family(info)
        table: Dict[str, Field] = {}
        for klass in reversed(self.classes.lineage(info).classes):
            same = self.family(klass)
            if klass is not info:
                if family in ("dataclass", "pydantic") and same not in ("dataclass", "pydantic"):
                    continue
                if family in ("attrs", "tuple") and same != family:
                    continue
            for field in self._own_fields(klass, family):
                if field.name in table and not field.init and field.default is None and field.annotation is None:
                    continue
                table[field.name] = field
        info.facts["fields"] = list(table.values())
        return info.facts["fields"]  # type: ignore[return-value]

    def _own_fields(self, info: ClassInfo, family: str) -> List[Field]:
        found: List[Field] = []
        recipe = self.decorators.recipe(info)
        kw_only = recipe.kw_only or any(
            k.arg == "kw_only" and isinstance(k.value, ast.Constant) and k.value.value is True
            for k in getattr(self.classes.header(info), "keywords", [])
        )
        for statement in walk_shallow(info.unit.body().statements):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                name = statement.target.id
                outer = outer_name(statement.annotation)
                if outer == "KW_ONLY":
                    kw_only = True
                    continue
                if outer == "ClassVar" or (family == "model" and (name.startswith("_") or name == "model_config")):
                    continue
                found.append(self._field(info, name, statement, kw_only, family, outer))
            elif (
                isinstance(statement, ast.Assign)
                and family == "attrs"
                and len(statement.targets) == 1
                and isinstance(statement.targets[0], ast.Name)
            ):
                if isinstance(statement.value, ast.Call) and last_name(statement.value.func) in (
                    "ib",
                    "attrib",
                    "field",
                    "attr",
                ):
                    single = ast.AnnAssign(
                        target=statement.targets[0],
                        annotation=ast.Constant(None),
                        value=statement.value,
                        simple=1,
                        lineno=statement.lineno,
                    )
                    found.append(self._field(info, statement.targets[0].id, single, kw_only, family, ""))
            elif (
                isinstance(statement, ast.Assign)
                and family == "model"
                and len(statement.targets) == 1
                and isinstance(statement.targets[0], ast.Name)
            ):
                target = statement.targets[0].id
                known = next((f for f in self._inherited(info) if f.name == target), None)
                if known is not None:
                    found.append(
                        known._replace(
                            default=unparse(statement.value),
                            default_node=statement.value,
                            owner=info,
                            line=statement.lineno,
                        )
                    )
        return found

    def _inherited(self, info: ClassInfo) -> List[Field]:
        for klass in self.classes.lineage(info).classes[1:]:
            return self.fields(klass)
        return []

    def _field(self, info: ClassInfo, name: str, node: ast.AnnAssign, kw_only: bool, family: str, outer: str) -> Field:
        default: Optional[str] = None
        value = node.value
        default_node = value
        init, alias = True, ""
        annotated = annotated_call(node.annotation)
        if value is None and annotated is not None:
            value_call: Optional[ast.Call] = annotated
        else:
            value_call = value if isinstance(value, ast.Call) else None
        maker = last_name(value_call.func) if value_call is not None else ""
        if value_call is not None and maker in ("field", "Field", "ib", "attrib", "attr", "PrivateAttr"):
            default_node = None
            first = value_call.args[0] if value_call.args and value_call is value else None
            options = {k.arg: k.value for k in value_call.keywords if k.arg}
            if first is not None:
                options.setdefault("default", first)
            if "default" in options:
                default_node = options["default"]
                dots = isinstance(default_node, ast.Constant) and default_node.value is Ellipsis
                nothing = last_name(default_node) in ("MISSING", "NOTHING", "UNSET", "PydanticUndefined")
                default = None if dots or nothing else unparse(default_node)
                default_node = None if dots or nothing else default_node
            factory = options.get("default_factory", options.get("factory"))
            if factory is not None:
                default, default_node = "<%s()>" % unparse(factory), None
            if isinstance(options.get("init"), ast.Constant):
                init = bool(options["init"].value)  # type: ignore[attr-defined]
            if isinstance(options.get("kw_only"), ast.Constant):
                kw_only = bool(options["kw_only"].value)  # type: ignore[attr-defined]
            for option in ("validation_alias", "alias"):
                text = options.get(option)
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    alias = text.value
            if any(k.arg is None for k in value_call.keywords) and default is None:
                default = MISSING
            if maker == "PrivateAttr":
                init = False
        elif value is not None:
            default = unparse(value)
        if family == "attrs" and name.startswith("_") and not alias:
            alias = name.lstrip("_")
        if family == "model" and default is None and outer == "Optional" and not self._second_pydantic(info):
            default = "None"
        return Field(
            name,
            default,
            node.annotation,
            kw_only,
            node.lineno,
            info,
            init,
            "initvar" if outer == "InitVar" else "",
            default_node,
            alias,
        )

    def _second_pydantic(self, info: ClassInfo) -> bool:
        """Whether the class is surely written for pydantic 2 (in 1, ``Optional[X]`` is not required)."""
        text = info.module.source.text
        return (
            any(w in text for w in ("model_config", "field_validator", "model_validator", "ConfigDict", "model_dump"))
            and "pydantic.v1" not in text
        )

    def _extra(self, info: ClassInfo, recipe: Recipe) -> str:
        if recipe.extra:
            return recipe.extra
        for klass in self.classes.lineage(info).classes:
            for keyword in getattr(self.classes.header(klass), "keywords", []):
                if keyword.arg == "extra":
                    return str(getattr(keyword.value, "value", "")) or last_name(keyword.value)
            for name in ("model_config", "__pydantic_config__"):
                member = self.classes.effective(self.classes.own(klass, name))
                found = (
                    extra_setting(getattr(member.node, "value", None), None, klass.module) if member is not None else ""
                )
                if found:
                    return found
            config = self.classes.effective(self.classes.own(klass, "Config"))
            if config is not None and config.kind == "class" and config.unit is not None:
                for statement in config.unit.body().statements:
                    if isinstance(statement, ast.Assign) and any(
                        isinstance(t, ast.Name) and t.id == "extra" for t in statement.targets
                    ):
                        return (
                            str(getattr(statement.value, "value", ""))
                            if isinstance(statement.value, ast.Constant)
                            else last_name(statement.value)
                        )
            other = self.decorators.recipe(klass)
            if other.extra:
                return other.extra
        return "ignore"

    def _before_validator(self, info: ClassInfo) -> bool:
        for klass in self.classes.lineage(info).classes:
            text = klass.unit.text
            if "root_validator" in text or (
                "model_validator" in text
                and (
                    'mode="before"' in text
                    or "mode='before'" in text
                    or ('mode="wrap"' in text and 'model_validator(mode="wrap")' in text)
                )
            ):
                compact = "".join(text.split())
                if (
                    "root_validator" in text
                    or 'model_validator(mode="before")' in compact
                    or "model_validator(mode='before')" in compact
                    or ('model_validator(mode="wrap")' in compact)
                ):
                    return True
        return False
