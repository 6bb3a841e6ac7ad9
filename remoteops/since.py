"""Since which release a break exists: from the provider releases that are at hand, and from the rows of a matrix.

Only what one symbol tells is asked of a release (is the name there, is the parameter taken or required): a few modules
of each tree are read, nothing is audited again. What a symbol alone cannot tell gets no ``since``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from remoteops import sources
from remoteops.cache import cache_dir

MAX_TREES = 12  # releases looked at, the newest ones before the one audited
KINDS = ("unknown-kwarg", "missing-required", "missing-symbol", "moved-symbol", "missing-attribute")


def at_hand(package: str, *, cache: Path | None = None) -> list[sources.Tree]:
    """The releases of a package that were fetched before, oldest first. Asks nobody."""
    return sorted(sources.all_cached(package, cache=cache or cache_dir()), key=lambda tree: Version(tree.version))


def complete(document: dict[str, Any], trees: Sequence[sources.Tree]) -> None:
    """Give findings of the document ``since``: {"release": first that breaks, "fine": last before it that does not}.

    ``trees`` are releases of the provider, oldest first; those that are not older than the audited one are passed over.
    A finding that no release at hand is free of gets nothing.
    """
    from remoteops.agent.audit import baseline
    from remoteops.agent.audit.shapes import Provider

    provider = document["provider"]
    try:
        now = Version(provider.get("version") or "")
    except InvalidVersion:
        return
    waiting = {id(f): f for f in document["findings"] if f["confidence"] == "proved" and f["kind"] in KINDS}
    first = dict.fromkeys(waiting, str(now))
    older = [tree for tree in trees if Version(tree.version) < now][-MAX_TREES:]
    for tree in reversed(older):
        if not waiting:
            return
        source = Provider.open(provider["package"], tree.path)
        facts = baseline.facts(source, {finding["symbol"] for finding in waiting.values()})
        for key, finding in list(waiting.items()):
            broken = _broken(finding, facts[finding["symbol"]], source)
            if broken is None:
                del waiting[key]
            elif broken:
                first[key] = tree.version
            else:
                finding["since"] = {"release": first[key], "fine": tree.version}
                del waiting[key]


def _broken(finding: Mapping[str, Any], facts: Mapping[str, Any] | None, source: Any) -> bool | None:
    """Whether a release breaks in the same way; None when its symbol does not tell."""
    if finding["kind"] in ("missing-symbol", "moved-symbol"):
        return facts is None
    if finding["kind"] == "missing-attribute":
        owner = finding["symbol"].rpartition(".")[0]
        return None if source.definition(owner) is None else facts is None
    parameters = facts and facts.get("parameters")
    if facts is None or parameters is None or "**" in facts["signature"]:
        return None
    taken = finding["detail"] in parameters
    return not taken if finding["kind"] == "unknown-kwarg" else taken and parameters[finding["detail"]] is None


def ranges(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each consumer of a matrix: ``works``, the stretches of releases without a break, and ``breaks``, what breaks
    from which release to which (the last one None: to the newest that was audited).

    ``rows`` hold releases oldest first. A release that could not be audited ends no stretch.
    """
    found: dict[str, dict[str, Any]] = {}
    for consumer in dict.fromkeys(row["consumer"] for row in rows):
        mine = [row for row in rows if row["consumer"] == consumer and not row.get("error")]
        named = [row["provider"] for row in mine]
        works = _stretches([row["breaks"] == 0 for row in mine])
        broken: dict[tuple[Any, ...], list[bool]] = {}
        for number, row in enumerate(mine):
            for finding in row["findings"]:
                if finding["confidence"] != "risk":
                    key = tuple(finding[k] for k in ("file", "line", "kind", "symbol", "detail"))
                    broken.setdefault(key, [False] * len(mine))[number] = True
        found[consumer] = {
            "works": [[named[start], named[end]] for start, end in works],
            "breaks": [
                {
                    **dict(zip(("file", "line", "kind", "symbol", "detail"), key, strict=True)),
                    "since": named[start],
                    "until": named[end] if end < len(mine) - 1 else None,
                }
                for key, there in broken.items()
                for start, end in _stretches(there)
            ],
        }
    return found


def _stretches(flags: Sequence[bool]) -> list[tuple[int, int]]:
    text = "".join("x" if flag else "." for flag in flags)
    return [(match.start(), match.end() - 1) for match in re.finditer("x+", text)]


def text(since: Mapping[str, str]) -> str:
    """``since 0.12.0 (0.11.2 is fine)``: the releases between the two were not at hand."""
    return f"since {since['release']} ({since['fine']} is fine)"


def trees_of(folders: Sequence[str], package: str) -> list[sources.Tree]:
    """Local folders as releases, oldest first; a folder that tells no version is left out."""
    from remoteops.agent.audit.packages import locate

    found: list[tuple[Version, sources.Tree]] = []
    for folder in folders:
        tree = sources.local_tree(Path(folder), package)
        version = tree.version or locate(package, folder, None).version or ""
        with contextlib.suppress(InvalidVersion):
            found.append((Version(version), replace(tree, version=version)))
    return [tree for _version, tree in sorted(found, key=lambda pair: pair[0])]
