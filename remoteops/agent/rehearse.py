"""The verb that makes a rehearsal's model; the making is done by a child in the host's venv."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from typing import Any, Callable, Dict, List

from remoteops.agent import modelinfo, venv
from remoteops.agent.protocol import AgentError
from remoteops.agent.rundir import DEFAULT_STATE_DIR

CHILD = "remoteops.agent.extraction.rehearsal"
LEAST = 4  # decoder layers: enough for three different inner ids and the last one


def make(request: Dict[str, Any], emit: Callable[..., None]) -> Dict[str, Any]:
    """Request: "model", "venv", "env", "tensor_parallel", "slots" (number of layer ids), "state_dir".

    Result: {"model" (folder), "weights": random|dummy, "notes", "layers"}. A model made before from the same config
    is used again. Raises MissingModel, MissingVenv, RunFailed.
    """
    env = {**os.environ, **{key: str(value) for key, value in (request.get("env") or {}).items()}}
    folder = modelinfo.find(str(request["model"]), env)
    shape = modelinfo.read(folder)
    python = venv.python_of(request.get("venv"))
    parallel = int(request.get("tensor_parallel") or 1)
    layers = min(shape.num_layers, max(LEAST, int(request.get("slots") or LEAST)))
    with open(os.path.join(folder, "config.json"), "rb") as stream:
        key = hashlib.sha256(stream.read() + ("%s %d %d" % (folder, parallel, layers)).encode()).hexdigest()[:12]
    state = os.path.abspath(os.path.expanduser(request.get("state_dir") or DEFAULT_STATE_DIR))
    target = os.path.join(state, "rehearsal", "%s-%s" % (os.path.basename(folder.rstrip("/")) or "model", key))
    done = os.path.join(target, "rehearsal.json")
    if os.path.isfile(done):
        with open(done, encoding="utf-8") as stream_:
            return dict(json.load(stream_))
    os.makedirs(os.path.dirname(target), exist_ok=True)
    answer = _child([python, "-m", CHILD, folder, target, str(parallel), str(layers)], env)
    with open(done, "w", encoding="utf-8") as out:
        json.dump(answer, out)
    return answer


def _child(argv: List[str], env: Dict[str, str]) -> Dict[str, Any]:
    env = {**env, "PYTHONPATH": venv.import_path(), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, env=env, cwd="/", timeout=600, check=False
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise AgentError(
            "RunFailed",
            "the rehearsal's model could not be made: %s" % (said[-1][:300] if said else "status %s" % done.returncode),
            tried=" ".join(argv[:3]),
            hint="run without --rehearse, or see data",
            stderr=said[-30:],
        ) from None
    if "error" in answer:
        told = answer["error"]
        raise AgentError(str(told["kind"]), str(told["message"]), tried=str(told["tried"]), hint=str(told["hint"]))
    return dict(answer)
