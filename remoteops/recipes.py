"""Fixes: which edits resolve a finding. Mechanical ones follow from the finding; the rest are recipes (data)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import resources
from typing import Any

from remoteops.cache import load_yaml
from remoteops.errors import UsageError

__all__ = ["Recipe", "load", "mechanical", "recipe_for"]

Finding = Mapping[str, Any]
Edit = Mapping[str, Any]


@dataclass(frozen=True)
class Recipe:
    """``variants``: lists of edits; the first whose anchors are all there is taken. ``impossible``: why there is no
    fix.
    """

    id: str
    title: str
    resolves: tuple[Mapping[str, str], ...]
    variants: tuple[tuple[Edit, ...], ...]
    why: str = ""
    reference: str = ""
    impossible: str = ""
    risk: bool = False  # also applied for findings of confidence "risk"
    needs: tuple[str, ...] = field(default=())  # recipes that must be applied with it

    def matches(self, finding: Finding) -> bool:
        """Whether a pattern (kind, rule, symbol, detail, contract; globs) fits the finding."""
        return any(
            all(fnmatchcase(str(finding.get(key) or ""), wanted) for key, wanted in pattern.items())
            for pattern in self.resolves
        )


@functools.cache
def load() -> dict[str, Recipe]:
    """All recipes by id, read once from knowledge/recipes. Raises UsageError naming the file that is wrong."""
    found: dict[str, Recipe] = {}
    folder = resources.files("remoteops") / "knowledge" / "recipes"
    for entry in sorted(folder.iterdir(), key=lambda path: path.name):
        if not entry.name.endswith(".yaml"):
            continue
        raw = load_yaml(entry)
        try:
            recipe = Recipe(
                id=raw["id"],
                title=raw["title"],
                resolves=tuple(raw["resolves"]),
                variants=tuple(tuple(variant["edits"]) for variant in raw.get("variants", ())),
                why=raw.get("why", ""),
                reference=raw.get("reference", ""),
                impossible=raw.get("impossible", ""),
                risk=bool(raw.get("risk")),
                needs=tuple(raw.get("needs", ())),
            )
        except (KeyError, TypeError) as error:
            raise UsageError(f"recipe {entry.name} lacks {error}", tried="load the recipes") from error
        found[recipe.id] = recipe
    return found


def recipe_for(finding: Finding, recipes: Mapping[str, Recipe]) -> Recipe | None:
    """The recipe that the finding names, else the first that recognises it."""
    named = str((finding.get("fix") or {}).get("recipe"))
    if named in recipes:
        return recipes[named]
    return next((recipe for recipe in recipes.values() if recipe.matches(finding)), None)


def mechanical(finding: Finding) -> Edit | None:
    """The edit that follows from a proved finding alone, or None.

    An edit that the audit proposes is taken as it is. Otherwise: an unknown keyword is dropped, a moved symbol is
    imported
    from where it is now. A required argument or a missing attribute needs evidence that only the audit or a recipe has.
    """
    fix = finding.get("fix") or {}
    if fix.get("edit"):
        return _proposed(finding, fix)
    kind, symbol, detail = finding.get("kind"), str(finding.get("symbol")), str(finding.get("detail"))
    name = _name(detail)
    if kind == "unknown-kwarg" and name.isidentifier():
        return {"edit": "drop-keyword", "call": callee(symbol), "keyword": name}
    if kind == "moved-symbol":
        target = finding.get("moved_to") or detail.split(" ")[-1]
        if target.replace(".", "").replace("_", "a").isalnum():
            name = symbol.rpartition(".")[2]
            return {
                "edit": "rename-import",
                "name": symbol,
                "to": target if target.endswith("." + name) else f"{target}.{name}",
            }
    return None


def _proposed(finding: Finding, fix: Mapping[str, Any]) -> dict[str, Any]:
    """An edit that the audit proposes ("old" and "new" are its names for both sides of a rename), with what the finding
    says besides."""
    edit, symbol, detail = fix["edit"], str(finding.get("symbol")), _name(str(finding.get("detail")))
    known: dict[str, dict[str, Any]] = {
        "drop-keyword": {"call": callee(symbol), "keyword": detail},
        "add-keyword": {"call": callee(symbol), "keyword": detail},
        "rename-keyword": {"call": callee(symbol), "keyword": fix.get("old", detail)},
        "rename-attribute": {"attribute": str(fix.get("old", symbol)).rpartition(".")[2]},
        "rename-import": {"name": fix.get("old", symbol)},
    }
    found = {**known.get(edit, {}), **{key: value for key, value in fix.items() if key not in ("old", "new")}}
    if "new" in fix:
        found["to"] = str(fix["new"]).rpartition(".")[2] if edit == "rename-attribute" else fix["new"]
    return found


def _name(detail: str) -> str:
    """The parameter or attribute that a detail speaks of ("block_size", "old: renamed to new")."""
    return detail.partition(":")[0].strip()


def callee(symbol: str) -> str:
    """The name under which a symbol is called: a class for its constructor."""
    parts = symbol.split(".")
    return parts[-2] if parts[-1] in ("__init__", "__new__", "__call__") and len(parts) > 1 else parts[-1]
