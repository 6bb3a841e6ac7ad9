"""Attributes of Python's own types: what an object of ``list``, ``dict``, ``str`` … has, and nothing else."""

from __future__ import annotations

import collections
import types
from typing import Any, FrozenSet, Optional

from remoteops.agent.audit.values import Const, ExternalInstance, Sequence, Value

# What newer Pythons than the agent's have: the host's own interpreter may be one of them.
NEWER = {"add_note", "__notes__", "is_integer", "removeprefix", "removesuffix", "bit_count", "from_number"}
NOTHING = "None"  # ExternalInstance of this name: what a function that returns nothing gives


def _names(*kinds: type) -> FrozenSet[str]:
    return frozenset(n for kind in kinds for n in dir(kind)) | NEWER


# One kind of Sequence stands for several types, so that only what none of them has is missing.
_ROWS = _names(
    list, tuple, set, frozenset, collections.deque, types.GeneratorType, type({}.keys()), type({}.values()), range
)
_TABLES = _names(dict, collections.OrderedDict, collections.Counter, collections.defaultdict, collections.ChainMap)
_KINDS = {"list": _ROWS, "tuple": _ROWS, "set": _ROWS, "dict": _TABLES, "coroutine": _names(types.CoroutineType)}
_TYPES = {kind.__name__: _names(kind) for kind in (str, int, float, bool, bytes, complex, bytearray)}
_TYPES[NOTHING] = frozenset(dir(None))


def names_of(value: Value) -> Optional[FrozenSet[str]]:
    """The attributes of a value of a plain type; None for any other value."""
    if isinstance(value, Sequence):
        return _KINDS.get(value.kind)
    if isinstance(value, ExternalInstance):
        return _TYPES.get(value.dotted)
    return _TYPES.get(type(value.value).__name__) if isinstance(value, Const) else None


def label(value: Value) -> str:
    """The type's name as an AttributeError tells it."""
    if isinstance(value, Sequence):
        return value.kind
    if isinstance(value, ExternalInstance):
        return "NoneType" if value.dotted == NOTHING else value.dotted
    return type(getattr(value, "value", value)).__name__


def marked(value: Value, origin: Any) -> Value:
    """The same value of a plain type, with the provider's function (or True: an attribute) that it came from."""
    if isinstance(value, (Sequence, ExternalInstance, Const)) and value.origin is None and names_of(value) is not None:
        return value._replace(origin=origin)
    return value
