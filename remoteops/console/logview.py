"""Shows what is followed: one log as it is, several with a name before each line, or JSON lines.

Without ``raw`` whatever could steer a terminal is taken out (escape sequences, control characters), except what a
log lives from: newline, tab, and the carriage return and backspace of progress bars. All of it works on bytes, so
that no character is ever split.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any, BinaryIO

from remoteops.agent.rundir import TERMINAL
from remoteops.console import Console, plain, words
from remoteops.errors import RemoteOpsError
from remoteops.logs import Target

_BAD = bytes(code for code in range(32) if code not in b"\b\t\n\r") + b"\x7f"
_SEQUENCE = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    rb"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC, DCS, SOS, PM, APC up to their end
    rb"|\x1b[ -/]*[0-~]"  # two-character sequences
    rb"|\xc2[\x80-\x9f]"  # C1 controls in UTF-8
    rb"|[\x00-\x07\x0b\x0c\x0e-\x1f\x7f]"
)  # anything else that is no text
_UNFINISHED = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b]*\x1b?|[ -/]*)?\Z|\xc2\Z")
HOLD = 4096
"""Longest unfinished escape sequence that is waited for."""


class Neutral:
    """Takes terminal control out of a stream of bytes; a sequence cut by the end of a piece waits for the rest."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """The harmless part of what came so far."""
        if not self._held and len(data.translate(None, _BAD)) == len(data) and b"\xc2" not in data:
            return data
        data = self._held + data
        self._held = b""
        match = _UNFINISHED.search(data, max(0, len(data) - HOLD))
        if match:
            self._held, data = data[match.start() :], data[: match.start()]
        return _SEQUENCE.sub(b"", data)

    def close(self) -> bytes:
        """What was still waiting, made harmless."""
        held, self._held = self._held, b""
        return _SEQUENCE.sub(b"", held)


class Stream:
    """The log of one target on its way to the screen."""

    def __init__(self, name: str, raw: bool) -> None:
        self.name = name
        self.neutral = None if raw else Neutral()
        self.pieces: list[bytes] = []
        self.at_line_start = True

    def clean(self, data: bytes) -> bytes:
        """``data``, harmless unless raw."""
        return data if self.neutral is None else self.neutral.feed(data)

    def whole_lines(self, data: bytes) -> list[bytes]:
        """The lines that ``data`` completes, without their newline; the rest waits, however long it gets."""
        head, newline, rest = data.rpartition(b"\n")
        if not newline:
            self.pieces.append(data)
            return []
        lines = b"".join([*self.pieces, head]).split(b"\n")
        self.pieces = [rest] if rest else []
        return lines

    def leftover(self) -> list[bytes]:
        """The unfinished last line."""
        last = b"".join(self.pieces) + (self.neutral.close() if self.neutral else b"")
        self.pieces = []
        return [last] if last else []


class LogView:
    """A logs.Sink for people and for --json. ``out`` is where the bytes go (default: stdout)."""

    def __init__(
        self, console: Console, targets: Sequence[Target], *, raw: bool = False, out: BinaryIO | None = None
    ) -> None:
        self._console = console
        self._out = out if out is not None else sys.stdout.buffer
        self._targets = targets
        names = [
            target.host.name if sum(other.host.name == target.host.name for other in targets) == 1 else target.name
            for target in targets
        ]
        self._width = max((len(name) for name in names), default=0)
        self._streams = [Stream(name, raw) for name in names]
        self._many = len(targets) > 1
        self._runs: list[str | None] = [target.run for target in targets]

    def log(self, target: int, data: bytes) -> None:
        stream = self._streams[target]
        data = stream.clean(data)
        if self._console.json:
            for line in stream.whole_lines(data):
                self._line_event(target, line)
        elif self._many:
            self._prefixed(stream, stream.whole_lines(data))
        elif data:
            self._write(data)
            stream.at_line_start = data.endswith(b"\n")

    def _prefixed(self, stream: Stream, lines: list[bytes]) -> None:
        prefix = stream.name.ljust(self._width).encode() + b" | "
        if lines:
            self._write(b"".join(prefix + line + b"\n" for line in lines))

    def _line_event(self, target: int, line: bytes) -> None:
        self._console.event(
            {
                "schema": "remoteops.log/1",
                "event": "line",
                "host": self._targets[target].host.name,
                "run": self._runs[target],
                "text": line.decode("utf-8", "replace"),
            }
        )

    def _write(self, data: bytes) -> None:
        self._out.write(data)
        self._out.flush()

    def _flush_line(self, target: int) -> None:
        stream = self._streams[target]
        rest = stream.leftover()
        if self._console.json:
            for line in rest:
                self._line_event(target, line)
        elif self._many:
            self._prefixed(stream, rest)
        else:
            if rest:
                self._write(rest[0])
                stream.at_line_start = rest[0].endswith(b"\n")
            if not stream.at_line_start:
                self._write(b"\n")
                stream.at_line_start = True

    def notice(self, target: int, kind: str, text: str) -> None:
        self._say(target, {"event": "notice", "kind": kind, "text": text}, text, "yellow")

    def status(self, target: int, status: dict[str, Any]) -> None:
        first = self._runs[target] is None
        self._runs[target] = status.get("run") or self._runs[target]
        if first and not self._console.json:
            self._say(target, {}, f"following {words.one_line(status)}", "dim")

    def ended(self, target: int, status: dict[str, Any]) -> None:
        self._flush_line(target)
        if status.get("state") not in TERMINAL and not self._console.json:
            return  # the end of the log so far; how the run stands was said at the beginning
        code = status.get("exit_code")
        text = words.one_line(status) + (
            f" · exit code {code}" if code is not None and f"exit code {code}" not in str(status.get("reason")) else ""
        )
        self._say(target, {"event": "end", "status": status}, text, words.STATE_STYLE.get(str(status.get("state")), ""))
        for proof in status.get("evidence") or []:
            self._say(target, {"event": "evidence", "text": proof}, f"  {proof}", "dim")

    def failed(self, target: int, error: RemoteOpsError) -> None:
        self._flush_line(target)
        self._say(target, {"event": "error", "error": error.as_dict()}, str(error), "bold red")

    def idle(self) -> None:
        """Bytes are written as they come; nothing waits."""

    def _say(self, target: int, event: dict[str, Any], text: str, style: str) -> None:
        """A word of our own: on stderr, so that stdout holds the log and nothing else."""
        if self._console.json:
            if event:
                self._console.event(
                    {
                        "schema": "remoteops.log/1",
                        "host": self._targets[target].host.name,
                        "run": self._runs[target],
                        **event,
                    }
                )
            return
        stream = self._streams[target]
        if not self._many and not stream.at_line_start and sys.stdout.isatty():
            self._write(b"\n")
            stream.at_line_start = True
        name = f"{stream.name}: " if self._many else ""
        screen = self._console.aside
        said = words.fit(plain(f"[remoteops] {name}{text}"), screen.encoding)
        screen.print(said, markup=False, style=style or None, soft_wrap=True)
