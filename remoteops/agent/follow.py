"""The verb that follows a run: its log byte for byte, its status as it changes, its end as it was.

It ends by itself only when the run is over and everything in the log was sent; a stream that stops in any other way
means that the link was lost. Log bytes travel as ``{"event": "log", "n": count, "pos": position behind them, "b":
base64}``, or with "z" for base64 of zlib where that is shorter: logs shrink tenfold, which costs the host little and
saves the operator's machine most of its work.
"""

from __future__ import annotations

import base64
import os
import re
import time
import zlib
from typing import Any, Callable, Dict, Optional, Tuple

from remoteops.agent import processes, tail
from remoteops.agent.liveness import current_status
from remoteops.agent.protocol import AgentError
from remoteops.agent.rundir import TERMINAL, RunDir, find

Emit = Callable[..., None]
CHUNK = 1 << 19
POLL = 0.03
"""Seconds between two looks at a quiet log."""
GATHER = 0.015
"""Seconds given to a busy log after a small read, so that bytes travel in large pieces."""
STATUS_EVERY = 1.0


class Lines:
    """Keeps the lines that match; what is not yet a whole line waits."""

    def __init__(self, pattern: Optional[str], ignore_case: bool) -> None:
        try:
            self._pattern = None if pattern is None else re.compile(pattern.encode("utf-8"), re.I if ignore_case else 0)
        except re.error as error:
            raise AgentError(
                "UsageError",
                "%r is no regular expression: %s" % (pattern, error),
                hint="Python's syntax; quote what is meant literally",
            ) from error
        self.waiting = b""

    def matches(self, line: bytes) -> bool:
        return self._pattern is None or self._pattern.search(line) is not None

    def keep(self, data: bytes, *, last: bool = False) -> bytes:
        """The matching whole lines of what came so far; with ``last`` the unfinished one too."""
        if self._pattern is None:
            return data
        lines = (self.waiting + data).split(b"\n")
        self.waiting = lines.pop()
        kept = [line + b"\n" for line in lines if self.matches(line)]
        if last and self.waiting:
            kept.append(self.waiting if self.matches(self.waiting) else b"")
            self.waiting = b""
        return b"".join(kept)


