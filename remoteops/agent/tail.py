"""Reads a growing file by inode and offset: no byte lost, none twice, whatever happens to the name it had.

A position is {"dev", "ino", "offset", "check"}: the file, how much of it was read, and a checksum of the bytes just
before, which tells a file that goes on from one that was emptied and filled again. Handled: appending, rename (also
several times), copy and truncate, truncation, deletion, and going on from a position after the link was lost.
"""

from __future__ import annotations

import os
import re
import zlib
from typing import Any, Callable, Dict, List, Optional, Tuple

CHECK = 64
"""Bytes before the offset that the checksum covers."""
BLOCK = 1 << 16

Position = Dict[str, Any]


class LogReader:
    """``read`` gives the next bytes, b"" at the end so far; ``notice`` is called with what a user should know."""

    def __init__(self, path: str, notice: Callable[[str, str], None]) -> None:
        self.path = path
        self._notice = notice
        self._fd: Optional[int] = None
        self._key: Tuple[int, int] = (0, 0)
        self._tail = b""
        self._quiet = False
        self.offset = 0

    # -- where to begin ---------------------------------------------------------------------------------------------
    def begin(self, offset: Callable[[int], int]) -> bool:
        """Open the file; ``offset(fd)`` says where to begin. False when there is no file yet."""
        fd = _open(self.path)
        if fd is None:
            return False
        self._use(fd, offset(fd))
        return True

    def resume(self, position: Position) -> None:
        """Go on at ``position``, in the file it speaks of, whatever that file is called now."""
        for name in [self.path, *self._siblings()]:
            fd = _open(name)
            if fd is None:
                continue
            info = os.fstat(fd)
            if (info.st_dev, info.st_ino) == (position.get("dev"), position.get("ino")) and _fits(
                fd, info.st_size, position
            ):
                self._use(fd, position["offset"])
                return
            os.close(fd)
        if self._use_copy(position):
            return
        self._notice("replaced", "the log is not the one that was read before; starting at its beginning")
        fd = _open(self.path)
        if fd is not None:
            self._use(fd, 0)

    @property
    def is_open(self) -> bool:
        return self._fd is not None

    @property
    def file(self) -> Any:
        """What is read now (device and inode): another after each rotation that was followed."""
        return self._key if self._fd is not None else None

    def position(self, back: int = 0) -> Optional[Position]:
        """Where reading goes on; ``back`` bytes earlier (at most the last chunk, whose checksum is then left out)."""
        if self._fd is None:
            return None
        check = None if back else [len(self._tail), zlib.crc32(self._tail)]
        return {"dev": self._key[0], "ino": self._key[1], "offset": self.offset - back, "check": check}

    # -- reading ----------------------------------------------------------------------------------------------------
    def read(self, size: int) -> bytes:
        """Up to ``size`` bytes; b"" when there is nothing more at the moment."""
        if self._fd is None:
            if self.begin(lambda fd: 0):
                return self.read(size)
            return b""
        if self._tail and os.pread(self._fd, len(self._tail), self.offset - len(self._tail)) != self._tail:
            self._truncated()
            return self.read(size)
        data = os.pread(self._fd, size, self.offset)
        if data:
            self._quiet = False
            self.offset += len(data)
            self._tail = (self._tail + data)[-CHECK:] if len(data) < CHECK else data[-CHECK:]
            return data
        if os.fstat(self._fd).st_size < self.offset:
            self._truncated()
            return self.read(size)
        return self._next_file(size)

    def _next_file(self, size: int) -> bytes:
        """At the end of this file: is there a newer one under its name?"""
        try:
            info = os.stat(self.path)
        except OSError:
            return b""  # gone for now; what is written to the open file still arrives
        if (info.st_dev, info.st_ino) == self._key:
            return b""
        if not self._quiet:
            self._quiet = True  # one more look: the writer may have written here just before it changed files
            return b""
        follower = self._successor() or self.path
        fd = _open(follower)
        if fd is None:
            return b""
        self._notice("rotated", "the log was rotated; going on in the new file")
        self._use(fd, 0)
        return self.read(size)

    def _successor(self) -> Optional[str]:
        """The file that came after this one, when the log was rotated more than once meanwhile (log.3 -> log.2)."""
        for name in self._siblings():
            match = re.fullmatch(r"\.(\d+)", name[len(self.path) :])
            if match and int(match.group(1)) > 1 and _key_of(name) == self._key:
                newer = "%s.%d" % (self.path, int(match.group(1)) - 1)
                return newer if os.path.exists(newer) else None
        return None

    def _truncated(self) -> None:
        position = self.position()
        if position is not None and self.offset and self._use_copy(position):
            return
        self._notice("truncated", "the log was truncated at byte %d; starting at its beginning" % self.offset)
        self.offset, self._tail = 0, b""

    def _use_copy(self, position: Position) -> bool:
        """After copy-and-truncate: read the rest of the copy first."""
        for name in self._siblings():
            fd = _open(name)
            if fd is None:
                continue
            if position.get("check") and _fits(fd, os.fstat(fd).st_size, position) and position["offset"] > 0:
                self._notice(
                    "rotated",
                    "the log was copied to %s and emptied; reading the rest there first" % os.path.basename(name),
                )
                self._use(fd, position["offset"])
                self._quiet = True
                return True
            os.close(fd)
        return False

    def _siblings(self) -> List[str]:
        folder, base = os.path.split(self.path)
        try:
            names = [
                name
                for name in os.listdir(folder)
                if name.startswith(base)
                and re.match(r"[.-]\d", name[len(base) :])
                and not name.endswith((".gz", ".xz", ".zst", ".bz2"))
            ]
        except OSError:
            return []
        paths = [os.path.join(folder, name) for name in names]
        return sorted(paths, key=_modified, reverse=True)

    def _use(self, fd: int, offset: int) -> None:
        self.close()
        info = os.fstat(fd)
        self._fd, self._key, self.offset, self._quiet = fd, (info.st_dev, info.st_ino), offset, False
        begin = max(0, offset - CHECK)
        self._tail = os.pread(fd, offset - begin, begin)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _open(path: str) -> Optional[int]:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _key_of(path: str) -> Optional[Tuple[int, int]]:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino


