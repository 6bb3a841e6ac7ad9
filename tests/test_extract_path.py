"""The use case from the operator's side: real agent, real run directories, real processes; only the GPU libraries are
stubs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remoteops import errors, extract, probe, runs
from remoteops.extract import Options
from remoteops.inventory import Host
from remoteops.remote import open_agent
from tests.data_fixtures import ids_dataset, local_host, stub_venv

CLEAN: dict[str, Any] = {"findings": [], "sites": {}}
BREAK = {
    "confidence": "proved",
    "file": "data_generation/g.py",
    "line": 139,
    "kind": "unknown-kwarg",
    "symbol": "vllm.f",
    "detail": "x",
}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A host in order; its audit is told here, because stub packages have nothing to audit."""
    monkeypatch.setattr(probe, "probe", lambda *args, **kwargs: CLEAN)
    found = local_host(tmp_path)
    yield found
    for run in runs.list(found)["runs"]:
        if run["state"] not in ("done", "failed", "stopped", "lost"):
            runs.stop(found, run["run"], grace=0)


def changed(host: Host, **settings: Any) -> Host:
    return host.model_copy(update=settings)


def working(host: Host, **settings: Any) -> Host:
    return host.model_copy(update={"workload": host.workload.model_copy(update=settings)})


def broken_venv(host: Host, **settings: Any) -> Host:
    return changed(host, venv=str(stub_venv(Path(host.state_dir).parent / "other-venv", **settings)))


def test_a_missing_venv(host: Host) -> None:
    with pytest.raises(errors.MissingVenv, match="does not exist") as caught:
        extract.extract(changed(host, venv="/nowhere/venv"))
    assert caught.value.host == "here"
    assert caught.value.exit_code == 1
    assert "inventory.yaml" in caught.value.hint


def test_a_missing_package(host: Host) -> None:
    with pytest.raises(errors.MissingPackage, match="vllm") as caught:
        extract.extract(broken_venv(host, vllm=None))
    assert "install vllm" in caught.value.hint


def test_a_wrong_model_path(host: Host) -> None:
    with pytest.raises(errors.MissingModel, match="no model folder /nowhere/model"):
        extract.extract(working(host, model="/nowhere/model"))


def test_a_disk_too_small_says_how_much_is_needed(host: Host, tmp_path: Path) -> None:
    many = ids_dataset(tmp_path / "many.jsonl", [8] * 3)
    huge = tmp_path / "model" / "config.json"
    config = json.loads(huge.read_text())
    huge.write_text(json.dumps({**config, "hidden_size": 1 << 40}))
    with pytest.raises(errors.DiskTooSmall, match="GiB free") as caught:
        extract.extract(working(host, dataset=str(many)))
    assert "fewer --samples" in caught.value.hint


def test_nothing_named_is_a_usage_error(host: Host) -> None:
    with pytest.raises(errors.UsageError, match="no model is named") as caught:
        extract.extract(working(host, model=""))
    assert caught.value.exit_code == 2
    with pytest.raises(errors.UsageError, match="samples"):
        extract.extract(host, Options(samples=0))
    assert runs.list(host)["runs"] == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (Options(samples=-3), "samples must be at least 1, not -3"),
        (Options(max_length=0), "max-length must be at least 1"),
        (Options(layers="a,b"), "layer ids are whole numbers"),
        (Options(layers=""), "layer ids are whole numbers"),
        (Options(dataset="local:/nowhere/rows.jsonl"), "no local file /nowhere/rows.jsonl"),
        (Options(format="parquet"), "there is no format 'parquet'"),
        (Options(dtype="int7"), "there is no dtype 'int7'"),
        (Options(engine="magic"), "no engine 'magic'"),
        (Options(reference=-1), "reference must be at least 0"),
        (Options(max_dropped=20.0), "max-dropped must be from 0 to 1"),
    ],
)
def test_what_the_command_line_alone_shows_to_be_wrong_is_refused_before_anything_is_reached(
    host: Host, monkeypatch: pytest.MonkeyPatch, wrong: Options, words: str
) -> None:
    def reached(*_: Any, **__: Any) -> None:
        pytest.fail("the host was reached")

    monkeypatch.setattr(extract, "using", reached)
    with pytest.raises(errors.UsageError, match=words) as caught:
        extract.extract(host, wrong)
    assert caught.value.exit_code == 2


def test_breaks_stop_the_generator_and_name_the_command_that_mends_them(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "probe", lambda *args, **kwargs: {"findings": [BREAK], "sites": {}})
    spoilt = broken_venv(host, connector=False)
    with pytest.raises(errors.AuditBroken, match="1 breaks") as caught:
        extract.extract(spoilt)
    assert "fab patch" in caught.value.hint
    assert caught.value.data["findings"] == [BREAK]
    assert runs.list(spoilt)["runs"] == []


def test_breaks_of_a_generator_that_is_not_used_stop_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "probe", lambda *args, **kwargs: {"findings": [BREAK], "sites": {}})
    assert extract.extract(host, detach=True)["engine"] == "connector"


