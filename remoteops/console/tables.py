"""Tables for hosts, the lab and the doctor, in the one look that all tasks share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from remoteops.console import Console, plain

if TYPE_CHECKING:
    from rich.text import Text

_MARKS = {
    "ok": ("ok", "green"),
    "failed": ("FAILED", "bold red"),
    "warning": ("warning", "yellow"),
    "skipped": ("-", "dim"),
}


def table(console: Console, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Aligned columns without lines around them. Every cell is made safe for a terminal.

    Where there is no terminal a row is one line of its own length, so that grep and cut find what they look for. In a
    window that is too narrow a row becomes a few lines, one a column: nothing is folded within a word or a path.
    """
    from rich.cells import cell_len
    from rich.text import Text

    cells = [[_cell(cell) for cell in row] for row in rows]
    widths = [max([cell_len(name), *(row[i].cell_len for row in cells)]) for i, name in enumerate(columns)]
    screen = console.rich
    if screen.is_terminal and sum(widths) + 2 * (len(columns) - 1) > screen.width:
        _records(console, columns, cells)
        return
    for row in [[Text(name, style="bold" if screen.is_terminal else "") for name in columns], *cells]:
        line = Text("  ").join(cell + " " * (width - cell.cell_len) for cell, width in zip(row, widths, strict=True))
        line.rstrip()
        screen.print(line, soft_wrap=True)


def _cell(value: Any) -> Text:
    from rich.text import Text

    return value if isinstance(value, Text) else Text(plain("" if value is None else str(value)).replace("\n", " "))


def _records(console: Console, columns: Sequence[str], rows: Sequence[Sequence[Text]]) -> None:
    width = max(len(name.strip()) for name in columns[1:])
    for row in rows:
        console.rich.print(row[0], style="bold", soft_wrap=True)
        for name, cell in zip(columns[1:], row[1:], strict=True):
            if cell.plain.strip():
                told(console, f"    {name.strip():<{width}}  ", cell.plain)


def told(console: Console, label: str, text: str, *, style: str = "", indent: int = 0, first: bool = True) -> None:
    """A label and a text beside it, wrapped between words below itself. A path or a command is never cut: what is
    longer than the line is left to the terminal, so that it can be copied.

    ``indent``: columns that stand before the label; ``first``: they are written already.
    """
    import textwrap

    screen = console.rich
    lines = [" ".join(text.split())]
    if screen.is_terminal:
        room = max(20, screen.width - len(label) - indent)
        lines = textwrap.wrap(lines[0], room, break_long_words=False, break_on_hyphens=False) or [""]
    console.say((("" if first else " " * indent) + label + lines[0]).rstrip(), style=style)
    for line in lines[1:]:
        console.say(" " * (indent + len(label)) + line, style=style)


def hosts(console: Console, document: dict[str, Any]) -> int:
    """`fab hosts`: what each name resolves to."""
    if console.json:
        console.document(document)
        return 0
    columns = ("  host", "target", "through", "keys", "venv", "python", "groups")
    rows = [
        (
            "* " + item["name"] if item["default"] else "  " + item["name"],
            item["target"],
            item["jump"],
            ", ".join(item["keys"]) or "agent, default keys",
            item["venv"],
            item["python"] or "looked for",
            ", ".join(item["groups"]),
        )
        for item in document["hosts"]
    ]
    table(console, columns, rows if console.rich.is_terminal else [[cell or "-" for cell in row] for row in rows])
    for item in document["hosts"]:
        for notice in item["notices"]:
            told(console, f"{item['name']}: ", notice, style="yellow")
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
        server = "server stopped" if item["stopped"] else "no server was running"
        if item["purged"]:
            server += f", {item['root']} removed"
        elif document["purge"]:
            server += ", nothing was on disk"
        console.say(f"{item['profile']}: {server}")
    return 0


def doctor(console: Console, document: dict[str, Any]) -> int:
    """`fab doctor`: each layer in order, with what to do where something is wrong; then the verdict."""
    if console.json:
        console.document(document)
        return int(document["exit_code"])
    from rich.text import Text

    console.say(document["host"], style="bold")
    layers = document["layers"]
    names = ["  " + item["layer"] if item.get("of") else item["layer"] for item in layers]
    width = max(map(len, names))
    for item, name in zip(layers, names, strict=True):
        word, style = _MARKS[item["state"]]
        console.rich.print(Text(f"{word:<9}", style=style), end="")
        skipped = item["state"] == "skipped" and not item["found"]
        told(console, f"{name:<{width}}  ", "not looked at" if skipped else item["found"], indent=9)
        if item.get("hint"):
            told(console, " " * (width + 2) + "-> ", item["hint"], indent=9, first=False, style=style)
    failed = [item["layer"] for item in layers if item["state"] == "failed"]
    doubts = sum(item["state"] == "warning" for item in layers)
    if document["exit_code"]:
        verdict = f"not ready: {', '.join(failed)}"
    else:
        besides = f" but for {doubts} warning{'s' if doubts > 1 else ''}" if doubts else ""
        verdict = f"in order{besides}; fab -H {document['host']} probe says whether the libraries fit"
    console.say(f"{document['host']}: {verdict}", style="bold red" if document["exit_code"] else "bold green")
    return int(document["exit_code"])
