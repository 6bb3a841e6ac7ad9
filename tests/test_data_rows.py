"""Datasets of every usual kind become rows; what cannot be used is named; nothing is dropped in silence."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from remoteops.agent import disk, estimate
from remoteops.agent.extraction import dataset, records
from remoteops.agent.protocol import AgentError
from tests.data_fixtures import ids_dataset, in_venv


def job(path: Path, **changes: Any) -> dict[str, Any]:
    return {"dataset": str(path), "model": "/none", "samples": None, "seed": 0, "max_length": 64, **changes}


def lines(path: Path, *values: Any) -> Path:
    path.write_text("".join((value if isinstance(value, str) else json.dumps(value)) + "\n" for value in values))
    return path


def test_the_index_is_the_row_of_the_dataset_whatever_is_dropped_or_selected(tmp_path: Path) -> None:
    values: list[Any] = [{"input_ids": [i, i + 1]} for i in range(10)]
    values[3] = {"input_ids": []}
    values[7] = "{not json"
    found = dataset.load(job(lines(tmp_path / "d.jsonl", *values), max_dropped=0.5))
    assert [row.index for row in found.rows] == [0, 1, 2, 4, 5, 6, 8, 9]
    assert all(row.input_ids == [row.index, row.index + 1] for row in found.rows)
    assert found.report["dropped_count"] == 2
    named = {one["index"]: one["reason"] for one in found.report["dropped"]}
    assert named[3] == "no tokens"
    assert "unreadable" in named[7]


def test_more_than_the_allowed_share_dropped_is_an_error_that_says_why(tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", *[{"input_ids": [1, 2]}] * 15, *[{"prompt_ids": [1]}] * 5)
    with pytest.raises(AgentError, match="5 of 20 rows had to be dropped") as caught:
        dataset.load(job(path))
    assert caught.value.kind == "DatasetError"
    assert "5 x no messages" in caught.value.hint
    assert dataset.load(job(path, max_dropped=0.25)).report["dropped_count"] == 5


def test_truncation_is_counted_and_a_row_left_without_trained_tokens_is_dropped_by_name(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "d.jsonl",
        {"input_ids": list(range(100)), "loss_mask": [1] * 100},
        {"input_ids": list(range(100)), "loss_mask": [0] * 90 + [1] * 10},
        {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]},
        {"input_ids": [5, 6], "loss_mask": [1]},
    )
    found = dataset.load(job(path, max_dropped=0.9))
    assert [row.index for row in found.rows] == [0]
    assert len(found.rows[0].input_ids) == len(found.rows[0].loss_mask) == 64
    assert found.report["truncated"] == 2
    assert {one["index"]: one["reason"] for one in found.report["dropped"]} == {
        1: "no assistant token left after truncation",
        2: "no assistant token",
        3: "loss_mask has 1 entries for 2 tokens",
    }


def test_token_ids_outside_the_vocabulary_are_dropped_before_they_crash_a_gpu(tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", {"input_ids": [1, 2]}, {"input_ids": [1, 320]}, {"input_ids": [-1]})
    found = dataset.load(job(path, max_dropped=0.9), vocab_size=320)
    assert [row.index for row in found.rows] == [0]
    assert "token id 320 is outside the vocabulary of 320" in found.report["reasons"]


def test_samples_are_chosen_by_the_seed_and_a_larger_number_keeps_the_smaller_choice(tmp_path: Path) -> None:
    path = ids_dataset(tmp_path / "d.jsonl", [10] * 50)
    few = {row.index for row in dataset.load(job(path, samples=5)).rows}
    more = {row.index for row in dataset.load(job(path, samples=12)).rows}
    other = {row.index for row in dataset.load(job(path, samples=5, seed=1)).rows}
    assert len(few) == 5
    assert few < more
    assert few != other
    assert [row.index for row in dataset.load(job(path, samples=500)).rows] == list(range(50))


def test_unusable_rows_are_replaced_until_the_number_asked_for_is_there(tmp_path: Path) -> None:
    values: list[Any] = [{"input_ids": [i, i]} if i % 3 else {"input_ids": []} for i in range(60)]
    found = dataset.load(job(lines(tmp_path / "d.jsonl", *values), samples=10, max_dropped=0.9))
    assert len(found.rows) == 10
    assert found.report["dropped_count"] > 0


def test_a_dataset_of_the_wrong_kind_ends_early(tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", *[{"something": i} for i in range(3000)])
    with pytest.raises(AgentError, match="had to be dropped") as caught:
        dataset.load(job(path, samples=10))
    assert sum(caught.value.data["reasons"].values()) < 200


@pytest.mark.parametrize(
    ("name", "content", "count"),
    [
        ("d.jsonl", '{"input_ids": [1]}\n\n  \n{"input_ids": [2]}\n', 2),
        ("d.json", '[{"input_ids": [1]}, {"input_ids": [2]}]', 2),
        ("d.json", '{"input_ids": [1]}\n{"input_ids": [2]}', 2),
        ("d.txt", "one line\n\nanother\n", 2),
    ],
)
def test_kinds_of_files(tmp_path: Path, name: str, content: str, count: int) -> None:
    path = tmp_path / name
    path.write_text(content)
    found = records.open_records(str(path))
    assert found.count == count
    assert [index for index, _ in found.pick(range(count))] == list(range(count))


def test_a_folder_of_files_is_one_dataset_in_the_order_of_names(tmp_path: Path) -> None:
    lines(tmp_path / "b.jsonl", {"input_ids": [3]})
    lines(tmp_path / "a.jsonl", {"input_ids": [1]}, {"input_ids": [2]})
    found = records.open_records(str(tmp_path))
    assert [record["input_ids"] for _, record in found.pick([0, 2]) if isinstance(record, dict)] == [[1], [3]]


def test_what_is_missing_empty_or_unknown_says_so(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "x.csv").write_text("a,b")
    (tmp_path / "folder").mkdir()
    for name, told in (
        ("no.jsonl", "no dataset"),
        ("empty.jsonl", "no records"),
        ("x.csv", "no known kind"),
        ("folder", "no data files"),
    ):
        with pytest.raises(AgentError, match=told) as caught:
            records.open_records(str(tmp_path / name))
        assert caught.value.kind == "DatasetError"


def test_the_hash_is_of_the_content_and_not_of_the_place(tmp_path: Path) -> None:
    one = lines(tmp_path / "a.jsonl", {"input_ids": [1]})
    (tmp_path / "other").mkdir()
    two = lines(tmp_path / "other" / "b.jsonl", {"input_ids": [1]})
    assert records.open_records(str(one)).sha256() == records.open_records(str(two)).sha256()
    lines(two, {"input_ids": [2]})
    assert records.open_records(str(one)).sha256() != records.open_records(str(two)).sha256()


def test_the_estimate_is_near_the_truth_for_ids_and_text(tmp_path: Path) -> None:
    path = ids_dataset(tmp_path / "d.jsonl", [40] * 20 + [200] * 20)
    found = estimate.dataset(str(path), 64)
    assert found["rows"] == 40
    assert found["exact_rows"]
    assert 40 <= found["tokens_a_row"] <= 64
    assert found["columns"] == ["input_ids", "loss_mask"]
    assert estimate.sample_bytes(2047, 4, 7168, "bfloat16") == pytest.approx(117.4e6, rel=0.01)


def test_free_space_is_that_of_the_nearest_existing_folder(tmp_path: Path) -> None:
    found = disk.space(str(tmp_path / "not" / "there"))
    assert found["path"] == str(tmp_path)
    assert 0 < found["free"] <= os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize


def test_a_quota_that_is_nearly_used_up_counts_as_the_free_space() -> None:
    text = "Disk quotas for user me (uid 1000): \n Filesystem  blocks quota limit grace files quota limit grace\n"
    text += "/dev/sda1 900* 800 1000 0 5 0 0 0\n"
    assert disk.parse_quota(text, "/") == 100 * 1024
    assert disk.parse_quota("Disk quotas for user me (uid 1000): none\n", "/") is None


def test_a_full_disk_pauses_and_goes_on_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from remoteops.agent.rundir import RunDir

    free = iter([100, 100, 10**9])
    monkeypatch.setattr(disk, "space", lambda path: {"free": next(free)})
    gate = disk.Gate(str(tmp_path), reserve=1000, run_dir=str(tmp_path), poll=0.01)
    assert gate.wait(50) is True
    events = list(RunDir(str(tmp_path)).read_events())
    assert [event["event"] for event in events] == ["paused", "resumed"]
    assert events[0]["reason"] == "disk"
    assert events[0]["need"] == 1050


def test_a_paused_run_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "space", lambda path: {"free": 0})
    asked: list[int] = []
    assert (
        disk.Gate(str(tmp_path), reserve=1, poll=0.01).wait(1, stop=lambda: len(asked.append(1) or asked) > 2) is False
    )


def test_a_write_that_failed_is_waited_for_though_the_disk_looks_free(tmp_path: Path) -> None:
    from remoteops.agent.rundir import RunDir

    gate = disk.Gate(str(tmp_path), reserve=0, run_dir=str(tmp_path), poll=0.01)
    assert gate.wait(10, failed=True)
    assert [event["event"] for event in RunDir(str(tmp_path)).read_events()] == ["paused", "resumed"]


TABLES = """
import sys, json, pyarrow as pa, pyarrow.parquet as pq, datasets, pathlib
folder = pathlib.Path(sys.argv[1])
rows = [{"input_ids": [i, i + 1, i + 2], "loss_mask": [0, 1, 1]} for i in range(2500)]
pq.write_table(pa.Table.from_pylist(rows), folder / "d.parquet", row_group_size=700)
saved = datasets.Dataset.from_list(rows)
datasets.disable_progress_bars()
saved.save_to_disk(str(folder / "saved"), num_shards=3)
datasets.DatasetDict({"train": saved, "test": saved.select(range(3))}).save_to_disk(str(folder / "dict"))
saved.filter(lambda row: row["input_ids"][0] % 2 == 0).save_to_disk(str(folder / "filtered"))
from remoteops.agent.extraction import dataset, records
for name in ("d.parquet", "saved", "dict"):
    found = dataset.load({"dataset": str(folder / name), "model": "", "samples": None, "max_length": 10})
    assert [r.index for r in found.rows] == list(range(2500)), name
    for r in found.rows:
        assert r.input_ids == [r.index, r.index + 1, r.index + 2] and r.loss_mask == [0, 1, 1], name
