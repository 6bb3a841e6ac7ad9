"""Pull: whole files, checked, never outside the folder that was named, whatever the host says."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import sshd
from test_data_manifest import HEADER, opened, rows, write_sample

from remoteops import pull
from remoteops.agent import manifest
from remoteops.errors import DiskTooSmall, OutputMismatch, TransferFailed, UsageError
from remoteops.inventory import Host


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An output folder of five samples on the host."""
    folder = tmp_path / "out"
    opened(folder)
    for row in rows(5):
        write_sample(folder, row)
    (folder / "data_config.json").write_text('{"version": "2.0"}')
    return folder


def local(tmp_path: Path) -> Host:
    return Host(name="here", connect="local", state_dir=str(tmp_path / "state"), cache_dir=str(tmp_path / "cache"))


def test_over_real_ssh_the_samples_arrive_whole_with_a_manifest_of_what_came(
    server: sshd.Sshd, out: Path, tmp_path: Path
) -> None:
    to = tmp_path / "to"
    found = pull.pull(server.host(), out=str(out), to=to, samples=3)
    assert [one["state"] for one in found["files"]] == ["fetched"] * 4
    assert found["samples"] == 3
    assert found["samples_total"] == 5
    for name in ("hs_0.safetensors", "hs_1.safetensors", "hs_2.safetensors", "data_config.json"):
        assert (to / name).read_bytes() == (out / name).read_bytes()
    lines = manifest.read(str(to))
    assert lines is not None
    assert sorted(lines.entries) == [0, 1, 2]
    assert lines.entries[1]["sha256"] == hashlib.sha256((out / "hs_1.safetensors").read_bytes()).hexdigest()


def test_a_second_pull_fetches_only_what_is_missing_or_spoilt(out: Path, tmp_path: Path) -> None:
    host, to = local(tmp_path), tmp_path / "to"
    pull.pull(host, out=str(out), to=to, samples=2)
    spoilt = bytearray((to / "hs_1.safetensors").read_bytes())
    spoilt[-1] ^= 1
    (to / "hs_1.safetensors").write_bytes(bytes(spoilt))
    again = pull.pull(host, out=str(out), to=to, rows=[0, 1, 4])
    assert {one["name"]: one["state"] for one in again["files"]} == {
        "hs_0.safetensors": "present",
        "hs_1.safetensors": "fetched",
        "hs_4.safetensors": "fetched",
        "data_config.json": "present",
    }
    assert (to / "hs_1.safetensors").read_bytes() == (out / "hs_1.safetensors").read_bytes()
    found = manifest.read(str(to))
    assert found is not None
    assert sorted(found.entries) == [0, 1, 4]


def test_a_sample_that_is_not_what_the_manifest_says_is_left_out_and_named(out: Path, tmp_path: Path) -> None:
    (out / "hs_1.safetensors").write_bytes(b"short")
    found = pull.pull(local(tmp_path), out=str(out), to=tmp_path / "to", samples=2)
    assert [one["index"] for one in found["files"] if one["index"] is not None] == [0, 2]
    assert found["left_out"][0]["index"] == 1
    assert "5 bytes" in found["left_out"][0]["reason"]