def test_a_second_run_is_refused_while_one_is_going(host: Host) -> None:
    launched = runs.launch(host, {"argv": ["sleep", "60"]})
    with pytest.raises(errors.RunActive, match=launched["run"]) as caught:
        extract.extract(host)
    assert "tail-logs" in caught.value.hint and "--allow-second" in caught.value.hint
    second = extract.extract(host, Options(samples=1, allow_second=True), detach=True)
    assert second["run"] != launched["run"] and second["skipped"] == []
    runs.stop(host, launched["run"], grace=1)


def test_force_names_what_it_skips_and_never_skips_what_a_job_cannot_do_without(host: Host) -> None:
    document = extract.extract(working(host, max_length=512), Options(force=True), detach=True)
    assert document["skipped"] == ["length"]
    with pytest.raises(errors.MissingModel):
        extract.extract(working(host, model="/nowhere"), Options(force=True, allow_second=True))


def test_what_is_run_is_shown_before_and_stored_with_the_run(host: Host) -> None:
    events: list[dict[str, Any]] = []
    document = extract.extract(host, Options(samples=2, seed=7), detach=True, on_event=events.append)
    assert [event["step"] for event in events if event["event"] == "step"] == ["upload", "preflight", "start"]
    told = next(event for event in events if event["event"] == "engine")
    assert told["layers"] == [2, 4, 5, 8]
    assert told["convention"] == "completed-layers"
    request = json.loads((Path(document["path"]) / "request.json").read_text())
    assert request["extraction"]["samples"] == 2
    assert request["extraction"]["seed"] == 7
    assert request["extraction"]["layers"] == [2, 4, 5, 8]


def test_secrets_in_the_environment_are_not_written_into_the_run(host: Host) -> None:
    secret = changed(host, env={"HF_TOKEN": "sesame-4711"})
    document = extract.extract(secret, detach=True)
    time.sleep(0.5)
    for file in Path(document["path"]).rglob("*"):
        if file.is_file():
            assert b"sesame-4711" not in file.read_bytes(), file


def test_a_run_that_fails_raises_its_own_words_and_says_how_to_go_on(host: Host) -> None:
    """The stub packages cannot compute: the child gets as far as starting the engine."""
    with pytest.raises(errors.RemoteOpsError) as caught:
        extract.extract(host)
    assert caught.value.exit_code == 1
    assert "run 0001" in caught.value.tried
    document = caught.value.data["document"]
    assert document["state"] == "failed"
    assert document["seconds"]["total"] > 0
    assert document["seconds"]["run.load"] >= 0


def test_a_local_dataset_is_uploaded_once_under_its_content(host: Host, tmp_path: Path) -> None:
    mine = ids_dataset(tmp_path / "mine.jsonl", [5, 6])
    events: list[dict[str, Any]] = []
    first = extract.extract(host, Options(dataset=f"local:{mine}"), detach=True, on_event=events.append)
    runs.stop(host, first["run"], grace=0)
    extract.extract(host, Options(dataset=f"local:{mine}", allow_second=True), detach=True, on_event=events.append)
    assert [event["event"] for event in events].count("upload") == 1
    there = Path(first["job"]["dataset"])
    assert there.read_bytes() == mine.read_bytes()
    assert Path(host.state_dir) in there.parents
    with pytest.raises(errors.UsageError, match="no local file"):
        extract.extract(host, Options(dataset="local:/nowhere.jsonl"))


def test_resume_takes_up_the_settings_and_the_folder_of_a_run(host: Host) -> None:
    first = extract.extract(host, Options(samples=2, layers="1,3,6,8", seed=5), detach=True)
    runs.stop(host, first["run"], grace=0)
    again = extract.extract(host, Options(resume="last"), detach=True)
    assert again["run"] != first["run"]
    assert again["out"] == first["out"]
    assert {name: again["job"][name] for name in ("samples", "layers", "seed")} == {
        "samples": 2,
        "layers": [1, 3, 6, 8],
        "seed": 5,
    }


def test_check_alone_starts_nothing(host: Host, tmp_path: Path) -> None:
    with open_agent(host) as agent:
        found = extract.check(host, agent)
        local = extract.check(host, agent, Options(dataset=f"local:{host.workload.dataset}"))
    assert found["ok"]
    assert [check["ok"] for check in local["checks"] if check["name"] == "dataset"] == [None]
    assert runs.list(host)["runs"] == []


def test_the_seconds_of_the_toolkit_are_what_is_neither_engine_nor_compute() -> None:
    from remoteops import outcome

    began = time.monotonic() - 100
    found = outcome.seconds(
        {"connect": 1.0, "patch": 10.0},
        {"load": 50.0, "extract": 30.0, "verify": 4.0},
        {},
        {"seconds": {"reference": 3.0}},
        began,
    )
    assert found["total"] == pytest.approx(100, abs=0.5)
    assert found["toolkit"] == pytest.approx(7, abs=0.5)
    assert found["run.verify"] == 4.0
