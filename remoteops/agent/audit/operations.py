"""What Python itself does with an object of the provider: ``with``, ``for``, ``await``, ``len``, ``[]``, and stores
that a class refuses.
"""

from __future__ import annotations

import ast
from typing import Any, Optional, Tuple

from remoteops.agent.audit import plain
from remoteops.agent.audit import sites as S
from remoteops.agent.audit.flow import FlowScope
from remoteops.agent.audit.index import ClassInfo
from remoteops.agent.audit.modules import last_name
from remoteops.agent.audit.sites import Problem
from remoteops.agent.audit.specialcalls import SpecialCalls
from remoteops.agent.audit.values import NONE, ExternalInstance, Instance, Value, options

# Bases that bring no special method; any other external base may.
_PLAIN_BASES = {"object", "abc.ABC", "typing.Generic", "typing.Protocol", "typing_extensions.Protocol", "typing.Sized"}
_TOLD = {
    "__enter__": "'%s' object does not support the context manager protocol",
    "__aenter__": "'%s' object does not support the asynchronous context manager protocol",
    "__iter__": "'%s' object is not iterable",
    "__aiter__": "'async for' requires an object with __aiter__ method, got %s",
    "__await__": "object %s can't be used in 'await' expression",
    "__len__": "object of type '%s' has no len()",
    "__getitem__": "'%s' object is not subscriptable",
}


class Operations(SpecialCalls):
    """Judges operations. One that an object supports is no site: there is nothing to tell about it."""

    def on_operation(self, node: ast.AST, value: Value, names: Tuple[str, ...], scope: Any) -> None:
        """``names``: special methods of which one is enough; the first one is told."""
        if not isinstance(scope, FlowScope) or self.dead:
            return
        kinds = [o for o in options(value) if o != NONE]
        if not kinds or not all(self._lacks(o, names) for o in kinds):
            return
        first = kinds[0]
        info = getattr(first, "info", None)
        label = info.name if isinstance(info, ClassInfo) else plain.label(first)
        origin = getattr(first, "origin", None)
        made = info if isinstance(info, ClassInfo) else origin
        path = self.path_to(first) if isinstance(info, ClassInfo) else getattr(origin, "dotted", str(origin))
        site = self.site("call", node, scope, symbol=path, reached=path, extra=names[0])
        at = "%s:%d" % (made.module.file, made.unit.line) if hasattr(made, "unit") else ""  # type: ignore[union-attr]
        text = _TOLD[names[0]] % label
        problem = Problem("missing-attribute", names[0], error="TypeError", message=text, now=text, now_at=at)
        self.settle(site, S.BREAK, "", (problem,))

    def _lacks(self, option: Value, names: Tuple[str, ...]) -> bool:
        """Whether an object that came out of the provider surely has none of the special methods."""
        if isinstance(option, Instance):
            line = self.classes.lineage(option.info)
            if not any(self.in_provider(c.module) for c in line.classes) or set(line.external) - _PLAIN_BASES:
                return False
            below = self.descend(option.info) if not option.exact and self.descend is not None else []
            recipes = [self.constructors.family(c) for c in line.classes]
            return not set(recipes) - {"plain", "dataclass"} and all(
                self.classes.has(k, n)[0] is False for k in [option.info, *below] for n in names
            )
        origin, known = getattr(option, "origin", None), plain.names_of(option)
        if origin is None or known is None or isinstance(origin, str):
            return False
        if isinstance(option, ExternalInstance) and option.dotted == plain.NOTHING:
            return True
        if plain.label(option) == "coroutine":
            return "__await__" not in names
        sure = all(not self._supports(o, names) for o in options(self._inferred_result(origin, None, None)))
        return sure and not any(n in known for n in names)

    def _supports(self, option: Value, names: Tuple[str, ...]) -> bool:
        known = plain.names_of(option)
        return known is None or any(n in known for n in names)

    # -- stores ------------------------------------------------------------------------------------------------------

    def refused(self, node: ast.Attribute, base: Value, scope: FlowScope) -> bool:
        """Judges ``object.name = x``. True when every object that can stand there refuses it."""
        kinds = options(base)
        objects = [o for o in kinds if isinstance(o, Instance) and self.in_provider(o.info.module)]
        told = [self._refusal(o, node.attr) for o in objects]
        if not objects or len(objects) != len(kinds) or not all(told):
            return False
        info, text = objects[0].info, told[0]
        reached = self.path_to(objects[0]) + "." + node.attr
        site = self.site("patch", node, scope, symbol=info.dotted + "." + node.attr, reached=reached, extra="store")
        at = "%s:%d" % (info.module.file, info.unit.line)
        problem = Problem("missing-attribute", node.attr, error="AttributeError", message=text, now=text, now_at=at)
        self.settle(site, S.BREAK, "", (problem,))
        return True

    def _refusal(self, option: Instance, name: str) -> str:
        """Why an object does not take a value for an attribute; empty where it does, or may."""
        info = option.info
        if not option.exact:
            return ""
        line = self.classes.lineage(info)
        if any(self.classes.own(c, "__setattr__") for c in line.classes) or line.open:
            return ""
        if self.constructors.family(info) == "tuple":
            return "can't set attribute '%s' of a named tuple" % name
        if any(self._frozen(c) for c in line.classes):
            return "cannot assign to field '%s' of a frozen dataclass" % name
        member = self.classes.member(info, name)
        function = self.classes.function(member) if member is not None else None
        if member is not None and function is not None and function.head is not None:
            own = self.classes.own(member.owner, name)
            names = [last_name(d) for d in function.head.decorator_list]
            only = "property" in names and len(own) == 1
            return "property '%s' of '%s' object has no setter" % (name, info.name) if only else ""
        slotted = all(self._slots(c) is not None for c in line.classes) and not set(line.external) - _PLAIN_BASES
        if slotted and member is None and not self.classes.assigned(info, name):
            return "'%s' object has no attribute '%s' and no __dict__ for setting new attributes" % (info.name, name)
        return ""

    def _slots(self, info: ClassInfo) -> Optional[ast.expr]:
        """A class's ``__slots__``, where it is a display of strings without ``__dict__``."""
        member = self.classes.effective(self.classes.own(info, "__slots__"))
        value = getattr(member.node, "value", None) if member is not None else None
        plain_text = isinstance(value, (ast.Tuple, ast.List)) and all(
            isinstance(e, ast.Constant) and e.value != "__dict__" for e in value.elts
        )
        return value if plain_text else None

    def _frozen(self, info: ClassInfo) -> bool:
        header = self.classes.header(info)
        return any(
            isinstance(d, ast.Call)
            and last_name(d.func) == "dataclass"
            and any(k.arg == "frozen" and getattr(k.value, "value", None) is True for k in d.keywords)
            for d in (header.decorator_list if header is not None else [])
        )
