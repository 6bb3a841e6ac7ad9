"""Free space as a writer will find it (quotas too, where they can be read), and a gate that pauses a run before the
disk is full."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from typing import Any, Callable, Dict, List, Optional

from remoteops.agent.rundir import RunDir

RESERVE = 2 << 30  # bytes left to everybody else on that file system
CHECK_EVERY = 64 << 20  # bytes written between two looks


def existing(path: str) -> str:
    """The path itself or its nearest existing parent: a folder not made yet lies on that file system."""
    path = os.path.abspath(os.path.expanduser(path))
    while not os.path.exists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path


def space(path: str) -> Dict[str, Any]:
    """{"free","total" (bytes), "files" (inodes left, None when the file system does not count), "source":
    statvfs|quota, "path"}.

    ``free`` is what this user may still write: the smaller of the file system's and the user's quota.
    """
    at = existing(path)
    facts = os.statvfs(at)
    found: Dict[str, Any] = {
        "free": facts.f_bavail * facts.f_frsize,
        "total": facts.f_blocks * facts.f_frsize,
        "files": facts.f_favail if facts.f_files else None,
        "source": "statvfs",
        "path": at,
    }
    left = quota_left(at)
    if left is not None and left < found["free"]:
        found.update(free=left, source="quota")
    return found


def device(path: str) -> int:
    """The file system's number of a path or its nearest existing parent."""
    return os.stat(existing(path)).st_dev


def quota_left(path: str, run: Optional[Callable[[List[str]], str]] = None) -> Optional[int]:
    """Bytes that this user's quota leaves on the file system of ``path``; None when there is no quota or no way to
    ask."""
    if run is None:
        if not shutil.which("quota"):
            return None
        run = _run
    mount = mount_point(path)
    text = run(["quota", "-w", "-p", "-f", mount])
    return parse_quota(text, mount)


def parse_quota(text: str, mount: str) -> Optional[int]:
    """Bytes left from ``quota -w -p`` (block counts of 1 KiB; an over-limit count carries a star). None without a
    limit."""
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 4 or not fields[1].rstrip("*").isdigit():
            continue
        try:
            used, soft, hard = (int(one.rstrip("*")) for one in fields[1:4])
        except ValueError:
            continue
        limit = hard or soft
        if limit:
            return max(0, limit - used) * 1024
    return None


def mount_point(path: str) -> str:
    at = os.path.realpath(path)
    while not os.path.ismount(at):
        at = os.path.dirname(at)
    return at


def _run(argv: List[str]) -> str:
    try:
        return subprocess.run(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            timeout=5,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        ).stdout.decode("utf-8", "replace")
    except (OSError, subprocess.TimeoutExpired):
        return ""


class Gate:
    """Holds writers back while the file system is nearly full.

    With ``run_dir`` it appends events to that run: ``paused`` {"reason","free","need","path","hint"} and ``resumed``
    {"free","waited_s"}. Safe from several threads; can be sent to another process (each process then looks for itself).
    """

    def __init__(self, path: str, reserve: int = RESERVE, run_dir: Optional[str] = None, poll: float = 2.0) -> None:
        self.path, self.reserve, self.run_dir, self.poll = path, reserve, run_dir, poll
        self._lock = threading.Lock()
        self._credit = 0

    def __getstate__(self) -> Dict[str, Any]:
        return {"path": self.path, "reserve": self.reserve, "run_dir": self.run_dir, "poll": self.poll}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def wait(self, size: int, stop: Optional[Callable[[], bool]] = None, *, failed: bool = False) -> bool:
        """Return True once ``size`` bytes may be written without eating into the reserve; False when ``stop()`` said
        so.

        The disk is looked at once per 64 MiB only; ``failed=True`` (a write just met ENOSPC or EDQUOT) looks at once
        and waits at least one poll, because a quota may be what was hit and cannot always be read.
        """
        with self._lock:
            self._credit -= size
            if self._credit >= 0 and not failed:
                return True
            started = time.monotonic()
            paused = False
            while True:
                free = space(self.path)["free"]
                if free >= size + self.reserve and not (failed and not paused):
                    self._credit = min(CHECK_EVERY, free - size - self.reserve)
                    if paused:
                        self._event("resumed", reason="disk", free=free, waited_s=round(time.monotonic() - started, 3))
                    return True
                if not paused:
                    paused = True
                    self._event(
                        "paused",
                        reason="disk",
                        free=free,
                        need=size + self.reserve,
                        path=self.path,
                        hint="free space there and the run goes on by itself; or stop it and resume elsewhere",
                    )
                if stop is not None and stop():
                    return False
                time.sleep(self.poll)

    def _event(self, name: str, **fields: Any) -> None:
        if self.run_dir:
            try:
                RunDir(self.run_dir).event(name, **fields)
            except OSError:
                pass  # the events may lie on the very disk that is full
