"""What is known about a model and the releases on a host: shown beside the preflight, never a verdict."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from remoteops.cache import load_yaml


@functools.cache
def load(name: str) -> dict[str, Any]:
    """A knowledge file (``models``, ``layers``, ``profiles``, ``stalls``) as plain data."""
    return dict(load_yaml(resources.files("remoteops").joinpath(f"knowledge/{name}.yaml")))


def checks(found: Mapping[str, Any], env: Mapping[str, str]) -> list[dict[str, Any]]:
    """Preflight checks (ok None: advice) for the architecture and versions of a preflight document.

    ``env``: the environment the run will have. An architecture nothing is known about gives none.
    """
    shape = found.get("shape") or {}
    known = load("models")["architectures"].get(shape.get("architecture"))
    if known is None:
        return []
    advice = []
    for package, version in (found.get("versions") or {}).items():
        parsed = release(str(version or ""))
        since = (known.get("since") or {}).get(package)
        if parsed and since and parsed < release(str(since["release"])):
            advice.append(
                _check(f"{package} {version} is older than {since['release']}: {since['why']}", "a newer release")
            )
        for one in (known.get("avoid") or {}).get(package, ()):
            first, before = (release(str(bound)) for bound in one["releases"])
            if parsed and first <= parsed < before:
                advice.append(
                    _check(
                        f"{known['name']} on {package} {version}: {one['why']}", "another release, or the other engine"
                    )
                )
    for name, wanted in (known.get("env") or {}).items():
        if name not in env:
            needed = f"{name}={wanted['value']} in the workload's env"
            advice.append(_check(f"{name} is not set: {wanted['why']}", needed))
    return advice


def stall(line: str, quiet: float) -> str:
    """What is known about a start whose log said ``line`` last, ``quiet`` seconds ago; "" when that means nothing."""
    for known in load("stalls")["stalls"]:
        if quiet >= known["quiet"] and re.search(known["line"], line):
            return f"{known['why']}: {known['do']}"
    return ""


def release(version: str) -> tuple[int, ...]:
    """The release part of a version: "0.22.1rc1+cu129" -> (0, 22, 1); () for none."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def conventions(ids: list[int]) -> dict[str, list[int]]:
    """The same states' ids in every other convention that can name them all."""
    named = load("layers")["conventions"]
    moved = {name: [one + int(item["offset"]) for one in ids] for name, item in named.items() if item["offset"]}
    return {name: other for name, other in moved.items() if min(other, default=0) >= 0}


def _check(found: str, need: str) -> dict[str, Any]:
    return {"name": "known trouble", "ok": None, "found": found, "need": need, "hint": need, "kind": "PreflightFailed"}