class Follower:
    """One following of one run."""

    def __init__(self, request: Dict[str, Any], emit: Emit) -> None:
        self.request, self.emit = request, emit
        self.run: RunDir = find(request)
        self.lines = Lines(request.get("grep"), bool(request.get("ignore_case")))
        self.reader = tail.LogReader(self.run.log, lambda kind, text: emit("log_notice", kind=kind, text=text))
        self.sent = 0
        self._status: Dict[str, Any] = {}
        self._looked = -1e9
        self._shown: Optional[Tuple[Any, ...]] = None

    def work(self) -> Dict[str, Any]:
        """Until the run is over (or, without "follow", until the end of the log as it is). Raises AgentError."""
        self.status(force=True)
        self.emit("run", run=self.run.id, path=self.run.path, status=self._status)
        wants_log = self.request.get("log", True)
        if wants_log:
            self._begin()
        follow = self.request.get("follow", True)
        while True:
            got = self._pass_on() if wants_log else 0
            if got >= CHUNK // 8:
                self.status()
                continue
            if got:
                time.sleep(GATHER)
            else:
                if self.status()["state"] in TERMINAL or not follow:
                    break
                if not os.path.isdir(self.run.path):
                    raise AgentError(
                        "RunNotFound",
                        "the directory of run %s was deleted while it was followed" % self.run.id,
                        tried=self.run.path,
                        hint="if its processes are still there, stop --leftovers ends them",
                        run=self.run.id,
                    )
                time.sleep(POLL)
            if self._operator_gone():
                raise AgentError("Interrupted", "the operator went away")
        if wants_log:
            self._drain()
        self.status(force=True)
        return {**self._status, "position": self.reader.position(len(self.lines.waiting)), "sent": self.sent}

    def _operator_gone(self) -> bool:
        gone = getattr(self.emit, "gone", None)
        return gone is not None and gone.is_set()

    def _begin(self) -> None:
        position = self.request.get("position")
        if position:
            self.reader.resume(position)
        else:
            self.reader.begin(self._first_offset)
        self.emit("position", pos=self.reader.position())

    def _first_offset(self, fd: int) -> int:
        moment, ago = self.request.get("since"), self.request.get("since_ago")
        if moment is not None or ago is not None:
            wall = float(moment) if moment is not None else time.time() - float(ago or 0)
            steady = None if ago is None or self._other_boot() else processes.uptime() - float(ago)
            offset = tail.since(self.run.log_index, wall=wall, uptime=steady)
            return tail.line_start(fd, min(offset, os.fstat(fd).st_size))
        count = self.request.get("lines", 10)
        if count is None:
            return 0
        if self.request.get("grep") is not None:
            return tail.matching_start(fd, int(count), self.lines.matches)
        return tail.last_lines(fd, int(count))

    def _other_boot(self) -> bool:
        from remoteops.agent.rundir import read_json

        child = (read_json(self.run.supervisor) or {}).get("child") or {}
        return bool(child.get("boot") != processes.boot_id())

    def _pass_on(self, *, last: bool = False) -> int:
        data = self.reader.read(CHUNK)
        kept = self.lines.keep(data, last=last)
        if kept:
            self._send(kept)
        return len(data)

    def _send(self, data: bytes) -> None:
        self.sent += len(data)
        position = self.reader.position(len(self.lines.waiting))
        fields: Dict[str, Any] = {"n": len(data), "pos": position}
        if len(data) >= 2048:
            packed = zlib.compress(data, 1)
            if len(packed) < len(data):
                self.emit("log", z=base64.b64encode(packed).decode("ascii"), **fields)
                return
        self.emit("log", b=base64.b64encode(data).decode("ascii"), **fields)

    def _drain(self) -> None:
        """Everything that is left: a file may be rotated in the last moment, hence the second look.

        Going on to the next of several files is no quiet look, also when that one is empty.
        """
        quiet = 0
        while quiet < 3:
            file = self.reader.file
            quiet = 0 if self._pass_on() or self.reader.file != file else quiet + 1
        self._pass_on(last=True)

    def status(self, *, force: bool = False) -> Dict[str, Any]:
        """The run's state, looked at once a second; sent along when asked for and changed."""
        now = time.monotonic()
        if (
            not force
            and now - self._looked < (STATUS_EVERY if self._status.get("state") not in TERMINAL else 0.0)
            and not self._rewritten()
        ):
            return self._status
        self._looked = now
        self._status = current_status(self.run)
        shown = (self._status.get("state"), self._status.get("updated"))
        if self.request.get("status") and shown != self._shown:
            self._shown = shown
            self.emit("status", status=self._status)
        return self._status

    def _rewritten(self) -> bool:
        try:
            stamp = os.stat(self.run.status).st_mtime_ns
        except OSError:
            return False
        changed = stamp != getattr(self, "_stamp", None)
        self._stamp = stamp
        return changed


def follow(request: Dict[str, Any], emit: Emit) -> Dict[str, Any]:
    """Follow a run.

    Request: "run" (none: the newest), "lines" (10; None: all), "since" (unix time) or "since_ago" (seconds), "grep"
    (regular expression), "ignore_case", "follow" (True), "log" (True), "status" (False: send ``status`` events too),
    "position" (go on there after a lost link).
    Events: ``run``, ``position`` (where it begins), ``log``, ``log_notice``, ``status``. Result: the run's status,
    "position", "sent" (bytes). Raises AgentError: RunNotFound, UsageError.
    """
    return Follower(request, emit).work()


def unpack(event: Dict[str, Any]) -> bytes:
    """The bytes of a ``log`` event. Raises ValueError when they are not what was announced."""
    packed = event.get("z")
    data = zlib.decompress(base64.b64decode(packed)) if packed is not None else base64.b64decode(event["b"])
    if len(data) != event["n"]:
        raise ValueError("a log event announced %d bytes and held %d" % (event["n"], len(data)))
    return data
