"""Takes away older agents from a host: archives that were replaced long ago, and their unpacked twins."""

from __future__ import annotations

import os
import re
import shutil
import time
from typing import Dict, List, Optional, Set

UNUSED = 14 * 86400.0
"""Seconds without use after which an older agent goes. Another operator's version that is gone is shipped again."""
# agent-HASH.pyz, agent-HASH (its twin), agent-HASH.PID (half unpacked), .agent-HASH.pyz.KEY.part (half shipped)
_OURS = re.compile(r"\.?(agent-[0-9a-f]{8,})(\.[^/]*)?$")
_MENTIONED = re.compile(rb"agent-[0-9a-f]{8,}")


def tidy(folder: str, keep: str, proc: str = "/proc", now: Optional[float] = None) -> List[str]:
    """Remove from ``folder`` what belongs to agents other than ``keep`` ("agent-HASH"), was not read or written for
    UNUSED seconds, and is named by no process' command line or environment (a run's PYTHONPATH). Gives the names.
    Raises nothing: where it cannot be known what is in use (no /proc), all stays."""
    removed: List[str] = []
    try:
        kinds: Dict[str, List[str]] = {}
        for name in os.listdir(folder):
            match = _OURS.match(name)
            if match and match.group(1) != keep:
                kinds.setdefault(match.group(1), []).append(name)
        limit = (time.time() if now is None else now) - UNUSED
        old = {kind for kind, names in kinds.items() if all(_last_use(folder, name) < limit for name in names)}
        if old:
            old -= _in_use(proc)
        for kind in sorted(old):
            for name in sorted(kinds[kind]):
                if _remove(os.path.join(folder, name)):
                    removed.append(name)
    except OSError:
        pass
    return removed


def _last_use(folder: str, name: str) -> float:
    """When it was last read or written, as unix time; file systems note reading a day late, or not at all."""
    path = os.path.join(folder, name)
    times = []
    for place in (path, os.path.join(path, "__main__.py")):
        try:
            found = os.lstat(place)
        except OSError:
            continue
        times += [found.st_mtime] if place == path and os.path.isdir(path) else [found.st_mtime, found.st_atime]
    return max(times, default=float("inf"))


def _in_use(proc: str) -> Set[str]:
    """The agents that processes name. Raises OSError when they cannot be listed."""
    found: Set[str] = set()
    pids = [name for name in os.listdir(proc) if name.isdigit()]
    if not pids:
        raise OSError("no processes to be seen in %s" % proc)
    for pid in pids:
        for what in ("cmdline", "environ"):
            try:
                with open(os.path.join(proc, pid, what), "rb") as stream:
                    text = stream.read()
            except OSError:
                continue  # it ended, or belongs to somebody else
            found.update(name.decode("ascii") for name in _MENTIONED.findall(text))
    return found


def _remove(path: str) -> bool:
    try:
        if os.lstat(path).st_uid != os.getuid():
            return False
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except OSError:
        return False
    return True
