"""Follows runs: one or many, on one host or many, through lost links, to their own end.

Each target has a thread with a connection of its own; what arrives is handed over in one place, in the caller's
thread, so a sink needs no lock. A link that is lost is told, opened again with growing pauses, and the log goes on
at the next byte.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from remoteops.agent.follow import unpack
from remoteops.errors import AgentCrashed, ConnectionLost, Interrupted, LinkTimeout, RemoteOpsError, Unreachable
from remoteops.inventory import Host
from remoteops.remote import Agent, open_agent
from remoteops.runs import base

PASSING = (ConnectionLost, LinkTimeout, Unreachable)
"""Errors that another try may cure; any other one ends the following."""
PAUSES = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
HANDED_OVER = 16
"""Pieces of log that may wait for a slow terminal; then the host waits too."""


@dataclass(frozen=True)
class Target:
    """A run to follow; ``run`` None is the newest one on that host."""

    host: Host
    run: str | None = None

    @property
    def name(self) -> str:
        return f"{self.host.name}/{self.run}" if self.run else self.host.name


@dataclass(frozen=True)
class What:
    """What to follow and from where. ``lines`` None is all; ``since`` is unix time, ``since_ago`` seconds."""

    lines: int | None = 10
    since: float | None = None
    since_ago: float | None = None
    grep: str | None = None
    ignore_case: bool = False
    follow: bool = True
    log: bool = True
    status: bool = False
    patience: float | None = None
    """Seconds of lost link after which following gives up; None: never while following, a minute otherwise."""

    def request(self) -> dict[str, Any]:
        """The agent's request."""
        return {
            "lines": self.lines,
            "since": self.since,
            "since_ago": self.since_ago,
            "grep": self.grep,
            "ignore_case": self.ignore_case,
            "follow": self.follow,
            "log": self.log,
            "status": self.status,
        }


class Sink(Protocol):
    """Where a following goes; called in one thread only. ``target`` is the place in the list that was given."""

    def log(self, target: int, data: bytes) -> None:
        """Bytes of the log, exactly as the run wrote them."""

    def notice(self, target: int, kind: str, text: str) -> None:
        """What a user should know: "rotated", "truncated", "replaced", "lost", "back"."""

    def status(self, target: int, status: dict[str, Any]) -> None:
        """The run's status: once at the beginning, then (with ``What.status``) whenever it changes."""

    def ended(self, target: int, status: dict[str, Any]) -> None:
        """The following is over: the run's final status, or its present one with ``follow=False``."""

    def failed(self, target: int, error: RemoteOpsError) -> None:
        """This target cannot be followed (any longer); the others go on."""

    def idle(self) -> None:
        """Nothing has arrived for a moment: a good time to draw."""


@dataclass
class Followed:
    """The outcome: for each target its last status or the error that ended it."""

    statuses: list[dict[str, Any] | None]
    errors: list[RemoteOpsError | None]
    followed_to_end: bool = True

    @property
    def exit_code(self) -> int:
        """0: every run is done (or, without follow, not gone wrong); 1: one failed, was stopped or lost; 3: a host
        could not be asked."""
        codes = [error.exit_code for error in self.errors if error is not None]
        bad = ("failed", "lost", "stopped")
        codes += [1 for status in self.statuses if status is not None and status.get("state") in bad]
        return max(codes, default=0)


