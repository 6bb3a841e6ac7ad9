"""The audit's knowledge on the operator's side: contracts, the rules and the page that explains each."""

from __future__ import annotations

import functools
import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any

from remoteops.cache import load_yaml

# Rules that need no contract. The first group follows from two source trees, the second from a third (the baseline),
# the last from the host's interpreter.
PROVED = (
    "missing-symbol",
    "moved-symbol",
    "unknown-kwarg",
    "missing-required",
    "too-many-positional",
    "missing-attribute",
    "override-mismatch",
)
BASELINE = ("changed-default", "changed-return", "new-raise")
RUNTIME = ("runtime-difference",)
KINDS = (*PROVED, "behaviour")
WHEN = ("import", "start-up", "first-batch", "silent")

_REQUIRED = {"id", "title", "when", "symbol", "detail", "error", "uses", "shape"}
_OPTIONAL = {
    "provider",
    "kind",
    "confidence",
    "was",
    "now",
    "now_from",
    "reference",
    "fix",
    "anchor",
    "absent",
    "cases",
    "needs_model",
}
_KNOWN = _REQUIRED | _OPTIONAL


@functools.cache
def contracts() -> tuple[dict[str, Any], ...]:
    """All contracts of knowledge/contracts, in file order, checked. Raises ValueError for one that is malformed.

    A fix that names a recipe which is not there is dropped, so that no finding promises a patch that does not exist.
    """
    recipes = recipe_ids()
    found: list[dict[str, Any]] = []
    for entry in sorted(_knowledge("contracts").iterdir(), key=lambda path: path.name):
        if entry.name.endswith((".yaml", ".yml")):
            for contract in load_yaml(entry)["contracts"]:
                _check(contract, entry.name)
                for part in (contract, *contract.get("cases", ())):
                    if part.get("fix", {}).get("recipe", "") not in ("", *recipes):
                        part["fix"] = None
                found.append(contract)
    ids = [contract["id"] for contract in found]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise ValueError(f"contract ids used twice: {', '.join(twice)}")
    return tuple(found)


@functools.cache
def recipe_ids() -> frozenset[str]:
    """Ids of the recipes in knowledge/recipes."""
    ids: set[str] = set()
    for entry in _knowledge("recipes").iterdir():
        if entry.name.endswith((".yaml", ".yml")):
            loaded = load_yaml(entry)
            records = loaded.get("recipes", [loaded]) if isinstance(loaded, dict) else loaded
            ids |= {record["id"] for record in records if isinstance(record, dict) and "id" in record}
    return frozenset(ids)


def all_rules() -> dict[str, str]:
    """Every rule id the output can carry, with a one-line title."""
    titles = {
        "missing-symbol": "the imported name is gone",
        "moved-symbol": "the imported name lives in another module now",
        "unknown-kwarg": "the callee takes no such keyword",
        "missing-required": "the callee wants an argument that is not passed",
        "too-many-positional": "more positional arguments than the callee takes",
        "missing-attribute": "the object has no such attribute or method",
        "override-mismatch": "an override or replaced method no longer fits its calls",
        "changed-default": "a parameter left unset has another default",
        "changed-return": "the annotated return type changed",
        "new-raise": "a called function can raise or assert something new",
        "runtime-difference": "the running interpreter and the sources disagree",
    }
    return {**titles, **{contract["id"]: contract["title"] for contract in contracts()}}


def page(rule: str) -> str:
    """The page of a rule, relative to the project: docs/rules/<rule>.md."""
    return f"docs/rules/{rule}.md"


def fingerprint() -> str:
    """A hash of all that decides a result: contracts, recipes, the audit's code. Cached results hang on it."""
    digest = hashlib.sha256(json.dumps(contracts(), sort_keys=True, default=str).encode())
    for entry in sorted(_knowledge("recipes").iterdir(), key=lambda path: path.name):
        digest.update(entry.read_bytes() if entry.is_file() else b"")
    for path in sorted((Path(__file__).parent / "agent" / "audit").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _knowledge(part: str) -> Any:
    return resources.files("remoteops") / "knowledge" / part


def _check(contract: dict[str, Any], file: str) -> None:
    name = f"{file}: contract {contract.get('id', '?')}"
    missing, unknown = _REQUIRED - contract.keys(), contract.keys() - _KNOWN
    if missing or unknown:
        raise ValueError(f"{name}: missing keys {sorted(missing)}, unknown keys {sorted(unknown)}")
    for part in (contract, *contract.get("cases", ())):
        if part.get("when", "silent") not in WHEN:
            raise ValueError(f"{name}: when is one of {WHEN}")
        if part.get("confidence", "contract") not in ("contract", "risk"):
            raise ValueError(f"{name}: confidence is contract or risk")
        if part.get("kind", "behaviour") not in KINDS:
            raise ValueError(f"{name}: kind is one of {KINDS}")
        if part.get("anchor", next(iter(contract["uses"]))) not in contract["uses"]:
            raise ValueError(f"{name}: anchor names no use")