def test_samples_of_two_runs_do_not_mix_in_one_folder(out: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    manifest.open_output(str(to), {**HEADER, "layers": [1, 2, 3, 8]})
    with pytest.raises(OutputMismatch, match="the layer ids changed"):
        pull.pull(local(tmp_path), out=str(out), to=to)
    assert not list(to.glob("hs_*"))


def test_questions_that_make_no_sense(out: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="no folder"):
        pull.pull(local(tmp_path), out=str(out), to=tmp_path / "file")
    with pytest.raises(UsageError, match="at least 1"):
        pull.pull(local(tmp_path), out=str(out), to=tmp_path / "to", samples=0)
    with pytest.raises(UsageError, match="not among the samples"):
        pull.pull(local(tmp_path), out=str(out), to=tmp_path / "to", rows=[77])
    with pytest.raises(OutputMismatch, match="no manifest"):
        pull.pull(local(tmp_path), out=str(tmp_path / "empty"), to=tmp_path / "to")


def test_a_disk_too_small_here_is_said_before_anything_is_fetched(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")(10, 9, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DiskTooSmall, match="free at"):
        pull.pull(local(tmp_path), out=str(out), to=tmp_path / "to")


class Liar:
    """An agent that says what it likes; its link writes what it is told where it is told."""

    def __init__(self, files: list[Any], **changes: Any) -> None:
        self.listed = {
            "run": "r",
            "out": "/x",
            "header": {"schema": manifest.SCHEMA, **HEADER},
            "samples_total": 1,
            "manifest": [],
            "files": files,
            "left_out": [],
            **changes,
        }
        self.link = self
        self.wrote: list[Path] = []

    def call(self, verb: str, request: dict[str, Any], **options: Any) -> dict[str, Any]:
        return self.listed

    def download(self, remote: str, local: Path, **options: Any) -> str:
        self.wrote.append(local)
        local.write_bytes(b"x")
        return ""


GOOD = {"name": "hs_0.safetensors", "bytes": 1, "sha256": "0" * 64, "tokens": 3}


@pytest.mark.parametrize(
    "name",
    [
        "../hs_0.safetensors",
        "/etc/hs_0.safetensors",
        "~/hs_0.safetensors",
        "a/hs_0.safetensors",
        "hs_0.safetensors/..",
        "hs_0.safetensors\n",
        "hs_0.safetensors\0",
        "hs_٣.safetensors",
        "hs_-1.safetensors",
        ".bashrc",
        "manifest.jsonl",
        "data_1.pt.exe",
        "HS_0.SAFETENSORS",
        "",
        None,
        7,
        ["hs_0.safetensors"],
    ],
)
def test_names_that_are_no_samples_are_refused_and_nothing_is_written(tmp_path: Path, name: Any) -> None:
    liar = Liar([{**GOOD, "name": name}])
    with pytest.raises(TransferFailed, match="no sample") as caught:
        pull.pull(local(tmp_path), to=tmp_path / "to", agent=liar)  # type: ignore[arg-type]
    assert "do not trust" in caught.value.hint
    assert liar.wrote == []


@pytest.mark.parametrize("change", [{"bytes": -1}, {"bytes": "1"}, {"sha256": "x"}, {"sha256": None}, {"bytes": None}])
def test_sizes_and_hashes_that_are_none_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(TransferFailed):
        pull.pull(local(tmp_path), to=tmp_path / "to", agent=Liar([{**GOOD, **change}]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change", [{"files": "x"}, {"files": [None]}, {"header": None}, {"header": {"schema": "other"}}, {"out": 7}]
)
def test_answers_of_the_wrong_shape_end_in_a_typed_error_or_nothing(tmp_path: Path, change: dict[str, Any]) -> None:
    liar = Liar(**{"files": [], **change})
    try:
        found = pull.pull(local(tmp_path), to=tmp_path / "to", agent=liar)  # type: ignore[arg-type]
        assert found["files"] == []
    except TransferFailed:
        pass
    assert liar.wrote == []


def test_a_link_that_lies_in_the_folder_is_not_followed(tmp_path: Path) -> None:
    to = tmp_path / "to"
    to.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (to / "hs_0.safetensors").symlink_to(victim)
    with pytest.raises(TransferFailed):
        pull.pull(local(tmp_path), to=to, agent=Liar([GOOD]))  # type: ignore[arg-type]
    assert victim.read_text() == "precious"


def test_lines_for_rows_that_were_not_pulled_do_not_enter_the_manifest(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"x").hexdigest()
    liar = Liar(
        [{**GOOD, "sha256": digest}],
        manifest=[{"index": 0, "file": "../../x"}, {"index": 5, "file": "hs_5.safetensors"}, "junk"],
    )
    pull.pull(local(tmp_path), to=tmp_path / "to", agent=liar)  # type: ignore[arg-type]
    text = (tmp_path / "to" / "manifest.jsonl").read_text().splitlines()
    assert [json.loads(line).get("file") for line in text[1:]] == ["hs_0.safetensors"]
