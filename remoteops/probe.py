"""Will the libraries on a host work together? Audits consumer against provider, on a host or on local trees.

Results are the document ``remoteops.probe/1`` (docs/audit.md has its keys); nothing here prints.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from remoteops import rules, since, sources
from remoteops.door import using
from remoteops.errors import MissingPackage, TransferFailed, by_kind

if TYPE_CHECKING:
    from remoteops.schema import Host

Document = dict[str, Any]
AUTO = "auto"
CACHED = "cached"


class AgentLike(Protocol):
    """What is needed of ``remoteops.remote.Agent``."""

    def call(
        self,
        verb: str,
        request: dict[str, Any],
        *,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]: ...


def breaks(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Findings that will break: those that are proved or known by contract."""
    return [finding for finding in document["findings"] if finding["confidence"] in ("proved", "contract")]


def exit_code(document: Mapping[str, Any]) -> int:
    """1 if and only if a proved or contract finding breaks."""
    return 1 if breaks(document) else 0


def audit(
    consumer: str,
    provider: str,
    *,
    consumer_path: str | None = None,
    provider_path: str | None = None,
    baseline: str | None = CACHED,
    baseline_path: str | None = None,
    model: str | None = None,
    everything: bool = False,
    shell: bool = False,
    run: bool = False,
) -> Document:
    """Audit local trees, in this process.

    ``consumer`` and ``provider`` are import names when the paths (folders that hold the package) are given; otherwise
    specs for ``sources.fetch`` (``speculators==0.3.0``). ``baseline`` is a release of the provider, ``auto`` (what the
    consumer's own metadata pins, fetched), ``cached`` (the same if it was fetched before: no network) or None;
    ``baseline_path`` is a folder and wins; of several, joined by ``os.pathsep``, the first is the baseline, and all
    tell since which release a break exists (otherwise all releases that were fetched before do). Raises UsageError,
    MissingPackage, TransferFailed as ``sources.fetch`` does.
    """
    sides = []
    for name, path in ((consumer, consumer_path), (provider, provider_path)):
        if path is None:
            tree = sources.fetch(name)
            sides.append((tree.package, tree.path, tree.version))
        else:
            sides.append((name, path, ""))
    base = (
        sources.fetch(baseline, package=sides[1][0])
        if baseline not in (None, AUTO, CACHED) and not baseline_path
        else None
    )
    folders = [folder for folder in (baseline_path or "").split(os.pathsep) if folder]
    first = folders[0] if folders else base.path if base else None
    request = _request(*sides[0][:2], *sides[1][:2], first, model, everything)
    request["facts"] = baseline in (AUTO, CACHED) and not baseline_path
    document = _run(request)
    notes: list[str] = []
    if request["facts"]:
        _compare(document, str(baseline), notes)
    for side, (_, _, version) in zip(("consumer", "provider"), sides, strict=True):
        document[side]["version"] = document[side].get("version") or version or None
    if folders[1:]:
        since.complete(document, since.trees_of(folders, sides[1][0]))
    _finish(document, None, notes)
    if shell:
        from remoteops.agent.audit import shell as checks

        document["checks"] = checks.checks(document, run=run)
    return document


def audit_trees(
    consumer: sources.Tree, provider: sources.Tree, *, base: sources.Tree | None = None, model: str | None = None
) -> Document:
    """Audit two trees (and compare with a third) in this process."""
    place = base.path if base else None
    document = _run(_request(consumer.package, consumer.path, provider.package, provider.path, place, model, False))
    for side, tree in (("consumer", consumer), ("provider", provider)):
        document[side]["version"] = document[side].get("version") or tree.version or None
    _finish(document, None, [])
    return document


def probe(
    host: Any,
    *,
    consumer: str | None = None,
    provider: str | None = None,
    baseline: str | None = AUTO,
    model: str | None = None,
    everything: bool = False,
    runtime: bool = False,
    shell: bool = False,
    run: bool = False,
    agent: AgentLike | None = None,
    on_event: Callable[[dict[str, Any]], None] | None = None,
) -> Document:
    """Audit what is installed on a host.

    ``consumer`` and ``provider`` default to the host's workload. The agent reads the files of the host's venv (or
    interpreter); with ``runtime`` it also imports both there and compares signatures, with ``shell`` the document gets
    the plain commands that show each finding by hand, with ``run`` their output. An open ``agent`` is used when given.
    """
    with using(host, agent) as door:
        request = audit_request(host, model=model, everything=everything, consumer=consumer, provider=provider)
        document = door.call("audit", request, on_event=on_event)
        notes: list[str] = []
        if baseline:
            _compare(document, baseline, notes)
        if runtime:
            layer = door.call("audit.runtime", {**request, "symbols": _symbols(document)}, on_event=on_event)
            document["runtime"] = {key: value for key, value in layer.items() if key != "findings"}
            document["findings"] += layer["findings"]
        if shell:
            asked = {
                **request,
                "document": {key: document[key] for key in ("findings", "consumer", "provider")},
                "run": run,
            }
            document["checks"] = door.call("audit.shell", asked, on_event=on_event)["checks"]
    _finish(document, host.name, notes)
    return document


