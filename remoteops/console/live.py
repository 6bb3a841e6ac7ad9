"""The live view of one run: phases, progress, GPUs, the last lines of its log.

On a terminal it is redrawn in place and follows the window's size; anywhere else (a pipe, CI) it is a plain line
whenever something changes and every ten seconds. It is a sink for ``logs.follow`` and takes the phases before the
run (connect, audit, patch) from its caller.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from remoteops.console import Console, plain, words
from remoteops.console.logview import Neutral
from remoteops.errors import RemoteOpsError

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

PHASES = ("connect", "audit", "patch", "load", "extract", "verify")
_PHASE_OF_STATE = {"loading": "load", "running": "extract", "verifying": "verify"}
PLAIN_EVERY = 10.0
"""Seconds between two plain lines in which nothing but numbers changed."""
GROWTH = 10.0
"""Seconds over which the growth of GPU memory is told."""
LOG_LINES = 8
KEEP = 4096
"""Bytes of an unfinished log line that are kept for showing."""


class LiveView:
    """``with LiveView(console, title) as view``: call ``phase`` for what happens here, hand it to ``logs.follow``
    for the run.

    ``clock`` is for tests. With --json every status is one JSON line instead.
    """

    def __init__(
        self, console: Console, title: str, *, phases: Sequence[str] = PHASES, clock: Any = time.monotonic
    ) -> None:
        self._console = console
        self._title = title
        self._clock = clock
        self._order = list(phases)
        self._phases: dict[str, tuple[str, float, float | None, str]] = {}
        self._status: dict[str, Any] = {}
        self._lines: deque[str] = deque(maxlen=50)
        self._open_line = b""
        self._neutral = Neutral()
        self._notice = ""
        self._live: Live | None = None
        self._said = ("", -1e9)
        self._last_text = ""
        self._memory: deque[tuple[float, float]] = deque()

    # -- being on screen --------------------------------------------------------------------------------------------
    def __enter__(self) -> Self:
        if not self._console.json and self._console.aside.is_terminal:
            from rich.live import Live

            self._live = Live(
                get_renderable=self.render,
                console=self._console.aside,
                refresh_per_second=4,
                transient=False,
                vertical_overflow="crop",
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, (state, began, ended, text) in list(self._phases.items()):
            if state == "active":
                self._phases[name] = (
                    "failed" if kind is not None else "done",
                    began,
                    self._clock() if ended is None else ended,
                    text,
                )
        if self._live is not None:
            self._live.stop()
            self._live = None

    # -- what happens -----------------------------------------------------------------------------------------------
    def phase(self, name: str, state: str = "active", text: str = "") -> None:
        """A phase begins ("active") or has ended ("done", "failed", "skipped"); earlier active ones have ended too."""
        now = self._clock()
        before = self._phases.get(name)
        if name not in self._order:
            self._order.append(name)
        for other, (other_state, began, _, said) in list(self._phases.items()):
            earlier = self._order.index(other) < self._order.index(name) or state == "active"
            if other_state == "active" and other != name and earlier:
                self._phases[other] = ("done", began, now, said)
        began = before[1] if before else now
        self._phases[name] = (state, began, None if state == "active" else now, text or (before[3] if before else ""))
        said = f"{name}: {text or state}" if text or state != "active" else f"{name} ..."
        self._tell(said, always=before is None or before[0] != state)

    def log(self, target: int, data: bytes) -> None:
        data = self._open_line + self._neutral.feed(data)
        *whole, rest = data.split(b"\n")
        self._open_line = rest[-KEEP:]
        self._lines.extend(_shown(line) for line in whole[-50:])

    def notice(self, target: int, kind: str, text: str) -> None:
        self._notice = "" if kind == "back" else text
        if self._console.json:
            self._console.event({"schema": "remoteops.watch/1", "event": "notice", "kind": kind, "text": text})
        self._tell(text, always=True)

    def status(self, target: int, status: dict[str, Any]) -> None:
        self._status = status
        memory = words.gpu_memory(status)
        if memory is not None:
            self._memory.append((self._clock(), memory[0]))
            while len(self._memory) > 2 and self._memory[-1][0] - self._memory[1][0] >= GROWTH:
                self._memory.popleft()
        self._follow_phase(str(status.get("state")))
        if self._console.json:
            self._console.event({"schema": "remoteops.watch/1", "event": "status", "status": status})
        self._tell(words.one_line(status), always=False)

    def _follow_phase(self, state: str) -> None:
        phase = _PHASE_OF_STATE.get(state)
        if phase is None or phase not in self._order or self._phases.get(phase, ("",))[0] == "active":
            return
        for name in _PHASE_OF_STATE.values():
            if name == phase:
                break
            if name in self._order and name not in self._phases:
                # Over before anybody looked: nobody knows how long it took.
                self._phases[name] = ("done", 0.0, None, "")
        self.phase(phase)

    def ended(self, target: int, status: dict[str, Any]) -> None:
        self._status = status
        if self._console.json:
            self._console.event({"schema": "remoteops.watch/1", "event": "end", "status": status})
        state = str(status.get("state"))
        for name, (was, began, _, text) in list(self._phases.items()):
            if was == "active":
                self._phases[name] = ("done" if state == "done" else "failed", began, self._clock(), text)
        self._tell(words.one_line(status), always=True)

    def failed(self, target: int, error: RemoteOpsError) -> None:
        self._notice = error.message
        self._tell(str(error), always=True)

    def idle(self) -> None:
        """The screen is redrawn by its own clock."""

    def _tell(self, text: str, *, always: bool) -> None:
        """A plain line where there is no terminal."""
        if self._live is not None or self._console.json:
            return
        now = self._clock()
        if text == self._last_text:
            return
        state = str(self._status.get("state", ""))
        last_state, last_time = self._said
        if always or state != last_state or now - last_time >= PLAIN_EVERY:
            if not always:
                self._said = (state, now)
            self._last_text = text
            screen = self._console.aside
            said = words.fit(plain(f"{time.strftime('%H:%M:%S')} {self._title}: {text}"), screen.encoding)
            screen.print(said, markup=False, highlight=False, soft_wrap=True)

    # -- drawing ----------------------------------------------------------------------------------------------------
    def render(self) -> Text:
        """The whole view for the window as it is now."""
        from rich.text import Text

        console = self._console.aside
        width, height = console.size
        narrow = width < 60
        ascii_only = not console.encoding.lower().startswith("utf")
        lines: list[Text] = [self._phase_line(width, ascii_only)]
        status = self._status
        if status:
            lines.append(self._head(status, narrow))
            doing = words.activity(status, **self._growth())
            if doing:
                lines.append(Text(plain(doing), style="cyan"))
            done = words.share(status)
            if done is not None:
                lines.append(self._progress(status, done, width, ascii_only))
            lines += self._numbers(status, width)
            lines += [self._gpu(gpu, width, ascii_only) for gpu in (status.get("gpus") or [])[:16]]
            error = status.get("last_error")
            if error and error.get("message"):
                place = f" (log byte {error['log_offset']})" if error.get("log_offset") is not None else ""
                lines.append(Text(plain(f"{error['message']}{place}"), style="bold red"))
            for text in (status.get("problem"), status.get("notice")):
                if text:
                    lines.append(Text(plain(str(text)), style="yellow"))
        if self._notice:
            lines.append(Text(plain(self._notice), style="yellow"))
        room = min(LOG_LINES, max(0, height - len(lines) - 2))
        shown = [*self._lines, *([_shown(self._open_line)] if self._open_line else [])]
        lines += [Text(line, style="dim") for line in shown[-room:]] if room else []
        for line in lines:
            line.truncate(max(1, width - 1), overflow="ellipsis" if not ascii_only else "crop")
            line.no_wrap = True
            if ascii_only:
                line.plain = words.fit(line.plain, "ascii")
        return Text("\n").join(lines[: max(1, height - 1)])

    def _growth(self) -> dict[str, Any]:
        if len(self._memory) < 2:
            return {}
        (then, before), (now, after) = self._memory[0], self._memory[-1]
        return {"grown": after - before, "over": now - then}

    def _phase_line(self, width: int, ascii_only: bool) -> Text:
        from rich.text import Text

        marks = {
            "done": ("ok" if ascii_only else "✓", "green"),
            "active": (">" if ascii_only else "●", "bold cyan"),
            "failed": ("X" if ascii_only else "✗", "bold red"),
            "skipped": ("-", "dim"),
            "": ("." if ascii_only else "○", "dim"),
        }
        line = Text()
        for name in self._order:
            state, began, ended, _ = self._phases.get(name, ("", 0.0, None, ""))
            if width < 60 and state != "active":
                if state in ("failed",):
                    line.append(f"{marks[state][0]} {name}  ", style=marks[state][1])
                continue
            mark, style = marks[state]
            took = (
                f" {words.span((ended if ended is not None else self._clock()) - began)}"
                if state == "active" or (state in ("done", "failed") and ended is not None)
                else ""
            )
            line.append(f"{mark} {name}{took}  ", style=style)
        return line

    def _head(self, status: dict[str, Any], narrow: bool) -> Text:
        from rich.text import Text

        state = str(status.get("state"))
        line = Text(plain(f"{self._title} " if not narrow else ""))
        line.append(plain(f"{status.get('run', '')} "), style="dim")
        line.append(plain(state), style=words.STATE_STYLE.get(state, ""))
        if status.get("reason"):
            line.append(plain(f": {status['reason']}"))
        if status.get("paused"):
            line.append(plain(f" (paused: {status['paused'].get('reason', '')})"), style="yellow")
        return line

    def _progress(self, status: dict[str, Any], done: float, width: int, ascii_only: bool) -> Text:
        from rich.text import Text

        what = "tokens" if status.get("tokens_total") else "samples"
        tail = f" {done:6.1%}"
        counts = f" {words.count(status.get(what))}/{words.count(status.get(f'{what}_total'))} {what}"
        if width >= 50:
            tail += counts
        line = Text(words.bar(done, max(8, min(60, width - len(tail) - 2)), ascii_only=ascii_only), style="green")
        return line.append(tail, style="default")

    def _numbers(self, status: dict[str, Any], width: int) -> list[Text]:
        from rich.text import Text

        parts = []
        if status.get("tokens_per_s") or status.get("tokens"):
            parts.append(
                f"{words.count(status.get('tokens_per_s'))} tok/s now, "
                f"{words.count(status.get('tokens_per_s_mean'))} mean"
            )
        if status.get("eta_s"):
            parts.append(f"{words.span(status['eta_s'])} left")
        if status.get("samples") is not None:
            parts.append(f"{status['samples']}/{status.get('samples_total') or '?'} samples")
        if status.get("bytes"):
            parts.append(f"{words.size(status['bytes'])} written")
        if status.get("disk"):
            parts.append(f"{words.size(status['disk'].get('free'))} disk left")
        lines: list[Text] = []
        line = ""
        for part in parts:
            joined = f"{line} · {part}" if line else part
            if line and len(joined) >= width:
                lines.append(Text(line))
                joined = part
            line = joined
        return [*lines, Text(line)] if line else lines

    def _gpu(self, gpu: dict[str, Any], width: int, ascii_only: bool) -> Text:
        from rich.text import Text

        used, total = gpu.get("memory_used"), gpu.get("memory_total")
        use = gpu.get("utilization")
        cells = max(4, min(20, (width - 40) // 2))
        line = Text(f"GPU {gpu.get('index')} ")
        line.append(words.bar((use or 0) / 100, cells, ascii_only=ascii_only), style="cyan")
        line.append(f" {use if use is not None else '-':>3}% ")
        if width >= 44 and used is not None and total:
            line.append(words.bar(used / total, cells, ascii_only=ascii_only), style="magenta")
            line.append(f" {words.size(used)} / {words.size(total)}")
        return line


def _shown(line: bytes) -> str:
    """What a terminal would show of a log line: after a carriage return the line is written anew."""
    for part in reversed(line.rstrip(b"\r").split(b"\r")):
        if part.strip():
            return plain(part.decode("utf-8", "replace").replace("\b", ""))
    return ""
