"""Sets a checkout up (a virtual environment in .venv, from the lock file), then runs one of: demo, test, lint.

Standard library only. The second time it finds its marker and does nothing before the job starts.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get("REMOTEOPS_VENV") or ROOT / ".venv")
BIN = VENV / "bin"


def say(text: str) -> None:
    sys.stderr.write(f"[setup] {text}\n")
    sys.stderr.flush()


def fail(text: str) -> None:
    sys.stderr.write(f"[setup] {text}\n")
    sys.exit(2)


def run(*argv: str | Path, check: bool = True) -> int:
    status = subprocess.run([str(word) for word in argv], cwd=ROOT).returncode
    if check and status:
        fail(f"failed (exit {status}): {' '.join(map(str, argv))}\n        run the same command again to go on")
    return status


# -- the environment ------------------------------------------------------------------------------------------------


def prepare(lock: str) -> None:
    """Have .venv with what ``lock`` lists and remoteops itself; done before and unchanged: a few milliseconds."""
    wanted = hashlib.sha256((ROOT / lock).read_bytes() + (ROOT / "pyproject.toml").read_bytes()).hexdigest()
    marker = VENV / f".{lock}"
    if marker.is_file() and marker.read_text() == wanted and (BIN / "remoteops").exists():
        return
    if not (BIN / "python").exists():
        make_venv()
    say(f"installing {lock} into {VENV} (about 30 MB; 100 MB with the tests' tools)")
    if shutil.which("uv") and not (BIN / "pip").exists():
        run("uv", "pip", "install", "-q", "--python", BIN / "python", "--require-hashes", "-r", ROOT / lock)
        run("uv", "pip", "install", "-q", "--python", BIN / "python", "--no-deps", "-e", ROOT)
    else:
        pip = (BIN / "python", "-m", "pip", "--disable-pip-version-check", "install", "-q", "--retries", "8")
        run(*pip, "--require-hashes", "-r", ROOT / lock)
        run(*pip, "--no-deps", "-e", ROOT)
    marker.write_text(wanted)


def make_venv() -> None:
    """A virtual environment with pip. Where Python came without ensurepip, get it or say how."""
    say(f"creating {VENV} with Python {sys.version.split()[0]}")
    if not has_ensurepip():
        if shutil.which("uv"):
            run("uv", "venv", "-q", "--python", sys.executable, VENV)
            return
        apt(f"python{sys.version_info.major}.{sys.version_info.minor}-venv")
    if not has_ensurepip():
        fail(
            "this Python has no ensurepip, so no virtual environment can be made.\n"
            f"        Debian and Ubuntu: sudo apt-get install python3.{sys.version_info.minor}-venv\n"
            "        Or put uv into PATH; then run this again."
        )
    # A half-made environment of an interrupted first try is made anew.
    run(sys.executable, "-m", "venv", "--clear", VENV)


def has_ensurepip() -> bool:
    return subprocess.run([sys.executable, "-c", "import ensurepip, venv"], capture_output=True).returncode == 0


def apt(*packages: str) -> bool:
    """Install Debian packages where we may (root, apt-get); False where we may not. Starts no service."""
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return False
    say(f"apt-get install {' '.join(packages)}")
    policy = Path("/usr/sbin/policy-rc.d")
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "-qq", "update"], env=environment, check=False)
        argv = ["apt-get", "-qq", "-y", "--no-install-recommends", "install", *packages]
        return subprocess.run(argv, env=environment, stdout=subprocess.DEVNULL).returncode == 0
    finally:
        if ours:
            policy.unlink()


def test_tools() -> None:
    """sshd and ip for the tests with real servers and networks; as a plain user they are skipped where missing."""
    search = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin", "/usr/local/sbin"))
    wanted = {"sshd": "openssh-server", "ssh": "openssh-client", "ip": "iproute2", "iptables": "iptables"}
    missing = [package for tool, package in wanted.items() if not shutil.which(tool, path=search)]
    if missing and not apt(*missing):
        say(f"not here: {', '.join(missing)}; tests that need them are skipped")


# -- the jobs -------------------------------------------------------------------------------------------------------


def demo(arguments: list[str]) -> int:
    """The main job, step by step, as a user would type it; each step's exit code is the one it has to be."""
    prepare("requirements.lock")
    os.environ["PATH"] = f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    os.environ.setdefault("REMOTEOPS_INVENTORY", str(ROOT / "inventory.yaml"))
    times: list[tuple[str, float]] = []

    def step(why: str, *argv: str, expect: int = 0) -> None:
        sys.stdout.write(f"\n$ {' '.join(argv)}    # {why}\n")
        sys.stdout.flush()
        began = time.monotonic()
        status = run(*argv, check=False)
        times.append((" ".join(argv), time.monotonic() - began))
        if status != expect:
            fail(f"'{' '.join(argv)}' ended with {status}, expected {expect}")

    step("the embedded host: built once, then up in a second", "fab", "lab.up")
    step("as an earlier demo may have left it patched", "fab", "patch", "--revert")
    step("exit code 1: these two releases do not work together", "fab", "probe", expect=1)
    step("the smallest reversible edits", "fab", "patch", "--yes")
    step("exit code 0: now they do", "fab", "probe")
    step("hidden states out of real vLLM", "fab", "extract", "--samples", "10", *arguments)
    step("read back, and compared with transformers", "fab", "verify", "--reference", "2")
    sys.stdout.write("\n")
    for command, seconds in times:
        sys.stdout.write(f"{seconds:7.1f} s  {command}\n")
    sys.stdout.write(
        f"{sum(seconds for _, seconds in times):7.1f} s  in all. `fab lab.down` stops the embedded host.\n"
    )
    return 0


def test(arguments: list[str]) -> int:
    """All tests; those marked `lab` run real vLLM on the embedded host."""
    prepare("requirements-dev.lock")
    test_tools()
    os.environ["PATH"] = f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return run(BIN / "python", "-m", "pytest", *arguments, check=False)


def lint(arguments: list[str]) -> int:
    """ruff and mypy."""
    prepare("requirements-dev.lock")
    run(BIN / "ruff", "check", ".")
    run(BIN / "mypy")
    return 0


if __name__ == "__main__":
    jobs = {"demo": demo, "test": test, "lint": lint}
    if len(sys.argv) < 2 or sys.argv[1] not in jobs:
        fail(f"usage: {sys.argv[0]} {'|'.join(jobs)} [arguments]")
    sys.exit(jobs[sys.argv[1]](sys.argv[2:]))
