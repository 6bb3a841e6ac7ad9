"""Shows runs: one in full, many as a table, many hosts at once and again and again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from remoteops.console import Console, plain, words
from remoteops.console.tables import table
from remoteops.errors import RemoteOpsError
from remoteops.logs import Target

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

_BAD = ("failed", "lost")


def _code(status: dict[str, Any]) -> int:
    return 1 if status.get("state") in _BAD else 0


def when(moment: float | None) -> str:
    """A unix time as local date and time."""
    return "-" if not moment else time.strftime("%m-%d %H:%M:%S", time.localtime(moment))


def show(console: Console, status: dict[str, Any]) -> int:
    """`fab status RUN`: everything about one run. 0, or 1 when it failed or was lost."""
    if console.json:
        console.document(status)
        return _code(status)
    from rich.text import Text

    state = str(status.get("state"))
    head = Text(plain(f"{status.get('host', '')}  {status.get('run', '')}  "))
    head.append(plain(state), style=words.STATE_STYLE.get(state, ""))
    if status.get("reason"):
        head.append(plain(f"  {status['reason']}"))
    console.rich.print(head)
    for line in _details(status):
        console.say("  " + line)
    return _code(status)


def _details(status: dict[str, Any]) -> list[str]:
    lines = [str(proof) for proof in status.get("evidence") or []]
    if status.get("label"):
        lines.append(f"what: {status['label']}")
    if status.get("phase"):
        lines.append(f"phase: {status['phase']} ({words.span(status.get('phase_s'))})")
    doing = words.activity(status)
    if doing:
        lines.append(f"now: {doing}")
    done = words.share(status)
    if done is not None or status.get("tokens") is not None:
        samples = "-" if status.get("samples") is None else status["samples"]
        lines.append(
            f"progress: {f'{done:.1%}, ' if done is not None else ''}{words.count(status.get('tokens'))} of "
            f"{words.count(status.get('tokens_total'))} tokens, "
            f"{samples} of {status.get('samples_total') or '-'} samples, {words.size(status.get('bytes'))} written"
        )
        lines.append(
            f"speed: {words.count(status.get('tokens_per_s'))} tok/s now, "
            f"{words.count(status.get('tokens_per_s_mean'))} tok/s mean, {words.span(status.get('eta_s'))} left"
        )
    lines.append(
        f"time: started {when(status.get('started'))}, {words.span(status.get('elapsed_s'))}"
        + (f", ended {when(status.get('ended'))}" if status.get("ended") else "")
    )
    for gpu in status.get("gpus") or []:
        use = "-" if gpu.get("utilization") is None else f"{gpu['utilization']} %"
        lines.append(
            f"GPU {gpu.get('index')} {gpu.get('name', '')}: {use}, {words.size(gpu.get('memory_used'))} of "
            f"{words.size(gpu.get('memory_total'))}"
        )
    if status.get("disk"):
        lines.append(f"disk: {words.size(status['disk'].get('free'))} left at {status['disk'].get('path')}")
    error = status.get("last_error")
    if error and error.get("message"):
        place = f" (log, byte {error['log_offset']})" if error.get("log_offset") is not None else ""
        lines.append(f"last error: {error['message']}{place}")
        if error.get("hint"):
            lines.append(f"do: {error['hint']}")
    lines += [str(status[name]) for name in ("stopping", "problem", "notice") if status.get(name)]
    if status.get("gpu_released") is False:
        lines.append("GPU memory is not free yet: see `status` again, or nvidia-smi on the host")
    if status.get("exit_code") is not None:
        lines.append(f"exit code: {status['exit_code']}")
    lines.append(
        f"where: {status.get('path')} (log {words.size(status.get('log_bytes'))}; "
        f"survives logout by {status.get('survives') or '-'})"
    )
    return lines


def _row(host: str, status: dict[str, Any]) -> tuple[Any, ...]:
    from rich.text import Text

    state = str(status.get("state"))
    done = words.share(status)
    gpus = status.get("gpus") or []
    use = [gpu["utilization"] for gpu in gpus if gpu.get("utilization") is not None]
    gpu = f"{sum(use) / len(use):.0f} %" if use else "-"
    if gpus and all(gpu.get("memory_used") is not None for gpu in gpus):
        gpu += f" {words.size(sum(gpu['memory_used'] for gpu in gpus))}"
    tokens = words.count(status.get("tokens"))
    if status.get("tokens_total"):
        tokens += f"/{words.count(status['tokens_total'])}"
    rate = (
        f"{words.count(status.get('tokens_per_s'))} ({words.count(status.get('tokens_per_s_mean'))})"
        if status.get("tokens") is not None
        else "-"
    )
    rest = status.get("reason") or (status.get("last_error") or {}).get("message") or status.get("notice") or ""
    return (
        host,
        status.get("run", ""),
        Text(plain(state), style=words.STATE_STYLE.get(state, "")),
        "-" if done is None else f"{done:.0%}",
        tokens,
        rate,
        words.span(status.get("eta_s")),
        gpu,
        words.size((status.get("disk") or {}).get("free")),
        rest,
    )


COLUMNS = ("host", "run", "state", "done", "tokens", "tok/s (mean)", "left", "GPUs", "disk left", "")


def _print(console: Console, rows: Sequence[tuple[Any, ...]]) -> None:
    """A table that fits the window; whole lines without a terminal, where nobody can make the window wider."""
    if console.rich.is_terminal:
        console.rich.print(_fitted(console, rows))
        return
    cells = [[str(cell) for cell in row] for row in [COLUMNS, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(COLUMNS))]
    for row in cells:
        console.say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _fitted(console: Console, rows: Sequence[tuple[Any, ...]]) -> Table:
    """As many columns as the window holds, from the left; what is left of its width is for the last one, in words."""
    from rich.measure import Measurement

    screen = console.rich
    for keep in range(len(COLUMNS), 3, -1):
        view = _table(rows, keep)
        if Measurement.get(screen, screen.options.update(max_width=10_000), view).maximum <= screen.width:
            return view
        if keep == len(COLUMNS):
            bare = Measurement.get(screen, screen.options.update(max_width=10_000), _table(rows, keep - 1)).maximum
            if screen.width - bare >= 25:
                return _table(rows, keep, last=screen.width - bare - 2)
    return _table(rows, 3)


def _table(rows: Sequence[tuple[Any, ...]], keep: int, last: int | None = None) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    view = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, column in enumerate(COLUMNS[:keep]):
        words_column = number == len(COLUMNS) - 1
        view.add_column(column, overflow="ellipsis", no_wrap=not words_column, width=last if words_column else None)
    for row in rows:
        view.add_row(*(cell if isinstance(cell, Text) else Text(plain(str(cell))) for cell in row[:keep]))
    return view


def runs(console: Console, document: dict[str, Any]) -> int:
    """`fab runs`: the runs of one host, newest first."""
    if console.json:
        console.document(document)
        return 0
    if not document["runs"]:
        console.say(f"{document['host']}: no runs yet")
        return 0
    _print(console, [_row(document["host"], status) for status in document["runs"]])
    if document.get("total", 0) > len(document["runs"]):
        console.say(f"the newest {len(document['runs'])} of {document['total']}")
    return 0


def overview(console: Console, document: dict[str, Any]) -> int:
    """`fab status` over many hosts. 3 when a host could not be asked, else 1 when a newest run went wrong, else 0."""
    code = 0
    for part in document["hosts"]:
        code = max(
            code,
            part["error"]["exit_code"] if part.get("error") else 0,
            *[_code(status) for status in part["runs"][:1]],
            0,
        )
    if console.json:
        console.document(document)
        return code
    rows: list[tuple[Any, ...]] = []
    for part in document["hosts"]:
        if part.get("error"):
            rows.append(
                (
                    part["host"],
                    "",
                    "unreachable" if part["error"]["exit_code"] == 3 else "error",
                    "",
                    "",
                    "",
                    "",
                    "",
                    "",
                    part["error"]["message"],
                )
            )
        elif not part["runs"]:
            rows.append((part["host"], "", "no runs", *[""] * 7))
        rows += [_row(part["host"], status) for status in part["runs"]]
    _print(console, rows)
    return code


def stopped(console: Console, document: dict[str, Any]) -> int:
    """`fab stop`: what became of it. 0 once the run is over, whatever its outcome was."""
    if console.json:
        console.document(document)
        return 0
    if document.get("already"):
        console.say(f"{document.get('host', '')}: {document['run']} was over already: {words.one_line(document)}")
        return 0
    freed = {True: "; GPU memory is free", False: "; GPU memory is NOT free yet", None: ""}[
        document.get("gpu_released")
    ]
    console.say(f"{document.get('host', '')}: {words.one_line(document)}{freed}")
    return 0 if document.get("gpu_released") is not False else 1


def leftovers(console: Console, document: dict[str, Any]) -> int:
    """`fab stop --leftovers` and the list of leftovers. 1 when some are still there."""
    left = document.get("left", document.get("leftovers", []))
    if console.json:
        console.document(document)
        return 1 if left else 0
    for title, rows in (("ended", document.get("ended", [])), ("still there", left)):
        if rows:
            console.say(title + ":", style="bold")
            table(
                console,
                ("pid", "user", "GPUs", "memory", "whose", "command"),
                [
                    (
                        row["pid"],
                        row["user"],
                        ",".join(str(gpu) for gpu in row["gpus"]) or "-",
                        words.size(row["memory"]),
                        {"ours": f"run {row['run']}", "orphan": "orphaned engine", "foreign": "somebody else's"}[
                            row["sort"]
                        ],
                        row["command"],
                    )
                    for row in rows
                ],
            )
    if not left and not document.get("ended"):
        console.say("no leftovers")
    return 1 if left else 0


class StatusTable:
    """The sink of `fab status --watch` over several hosts: a table that is kept up to date, or a plain line for
    every change."""

    def __init__(self, console: Console, targets: Sequence[Target]) -> None:
        self._console = console
        self._targets = targets
        self._statuses: list[dict[str, Any] | None] = [None] * len(targets)
        self._words: list[str] = [""] * len(targets)
        self._live: Live | None = None

    def __enter__(self) -> StatusTable:
        if not self._console.json and self._console.rich.is_terminal:
            from rich.live import Live

            self._live = Live(
                get_renderable=self.render, console=self._console.rich, refresh_per_second=2, vertical_overflow="crop"
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def render(self) -> Table:
        """The table for the window as it is now."""
        rows: list[tuple[Any, ...]] = []
        for target, status, word in zip(self._targets, self._statuses, self._words, strict=True):
            if status is None:
                rows.append((target.host.name, "", word or "connecting", *[""] * 7))
            else:
                row = _row(target.host.name, status)
                rows.append((*row[:9], word or row[9]))
        return _fitted(self._console, rows)

    def log(self, target: int, data: bytes) -> None:
        """Not asked for."""

    def notice(self, target: int, kind: str, text: str) -> None:
        self._words[target] = "" if kind == "back" else text
        self._line(target, {"event": "notice", "kind": kind, "text": text}, text)

    def status(self, target: int, status: dict[str, Any]) -> None:
        before = self._statuses[target]
        self._statuses[target] = status
        changed = (
            before is None or before.get("state") != status.get("state") or before.get("tokens") != status.get("tokens")
        )
        if changed or self._console.json:
            self._line(target, {"event": "status", "status": status}, words.one_line(status))

    def ended(self, target: int, status: dict[str, Any]) -> None:
        self._statuses[target] = status
        self._line(target, {"event": "end", "status": status}, words.one_line(status))

    def failed(self, target: int, error: RemoteOpsError) -> None:
        self._words[target] = error.message
        self._line(target, {"event": "error", "error": error.as_dict()}, error.message)

    def idle(self) -> None:
        """Drawn by its own clock."""

    def _line(self, target: int, event: dict[str, Any], text: str) -> None:
        name = self._targets[target].host.name
        if self._console.json:
            self._console.event({"schema": "remoteops.watch/1", "host": name, **event})
        elif self._live is None:
            self._console.say(f"{time.strftime('%H:%M:%S')} {name}: {text}")