def _modified(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _fits(fd: int, size: int, position: Position) -> bool:
    offset, check = position["offset"], position.get("check")
    if size < offset:
        return False
    if not check:
        return True
    length, checksum = check
    return bool(length <= offset and zlib.crc32(os.pread(fd, length, offset - length)) == checksum)


# -- where the last lines begin -------------------------------------------------------------------------------------
def last_lines(fd: int, count: int) -> int:
    """Offset at which the last ``count`` lines begin; reads backwards, and only as much as it needs."""
    end = os.fstat(fd).st_size
    if count <= 0:
        return end
    # A newline at the very end closes the last line and begins none.
    wanted = count + (1 if end and os.pread(fd, 1, end - 1) == b"\n" else 0)
    while end > 0:
        begin = max(0, end - BLOCK)
        block = os.pread(fd, end - begin, begin)
        found = block.count(b"\n")
        if found >= wanted:
            at = len(block)
            for _ in range(wanted):
                at = block.rfind(b"\n", 0, at)
            return begin + at + 1
        wanted -= found
        end = begin
    return 0


def line_start(fd: int, offset: int) -> int:
    """The beginning of the first whole line at or after ``offset``."""
    if offset <= 0 or os.pread(fd, 1, offset - 1) == b"\n":
        return max(0, offset)
    size = os.fstat(fd).st_size
    while offset < size:
        block = os.pread(fd, BLOCK, offset)
        at = block.find(b"\n")
        if at >= 0:
            return offset + at + 1
        offset += len(block)
    return size


def matching_start(fd: int, count: int, matches: Callable[[bytes], bool]) -> int:
    """Offset at which the last ``count`` matching lines begin; a line is held in memory whole, the file is not."""
    end = os.fstat(fd).st_size
    if count <= 0:
        return end
    rest = b""
    base = end
    while base > 0:
        begin = max(0, base - BLOCK)
        block = os.pread(fd, base - begin, begin) + rest
        base = begin
        lines = block.split(b"\n")
        rest = lines[0]
        at = begin + len(block)
        for line in reversed(lines[1:]):
            at -= len(line)
            if matches(line) and (line or at < end):
                count -= 1
                if count == 0:
                    return at
            at -= 1
    return 0


def since(index_path: str, *, wall: Optional[float] = None, uptime: Optional[float] = None) -> int:
    """Offset of the first byte written at or after a moment, from the index beside the log.

    ``uptime`` (seconds since this boot) is used where given, since nobody sets it back; else ``wall`` (unix time).
    Where the clock jumped, rather too much is shown than too little. Without an index: 0.
    """
    entries: List[Tuple[int, float, float]] = []
    try:
        with open(index_path, encoding="ascii") as stream:
            for line in stream:
                try:
                    offset, unix, boot = line.split()
                    entry = (int(offset), float(unix), float(boot))
                except ValueError:
                    continue
                if entries and entry[0] < entries[-1][0]:
                    entries = []  # the log was emptied or replaced here: older offsets speak of another file
                entries.append(entry)
    except OSError:
        return 0
    at = None
    for entry in reversed(entries):
        moment = entry[2] if uptime is not None else entry[1]
        if moment >= (uptime if uptime is not None else wall or 0.0):
            at = entry[0]
        elif uptime is not None:
            # An entry's bytes were written from its moment on, for up to a second: they may reach past the moment
            # asked for.
            return entry[0] if at is None else at
    if at is None:
        return entries[-1][0] if entries else 0
    return at
