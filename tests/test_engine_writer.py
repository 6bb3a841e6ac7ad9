"""Memory that bounds what waits, and the threads that write it."""

from __future__ import annotations

import errno
import json
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remoteops.agent.extraction import connector
from remoteops.agent.extraction.arena import ALIGN, Ranges, memory_for, rounded
from remoteops.agent.extraction.hostkind import cores
from remoteops.agent.extraction.reporting import Interrupted, Reporter, last_errors
from remoteops.agent.extraction.stock import BATCH, batches
from remoteops.agent.extraction.writer import Sample, Writer
from remoteops.agent.protocol import AgentError
from remoteops.agent.rundir import RunDir


class Row(NamedTuple):
    index: int  # type: ignore[assignment]
    input_ids: list[int]


class Store:
    """Keeps what is written; ``faults`` are raised one after the other first."""

    def __init__(self, faults: list[BaseException] | None = None) -> None:
        self.faults = faults or []
        self.written: dict[int, Any] = {}

    def write(self, row: Row, states: Any) -> None:
        if self.faults:
            raise self.faults.pop(0)
        self.written[row.index] = states


def sample(index: int, size: int = 8, **extra: Any) -> Sample:
    return Sample(Row(index, [1, 2, 3]), f"states-{index}", size, **extra)


def test_every_sample_is_written_and_counted() -> None:
    store = Store()
    writer = Writer(store, threads=3)
    for index in range(50):
        writer.submit(sample(index))
    assert writer.drain(10)
    writer.close()
    assert store.written == {index: f"states-{index}" for index in range(50)}
    stats = writer.stats()
    assert (stats["samples"], stats["tokens"], stats["bytes"], stats["pending"], stats["errors"]) == (
        50,
        150,
        400,
        0,
        [],
    )


def test_a_sample_waits_for_its_copy_and_gives_its_memory_back_after_it_is_written() -> None:
    order: list[str] = []

    class Recorder(Store):
        def write(self, row: Row, states: Any) -> None:
            order.append("write")

    writer = Writer(Recorder(), threads=1)
    writer.submit(sample(0, ready=lambda: order.append("ready"), release=lambda: order.append("release")))
    assert writer.drain(10)
    writer.close()
    assert order == ["ready", "write", "release"]


def test_a_failed_write_names_its_row_gives_memory_back_and_the_others_go_on() -> None:
    released, told = [], []
    store = Store([PermissionError(errno.EACCES, "Permission denied")])
    writer = Writer(store, threads=1, failed=lambda index, text: told.append(index))
    writer.submit(sample(4, release=lambda: released.append(4)))
    writer.submit(sample(5, release=lambda: released.append(5)))
    assert writer.drain(10)
    writer.close()
    [(index, text)] = writer.stats()["errors"]
    assert index == 4 and "Permission denied" in text and told == [4]
    assert list(store.written) == [5] and released == [4, 5]