def audit_request(
    host: Host, *, model: str | None, everything: bool = False, consumer: str | None = None, provider: str | None = None
) -> dict[str, Any]:
    """The request of verb ``audit`` for a host. Whoever asks the same finds one entry in the host's cache: there is no
    other place that builds it."""
    return {
        "consumer": consumer or host.workload.consumer,
        "provider": provider or host.workload.provider,
        "consumer_path": None,
        "provider_path": None,
        "venv": host.venv,
        "state_dir": host.state_dir,
        "cache_dir": host.cache_dir,
        "contracts": [*rules.contracts()],
        "model": model,
        "all": everything,
        "facts": True,  # asked for always: they cost nothing
        "baseline_path": None,
    }


def find_baseline(
    baseline: str, requires: Sequence[str], provider: Mapping[str, Any], notes: list[str]
) -> sources.Tree | None:
    """The provider release the consumer was written for.

    ``auto`` and ``cached`` read the consumer's metadata; that it says nothing, or that the release cannot be had, goes
    into ``notes`` (a comparison nobody asked for must not fail the audit). A release that was named is fetched, or the
    error is raised.
    """
    package = provider["package"]
    if baseline not in (AUTO, CACHED):
        return sources.fetch(baseline, package=package)
    pinned = sources.pin(requires, (package, provider.get("distribution") or package))
    if pinned is None:
        notes.append(f"no baseline: the consumer's metadata names no release of {package}")
        return None
    if baseline == CACHED:
        found = sources.cached(pinned, package=package)
        if found is None:
            notes.append(f"no baseline: the consumer's metadata names {pinned}; --baseline auto fetches it")
        return found
    try:
        return sources.fetch(pinned, package=package)
    except (TransferFailed, MissingPackage) as error:
        notes.append(f"no baseline: {pinned} (from the consumer's metadata) could not be had: {error.message}")
        return None


def _compare(document: Document, baseline: str, notes: list[str]) -> None:
    """Compare the facts of the document with those of the baseline's sources, here (the tree need not travel)."""
    from remoteops.agent.audit import baseline as comparing

    base = find_baseline(baseline, document["consumer"].get("requires") or (), document["provider"], notes)
    if base is not None:
        comparing.complete(document, base.package, base.path, version=base.version)
    since.complete(document, since.at_hand(document["provider"]["package"]))


def _request(
    consumer: str,
    consumer_path: str,
    provider: str,
    provider_path: str,
    base: str | None,
    model: str | None,
    everything: bool,
) -> dict[str, Any]:
    return {
        "consumer": consumer,
        "provider": provider,
        "consumer_path": consumer_path,
        "provider_path": provider_path,
        "venv": None,
        "contracts": [*rules.contracts()],
        "baseline_path": base,
        "model": model,
        "all": everything,
    }


def _run(request: dict[str, Any]) -> Document:
    """The engine in this process; its errors become ours."""
    from remoteops.agent.audit import engine
    from remoteops.agent.protocol import AgentError

    try:
        return engine.audit(request)
    except AgentError as error:
        raise by_kind(error.kind)(error.message, tried=error.tried, hint=error.hint, **error.data) from None


def _finish(document: Document, host: str | None, notes: list[str]) -> None:
    document["host"] = host
    document.pop("facts", None)
    if notes:
        document["notes"] = [*document.get("notes", ()), *notes]


def _symbols(document: Mapping[str, Any]) -> list[str]:
    facts = document.get("facts") or {}
    return sorted(
        {
            *facts.get("symbols", ()),
            *(finding["symbol"] for finding in document["findings"] if finding["confidence"] == "proved"),
        }
    )


def split_spec(spec: str) -> tuple[str | None, str]:
    """``name=folder`` as (name, folder); anything else as (None, spec)."""
    found = re.fullmatch(r"([A-Za-z_]\w*)=(?!=)(.+)", spec)
    return (found[1], found[2]) if found else (None, spec)
