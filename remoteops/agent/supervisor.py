"""Watches one run: pumps its log, turns its events into status.json, looks at GPUs and disk, stops it when asked.

It knows nothing about what the run does. Its clock for rates and patience is the steady one. Everything it must
remember is in the run directory, so that a killed supervisor is replaced by a fresh one without a gap (see keeper.py).
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import traceback
from typing import Any, Dict, List, NoReturn, Optional

from remoteops.agent import evidence, processes, tree
from remoteops.agent.lastwords import LastWords
from remoteops.agent.logwriter import LogWriter
from remoteops.agent.lookout import Lookout
from remoteops.agent.processes import Process
from remoteops.agent.progress import Progress
from remoteops.agent.rundir import RunDir, overwrite_json, read_json, write_json

CHUNK = 1 << 20
PUMP_PAUSE = 0.02
"""Seconds to let output gather after a read: a child that writes line by line must not cost a wake-up each."""
TICK = 1.0
RESERVE = 1 << 17
"""Bytes kept aside so that the last words still fit when the disk is full."""
STRAGGLERS = 3.0
GPU_PATIENCE = 30.0


class Supervisor:
    """The supervising loop over one run; ``spec`` as the keeper got it."""

    def __init__(self, spec: Dict[str, Any], log_fd: int, control_fd: int) -> None:
        self.spec = spec
        self.run = RunDir(spec["run"])
        self.log_fd, self.control_fd = log_fd, control_fd
        os.set_blocking(log_fd, False)
        self.writer = LogWriter(self.run)
        self.identities: Dict[str, Any] = dict(
            spec["identities"], supervisor=processes.identity(os.getpid()), cgroup=spec.get("cgroup")
        )
        before = read_json(self.run.supervisor) or {}
        self.oom = before.get("oom") or evidence.oom_counters(self.identities["child"]["pid"])
        self.around = Lookout(self.event, seen=before.get("seen") or [], oom=dict(self.oom))
        self.baseline: List[Dict[str, Any]] = before.get("gpus") or []
        self.started = before.get("started_uptime") or processes.uptime()
        self.started_wall = before.get("started") or time.time()
        self.exit_status: Optional[int] = None
        self.event_offset = 0
        self.progress = Progress(self.started, speaks=bool(spec.get("expect_outcome")))
        self.stopping: Optional[str] = None
        self.told_to_end = False
        self.state: Optional[str] = None
        self.extra: Dict[str, Any] = {}
        self.unsaved: List[Dict[str, Any]] = []
        self.words = LastWords()

    # -- the loop ---------------------------------------------------------------------------------------------------
    def serve(self) -> None:
        """Until the run has ended and its last state is written."""
        self._catch_signals()
        if not self.spec["restarts"]:
            self._reserve()
            if self.around.gpus.present:
                self.baseline = self.around.gpus.devices()
            self.event(
                "started",
                argv=self.spec["argv"],
                pid=self.identities["child"]["pid"],
                survives=self.spec.get("survives"),
            )
        else:
            self.event(
                "notice", text="the supervisor was killed and has been started again (%d)" % self.spec["restarts"]
            )
        self._remember()
        self.look()
        self.save()
        if "report" in self.spec:
            os.write(self.spec["report"], b'{"ready":true}\n')
            os.close(self.spec["report"])
        poll = select.poll()
        for fd in (self.log_fd, self.control_fd, self._wake):
            poll.register(fd, select.POLLIN)
        due = 0.0
        while self.exit_status is None:
            ready = {fd for fd, _ in poll.poll(max(0.0, due - time.monotonic()) * 1000)}
            if self._wake in ready:
                os.read(self._wake, 512)
                due = 0.0
            if self.control_fd in ready:
                self._read_exit(poll)
            if self.log_fd in ready:
                self.pump()
                time.sleep(PUMP_PAUSE)
            if time.monotonic() >= due:
                due = time.monotonic() + TICK
                self.tick()
        self.finish()

    def tick(self) -> None:
        """Once a second: events, stop requests, looks around, status."""
        self.pump()
        self.writer.flush()
        self.take_events()
        self.look()
        self.save()
        request = read_json(self.run.stop)
        if (request or self.told_to_end) and self.stopping is None:
            self.stop(request or {"by": "the host (SIGTERM: a shutdown, or the service manager)", "grace": 10})
        if (
            os.getppid() != self.identities["keeper"]["pid"]
            and self.exit_status is None
            and not processes.is_alive(self.identities["child"])
        ):
            self.exit_status = -1  # the keeper is gone, and with it the exit code

    def pump(self) -> bool:
        """Move what the child wrote into the log; True when there was something."""
        got = False
        for _ in range(64):  # a child that writes faster than the disk must not keep us from everything else
            try:
                data = os.read(self.log_fd, CHUNK)
            except BlockingIOError:
                break
            if not data:
                break
            got = True
            self.words.feed(data, processes.uptime())
            self.writer.write(data)
        return got

    def take_events(self) -> None:
        """Read what the engine appended since the last look."""
        now, wall = processes.uptime(), time.time()
        first = self.event_offset == 0
        for record, behind in self.run.events_from(self.event_offset):
            self.event_offset = behind
            seen = now
            if first and isinstance(record.get("t"), (int, float)):
                seen = min(now, max(self.started, now - (wall - record["t"])))
            self.progress.feed(record, seen, log_offset=self.writer.size)

    def _read_exit(self, poll: select.poll) -> None:
        data = os.read(self.control_fd, 64)
        if data:
            self.exit_status = int(data.split()[0])
        else:
            poll.unregister(self.control_fd)  # the keeper is gone; tick() notices when the child goes too

    # -- looking around ---------------------------------------------------------------------------------------------
    def look(self) -> None:
        """GPUs, disk and the process tree, each at its own pace."""
        if self.around.look(self.spec.get("out") or self.run.path, self.spec.get("gpu_indexes"), self.members):
            self._remember()

    def members(self) -> Dict[int, Process]:
        """The run's live processes."""
        return tree.members(self.run.id, {**self.identities, "seen": self.around.seen})

    # -- writing ----------------------------------------------------------------------------------------------------
    def event(self, name: str, **fields: Any) -> None:
        """Append an event; kept for later when the disk is full."""
        self.unsaved.append({"event": name, **fields})
        while self.unsaved:
            try:
                self.run.event(**self.unsaved[0])
            except OSError:
                self._free_reserve()
                del self.unsaved[:-100]
                return
            self.unsaved.pop(0)

    def status(self) -> Dict[str, Any]:
        """status.json as it should read now."""
        now = processes.uptime()
        return {
            "schema": "remoteops.status/1",
            "run": self.run.id,
            "label": self.spec.get("label") or "",
            "path": self.run.path,
            "state": self.state or self.progress.state,
            "stopping": self.stopping,
            "survives": self.spec.get("survives"),
            "started": round(self.started_wall, 3),
            "elapsed_s": round(now - self.started, 1),
            "updated": round(time.time(), 3),
            "updated_uptime": round(now, 1),
            "pid": self.identities["child"]["pid"],
            "supervisor_pid": os.getpid(),
            **self.progress.fields(now),
            **self.around.found,
            **self.extra,
            "log_bytes": self.writer.size,
            "log_last": self.words.fields(now),
            "problem": self.writer.problem or None,
        }

    def save(self, *, sync: bool = False) -> bool:
        """Write status.json; False when it could not be written."""
        status = self.status()
        try:
            write_json(self.run.status, status, sync=sync)
            return True
        except OSError:
            self._free_reserve()
            return overwrite_json(self.run.status, status)

    def _remember(self) -> None:
        record = {
            **self.identities,
            "seen": self.around.seen,
            "oom": self.oom,
            "gpus": self.baseline,
            "started": self.started_wall,
            "started_uptime": self.started,
            "survives": self.spec.get("survives"),
            "expect_outcome": bool(self.spec.get("expect_outcome")),
        }
        try:
            write_json(self.run.supervisor, record)
        except OSError:
            self._free_reserve()

    def _reserve(self) -> None:
        try:
            fd = os.open(self.run.reserve, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(fd, 0, RESERVE)
            finally:
                os.close(fd)
        except OSError:
            pass

    def _free_reserve(self) -> None:
        try:
            os.unlink(self.run.reserve)
        except OSError:
            pass

    def _catch_signals(self) -> None:
        self._wake, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGTERM, self._told)

    def _told(self, *_: Any) -> None:
        self.told_to_end = True

    # -- ending -----------------------------------------------------------------------------------------------------
    def stop(self, request: Dict[str, Any]) -> None:
        """Ask the child, wait, then kill whatever is left of the tree."""
        self.stopping = "stopped by %s" % (request.get("by") or "an operator")
        self.event("stopping", by=request.get("by"), grace=request.get("grace"))
        self.save()
        child = processes.read(self.identities["child"]["pid"])
        first = [child] if child is not None and processes.is_alive(self.identities["child"]) else []
        done = tree.end(
            self.members,
            first=first,
            grace=float(request.get("grace", 60)),
            tick=self._while_ending,
            done=lambda: not processes.is_alive(self.identities["child"]),
        )
        if done["forced"]:
            self.event("killed", pids=done["forced"], why="did not end within the time of grace")
        if done["left"]:
            self.event(
                "notice", text="not even SIGKILL ended: %s" % ", ".join(str(process.pid) for process in done["left"])
            )

    def _while_ending(self) -> None:
        self.pump()
        self.take_events()

    def finish(self) -> None:
        """The child is gone: last output, stragglers, GPU memory, the run's final state."""
        self._while_ending()
        patience = time.monotonic() + STRAGGLERS
        stragglers = self.members()
        while stragglers and time.monotonic() < patience:
            time.sleep(0.1)
            self._while_ending()
            stragglers = self.members()
        if stragglers:
            named = tree.describe(stragglers)
            self.event(
                "notice",
                text="ending what the run left behind: "
                + "; ".join("%(pid)d %(command)s" % row for row in named)[:2000],
            )
            tree.end(self.members, first=stragglers.values(), grace=5.0, tick=self._while_ending)
        self._while_ending()
        self.extra["gpu_released"] = tree.gpus_released(
            self.around.gpus, self.baseline, self._all_pids(), GPU_PATIENCE, self._while_ending
        )
        self._conclude()
        self.writer.flush()
        deadline = time.monotonic() + 60
        while not self.save(sync=True) and os.path.isdir(self.run.path) and time.monotonic() < deadline:
            time.sleep(0.5)
            self.writer.flush()
        self._free_reserve()

    def _all_pids(self) -> List[int]:
        return [self.identities["child"]["pid"], *self.around.ever]

    def _conclude(self) -> None:
        known = None if self.exit_status in (None, -1) else self.exit_status
        code, name = (None, None) if known is None else evidence.exit_words(known)[:2]
        self.state, reason = evidence.conclude(
            self.progress.outcome,
            self.progress.error,
            known,
            stopping=self.stopping,
            expect_outcome=bool(self.spec.get("expect_outcome")),
        )
        proof = evidence.out_of_memory(self.oom, self._all_pids()) if self.state in ("lost", "failed") else []
        if proof and self.state == "lost":
            reason += "; out of memory"
        self.extra.update(reason=reason, evidence=proof, exit_code=code, signal=name, ended=round(time.time(), 3))
        self.event("ended", state=self.state, reason=reason, exit_code=code, signal=name, evidence=proof)


def main(spec: Dict[str, Any], log_fd: int, control_fd: int) -> NoReturn:
    """Body of the forked supervisor; leaves with 0 when the run's end is on record."""
    try:
        Supervisor(spec, log_fd, control_fd).serve()
    except BaseException:  # noqa: BLE001 - the keeper starts another one; this is for whoever reads supervisor.log
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)
