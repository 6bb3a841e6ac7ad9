"""Which processes belong to a run, and how they are ended.

vLLM's engine core and its workers change their names, open sessions of their own and outlive their parents. Four traces
lead to them, and any one is enough: the marker in their environment, being a descendant of a process that is known
to belong, sharing its session, or the run's own control group.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any, Callable, Dict, Iterable, List, Optional, Set

from remoteops.agent import processes
from remoteops.agent.processes import Process


def members(
    run_id: str, identities: Dict[str, Any], *, everything: Optional[Dict[int, Process]] = None
) -> Dict[int, Process]:
    """pid -> process of every live process of the run, keeper and supervisor and the caller left out.

    ``identities`` is what supervisor.json holds: "keeper", "supervisor", "child", "seen" (identities of the processes
    that were found before), "cgroup" (path of a control group that is the run's alone, or None).
    """
    table = processes.scan() if everything is None else everything
    known: Set[int] = set()
    guards: Set[int] = set()
    for name in ("keeper", "supervisor"):
        who = identities.get(name)
        if who and _is(table, who):
            guards.add(who["pid"])
    for who in [identities.get("child") or {}, *(identities.get("seen") or [])]:
        if _is(table, who):
            known.add(who["pid"])
    known.update(pid for pid, run in processes.marked(table).items() if run == run_id)
    cgroup = identities.get("cgroup")
    if cgroup:
        known.update(
            pid
            for pid in table
            if any(path == cgroup or path.startswith(cgroup + "/") for path in processes.cgroups(pid))
        )
    while True:
        grown = known | processes.descendants(known | guards, table)
        # A session whose leader belongs to the run: all of it does.
        sessions = {table[pid].session for pid in grown if pid in table and table[pid].session == pid}
        grown |= {pid for pid, process in table.items() if process.session in sessions}
        if grown == known:
            break
        known = grown
    spared = guards | {os.getpid()} | _ancestors(os.getpid(), table)
    return {pid: table[pid] for pid in known - spared if pid in table and table[pid].alive}


def _is(table: Dict[int, Process], who: Dict[str, Any]) -> bool:
    process = table.get(who.get("pid", -1))
    return process is not None and process.start == who.get("start") and who.get("boot") == processes.boot_id()


def _ancestors(pid: int, table: Dict[int, Process]) -> Set[int]:
    found: Set[int] = set()
    while pid in table and pid not in found and pid > 1:
        found.add(pid)
        pid = table[pid].ppid
    return found


def send(targets: Iterable[Process], number: int) -> None:
    """Signal exactly those processes: one whose pid was used again meanwhile is left alone."""
    for target in targets:
        now = processes.read(target.pid)
        if now is not None and now.start == target.start and now.alive:
            try:
                os.kill(target.pid, number)
            except (ProcessLookupError, PermissionError):
                pass


def end(
    find: Callable[[], Dict[int, Process]],
    *,
    first: Iterable[Process],
    grace: float,
    kill_wait: float = 20.0,
    tick: Callable[[], None] = lambda: None,
    done: Callable[[], bool] = lambda: False,
) -> Dict[str, Any]:
    """Ask ``first`` with SIGTERM, wait ``grace`` seconds for all that ``find`` names to be gone, then SIGKILL until
    they are.

    Nothing is asked when ``done`` says that the asked ones have ended: their stragglers get SIGTERM and five seconds.
    Returns {"forced": [pids that had to be killed], "left": [Process… that not even SIGKILL ended]}.
    """
    send(first, signal.SIGTERM)
    deadline = time.monotonic() + grace
    asked = False
    while time.monotonic() < deadline:
        tick()
        alive = find()
        if not alive:
            return {"forced": [], "left": []}
        if done() and not asked:
            asked = True
            send(alive.values(), signal.SIGTERM)
            deadline = min(deadline, time.monotonic() + 5.0)
        time.sleep(0.1)
    forced: Set[int] = set()
    deadline = time.monotonic() + kill_wait
    while True:
        tick()
        alive = find()
        if not alive or time.monotonic() > deadline:
            return {"forced": sorted(forced), "left": list(alive.values())}
        forced.update(alive)
        send(alive.values(), signal.SIGKILL)
        time.sleep(0.1)


def describe(pids: Iterable[int]) -> List[Dict[str, Any]]:
    """[{"pid", "user", "command"}] for people."""
    rows = [{"pid": pid, "user": processes.user(pid), "command": processes.command(pid)} for pid in sorted(pids)]
    return [row for row in rows if row["command"]]  # the others are gone already


def gpus_released(
    gpus: Any,
    baseline: List[Dict[str, Any]],
    pids: Iterable[int],
    patience: float,
    tick: Callable[[], None] = lambda: None,
) -> Optional[bool]:
    """Wait until none of ``pids`` holds GPU memory and use is back near ``baseline``; None on a host without GPUs.

    Inside a container the driver may show no pids at all: then the devices' memory alone decides.
    """
    if not gpus.present:
        return None
    wanted = set(pids)
    before = {device["index"]: device["memory_used"] or 0 for device in baseline}
    deadline = time.monotonic() + patience
    while True:
        tick()
        holders = gpus.processes()
        mine = [row for row in holders if row["pid"] in wanted]
        others = {row["gpu"] for row in holders} - {row["gpu"] for row in mine}
        full = [
            device
            for device in gpus.devices()
            if device["index"] in before
            and device["index"] not in others
            and (device["memory_used"] or 0) > before[device["index"]] + (512 << 20)
        ]
        if not mine and not full:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.3)
