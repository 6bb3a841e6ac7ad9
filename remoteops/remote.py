"""Agent: the operator's end of the door. Ships the agent's archive once, calls its verbs, yields their events."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from remoteops import archive
from remoteops.agent.protocol import ERROR, PROTOCOL, READS, RESULT
from remoteops.errors import (
    AgentCrashed,
    ConnectionLost,
    DiskTooSmall,
    LinkError,
    LinkTimeout,
    NoInterpreter,
    RemoteOpsError,
    TransferFailed,
    Unreachable,
    by_kind,
)
from remoteops.launch import FOLDER, OTHER_FOLDERS, SEARCHED, START
from remoteops.ssh.process import Process, RemoteProcess
from remoteops.transport import BaseLink, connect

Event = dict[str, Any]
Request = Mapping[str, Any]

MAX_EVENT = 32 * 1024 * 1024  # bytes of one event's line
MAX_VALUES = 4_000_000  # values in one event: JSON grows about twentyfold in memory
WATCH = 60.0  # seconds without a sign of life after which the agent takes the operator for gone
RETRY_PAUSES = (0.5, 2.0, 5.0)  # seconds before a repeatable verb is asked again on a new connection
_STDERR = 16 * 1024


class Agent:
    """The agent on one host.

    ``reconnect`` opens a new link after a loss, for verbs that may be repeated; without it a loss is an error at once.
    """

    def __init__(self, link: BaseLink, *, reconnect: Callable[[], BaseLink] | None = None) -> None:
        self.link = link
        self._reconnect = reconnect
        self._archive = archive.build()
        self._python: str | None = None
        self._path: str | None = None
        self._entry: str | None = None

    @property
    def host(self) -> Any:
        return self.link.host

    @property
    def host_path(self) -> str:
        """Absolute path of the archive on the host; ships it if need be."""
        if self._path is None:
            self.call("hello", {})
        assert self._path is not None
        return self._path

    @property
    def python(self) -> str:
        """Absolute path of the interpreter that runs the agent on the host."""
        if self._python is None:
            self.call("hello", {})
        assert self._python is not None
        return self._python

    def call(
        self,
        verb: str,
        request: Request,
        *,
        on_event: Callable[[Event], None] | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Run a verb to its end; gives its result's data. Raises what the agent reports, or a LinkError.

        A verb of READS is asked again on a new connection when this one is lost (at most three times).
        """
        for pause in (*RETRY_PAUSES, None):
            try:
                return self._call_once(verb, request, on_event, timeout)
            except ConnectionLost:
                if verb not in READS or self._reconnect is None or pause is None:
                    raise
                self._renew(pause)
        raise AssertionError("unreachable")

    def _call_once(
        self, verb: str, request: Request, on_event: Callable[[Event], None] | None, timeout: float | None
    ) -> dict[str, Any]:
        events = self.stream(verb, request, timeout=timeout)
        try:
            for event in events:
                if event["event"] == RESULT:
                    data = event.get("data")
                    return data if isinstance(data, dict) else {"value": data}
                if on_event is not None:
                    on_event(event)
        finally:
            events.close()
        raise AssertionError("a stream ends with a result or raises")

    def _renew(self, pause: float) -> None:
        assert self._reconnect is not None
        time.sleep(pause)
        self.link.close()
        try:
            self.link = self._reconnect()
        except (Unreachable, LinkTimeout) as error:
            raise ConnectionLost(
                f"the connection was lost and could not be opened again: {error.message}",
                host=self.host.name,
                tried=error.tried,
                hint=error.hint,
            ) from None

    def stream(self, verb: str, request: Request, *, timeout: float | None = None) -> Generator[Event, None, None]:
        """Every event of a verb, the result too. Raises on an error event, and ConnectionLost when the stream ends
        without either. Closing the iterator ends the verb on the host (see agent/protocol.py)."""
        body = (
            json.dumps(
                {
                    "protocol": PROTOCOL,
                    "watch": WATCH,
                    "state_dir": self.host.state_dir,
                    "cache_dir": self.host.cache_dir,
                    "venv": self.host.venv,
                    **request,
                }
            ).encode("ascii")
            + b"\n"
        )
        deadline = None if timeout is None else time.monotonic() + timeout
        for attempt in ("as known", "afresh", "shipped again"):
            if attempt == "shipped again":
                self._ship()
            if attempt != "as known":
                self._path = self._python = self._entry = None
            outcome = yield from self._attempt(verb, body, deadline)
            if outcome is None:
                return
            if outcome == "need-archive":
                self._ship()
                outcome = yield from self._attempt(verb, body, deadline)
                if outcome is None:
                    return
        raise AgentCrashed(
            f"the agent does not start: {outcome}",
            host=self.host.name,
            tried=f"{self._python} {self._path} {verb}",
            hint="does that interpreter run at all on the host?",
        )

    def _attempt(self, verb: str, body: bytes, deadline: float | None) -> Generator[Event, None, str | None]:
        """One start of the verb. Returns None after its end, or in words why it did not start."""
        process = self._start(verb)
        stop_ticking = self.link.every_while(lambda: self._tick(process))
        errors = bytearray()
        started = False
        try:
            process.send(body)
            for line in self._lines(process, errors, deadline):
                if not line.startswith(b"{") and not started:
                    word, _, rest = line.decode("utf-8", "surrogateescape").partition(" ")
                    if word == "need-archive":
                        return word
                    if word == "no-interpreter":
                        raise self._no_interpreter(bytes(errors))
                    if word == "interpreter":
                        self._python = rest
                        continue
                    if word == "archive":
                        self._path = rest
                        continue
                    if word == "entry":
                        self._entry = rest
                        continue
                event = self._event(line)
                started = True
                yield event
                if event["event"] == RESULT:
                    return None
                if event["event"] == ERROR:
                    raise self._error(event)
        finally:
            stop_ticking()
            process.close()
        if isinstance(process, RemoteProcess):
            self.link._check_started([verb], process)
        said = errors.decode("utf-8", "replace").strip()
        if not started and process.exit_signal is None:
            return f"status {process.exit_status}" + (f": {said.splitlines()[-1][:300]}" if said else "")
        signal_name = process.exit_signal or _signal_of(process.exit_status)
        ending = f"was killed by SIG{signal_name}" if signal_name else f"ended with status {process.exit_status}"
        raise ConnectionLost(
            f"the agent {ending} without an answer",
            host=self.host.name,
            tried=verb,
            stderr=said[-4000:],
            hint="memory may have run out on the host, or somebody stopped it; ask again",
        )

    def _start(self, verb: str) -> Process:
        if self._python is not None and self._entry is not None:
            return self.link.start([self._python, "-I", "-S", "-X", "utf8", self._entry, verb])
        host = self.host
        venv_python = f"{host.venv}/bin/python" if host.venv else ""
        return self.link.start(
            [
                "sh",
                "-c",
                START,
                "sh",
                self._archive.name,
                self._archive.sha256,
                verb,
                host.python or "",
                venv_python,
                host.cache_dir,
                *OTHER_FOLDERS,
            ]
        )

    @staticmethod
    def _tick(process: Process) -> None:
        if getattr(process, "send_ready", lambda: False)():
            with contextlib.suppress(Exception):
                process.send(b"\n")

    def _lines(self, process: Process, errors: bytearray, deadline: float | None) -> Iterator[bytes]:
        pending: list[bytes] = []
        size = 0
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise LinkTimeout(
                    "the agent did not finish in time",
                    host=self.host.name,
                    hint="the host may be overloaded; try again",
                )
            got = process.read(left)
            if got is None:
                return
            out, err = got
            if err:
                errors += err
                del errors[:-_STDERR]
            while out:
                head, newline, out = out.partition(b"\n")
                pending.append(head)
                size += len(head)
                if size > MAX_EVENT:
                    raise AgentCrashed(
                        f"the host sent an event of more than {MAX_EVENT >> 20} MiB",
                        host=self.host.name,
                        hint="do not trust this host's answers",
                    )
                if newline:
                    line = b"".join(pending)
                    pending, size = [], 0
                    if line:
                        yield line

    def _event(self, line: bytes) -> Event:
        try:
            if line.count(b",") + line.count(b"[") + line.count(b"{") > MAX_VALUES:
                raise ValueError("too many values")
            event = json.loads(line)
            if not isinstance(event, dict) or not isinstance(event.get("event"), str):
                raise ValueError("no event")
        except (ValueError, RecursionError) as error:
            shown = line[:200].decode("utf-8", "replace")
            raise AgentCrashed(
                f"the host sent something that is no event ({error}): {shown!r}",
                host=self.host.name,
                hint="another program may print on the agent's stdout, or the host is not to be trusted",
            ) from None
        return event

    def _error(self, event: Event) -> RemoteOpsError:
        """The agent's error as ours. Nothing in it is trusted to have the right type."""
        data = event.get("data")
        error = by_kind(str(event.get("kind")))(
            str(event.get("message", ""))[:4000],
            host=self.host.name,
            tried=str(event.get("tried") or "")[:4000],
            hint=str(event.get("hint") or "")[:4000],
        )
        error.data = data if isinstance(data, dict) else {}
        return error

    def _no_interpreter(self, errors: bytes) -> NoInterpreter:
        named = self.host.python
        said = errors.decode("utf-8", "replace").strip()
        return NoInterpreter(
            f"{named} does not run, or is older than Python 3.9"
            if named
            else "there is no Python 3.9 or newer on the host",
            host=self.host.name,
            tried=(named or SEARCHED) + (f"; {said[-500:]}" if said else ""),
            hint="set `python:` of this host in the inventory to an absolute path (a venv's bin/python will do)",
        )

    def _ship(self) -> None:
        """Put the archive on the host: into the cache folder, or where else this user can write."""
        name, data = self._archive.name, self._archive.data
        tried: list[str] = []
        try:
            self.link.upload(data, f"{self.host.cache_dir}/{name}", mode=0o644)
            return
        except (TransferFailed, DiskTooSmall) as error:
            tried.append(f"{self.host.cache_dir}: {error.message}")
        for folder in OTHER_FOLDERS:
            made = self.link.exec(["sh", "-c", FOLDER, "sh", folder], check=False)
            path = made.stdout.decode("utf-8", "surrogateescape").rstrip("\n")
            if made.exit_status != 0 or not path:
                tried.append(f"{folder}: not writable")
                continue
            try:
                self.link.upload(data, f"{path}/{name}", mode=0o644)
                return
            except (TransferFailed, DiskTooSmall) as error:
                tried.append(f"{path}: {error.message}")
        raise TransferFailed(
            "the agent finds no folder to lie in",
            host=self.host.name,
            tried="; ".join(tried),
            hint="set cache_dir of this host in the inventory to a folder that its user can write",
        )


def _signal_of(status: int | None) -> str:
    """The signal behind a status above 128, where a shell stands between the agent and us."""
    with contextlib.suppress(ValueError):
        return signal.Signals((status or 0) - 128).name[3:]
    return ""


@contextlib.contextmanager
def open_agent(host: Any) -> Iterator[Agent]:
    """Connect to a host and give its agent; closes the link at the end. Raises LinkError."""
    agent = Agent(connect(host), reconnect=lambda: connect(host))
    try:
        yield agent
    finally:
        agent.link.close()


__all__ = ["Agent", "Event", "LinkError", "open_agent"]
