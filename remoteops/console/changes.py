"""How a patch looks: the plan with the finding behind each hunk, what came of it, and what state the host is in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remoteops.console import Console, plain

_STATES = {"clean": "green", "patched": "green"}


def plan(console: Console, planned: Any) -> None:
    """The unified diff, hunk by hunk, each with the findings that ask for it; then what no patch can settle."""
    if console.json:
        return
    from rich.text import Text

    show = console.rich
    for file in planned.plan.files:
        show.print(Text(plain(f"\n{planned.root}/{file.file}"), style="bold"), soft_wrap=True)
        for hunk in file.hunks:
            for name in hunk.findings:
                finding = planned.plan.finding(name)
                show.print(
                    Text(
                        plain(f"# {finding['rule']}: {finding.get('error') or finding.get('detail') or ''}"),
                        style="yellow",
                    ),
                    soft_wrap=True,
                )
            for line in hunk.text.splitlines():
                style = (
                    "green"
                    if line.startswith("+")
                    else "red"
                    if line.startswith("-")
                    else "cyan"
                    if line.startswith("@@")
                    else ""
                )
                show.print(Text(plain(line), style=style), soft_wrap=True)
    count = len(planned.plan.fixes)
    if count:
        console.say(
            f"\n{count} fix{'es' if count > 1 else ''} in {len(planned.plan.files)} file(s); reversible with --revert"
        )
    elif not planned.plan.remaining:
        console.say("nothing to patch")
    if planned.state["state"] == "edited since":
        told = "patched before and edited by hand since: judged as it is, and your edit is kept (fab patch --status)"
        console.say(told, style="yellow")
    remaining(console, [{"finding": item.finding, "why": item.why} for item in planned.plan.remaining])


def remaining(console: Console, items: Sequence[Mapping[str, Any]]) -> None:
    """Breaks that no patch resolves, each with the reason in a line."""
    by_reason: dict[str, list[Mapping[str, Any]]] = {}
    for item in items:
        by_reason.setdefault(item["why"], []).append(item["finding"])
    for why, findings in by_reason.items():
        for finding in findings:
            place = f"{finding['file']}:{finding['line']}"
            told = f"not patched: {finding['rule']} {finding.get('symbol', '')} ({place})"
            console.say(told if len(findings) > 1 else f"{told}: {why}", style="yellow")
        if len(findings) > 1:
            console.say(f"  all {len(findings)} because: {why}", style="yellow")


def outcome(console: Console, host: str, document: Mapping[str, Any]) -> int:
    """What applying did. 0 when the host is compatible now, 1 when breaks are left that no patch resolves."""
    left = document["remaining"]
    code = 1 if any(item["finding"].get("confidence") != "risk" for item in left) else 0
    if console.json:
        console.document({**document, "host": host})
        return code
    if document["already"]:
        nothing = "nothing that can be patched" if left else "nothing to patch"
        console.say(f"{host}: {'nothing to do, it is patched already' if document.get('done') else nothing}")
    else:
        files = document["changed"]
        console.say(f"{host}: patched {len(files)} file(s): {', '.join(files)}", style="green")
        imported = document["proof"].get("import", {}).get("modules", [])
        if document["proof"]:
            tail = f", and imported in the host's venv: {', '.join(imported)}" if imported else ""
            breaks = document["proof"]["audit"]["breaks"]
            left_over = f"{breaks} break{'s' if breaks > 1 else ''} left" if breaks else "no break left"
            console.say(f"proved: audited again, {left_over}{tail}")
    if document.get("done"):  # else the plan has named them just before
        remaining(console, left)
    elif code:
        console.say("what is named above as not patched is still broken", style="yellow")
    return code


def reverted(console: Console, document: Mapping[str, Any]) -> int:
    """`fab patch --revert`."""
    if console.json:
        console.document(dict(document))
        return 0
    results = document["reverted"]
    for item in results:
        console.say(f"{document['host']}: {item['package']} in {item['root']}: {item['outcome']}")
    if not results:
        console.say(f"{document['host']}: nothing is patched")
    return 0


def state(console: Console, document: Mapping[str, Any]) -> int:
    """`fab patch --status`. 0 when everything is clean or patched, else 1."""
    fine = document["state"] in _STATES
    if console.json:
        console.document(dict(document))
        return 0 if fine else 1
    console.say(f"{document['host']}: {document['state']}", style=_STATES.get(document["state"], "yellow"))
    for item in document.get("patches", []):
        console.say(f"  {item.get('package', '')} in {item.get('root', '')}: {item['state']}")
        for file in item.get("files", []):
            console.say(f"    {file.get('file') or file.get('path')}: {file['state']}")
        if item.get("hint"):
            console.say(f"    do: {item['hint']}")
    foreign = document.get("foreign") or []
    if foreign:
        console.say("  changed since they were installed, and not by a patch of ours:", style="yellow")
        for name in foreign:
            console.say(f"    {name if isinstance(name, str) else name.get('path') or name.get('file')}")
    return 0 if fine else 1
