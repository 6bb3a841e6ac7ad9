"""Records sites during the walk and judges each: does the name exist, does the call fit."""

from __future__ import annotations

import ast
import re
from typing import Any, List, Optional, Tuple

from remoteops.agent.audit import plain
from remoteops.agent.audit import sites as S
from remoteops.agent.audit.attributes import Hit
from remoteops.agent.audit.flow import FlowScope
from remoteops.agent.audit.index import ClassInfo, FunctionInfo
from remoteops.agent.audit.keep import Store
from remoteops.agent.audit.modules import last_name
from remoteops.agent.audit.operations import Operations
from remoteops.agent.audit.signatures import unparse
from remoteops.agent.audit.sites import Problem, Site
from remoteops.agent.audit.values import (
    NONE,
    BoundMethod,
    ClassValue,
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
    join,
    options,
)

MANY = 20
NEARLY_ALL = 0.9  # of the classes that can stand somewhere: then it breaks for the user, whatever his class


class Recorder(Operations):
    """Judges attributes, calls and stores as they are met."""

    # -- keeping -----------------------------------------------------------------------------------------------------

    # -- imports -----------------------------------------------------------------------------------------------------

    # -- attributes --------------------------------------------------------------------------------------------------

    def on_attribute(self, node: ast.Attribute, base: Value, scope: FlowScope) -> Optional[Value]:
        if isinstance(node.value, ast.Call) and isinstance(base, Sequence) and base.kind == "coroutine":
            self._not_awaited(node, node.value, scope)
        if not isinstance(node.ctx, ast.Load):
            return None
        found = self.looked_up(node, node.value, node.attr, base, scope)
        if found is None or plain.names_of(found) is None:
            return found
        member = self.attribute(base, node.attr).hits[0].member
        read = self.classes.function(member) if member is not None else None
        return plain.marked(found, read or self.path_to(base) + "." + node.attr)

    def looked_up(
        self, node: ast.expr, receiver: ast.expr, name: str, base: Value, scope: FlowScope
    ) -> Optional[Value]:
        kinds = [o for o in options(base) if o != NONE]
        if kinds and all(getattr(o, "origin", None) is not None for o in kinds):
            return self._plain_attribute(node, receiver, name, kinds, scope)
        concerned = [o for o in options(base) if self.touches(o) or self._inherits(o)]
        if not concerned:
            return None
        access = self.attribute(base, name)
        hits = [h for h in access.hits if any(h.option is o for o in concerned)]
        own = [h for h in hits if not self._ours(h)]
        if own and len(own) == len(hits):
            return access.value
        hits = [h for h in hits if self._ours(h)]
        if not hits:
            return None
        first = next((h for h in hits if h.status == "missing"), hits[0])
        path = self.path_to(first.option)
        reached = path + "." + name if path else "." + name
        site = self.site("attribute", node, scope, symbol=first.target or reached, reached=reached)
        site.receiver, site.value = base, access.value
        if isinstance(access.value, (ClassValue, FunctionValue)) and isinstance(base, ModuleValue):
            self.reached.setdefault(id(access.value.info), reached)
        if self._known_present(receiver, name, scope):
            self.settle(site, S.OK)
            return access.value
        self._judge_attribute(site, name, hits, access.hits, base)
        if all(isinstance(h.option, Unknown) for h in hits):
            return Unknown(False, getattr(hits[0].option, "via", "") + "." + name)
        return access.value

    def _not_awaited(self, node: ast.Attribute, call: ast.Call, scope: FlowScope) -> None:
        """An attribute of what an async function of the provider returns, without ``await``."""
        functions = [o for o in options(self.quiet(call.func, scope)) if isinstance(o, FunctionValue)]
        if not functions or node.attr in ("send", "throw", "close") or not self.touches(functions[0]):
            return
        symbol = functions[0].info.dotted
        site = self.site("attribute", node, scope, symbol=symbol, reached=symbol + "." + node.attr)
        message = "'coroutine' object has no attribute '%s': %s is async" % (node.attr, functions[0].info.name)
        at = "%s:%d" % (functions[0].info.module.file, functions[0].info.unit.line)
        problem = Problem(
            "missing-attribute", node.attr, error="AttributeError", message=message, now=message, now_at=at
        )
        self.settle(site, S.BREAK, "", (problem,))

    def _plain_attribute(
        self, node: ast.expr, receiver: ast.expr, name: str, kinds: List[Value], scope: FlowScope
    ) -> Optional[Value]:
        """An attribute of a list, dict, str … (or None) that came out of the provider."""
        value = self.attribute(join(kinds), name).value
        lacking = [o for o in kinds if name not in (plain.names_of(o) or ())]
        if lacking and len(lacking) < len(kinds):
            return value  # which of them it is, a test may have told
        origin = getattr(kinds[0], "origin", None)
        path = origin.dotted if isinstance(origin, FunctionInfo) else str(origin)
        site = self.site("attribute", node, scope, symbol=path + "." + name, reached=path + "." + name)
        if not lacking or self._known_present(receiver, name, scope):
            self.settle(site, S.OK)
            return value
        # What only the text of an exception asks for fails where something else has failed before.
        telling = isinstance(self.statement, ast.Raise)
        sure = isinstance(origin, FunctionInfo) and not telling and self._surely_lacks(origin, name, lacking[0])
        what = plain.label(lacking[0])
        now = "%s gives a %s" % (path, what)
        at = "%s:%d" % (origin.module.file, origin.unit.line) if isinstance(origin, FunctionInfo) else ""
        message = "'%s' object has no attribute '%s'" % (what, name)
        problem = Problem(
            "missing-attribute", name, error="AttributeError", message=message, now=now, now_at=at, sure=sure
        )
        self.settle(site, S.BREAK if sure else S.RISK, "" if sure else "by its declared type", (problem,))
        return value

    def _surely_lacks(self, origin: FunctionInfo, name: str, option: Value) -> bool:
        """Whether what the body returns bears out the declared type."""
        if isinstance(option, Sequence) and option.kind == "coroutine":
            return True
        found = options(self._inferred_result(origin, None, None))
        return all(o == NONE or name not in (plain.names_of(o) or (name,)) for o in found)

    def eval_call(self, node: ast.Call, scope: Any) -> Value:
        value = super().eval_call(node, scope)
        if not isinstance(scope, FlowScope):
            return value
        functions = [o for o in options(self.evaluate(node.func, scope)) if isinstance(o, FunctionValue)]
        if len(functions) != 1 or not self.in_provider(functions[0].info.module):
            return value
        origin = functions[0].info
        if value == NONE and self._returns_nothing(functions[0]):
            return ExternalInstance(plain.NOTHING, origin=origin)
        if value == NONE and origin.head is not None and origin.head.returns is None:
            return Unknown(True, "the result of %s" % origin.name)  # a stub, or what another class does otherwise
        if isinstance(value, Sequence) and value.kind == "coroutine":
            inner = join([plain.marked(o, origin) for o in options(value.each)]) if value.each is not None else None
            return value._replace(each=inner, origin=origin if _plainly_async(origin) else None)
        return join([plain.marked(o, origin) for o in options(value)])

    def _returns_nothing(self, value: FunctionValue) -> bool:
        """Whether a function surely gives None: its body is there, returns nothing, and no class below has another."""
        function, node = value.info, value.info.node
        signature = self.decorators.signature(function)
        if node is None or signature is None or signature.doubt or not _does_something(node):
            return False
        bound = value.bound
        if isinstance(bound, Instance) and not bound.exact and self.descend is not None:
            return not any(self.classes.own(k, function.name) for k in self.descend(bound.info))
        return True

    def _known_present(self, receiver: ast.expr, name: str, scope: FlowScope) -> bool:
        at: Any = scope
        text = unparse(receiver)
        while isinstance(at, FlowScope):
            if (text, name) in at.present:
                return True
            at = at.outer
        return False

    def _judge_attribute(
        self, site: Site, name: str, hits: List[Hit], everything: Tuple[Hit, ...], base: Value
    ) -> None:
        missing = [h for h in hits if h.status == "missing" and not self._put_there(h.option, name)]
        found = [h for h in everything if h.status == "found"]
        unsure = [h for h in hits if h.status == "unsure"]
        partly = next((h for h in hits if h.status == "partly"), None)
        if missing and any(isinstance(h.option, (Unknown, ExternalInstance)) for h in everything):
            self.settle(
                site,
                S.UNRESOLVED,
                "may be a %s, which lacks it, or something that is not known" % _label(missing[0].option),
            )
            return
        # Of the classes of a declared union one that has it is enough; of many found by search a few may be strays.
        needed = NEARLY_ALL if len(everything) > MANY or self.replacing else 1
        if len(missing) >= needed * len(everything) and missing and self._set_elsewhere(name, missing):
            self.settle(
                site, S.UNRESOLVED, "no class body or method sets %s, other code of %s does" % (name, self.provider)
            )
            return
        if missing:
            kinds = sorted({_label(h.option) for h in missing})
            message = _attribute_error(missing[0].option, name)
            sure = len(missing) >= needed * len(everything)
            all_lack = len(missing) == len(everything)
            lack = (
                "%d of %d classes that can stand here lack it: %s"
                % (len(missing), len(everything), ", ".join(kinds[:12]))
                if not all_lack
                else (
                    "no class that can stand here has it (%d of %d)" % (len(missing), len(everything))
                    if len(everything) > 1
                    else ""
                )
            )
            problem = Problem(
                "missing-attribute",
                name,
                error="AttributeError",
                message=message,
                sure=sure,
                now=lack,
                now_at=self._where(missing[0].option),
                extra={"classes": kinds},
            )
            self.settle(site, S.BREAK if sure else S.RISK, lack, (problem,))
        elif partly is not None:
            self._judge_partly(site, name, partly)
        elif unsure and not (found and all(isinstance(h.option, (Unknown, ExternalInstance)) for h in unsure)):
            self.settle(site, S.UNRESOLVED, unsure[0].reason)
        else:
            self.settle(site, S.OK)

    def _judge_partly(self, site: Site, name: str, hit: Hit) -> None:
        text = "%d of %d classes that can stand here lack it: %s" % (
            len(hit.lacking),
            hit.among,
            ", ".join(hit.lacking[:12]),
        )
        problem = Problem(
            "missing-attribute",
            name,
            error="AttributeError",
            message="'%s' object has no attribute '%s'" % (hit.lacking[0], name),
            sure=False,
            now=text,
            extra={"classes": list(hit.lacking)},
        )
        self.settle(site, S.RISK, text, (problem,))

    def _put_there(self, option: Value, name: str) -> bool:
        """Whether the consumer itself sets an attribute of that name on such an object."""
        if isinstance(option, ModuleValue):
            return (id(option.module), name) in self.put_on
        if not isinstance(option, (Instance, ClassValue)):
            return False
        return any((id(c), name) in self.put_on for c in self.classes.lineage(option.info).classes)

    def _where(self, option: Value) -> str:
        info = getattr(option, "info", None)
        if isinstance(info, ClassInfo):
            return "%s:%d" % (info.module.file, info.unit.line)
        return option.module.file + ":1" if isinstance(option, ModuleValue) else ""

    def _set_elsewhere(self, name: str, missing: List[Hit]) -> bool:
        """Whether the provider's code sets an attribute of that name on some other object than ``self``."""
        if all(isinstance(h.option, ModuleValue) for h in missing):
            return False
        word = re.escape(name.encode())
        stores = re.compile(rb"\.%s[ \t]*(?::[^=\n]+)?=(?!=)|setattr\([^,()\n]+,\s*[\"']%s[\"']" % (word, word))
        for _module, path in self.index.grep(self.provider, name.encode()):
            data = self.index.data(self.index.trees[self.provider], path)
            for match in stores.finditer(data):
                if match.group().startswith(b"setattr"):
                    return True
                begin = data.rfind(b"\n", 0, match.start()) + 1
                receiver = re.split(rb"[^\w.]", data[begin : match.start()])[-1]
                if receiver not in (b"self", b"cls", b"") and not receiver.startswith((b"self.", b"cls.")):
                    return True
        return False

    def _inherits(self, option: Value) -> bool:
        """Whether an object or class of the consumer derives from a provider's class (or is mixed into one)."""
        if not isinstance(option, (Instance, ClassValue, SuperValue)):
            return False
        return bool(self.hosts.get(id(option.info))) or any(
            self.in_provider(c.module) for c in self.classes.lineage(option.info).classes[1:]
        )

    def _ours(self, hit: Hit) -> bool:
        """Whether a hit says something about the provider (not about what the consumer itself defines)."""
        option = hit.option
        if isinstance(option, (Instance, ClassValue)) and not self.in_provider(option.info.module):
            if hit.member is not None:
                return self.in_provider(hit.member.owner.module)
            return hit.status != "found" or hit.target.split(".")[0] == self.provider
        return True

    # -- calls -------------------------------------------------------------------------------------------------------

    # -- stores and classes ------------------------------------------------------------------------------------------

    def on_store(self, node: ast.Attribute, value: Value, scope: FlowScope) -> None:
        base = self.evaluate(node.value, scope)
        if not self.muted and self.refused(node, base, scope):
            return
        self.note_put(base, node.attr)
        if not self.recording or self.muted or self.dead:
            return
        callable_value = any(
            isinstance(o, (FunctionValue, BoundMethod, LambdaValue, PartialValue)) for o in options(value)
        )
        touched = [o for o in options(base) if self.touches(o)]
        site: Optional[Site] = None
        if any(isinstance(o, (ModuleValue, ClassValue)) for o in touched) or (touched and callable_value):
            hit = self.attribute(touched[0], node.attr).hits[0]
            reached = self.path_to(touched[0]) + "." + node.attr
            site = self.site("patch", node, scope, symbol=hit.target or reached, reached=reached)
            site.receiver = base
            if hit.status == "missing":
                self.settle(
                    site,
                    S.UNRESOLVED,
                    "adds %s to %s, or replaces what is not there any more" % (node.attr, _label(touched[0])),
                )
            elif hit.status == "unsure":
                self.settle(site, S.UNRESOLVED, hit.reason)
        unknown = [o for o in options(base) if isinstance(o, (Unknown, ExternalInstance))]
        if callable_value and (touched or (unknown and any(isinstance(o, BoundMethod) for o in options(value)))):
            self.stores.append(Store(node, base, value, scope, site))

    def on_use(self, node: ast.Attribute, scope: FlowScope) -> None:
        self.looked_up(node, node.value, node.attr, self.evaluate(node.value, scope), scope)

    def on_class(self, info: ClassInfo, scope: FlowScope) -> None:
        if self.recording and not self.dead:
            self.classes_met[id(info)] = info