@dataclass
class _Worker:
    """One target's thread: reads the stream, survives lost links, hands everything over."""

    index: int
    target: Target
    what: What
    out: queue.Queue[tuple[int, str, Any]]
    stop: threading.Event
    opener: Callable[[Host], Any]
    agent: Agent | None = None
    run: str | None = None
    position: dict[str, Any] | None = None
    lines: int | None = None
    lost_at: float | None = None
    tries: int = 0
    _opened: bool = field(default=False)

    def work(self) -> None:
        self.run, self.lines = self.target.run, self.what.lines
        while not self.stop.is_set():
            try:
                self._once()
                return
            except PASSING as error:
                if self.stop.is_set() or not self._try_again(error):
                    if not self.stop.is_set():
                        self._put("failed", error)
                    return
            except RemoteOpsError as error:
                if not self.stop.is_set():
                    self._put("failed", error)
                return
            except Exception as error:  # noqa: BLE001 - a thread's defect must reach the user as an error, not end in silence
                if not self.stop.is_set():
                    self._put(
                        "failed",
                        AgentCrashed(
                            f"{type(error).__name__}: {error}", host=self.target.host.name, tried="followed a log"
                        ),
                    )
                return

    def _try_again(self, error: RemoteOpsError) -> bool:
        now = time.monotonic()
        if not self._opened:
            return False  # a host that was never reached: say so at once
        if self.lost_at is None:
            self.lost_at, self.tries = now, 0
        patience = self.what.patience if self.what.patience is not None else (None if self.what.follow else 60.0)
        if patience is not None and now - self.lost_at > patience:
            return False
        pause = PAUSES[min(self.tries, len(PAUSES) - 1)] * random.uniform(0.8, 1.2)
        self.tries += 1
        self._put(
            "notice",
            (
                "lost",
                f"{error.message}; the run goes on without us; trying again in {pause:.0f} s"
                if pause >= 1
                else f"{error.message}; the run goes on without us; trying again",
            ),
        )
        return not self.stop.wait(pause)

    def _once(self) -> None:
        request = {**base(self.target.host), **self.what.request(), "run": self.run, "lines": self.lines}
        if self.position is not None:
            request["position"] = self.position
        elif self._opened and self.lines is None:
            request.update(since=None, since_ago=None)
        with self.opener(self.target.host) as agent:
            self.agent = agent
            try:
                for event in agent.stream("run.follow", request):
                    if self.stop.is_set():
                        return
                    self._take(event)
            finally:
                self.agent = None

    def _take(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if kind == "log":
            data = unpack(event)
            self._put("log", data)
            self.position = event["pos"]
        elif kind == "position":
            # Where the host began, before a byte was sent: a link lost now must not begin "the last 10 lines" anew.
            self.position, self.lines = event["pos"], None
        elif kind == "run":
            self.run = event["run"]
            self._opened = True
            if self.lost_at is not None:
                where = f" at byte {self.position['offset']}" if self.position else ""
                self._put(
                    "notice",
                    ("back", f"connected again after {time.monotonic() - self.lost_at:.0f} s; going on{where}"),
                )
                self.lost_at = None
            self._put("status", event["status"])
        elif kind == "log_notice":
            self._put("notice", (event["kind"], event["text"]))
        elif kind == "status":
            self._put("status", event["status"])
        elif kind == "result":
            self._put("ended", event["data"])

    def _put(self, kind: str, value: Any) -> None:
        while not self.stop.is_set():
            try:
                self.out.put((self.index, kind, value), timeout=0.2)
                return
            except queue.Full:
                continue

    def cut(self) -> None:
        """Close the connection from outside, so that a blocked read ends."""
        agent = self.agent
        if agent is not None:
            try:
                agent.link.close()
            except (OSError, RemoteOpsError):
                pass


def follow(
    targets: Sequence[Target], sink: Sink, what: What | None = None, *, opener: Callable[[Host], Any] = open_agent
) -> Followed:
    """Follow every target until its run is over (or, with ``follow=False``, to the end of its log as it is).

    Returns what became of each. Raises Interrupted on Ctrl-C, within a second; the runs are left alone and nothing
    of ours stays on the hosts.
    """
    what = what or What()
    out: queue.Queue[tuple[int, str, Any]] = queue.Queue(HANDED_OVER)
    stop = threading.Event()
    workers = [_Worker(index, target, what, out, stop, opener) for index, target in enumerate(targets)]
    threads = [
        threading.Thread(target=worker.work, name=f"follow-{worker.target.name}", daemon=True) for worker in workers
    ]
    result = Followed([None] * len(targets), [None] * len(targets), what.follow)
    for thread in threads:
        thread.start()
    open_targets = set(range(len(targets)))
    try:
        while open_targets:
            try:
                index, kind, value = out.get(timeout=1.0)
            except queue.Empty:
                sink.idle()
                continue
            _hand_over(sink, result, index, kind, value)
            if kind in ("ended", "failed"):
                open_targets.discard(index)
    except KeyboardInterrupt as error:
        raise Interrupted(
            "stopped following; the run goes on", hint="tail-logs follows it again, stop ends it"
        ) from error
    finally:
        stop.set()
        for worker in workers:
            worker.cut()
        for thread in threads:
            thread.join(timeout=0.3 / max(1, len(threads)))
    return result


def _hand_over(sink: Sink, result: Followed, index: int, kind: str, value: Any) -> None:
    if kind == "log":
        sink.log(index, value)
    elif kind == "notice":
        sink.notice(index, *value)
    elif kind == "status":
        result.statuses[index] = value
        sink.status(index, value)
    elif kind == "ended":
        result.statuses[index] = value
        sink.ended(index, value)
    elif kind == "failed":
        result.errors[index] = value
        sink.failed(index, value)
