"""What must hold before a model is loaded; every check in seconds, from files and counters, nothing heavy is imported.

A check is {"name", "ok", "found", "need", "hint", "kind"}: ok True, False, or None when it could not be told (never
True for something that was not looked at). ``kind`` names the error class a failed check stands for.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Tuple

from remoteops.agent import capabilities, preflight_host, preflight_model, venv
from remoteops.agent.protocol import AgentError
from remoteops.agent.sheet import Sheet

NEEDED = {
    "connector": ("vllm", "torch", "transformers", "safetensors"),
    "generator": ("vllm", "speculators", "torch", "transformers"),
}


def preflight(request: Dict[str, Any], emit: Callable[..., None]) -> Dict[str, Any]:
    """Request: "job", "venv", "env" {str: str}, "state_dir".

    Result: {"checks", "ok" (no check is False), "shape", "layers", "dtype", "capabilities", "estimate", "versions",
    "python"}; what could not be learned is None.
    """
    sheet = Sheet(request)
    for name, check in CHECKS:
        try:
            check(sheet)
        except AgentError as error:
            sheet.add(name, False, error.message, error.tried, error.hint, error.kind)
        except OSError as error:
            sheet.add(name, None, "could not look: %s" % error, "")
    packages = sheet.venv.packages if sheet.venv else {}
    return {
        "schema": "remoteops.preflight/1",
        "ok": all(one["ok"] is not False for one in sheet.checks),
        "checks": sheet.checks,
        "shape": sheet.shape._asdict() if sheet.shape else None,
        "layers": sheet.layers,
        "dtype": sheet.dtype(),
        "estimate": sheet.size,
        "capabilities": capabilities.as_dict(sheet.able) if sheet.able else None,
        "python": sheet.venv.python if sheet.venv else None,
        "versions": {name: one.get("version") for name, one in packages.items()},
    }


def check_interpreter(sheet: Sheet) -> None:
    sheet.venv = venv.describe(sheet.request.get("venv"))
    found = "%s (Python %s)" % (sheet.venv.python, sheet.venv.version)
    sheet.add("interpreter", True, found, "a venv with vLLM", kind="MissingVenv")


def check_packages(sheet: Sheet) -> None:
    if sheet.venv is None:
        sheet.add("packages", None, "no interpreter to ask", "vllm, torch, …")
        return
    engine = str(sheet.job.get("engine") or "auto").replace("-stock", "")
    needed = NEEDED.get(engine, NEEDED["connector"])
    missing = [name for name in needed if name not in sheet.venv.packages]
    found = ", ".join(
        "%s %s" % (one.get("distribution") or name, one.get("version") or "?")
        for name, one in sorted(sheet.venv.packages.items())
    )
    hint = "install %s in %s" % (", ".join(missing), sheet.request.get("venv"))
    sheet.add("packages", not missing, found or "none of them", ", ".join(needed), hint, "MissingPackage")


CHECKS: List[Tuple[str, Callable[[Sheet], None]]] = [
    ("interpreter", check_interpreter),
    ("packages", check_packages),
    ("model", preflight_model.check_model),
    ("remote code", preflight_model.check_remote_code),
    ("architecture", preflight_model.check_architecture),
    ("layers", preflight_model.check_layers),
    ("length", preflight_model.check_length),
    ("dataset", preflight_model.check_dataset),
    ("chat template", preflight_model.check_template),
    ("output folder", preflight_host.check_output),
    ("disk", preflight_host.check_disk),
    ("gpus", preflight_host.check_gpus),
    ("memory", preflight_host.check_memory),
    ("other runs", preflight_host.check_other_runs),
]
