"""A fixed piece of host memory given out in ranges: the bound on what waits to be written."""

from __future__ import annotations

import threading
from typing import List, Optional, Tuple

ALIGN = 4096


class Ranges:
    """First-fit ranges of ``size`` bytes, merged again when they come back. Safe from several threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._holes: List[Tuple[int, int]] = [(0, size)] if size else []  # (offset, bytes), ascending
        self._changed = threading.Condition()
        self._free = size

    @property
    def free(self) -> int:
        return self._free

    def take(self, wanted: int) -> Optional[int]:
        """The offset of a range of at least ``wanted`` bytes, or None when none is free now."""
        wanted = rounded(wanted)
        with self._changed:
            for index, (offset, length) in enumerate(self._holes):
                if length >= wanted:
                    rest = (offset + wanted, length - wanted)
                    self._holes[index : index + 1] = [rest] if rest[1] else []
                    self._free -= wanted
                    return offset
        return None

    def give(self, offset: int, length: int) -> None:
        """Give a range back. Raises ValueError when it overlaps a free one."""
        length = rounded(length)
        with self._changed:
            holes = self._holes
            at = next((i for i, hole in enumerate(holes) if hole[0] > offset), len(holes))
            if (
                (at
                and holes[at - 1][0] + holes[at - 1][1] > offset)
                or (at < len(holes)
                and offset + length > holes[at][0])
            ):
                raise ValueError("range %d+%d is free already" % (offset, length))
            holes.insert(at, (offset, length))
            if at + 1 < len(holes) and offset + length == holes[at + 1][0]:
                holes[at : at + 2] = [(offset, length + holes[at + 1][1])]
            if at and holes[at - 1][0] + holes[at - 1][1] == offset:
                holes[at - 1 : at + 1] = [(holes[at - 1][0], holes[at - 1][1] + holes[at][1])]
            self._free += length
            self._changed.notify_all()

    def fits(self, sizes: List[int]) -> bool:
        """Would these ranges all be given now? (A simulation of first fit; nothing is taken.)"""
        with self._changed:
            return self._fits_locked(sizes)

    def wait(self, sizes: List[int], timeout: float) -> bool:
        """Wait until ``sizes`` would fit, or everything is free, at most ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._free == self.size or self._fits_locked(sizes), timeout)

    def _fits_locked(self, sizes: List[int]) -> bool:
        holes = [length for _, length in self._holes]
        for wanted in map(rounded, sizes):
            at = next((i for i, length in enumerate(holes) if length >= wanted), None)
            if at is None:
                return False
            holes[at] -= wanted
        return True


def rounded(length: int) -> int:
    return max(ALIGN, (length + ALIGN - 1) // ALIGN * ALIGN)


def memory_for(lengths: List[int], row_bytes: int, most: int = 4 << 30) -> int:
    """Bytes of host memory for samples on their way to disk: all of a small run, at least two of the largest samples,
    else ``most``."""
    everything = sum(rounded(length * row_bytes) for length in lengths)
    return max(2 * rounded(max(lengths, default=1) * row_bytes), min(most, everything), 1 << 20)
