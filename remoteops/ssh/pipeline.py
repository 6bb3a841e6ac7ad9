"""Reading and checksums beside an upload, not in its way: a thread reads while the channel is busy."""

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
