"""The door between the operator and the host: one JSON request in, JSON-line events out.

A verb ends with exactly one ``result`` or ``error`` event. A stream that ends without one means that
the link was lost; it never means "finished".
"""
from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any, BinaryIO, Dict, Optional

PROTOCOL = 1
RESULT = "result"
ERROR = "error"
HEARTBEAT = "heartbeat"


class AgentError(Exception):
    """A failure that the user meets.

    ``kind`` is the name of a class in ``remoteops.errors`` (the operator raises that class), ``message`` says
    what is wrong, ``tried`` what was attempted, ``hint`` what to do next; ``data`` is anything a caller may need.
    """

    def __init__(self, kind: str, message: str, *, tried: str = "", hint: str = "", **data: Any) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.tried = tried
        self.hint = hint
        self.data = data

    def fields(self) -> Dict[str, Any]:
        return {"kind": self.kind, "message": self.message, "tried": self.tried, "hint": self.hint, "data": self.data}


class Emitter:
    """Writes events as JSON lines; one write a line, safe from several threads."""

    def __init__(self, stream: Optional[BinaryIO] = None) -> None:
        self._stream = stream if stream is not None else sys.stdout.buffer
        self._lock = threading.Lock()

    def __call__(self, event: str, **fields: Any) -> None:
        line = encode({"event": event, "t": round(time.time(), 6), **fields})
        with self._lock:
            self._stream.write(line)
            self._stream.flush()


def encode(record: Dict[str, Any]) -> bytes:
    """One JSON line; text that is no valid UTF-8 (surrogates from file names) travels as escapes."""
    return json.dumps(record, ensure_ascii=True, separators=(",", ":"), default=str).encode("ascii") + b"\n"


def decode(line: bytes) -> Dict[str, Any]:
    """The record of one line. Raises ValueError when it is no JSON object."""
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("a record of the agent must be a JSON object")
    return record