def _does_something(node: Any) -> bool:
    """Whether a function's body is more than a docstring, ``...`` or ``raise``: a stub says nothing of its result."""
    body = [s for s in node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    return any(not isinstance(s, (ast.Pass, ast.Raise)) for s in body) and not any(
        isinstance(n, (ast.Yield, ast.YieldFrom)) or (isinstance(n, ast.Raise) and "NotImplemented" in unparse(n.exc))
        for n in ast.walk(node)
    )


def _plainly_async(function: FunctionInfo) -> bool:
    """Whether a call surely gives a coroutine: no decorator may have made something else of it."""
    node = function.head
    known = ("staticmethod", "classmethod", "abstractmethod", "override", "final")
    return isinstance(node, ast.AsyncFunctionDef) and all(last_name(d) in known for d in node.decorator_list)


def _label(option: Value) -> str:
    info = getattr(option, "info", None)
    if isinstance(info, (ClassInfo, FunctionInfo)):
        return info.name
    return option.module.name if isinstance(option, ModuleValue) else type(option).__name__


def _attribute_error(option: Value, name: str) -> str:
    if isinstance(option, ModuleValue):
        return "module '%s' has no attribute '%s'" % (option.module.name, name)
    if isinstance(option, ClassValue):
        return "type object '%s' has no attribute '%s'" % (option.info.name, name)
    return "'%s' object has no attribute '%s'" % (_label(option), name)


__all__ = ["Recorder", "Store"]
