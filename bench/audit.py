"""The audit beside the type checkers that find plain signature breaks: pyrefly and ty, in the same run on the same
files.

    python bench/audit.py CONSUMER_DIR CONSUMER PROVIDER_DIR PROVIDER [--model NAME] [--rounds 3]

Each DIR is a folder that holds the package. Both checkers get small stubs for pydantic and msgspec (made here), without
which they drown in false alarms. Every tool is a fresh process; the ratio is of the least CPU time of the rounds,
so that
a busy machine weighs on all alike. Printed as JSON: seconds of CPU and wall, ratios, lines reported.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYDANTIC = """
from typing import Any, Callable, TypeVar, dataclass_transform
T = TypeVar("T")
def Field(default: Any = ..., *, default_factory: Any = ..., init: bool = ..., alias: str = ..., **kw: Any) -> Any: ...
@dataclass_transform(kw_only_default=True, field_specifiers=(Field,))
class BaseModel: ...
class ConfigDict(dict[str, Any]):
    def __init__(self, **kw: Any) -> None: ...
SkipValidation = Any
def field_validator(*a: Any, **k: Any) -> Callable[[T], T]: ...
def model_validator(*a: Any, **k: Any) -> Callable[[T], T]: ...
def __getattr__(name: str) -> Any: ...
"""
DATACLASSES = """
from typing import Any, dataclass_transform
from pydantic import Field
@dataclass_transform(field_specifiers=(Field,))
def dataclass(cls: Any = ..., **kw: Any) -> Any: ...
"""
MSGSPEC = """
from typing import Any, dataclass_transform
def field(*, default: Any = ..., default_factory: Any = ..., name: str = ...) -> Any: ...
@dataclass_transform(field_specifiers=(field,))
class Struct:
    def __init_subclass__(cls, **kw: Any) -> None: ...
def __getattr__(name: str) -> Any: ...
"""
AUDIT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from remoteops.agent.audit import engine
document = engine.audit(json.loads(sys.argv[2]))
print(json.dumps([[f["file"], f["line"]] for f in document["findings"] if f["confidence"] != "risk"]))
"""


def run(command: list[str], cwd: str) -> tuple[float, float, str]:
    """(CPU seconds, wall seconds, output) of a process and its children."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall, done.stdout + done.stderr


def stubs(folder: Path) -> Path:
    for name, text in (
        ("pydantic/__init__.pyi", PYDANTIC),
        ("pydantic/dataclasses.pyi", DATACLASSES),
        ("msgspec/__init__.pyi", MSGSPEC),
    ):
        path = folder / "stubs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "stubs"


def commands(options: argparse.Namespace, folder: Path) -> dict[str, list[str]]:
    """Tool -> command; only files that name the provider are checked."""
    package = Path(options.consumer_dir) / options.consumer
    files = [str(p) for p in sorted(package.rglob("*.py")) if options.provider in p.read_text(errors="replace")]
    paths = [str(stubs(folder)), options.provider_dir, options.consumer_dir]
    request = {
        "consumer": options.consumer,
        "consumer_path": options.consumer_dir,
        "provider": options.provider,
        "provider_path": options.provider_dir,
        "contracts": [],
        "model": options.model,
    }
    cached = {**request, "cache_dir": str(folder / "cache")}
    found = {
        "audit": [sys.executable, "-I", "-c", AUDIT, str(ROOT), json.dumps(request)],
        "audit, from its cache": [sys.executable, "-I", "-c", AUDIT, str(ROOT), json.dumps(cached)],
    }
    beside = Path(sys.executable).parent
    for tool in ("pyrefly", "ty"):
        program = shutil.which(tool) or (str(beside / tool) if (beside / tool).exists() else None)
        if program and tool == "pyrefly":
            config = folder / "pyrefly.toml"
            config.write_text(f"search-path = {json.dumps(paths)}\nreplace-imports-with-any = []\n")
            found[tool] = [program, "check", "--config", str(config), "--output-format", "min-text", *files]
        elif program:
            extra = [part for path in paths for part in ("--extra-search-path", path)]
            found[tool] = [program, "check", "--output-format", "concise", *extra, *files]
        else:
            print(f"{tool} is not installed (pip install {tool})", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("consumer_dir", "consumer", "provider_dir", "provider"):
        parser.add_argument(name)
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    options.consumer_dir, options.provider_dir = (
        os.path.abspath(options.consumer_dir),
        os.path.abspath(options.provider_dir),
    )
    with tempfile.TemporaryDirectory() as scratch:
        tools = commands(options, Path(scratch))
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in tools}
        reported: dict[str, int] = {}
        run(tools["audit, from its cache"], scratch)  # fills the cache
        for _ in range(options.rounds):
            for name, command in tools.items():
                cpu, wall, output = run(command, scratch)
                times[name].append((cpu, wall))
                lines = (
                    json.loads(output.splitlines()[-1])
                    if name.startswith("audit")
                    else re.findall(r"\S+\.py:\d+", output)
                )
                reported[name] = len({json.dumps(line) for line in lines})
    result = {
        name: {
            "cpu_s": round(min(t[0] for t in seen), 3),
            "wall_s": round(min(t[1] for t in seen), 3),
            "lines": reported[name],
        }
        for name, seen in times.items()
    }
    for peer in ("pyrefly", "ty"):
        if peer in result:
            result[f"audit / {peer}"] = {
                key: round(result["audit"][key] / result[peer][key], 2) for key in ("cpu_s", "wall_s")
            }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
