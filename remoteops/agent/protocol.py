"""The door between the operator and the host: one JSON request in, JSON-line events out.

A verb ends with exactly one ``result`` or ``error`` event. A stream that ends without one means that
the link was lost; it never means "finished".

How a verb learns that its operator is gone
-------------------------------------------
The request is the first line of stdin. When it has ``"watch": SECONDS``, stdin stays open after it and is the
operator's sign of life: the operator sends an empty line every few seconds. End of file (the operator closed the
stream, its process or its connection died), or no byte for ``watch`` seconds (the network swallows packets and
this host's sshd has not noticed), means gone. Then

* a verb of READS gets a KeyboardInterrupt in its main thread, so that ``finally`` blocks and ``subprocess.run`` clean
  up, and the process ends at the latest 0.8 s later, whatever it is doing;
* any other verb changes the host: it runs to its end, because half a change is worse than one nobody watched. Its
  events go nowhere. ``Emitter.gone`` tells it, for loops that may stop early.

Without ``watch`` (a request piped in by hand) nothing is watched and the verb simply runs.
"""

from __future__ import annotations

import _thread
import sys
import time

from remoteops.agent import quickjson

# Every verb pays for what is imported here: typing alone costs half of an interpreter's start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO, Dict, FrozenSet, Optional

PROTOCOL = 1
RESULT = "result"
ERROR = "error"
HEARTBEAT = "heartbeat"

# Verbs that only look. The operator repeats them after a lost connection, and they end when nobody listens.
# A verb that is not here is never repeated by the link and never interrupted.
READS: FrozenSet[str] = frozenset(
    {
        "hello",
        "facts",
        "audit",
        "audit.runtime",
        "audit.shell",
        "patch.audit",
        "patch.read",
        "patch.status",
        "patch.prove",
        "preflight",
        "run.job",
        "run.list",
        "run.status",
        "run.follow",
        "leftovers",
        "verify",
        "pull.list",
    }
)


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


class Gone:
    """A threading.Event in small: set once."""

    def __init__(self) -> None:
        self._set = False
        self._lock = _thread.allocate_lock()
        self._lock.acquire()

    def set(self) -> None:
        if not self._set:
            self._set = True
            self._lock.release()

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: Optional[float] = None) -> bool:
        """Whether it is set, at the latest after ``timeout`` seconds."""
        if self._lock.acquire(True, -1 if timeout is None else timeout):
            self._lock.release()
        return self._set


class Emitter:
    """Writes events as JSON lines; one write a line, safe from several threads.

    ``gone`` is set once nobody reads any more; events are dropped from then on.
    """

    def __init__(self, stream: Optional[BinaryIO] = None) -> None:
        self._stream = stream if stream is not None else sys.stdout.buffer
        self._lock = _thread.allocate_lock()
        self.gone = Gone()

    def __call__(self, event: str, **fields: Any) -> None:
        line = encode({"event": event, "t": round(time.time(), 6), **fields})
        with self._lock:
            if self.gone.is_set():
                return
            try:
                self._stream.write(line)
                self._stream.flush()
            except (OSError, ValueError):
                self.gone.set()


def encode(record: Dict[str, Any]) -> bytes:
    """One JSON line; text that is no valid UTF-8 (surrogates from file names) travels as escapes."""
    return quickjson.dumps(record).encode("ascii") + b"\n"


def decode(line: bytes) -> Dict[str, Any]:
    """The record of one line. Raises ValueError when it is no JSON object."""
    record = quickjson.loads(line.decode("utf-8"))
    if not isinstance(record, dict):
        raise ValueError("a record of the agent must be a JSON object")
    return record
