"""The child of a run with an engine that only pretends: what is told in which order, and what is waited for."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remoteops.agent.extraction import __main__ as child
from remoteops.agent.extraction import check
from remoteops.agent.extraction.reporting import Reporter
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
