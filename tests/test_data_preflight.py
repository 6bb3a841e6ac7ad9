"""Preflight: what would fail at minute 19 is said in a second, and what was not looked at is never called fine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from remoteops.agent import capabilities, disk, gpus, manifest, modelinfo, preflight, preflight_host
from remoteops.agent.capabilities import Capabilities
from remoteops.agent.protocol import AgentError
from tests.data_fixtures import ids_dataset, model_folder, stub_venv

KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "hidden_size": 7168,
    "vocab_size": 163840,
    "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
    "text_config": {
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "vocab_size": 163840,
        "max_position_embeddings": 262144,
        "dtype": "bfloat16",
        "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
    },
}


class Place:
    """A host with everything in order; a test spoils one thing and asks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.venv = stub_venv(folder / "venv")
        self.model = model_folder(folder / "model")
        self.data = ids_dataset(folder / "rows.jsonl", [20, 30, 40])

    def ask(self, **job: Any) -> dict[str, Any]:
        venv = job.pop("venv", str(self.venv))
        base: dict[str, Any] = {
            "engine": "auto",
            "model": str(self.model),
            "dataset": str(self.data),
            "samples": None,
            "max_length": 64,
            "layers": "default",
            "dtype": "float32",
            "format": "safetensors",
            "out": str(self.folder / "out"),
            "tensor_parallel": 1,
        }
        request = {"job": {**base, **job}, "venv": venv, "state_dir": str(self.folder / "state")}
        return preflight.preflight(request, lambda *a, **k: None)

    def one(self, name: str, **job: Any) -> dict[str, Any]:
        found = [check for check in self.ask(**job)["checks"] if check["name"] == name]
        assert len(found) == 1, f"no check {name}"
        return found[0]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_host_in_order_passes_and_says_what_was_seen(place: Place) -> None:
    found = place.ask()
    assert found["ok"], [check for check in found["checks"] if check["ok"] is False]
    assert found["layers"] == [2, 4, 5, 8]
    assert found["shape"]["num_layers"] == 8
    assert found["capabilities"] == {
        "connector": True,
        "last_layer": True,
        "first_layer": True,
        "tensor_parallel": True,
        "generator": True,
        "architecture": True,
    }
    assert found["versions"]["vllm"] == "1.0"


@pytest.mark.parametrize(
    ("name", "job", "kind", "told"),
    [
        ("interpreter", {"venv": "/nowhere/venv"}, "MissingVenv", "does not exist"),
        ("interpreter", {"venv": None}, "MissingVenv", "no venv is named"),
        ("model", {"model": "/nowhere/model"}, "MissingModel", "no model folder"),
        ("model", {"model": "someone/not-downloaded"}, "MissingModel", "no model folder"),
        ("dataset", {"dataset": "/nowhere.jsonl"}, "DatasetError", "no dataset"),
        ("layers", {"layers": [2, 9]}, "UsageError", "outside 0..8"),
        ("length", {"max_length": 512}, "PreflightFailed", "max_length 512; the model takes 512"),
        (
            "length",
            {"max_length": 64, "engine_args": {"max_model_len": 64}},
            "PreflightFailed",
            "engine_args.max_model_len takes 64",
        ),
        ("disk", {"disk_reserve": 1 << 60}, "DiskTooSmall", "GiB free"),
    ],
)
def test_each_thing_that_would_fail_later_fails_now_with_its_own_kind(
    place: Place, name: str, job: dict[str, Any], kind: str, told: str
) -> None:
    check = place.one(name, **job)
    assert check["ok"] is False
    assert check["kind"] == kind
    assert told in check["found"]
    assert check["hint"]


def test_a_missing_package_is_named(place: Place, tmp_path: Path) -> None:
    venv = stub_venv(tmp_path / "other", missing=("transformers",))
    check = place.one("packages", venv=str(venv))
    assert (check["ok"], check["kind"]) == (False, "MissingPackage")
    assert "install transformers in" in check["hint"]


