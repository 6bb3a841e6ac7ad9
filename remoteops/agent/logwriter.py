"""The one writer of a run's log: bytes as they come, an index of when they came, and what to do when it cannot write.

A full disk must not hurt the child: its output goes on being read, the newest megabyte is kept, and once there is room
again it is written with one line that says how much is missing. A log that was renamed or deleted is opened anew.
"""

from __future__ import annotations

import os
import time
from typing import Optional

from remoteops.agent.processes import uptime
from remoteops.agent.rundir import RunDir

KEEP = 1 << 20
"""Bytes held back in memory while the disk is full."""
ROOM = 1 << 19
"""Bytes that must be free before a log that met a full disk is written to again: status and events come first."""
INDEX_EVERY = 1.0
"""Seconds between two entries of the index."""


class LogWriter:
    """``write`` never raises for a full disk or a vanished directory; ``problem`` says what is wrong, or is ""."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._fd: Optional[int] = None
        self._inode = (0, 0)
        self._held = bytearray()
        self._dropped = 0
        self._indexed = -INDEX_EVERY
        self._checked = 0.0
        self.size = 0
        self.problem = ""
        self._open()

    def _open(self) -> None:
        try:
            self._fd = os.open(self._run.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            info = os.fstat(self._fd)
            self._inode, self.size, self.problem = (info.st_dev, info.st_ino), info.st_size, ""
        except OSError as error:
            if not self.problem:
                self.problem = "log cannot be opened: %s" % (error.strerror or error)

    def _reopen_if_moved(self) -> None:
        try:
            info = os.stat(self._run.log)
            if (info.st_dev, info.st_ino) == self._inode and self._fd is not None:
                self.size = info.st_size
                return
        except FileNotFoundError:
            if self._fd is not None and not os.path.isdir(self._run.path):
                self.problem = "the run directory was deleted"
                return
        except OSError:
            return
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        self._open()

    def write(self, data: bytes) -> None:
        """Append ``data``; what cannot be written now is kept for ``flush``."""
        now = uptime()
        if now - self._checked > 0.05 or self._fd is None:
            self._checked = now
            self._reopen_if_moved()
        if self._held:
            self._hold(data)
            self.flush()
            return
        self._index(now)
        rest = self._put(data)
        if rest:
            self._hold(rest)

    def _put(self, data: bytes) -> bytes:
        if self.problem and not self._has_room():
            return data
        view = memoryview(data)
        while view:
            if self._fd is None:
                return bytes(view)
            try:
                done = os.write(self._fd, view)
            except OSError as error:
                self.problem = "log cannot be written: %s" % (error.strerror or error)
                return bytes(view)
            view = view[done:]
            self.size += done
        if self.problem.startswith("log"):
            self.problem = ""
        return b""

    def _has_room(self) -> bool:
        """After a failed write: is there room for more than the run's own last words?"""
        try:
            info = os.statvfs(self._run.path)
        except OSError:
            return True
        return info.f_bavail * info.f_frsize >= ROOM

    def _hold(self, data: bytes) -> None:
        self._held += data
        if len(self._held) > KEEP:
            self._dropped += len(self._held) - KEEP
            del self._held[: len(self._held) - KEEP]

    def flush(self) -> bool:
        """Try again to write what is held back; True when nothing is left."""
        if self._held:
            if self._dropped:
                note = b"\n[remoteops: %d bytes of the log are missing here: the disk was full]\n" % self._dropped
                if self._put(note):
                    return False
                self._dropped = 0
            self._held = bytearray(self._put(bytes(self._held)))
        return not self._held

    def _index(self, now: float) -> None:
        if now - self._indexed < INDEX_EVERY:
            return
        self._indexed = now
        try:
            fd = os.open(self._run.log_index, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return
        try:
            os.write(fd, b"%d %.3f %.3f\n" % (self.size, time.time(), now))
        except OSError:
            pass
        finally:
            os.close(fd)
