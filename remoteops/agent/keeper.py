"""The process that stays: parent of the run's child and of its supervisor.

It does next to nothing, so that nothing can go wrong in it: it starts the child, starts the supervisor, waits. A killed
supervisor is started again and goes on where the old one was; the log's pipe lives here, so the child never notices.
As "subreaper" it is the parent of every orphan of the run, so that children which became daemons are still found.

    run.start --> keeper (own session) --+--> child (own session; stdout and stderr are the log's pipe)
                                         +--> supervisor (a fork of the keeper)
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional, Tuple

from remoteops.agent import processes, supervisor
from remoteops.agent.rundir import RunDir

_SUBREAPER = 36
_PIPE_SIZE = 1 << 20


def command_line(interpreter: str, root: str) -> List[str]:
    """What starts a keeper: its specification comes on stdin, its report (one JSON line) on stdout."""
    return [
        interpreter,
        "-I",
        "-S",
        "-c",
        "import sys; sys.path.insert(0, sys.argv[1]); from remoteops.agent.keeper import main; main()",
        root,
    ]


class Keeper:
    """One run's keeper. ``spec``: {"run" (path), "argv", "env", "cwd", …what the supervisor needs}."""

    def __init__(self, spec: Dict[str, Any]) -> None:
        self.spec = spec
        self.run = RunDir(spec["run"])
        self.log = self._pipe(_PIPE_SIZE)
        self.child: Optional[subprocess.Popen[bytes]] = None
        self.exit_status: Optional[int] = None
        self.supervisor = 0
        self.control: Tuple[int, int] = (-1, -1)

    @staticmethod
    def _pipe(size: int = 0) -> Tuple[int, int]:
        read, write = os.pipe2(os.O_CLOEXEC)
        if size:
            try:
                fcntl.fcntl(write, getattr(fcntl, "F_SETPIPE_SZ", 1031), size)
            except OSError:
                pass
        return read, write

    def start_child(self) -> Dict[str, Any]:
        """Start the run's own program; returns its identity. Raises OSError when it cannot be executed."""
        self.child = subprocess.Popen(
            self.spec["argv"],
            env=self.spec["env"],
            cwd=self.spec["cwd"],
            stdin=subprocess.DEVNULL,
            stdout=self.log[1],
            stderr=self.log[1],
            start_new_session=True,
            restore_signals=True,
        )
        found = processes.identity(self.child.pid)
        if found is None:
            raise OSError("the child vanished at once")
        return found

    def start_supervisor(self, restarts: int) -> None:
        """Fork the supervisor; a restarted one reads on from the same pipe."""
        if self.control[0] >= 0:
            os.close(self.control[0])
            os.close(self.control[1])
        self.control = self._pipe()
        self.spec["restarts"] = restarts
        self.supervisor = os.fork()
        if self.supervisor == 0:
            os.close(self.control[1])
            supervisor.main(self.spec, self.log[0], self.control[0])
        if self.exit_status is not None:
            self._tell(self.exit_status)

    def _tell(self, status: int) -> None:
        try:
            os.write(self.control[1], b"%d\n" % status)
        except OSError:
            pass

    def wait(self) -> None:
        """Until the supervisor has said how the run ended and left by itself."""
        restarts, started = 0, time.monotonic()
        while True:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                return
            if self.child is not None and pid == self.child.pid:
                self.exit_status = status
                self._tell(status)
            elif pid == self.supervisor:
                if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
                    return
                restarts += 1
                if time.monotonic() - started < 5:
                    time.sleep(min(5.0, 0.1 * 2 ** min(restarts, 6)))
                started = time.monotonic()
                self.start_supervisor(restarts)


def main() -> None:
    """Entry point; never returns."""
    spec = json.loads(sys.stdin.buffer.read())
    report = os.dup(1)
    os.set_inheritable(report, False)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    try:
        os.setsid()
    except OSError:
        pass  # already the leader of a session
    # Handlers, not SIG_IGN: an ignored signal would stay ignored in the child, a handler does not survive its exec.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    # An end asked of the keeper (a service manager, a shutdown) is for the supervisor, which ends the whole tree.
    try:
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    except (OSError, AttributeError):
        pass
    keeper = Keeper(spec)

    def pass_on(*_: Any) -> None:
        if keeper.supervisor:
            os.kill(keeper.supervisor, signal.SIGTERM)

    signal.signal(signal.SIGTERM, pass_on)
    try:
        child = keeper.start_child()
    except (OSError, ValueError) as error:
        os.write(report, json.dumps({"error": str(error)}).encode() + b"\n")
        os._exit(1)
    if spec.get("scoped"):
        own = [path for path in processes.cgroups(os.getpid()) if spec["unit"] in path]
        spec["cgroup"] = own[0] if own else None
    spec["identities"] = {"keeper": processes.identity(os.getpid()), "child": child}
    spec.pop("env")
    spec["report"] = report
    keeper.start_supervisor(0)
    os.close(report)
    spec.pop("report")
    keeper.wait()
    os._exit(0)