def test_a_venv_whose_base_python_is_gone_says_so(place: Place, tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "bin"
    broken.mkdir(parents=True)
    (broken / "python").symlink_to("/nowhere/python3")
    assert "dangling link" in place.one("interpreter", venv=str(tmp_path / "broken"))["found"]


def test_sizes_are_found_in_a_nested_text_config_and_ids_default_to_the_models_depth(
    place: Place, tmp_path: Path
) -> None:
    model = model_folder(tmp_path / "kimi", **KIMI)
    (model / "config.json").write_text(json.dumps(KIMI))
    (model / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}})
    )
    found = place.ask(model=str(model), dtype="auto", max_length=2047)
    checks = {check["name"]: check for check in found["checks"]}
    assert found["layers"] == [2, 30, 58, 61]
    assert found["dtype"] == "bfloat16"
    assert found["estimate"]["bytes_a_token"] == 57344
    assert found["shape"]["max_length"] == 262144
    assert checks["remote code"]["ok"] is False
    assert "trust_remote_code" in checks["remote code"]["hint"]
    assert checks["architecture"]["ok"] is False
    assert [
        check["ok"]
        for check in place.ask(model=str(model), trust_remote_code=True)["checks"]
        if check["name"] == "remote code"
    ] == [True]


def test_shards_that_the_index_names_must_be_there(place: Place) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (place.model / "model.safetensors.index.json").write_text(json.dumps(index))
    (place.model / "model-00001-of-00002.safetensors").write_bytes(b"x")
    check = place.one("model")
    assert check["ok"] is False
    assert "1 shards" in check["found"]
    assert "model-00002-of-00002" in check["found"]


