"""Writes finished samples from a few threads, from memory that is reserved before the sample is computed.

The threads spend their time in ``write`` (without the GIL), so that the thread that launches the model's work is not
held up. Nothing here imports torch: a sample is whatever ``store.write(row, states)`` takes.
"""

from __future__ import annotations

import queue
import threading
from typing import Any, Callable, Dict, List, Optional, Tuple

from remoteops.agent.lines import FULL


class Sample:
    """One finished sample: its row, its states in host memory, and what to wait for and to give back."""

    __slots__ = ("ready", "release", "row", "size", "states")

    def __init__(
        self,
        row: Any,
        states: Any,
        size: int,
        ready: Optional[Callable[[], Any]] = None,
        release: Optional[Callable[[], None]] = None,
    ) -> None:
        self.row = row
        self.states = states
        self.size = size
        self.ready = ready
        self.release = release


class Writer:
    """``threads`` writers over one queue.

    ``store`` has ``write(row, states)``; ``gate`` (or None) has ``wait(bytes, stop, failed=False)``, which blocks
    while the disk is nearly full (``failed``: a write has just met that) and is False when the run is being stopped.
    A full disk is waited for and the sample written again; any other error is kept for the caller, with the row it
    happened to (and told to ``failed(index, text)``, in the writer's thread).
    """

    def __init__(
        self, store: Any, gate: Any = None, threads: int = 8, failed: Optional[Callable[[int, str], None]] = None
    ) -> None:
        self._store = store
        self._failed = failed
        self._gate = gate
        self._queue: queue.SimpleQueue[Optional[Sample]] = queue.SimpleQueue()
        self._lock = threading.Condition()
        self._stopped = threading.Event()
        self._counts = {"samples": 0, "tokens": 0, "bytes": 0, "pending": 0, "dropped": 0}
        self._errors: List[Tuple[int, str]] = []
        self._threads = [
            threading.Thread(target=self._work, name="remoteops-writer-%d" % i, daemon=True)
            for i in range(max(1, threads))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, sample: Sample) -> None:
        with self._lock:
            self._counts["pending"] += 1
        self._queue.put(sample)

    def stats(self) -> Dict[str, Any]:
        """Counts since the start: samples, tokens, bytes (written), pending, dropped; errors as (row index, text)."""
        with self._lock:
            return {**self._counts, "errors": list(self._errors)}

    def drain(self, timeout: float) -> bool:
        """Wait until everything submitted is written (or failed), at most ``timeout`` seconds."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._counts["pending"], timeout)

    def stop(self) -> None:
        """Give up what waits for disk space; what is being written is still finished."""
        self._stopped.set()

    def close(self) -> None:
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout=30)

    def _work(self) -> None:
        while True:
            sample = self._queue.get()
            if sample is None:
                return
            written, error = False, ""
            try:
                if sample.ready is not None:
                    sample.ready()
                written = self._write(sample)
            except Exception as problem:  # noqa: BLE001 - kept for the caller, who names the row and fails the run
                error = "%s: %s" % (type(problem).__name__, problem)
            sample.states = None
            if sample.release is not None:
                sample.release()
            if error and self._failed is not None:
                self._failed(int(sample.row.index), error)
            with self._lock:
                self._counts["pending"] -= 1
                if written:
                    self._counts["samples"] += 1
                    self._counts["tokens"] += len(sample.row.input_ids)
                    self._counts["bytes"] += sample.size
                elif error:
                    self._errors.append((int(sample.row.index), error))
                else:
                    self._counts["dropped"] += 1
                self._lock.notify_all()

    def _write(self, sample: Sample) -> bool:
        while True:
            if self._gate is not None and not self._gate.wait(sample.size, self._stopped.is_set):
                return False
            try:
                self._store.write(sample.row, sample.states)
                return True
            except OSError as error:
                if error.errno not in FULL or self._stopped.is_set():
                    raise
                # The gate's reserve was not enough (others write here too): wait for room and write this sample again.
                if self._gate is None:
                    raise
                if not self._gate.wait(sample.size, self._stopped.is_set, failed=True):
                    return False
