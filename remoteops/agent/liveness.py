"""What a run's state really is now: what is written down, checked against the processes it speaks of.

A written "running" is believed only while the very process (pid, start time, boot) that wrote it lives. If nobody
supervises any more, the events the engine left are read again; if the engine is gone too and said nothing, the run
is lost, with whatever evidence the host still has.
"""

from __future__ import annotations

import os
import time
from typing import Any, Dict, List, Optional

from remoteops.agent import evidence, processes, tree
from remoteops.agent.progress import Progress
from remoteops.agent.rundir import TERMINAL, RunDir, read_json, write_json

STARTING_PATIENCE = 30.0
"""Seconds a run may have no supervisor on record before its launch is taken for failed."""
_ERROR_WORDS = (b"Error", b"Exception", b"ERROR", b"CRITICAL", b"FATAL", b"Killed", b"KeyboardInterrupt")

def current_status(run: RunDir, *, persist: bool = True) -> Dict[str, Any]:
    """status.json as it should read now. ``persist`` writes a newly found end back, so that its evidence is kept."""
    written = read_json(run.status) or {
        "schema": "remoteops.status/1",
        "run": run.id,
        "path": run.path,
        "state": "queued",
    }
    if written.get("state") in TERMINAL:
        return _with_place(run, written)
    identities = read_json(run.supervisor)
    if identities is None:
        return _never_started(run, written)
    guards = [processes.is_alive(identities.get(name)) for name in ("supervisor", "keeper")]
    if guards[0]:
        return {**written, "supervised": True}
    again = read_json(run.status) or written  # it may have ended between the two looks
    if again.get("state") in TERMINAL:
        return _with_place(run, again)
    if guards[1]:
        return {**written, "supervised": True, "notice": "the supervisor is being started again"}
    return _unsupervised(run, again, identities, persist)


def _never_started(run: RunDir, written: Dict[str, Any]) -> Dict[str, Any]:
    try:
        age = time.time() - os.stat(run.path).st_mtime
    except OSError:
        age = 0.0
    if 0 <= age < STARTING_PATIENCE:
        return {**written, "state": "queued"}
    return {**written, "state": "lost", "reason": "it was never started: the launch was cut off", "evidence": []}


def _unsupervised(run: RunDir, written: Dict[str, Any], identities: Dict[str, Any], persist: bool) -> Dict[str, Any]:
    started = float(identities.get("started_uptime") or 0.0)
    progress = Progress(started, speaks=bool(identities.get("expect_outcome")))
    now = processes.uptime()
    for record in run.read_events():
        stamp = record.get("t")
        progress.feed(
            record, started + max(0.0, stamp - identities["started"]) if isinstance(stamp, (int, float)) else now
        )
    rebooted = evidence.boot_changed(identities)
    alive = {} if rebooted else tree.members(run.id, identities)
    status = {**written, "supervised": False}
    fields = progress.fields(now)
    status.update({name: value for name, value in fields.items() if value is not None})
    if processes.is_alive(identities.get("child")) or (alive and progress.outcome is None):
        return {
            **status,
            "state": progress.state,
            "notice": "nobody supervises this run any more (its supervisor and keeper were "
            "killed); the engine still works. `stop` ends it",
        }
    proof: List[str] = []
    state, reason = evidence.conclude(
        progress.outcome, progress.error, None, stopping=None, expect_outcome=bool(identities.get("expect_outcome"))
    )
    if state == "lost":
        if rebooted:
            reason = "the host was rebooted while it ran"
            proof = ["boot id was %s, is %s" % ((identities.get("child") or {}).get("boot"), processes.boot_id())]
        else:
            pids = [
                who["pid"] for who in [identities.get("child") or {}, *(identities.get("seen") or [])] if "pid" in who
            ]
            proof = evidence.out_of_memory(identities.get("oom"), pids)
            reason = "its processes are gone and left no outcome (supervisor, keeper and engine)" + (
                "; out of memory" if proof else ""
            )
        if written.get("problem"):
            proof.append(str(written["problem"]))
    status.update(state=state, reason=reason, evidence=proof, exit_code=None, signal=None, ended=written.get("updated"))
    if alive:
        status["notice"] = "still there: %s" % ", ".join(
            "%d %s" % (pid, processes.command(pid, 60)) for pid in sorted(alive)
        )
    if persist:
        try:
            write_json(run.status, status)
        except OSError:
            pass
    return _with_place(run, status)


def _with_place(run: RunDir, status: Dict[str, Any]) -> Dict[str, Any]:
    """Adds the last error of a run that went wrong, with its place in the log, where the engine itself named none."""
    if status.get("state") in ("failed", "lost") and not (status.get("last_error") or {}).get("message"):
        found = last_error(run.log)
        if found:
            return {**status, "last_error": found}
    return status


def last_error(path: str, window: int = 1 << 18) -> Optional[Dict[str, Any]]:
    """{"kind", "message", "hint", "log_offset"} of the last line in the log's end that reads like an error."""
    try:
        with open(path, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            base = max(0, size - window)
            stream.seek(base)
            data = stream.read(window)
    except OSError:
        return None
    end = len(data)
    while end > 0:
        begin = data.rfind(b"\n", 0, end) + 1
        line = data[begin:min(end, begin + 1000)]
        if any(word in line for word in _ERROR_WORDS):
            text = line.decode("utf-8", "replace").strip()
            return {"kind": "", "message": text[:500], "hint": "", "log_offset": base + begin}
        end = begin - 1
    return None
