"""What the tests of runs and logs share: a place for runs, programs to run, a sink that remembers."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from remoteops.agent import processes, runs, tree
from remoteops.agent.rundir import TERMINAL, RunDir, all_runs, read_json
from remoteops.errors import RemoteOpsError


def until(condition: Callable[[], Any], seconds: float = 20.0, every: float = 0.02) -> Any:
    """What ``condition`` gives once it is true; the test fails when it never is."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"never happened within {seconds} s: {condition}")
        time.sleep(every)


class Place:
    """A state folder of its own, with the verbs called in this process."""

    def __init__(self, folder: Path) -> None:
        self.state_dir = str(folder)
        self.events: list[dict[str, Any]] = []

    def _emit(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    def request(self, **fields: Any) -> dict[str, Any]:
        return {"state_dir": self.state_dir, **fields}

    def start(self, *argv: str, **fields: Any) -> dict[str, Any]:
        return runs.start(self.request(argv=list(argv), **fields), self._emit)

    def start_python(self, code: str, **fields: Any) -> dict[str, Any]:
        return self.start(sys.executable, "-u", "-c", textwrap.dedent(code), **fields)

    def status(self, run: str | None = None) -> dict[str, Any]:
        return runs.status(self.request(run=run), self._emit)

    def stop(self, run: str | None = None, **fields: Any) -> dict[str, Any]:
        return runs.stop(self.request(run=run, **fields), self._emit)

    def end(self, run: str | None = None, seconds: float = 20.0) -> dict[str, Any]:
        """The status once the run is over."""

        def over() -> dict[str, Any] | None:
            status = self.status(run)
            return status if status["state"] in TERMINAL else None

        found: dict[str, Any] = until(over, seconds)
        return found

    def dir(self, run: dict[str, Any]) -> RunDir:
        return RunDir(run["path"])

    def identities(self, run: dict[str, Any]) -> dict[str, Any]:
        return read_json(self.dir(run).supervisor) or {}

    def log(self, run: dict[str, Any]) -> bytes:
        return Path(self.dir(run).log).read_bytes()

    def clean(self) -> None:
        """Kill whatever of our runs still lives."""
        for run in all_runs(os.path.join(self.state_dir, "runs")):
            identities = read_json(run.supervisor) or {}
            for name in ("keeper", "supervisor"):
                if processes.is_alive(identities.get(name)):
                    os.kill(identities[name]["pid"], signal.SIGKILL)
            for _ in range(20):
                members = tree.members(run.id, identities)
                if not members:
                    break
                tree.send(members.values(), signal.SIGKILL)
                time.sleep(0.02)
        # Keepers were started by this process: without a wait they would stay as zombies.
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    return
            except ChildProcessError:
                return


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    found = Place(tmp_path / "state")
    yield found
    found.clean()


class Recorder:
    """A logs.Sink that remembers everything; ``on_log`` may act (or raise) on each piece."""

    def __init__(self, on_log: Callable[[int, bytes], None] | None = None) -> None:
        self.data: dict[int, bytearray] = {}
        self.notices: list[tuple[int, str, str]] = []
        self.statuses: list[tuple[int, dict[str, Any]]] = []
        self.ends: dict[int, dict[str, Any]] = {}
        self.errors: dict[int, RemoteOpsError] = {}
        self._on_log = on_log
        self.on_idle: Callable[[], None] | None = None

    def log(self, target: int, data: bytes) -> None:
        self.data.setdefault(target, bytearray()).extend(data)
        if self._on_log is not None:
            self._on_log(target, data)

    def notice(self, target: int, kind: str, text: str) -> None:
        self.notices.append((target, kind, text))

    def status(self, target: int, status: dict[str, Any]) -> None:
        self.statuses.append((target, status))

    def ended(self, target: int, status: dict[str, Any]) -> None:
        self.ends[target] = status

    def failed(self, target: int, error: RemoteOpsError) -> None:
        self.errors[target] = error

    def idle(self) -> None:
        if self.on_idle is not None:
            self.on_idle()

    def kinds(self) -> list[str]:
        return [kind for _, kind, _ in self.notices]
