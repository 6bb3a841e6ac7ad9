"""The one owner of a run directory's file names.

    <state>/runs/<run id>/
      request.json      what was asked (written once, before anything starts)
      status.json       the newest state (temporary name + rename)
      events.jsonl      everything that happened; appended by the supervisor and by the engine, one write a line
      log               the raw bytes of the child's stdout and stderr
      log.index         "offset unix-time seconds-since-boot" lines: which byte was written when
      supervisor.json   pid, start time and boot id of the keeper, the supervisor, the child and the processes they
      led to stop.json         that somebody asked for a stop, who, when, and how long to be patient
      agent.pyz         the agent this run was started with (a later upgrade does not pull it away)
      out/              samples and manifest.jsonl (or a link to the folder named in the request)

Only the owner may read them: a request and a log can hold paths, prompts and tokens.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from typing import Any, Dict, Iterator, List, Optional, Tuple

from remoteops.agent import lines
from remoteops.agent.protocol import AgentError, encode

STATES = ("queued", "starting", "loading", "running", "verifying", "done", "failed", "stopped", "lost")
TERMINAL = ("done", "failed", "stopped", "lost")
DEFAULT_STATE_DIR = "~/.local/state/remoteops"


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
        self.supervisor_log = self._at("supervisor.log")
        self.stop = self._at("stop.json")
        self.reserve = self._at(".reserve")
        self.archive = self._at("agent.pyz")
        self.out = self._at("out")

    def _at(self, name: str) -> str:
        return os.path.join(self.path, name)

    def event(self, event: str, **fields: Any) -> None:
        """Append one event; a single write, so that lines of several processes never mix. Raises OSError."""
        lines.append(self.events, encode({"event": event, "t": round(time.time(), 6), **fields}))

    def read_events(self) -> Iterator[Dict[str, Any]]:
        """Every whole event so far; a torn last line is left for the next reader."""
        return (record for record, _ in self.events_from(0))

    def events_from(self, offset: int) -> Iterator[Tuple[Dict[str, Any], int]]:
        """(event, offset behind it) for every whole event from byte ``offset`` on."""
        try:
            with open(self.events, "rb") as stream:
                stream.seek(offset)
                for line in stream:
                    if not line.endswith(b"\n"):
                        return
                    offset += len(line)
                    try:
                        record = json.loads(line)
                    except ValueError:
                        continue
                    if isinstance(record, dict):
                        yield record, offset
        except FileNotFoundError:
            return


def runs_root(request: Dict[str, Any]) -> str:
    """The folder that holds the runs, from the ``state_dir`` of a request."""
    return os.path.join(os.path.abspath(os.path.expanduser(request.get("state_dir") or DEFAULT_STATE_DIR)), "runs")


def create(root: str) -> RunDir:
    """A new, empty run directory with an id of its own: a number that only grows, and the time.

    The number and not the time says which run is newest, so that a clock set back cannot reorder them.
    """
    os.makedirs(root, mode=0o700, exist_ok=True)
    number = max([number_of(name) for name in os.listdir(root)] or [0])
    for _ in range(1000):
        number += 1
        name = "%04d-%s-%s" % (number, time.strftime("%m%d-%H%M%S"), secrets.token_hex(2))
        if any(number_of(other) == number for other in os.listdir(root)):
            continue
        try:
            os.mkdir(os.path.join(root, name), 0o700)
        except FileExistsError:
            continue
        return RunDir(os.path.join(root, name))
    raise AgentError("HostStateError", "no new run directory could be made", tried="mkdir in %s" % root)


def number_of(name: str) -> int:
    """The running number in a run id; 0 for any other name."""
    head = name.partition("-")[0]
    return int(head) if head.isdigit() else 0


def all_runs(root: str) -> List[RunDir]:
    """Every run directory, newest first."""
    try:
        names = [name for name in os.listdir(root) if number_of(name) and os.path.isdir(os.path.join(root, name))]
    except OSError:
        return []
    return [
        RunDir(os.path.join(root, name))
        for name in sorted(names, key=lambda name: (number_of(name), name), reverse=True)
    ]


def find(request: Dict[str, Any]) -> RunDir:
    """The run a request names: id, number, unambiguous beginning of an id, path, or (nothing named) the newest one.

    Raises AgentError(RunNotFound).
    """
    root = runs_root(request)
    name = str(request.get("run") or "")
    if "/" in name and os.path.isdir(os.path.expanduser(name)):
        return RunDir(name)
    runs = all_runs(root)
    if not name:
        if runs:
            return runs[0]
        raise AgentError(
            "RunNotFound",
            "there is no run on this host yet",
            tried="looked in %s" % root,
            hint="start one, or name another state_dir in the inventory",
        )
    exact = [run for run in runs if run.id == name] or [
        run for run in runs if name.isdigit() and number_of(run.id) == int(name)
    ]
    matches = exact or [run for run in runs if run.id.startswith(name) or run.id.rpartition("-")[2] == name]
    if len(matches) == 1:
        return matches[0]
    known = ", ".join(run.id for run in (matches or runs)[:8]) or "none"
    raise AgentError(
        "RunNotFound",
        "%s run is called %r" % ("more than one" if matches else "no", name),
        tried="looked in %s" % root,
        hint="runs there: %s" % known,
        runs=[run.id for run in runs[:50]],
    )


def read_json(path: str) -> Optional[Dict[str, Any]]:
    """The object in a JSON file, or None when it is missing or unreadable as JSON."""
    for _ in range(3):  # a second look, for a file that is being written over on a full disk
        try:
            with open(path, "rb") as stream:
                value = json.load(stream)
            break
        except OSError:
            return None
        except ValueError:
            time.sleep(0.01)
    else:
        return None
    return value if isinstance(value, dict) else None


def write_json(path: str, value: Dict[str, Any], *, sync: bool = True) -> None:
    """Write beside and rename: a reader sees the old object or the new one, never a part. Raises OSError."""
    temporary = "%s.tmp.%d" % (path, os.getpid())
    try:
        with open(temporary, "w", encoding="utf-8") as stream:
            json.dump(value, stream, indent=1, default=str)
            stream.write("\n")
            stream.flush()
            if sync:
                os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError:
        try:
            os.unlink(temporary)
        except OSError:
            pass
        raise


def overwrite_json(path: str, value: Dict[str, Any]) -> bool:
    """The last resort on a full disk: the file's own blocks are written over, which needs no new ones.

    Only for a file that exists, and only up to the block it has; one write, so a reader hardly ever meets a part. False
    when     it cannot be done.
    """
    data = json.dumps(value, default=str).encode("utf-8")
    try:
        fd = os.open(path, os.O_WRONLY)
    except OSError:
        return False
    try:
        info = os.fstat(fd)
        if len(data) > max(info.st_size, info.st_blocks * 512):
            return False
        os.pwrite(fd, data.ljust(info.st_size), 0)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
