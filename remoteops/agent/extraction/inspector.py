"""Reads samples back while the run that writes them goes on, in a process of its own with low priority.

A run writes for hours; what is wrong with all of its samples should be known after the first ones, and the check at the
end should have little left to read. The inspector follows the manifest and notes what it saw of every file; a file that
is still the same at the end (inode, size, time) is not read again. ``fab verify`` trusts none of this and reads all.

As a program: ``python -m remoteops.agent.extraction.inspector OUT NOTES START``; it ends when its stdin does, and
prints a JSON line for every sample that is wrong, and for the first one that is right ("problem": null). Lines of the
manifest before byte START are of earlier tries: what is wrong there may be on the list to be done again (rejected, cut
short by a crash), so only what is right is noted, and nothing is said.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from typing import Any, Dict, Iterator, List, Optional, Tuple

from remoteops.agent import manifest, venv
from remoteops.agent.extraction import samples
from remoteops.agent.protocol import AgentError

NOTES = "inspected.jsonl"
WORTH_IT = 4 << 30  # bytes; below this the check at the end takes about a second, less than another process's start
HOPELESS = 16  # samples; when all of the first ones are wrong the run is ended
_TOLD = 5  # wrong samples named one by one while the run goes on
_PAUSE = 0.25  # seconds between two looks at the manifest


class Inspector:
    """Starts the process and listens to it. A context manager; leaving it ends the process.

    ``notes``: where the process writes what it saw.
    """

    def __init__(self, out: str, reporter: Any) -> None:
        self.notes = os.path.join(reporter.run.path, NOTES)
        self._out = out
        self._reporter = reporter
        self._wrong: List[Dict[str, Any]] = []
        self._child: Optional[subprocess.Popen[bytes]] = None
        self._thread = threading.Thread(target=self._listen, name="remoteops-inspector", daemon=True)

    def __enter__(self) -> Inspector:
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
        clean.update(PYTHONPATH=venv.import_path(), CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
        try:
            start = os.path.getsize(os.path.join(self._out, manifest.NAME))
            self._child = subprocess.Popen(
                [sys.executable, "-m", "remoteops.agent.extraction.inspector", self._out, self.notes, str(start)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=clean,
                cwd="/",
            )
        except OSError as error:  # the check at the end then reads everything
            self._reporter.notice("samples are not read back while the run goes on: %s" % error)
            return self
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is None:
            return
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.close()
        try:
            self._child.wait(30)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._thread.join(5)
        self._child.stdout.close()

    def raise_if_hopeless(self) -> None:
        """Raises AgentError(VerifyFailed) when the run was ended because all of its first samples were wrong."""
        if len(self._wrong) < HOPELESS:
            return
        for one in self._wrong:
            manifest.reject(self._out, one["index"], one["file"], one["problem"])
        first = self._wrong[0]
        raise AgentError(
            "VerifyFailed",
            "the first %d samples are all wrong, so the run was ended: row %d: %s"
            % (len(self._wrong), first["index"], first["problem"]),
            tried="reading samples back while the run goes on",
            hint="check the model's weights, the dtype and the engine; fab extract --rehearse takes a minute",
            rows=[one["index"] for one in self._wrong[:20]],
        )

    def _listen(self) -> None:
        assert self._child is not None and self._child.stdout is not None
        right = False
        told = 0
        for line in self._child.stdout:
            try:
                seen = json.loads(line)
            except ValueError:
                continue
            if seen.get("problem") is None:
                right = True  # told once, of the first sample that is as it should be
                continue
            if told < _TOLD:
                told += 1
                self._reporter.notice("row %d is wrong: %s" % (seen["index"], seen["problem"]), row=seen["index"])
            if not right and len(self._wrong) < HOPELESS:
                self._wrong.append(seen)
                if len(self._wrong) == HOPELESS:
                    self._reporter.stop()


def read_notes(path: Optional[str]) -> Dict[int, Dict[str, Any]]:
    """What an inspector saw, by row; {} when there is nothing. A torn line is skipped."""
    notes: Dict[int, Dict[str, Any]] = {}
    try:
        with open(path or os.devnull, "rb") as stream:
            for line in stream:
                try:
                    note = json.loads(line)
                    notes[int(note["index"])] = note
                except (ValueError, KeyError, TypeError):
                    continue
    except OSError:
        pass
    return notes


def still_so(note: Optional[Dict[str, Any]], path: str) -> Optional[samples.Finding]:
    """The note's finding, when nothing was wrong and the file it was made of has not changed since. What was wrong is
    read once more: a moment without memory or a mount that was away must cost no good sample."""
    if note is None or note["problems"] or note.get("identity") != _identity(path):
        return None
    return samples.Finding([], bool(note["readable"]), int(note["bytes"]), bytes.fromhex(note["fingerprint"]))


def _identity(path: str) -> Optional[List[int]]:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def main(out: str, path: str, start: int) -> int:
    """Inspect what the manifest names until stdin ends."""
    from remoteops.agent.extraction import output

    os.nice(10)
    ended = threading.Event()
    threading.Thread(target=_wait_for_end, args=(ended,), daemon=True).start()
    found = manifest.read(out)
    if found is None:
        return 1
    rows = output.RowFile(out)
    right = False
    with open(path, "w", encoding="utf-8") as notes:
        for entry, behind in _entries(os.path.join(out, manifest.NAME), ended):
            earlier = behind <= start
            row = rows.get(entry["index"])
            if row is None or entry.get("rejected"):
                continue
            file = os.path.join(out, manifest.file_name(found.header["format"], row.index))
            identity = _identity(file)
            finding = samples.inspect(file, row, found.header)
            if identity is None or identity != _identity(file):
                continue  # written again meanwhile: its new line is still to come
            if earlier and finding.problems:
                continue
            note = {**finding._asdict(), "index": row.index, "identity": identity, "bytes": finding.size}
            json.dump({**note, "fingerprint": finding.fingerprint.hex()}, notes)
            notes.write("\n")
            notes.flush()
            problem = finding.problems[0][0] if finding.problems else None
            if not earlier and (problem is not None or not right):
                right = right or problem is None
                json.dump({"index": row.index, "file": entry["file"], "problem": problem}, sys.stdout)
                sys.stdout.write("\n")
                sys.stdout.flush()
    return 0


def _wait_for_end(ended: threading.Event) -> None:
    sys.stdin.buffer.read()
    ended.set()


def _entries(path: str, ended: threading.Event) -> Iterator[Tuple[Dict[str, Any], int]]:
    """The manifest's lines as they come and the places (bytes) behind them, until ``ended``; what is left then is for
    the check at the end."""
    rest = b""
    behind = 0
    with open(path, "rb") as stream:
        while not ended.is_set():
            piece = stream.read(1 << 20)
            if not piece:
                time.sleep(_PAUSE)
                continue
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                behind += len(line) + 1
                if ended.is_set():
                    return
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if isinstance(record, dict) and isinstance(record.get("index"), int):
                    yield record, behind


if __name__ == "__main__":
    try:
        status = main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    except OSError as problem:  # a full disk mostly; the check at the end reads what is not noted
        sys.stderr.write("samples are not read back any more: %s\n" % problem.strerror)
        status = 1
    os._exit(status)  # the thread that waits for stdin may still do so
