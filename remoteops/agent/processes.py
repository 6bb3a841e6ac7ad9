"""Processes as the kernel shows them under /proc: who they are, whose children they are, what they carry.

A process is named by pid, start time (ticks since boot, immune to the wall clock) and boot id together; a pid alone
is never taken for a process, because pids are used again.
"""

from __future__ import annotations

import os
import pwd
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Set

BOOT_ID_SEAM = "REMOTEOPS_BOOT_ID_FILE"
"""Names another file to read the boot id from. For tests of a host that was rebooted; nothing else sets it."""
MARKER = "REMOTEOPS_RUN_ID"
"""Environment variable that every process of a run inherits."""


class Process(NamedTuple):
    """One line of /proc/<pid>/stat. ``start`` is in clock ticks since boot; ``state`` "Z" or "X" is a dead process."""

    pid: int
    ppid: int
    pgrp: int
    session: int
    start: int
    state: str
    name: str

    @property
    def alive(self) -> bool:
        return self.state not in ("Z", "X", "x")


def boot_id() -> str:
    """The id the kernel drew at this boot; "" where it cannot be read."""
    try:
        with open(os.environ.get(BOOT_ID_SEAM) or "/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return stream.read().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def uptime() -> float:
    """Seconds since boot, sleep included; no wall clock moves it."""
    import time

    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.clock_gettime(clock) if clock is not None else time.monotonic()


def read(pid: int) -> Optional[Process]:
    """The process with that pid now, or None."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as stream:
            line = stream.read()
    except (OSError, ValueError):
        return None
    # The name is in parentheses and may hold spaces and parentheses itself: the last ')' ends it.
    left, right = line.find(b"("), line.rfind(b")")
    fields = line[right + 2 :].split()
    try:
        return Process(
            pid,
            int(fields[1]),
            int(fields[2]),
            int(fields[3]),
            int(fields[19]),
            fields[0].decode("ascii"),
            line[left + 1 : right].decode("utf-8", "replace"),
        )
    except (IndexError, ValueError):
        return None


def scan() -> Dict[int, Process]:
    """Every process this user may see, zombies included."""
    found: Dict[int, Process] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return found
    for name in names:
        if name.isdigit():
            process = read(int(name))
            if process is not None:
                found[process.pid] = process
    return found


def identity(pid: int) -> Optional[Dict[str, Any]]:
    """{"pid", "start", "boot"} of a process that exists now, else None."""
    process = read(pid)
    return None if process is None else {"pid": pid, "start": process.start, "boot": boot_id()}


def is_alive(who: Optional[Dict[str, Any]]) -> bool:
    """Whether exactly that process still runs: same pid, same start time, same boot, and no zombie."""
    if not who or not isinstance(who.get("pid"), int) or who.get("boot") != boot_id():
        return False
    process = read(who["pid"])
    return process is not None and process.start == who.get("start") and process.alive


def environment(pid: int) -> Dict[str, str]:
    """The environment a process was started with; {} where it may not be read or was overwritten by a new title."""
    try:
        with open("/proc/%d/environ" % pid, "rb") as stream:
            raw = stream.read()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0"))
    return {name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, sep, value in pairs if sep}


def command(pid: int, limit: int = 300) -> str:
    """The command line as one string, or the kernel's name for it in brackets."""
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as stream:
            raw = stream.read(65536)
    except OSError:
        raw = b""
    text = raw.rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace").strip()
    if not text:
        process = read(pid)
        text = "[%s]" % process.name if process else ""
    return text[:limit]


def user(pid: int) -> str:
    """Name of the owner ("" when the process is gone)."""
    try:
        uid = os.stat("/proc/%d" % pid).st_uid
    except OSError:
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def cgroups(pid: int) -> List[str]:
    """Paths of the control groups a process is in (one for v2, several for v1)."""
    try:
        with open("/proc/%d/cgroup" % pid, encoding="utf-8", errors="replace") as stream:
            return sorted({line.rstrip("\n").split(":", 2)[-1] for line in stream} - {"/", ""})
    except OSError:
        return []


def marked(processes: Iterable[int]) -> Dict[int, str]:
    """pid -> run id, of those whose environment carries the marker."""
    found = {}
    for pid in processes:
        run = environment(pid).get(MARKER)
        if run:
            found[pid] = run
    return found


def descendants(roots: Iterable[int], processes: Dict[int, Process]) -> Set[int]:
    """Children of children … of ``roots``, the roots themselves left out."""
    children: Dict[int, List[int]] = {}
    for process in processes.values():
        children.setdefault(process.ppid, []).append(process.pid)
    found: Set[int] = set()
    queue = list(roots)
    while queue:
        for pid in children.get(queue.pop(), ()):
            if pid not in found:
                found.add(pid)
                queue.append(pid)
    return found