class Gate:
    """Opens when it is told to; says what it was asked."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.asked: list[bool] = []

    def wait(self, size: int, stop: Any, *, failed: bool = False) -> bool:
        self.asked.append(failed)
        while not self.open.is_set():
            if stop():
                return False
            time.sleep(0.001)
        return True


def test_a_full_disk_is_waited_for_and_the_sample_written_again() -> None:
    gate, store = Gate(), Store([OSError(errno.ENOSPC, "No space left"), OSError(errno.EDQUOT, "Quota exceeded")])
    writer = Writer(store, gate, threads=1)
    writer.submit(sample(1))
    assert writer.drain(10)
    writer.close()
    assert store.written == {1: "states-1"} and gate.asked.count(True) == 2
    assert writer.stats()["errors"] == []


def test_a_stop_drops_what_waits_for_room_and_says_how_much() -> None:
    gate, store = Gate(), Store()
    gate.open.clear()
    writer = Writer(store, gate, threads=2)
    for index in range(5):
        writer.submit(sample(index))
    assert not writer.drain(0.05)
    writer.stop()
    assert writer.drain(10)
    writer.close()
    assert store.written == {} and writer.stats()["dropped"] == 5


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5 * ALIGN)), max_size=60))
def test_ranges_never_overlap_and_all_come_back(steps: list[tuple[bool, int]]) -> None:
    ranges = Ranges(16 * ALIGN)
    held: list[tuple[int, int]] = []
    for take, size in steps:
        if take or not held:
            fits = ranges.fits([size])
            offset = ranges.take(size)
            assert (offset is not None) == fits
            if offset is not None:
                assert all(
                    offset + rounded(size) <= other or other + rounded(length) <= offset for other, length in held
                )
                held.append((offset, size))
        else:
            ranges.give(*held.pop(size % len(held)))
        assert ranges.free == ranges.size - sum(rounded(length) for _, length in held)
    for one in held:
        ranges.give(*one)
    assert ranges.free == ranges.size and ranges.take(ranges.size) == 0


def test_a_range_cannot_be_given_back_twice() -> None:
    ranges = Ranges(4 * ALIGN)
    offset = ranges.take(ALIGN)
    assert offset is not None
    ranges.give(offset, ALIGN)
    with pytest.raises(ValueError, match="free already"):
        ranges.give(offset, ALIGN)


def test_waiting_for_room_ends_when_a_range_comes_back() -> None:
    ranges = Ranges(2 * ALIGN)
    first = ranges.take(2 * ALIGN)
    assert first is not None and not ranges.wait([ALIGN], 0.01)
    threading.Timer(0.02, lambda: ranges.give(first, 2 * ALIGN)).start()
    assert ranges.wait([ALIGN, ALIGN], 10)


def test_a_sample_larger_than_everything_is_let_through_when_all_is_free() -> None:
    assert Ranges(ALIGN).wait([100 * ALIGN], 0.01)


def test_memory_is_what_a_small_run_needs_and_bounded_for_a_large_one() -> None:
    assert memory_for([100] * 10, 64) == 1 << 20
    assert memory_for([1000] * 10_000, 4096, most=1 << 30) == 1 << 30
    assert memory_for([100_000], 100_000, most=1 << 20) >= 2 * 100_000 * 100_000


def test_stock_batches_stay_within_what_the_library_computes_right() -> None:
    rows = [Row(index, [0] * length) for index, length in enumerate([10, 4000, 4000, 300, 9000, *[1] * 20])]
    made = batches(rows, 8192)
    assert [row.index for batch in made for row in batch] == list(range(len(rows)))
    assert all(len(batch) <= BATCH for batch in made)
    assert all(sum(len(row.input_ids) for row in batch) <= 8192 or len(batch) == 1 for batch in made)


@pytest.mark.parametrize(
    "ranks,available,expected", [(2, [0, 1], "0|1"), (2, [0, 1, 2, 3], "0,1|2,3"), (2, [5], "5|5")]
)
def test_cores_are_shared_out_among_the_ranks(ranks: int, available: list[int], expected: str) -> None:
    assert cores(ranks, available) == expected


# what the engine says


def test_progress_counts_on_from_what_was_there(tmp_path: Path) -> None:
    reporter = Reporter(RunDir(str(tmp_path)))
    reporter.count(10, 1000, 4, 400)
    reporter.progress(0, 0, 0, force=True)
    reporter.progress(2, 200, 64)  # within the same second: no event
    reporter.progress(6, 600, 512, force=True)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(one["samples"], one["tokens"], one["bytes"]) for one in events] == [(4, 400, 0), (10, 1000, 512)]
    assert events[-1]["samples_total"] == 10 and events[-1]["tokens_total"] == 1000 and events[-1]["tokens_per_s"] > 0


def test_a_stop_while_nothing_is_in_flight_ends_at_once_and_later_only_asks(tmp_path: Path) -> None:
    reporter = Reporter(RunDir(str(tmp_path)))
    reporter.stop()
    assert reporter.stopping
    reporter.interruptible = True
    with pytest.raises(Interrupted):
        reporter.stop()
    reporter.stop()


def test_the_cause_is_found_in_the_log_behind_the_wrapper(tmp_path: Path) -> None:
    log = tmp_path / "log"
    cause = b"torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB\n"
    log.write_bytes(
        b"(Worker pid=1) ERROR 11-30 [multiproc_executor.py:880] " + cause
        + b"(Worker pid=2) ERROR 11-30 [multiproc_executor.py:880] " + cause +
        b"progress 50%\r\nRuntimeError: Worker failed with error 'x'\n\xff\xfe"
    )
    errors = last_errors(str(log))
    assert errors[0].startswith("torch.OutOfMemoryError: CUDA out of memory") and len(errors) == 2
    assert errors[1].startswith("RuntimeError: Worker failed")
    assert last_errors(str(tmp_path / "none")) == []


def test_a_worker_that_vllm_only_calls_dead_is_named_and_the_engine_s_own_words_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class EngineDeadError(Exception):
        pass

    class Core:
        def step(self) -> list[Any]:
            raise EngineDeadError("EngineCore encountered an issue. See stack trace (above) for the root cause.")

        def add_request(self, *_: Any) -> None: ...

    vllm = ModuleType("vllm")
    vllm.SamplingParams = lambda **_: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(connector, "LOG_LAG", 0.0)
    monkeypatch.setattr(connector, "GIVE_UP", 0.0)
    (tmp_path / "manifest.jsonl").touch()
    (tmp_path / "log").write_text(
        "(EngineCore pid=11) ERROR 11-30 18:44:32 [multiproc_executor.py:315] Worker proc VllmWorker-0 died "
        "unexpectedly (exit code: None), shutting down executor.\n(EngineCore pid=11) RuntimeError: cancelled\n"
    )
    engine = connector.ConnectorEngine.__new__(connector.ConnectorEngine)
    engine._job, engine._run, engine._budget = {"out": str(tmp_path)}, str(tmp_path), 512
    engine._reporter, engine._engine = Reporter(RunDir(str(tmp_path))), Core()
    with pytest.raises(AgentError, match="engine died: Worker proc VllmWorker-0 died unexpectedly") as caught:
        engine.run([Row(0, [1, 2])], None)
    engine._reporter._stop.set()
    assert engine._counts._stream.closed
    assert caught.value.kind == "RunFailed"
    assert "EngineCore encountered" in caught.value.tried and "resumed" in caught.value.hint
