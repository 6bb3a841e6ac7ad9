"""The matrix: releases found where pip looks, pairs audited in processes, results kept."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

from remoteops import matrix
from remoteops.errors import MissingPackage, UsageError


def wheel(folder: Path, name: str, version: str, text: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", text)
        archive.writestr(
            f"{name}-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )


@pytest.fixture
def releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "links"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wheel(folder, "user", "1.0", "from engine import plan\nplan(groups=1, specs=2)\n")
    wheel(folder, "user", "2.0", "from engine import plan\nplan(groups=1)\n")
    wheel(folder, "engine", "0.9", "def plan(groups, specs): ...\n")
    wheel(folder, "engine", "0.10", "def plan(groups): ...\n")
    wheel(folder, "engine", "0.11", "def other(groups): ...\n")
    return folder


def cells(document: dict[str, Any]) -> dict[tuple[str, str], Any]:
    return {(row["consumer"], row["provider"]): row.get("breaks", row.get("error")) for row in document["rows"]}


def test_every_consumer_is_audited_against_every_release_and_the_second_run_reads_back(releases: Path) -> None:
    events: list[dict[str, Any]] = []
    first = matrix.matrix(["user==1.0,2.0"], ["engine>=0.9"], on_event=events.append)
    assert cells(first) == {
        ("user==1.0", "engine==0.9"): 0, ("user==1.0", "engine==0.10"): 1, ("user==1.0", "engine==0.11"): 1,
        ("user==2.0", "engine==0.9"): 1, ("user==2.0", "engine==0.10"): 0, ("user==2.0", "engine==0.11"): 1,
    }  # fmt: skip
    assert first["installable"] == {"user==1.0": ["engine==0.9"], "user==2.0": ["engine==0.10"]}
    assert sum(event["event"] == "pair" for event in events) == 6
    ranges = first["ranges"]
    assert ranges["user==1.0"]["works"] == [["engine==0.9", "engine==0.9"]]
    spans = {(b["kind"], b["detail"]): (b["since"], b["until"]) for b in ranges["user==2.0"]["breaks"]}
    assert spans["missing-required", "specs"] == ("engine==0.9", "engine==0.9")
    assert spans["missing-symbol", "plan"] == ("engine==0.11", None)
    fixable = {(row["consumer"], row["provider"]): row["fixable"] for row in first["rows"]}
    assert fixable["user==1.0", "engine==0.10"]  # the keyword can be dropped
    assert not fixable["user==2.0", "engine==0.11"]
    for path in releases.iterdir():
        if path.name.startswith("engine-0.9"):
            path.write_bytes(b"gone")  # what was fetched is not asked for again
    again = matrix.matrix(["user==1.0,2.0"], ["engine==0.9,0.10,0.11"])
    assert cells(again) == cells(first)
    assert all(row["cached"] for row in again["rows"])


def test_another_model_is_another_question(releases: Path) -> None:
    matrix.matrix(["user==1.0"], ["engine==0.9"])
    assert not matrix.matrix(["user==1.0"], ["engine==0.9"], model="Other")["rows"][0]["cached"]


def test_a_folder_is_audited_again_when_a_file_of_it_changed(releases: Path, tmp_path: Path) -> None:
    module = tmp_path / "mine" / "user" / "__init__.py"
    module.parent.mkdir(parents=True)
    module.write_text("from engine import plan\nplan(1)\n")
    spec = f"user={tmp_path / 'mine'}"
    assert matrix.matrix([spec], ["engine==0.10"])["rows"][0]["breaks"] == 0
    module.write_text("from engine import plan\nplan(1, 2, 3)\n")
    row = matrix.matrix([spec], ["engine==0.10"])["rows"][0]
    assert (row["breaks"], row["cached"]) == (1, False)


def test_a_release_that_cannot_be_had_is_a_row_with_its_error(releases: Path) -> None:
    document = matrix.matrix(["user==1.0"], ["engine==0.9", "engine==7.7"])
    assert cells(document)["user==1.0", "engine==0.9"] == 0
    assert "nothing matches engine==7.7" in cells(document)["user==1.0", "engine==7.7"]


def test_specs_that_name_nothing_are_refused(releases: Path) -> None:
    with pytest.raises(UsageError):
        matrix.matrix([], ["engine==0.9"])
    with pytest.raises(MissingPackage):
        matrix.matrix(["user==1.0"], ["engine>=99"])
