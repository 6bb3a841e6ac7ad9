"""What a supervisor sees around its run: GPUs, disk, which processes belong to it; each at its own pace."""

from __future__ import annotations

import os
import time
from typing import Any, Callable, Dict, List, Optional, Set

from remoteops.agent import evidence, processes
from remoteops.agent.gpus import Gpus
from remoteops.agent.processes import Process

LOOK_EVERY = {"gpus": 5.0, "gpus by a process": 15.0, "gpu event": 30.0, "disk": 10.0, "tree": 15.0}
"""Seconds between two looks; a look through nvidia-smi costs a process and is rarer, and so is a line in the events."""
LOW_DISK = 1 << 30
"""Bytes left at which a run's disk is called nearly full."""
KNOWN = 500
"""Processes that are remembered at most."""


class Lookout:
    """``look`` once a second; ``found`` holds what status.json shows of it: {"gpus": [...], "disk": {...}}.

    ``seen`` are the identities of the run's processes at the last look, ``ever`` the pids of all that there were.
    """

    def __init__(self, event: Callable[..., None], *, seen: List[Dict[str, Any]], oom: Dict[str, int]) -> None:
        self._event = event
        self._oom = oom
        self._at = dict.fromkeys(LOOK_EVERY, -1e9)
        self.gpus = Gpus()
        self.found: Dict[str, Any] = {"gpus": [], "disk": None}
        self.seen = seen
        self.ever: Set[int] = {who["pid"] for who in seen}

    def _is_due(self, name: str) -> bool:
        now = time.monotonic()
        if now - self._at[name] < LOOK_EVERY[name]:
            return False
        self._at[name] = now
        return True

    def look(self, place: str, indexes: Optional[List[int]], members: Callable[[], Dict[int, Process]]) -> bool:
        """Look at what is due. True when other processes belong to the run than before, which must be remembered."""
        if self.gpus.present and self._is_due("gpus" if self.gpus.cheap else "gpus by a process"):
            shown = [device for device in self.gpus.devices() if indexes is None or device["index"] in indexes]
            self.found["gpus"] = shown
            if self._is_due("gpu event"):
                names = ("index", "memory_used", "memory_total", "utilization")
                self._event("gpu", gpus=[{name: device[name] for name in names} for device in shown])
        if self._is_due("disk"):
            self._look_at_disk(place)
        return self._look_at_processes(members()) if self._is_due("tree") else False

    def _look_at_disk(self, path: str) -> None:
        while not os.path.exists(path) and os.path.dirname(path) != path:
            path = os.path.dirname(path)
        try:
            info = os.statvfs(path)
        except OSError:
            return
        before = self.found["disk"] or {}
        free: int = info.f_bavail * info.f_frsize
        self.found["disk"] = {"path": path, "free": free, "total": info.f_blocks * info.f_frsize}
        if free < LOW_DISK <= before.get("free", LOW_DISK):
            self._event("notice", text="the disk is nearly full: %d MB left at %s" % (free >> 20, path))

    def _look_at_processes(self, found: Dict[int, Process]) -> bool:
        boot = processes.boot_id()
        known = {(who["pid"], who["start"]) for who in self.seen}
        new: List[Dict[str, Any]] = [
            {"pid": process.pid, "start": process.start, "boot": boot, "name": process.name}
            for process in found.values()
            if (process.pid, process.start) not in known
        ]
        here = {(process.pid, process.start) for process in found.values()}
        gone = [who for who in self.seen if (who["pid"], who["start"]) not in here]
        self.ever.update(who["pid"] for who in new)
        if gone:
            self._say_gone(gone)
        if new or gone:
            self.seen = [who for who in self.seen if who not in gone][-KNOWN:] + new
        return bool(new or gone)

    def _say_gone(self, gone: List[Dict[str, Any]]) -> None:
        """A worker that vanishes leaves its engine hanging, often without a word: the record must show it."""
        pids = [who["pid"] for who in gone]
        names = ", ".join("%d %s" % (who["pid"], who.get("name", "")) for who in gone)
        self._event("processes_gone", pids=pids, names=names)
        proof = evidence.out_of_memory(self._oom, pids)
        if proof:
            self._oom.update(evidence.oom_counters())
            self._event("notice", text="gone: %s; out of memory (%s)" % (names, proof[0]))
