"""Why a process is gone: what the kernel counted, logged or forgot.

Most of it needs no privilege: /proc/vmstat counts the kills of the out-of-memory killer for the whole host, a
control group counts its own. The kernel log names the victim where it may be read.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from typing import Any, Dict, Iterable, List, Optional, Tuple

from remoteops.agent import processes

CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS", "SIGPIPE", "SIGXCPU", "SIGXFSZ")
"""Signals a program brings on itself; any other one came from outside."""


def oom_counters(pid: Optional[int] = None) -> Dict[str, int]:
    """How often the out-of-memory killer struck so far: {"host": n, "<control group>": n}."""
    found: Dict[str, int] = {}
    count = _field("/proc/vmstat", "oom_kill")
    if count is not None:
        found["host"] = count
    for path in _group_files(pid or os.getpid()):
        count = _field(path, "oom_kill")
        if count is not None:
            found[path] = count
    return found


def _group_files(pid: int) -> List[str]:
    files = []
    try:
        with open("/proc/%d/cgroup" % pid, encoding="utf-8", errors="replace") as stream:
            lines = [line.rstrip("\n").split(":", 2) for line in stream]
    except OSError:
        return []
    for line in lines:
        if len(line) != 3:
            continue
        if line[1] == "memory":
            files.append("/sys/fs/cgroup/memory%s/memory.oom_control" % line[2])
        elif line[0] == "0":
            files.append("/sys/fs/cgroup%s/memory.events" % line[2].rstrip("/"))
    return files


def _field(path: str, name: str) -> Optional[int]:
    try:
        with open(path, encoding="ascii", errors="replace") as stream:
            for line in stream:
                key, _, value = line.partition(" ")
                if key == name:
                    return int(value)
    except (OSError, ValueError):
        pass
    return None


def out_of_memory(before: Optional[Dict[str, int]], pids: Iterable[int]) -> List[str]:
    """Sentences that say the out-of-memory killer took one of ``pids`` (or, weaker, that it struck at all
    meanwhile)."""
    said = []
    wanted = set(pids)
    for line in kernel_log():
        match = re.search(r"[Kk]illed process (\d+)(?: \(([^)]*)\))?", line)
        if match and int(match.group(1)) in wanted:
            said.append("kernel log: " + line.strip()[:300])
    if before is not None:
        now = oom_counters()
        for name, count in now.items():
            if name in before and count > before[name]:
                where = "on this host" if name == "host" else "in the run's control group"
                said.append(
                    "the out-of-memory killer struck %d time(s) %s since the start" % (count - before[name], where)
                )
    return said


def kernel_log() -> List[str]:
    """The newest lines of the kernel's log; [] where only root may read it."""
    try:
        done = subprocess.run(
            ["dmesg"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout[-262144:].decode("utf-8", "replace").splitlines()


def exit_words(status: int) -> Tuple[Optional[int], Optional[str], str]:
    """(exit code or None, signal name or None, words) of a wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = "signal %d" % number
        return None, name, "killed by %s" % name
    code = os.WEXITSTATUS(status)
    words = "exit code %d" % code
    if code > 128:
        try:
            words += " (a shell's word for %s)" % signal.Signals(code - 128).name
        except ValueError:
            pass
    return code, None, words


def conclude(
    outcome: Optional[Dict[str, Any]],
    error: Optional[Dict[str, Any]],
    status: Optional[int],
    *,
    stopping: Optional[str],
    expect_outcome: bool,
) -> Tuple[str, str]:
    """(state, reason) of a run whose child has ended.

    ``outcome`` and ``error`` are what the engine said, ``status`` the wait status (None: nobody could see it),
    ``stopping`` who asked for a stop. An engine's own word counts most; without one, a death from outside is "lost",
    a death of its own "failed".
    """
    said = (outcome or {}).get("state")
    if said in ("done", "failed", "stopped"):
        words = "" if status is None else exit_words(status)[2]
        if said == "done":
            return said, "finished" if not words or status == 0 else "finished; its process then ended with %s" % words
        if said == "failed" and not stopping:
            return said, (error or {}).get("message") or "the engine reported failure"
        # An engine that is asked to end amid its work may well call that a failure; it is what was asked for.
        return "stopped", stopping or "the engine stopped"
    if stopping:
        return "stopped", stopping
    if status is None:
        return "lost", "its process is gone and left no outcome"
    code, name, words = exit_words(status)
    if name is not None:
        return ("failed", "crashed: %s" % words) if name in CRASHES else ("lost", "%s from outside" % words)
    if code == 0 and not expect_outcome:
        return "done", "finished"
    if code == 0:
        return "failed", "its process ended with exit code 0 but never said how the work went"
    message = (error or {}).get("message")
    return "failed", "%s (%s)" % (message, words) if message else words


def boot_changed(identities: Dict[str, Any]) -> bool:
    """Whether the host was started anew since these processes were recorded."""
    then = (identities.get("child") or identities.get("supervisor") or {}).get("boot")
    now = processes.boot_id()
    return bool(then and now and then != now)
