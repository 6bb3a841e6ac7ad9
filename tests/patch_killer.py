"""Kills a patch transaction with SIGKILL at a chosen system call, and looks at what is left. Run as a program.

    python patch_killer.py FOLDER POINTS SEED  ->  one JSON line: {"steps": {operation: n}, "killed": n, "problems":
    [...]}

Every file call that the agent makes (open, write, rename, link, unlink, fsync, …) is a step; a child process is killed
just before or just after the chosen one. Then the verbs that a person would run next must tell the truth.
"""

from __future__ import annotations

import base64
import builtins
import hashlib
import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from remoteops.agent import patches

CALLS = (
    "open",
    "write",
    "replace",
    "rename",
    "link",
    "unlink",
    "symlink",
    "fsync",
    "utime",
    "fchmod",
    "fchown",
    "makedirs",
    "ftruncate",
    "listdir",
    "rmdir",
    "close",
    "setxattr",
    "fdopen",
)
ORIGINAL = {"pkg/a.py": b"VALUE = 1\n", "pkg/b.py": b"from pkg.a import VALUE\n", "pkg/sub/c.py": b"C = 'old'\n"}
FIRST = {"pkg/a.py": b"VALUE = 2\n", "pkg/b.py": b"from pkg.a import VALUE  # new\n"}
SECOND = {"pkg/a.py": b"VALUE = 3\n", "pkg/sub/c.py": b"C = 'new'\n"}


def emit(*args: Any, **fields: Any) -> None:
    pass


def build(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for name, data in ORIGINAL.items():
        path = folder / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        twin = folder / "twins" / name
        twin.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, twin)
        cache = path.parent / "__pycache__"
        cache.mkdir(exist_ok=True)
        (cache / f"{path.stem}.cpython-311.pyc").write_bytes(b"stale " + name.encode())
    (folder / "site" / "pkg" / "__init__.py").write_bytes(b"")


def request(folder: Path, wanted: dict[str, bytes] | None = None) -> dict[str, Any]:
    # force: not to look for jobs in /proc each time
    found: dict[str, Any] = {"state_dir": str(folder / "state"), "root": str(folder / "site"), "package": "pkg"}
    found["force"] = True
    if wanted is not None:
        found["files"] = [
            {
                "path": str(folder / "site" / name),
                "before": hashlib.sha256(ORIGINAL[name]).hexdigest(),
                "data": base64.b64encode(data).decode(),
            }
            for name, data in wanted.items()
        ]
    return found


def apply_first(folder: Path) -> None:
    patches.apply(request(folder, FIRST), emit)


def apply_second(folder: Path) -> None:
    patches.apply(request(folder, SECOND), emit)


def revert(folder: Path) -> None:
    patches.revert(request(folder), emit)


# operation -> (what is done before, the operation, files before, files after)
OPERATIONS = {
    "apply": ([], apply_first, ORIGINAL, {**ORIGINAL, **FIRST}),
    "change": ([apply_first], apply_second, {**ORIGINAL, **FIRST}, {**ORIGINAL, **SECOND}),
    "revert": ([apply_first], revert, {**ORIGINAL, **FIRST}, ORIGINAL),
}


def instrument(at: int, late: bool) -> list[int]:
    """Count every call; SIGKILL at number ``at`` (before it, or after it when ``late``)."""
    count = [0]

    def wrap(function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            if args and str(args[0]).startswith("/proc"):
                return function(*args, **kwargs)  # looking for jobs changes nothing, and there are always others
            count[0] += 1
            here = count[0] == at
            if here and not late:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return function(*args, **kwargs)
            finally:
                if here:
                    os.kill(os.getpid(), signal.SIGKILL)

        return called

    for name in CALLS:
        if hasattr(os, name):
            setattr(os, name, wrap(getattr(os, name)))
    builtins.open = wrap(builtins.open)
    return count


def in_child(work: Any, at: int, late: bool) -> tuple[int, int]:
    """(number of steps that the work made, signal that ended it)."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        send = os.write
        count = instrument(at, late)
        try:
            work()
        finally:
            send(writing, str(count[0]).encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        said = stream.read()
    _, status = os.waitpid(pid, 0)
    return int(said or b"0"), os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / "site" / name).read_bytes() for name in ORIGINAL}


def inspect(folder: Path, before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    problems = []
    told = patches.status(request(folder), emit)
    now = contents(folder)
    if now not in (before, after):
        problems.append(f"neither all nor nothing: {now}")
    expected = "clean" if now == ORIGINAL else "patched"
    if told["state"] != expected:
        problems.append(f"status says {told['state']}, the files are {expected}")
    if any((folder / "twins" / name).read_bytes() != data for name, data in ORIGINAL.items()):
        problems.append("a hardlinked twin changed")
    left = [str(path) for path in folder.rglob("*") if "remoteops" in path.name]
    if left:
        problems.append(f"left beside the files: {left}")
    for name in ORIGINAL:
        cached = (folder / "site" / name).parent / "__pycache__" / f"{Path(name).stem}.cpython-311.pyc"
        if now[name] != ORIGINAL[name] and cached.exists():
            problems.append(f"stale bytecode of {name}")
    return problems


def main(folder: Path, points: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    steps, killed, problems = {}, 0, []
    for name, (preparations, operation, before, after) in OPERATIONS.items():
        build(folder)
        for prepare in preparations:
            prepare(folder)
        steps[name], _ = in_child(lambda: operation(folder), 0, False)  # noqa: B023
        share = max(1, points // len(OPERATIONS))
        for at in rng.sample(range(1, steps[name] + 1), min(share, steps[name])):
            late = rng.random() < 0.5
            build(folder)
            for prepare in preparations:
                prepare(folder)
            _, ended = in_child(lambda: operation(folder), at, late)  # noqa: B023
            killed += ended == signal.SIGKILL
            try:
                found = inspect(folder, before, after)
                operation(folder)  # once more, to its end
                if contents(folder) != after:
                    found.append("a second try does not finish the work")
                revert(folder)
                if contents(folder) != ORIGINAL:
                    found.append("revert does not bring the original back")
                found += inspect(folder, ORIGINAL, ORIGINAL)
            except Exception as error:  # noqa: BLE001
                found = [f"{type(error).__name__}: {error}"]
            problems += [f"{name} killed {'after' if late else 'before'} step {at}: {text}" for text in found]
    return {"steps": steps, "killed": killed, "problems": problems}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))  # noqa: T201
