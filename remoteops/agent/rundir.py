"""The one owner of a run directory's file names.

    <state>/runs/<run id>/
      request.json      what was asked (written once, before anything starts)
      status.json       the newest state (temporary name + rename)
      events.jsonl      everything that happened; appended by the supervisor and by the engine, one write a line
      log               the raw bytes of the child's stdout and stderr
      log.index         "offset unix-time" lines: which byte was written when
      supervisor.json   pid, start time and boot id of the supervisor and of the child
      out/              samples and manifest.jsonl (or a link to the folder named in the request)
"""
from __future__ import annotations

import json
import os
import time
from typing import Any, Dict, Iterator, Optional

from remoteops.agent.protocol import encode

STATES = ("queued", "starting", "loading", "running", "verifying", "done", "failed", "stopped", "lost")
TERMINAL = ("done", "failed", "stopped", "lost")


class RunDir:
    """Paths and atomic reads and writes of one run."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(os.path.expanduser(path))
        self.id = os.path.basename(self.path)
        self.request = self._at("request.json")
        self.status = self._at("status.json")
        self.events = self._at("events.jsonl")
        self.log = self._at("log")
        self.log_index = self._at("log.index")
        self.supervisor = self._at("supervisor.json")
        self.out = self._at("out")

    def _at(self, name: str) -> str:
        return os.path.join(self.path, name)

    def event(self, event: str, **fields: Any) -> None:
        """Append one event; a single O_APPEND write, so that lines of several processes never mix."""
        fd = os.open(self.events, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, encode({"event": event, "t": round(time.time(), 6), **fields}))
        finally:
            os.close(fd)

    def read_events(self) -> Iterator[Dict[str, Any]]:
        """Every whole event so far; a torn last line is left for the next reader."""
        try:
            with open(self.events, "rb") as stream:
                for line in stream:
                    if line.endswith(b"\n"):
                        try:
                            yield json.loads(line)
                        except ValueError:
                            continue
        except FileNotFoundError:
            return


def read_json(path: str) -> Optional[Dict[str, Any]]:
    """The object in a JSON file, or None when it is missing or unreadable as JSON."""
    try:
        with open(path, "rb") as stream:
            value = json.load(stream)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: str, value: Dict[str, Any], *, sync: bool = True) -> None:
    """Write beside and rename: a reader sees the old object or the new one, never a part."""
    temporary = "%s.tmp.%d" % (path, os.getpid())
    with open(temporary, "w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=1, default=str)
        stream.write("\n")
        stream.flush()
        if sync:
            os.fsync(stream.fileno())
    os.replace(temporary, path)
