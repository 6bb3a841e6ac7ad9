"""Tables for hosts, the lab and the doctor, in the one look that all tasks share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from remoteops.console import Console, plain

_MARKS = {
    "ok": ("ok", "green"),
    "failed": ("FAILED", "bold red"),
    "warning": ("warning", "yellow"),
    "skipped": ("-", "dim"),
}


def table(console: Console, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str = "") -> None:
    """Aligned columns without lines around them; long cells fold. Every cell is made safe for a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    view = Table(box=SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False, show_edge=False)
    for column in columns:
        view.add_column(column, overflow="fold")
    for row in rows:
        view.add_row(
            *(cell if isinstance(cell, Text) else Text(plain("" if cell is None else str(cell))) for cell in row)
        )
    console.rich.print(view)


def hosts(console: Console, document: dict[str, Any]) -> int:
    """`fab hosts`: what each name resolves to."""
    if console.json:
        console.document(document)
        return 0
    rows = [
        (
            "* " + item["name"] if item["default"] else "  " + item["name"],
            item["target"],
            item["jump"] or "-",
            ", ".join(item["keys"]) or "agent, default keys",
            item["venv"] or "-",
            item["python"] or "looked for",
            ", ".join(item["groups"]),
        )
        for item in document["hosts"]
    ]
    table(console, ("  host", "target", "through", "keys", "venv", "python", "groups"), rows)
    console.say(f"{document['file']}; * is the default host")
    for name, members in document["groups"].items():
        console.say(f"group {name}: {', '.join(members)}")
    return 0


def lab(console: Console, document: dict[str, Any]) -> int:
    """`fab lab.status` and `fab lab.up`."""
    if console.json:
        console.document(document)
        return 0
    for item in document["labs"]:
        state = "running" if item["running"] else "built, not running" if item["built"] else "not built"
        console.say(f"{item['profile']}: {state} ({item['title']})", style="bold")
        if item["versions"]:
            console.say("  " + ", ".join(f"{name} {version}" for name, version in item["versions"].items()))
        if item["running"]:
            console.say(f"  {item['server']} server on 127.0.0.1 port {item['port']}; by hand: {item['ssh']}")
        console.say(f"  {item['root']}")
    return 0


def lab_down(console: Console, document: dict[str, Any]) -> int:
    """`fab lab.down`."""
    if console.json:
        console.document(document)
        return 0
    for item in document["labs"]:
        done = [word for word, is_so in (("stopped", item["stopped"]), ("removed from disk", item["purged"])) if is_so]
        console.say(f"{item['profile']}: {' and '.join(done) or 'was not running'}")
    return 0


def doctor(console: Console, document: dict[str, Any]) -> int:
    """`fab doctor`: each layer in order; the first that failed says what to do."""
    if console.json:
        console.document(document)
        return int(document["exit_code"])
    from rich.text import Text

    console.say(document["host"], style="bold")
    rows = []
    for item in document["layers"]:
        word, style = _MARKS[item["state"]]
        rows.append((Text(word, style=style), item["layer"], item["found"]))
    table(console, ("", "layer", "found"), rows)
    for item in document["layers"]:
        if item.get("hint"):
            console.say(f"  {item['layer']}: {item['hint']}")
    return int(document["exit_code"])
