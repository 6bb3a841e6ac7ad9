"""The probe of a host: the agent reads what is installed there; the baseline stays here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from remoteops import probe
from remoteops.console import findings
from remoteops.errors import MissingPackage
from remoteops.inventory import Host, Workload

OLD = "def plan(groups, specs, fast=False): ...\n\nclass Runner:\n    def step(self, batch): ...\n"
NEW = "def plan(groups, fast=True): ...\n\nclass Runner:\n    def step(self, batch):\n        assert batch\n"
USER = """
from engine import Runner, plan

def go():
    plan(groups=1, specs=2)
    Runner().step(3)
"""


def install(site: Path, package: str, version: str, text: str, requires: str = "") -> None:
    (site / package).mkdir(parents=True)
    (site / package / "__init__.py").write_text(text)
    info = site / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n{requires}")
    (info / "RECORD").write_text(f"{package}/__init__.py,,\n{info.name}/METADATA,,\n")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """This machine as a host: a venv with engine 2.0 and a user written for engine 1.0, which pip can find."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    site = next(venv.glob("lib/python*/site-packages"))
    install(site, "engine", "2.0", NEW)
    install(site, "user", "0.3", USER, "Requires-Dist: engine==1.0; extra == 'gen'\n")
    links = tmp_path / "links"
    links.mkdir()
    with zipfile.ZipFile(links / "engine-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("engine/__init__.py", OLD)
        archive.writestr("engine-1.0.dist-info/METADATA", "Name: engine\nVersion: 1.0\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
    return Host(
        name="box", connect="local", venv=str(venv), cache_dir=str(tmp_path / "there"),
        state_dir=str(tmp_path / "state"), workload=Workload(consumer="user", provider="engine"),
    )  # fmt: skip


def by_rule(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {finding["rule"]: finding for finding in document["findings"]}


def test_what_is_installed_is_audited_against_the_release_the_consumer_pins(host: Host) -> None:
    document = probe.probe(host)
    assert (document["host"], document["schema"]) == ("box", "remoteops.probe/1")
    assert document["consumer"]["version"] == "0.3"
    assert document["provider"]["version"] == "2.0"
    assert document["baseline"]["version"] == "1.0"
    found = by_rule(document)
    assert found["unknown-kwarg"]["was"] == "plan(groups, specs, fast=False) (engine 1.0)"
    assert found["changed-default"]["detail"] == "fast"
    assert "assert batch" in found["new-raise"]["detail"]
    assert probe.exit_code(document) == 1
    assert "facts" not in document
    json.dumps(document)


def test_without_a_baseline_nothing_is_fetched(host: Host, tmp_path: Path) -> None:
    document = probe.probe(host, baseline=None)
    assert document["baseline"] is None
    assert set(by_rule(document)) == {"unknown-kwarg"}
    assert not (tmp_path / "here" / "remoteops" / "sources").exists()


def test_a_baseline_that_cannot_be_had_is_a_note_unless_it_was_named(host: Host, tmp_path: Path) -> None:
    (tmp_path / "links" / "engine-1.0-py3-none-any.whl").unlink()
    document = probe.probe(host)
    assert document["baseline"] is None
    assert "engine==1.0" in document["notes"][0]
    with pytest.raises(MissingPackage):
        probe.probe(host, baseline="engine==1.0")


def test_runtime_and_shell_layers_come_from_the_host(host: Host) -> None:
    document = probe.probe(host, baseline=None, runtime=True, shell=True, run=True)
    assert document["runtime"]["modules"] == {"user": None}
    assert {"engine.plan", "engine.Runner", "engine.Runner.step"} <= document["runtime"]["symbols"].keys()
    assert document["runtime"]["symbols"]["engine.plan"]["signature"] == "(groups, fast=True)"
    outputs = {check["purpose"]: check["output"] for check in document["checks"]}
    assert "plan(groups=1, specs=2)" in outputs["how the consumer uses it"]
    assert "(groups, fast=True)" in outputs["what the interpreter says"]


def test_a_package_that_is_not_there_is_said_with_where_it_was_looked_for(host: Host) -> None:
    with pytest.raises(MissingPackage, match="nothing_there"):
        probe.probe(host, provider="nothing_there")


def test_local_trees_take_the_baseline_from_the_cache_only(host: Host, tmp_path: Path) -> None:
    assert host.venv is not None
    site = str(next(Path(host.venv).glob("lib/python*/site-packages")))
    document = probe.audit("user", "engine", consumer_path=site, provider_path=site)
    assert document["baseline"] is None
    assert "--baseline auto" in document["notes"][0]
    fetched = probe.audit("user", "engine", consumer_path=site, provider_path=site, baseline="auto")
    assert fetched["baseline"]["version"] == "1.0"
    cached = probe.audit("user", "engine", consumer_path=site, provider_path=site)
    assert cached["baseline"]["version"] == "1.0"
    assert by_rule(cached).keys() == by_rule(fetched).keys()


def test_a_break_is_dated_by_the_releases_at_hand(tmp_path: Path) -> None:
    texts = {
        "1.0": "class Runner:\n    def step(self, n): ...\ndef plan(groups, specs): ...\n",
        "1.1": "class Runner:\n    def step(self, n): ...\ndef plan(groups, specs=None, **more): ...\n",
        "1.2": "class Runner:\n    def step(self, n): ...\ndef plan(groups): ...\n",
        "2.0": "class Runner:\n    def __init__(self): self.own = 1\ndef plan(groups): ...\n",
    }
    for version, text in texts.items():
        install(tmp_path / version, "engine", version, text)
    install(tmp_path / "user", "user", "0.3", USER)
    paths = os.pathsep.join(str(tmp_path / v) for v in ("1.0", "1.2", "1.1"))
    document = probe.audit(
        "user", "engine", consumer_path=str(tmp_path / "user"), provider_path=str(tmp_path / "2.0"), baseline_path=paths
    )
    proved = [finding for finding in document["findings"] if finding["kind"] != "behaviour"]
    found = {finding["detail"]: finding.get("since") for finding in proved}
    assert found == {"specs": None, "step": {"release": "2.0", "fine": "1.2"}}  # 1.1 takes any keyword: nothing is said
    shutil.rmtree(tmp_path / "1.1")
    again = probe.audit(
        "user", "engine", consumer_path=str(tmp_path / "user"), provider_path=str(tmp_path / "2.0"),
        baseline_path=os.pathsep.join(str(tmp_path / v) for v in ("1.0", "1.2")),
    )  # fmt: skip
    dated = next(finding for finding in again["findings"] if finding["detail"] == "specs")
    assert dated["since"] == {"release": "1.2", "fine": "1.0"}
    shown = "\n".join(str(getattr(line, "text", line)) for line in findings.render(again))
    assert "1.2 (1.0 is fine)" in shown
