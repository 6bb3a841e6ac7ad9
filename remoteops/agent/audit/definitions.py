"""Classes, functions and names as the index hands them out."""

from __future__ import annotations

import re
from typing import Dict, List, Optional

from remoteops.agent.audit.modules import Binding, Module
from remoteops.agent.audit.syntax import FunctionNode, Unit


class ClassInfo:
    """A class definition: where it stands and its unit. Facts about it are worked out in ``classes``."""

    __slots__ = ("facts", "module", "name", "qualname", "scope", "unit")

    def __init__(self, module: Module, qualname: str, unit: Unit, scope: Optional[FunctionInfo] = None) -> None:
        self.module = module
        self.qualname = qualname
        self.name = unit.name
        self.unit = unit
        self.scope = scope
        self.facts: Dict[str, object] = {}

    @property
    def dotted(self) -> str:
        return self.module.name + "." + self.qualname

    def __repr__(self) -> str:
        return "<class %s>" % self.dotted


class FunctionInfo:
    """A function or method definition; ``owner`` is its class, ``outer`` the function it is nested in."""

    __slots__ = ("facts", "module", "name", "outer", "owner", "qualname", "unit")

    def __init__(
        self,
        module: Module,
        qualname: str,
        unit: Unit,
        owner: Optional[ClassInfo] = None,
        outer: Optional[FunctionInfo] = None,
    ) -> None:
        self.module = module
        self.qualname = qualname
        self.name = unit.name
        self.unit = unit
        self.owner = owner
        self.outer = outer
        self.facts: Dict[str, object] = {}

    @property
    def node(self) -> Optional[FunctionNode]:
        """The whole definition, parsed."""
        return self.unit.function()

    @property
    def head(self) -> Optional[FunctionNode]:
        """The definition with an empty body: enough for signature, decorators and annotations."""
        return self.unit.head()

    @property
    def dotted(self) -> str:
        return self.module.name + "." + self.qualname

    def __repr__(self) -> str:
        return "<function %s>" % self.dotted


class Symbol:
    """What a name stands for. ``kind``: module, class, function, variable, external, dynamic (there, or perhaps
    there, but its nature is not known; ``reason`` says why)."""

    __slots__ = ("alternatives", "binding", "function", "kind", "klass", "module", "name", "reason")

    def __init__(
        self,
        kind: str,
        name: str,
        *,
        module: Optional[Module] = None,
        klass: Optional[ClassInfo] = None,
        function: Optional[FunctionInfo] = None,
        binding: Optional[Binding] = None,
        reason: str = "",
    ) -> None:
        self.kind = kind
        self.name = name
        self.module = module
        self.klass = klass
        self.function = function
        self.binding = binding
        self.reason = reason
        # Other definitions of the name, of which one counts depending on a condition that is not decided.
        self.alternatives: List[Symbol] = []

    @property
    def certain(self) -> bool:
        """Whether the name is surely there."""
        return not (self.kind == "dynamic" and self.reason)

    def __repr__(self) -> str:
        return "<%s %s>" % (self.kind, self.name)


def is_overload(unit: Unit) -> bool:
    """Whether a function stands under ``@overload`` (told from its text)."""
    masked = unit.source.masked
    if masked[unit.start : unit.start + 1] != "@":
        return False
    end = masked.find("def ", unit.start, unit.end)
    return re.search(r"@(?:\w+\.)*overload\b", masked[unit.start : end]) is not None
