"""Appends lines to a file that several processes append to, also on a disk that is full now and then."""

from __future__ import annotations

import errno
import os

FULL = (errno.ENOSPC, errno.EDQUOT)


def append(path: str, line: bytes, *, mode: int = 0o600, create: bool = True) -> None:
    """Append ``line`` (it ends with a newline) in one write, so that lines of several processes never mix.

    A line that a full disk or a crash cut short before it is ended first, or this one would stick to it and both were
    lost. Raises OSError; ENOSPC also for a write that took only a part.
    """
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | (os.O_CREAT if create else 0), mode)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) not in (b"\n", b""):
            line = b"\n" + line
        if os.write(fd, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    finally:
        os.close(fd)
