"""Does what was patched still import, in the host's own interpreter?"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any, Callable, Dict

from remoteops.agent.protocol import AgentError


def prove(request: Dict[str, Any], emit: Callable[..., None]) -> Dict[str, Any]:
    """Import ``modules`` in the venv's own interpreter, in a child. ``ok``; on failure ``error`` (the last lines)."""
    venv = os.path.expanduser(request.get("venv") or "")
    python = os.path.join(venv, "bin", "python") if venv else _beside(request.get("root") or "")
    modules = list(request.get("modules") or ([request["module"]] if request.get("module") else []))
    if venv and not os.path.exists(python):
        raise AgentError(
            "MissingVenv",
            "no interpreter at %s" % python,
            tried="import the patched modules",
            hint="set venv in inventory.yaml",
        )
    env = dict(os.environ, PYTHONDONTWRITEBYTECODE="1", **{k: str(v) for k, v in (request.get("env") or {}).items()})
    # not from the working directory: a folder there that is called like the package is not the package
    code = (
        "import importlib, sys\nsys.path[:] = [p for p in sys.path if p]\n"
        "for name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    )
    started = time.monotonic()
    try:
        done = subprocess.run(
            [python, "-c", code, *modules],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=request.get("timeout", 300),
            cwd=os.path.expanduser("~"),
        )
        tail = done.stderr.decode("utf-8", "replace").strip().splitlines()
        ok, error = done.returncode == 0, tail[-12:]
    except subprocess.TimeoutExpired:
        ok, error = False, ["no answer within %s s" % request.get("timeout", 300)]
    return {"ok": ok, "modules": modules, "error": [] if ok else error, "seconds": round(time.monotonic() - started, 3)}


def _beside(root: str) -> str:
    """The interpreter that a site-packages belongs to (<prefix>/lib/pythonX.Y/site-packages), else this one."""
    prefix = os.path.dirname(os.path.dirname(os.path.dirname(os.path.expanduser(root))))
    python = os.path.join(prefix, "bin", "python")
    return python if root and os.path.exists(python) else sys.executable
