"""A disk that is full for a while costs neither a line nor the run."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path

import pytest

from remoteops.agent import lines, manifest
from remoteops.agent.extraction import reporting
from remoteops.agent.extraction.reporting import Reporter
from remoteops.agent.rundir import RunDir


class Disk:
    """os.write as a disk with ``room`` bytes left would do it (regular files only)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        self._write = os.write
        monkeypatch.setattr(lines.os, "write", self.write)

    def write(self, fd: int, data: bytes) -> int:
        if self.room is None:
            return self._write(fd, data)
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        took = self._write(fd, data[: self.room])
        self.room -= took
        return took


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_a_line_that_only_partly_fitted_is_an_error_of_a_full_disk_and_spoils_no_other(
    tmp_path: Path, disk: Disk
) -> None:
    out = tmp_path / "out"
    manifest.open_output(str(out), dict.fromkeys(manifest.IDENTITY, "x"))
    manifest.append(str(out), {"index": 0, "file": "hs_0.safetensors"})
    disk.room = 9
    with pytest.raises(OSError, match="No space left") as caught:
        manifest.append(str(out), {"index": 1, "file": "hs_1.safetensors"})
    assert caught.value.errno == errno.ENOSPC  # what writers wait for; any other error fails the row
    disk.room = None
    manifest.append(str(out), {"index": 1, "file": "hs_1.safetensors"})
    manifest.append(str(out), {"index": 2, "file": "hs_2.safetensors"})
    found = manifest.read(str(out))
    assert found is not None
    assert sorted(found.entries) == [0, 1, 2]


def test_what_a_full_disk_did_not_take_is_said_when_there_is_room_and_in_order(tmp_path: Path, disk: Disk) -> None:
    reporter = Reporter(RunDir(str(tmp_path)))
    reporter.phase("extract")
    disk.room = 20
    for count in range(3 * reporting.UNSAID):
        reporter.progress(count, count, count, force=True)
    reporter.notice("still there")
    disk.room = None
    reporter.progress(1000, 1000, 1000, force=True)
    events = list(RunDir(str(tmp_path)).read_events())
    assert events[0]["event"] == "phase"
    assert [one["text"] for one in events if one["event"] == "notice"] == ["still there"]
    assert [one["samples"] for one in events if one["event"] == "progress"][-1] == 1000
    assert [one["t"] for one in events] == sorted(one["t"] for one in events)
    assert len(events) <= reporting.UNSAID + 4


def test_the_outcome_waits_for_room(tmp_path: Path, disk: Disk) -> None:
    disk.room = 0
    reporter = Reporter(RunDir(str(tmp_path)))
    speaking = threading.Thread(target=lambda: reporter.outcome("done", rows=3))
    speaking.start()
    time.sleep(0.05)
    disk.room = None
    speaking.join(10)
    [line] = (tmp_path / "events.jsonl").read_text().splitlines()
    assert (json.loads(line)["event"], json.loads(line)["state"]) == ("outcome", "done")


def test_several_threads_may_speak_and_each_thing_is_said_once(tmp_path: Path) -> None:
    reporter = Reporter(RunDir(str(tmp_path)))
    speakers = [
        threading.Thread(target=lambda n=n: [reporter.notice(f"{n} {i}") for i in range(100)])  # type: ignore[misc]
        for n in range(4)
    ]
    for speaker in speakers:
        speaker.start()
    for speaker in speakers:
        speaker.join()
    said = [one["text"] for one in RunDir(str(tmp_path)).read_events()]
    assert len(said) == len(set(said)) == 400