def test_a_conversation_dataset_needs_a_chat_template(place: Place, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    (place.model / "tokenizer_config.json").write_text("{}")
    assert place.one("chat template", dataset=str(chats))["ok"] is False
    (place.model / "chat_template.jinja").write_text("x")
    assert place.one("chat template", dataset=str(chats))["ok"] is True


def test_records_without_any_usable_column_are_refused_before_anything_is_loaded(place: Place, tmp_path: Path) -> None:
    strange = tmp_path / "strange.jsonl"
    strange.write_text('{"foo": 1, "bar": "x"}\n')
    check = place.one("dataset", dataset=str(strange))
    assert check["ok"] is False
    assert check["found"] == "its records have bar, foo"
    assert "input_ids" in check["need"] and "messages" in check["need"]
    strange.write_text('{torn\n{"text": "x"}\n')
    assert place.one("dataset", dataset=str(strange))["ok"] is True
    plain = tmp_path / "plain.txt"
    plain.write_text("12\nwords\n")
    assert place.one("dataset", dataset=str(plain))["ok"] is True


def test_ids_that_were_moved_or_that_a_trainer_trips_over_are_said(place: Place, tmp_path: Path) -> None:
    shallow = model_folder(tmp_path / "shallow", num_hidden_layers=6)
    moved = place.one("layers", model=str(shallow))
    assert moved["ok"] is True
    assert "moved" in moved["found"]
    odd = place.one("layers", layers=[2, 4, 5, 7])
    assert odd["ok"] is None
    assert "id 8" in odd["found"]


def test_an_output_folder_of_another_job_is_refused_before_the_model_is_loaded(place: Place) -> None:
    first = place.ask()
    shape = modelinfo.read(str(place.model))
    header = {
        "model": str(place.model),
        "model_fingerprint": modelinfo.fingerprint(shape.folder),
        "dataset": str(place.data),
        "dataset_sha256": None,
        "layers": first["layers"],
        "dtype": "float32",
        "format": "safetensors",
        "max_length": 64,
    }
    from remoteops.agent.extraction.records import open_records

    header["dataset_sha256"] = open_records(str(place.data)).sha256()
    manifest.open_output(str(place.folder / "out"), header)
    assert place.one("output folder")["ok"] is True
    check = place.one("output folder", layers=[2, 4, 6, 8], dtype="bfloat16")
    assert (check["ok"], check["kind"]) == (False, "OutputMismatch")
    assert "the layer ids changed" in check["found"]
    assert "the dtype changed (float32 -> bfloat16)" in check["found"]
    (place.model / "model.safetensors").write_bytes(os.urandom(1000))
    assert "the model changed (same name" in place.one("output folder")["found"]


def test_the_bytes_needed_are_tokens_by_layers_by_width_by_dtype(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ids_dataset(place.folder / "long.jsonl", [64] * 100)
    need = 100 * 64 * 4 * 64 * 4
    monkeypatch.setattr(
        disk,
        "space",
        lambda path: {"free": need // 2, "total": 10**12, "files": 10**6, "source": "quota", "path": path},
    )
    check = place.one("disk", dataset=str(rows), disk_reserve=1)
    assert (check["ok"], check["kind"]) == (False, "DiskTooSmall")
    assert "100 rows" in check["need"]
    assert "(quota)" in check["found"]
    monkeypatch.setattr(
        disk, "space", lambda path: {"free": need * 6, "total": 10**12, "files": 50, "source": "statvfs", "path": path}
    )
    assert place.one("disk", dataset=str(rows), disk_reserve=1)["ok"] is True
    assert place.one("inodes", dataset=str(rows), disk_reserve=1)["ok"] is False


def test_a_folder_that_cannot_be_written_is_found(place: Place) -> None:
    (place.folder / "file").write_text("")
    check = place.one("output folder", out="/proc/nothing/out")
    assert check["ok"] is False
    assert "cannot be written" in check["found"]


class Cards:
    """Two GPUs of 80 GiB; the second one is in use by a process."""

    present = True

    def devices(self) -> list[dict[str, Any]]:
        return [
            {
                "index": 0,
                "name": "H200",
                "uuid": "GPU-a",
                "memory_total": 80 << 30,
                "memory_used": 1 << 30,
                "utilization": 0,
            },
            {
                "index": 1,
                "name": "H200",
                "uuid": "GPU-b",
                "memory_total": 80 << 30,
                "memory_used": 70 << 30,
                "utilization": 99,
            },
        ]

    def processes(self) -> list[dict[str, Any]]:
        return [{"gpu": 1, "pid": 4711, "memory": 70 << 30}]


def test_gpus_must_be_there_and_free_and_large_enough(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "Gpus", Cards)
    venv = str(stub_venv(tmp_path / "gpu", vllm="vllm"))
    assert place.one("gpus", venv=venv)["ok"] is True
    busy = place.one("gpus", venv=venv, tensor_parallel=2)
    assert (busy["ok"], busy["kind"]) == (False, "GpuBusy")
    assert "pid 4711 on GPU 1" in busy["found"]
    few = place.one("gpus", venv=venv, tensor_parallel=4)
    assert few["ok"] is False
    assert "2 visible" in few["found"]
    with (place.model / "model.safetensors").open("wb") as stream:
        stream.truncate(200 << 30)
    assert place.one("gpu memory", venv=venv)["ok"] is False


def test_an_accelerator_that_cannot_be_read_is_unknown_and_not_fine(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoCards:
        present = False

    monkeypatch.setattr(gpus, "Gpus", NoCards)
    real = os.path.exists
    monkeypatch.setattr(preflight_host.os.path, "exists", lambda path: path == "/dev/kfd" or real(path))
    venv = str(stub_venv(tmp_path / "gpu", vllm="vllm"))
    assert place.one("gpus", venv=venv)["ok"] is None


def test_checks_that_lack_their_facts_say_unknown(place: Place) -> None:
    found = {check["name"]: check["ok"] for check in place.ask(model="/nowhere", venv="/nowhere")["checks"]}
    assert found["packages"] is None
    assert found["layers"] is None
    assert found["disk"] is None


def test_a_model_id_is_found_in_the_hosts_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    model_folder(snapshot)
    (tmp_path / "hub" / "models--org--name" / "refs").mkdir()
    (tmp_path / "hub" / "models--org--name" / "refs" / "main").write_text("abc")
    assert modelinfo.find("org/name", {"HF_HUB_CACHE": str(tmp_path / "hub")}) == str(snapshot)
    with pytest.raises(AgentError, match="no model folder") as caught:
        modelinfo.find("org/other", {"HF_HUB_CACHE": str(tmp_path / "hub")})
    assert "models--org--other" in caught.value.tried


# --- the engine ---------------------------------------------------------------------------------------------------

ALL = Capabilities(
    connector=True, last_layer=True, tensor_parallel=True, generator=True, architecture=True, first_layer=True
)


@pytest.mark.parametrize(
    ("found", "settings", "engine"),
    [
        (ALL, {}, "connector"),
        (ALL, {"breaks": 8}, "connector"),
        (ALL._replace(generator=False), {"breaks": None}, "connector"),
        (ALL._replace(connector=False, last_layer=None), {}, "generator"),
        (ALL._replace(last_layer=False), {}, "generator"),
        (ALL._replace(last_layer=False), {"layers": [2, 4, 5]}, "connector"),
        (ALL._replace(first_layer=False), {}, "connector"),
        (ALL._replace(first_layer=False), {"layers": [0, 2, 5, 8]}, "generator"),
        (ALL._replace(first_layer=None), {"layers": [0, 2, 5, 8]}, "connector"),
        (ALL._replace(tensor_parallel=False), {}, "connector"),
        (ALL._replace(tensor_parallel=False), {"tensor_parallel": 8}, "generator"),
        (ALL._replace(tensor_parallel=False), {"tensor_parallel": 8, "breaks": 3}, "connector"),
        (ALL._replace(tensor_parallel=False, generator=False), {"tensor_parallel": 8}, "connector"),
        (ALL._replace(last_layer=None), {}, "generator"),
        (ALL._replace(last_layer=None, generator=False), {}, "connector"),
        (ALL._replace(last_layer=None), {"breaks": 3}, "connector"),
        (ALL._replace(last_layer=False), {"requested": "connector", "force": True}, "connector"),
        (ALL._replace(last_layer=None, connector=None), {"requested": "connector"}, "connector"),
        (ALL, {"requested": "generator-stock"}, "generator-stock"),
    ],
)
def test_the_engine_follows_from_what_was_found(found: Capabilities, settings: dict[str, Any], engine: str) -> None:
    arguments = {
        "requested": "auto",
        "breaks": 0,
        "tensor_parallel": 1,
        "layers": [2, 4, 5, 8],
        "num_layers": 8,
        **settings,
    }
    chosen, why = capabilities.choose(arguments.pop("requested"), found, **arguments)
    assert chosen == engine
    assert why


@pytest.mark.parametrize(
    ("found", "settings", "kind"),
    [
        (ALL._replace(connector=False), {"breaks": 8}, "AuditBroken"),
        (ALL._replace(connector=False, generator=False), {}, "MissingPackage"),
        (ALL._replace(generator=False), {"requested": "generator"}, "MissingPackage"),
        (ALL, {"requested": "quantum"}, "UsageError"),
        (ALL._replace(connector=False), {"requested": "connector"}, "AuditBroken"),
        (ALL._replace(last_layer=False), {"requested": "connector"}, "AuditBroken"),
        (ALL._replace(first_layer=False), {"requested": "connector", "layers": [0, 4, 8]}, "AuditBroken"),
    ],
)
def test_no_engine_is_an_error_that_says_what_to_do(found: Capabilities, settings: dict[str, Any], kind: str) -> None:
    arguments = {
        "requested": "auto",
        "breaks": 0,
        "tensor_parallel": 1,
        "layers": [2, 4, 5, 8],
        "num_layers": 8,
        **settings,
    }
    with pytest.raises(AgentError) as caught:
        capabilities.choose(arguments.pop("requested"), found, **arguments)
    assert caught.value.kind == kind
    assert caught.value.hint


def test_capabilities_are_read_from_the_shape_of_the_sources(tmp_path: Path) -> None:
    venv = stub_venv(tmp_path / "venv")
    site = next((venv / "lib").glob("*/site-packages"))
    vllm, speculators = str(site / "vllm"), str(site / "speculators")
    assert capabilities.look(vllm, speculators, "LlamaForCausalLM") == ALL
    assert capabilities.look(vllm, speculators, "OldForCausalLM").last_layer is False
    assert capabilities.look(vllm, speculators, "OldForCausalLM").first_layer is True
    old = site / "vllm" / "model_executor" / "models" / "old.py"
    old.write_text(old.read_text().replace("aux.append(x)", "aux.append(x + residual)"))
    assert capabilities.look(vllm, speculators, "OldForCausalLM").first_layer is False
    old.write_text(old.read_text().replace("x + residual", "x if residual is None else x + residual"))
    assert capabilities.look(vllm, speculators, "OldForCausalLM").first_layer is True
    assert capabilities.look(vllm, speculators, "NewForCausalLM").architecture is False
    assert capabilities.look(None, None, "LlamaForCausalLM") == Capabilities(False, None, None, False, None)
    models = site / "vllm" / "model_executor" / "models"
    (models / "wrapper.py").write_text('self.language_model = init(architectures=["OldForCausalLM"])\n')
    (models / "registry.py").write_text(
        (models / "registry.py").read_text() + '_MM = {"WrapForGeneration": ("wrapper", "Wrap")}\n'
    )
    assert capabilities.look(vllm, speculators, "WrapForGeneration").last_layer is False
    connector = next((site / "vllm" / "distributed").rglob("example_hidden_states_connector.py"))
    connector.write_text('path + ".lock"\n')
    assert capabilities.look(vllm, speculators, "LlamaForCausalLM").tensor_parallel is False
    connector.write_text('path + ".lock"\ndef get_finished_count(self): return 1\n')
    assert capabilities.look(vllm, speculators, "LlamaForCausalLM").tensor_parallel is True
