"""What ``value.name`` is: methods, properties, fields, attributes set in methods, module members."""

from __future__ import annotations

import ast
from typing import Callable, Dict, List, Optional

from remoteops.agent.audit.abstract import served_by_metaclass
from remoteops.agent.audit.bases import base_names
from remoteops.agent.audit.classes import Member
from remoteops.agent.audit.constructors import Constructors
from remoteops.agent.audit.decorators import Decorators
from remoteops.agent.audit.index import ClassInfo, FunctionInfo
from remoteops.agent.audit.modules import last_name
from remoteops.agent.audit.modulevalues import Access, Hit, ModuleValues, const_method, sequence_method
from remoteops.agent.audit.values import (
    NONE,
    UNKNOWN,
    BoundMethod,
    CallableValue,
    ClassValue,
    Const,
    External,
    ExternalInstance,
    FunctionValue,
    Instance,
    LambdaValue,
    ModuleValue,
    PartialValue,
    Sequence,
    SuperValue,
    Unknown,
    Value,
    Version,
    join,
    options,
    reaches,
)
from remoteops.agent.audit.versions import version_part


class Attributes(ModuleValues):
    """Attribute access. ``evaluate`` (an expression in a scope) comes from the class below."""

    decorators: Decorators
    constructors: Constructors
    # What to do when a class that may be a base of the real one lacks an attribute: set by ``subclasses``.
    descend: Optional[Callable[[ClassInfo], List[ClassInfo]]] = None
    # Classes into which a class is mixed at run time, by id of the mixin: set by ``strings``.
    hosts: Dict[int, List[ClassInfo]]

    def attribute(self, value: Value, name: str) -> Access:
        """Looks an attribute up on every option of a value."""
        hits = [self._hit(option, name) for option in options(value) if option != NONE or len(options(value)) == 1]
        hits = [h for h in hits if h is not None]
        found = join([h.value for h in hits]) if hits else UNKNOWN
        return Access(found, tuple(hits))

    def _hit(self, option: Value, name: str) -> Hit:
        if isinstance(option, ModuleValue):
            return self._of_module(option, name)
        if isinstance(option, Instance):
            return self._of_instance(option, name)
        if isinstance(option, ClassValue):
            return self._of_class(option, name)
        if isinstance(option, SuperValue):
            return self._of_super(option, name)
        if isinstance(option, External):
            return Hit(
                option,
                "unsure",
                External(option.dotted + "." + name, option.reach),
                option.dotted + "." + name,
                "%s is not at hand" % option.dotted,
            )
        if isinstance(option, ExternalInstance):
            return Hit(
                option,
                "unsure",
                Unknown(option.reach, "." + name),
                option.dotted + "." + name,
                "%s is not at hand" % option.dotted,
            )
        if isinstance(option, Sequence):
            return Hit(option, "unsure", sequence_method(option, name), "", "")
        if isinstance(option, (FunctionValue, PartialValue, BoundMethod, CallableValue)):
            return Hit(option, "unsure", UNKNOWN, "", "an attribute of a function")
        if isinstance(option, Version):
            return Hit(option, "unsure", version_part(option, name), "", "")
        if isinstance(option, Const):
            return Hit(option, "unsure", const_method(option, name), "", "")
        return Hit(
            option,
            "unsure",
            Unknown(reaches(option), "." + name),
            "",
            getattr(option, "via", "") or "its type is not known",
        )

    # -- modules -----------------------------------------------------------------------------------------------------

    # -- classes and objects -----------------------------------------------------------------------------------------

    def _of_instance(self, option: Instance, name: str) -> Hit:
        info = option.info
        if name == "__class__":
            return Hit(option, "found", ClassValue(info, option.exact), info.dotted)
        member = self.classes.member(info, name)
        only_init = member is not None and self._only_init(info, name)
        assigned: List[Member] = []
        if member is not None and not only_init:
            value = self.member_value(member, option)
            if member.kind in ("method", "class") or not (isinstance(value, Unknown) or value == NONE):
                return Hit(option, "found", value, member.owner.dotted + "." + name, member=member)
            assigned = self.classes.assigned(info, name)
            if not assigned:
                return Hit(option, "found", value, member.owner.dotted + "." + name, member=member)
        elif member is None:
            assigned = self.classes.assigned(info, name)
        if assigned:
            return Hit(
                option,
                "found",
                self._assigned_value(member, assigned, option),
                assigned[0].owner.dotted + "." + name,
                member=assigned[0],
            )
        has, reason = (False, "") if only_init else self.classes.has(info, name)
        reach = self.in_provider(info.module)
        if has:
            return Hit(option, "found", Unknown(reach, "%s.%s" % (info.dotted, name)), info.dotted + "." + name)
        hosted = self._of_hosts(option, name)
        if hosted is not None:
            return hosted
        if has is None:
            return Hit(
                option, "unsure", Unknown(reach, "%s.%s" % (info.dotted, name)), info.dotted + "." + name, reason
            )
        if not option.exact and self.descend is not None:
            below = self._below(option, name)
            if below is not None:
                return below
        return Hit(option, "missing", Unknown(reach, "%s.%s" % (info.dotted, name)), info.dotted + "." + name)

    def _below(self, option: Instance, name: str) -> Optional[Hit]:
        """The judgement on the classes derived from a declared one that lacks the attribute; None when none has it."""
        info = option.info
        assert self.descend is not None
        below = [k for k in self.descend(info) if not self.classes.is_abstract(k)]
        target = info.dotted + "." + name
        having = [k for k in below if self.classes.has(k, name)[0]]
        if not having:
            protocol = any(b.endswith(".Protocol") for b, _ in self.classes.bases(info))
            open_ones = [k for k in below if self.classes.has(k, name)[0] is None]
            if protocol or open_ones:
                return Hit(
                    option,
                    "unsure",
                    Unknown(True, target),
                    target,
                    "no class known to stand for %s shows it" % info.name,
                )
            return None
        lacking = tuple(sorted(k.name for k in below if self.classes.has(k, name)[0] is False))
        hits = [self._hit(Instance(k, True), name) for k in having]
        return Hit(
            option,
            "partly" if lacking else "found",
            join([h.value for h in hits]),
            target,
            member=hits[0].member,
            lacking=lacking,
            among=len(below),
        )

    def _only_init(self, info: ClassInfo, name: str) -> bool:
        """Whether a name is a constructor's parameter only (InitVar without default)."""
        if self.constructors.family(info) not in ("dataclass", "pydantic"):
            return False
        field = next((f for f in self.constructors.fields(info) if f.name == name), None)
        return (
            field is not None
            and field.extra == "initvar"
            and field.default is None
            and not self.classes.assigned(info, name)
        )

    def _of_hosts(self, option: Instance, name: str) -> Optional[Hit]:
        """The attribute in classes that this one is mixed into at run time."""
        hosts = self.hosts.get(id(option.info), [])
        if not hosts:
            return None
        hits = [self._of_instance(Instance(h, True), name) for h in hosts if h is not option.info]
        found = [h for h in hits if h.status == "found"]
        if found:
            return Hit(option, "found", join([h.value for h in found]), found[0].target, member=found[0].member)
        if any(h.status == "unsure" for h in hits):
            return Hit(option, "unsure", Unknown(True, name), hits[0].target, hits[0].reason)
        return Hit(option, "missing", Unknown(True, name), hits[0].target)

    def member_value(self, member: Member, receiver: Value) -> Value:
        """The value of a class member seen through an object or a class."""
        info = member.owner
        reach = self.in_provider(info.module)
        if member.kind == "class" and member.unit is not None:
            return ClassValue(self.index.class_info(info.module, member.unit, info.qualname + ".", info.scope))
        function = self.classes.function(member)
        if function is not None:
            flavour = self.decorators.flavour(function)
            if flavour == "property":
                if isinstance(receiver, ClassValue):
                    return UNKNOWN
                value = self.returned(function, receiver)
                return Unknown(reach, function.dotted) if value == UNKNOWN and reach else value
            if flavour == "staticmethod":
                return FunctionValue(function)
            if flavour == "classmethod":
                return FunctionValue(
                    function, ClassValue(receiver.info, receiver.exact) if isinstance(receiver, Instance) else receiver
                )
            return FunctionValue(function, None if isinstance(receiver, ClassValue) else receiver)
        if self.classes.is_enum(info) and not member.name.startswith("_") and isinstance(member.node, ast.Assign):
            return Instance(info, True)
        return self._class_level(member, reach, receiver)

    def _class_level(self, member: Member, reach: bool, receiver: Optional[Value] = None) -> Value:
        info, node = member.owner, member.node
        unknown = Unknown(reach, info.dotted + "." + member.name)
        if isinstance(node, ast.AnnAssign):
            value = self.annotation(node.annotation, info.module, info)
            if value != UNKNOWN:
                return value
        expression = getattr(node, "value", None)
        if isinstance(expression, ast.Call) and last_name(expression.func) in ("field", "Field"):
            return unknown
        if isinstance(expression, ast.expr) and isinstance(node, (ast.Assign, ast.AnnAssign)):
            scope = self.module_scope(info.module)
            value = self.evaluate(expression, scope)
            if isinstance(value, FunctionValue) and value.bound is None and isinstance(node, ast.Assign):
                plain = isinstance(receiver, Instance) and self.decorators.flavour(value.info) == "function"
                return value._replace(bound=receiver) if plain else value
            if isinstance(value, LambdaValue):
                value = value._replace(name=info.dotted + "." + member.name)
                plain = isinstance(receiver, Instance) and isinstance(node, ast.Assign)
                return BoundMethod(value, receiver) if plain and receiver is not None else value
            if any(isinstance(o, Instance) and self.classes.member(o.info, "__get__") for o in options(value)):
                return unknown
            if value != UNKNOWN:
                return value
            if isinstance(expression, ast.Name):
                other = self.classes.member(info, expression.id)
                if other is not None and other is not member and other.node is not node:
                    return self.member_value(other, Instance(info))
        return unknown

    def _assigned_value(self, member: Optional[Member], places: List[Member], receiver: Instance) -> Value:
        """The value of an attribute that methods set: its annotation, else all right-hand sides."""
        reach = self.in_provider(places[0].owner.module)
        memo: Dict[str, Value] = receiver.info.facts.setdefault("attributes", {})  # type: ignore[assignment]
        name = places[0].name
        if name in memo:
            return memo[name]
        memo[name] = Unknown(reach, name)
        found: List[Value] = []
        if member is not None:
            declared = self._class_level(member, reach)
            if not isinstance(declared, Unknown) and declared != NONE:
                found.append(declared)
        # A line that sets the attribute to a type it declares counts; what other lines put there is looked at as well.
        for place in places:
            function = (
                self.index.function_info(place.owner.module, place.method, place.owner.qualname + ".", place.owner)
                if place.method is not None
                else None
            )
            node = place.node
            if isinstance(node, ast.AnnAssign):
                declared = self.annotation(node.annotation, place.owner.module, place.owner)
                if declared != UNKNOWN:
                    found.append(declared)
                    continue
            if function is not None:
                found.append(self._right_side(node, name, function, receiver))
        value = join(found)
        memo[name] = (
            Unknown(reach, "%s.%s" % (receiver.info.dotted, name)) if value in (UNKNOWN, NONE) and reach else value
        )
        return memo[name]

    def _right_side(self, node: Optional[ast.AST], name: str, function: FunctionInfo, receiver: Instance) -> Value:
        """What a statement puts into ``self.name``."""
        scope = self.lazy_scope(function, receiver)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = self.evaluate(node.value, scope)
            for target in targets:
                if isinstance(target, ast.Attribute):
                    return value
                if isinstance(target, (ast.Tuple, ast.List)):
                    for place, element in enumerate(target.elts):
                        if isinstance(element, ast.Attribute) and element.attr == name:
                            return self.item(value, place, len(target.elts))
        if isinstance(node, ast.Call) and len(node.args) >= 2:
            return self.evaluate(node.args[-1], scope)
        return UNKNOWN

    def item(self, value: Value, place: int, total: int) -> Value:
        """Element ``place`` of what is unpacked."""
        found: List[Value] = []
        for option in options(value):
            if isinstance(option, Sequence) and option.parts is not None and len(option.parts) == total:
                found.append(option.parts[place])
            elif isinstance(option, Sequence) and option.kind != "dict":
                found.append(option.each if option.each is not None else join(option.parts or ()))
            elif isinstance(option, Instance) and self.constructors.family(option.info) == "tuple":
                fields = self.constructors.fields(option.info)
                found.append(self._hit(option, fields[place].name).value if place < len(fields) else UNKNOWN)
            else:
                found.append(Unknown(reaches(option), "an unpacked element"))
        return join(found)

    def _of_class(self, option: ClassValue, name: str) -> Hit:
        info = option.info
        reach = self.in_provider(info.module)
        member = self.classes.member(info, name)
        if name in ("__name__", "__qualname__", "__module__"):
            return Hit(option, "found", ExternalInstance("str"), info.dotted + "." + name)
        if member is not None and not (member.kind == "field" and not self._kept_on_class(info, name)):
            return Hit(
                option, "found", self.member_value(member, option), member.owner.dotted + "." + name, member=member
            )
        has, reason = self.classes.has(info, name, instance=False)
        if member is not None:
            return Hit(
                option, "unsure", Unknown(reach, name), info.dotted + "." + name, "a field without a class-level value"
            )
        if has:
            return Hit(option, "found", Unknown(reach, name), info.dotted + "." + name)
        reason = reason or served_by_metaclass(self.classes, info)
        if has is None or reason:
            return Hit(option, "unsure", Unknown(reach, name), info.dotted + "." + name, reason)
        if self.constructors.family(info) != "plain" and name.startswith("__"):
            return Hit(option, "found", Unknown(reach, name), info.dotted + "." + name)
        if (
            not option.exact
            and self.descend is not None
            and any(self.classes.has(k, name, instance=False)[0] for k in self.descend(info))
        ):
            return Hit(
                option,
                "unsure",
                Unknown(reach, name),
                info.dotted + "." + name,
                "a class derived from %s has it" % info.name,
            )
        return Hit(option, "missing", Unknown(reach, name), info.dotted + "." + name)

    def _kept_on_class(self, info: ClassInfo, name: str) -> bool:
        return self.constructors.family(info) in ("tuple", "struct") or self.classes.is_enum(info)

    def _of_super(self, option: SuperValue, name: str) -> Hit:
        line = self.classes.lineage(option.info)
        reach = any(self.in_provider(c.module) for c in line.classes[1:])
        for klass in line.classes[1:]:
            member = self.classes.effective(self.classes.own(klass, name))
            if member is not None:
                return Hit(
                    option,
                    "found",
                    self.member_value(member, option.receiver),
                    klass.dotted + "." + name,
                    member=member,
                )
        if name in ("__init__", "__new__") and len(line.classes) > 1 and reach:
            constructed = self.constructors.of(line.classes[1])
            if constructed.signature is not None and constructed.name not in ("__init__", "__new__"):
                return Hit(option, "found", CallableValue(NONE), line.classes[1].dotted + "." + name)
        if any(name in base_names(b) for b in line.external) or name in dir(object):
            return Hit(option, "found", CallableValue(UNKNOWN), name)
        if line.open or len(line.classes) == 1 or self.hosts.get(id(option.info)):
            return Hit(
                option,
                "unsure",
                Unknown(reach, name),
                option.info.dotted + "." + name,
                line.open or "no base of its own",
            )
        return Hit(option, "missing", Unknown(reach, name), line.classes[1].dotted + "." + name)


__all__ = ["Access", "Attributes", "Hit"]
