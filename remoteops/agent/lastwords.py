"""What a run's program said last, and how long ago: while a model loads there is nothing else to tell that it goes
on."""

from __future__ import annotations

import re
from typing import Any, Dict

KEEP = 4096  # bytes; a line that is longer is told from its end
LONGEST = 240  # characters of what is told
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[@-Z\\-_])?")


class LastWords:
    """Feed it the log as it comes; ``fields(now)`` at any time."""

    def __init__(self) -> None:
        self._tail = b""
        self._at = 0.0
        self._spoken = False

    def feed(self, data: bytes, now: float) -> None:
        """``now``: seconds of any steady clock."""
        self._tail = (self._tail + data)[-KEEP:] if len(data) < KEEP else data[-KEEP:]
        self._at, self._spoken = now, True

    def fields(self, now: float) -> Dict[str, Any]:
        """{"text": the last line that holds more than blanks (after a carriage return it is written anew), "quiet_s":
        seconds since anything came}; both None before the first word."""
        if not self._spoken:
            return {"text": None, "quiet_s": None}
        text = _ESCAPES.sub("", self._tail.decode("utf-8", "replace"))
        parts = [part.strip() for part in re.split(r"[\r\n]", text)]
        said = next((part for part in reversed(parts) if part), "")
        return {"text": said[:LONGEST], "quiet_s": round(max(0.0, now - self._at), 1)}
