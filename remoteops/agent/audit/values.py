"""What an expression may evaluate to, as far as the sources tell."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple, Union

from remoteops.agent.audit.index import ClassInfo, FunctionInfo
from remoteops.agent.audit.modules import Module


class Unknown(NamedTuple):
    """Nothing is known. ``reach``: it came out of the provider, so that what is done with it is a site; ``via``
    says how.
    """

    reach: bool = False
    via: str = ""


class Const(NamedTuple):
    """``origin`` here and below: the provider's function that returned it, or True for one of its attributes."""

    value: Any
    origin: Any = None


class Version(NamedTuple):
    """A version of a package (its text), or of an unknown one."""

    text: Optional[str]
    package: str


class ModuleValue(NamedTuple):
    module: Module


class External(NamedTuple):
    """Something of a library whose source is not at hand, by dotted path."""

    dotted: str
    reach: bool = False


class ExternalInstance(NamedTuple):
    """An object of an external class. ``items`` are elements put into it, where that is known."""

    dotted: str
    reach: bool = False
    items: Optional[Value] = None
    origin: Any = None


class ClassValue(NamedTuple):
    info: ClassInfo
    exact: bool = True


class Instance(NamedTuple):
    """``exact``: made by calling the class; else an object of it or of a subclass. ``items``: what a container
    yields.
    """

    info: ClassInfo
    exact: bool = False
    items: Optional[Value] = None


class FunctionValue(NamedTuple):
    """``bound``: the object or class the first parameter is filled with, if it is."""

    info: FunctionInfo
    bound: Optional[Value] = None


class LambdaValue(NamedTuple):
    """``name``: the dotted name that it was given, where it has one."""

    node: Any
    scope: Any
    name: str = ""


class PartialValue(NamedTuple):
    target: Value
    positional: int
    keywords: Tuple[str, ...]
    open: bool = False


class BoundMethod(NamedTuple):
    """``types.MethodType(function, receiver)``."""

    function: Value
    receiver: Value


class SuperValue(NamedTuple):
    info: ClassInfo
    receiver: Value


class Sequence(NamedTuple):
    """A list, tuple, set, dict … ``parts``: each element, where known; ``each``: what all elements may be."""

    kind: str
    parts: Optional[Tuple[Value, ...]] = None
    each: Optional[Value] = None
    keys: Optional[Tuple[Any, ...]] = None
    origin: Any = None


class Union_(NamedTuple):
    options: Tuple[Value, ...]


class CallableValue(NamedTuple):
    """Something callable of which only the result is known."""

    result: Value


Value = Union[
    Unknown,
    Const,
    Version,
    ModuleValue,
    External,
    ExternalInstance,
    ClassValue,
    Instance,
    FunctionValue,
    LambdaValue,
    PartialValue,
    BoundMethod,
    SuperValue,
    Sequence,
    Union_,
    CallableValue,
]

UNKNOWN = Unknown()
NONE = Const(None)
MAX_OPTIONS = 160


def options(value: Value) -> Tuple[Value, ...]:
    return value.options if isinstance(value, Union_) else (value,)


MAX_DEPTH = 3
MAX_PARTS = 6


def key(value: Value, depth: int = 0) -> Any:
    """Something hashable by which two values count as the same. Bounded: what differs only deep inside counts as
    the same.
    """
    if depth > MAX_DEPTH:
        return type(value).__name__
    kind = type(value)
    if kind is Unknown or kind is External or kind is Version:
        return kind.__name__, value[:2]
    below = depth + 1
    if isinstance(value, Instance):
        return "i", id(value.info), value.exact, key(value.items, below) if value.items is not None else None
    if isinstance(value, ExternalInstance):
        return "e", value.dotted, value.reach, key(value.items, below) if value.items is not None else None
    if isinstance(value, Const):
        return "c", type(value.value).__name__, repr(value.value)
    if isinstance(value, ClassValue):
        return "k", id(value.info), value.exact
    if isinstance(value, FunctionValue):
        return "f", id(value.info), key(value.bound, below) if value.bound is not None else None
    if isinstance(value, ModuleValue):
        return "m", value.module.name
    if isinstance(value, Sequence):
        parts = tuple([key(p, below) for p in (value.parts or ())[:MAX_PARTS]])
        each = key(value.each, below) if value.each is not None else None
        return "s", value.kind, each, parts, len(value.parts or ()), value.parts is None, value.keys
    if isinstance(value, Union_):
        return ("u", len(value.options), *[key(o, below) for o in value.options[:MAX_PARTS]])
    return id(value)


def join(values: Iterable[Value]) -> Value:
    """One value for several possible ones."""
    values = list(values)
    if len(values) == 1:
        return values[0]
    seen: Dict[Any, Value] = {}
    for value in values:
        for option in options(value):
            seen.setdefault(key(option), option)
    found: List[Value] = list(seen.values())
    if len(found) > 1:
        # An unknown beside something known: keep both, so that nothing is claimed of all.
        inexact = {id(v.info) for v in found if isinstance(v, Instance) and not v.exact}
        found = [v for v in found if not (isinstance(v, Instance) and v.exact and id(v.info) in inexact)]
    if not found:
        return UNKNOWN
    if len(found) == 1:
        return found[0]
    return Union_(tuple(found[:MAX_OPTIONS]))


def reaches(value: Value) -> bool:
    """Whether an unknown value came out of the provider."""
    return any(isinstance(v, (Unknown, External, ExternalInstance)) and v.reach for v in options(value))


def elements(value: Value) -> Value:
    """What iterating over a value yields, for containers."""
    found: List[Value] = []
    for option in options(value):
        if isinstance(option, Sequence):
            if option.kind == "dict":
                found.append(join([Const(k) for k in option.keys]) if option.keys else UNKNOWN)
            else:
                found.append(each(option))
        elif isinstance(option, (Instance, ExternalInstance)) and option.items is not None:
            found.append(option.items)
        elif isinstance(option, (Unknown, External, ExternalInstance)) and option.reach:
            found.append(Unknown(True, "an element"))
        else:
            found.append(UNKNOWN)
    return join(found)


def each(value: Sequence) -> Value:
    """All elements (a dict's values) as one value."""
    parts = list(value.parts or ())
    if value.each is not None:
        parts.append(value.each)
    return join(parts) if parts else UNKNOWN
