"""Classes of other libraries whose attributes are known without their source."""

from __future__ import annotations

import builtins
import collections.abc
import importlib
from typing import Dict, Optional, Set, Tuple

# External bases that add no public attribute of their own, or whose attributes are known here. A class that derives
# from any other external class is open: what it has cannot be told.
_MODULE_NAMES = (
    "T_destination call_super_init dump_patches training add_module apply bfloat16 buffers children compile cpu cuda "
    "double eval "
    "extra_repr float forward get_buffer get_extra_state get_parameter get_submodule half ipu "
    "load_state_dict modules mtia "
    "named_buffers named_children named_modules named_parameters parameters register_backward_hook "
    "register_buffer "
    "register_forward_hook register_forward_pre_hook register_full_backward_hook "
    "register_full_backward_pre_hook "
    "register_load_state_dict_post_hook register_load_state_dict_pre_hook register_module "
    "register_parameter "
    "register_state_dict_post_hook register_state_dict_pre_hook requires_grad_ set_extra_state "
    "set_submodule share_memory "
    "state_dict to to_empty train type xpu zero_grad"
).split()

KNOWN_BASES: Dict[str, Tuple[str, ...]] = {
    "abc.ABC": (),
    "typing.Generic": (),
    "typing.Protocol": (),
    "typing_extensions.Protocol": (),
    "typing_extensions.Generic": (),
    "object": (),
    "typing.NamedTuple": ("_replace", "_asdict", "_fields", "_make", "_field_defaults", "count", "index"),
    "enum.Enum": (
        "name",
        "value",
        "_name_",
        "_value_",
        "__members__",
        "_missing_",
        "_generate_next_value_",
        "_member_map_",
    ),
    "torch.nn.Module": tuple(_MODULE_NAMES),
    "torch.nn.modules.module.Module": tuple(_MODULE_NAMES),
    "msgspec.Struct": ("__struct_fields__", "__struct_config__"),
    "pydantic.BaseModel": tuple(
        "construct copy dict from_orm json parse_file parse_obj parse_raw schema schema_json "
        "update_forward_refs validate model_computed_fields "
        "model_config model_construct model_copy model_dump model_dump_json model_extra model_fields "
        "model_fields_set model_json_schema "
        "model_parametrized_name model_post_init model_rebuild model_validate model_validate_json "
        "model_validate_strings __fields__".split()
    ),
}
for _enum in ("IntEnum", "StrEnum", "Flag", "IntFlag"):
    KNOWN_BASES["enum." + _enum] = KNOWN_BASES["enum.Enum"] + tuple(
        n for n in dir(str if _enum == "StrEnum" else int) if not n.startswith("__")
    )
KNOWN_BASES["pydantic.main.BaseModel"] = KNOWN_BASES["pydantic.BaseModel"]
_STANDARD = {
    "collections",
    "collections.abc",
    "threading",
    "logging",
    "concurrent.futures",
    "argparse",
    "json",
    "datetime",
    "pathlib",
    "contextlib",
    "queue",
    "string",
    "types",
    "decimal",
    "io",
    "functools",
    "random",
    "ast",
    "html.parser",
    "unittest",
}


_STARRED = {"typing", "enum", "dataclasses", "abc", "math", "os.path", "itertools", "operator", "warnings", "copy"}
# What the host's Python may have in typing and the agent's has not.
_NEWER_TYPING = set(
    "Concatenate LiteralString Never NotRequired ParamSpec ParamSpecArgs ParamSpecKwargs ReadOnly Required Self "
    "TypeAlias TypeAliasType TypeGuard TypeIs TypeVarTuple Unpack assert_never assert_type clear_overloads "
    "dataclass_transform get_overloads get_protocol_members is_protocol is_typeddict override reveal_type NoDefault "
    "NewType evaluate_forward_ref TypeForm".split()
)


def known_base(name: str) -> bool:
    """Whether the attributes of an external base are known."""
    return name in KNOWN_BASES or _standard(name) is not None


def _standard(name: str) -> Optional[type]:
    """A class of Python's own library by dotted name, from the few modules that are safe to load and often derived
    from.
    """
    module, _, last = name.rpartition(".")
    if module == "typing" and hasattr(collections.abc, last):
        module = "collections.abc"
    found = (
        getattr(importlib.import_module(module), last, None) if module in _STANDARD else getattr(builtins, name, None)
    )
    return found if isinstance(found, type) else None


def standard_exports(module: str) -> Optional[Set[str]]:
    """What ``from module import *`` brings, for a few modules of Python's own library that are safe to load."""
    if module not in _STANDARD | _STARRED:
        return None
    loaded = importlib.import_module(module)
    newer = _NEWER_TYPING if module == "typing" else set()
    return set(getattr(loaded, "__all__", [n for n in vars(loaded) if not n.startswith("_")])) | newer


def base_names(name: str) -> Set[str]:
    if name in KNOWN_BASES:
        return set(KNOWN_BASES[name])
    found = _standard(name)
    return set(dir(found)) if found is not None else set()
