"""Where a missing name is now: the same definition elsewhere, or the same body under another name."""

from __future__ import annotations

import ast
import re
from typing import Any, Dict, List, Optional, Tuple

from remoteops.agent.audit.index import ClassInfo
from remoteops.agent.audit.record import Recorder
from remoteops.agent.audit.signatures import POSITIONAL, POSITIONAL_ONLY
from remoteops.agent.audit.sites import Site
from remoteops.agent.audit.values import options

Baseline = Optional[Recorder]


class Moved:
    """Searches the provider, and a baseline tree where there is one."""

    def __init__(self, recorder: Recorder, baseline: Baseline = None) -> None:
        self.recorder = recorder
        self.baseline = baseline
        self._symbols: Dict[str, Optional[Dict[str, str]]] = {}

    def symbol(self, dotted: str) -> Optional[Dict[str, str]]:
        """{"symbol": new dotted path, "at": "path:line"} of a module-level name, or None. Of several places the
        nearest.
        """
        if dotted not in self._symbols:
            self._symbols[dotted] = self._symbol(dotted)
        return self._symbols[dotted]

    def _symbol(self, dotted: str) -> Optional[Dict[str, str]]:
        index, provider = self.recorder.index, self.recorder.provider
        tree = index.trees[provider]
        old, _, name = dotted.rpartition(".")
        defines = re.compile(
            rb"^(?:class|def|async def)[ \t]+%s\b|^%s[ \t]*(?::[^=\n]+)?=" % (name.encode(), name.encode()), re.M
        )
        found: List[Tuple[int, str, str]] = []
        for module, path in index.grep(provider, name.encode()):
            if not defines.search(index.data(tree, path)):
                continue
            loaded = index.module(module)
            symbol = index.lookup(loaded, name) if loaded is not None else None
            if (
                symbol is None
                or symbol.kind not in ("class", "function", "variable")
                or symbol.name != module + "." + name
            ):
                continue
            if (
                symbol.kind == "variable"
                and not name.isupper()
                and symbol.binding is not None
                and symbol.binding.kind != "assign"
            ):
                continue
            unit = (
                symbol.klass.unit
                if symbol.klass is not None
                else symbol.function.unit
                if symbol.function is not None
                else None
            )
            line = unit.line if unit is not None else symbol.binding.line if symbol.binding is not None else 1
            found.append(
                (
                    -_shared(old, module) + (5 if "test" in module else 0),
                    module,
                    "%s:%d" % (loaded.file if loaded is not None else module, line),
                )
            )
        if not found:
            return self._module(dotted)
        found.sort()
        if len(found) > 1 and found[0][0] == found[1][0] and len(name) < 4:
            return None
        _distance, module, at = found[0]
        result = {"symbol": self._public(module, name), "at": at}
        if len(found) > 1:
            result["others"] = ", ".join(m for _d, m, _a in found[1:4])
        return result

    def _public(self, module: str, name: str) -> str:
        """The shortest parent package that gives the same name, unless it stands in the module itself only."""
        return module + "." + name

    def _module(self, dotted: str) -> Optional[Dict[str, str]]:
        """A module of the same last name elsewhere in the provider."""
        tree = self.recorder.index.trees[self.recorder.provider]
        name = dotted.rsplit(".", 1)[-1]
        found = [(m, p) for m, p in tree.files() if m.rsplit(".", 1)[-1] == name and m != dotted]
        if len(found) != 1 or len(name) < 4:
            return None
        return {"symbol": found[0][0], "at": tree.relative(found[0][1]) + ":1"}

    def attribute(self, site: Site, name: str) -> Optional[Dict[str, str]]:
        """The new name of a missing attribute: a member of the class whose body is that of the old one in the
        baseline.
        """
        if self.baseline is None or site.receiver is None:
            return None
        for option in options(site.receiver):
            info = getattr(option, "info", None)
            if isinstance(info, ClassInfo):
                renamed = self._renamed_member(info, name)
                if renamed is not None:
                    return renamed
        return None

    def _renamed_member(self, info: ClassInfo, name: str) -> Optional[Dict[str, str]]:
        assert self.baseline is not None
        module, rest = self.baseline.index.split(info.dotted)
        symbol = self.baseline.index.lookup(module, rest[0]) if module is not None and rest else None
        if symbol is None or symbol.klass is None:
            return None
        old = self.baseline.classes.member(symbol.klass, name)
        body = _body(old.unit.node()) if old is not None and old.unit is not None else None
        if body is None:
            return None
        classes = self.recorder.classes
        for klass in classes.lineage(info).classes:
            for unit in klass.unit.body().units:
                if (
                    unit.kind == "def"
                    and unit.name != name
                    and self.baseline.classes.member(symbol.klass, unit.name) is None
                    and _body(unit.node()) == body
                ):
                    return {"new": unit.name, "why": "same body", "at": "%s:%d" % (klass.module.file, unit.line)}
        return None

    def renamed_parameter(self, site: Site, keyword: str) -> Optional[Dict[str, str]]:
        """The new name of a dropped keyword: a parameter of the same position that the baseline has not."""
        if self.baseline is None or site.callee is None or site.callee.signature is None:
            return None
        before = self.baseline_signature(site)
        if before is None:
            return None
        now = [p for p in site.callee.signature.parameters if p.kind in (POSITIONAL, POSITIONAL_ONLY)]
        place = next((n for n, p in enumerate(before.parameters) if p.name == keyword), None)
        if place is None or place >= len(now):
            return None
        old, new = before.parameters[place], now[place]
        known = {p.name for p in before.parameters}
        if new.name in known or any(p.name == keyword for p in site.callee.signature.parameters):
            return None
        same = _dump(old.annotation) == _dump(new.annotation)
        return {"new": new.name, "why": "%s stands where %s stood" % (new.name, keyword)} if same else None

    def baseline_signature(self, site: Site) -> Any:
        """The signature that the callee of a site had in the baseline, or None."""
        if self.baseline is None:
            return None
        from remoteops.agent.audit.query import callable_at

        found = callable_at(self.baseline, site.symbol)
        return found.signature if found is not None else None


def _shared(one: str, other: str) -> int:
    """How many leading parts two dotted names have in common."""
    count = 0
    for left, right in zip(one.split("."), other.split(".")):
        if left != right:
            break
        count += 1
    return count


def _dump(node: Optional[ast.AST]) -> str:
    return ast.dump(node) if node is not None else ""


def _body(node: Optional[ast.AST]) -> Optional[str]:
    """A function's body as text, without its docstring; None for a trivial one."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    body = (
        node.body[1:]
        if isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
        else node.body
    )
    if not body or (len(body) == 1 and isinstance(body[0], (ast.Pass, ast.Raise))):
        return None
    return "\n".join(ast.dump(s) for s in body)