few = dataset.load({"dataset": str(folder / "saved"), "model": "", "samples": 7, "seed": 3, "max_length": 10})
assert len(few.rows) == 7 and all(r.input_ids[0] == r.index for r in few.rows)
half = dataset.load({"dataset": str(folder / "filtered"), "model": "", "samples": None, "max_length": 10})
assert len(half.rows) == 1250 and half.rows[3].input_ids[0] == 6 and half.rows[3].index == 3
from remoteops.agent import estimate
answer = estimate.dataset(str(folder / "saved"), 64, sys.executable, __import__("os").environ["PYTHONPATH"])
assert answer["rows"] == 2500 and answer["tokens_a_row"] == 3, answer
"""


@pytest.mark.lab
def test_parquet_and_saved_hugging_face_datasets_give_the_rows_that_were_put_in(tmp_path: Path) -> None:
    in_venv(TABLES, str(tmp_path))


def test_a_line_of_nothing_but_brackets_costs_its_own_row_only(tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", {"input_ids": [1]}, "[" * 100_000, {"input_ids": [2]})
    found = dataset.load(job(path, max_dropped=0.9))
    assert [row.index for row in found.rows] == [0, 2]
    assert "unreadable" in found.report["dropped"][0]["reason"]
    assert estimate.dataset(str(path), 64)["rows"] == 3


def test_an_array_with_a_byte_order_mark_is_an_array(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text('[{"input_ids": [1, 2]}, {"input_ids": [3]}]', encoding="utf-8-sig")
    assert [row.input_ids for row in dataset.load(job(path)).rows] == [[1, 2], [3]]
    assert estimate.dataset(str(path), 64)["rows"] == 2


def test_when_every_row_is_unusable_nobody_is_told_to_allow_more_dropped_rows(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match="3 of 3 rows") as caught:
        dataset.load(job(lines(tmp_path / "d.jsonl", *[{"foo": 1, "bar": "x"}] * 3)))
    assert "it has bar, foo" in caught.value.hint and "max_dropped" not in caught.value.hint


def test_a_dataset_that_stops_being_readable_names_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lines(tmp_path / "d.jsonl", *[{"input_ids": [i + 1]} for i in range(5)])
    parse = records._parse

    def broken(line: bytes) -> Any:
        if b"[4]" in line:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return parse(line)

    monkeypatch.setattr(records, "_parse", broken)
    with pytest.raises(AgentError, match=r"read on from record 3: .*Input/output error") as caught:
        dataset.load(job(path))
    assert caught.value.kind == "DatasetError"


def test_a_dataset_that_cannot_be_opened_is_a_dataset_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lines(tmp_path / "d.jsonl", {"input_ids": [1]})

    def refused(*_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("builtins.open", refused)
    for look in (lambda: dataset.load(job(path)), lambda: estimate.dataset(str(path), 64)):
        with pytest.raises(AgentError, match="cannot be read: Permission denied") as caught:
            look()
        assert caught.value.kind == "DatasetError" and caught.value.tried == str(path)
