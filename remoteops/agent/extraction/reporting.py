"""What an engine says while it runs, and whether it was asked to stop."""

from __future__ import annotations

import collections
import os
import re
import signal
import threading
import time
from typing import Any, Deque, Dict, List, Optional, Tuple

from remoteops.agent.rundir import RunDir

INTERVAL = 1.0  # seconds between two progress events
UNSAID = 100  # events kept while the disk is full; counts go first
PATIENCE = 60.0  # seconds that the last event waits for room
WINDOW = 15.0  # seconds over which tokens_per_s is taken
_ERROR = re.compile(
    r"[A-Za-z_][\w.]*(Error|Exception|Died|Interrupt)(: .+)?$"
    r"|CUDA (error|out of memory)\b.*$|(Segmentation fault|Killed)\b.*$"
    r"|(Worker proc|Engine core proc)\w* .*\bdied\b.*$"
)


class Interrupted(Exception):
    """The run was asked to stop while nothing was in flight."""


class WorkerDied(Exception):
    """A worker process of the engine ended by itself."""


class Reporter:
    """Events of one run. ``samples_total`` and ``tokens_total`` count what the run has to have at its end; what an
    earlier try left is added to the counts (see ``count``)."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.samples_total = 0
        self.tokens_total = 0
        self._done = (0, 0)
        self._last = 0.0
        self._seen: Deque[Tuple[float, int]] = collections.deque()
        self._stop = threading.Event()
        self.signal: Optional[int] = None
        self.interruptible = False
        self.written = {"samples": 0, "tokens": 0, "bytes": 0}
        self._speaking = threading.Lock()
        self._unsaid: List[Dict[str, Any]] = []  # events that a full disk did not take yet

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.signal = number
        self._stop.set()
        # Another thread (the inspector's) cannot interrupt the main one: that sees ``stopping`` before its next step.
        if self.interruptible and threading.current_thread() is threading.main_thread():
            self.interruptible = False
            raise Interrupted()

    def listen(self) -> None:
        """SIGTERM and SIGINT ask the engine to finish what is in flight; while ``interruptible`` they raise
        Interrupted at once. Call from the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _frame: self.stop(number))

    def count(self, samples_total: int, tokens_total: int, done_samples: int, done_tokens: int) -> None:
        self.samples_total, self.tokens_total, self._done = samples_total, tokens_total, (done_samples, done_tokens)

    def phase(self, name: str, **fields: Any) -> None:
        self._tell("phase", phase=name, **fields)

    def notice(self, text: str, **fields: Any) -> None:
        self._tell("notice", text=text, **fields)

    def failure(self, kind: str, message: str, hint: str = "", **fields: Any) -> None:
        self._tell("failure", kind=kind, message=message, hint=hint, **fields)

    def outcome(self, state: str, **summary: Any) -> None:
        """The last word of the run; a disk that is full is waited for, because without it the run counts as failed."""
        deadline = time.monotonic() + PATIENCE
        said = self._tell("outcome", state=state, summary=summary)
        while not said and time.monotonic() < deadline:
            time.sleep(0.5)
            said = self._flush()

    def _tell(self, event: str, **fields: Any) -> bool:
        """Append an event. A full disk must not end a run that could go on: what cannot be said is said later."""
        with self._speaking:  # the inspector's thread speaks too
            self._unsaid.append({"event": event, "t": round(time.time(), 6), **fields})
            return self._say()

    def _flush(self) -> bool:
        with self._speaking:
            return self._say()

    def _say(self) -> bool:
        while self._unsaid:
            try:
                self.run.event(**self._unsaid[0])
            except OSError:
                if len(self._unsaid) > UNSAID:
                    counts = [at for at, one in enumerate(self._unsaid) if one["event"] == "progress"]
                    del self._unsaid[counts[0] if counts else 0]
                return False
            self._unsaid.pop(0)
        return True

    def progress(self, samples: int, tokens: int, size: int, *, force: bool = False) -> None:
        """Counts written by this process so far; an event at most once a second unless ``force``."""
        self.written = {"samples": samples, "tokens": tokens, "bytes": size}
        now = time.monotonic()
        if not force and now - self._last < INTERVAL:
            return
        self._last = now
        self._seen.append((now, tokens))
        while len(self._seen) > 2 and now - self._seen[0][0] > WINDOW:
            self._seen.popleft()
        (_, before), span = self._seen[0], now - self._seen[0][0]
        self._tell(
            "progress",
            samples=self._done[0] + samples,
            samples_total=self.samples_total,
            tokens=self._done[1] + tokens,
            tokens_total=self.tokens_total,
            tokens_per_s=round((tokens - before) / span, 1) if span > 0 else None,
            bytes=size,
        )


def last_errors(path: str, limit: int = 3, tail: int = 262144) -> List[str]:
    """The last distinct error lines of a log (bytes of several processes), newest last; [] when there are none.

    vLLM's workers print the real cause; what reaches the caller is mostly "Worker failed" or "cancelled".
    """
    try:
        with open(path, "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - tail))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return []
    found: List[str] = []
    for line in text.splitlines():
        match = _ERROR.search(line.rstrip())
        if match:
            line = match.group(0).strip()[:500]
            if line in found:
                found.remove(line)
            found.append(line)
    return found[-limit:]
