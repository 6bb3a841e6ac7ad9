"""The verb that reads back what a run wrote. The reading is done by a child in the host's venv (torch); this side
needs nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Any, Callable, Dict, Optional

from remoteops.agent import manifest, venv
from remoteops.agent.protocol import AgentError
from remoteops.agent.rundir import RunDir, find, read_json

CHILD = "remoteops.agent.extraction.verify_child"


def verify(request: Dict[str, Any], emit: Callable[..., None]) -> Dict[str, Any]:
    """Check a run's output folder.

    Request: "run" (none: the newest) or "out" (a folder), "venv", "reference" (rows to recompute with transformers,
    default 0), "device". Events: ``progress``. Result: the report of extraction/check.py and "run". Raises
    RunNotFound, OutputMismatch, MissingVenv, RunFailed.
    """
    run: Optional[RunDir] = None
    job: Dict[str, Any] = {}
    if request.get("out"):
        out = os.path.abspath(os.path.expanduser(str(request["out"])))
    else:
        run = find(request)
        job = (read_json(run.request) or {}).get("extraction") or {}
        out = output_of(run)
    if not os.path.isfile(os.path.join(out, manifest.NAME)):
        raise AgentError(
            "OutputMismatch",
            "there is nothing to verify in %s: no manifest" % out,
            tried=manifest.NAME,
            hint="the run ended before it wrote a sample: fab tail-logs shows why"
            if run
            else "name the output folder of a run",
        )
    python = venv.python_of(request.get("venv"))
    asked = {
        "out": out,
        "reference": int(request.get("reference") or 0),
        "device": request.get("device"),
        "job": {"trust_remote_code": bool(job.get("trust_remote_code"))},
    }
    report = _child(python, asked, emit, {str(key): str(value) for key, value in (request.get("env") or {}).items()})
    return {**report, "run": run.id if run else None}


def output_of(run: RunDir) -> str:
    """The folder a run writes into."""
    job = (read_json(run.request) or {}).get("extraction") or {}
    return os.path.abspath(os.path.expanduser(str(job["out"]))) if job.get("out") else run.out


def _child(python: str, asked: Dict[str, Any], emit: Callable[..., None], env: Dict[str, str]) -> Dict[str, Any]:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
    clean.update(env, PYTHONPATH=venv.import_path(), TOKENIZERS_PARALLELISM="false")
    clean.setdefault("HF_HUB_OFFLINE", "1")
    if not asked["device"]:
        clean["CUDA_VISIBLE_DEVICES"] = ""  # a check must not take GPU memory from a run that is going
    child = subprocess.Popen(
        [python, "-m", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean,
        cwd="/",
        start_new_session=True,
    )
    assert child.stdin is not None and child.stdout is not None and child.stderr is not None
    os.set_blocking(child.stderr.fileno(), False)
    said = b""
    last: Dict[str, Any] = {}
    try:
        child.stdin.write(json.dumps(asked).encode() + b"\n")
        child.stdin.close()
        for line in child.stdout:
            said = (said + (child.stderr.read() or b""))[-8192:]
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if record.get("event") in ("result", "error"):
                last = record
            else:
                emit(str(record.pop("event", "progress")), **record)
        child.wait()
        os.set_blocking(child.stderr.fileno(), True)
        said = (said + (child.stderr.read() or b""))[-8192:]
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        child.stdout.close()
        child.stderr.close()
    if last.get("event") == "result":
        report = last["data"]
        assert isinstance(report, dict)
        return report
    if last.get("event") == "error":
        raise AgentError(
            str(last["kind"]),
            str(last["message"]),
            tried=str(last.get("tried") or ""),
            hint=str(last.get("hint") or ""),
        )
    ending = said.decode("utf-8", "replace").strip().splitlines()
    missing = next((line for line in reversed(ending) if line.startswith("ModuleNotFoundError")), None)
    if missing:
        raise AgentError(
            "MissingPackage",
            "verifying needs a package that the venv lacks: %s" % missing,
            tried=python,
            hint="verify with the venv that made the samples",
        )
    raise AgentError(
        "RunFailed",
        "the check ended with status %s: %s" % (child.returncode, ending[-1][:400] if ending else "no word"),
        tried="%s -m %s" % (python, CHILD),
        hint="memory may have run out (status -9)",
        stderr=ending[-40:],
    )
