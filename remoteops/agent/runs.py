"""Verbs over runs: start, list, status, stop. A run is any program; what it does is its own business."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, Callable, Dict, List, Optional

from remoteops.agent import gpus as gpu_module
from remoteops.agent import keeper, leftovers, processes, survival, tree
from remoteops.agent.liveness import current_status
from remoteops.agent.processes import MARKER
from remoteops.agent.protocol import AgentError
from remoteops.agent.rundir import TERMINAL, RunDir, all_runs, create, find, read_json, runs_root, write_json

Emit = Callable[..., None]
START_TIMEOUT = 30.0
STOP_GRACE = 60.0
SETTLE = 4.0
"""Seconds that a launch waits for leftovers to go by themselves."""


def start(request: Dict[str, Any], emit: Emit) -> Dict[str, Any]:
    """Start a program that outlives the link, and see it alive before saying so.

    Request: "argv" [str], "env" {str: str} (added to this environment), "cwd", "request" (any object; becomes
    request.json), "label", "out" (folder whose disk is watched), "allow_second", "force", "expect_outcome",
    "timeouts" {"start": seconds}. ``{run_dir}``, ``{run_id}`` and ``{agent}`` in argv and env are replaced.
    Result: {"run", "path", "pid", "supervisor_pid", "survives", "warning", "status"}.
    Raises AgentError: UsageError, RunActive, GpuBusy, HostStateError.
    """
    argv = request.get("argv")
    if not isinstance(argv, list) or not argv or not all(isinstance(item, str) for item in argv):
        raise AgentError("UsageError", "run.start needs argv, a list of strings")
    root = runs_root(request)
    try:
        os.makedirs(root, mode=0o700, exist_ok=True)
        lock = os.open(os.path.join(root, ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise AgentError(
            "HostStateError",
            "the state folder cannot be written: %s" % error,
            tried="mkdir %s" % root,
            hint="free space there, or set state_dir in the inventory",
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two operators who start at once: the second one sees the first one's run
        again = _started_before(request, root)
        if again is not None:
            return _result(again)
        env = {**os.environ, **{name: str(value) for name, value in (request.get("env") or {}).items()}}
        env.pop(processes.BOOT_ID_SEAM, None)
        gpus = gpu_module.Gpus()
        indexes = gpu_module.visible(env.get("CUDA_VISIBLE_DEVICES"), gpus.devices()) if gpus.present else None
        _refuse_second(request, root)
        _refuse_leftovers(request, gpus, indexes)
        return _launch(request, create(root), env, indexes)
    finally:
        os.close(lock)


def _started_before(request: Dict[str, Any], root: str) -> Optional[RunDir]:
    """The run that this very request has started already, when its answer was lost with the link."""
    token = request.get("token")
    for run in all_runs(root)[:10] if token else []:
        if (read_json(run.request) or {}).get("token") == token:
            return run
    return None


def _refuse_second(request: Dict[str, Any], root: str) -> None:
    if request.get("allow_second"):
        return
    for run in all_runs(root):
        status = current_status(run)
        if status["state"] not in TERMINAL:
            raise AgentError(
                "RunActive",
                "run %s is %s on this host" % (run.id, status["state"]),
                tried="looked in %s" % root,
                hint="follow it (tail-logs %s), stop it (stop %s), or allow a second one" % (run.id, run.id),
                run=run.id,
                state=status["state"],
            )


def _refuse_leftovers(request: Dict[str, Any], gpus: gpu_module.Gpus, indexes: Optional[List[int]]) -> None:
    if request.get("force"):
        return
    # A second run on purpose shares the host with the first one, whose processes are no leftovers: find() omits them.
    # An engine that is just ending gets a moment to be gone.
    deadline = time.monotonic() + SETTLE
    while True:
        found = [row for row in leftovers.find({**request, "gpu_indexes": indexes}, gpus) if row["blocks"]]
        if not found or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    if found:
        names = "; ".join(
            "pid %d (%s, %s) %s" % (row["pid"], row["user"] or "?", _size(row["memory"]), row["command"][:80])
            for row in found[:6]
        )
        raise AgentError(
            "GpuBusy",
            "%d process(es) of earlier engines are still there: %s" % (len(found), names),
            tried="looked at GPUs and processes",
            hint="stop --leftovers ends those that are yours; --force starts all the same",
            leftovers=found,
        )


def _size(count: Optional[int]) -> str:
    return "no GPU memory seen" if count is None else "%.1f GiB of GPU memory" % (count / 2**30)


def _own_root() -> str:
    """Where this process imports the agent from: the archive, its unpacked twin, or a source tree."""
    import remoteops

    return os.path.dirname(os.path.abspath(next(iter(remoteops.__path__))))


def _import_root(run: RunDir) -> str:
    """Where Python finds this agent: a copy of the archive in the run directory, or the source tree it was started
    from."""
    place = _own_root()
    for archive in (place, place + ".pyz"):  # verbs run from the archive's unpacked twin beside it
        if os.path.isfile(archive):
            shutil.copyfile(archive, run.archive)
            return run.archive
    return place


def _launch(request: Dict[str, Any], run: RunDir, env: Dict[str, str], indexes: Optional[List[int]]) -> Dict[str, Any]:
    try:
        agent = _import_root(run)
        write_json(
            run.request,
            {
                "schema": "remoteops.request/1",
                "run": run.id,
                "label": request.get("label") or "",
                "argv": request["argv"],
                "cwd": request.get("cwd"),
                "token": request.get("token"),
                "env_names": sorted(request.get("env") or {}),
                "created": time.time(),
                **(request.get("request") or {}),
            },
        )
    except OSError as error:
        shutil.rmtree(run.path, ignore_errors=True)
        raise AgentError(
            "HostStateError",
            "the run directory cannot be written: %s" % error,
            tried="wrote %s" % run.request,
            hint="free space on that disk, or set state_dir in the inventory",
        ) from error
    words = {"{run_dir}": run.path, "{run_id}": run.id, "{agent}": agent}

    def fill(text: str) -> str:
        for word, value in words.items():
            text = text.replace(word, value)
        return text

    way = survival.choose("remoteops-" + run.id)
    env = {name: fill(value) for name, value in env.items()}
    env.update({MARKER: run.id, "REMOTEOPS_RUN_DIR": run.path, "PYTHONUNBUFFERED": env.get("PYTHONUNBUFFERED", "1")})
    cwd = os.path.abspath(os.path.expanduser(request.get("cwd") or run.path))
    spec = {
        "run": run.path,
        "argv": [fill(item) for item in request["argv"]],
        "env": env,
        "cwd": cwd,
        "label": request.get("label") or "",
        "survives": way.name,
        "expect_outcome": bool(request.get("expect_outcome")),
        "gpu_indexes": indexes,
        "unit": "remoteops-" + run.id,
        "scoped": bool(way.prefix),
        "out": os.path.expanduser(fill(request["out"])) if request.get("out") else None,
    }
    report = _start_keeper(run, way, spec, float((request.get("timeouts") or {}).get("start", START_TIMEOUT)))
    if "error" in report:
        shutil.rmtree(run.path, ignore_errors=True)
        raise AgentError(
            "HostStateError",
            "the program could not be started: %s" % report["error"],
            tried="%s in %s" % (fill(request["argv"][0]), cwd),
            hint="check that path on the host",
        )
    return _result(run, way.warning)


def _result(run: RunDir, warning: str = "") -> Dict[str, Any]:
    """What a launch answers, once the run was seen alive (or already over)."""
    identities = read_json(run.supervisor) or {}
    status = current_status(run)
    child = identities.get("child") or {}
    alive = processes.is_alive(child)
    if not alive and status["state"] not in TERMINAL and not processes.is_alive(identities.get("supervisor")):
        raise AgentError(
            "HostStateError",
            "the run vanished while it was starting",
            tried="pid %s" % child.get("pid"),
            hint="see %s" % run.supervisor_log,
            run=run.id,
        )
    return {
        "run": run.id,
        "path": run.path,
        "pid": child.get("pid"),
        "identity": child,
        "supervisor_pid": (identities.get("supervisor") or {}).get("pid"),
        "survives": identities.get("survives"),
        "warning": warning,
        "alive": alive,
        "status": status,
    }


def _start_keeper(run: RunDir, way: survival.Way, spec: Dict[str, Any], timeout: float) -> Dict[str, Any]:
    clean = {name: value for name, value in os.environ.items() if name not in (MARKER, "REMOTEOPS_RUN_DIR")}
    with open(run.supervisor_log, "ab") as errors:
        started = subprocess.Popen(
            [*way.prefix, *keeper.command_line(sys.executable, _own_root())],
            env={**clean, **way.env},
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            close_fds=True,
        )
    assert started.stdin is not None and started.stdout is not None
    try:
        started.stdin.write(json.dumps(spec).encode())
        started.stdin.close()
    except OSError:
        pass
    ready, _, _ = select.select([started.stdout], [], [], timeout)
    line = started.stdout.readline() if ready else b""
    started.stdout.close()
    started.returncode = 0  # it is meant to outlive this process; Popen must not warn about that
    try:
        return dict(json.loads(line))
    except ValueError:
        said = ""
        try:
            with open(run.supervisor_log, "rb") as stream:
                said = stream.read()[-400:].decode("utf-8", "replace").strip()
        except OSError:
            pass
        # Whatever it did start must not live on without anybody who knows of it.
        try:
            os.killpg(started.pid, signal.SIGKILL)
        except OSError:
            pass
        tree.send(tree.members(run.id, {}).values(), signal.SIGKILL)
        return {"error": "no word from its keeper within %.0f s%s" % (timeout, ": " + said if said else "")}


def list_runs(request: Dict[str, Any], emit: Emit) -> Dict[str, Any]:
    """{"runs": [status, newest first], "state_dir"}; "limit" (default 20) bounds it."""
    runs = all_runs(runs_root(request))
    return {
        "runs": [current_status(run) for run in runs[: int(request.get("limit") or 20)]],
        "total": len(runs),
        "state_dir": os.path.dirname(runs_root(request)),
    }


def status(request: Dict[str, Any], emit: Emit) -> Dict[str, Any]:
    """The status of one run ("run"; none named: the newest). Raises AgentError(RunNotFound)."""
    return current_status(find(request))


def stop(request: Dict[str, Any], emit: Emit) -> Dict[str, Any]:
    """Stop a run's whole tree and see it gone. With "leftovers" true: end what earlier engines left instead.

    Request: "run", "grace" (seconds between asking and killing, default 60), "by" (who asks). Two operators may ask
    at once: the first one's request counts and both see the end. Result: the final status and "already" (it was over
    before). Raises RunNotFound, HostStateError.
    """
    if request.get("leftovers"):
        return leftovers.end(request)
    run = find(request)
    before = current_status(run)
    if before["state"] in TERMINAL:
        return {**before, "already": True}
    grace = float(request.get("grace", STOP_GRACE))
    asked = {"by": request.get("by") or processes.user(os.getpid()) or "an operator", "grace": grace, "t": time.time()}
    first = not os.path.exists(run.stop)
    if first:
        try:
            write_json(run.stop, asked)
        except OSError:
            pass  # a full disk: the signals below do it
    deadline = time.monotonic() + grace + 90
    told = 0.0
    while time.monotonic() < deadline:
        identities = read_json(run.supervisor) or {}
        now = current_status(run)
        if now["state"] in TERMINAL:
            return _stopped(run, now, identities)
        if not processes.is_alive(identities.get("supervisor")) and not processes.is_alive(identities.get("keeper")):
            return _stop_alone(run, identities, asked)
        if processes.is_alive(identities.get("supervisor")):
            os.kill(identities["supervisor"]["pid"], signal.SIGUSR1)
        if time.monotonic() - told > 5:
            told = time.monotonic()
            emit("stopping", run=run.id, processes=tree.describe(tree.members(run.id, identities)))
        time.sleep(0.2)
    left = tree.describe(tree.members(run.id, read_json(run.supervisor) or {}))
    raise AgentError(
        "HostStateError",
        "run %s did not end: %d process(es) are still there" % (run.id, len(left)),
        tried="SIGTERM, then SIGKILL",
        hint="a process in state D waits for a device or a file server; see data",
        processes=left,
        run=run.id,
    )


def _stopped(run: RunDir, status: Dict[str, Any], identities: Dict[str, Any]) -> Dict[str, Any]:
    left = tree.describe(tree.members(run.id, identities))
    if left:
        raise AgentError(
            "HostStateError",
            "run %s says %s, but %d process(es) are still there" % (run.id, status["state"], len(left)),
            tried="SIGTERM, then SIGKILL",
            hint="see data",
            processes=left,
            run=run.id,
        )
    return {**status, "already": False}


def _stop_alone(run: RunDir, identities: Dict[str, Any], asked: Dict[str, Any]) -> Dict[str, Any]:
    """Nobody supervises the run: do here what the supervisor would have done."""
    gpus = gpu_module.Gpus()
    members = tree.members(run.id, identities)
    child = identities.get("child")
    first = [
        process for process in members.values() if processes.is_alive(child) and process.pid == (child or {}).get("pid")
    ] or list(members.values())
    tree.end(
        lambda: tree.members(run.id, identities),
        first=first,
        grace=asked["grace"],
        done=lambda: not processes.is_alive(child),
    )
    released = tree.gpus_released(gpus, identities.get("gpus") or [], list(members), 30.0)
    final = {**current_status(run, persist=False), "gpu_released": released, "already": False}
    if final["state"] == "lost":
        final.update(
            state="stopped", reason="stopped by %s (nobody supervised it any more)" % asked["by"], ended=time.time()
        )
    try:
        write_json(run.status, final)
        run.event(
            "ended",
            state=final["state"],
            reason=final.get("reason"),
            exit_code=None,
            signal=None,
            evidence=final.get("evidence") or [],
        )
    except OSError:
        pass
    return _stopped(run, final, identities)
