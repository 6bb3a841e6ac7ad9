"""Processes that run out of a venv right now: what they import next would be half old, half new."""

from __future__ import annotations

import os
import re
from typing import Any, Dict, List, Set

_AGENT = re.compile(rb"/agent-[0-9a-f]{8,}(\.pyz|/|$)")


def users_of(folders: List[str]) -> List[Dict[str, Any]]:
    """Processes (not this one, nor its parents) whose interpreter or mapped files lie in one of the folders.

    Each: ``pid``, ``command`` (at most 200 characters), ``why``. Other users' processes show only their command line,
    which still names a venv's interpreter. Empty where there is no /proc.
    """
    roots = sorted(
        {
            os.path.join(path, "")
            for folder in folders
            if folder
            for path in (os.path.abspath(folder), os.path.realpath(folder))
        }
    )
    ours = _ancestors()
    found = []
    try:
        names = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    for name in names:
        pid = int(name)
        if pid in ours:
            continue
        why = _uses(name, roots)
        if why:
            argv = _read("/proc/%s/cmdline" % name).split(b"\0")
            command = b" ".join(argv).decode("utf-8", "replace").strip()
            found.append({"pid": pid, "command": command[:200], "why": why})
    return sorted(found, key=lambda user: user["pid"])


def _uses(name: str, roots: List[str]) -> str:
    argv = _read("/proc/%s/cmdline" % name).split(b"\0")
    first = os.fsdecode(argv[0]) if argv else ""
    if any(_AGENT.search(item) for item in argv[1:6]):
        return ""  # a verb of ours (a follower, say) that happens to run on this interpreter imports nothing there
    if any(first.startswith(root) for root in roots):
        return "its interpreter is %s" % first
    try:
        executable = os.readlink("/proc/%s/exe" % name)
    except OSError:
        executable = ""
    if any(executable.startswith(root) for root in roots):
        return "its program is %s" % executable
    for line in _read("/proc/%s/maps" % name).splitlines():
        at = line.find(b"/")
        path = os.fsdecode(line[at:]) if at >= 0 else ""
        if path and any(path.startswith(root) for root in roots):
            return "it has %s mapped" % path
    return ""


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except OSError:
        return b""


def _ancestors() -> Set[int]:
    found = {os.getpid()}
    pid = os.getppid()
    while pid > 1 and pid not in found:
        found.add(pid)
        try:
            pid = int(_read("/proc/%d/stat" % pid).rpartition(b")")[2].split()[1])
        except (IndexError, ValueError):
            break
    return found
