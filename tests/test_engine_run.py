"""The child of a run with an engine that only pretends: what is told in which order, and what is waited for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remoteops.agent.extraction import __main__ as child
from remoteops.agent.extraction import check, inspector
from remoteops.agent.extraction.reporting import Interrupted, Reporter
from remoteops.agent.protocol import AgentError
from remoteops.agent.rundir import RunDir


class Engine:
    """Writes nothing; its end takes until ``may_end``."""

    name = "pretended"

    def __init__(self, story: list[str], problem: Exception | None = None) -> None:
        self.story, self.problem, self.may_end = story, problem, threading.Event()

    def run(self, rows: Any, store: Any, gate: Any) -> dict[str, int]:
        self.story.append("run")
        if self.problem is not None:
            raise self.problem
        return {"samples": len(rows), "tokens": 3, "bytes": 0}

    def close(self) -> None:
        if self.problem is None:
            assert self.may_end.wait(30)
        self.story.append("closed")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    rows = [SimpleNamespace(index=0, input_ids=[1, 2, 3])]
    loaded = SimpleNamespace(rows=rows, report={"dropped": []})
    found = SimpleNamespace(todo=lambda rows: (list(rows), {}))
    shape = SimpleNamespace(hidden_size=8)
    place = SimpleNamespace(story=[], run=tmp_path, reporter=Reporter(RunDir(str(tmp_path))), engine=None)
    monkeypatch.setattr(child, "_prepare", lambda job: (loaded, shape, found))
    monkeypatch.setattr(child, "_engine", lambda *_: place.engine)
    monkeypatch.setattr(child, "_store", lambda *_: None)
    monkeypatch.setattr(child, "_settle", lambda *_: place.story.append("settled") or {})

    def checked(out: str, *_: Any, **__: Any) -> dict[str, Any]:
        place.story.append("checked")
        place.engine.may_end.set()
        return {"ok": True}

    monkeypatch.setattr(check, "check", checked)
    return place


def events(place: SimpleNamespace) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place.run / "events.jsonl").read_text().splitlines()]


JOB = {"layers": [2], "dtype": "float32", "format": "safetensors"}


def test_what_was_written_is_checked_while_the_engine_ends_and_nothing_is_called_done_before_it_has(
    place: SimpleNamespace,
) -> None:
    place.engine = Engine(place.story)
    assert child.extract({**JOB, "out": str(place.run)}, place.reporter) == 0
    assert place.story == ["run", "settled", "checked", "closed"]
    told = [(one["event"], one.get("phase") or one.get("state")) for one in events(place)]
    assert [one for one in told if one[0] in ("phase", "outcome")][-2:] in (
        [("phase", "close"), ("outcome", "done")],
        [("phase", "verify"), ("outcome", "done")],  # the engine ended first
    )


def test_an_engine_that_fails_is_taken_down_before_the_failure_is_told(place: SimpleNamespace) -> None:
    place.engine = Engine(place.story, AgentError("RunFailed", "a worker died"))
    with pytest.raises(AgentError, match="a worker died"):
        child.extract({**JOB, "out": str(place.run)}, place.reporter)
    assert place.story == ["run", "closed"]


def test_a_stopped_run_settles_what_it_has_after_the_engine_ended(place: SimpleNamespace) -> None:
    place.engine = Engine(place.story)
    place.engine.may_end.set()
    place.engine.run = lambda rows, store, gate: place.reporter.stop() or {"samples": 0, "tokens": 0, "bytes": 0}
    assert child.extract({**JOB, "out": str(place.run)}, place.reporter) == 0
    assert place.story == ["closed", "settled"]
    assert events(place)[-1]["state"] == "stopped"


def test_a_check_that_fails_is_told_after_the_engine_ended(
    place: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        place.engine.may_end.set()
        raise AgentError("OutputMismatch", "rows.jsonl is gone")

    place.engine = Engine(place.story)
    monkeypatch.setattr(check, "check", fails)
    with pytest.raises(AgentError, match=r"rows\.jsonl"):
        child.extract({**JOB, "out": str(place.run)}, place.reporter)
    assert place.story == ["run", "settled", "closed"]


def test_a_run_that_is_ended_by_its_inspector_while_it_loads_is_not_interrupted_there(place: SimpleNamespace) -> None:
    place.reporter.interruptible = True
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            place.reporter.stop()
        except Interrupted as error:
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert place.reporter.stopping and not raised and place.reporter.interruptible


def test_only_what_was_right_is_taken_from_an_inspectors_notes(tmp_path: Path) -> None:
    path = tmp_path / "hs_0.safetensors"
    path.write_bytes(b"x" * 10)
    note = {"index": 0, "identity": inspector._identity(str(path)), "readable": True, "bytes": 10, "fingerprint": "ab"}
    found = inspector.still_so({**note, "problems": []}, str(path))
    assert found is not None and (found.problems, found.size) == ([], 10)
    assert inspector.still_so({**note, "problems": [["unreadable: out of memory", {}]]}, str(path)) is None


def test_an_inspector_without_room_for_its_notes_says_so_in_a_line(tmp_path: Path) -> None:
    lines = [{"schema": "remoteops.manifest/1", "format": "safetensors", "layers": [2]}, {"index": 0, "file": "x"}]
    (tmp_path / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "rows.jsonl").write_text('{"index":0,"input_ids":[1],"loss_mask":[0,1]}\n')
    (tmp_path / "hs_0.safetensors").write_bytes(b"")
    argv = [sys.executable, "-m", "remoteops.agent.extraction.inspector", str(tmp_path), "/dev/full", "0"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=os.getcwd()) as process:
        assert process.stderr is not None
        said = process.stderr.read()  # its stdin is still open
        assert process.wait(30) == 1
    assert said == b"samples are not read back any more: No space left on device\n"
