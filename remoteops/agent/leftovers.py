"""Engine processes that an earlier run, or somebody else, left on the host.

Three sorts are told apart, because only some may be ended:
  * "ours": carries a run's marker and that run is over (or its directory is gone);
  * "orphan": looks like an engine, belongs to this user, and its parent is gone;
  * "foreign": holds GPU memory and is neither (somebody works with it). Named, never ended.
"""

from __future__ import annotations

import os
from typing import Any, Callable, Dict, List, Optional

from remoteops.agent import gpus as gpu_module
from remoteops.agent import processes, tree
from remoteops.agent.liveness import current_status
from remoteops.agent.rundir import TERMINAL, RunDir, runs_root

ENGINES = ("vllm", "enginecore", "speculators", "sglang", "remoteops.agent.extraction")
"""Words in a command line or process name that mean an inference engine."""


def leftovers(request: Dict[str, Any], emit: Callable[..., None]) -> Dict[str, Any]:
    """The verb: {"leftovers": [...], "gpus": [...]}; see ``find``."""
    gpus = gpu_module.Gpus()
    return {"leftovers": find(request, gpus), "gpus": gpus.devices() if gpus.present else []}


def find(request: Dict[str, Any], gpus: Optional[gpu_module.Gpus] = None) -> List[Dict[str, Any]]:
    """[{"pid", "user", "command", "memory" (bytes of GPU memory or None), "gpus", "sort", "run", "start", "blocks"}]

    ``blocks``: it holds GPU memory or is an engine, so a launch must not go over it.

    On a host with GPUs "orphan" and "foreign" are only those that hold memory of a GPU in ``gpu_indexes`` (None:
    any); "ours" are named wherever they are.
    """
    gpus = gpus or gpu_module.Gpus()
    table = processes.scan()
    held: Dict[int, Dict[str, Any]] = {}
    wanted = request.get("gpu_indexes")
    for row in gpus.processes() if gpus.present else []:
        if wanted is None or row["gpu"] in wanted:
            entry = held.setdefault(row["pid"], {"memory": None, "gpus": []})
            entry["gpus"].append(row["gpu"])
            if row["memory"] is not None:
                entry["memory"] = (entry["memory"] or 0) + row["memory"]
    runs = processes.marked(table)
    over = {run: _is_over(run, request) for run in set(runs.values())}
    found = []
    for pid, process in sorted(table.items()):
        if not process.alive or pid == os.getpid():
            continue
        run = runs.get(pid)
        if run is not None:
            sort = "ours" if over[run] else ""
        elif pid in held:
            orphan = _is_orphan(process, table) and _looks_like_engine(process) and _is_mine(pid)
            sort = "orphan" if orphan else "foreign"
        else:
            sort = ""
        if sort:
            found.append(
                {
                    "pid": pid,
                    "user": processes.user(pid),
                    "command": processes.command(pid),
                    "sort": sort,
                    "run": run,
                    "memory": held.get(pid, {}).get("memory"),
                    "gpus": held.get(pid, {}).get("gpus", []),
                    "start": process.start,
                    "blocks": pid in held or _looks_like_engine(process),
                }
            )
    # Pids of another pid namespace (a container's): the driver names them, /proc does not.
    for pid, entry in sorted(held.items()):
        if pid not in table:
            found.append(
                {
                    "pid": pid,
                    "user": "",
                    "command": "(not visible from here: another container, or just ended)",
                    "sort": "foreign",
                    "run": None,
                    "memory": entry["memory"],
                    "gpus": entry["gpus"],
                    "start": None,
                    "blocks": True,
                }
            )
    return found


def _is_over(run_id: str, request: Dict[str, Any]) -> bool:
    run = RunDir(os.path.join(runs_root(request), run_id))
    if not os.path.isdir(run.path):
        # The run may live under another state_dir; its processes say where.
        for pid, marked in processes.marked(processes.scan()).items():
            if marked == run_id:
                path = processes.environment(pid).get("REMOTEOPS_RUN_DIR")
                if path and os.path.isdir(path):
                    run = RunDir(path)
                    break
        else:
            return True
    status = current_status(run, persist=False)
    return status["state"] in TERMINAL


def _looks_like_engine(process: processes.Process) -> bool:
    text = (process.name + " " + processes.command(process.pid)).lower()
    return any(word in text for word in ENGINES)


def _is_orphan(process: processes.Process, table: Dict[int, processes.Process]) -> bool:
    """Whether its parent is gone: then init, or the user's service manager, has adopted it."""
    parent = table.get(process.ppid)
    return process.ppid <= 1 or parent is None or parent.name in ("systemd", "init")


def _is_mine(pid: int) -> bool:
    try:
        return os.stat("/proc/%d" % pid).st_uid == os.getuid()
    except OSError:
        return False


def end(request: Dict[str, Any]) -> Dict[str, Any]:
    """End what may be ended. {"ended": [rows], "left": [rows that are still there or were never ours to end]}"""
    gpus = gpu_module.Gpus()
    before = find(request, gpus)
    targets = [row for row in before if row["sort"] in ("ours", "orphan")]
    idents = {(row["pid"], row["start"]) for row in targets}

    def alive() -> Dict[int, processes.Process]:
        table = processes.scan()
        roots = {pid for pid, process in table.items() if (pid, process.start) in idents}
        found = roots | processes.descendants(roots, table)
        return {pid: table[pid] for pid in found if table[pid].alive and pid != os.getpid()}

    first = list(alive().values())
    tree.end(alive, first=first, grace=float(request.get("grace", 10)))
    pids = [process.pid for process in first]
    released = tree.gpus_released(gpus, [], pids, 30.0)
    rows = find(request, gpus)
    gone = {(row["pid"], row["start"]) for row in targets} - {(row["pid"], row["start"]) for row in rows}
    return {
        "ended": [row for row in targets if (row["pid"], row["start"]) in gone],
        "left": rows,
        "gpu_released": released,
    }
