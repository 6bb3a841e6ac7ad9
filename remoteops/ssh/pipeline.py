"""Checksums and disk work beside a transfer, not in its way: a thread reads or writes while the channel is busy."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Generator
from typing import BinaryIO

_AHEAD = 8  # chunks that may wait


def read_ahead(source: BinaryIO, size: int, chunk: int, digest: hashlib._Hash) -> Generator[bytes, None, None]:
    """The next ``size`` bytes of a file in chunks; each is added to the digest before it comes. Raises OSError."""
    ready: queue.Queue[bytes | BaseException | None] = queue.Queue(_AHEAD)
    stop = threading.Event()

    def put(item: bytes | BaseException | None) -> None:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.2)
                return
            except queue.Full:
                continue

    def work() -> None:
        left = size
        try:
            while left and not stop.is_set() and (data := source.read(min(chunk, left))):
                digest.update(data)
                left -= len(data)
                put(data)
            put(None)
        except BaseException as error:  # noqa: BLE001 - carried to the thread that sends
            put(error)

    thread = threading.Thread(target=work, name="remoteops-read-ahead", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()


class WriteBehind:
    """Writes what it is given to a file, and adds it to a digest, from a thread of its own.

    A context manager: at its end everything is written. Raises the thread's OSError in ``write`` or at the end.
    """

    def __init__(self, sink: BinaryIO, digest: hashlib._Hash) -> None:
        self._sink = sink
        self._digest = digest
        self._queue: queue.Queue[bytes | None] = queue.Queue(_AHEAD)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="remoteops-write-behind", daemon=True)

    def _work(self) -> None:
        while (data := self._queue.get()) is not None:
            if self._error is None:
                try:
                    view = memoryview(data)
                    while view:
                        view = view[self._sink.write(view) :]
                    self._digest.update(data)
                except BaseException as error:  # noqa: BLE001 - carried to the thread that receives
                    self._error = error

    def write(self, data: bytes) -> None:
        if self._error is not None:
            raise self._error
        self._queue.put(data)

    def __enter__(self) -> WriteBehind:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._queue.put(None)
        self._thread.join()
        if self._error is not None and kind is None:
            raise self._error
