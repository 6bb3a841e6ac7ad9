"""Will the libraries on a host work together? Audits consumer against provider, on a host or on local trees.

Results are the document ``remoteops.probe/1`` (docs/audit.md has its keys); nothing here prints.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from remoteops import rules, sources
from remoteops.errors import MissingPackage, RemoteOpsError, TransferFailed

Document = dict[str, Any]
AUTO = "auto"


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
    baseline: str | None = AUTO,
    baseline_path: str | None = None,
    model: str | None = None,
    everything: bool = False,
    shell: bool = False,
    run: bool = False,
) -> Document:
    """Audit local trees, in this process.

    ``consumer`` and ``provider`` are import names when the paths (folders that hold the package) are given; otherwise
    specs for ``sources.fetch`` (``speculators==0.3.0``). ``baseline`` is a spec of the provider, ``auto`` (what the
    consumer's own metadata pins; left out quietly when it cannot be had) or None; ``baseline_path`` a folder that
    wins over it. Raises UsageError, MissingPackage, TransferFailed as ``sources.fetch`` does.
    """
    consumer_tree = sources.local_tree(_folder(consumer_path), consumer) if consumer_path else sources.fetch(consumer)
    provider_tree = sources.local_tree(_folder(provider_path), provider) if provider_path else sources.fetch(provider)
    notes: list[str] = []
    base: sources.Tree | None = None
    if baseline_path:
        base = sources.local_tree(_folder(baseline_path), provider_tree.package)
    elif baseline:
        base = find_baseline(baseline, consumer_tree.requires, provider_tree, notes)
    return audit_trees(
        consumer_tree, provider_tree, base=base, model=model, everything=everything, shell=shell, run=run, notes=notes
    )


def audit_trees(
    consumer: sources.Tree,
    provider: sources.Tree,
    *,
    base: sources.Tree | None = None,
    model: str | None = None,
    everything: bool = False,
    shell: bool = False,
    run: bool = False,
    notes: list[str] | None = None,
) -> Document:
    """Audit two trees (and compare with a third) in this process."""
    from remoteops.agent.audit import engine

    request = {
        "consumer": consumer.package,
        "provider": provider.package,
        "consumer_path": consumer.path,
        "provider_path": provider.path,
        "venv": None,
        "contracts": [*rules.contracts()],
        "baseline_path": base.path if base else None,
        "model": model,
        "all": everything,
    }
    document = engine.audit(request)
    for side, tree in (("consumer", consumer), ("provider", provider), ("baseline", base)):
        if tree is not None and document.get(side) and not document[side].get("version"):
            document[side]["version"] = tree.version or None
    document["host"] = None
    _notes(document, notes)
    if shell:
        from remoteops.agent.audit import shell as checks

        document["checks"] = checks.checks(document, run=run)
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
    with _agent(host, agent) as door:
        request = {
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
            "facts": bool(baseline),
        }
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
    document["host"] = host.name
    document.pop("facts", None)
    _notes(document, notes)
    return document


def find_baseline(
    baseline: str, requires: tuple[str, ...], provider: sources.Tree, notes: list[str]
) -> sources.Tree | None:
    """The provider release the consumer was written for.

    ``auto`` reads the consumer's metadata; that it says nothing, or that the release cannot be had, goes into ``notes``
    (a question nobody asked must not fail the audit). A spec that was given is fetched or the error is raised.
    """
    if baseline != AUTO:
        return sources.fetch(baseline, package=provider.package)
    pinned = sources.pin(requires, (provider.package, provider.distribution))
    if pinned is None:
        notes.append("no baseline: the consumer's metadata names no release of " + provider.package)
        return None
    try:
        return sources.fetch(pinned, package=provider.package)
    except (TransferFailed, MissingPackage) as error:
        notes.append(f"no baseline: {pinned} (from the consumer's metadata) could not be had: {error.message}")
        return None


def _compare(document: Document, baseline: str, notes: list[str]) -> None:
    """Compare the facts that the agent sent with those of the baseline's sources, here (the tree need not travel)."""
    from remoteops.agent.audit import baseline as comparing

    provider = document["provider"]
    stand_in = sources.Tree(
        provider["package"], provider.get("version") or "", "", provider.get("distribution") or provider["package"], ""
    )
    try:
        base = find_baseline(baseline, tuple(document["consumer"].get("requires") or ()), stand_in, notes)
    except RemoteOpsError as error:
        notes.append(f"no baseline: {error.message}")
        return
    if base is not None:
        comparing.complete(document, base.package, base.path, version=base.version)


def _symbols(document: Mapping[str, Any]) -> list[str]:
    facts = document.get("facts") or {}
    return sorted(
        {
            *facts.get("symbols", ()),
            *(finding["symbol"] for finding in document["findings"] if finding["confidence"] == "proved"),
        }
    )


def _notes(document: Document, notes: list[str] | None) -> None:
    if notes:
        document["notes"] = [*document.get("notes", ()), *notes]


def _folder(path: str | None) -> Any:
    from pathlib import Path

    folder = Path(path or ".").expanduser()
    if not folder.is_dir():
        raise MissingPackage(f"no such folder: {folder}", hint="give the folder that holds the package's folder")
    return folder


@contextlib.contextmanager
def _agent(host: Any, agent: AgentLike | None) -> Iterator[AgentLike]:
    if agent is not None:
        yield agent
        return
    from remoteops.remote import open_agent

    with open_agent(host) as opened:
        yield opened


def split_spec(spec: str) -> tuple[str | None, str]:
    """``name=folder`` as (name, folder); anything else as (None, spec)."""
    found = re.fullmatch(r"([A-Za-z_]\w*)=(?!=)(.+)", spec)
    return (found[1], found[2]) if found else (None, spec)
