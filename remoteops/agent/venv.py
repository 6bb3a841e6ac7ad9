"""The host's own Python environment, as its interpreter describes it (a child of 50 to 200 ms; nothing heavy is
imported)."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any, Dict, Mapping, NamedTuple, Optional

from remoteops.agent.protocol import AgentError

PACKAGES = ("vllm", "speculators", "torch", "transformers", "safetensors", "datasets", "pyarrow")
_CHILD = """
import importlib.metadata as m, importlib.util as u, json, sys
def version(*names):
    for name in names:
        try:
            return name, m.version(name)
        except m.PackageNotFoundError:
            pass
    return None, None
found = {}
for name in sys.argv[1:]:
    try:
        spec = u.find_spec(name)
    except Exception:
        spec = None
    if spec is not None:
        places = list(spec.submodule_search_locations or []) or [spec.origin]
        distribution, release = version(name, name + "-cpu", name + "-nightly")
        found[name] = {"path": places[0], "distribution": distribution, "version": release}
print(json.dumps({"version": sys.version.split()[0], "prefix": sys.prefix, "packages": found}))
"""


class Venv(NamedTuple):
    """``packages``: name -> {"path", "distribution", "version"} of those that are installed."""

    python: str
    version: str
    packages: Dict[str, Dict[str, Any]]

    def path(self, package: str) -> Optional[str]:
        found = self.packages.get(package)
        return str(found["path"]) if found and found.get("path") else None

    @property
    def cpu_only(self) -> bool:
        """vLLM built for CPUs: no GPU is needed, or used."""
        found = self.packages.get("vllm") or {}
        return "cpu" in str(found.get("distribution")) or "+cpu" in str(found.get("version"))


def python_of(venv: Optional[str]) -> str:
    """The interpreter of a venv or conda environment. Raises AgentError(MissingVenv)."""
    if not venv:
        raise AgentError(
            "MissingVenv",
            "no venv is named for this host",
            tried="`venv` of the host in inventory.yaml",
            hint="set it to the environment that has vLLM",
        )
    root = os.path.abspath(os.path.expanduser(venv))
    for name in ("python", "python3"):
        path = os.path.join(root, "bin", name)
        if os.path.isfile(path):
            if not os.access(path, os.X_OK):
                raise AgentError("MissingVenv", "%s cannot be run by this user" % path, hint="check its owner and mode")
            return path
    why = (
        "the folder does not exist"
        if not os.path.isdir(root)
        else "it has no bin/python"
        + (" (a dangling link: its base Python is gone)" if os.path.islink(os.path.join(root, "bin", "python")) else "")
    )
    raise AgentError(
        "MissingVenv",
        "no venv at %s: %s" % (root, why),
        tried="%s/bin/python" % root,
        hint="set `venv` of the host in inventory.yaml to the environment that has vLLM",
    )


def describe(venv: Optional[str], env: Optional[Mapping[str, str]] = None) -> Venv:
    """Ask the interpreter. Raises AgentError(MissingVenv) when it cannot be run."""
    python = python_of(venv)
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH")}
    clean.update(env or {})
    try:
        done = subprocess.run(
            [python, "-c", _CHILD, *PACKAGES],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=clean,
            cwd="/",
            timeout=60,
            check=False,
        )
        answer = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise AgentError(
            "MissingVenv", "the venv's python cannot be used: %s" % error, tried=python, hint="run it there by hand"
        ) from None
    return Venv(python, str(answer["version"]), answer["packages"])


def import_path() -> str:
    """Where another interpreter finds this agent: the archive, or the source tree it runs from."""
    import remoteops

    return os.path.dirname(os.path.abspath(next(iter(remoteops.__path__))))
