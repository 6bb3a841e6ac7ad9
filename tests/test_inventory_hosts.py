"""What a host of inventory.yaml is once defaults, profiles and groups are worked in."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from remoteops.errors import InventoryError
from remoteops.inventory import Host, Workload, find, load
from remoteops.schema import json_schema

ROOT = Path(__file__).resolve().parent.parent

TEXT = """
default: two
defaults:
  user: everyone
  timeouts: {connect: 3}
  env: {LANG: C.UTF-8}
  workload: {max_length: 100, dataset: /data/all.jsonl}
profiles:
  big: {model: /models/big, max_length: 4096, env: {A: "1", B: "1"}}
hosts:
  one:
    user: me
    timeouts: {silence: 30}
    env: {X: 5}
    identity_files: keys/id
    workload: {profile: big, max_length: 512, env: {B: "2"}, layers: [2, 4]}
  two:
groups:
  both: [two, one]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "inventory.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_a_host_wins_over_its_profile_and_that_over_the_defaults(file: Path) -> None:
    one = load(file).host("one")
    assert one.user == "me"
    assert (one.timeouts.connect, one.timeouts.silence, one.timeouts.auth) == (3, 30, 20)
    assert one.env == {"LANG": "C.UTF-8", "X": "5"}
    assert one.workload.model == "/models/big"
    assert one.workload.max_length == 512
    assert one.workload.dataset == "/data/all.jsonl"
    assert one.workload.env == {"A": "1", "B": "2"}
    assert one.workload.layers == (2, 4)


def test_relative_key_files_start_at_the_inventory(file: Path) -> None:
    assert load(file).host("one").identity_files == (str(file.parent / "keys/id"),)


def test_an_empty_host_has_the_defaults(file: Path) -> None:
    two = load(file).host()
    assert (two.name, two.user, two.workload.max_length, two.workload.model) == ("two", "everyone", 100, "")
    assert two.groups == ("both",)


def test_groups_and_names_select_each_host_once_in_order(file: Path) -> None:
    inventory = load(file)
    assert [host.name for host in inventory.select(["one", "both"])] == ["one", "two"]
    assert inventory.groups == {"both": ("two", "one")}


def test_hosts_are_frozen() -> None:
    host = Host(name="x")
    with pytest.raises(ValueError, match="frozen"):
        host.port = 3  # type: ignore[misc]
    assert host.model_copy(update={"port": 3}).port == 3


def test_the_file_is_looked_for_upward_and_named_by_the_environment(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    monkeypatch.delenv("REMOTEOPS_INVENTORY", raising=False)
    assert find(deep) == file
    monkeypatch.setenv("REMOTEOPS_INVENTORY", str(tmp_path / "other.yaml"))
    assert find(deep) == tmp_path / "other.yaml"
    with pytest.raises(InventoryError, match=r"other\.yaml: cannot be read"):
        load()


def test_without_any_file_the_shipped_one_with_the_lab_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REMOTEOPS_INVENTORY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(os.sep)
    assert load().host().connect == "lab"


def test_the_shipped_inventory_documents_a_real_host() -> None:
    host = load(ROOT / "inventory.yaml").host("kimi")
    assert host.workload.tensor_parallel == 8
    assert "Kimi-K2.5" in host.workload.model
    assert all((host.user, host.port, host.jump, host.venv, host.workload.dataset, host.workload.output))


def test_the_schema_for_editors_is_up_to_date() -> None:
    committed = json.loads((ROOT / "docs" / "inventory.schema.json").read_text(encoding="utf-8"))
    assert committed == json_schema()
    assert set(committed["$defs"]["Workload"]["properties"]) == set(Workload.model_fields)
