"""How an extraction, its verification and a pull look."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remoteops.console import Console
from remoteops.console.tables import table
from remoteops.console.words import count, size

_PHASES = {
    "connect": "connect",
    "upload": "place the dataset",
    "rehearse": "make the small model",
    "preflight": "preflight",
    "audit": "audit",
    "patch": "patch",
    "start": "start",
    "run.load": "tokenise, start the engine",
    "run.extract": "extract",
    "run.verify": "verify",
    "run.close": "the engine's end",
    "summary": "summary",
    "toolkit": "of all: not engine, not compute",
    "total": "all",
}


def show_extract(console: Console, document: Mapping[str, Any]) -> int:
    """The summary of a run that was followed, or what was started (``--detach``). Exit code 0: only good runs come
    this far."""
    if console.json:
        console.document(dict(document))
        return 0
    for check in document["checks"]:
        if check["ok"] is not True:
            word = "skipped" if check["ok"] is False else "unsure"
            console.say(
                f"preflight, {word}: {check['name']}: {check['found']} (needed: {check['need']})", style="yellow"
            )
    if document.get("warning"):
        console.say(str(document["warning"]), style="yellow")
    made = document.get("rehearsal")
    if made:
        notes = "".join(f"; {note}" for note in made["notes"])
        console.say(f"a rehearsal: {made['layers']} layers, {made['weights']} weights{notes}", style="bold yellow")
    counted = f"{document['layers']}, counted as {document['convention']}"
    for name, ids in document["layers_elsewhere"].items():
        counted += f" ({ids} as {name})"
    console.say(f"engine {document['engine']} ({'; '.join(document['why_engine'])})")
    console.say(f"layers {counted}; {document['dtype']}, {document['format']}")
    if "state" not in document:
        console.say(f"run {document['run']} goes on by itself ({document['survives']})", style="bold")
        console.say(f"  fab tail-logs --run {document['run']} follows it, fab stop --run {document['run']} ends it")
        return 0
    console.say("")
    console.say(
        f"{document['samples']} samples, {count(document['tokens'])} tokens, {size(document['bytes'])}"
        + (f", {count(document['tokens_per_s'])} tok/s" if document.get("tokens_per_s") else ""),
        style="bold green",
    )
    console.say(f"  {document['out']}")
    _dropped(console, document)
    if document.get("report"):
        _report(console, document["report"])
    seconds = document["seconds"]
    rows = [(label, f"{seconds[name]:.1f} s") for name, label in _PHASES.items() if seconds.get(name) is not None]
    table(console, ("phase", "time"), rows)
    console.say(f"fab pull --run {document['run']} --samples 3 --to samples copies some here")
    return 0


def show_verify(console: Console, document: Mapping[str, Any]) -> int:
    """Exit code 0 when every row is right, 1 otherwise."""
    if console.json:
        console.document(dict(document))
        return 0 if document["ok"] else 1
    console.say(str(document["out"]), style="bold")
    _report(console, document)
    return 0 if document["ok"] else 1


def show_pull(console: Console, document: Mapping[str, Any]) -> int:
    """What came, as a table; exit code 0."""
    if console.json:
        console.document(dict(document))
        return 0
    rows = [
        (
            one["name"],
            "-" if one["index"] is None else one["index"],
            one["tokens"] or "-",
            size(one["bytes"]),
            one["sha256"][:12],
            one["state"],
        )
        for one in document["files"]
    ]
    table(console, ("file", "row", "tokens", "size", "sha256", ""), rows)
    for one in document["left_out"]:
        console.say(f"row {one.get('index')} was left out: {one.get('reason')}", style="yellow")
    console.say(
        f"{document['samples']} of {document['samples_total']} samples in {document['to']}: "
        f"{size(document['bytes'])}, {size(document['fetched_bytes'])} of them fetched now"
    )
    return 0


def _dropped(console: Console, document: Mapping[str, Any]) -> None:
    rows = document.get("dataset") or {}
    if rows.get("truncated"):
        console.say(
            f"  {rows['truncated']} rows were cut to the maximum length ({count(rows.get('truncated_tokens'))} tokens)"
        )
    if rows.get("dropped_count"):
        told = "; ".join(f"{number} x {reason}" for reason, number in (rows.get("reasons") or {}).items())
        console.say(f"  {rows['dropped_count']} rows were dropped: {told}", style="yellow")


def _report(console: Console, report: Mapping[str, Any]) -> None:
    lengths = report["lengths"]
    told = f"verified: {report['checked']} of {report['rows']} rows read back"
    if report["problem_count"]:
        console.say(
            f"{told}, {report['problem_count']} problems in {len(report['problem_rows'])} rows", style="bold red"
        )
        rows = [(one["index"], one["file"], one["problem"]) for one in report["problems"][:20]]
        table(console, ("row", "file", "problem"), rows)
        if report["problem_count"] > 20:
            console.say(f"... and {report['problem_count'] - 20} more (--json has them)")
    else:
        console.say(f"{told}: tokens, shapes, {report['dtype']}, finite, no two alike", style="green")
    if lengths.get("count"):
        console.say(f"  lengths {lengths['min']} to {lengths['max']} tokens, median {lengths['median']}")
    reference = report.get("reference")
    if reference is None:
        return
    if reference["ok"] is None:
        console.say(f"  not compared with transformers: {reference['reason']}", style="yellow")
        return
    shown = [
        (
            name,
            f"{one['max_relative_error']:.2g}",
            f"{one['worst_token_error']:.2g}",
            _right(name, one),
        )
        for name, one in reference["layers"].items()
    ]
    verdict = "agrees with transformers" if reference["ok"] else "DISAGREES with transformers"
    worst = f"max relative error {reference['max_relative_error']:.2g} ({reference['dtype']})"
    style = "green" if reference["ok"] else "bold red"
    console.say(f"  {verdict} on rows {reference['rows']}: {worst}", style=style)
    table(console, ("layer id", "max relative error", "worst token", "id is right"), shown)


def _right(name: str, one: Mapping[str, Any]) -> str:
    return "yes" if str(one["nearest"]) == name else f"NO, {one['nearest']} fits better"
