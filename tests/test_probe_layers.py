"""The layers over the static audit: baseline, the running interpreter, checks by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from remoteops.agent.audit import baseline, runtime, shell
from remoteops.agent.audit.shapes import Provider
from remoteops.agent.protocol import AgentError

OLD = '''
from dataclasses import dataclass

@dataclass
class Config:
    """The old one."""
    seqs: int = 32
    chunked: bool = None
    ratio: float = 0.9

def plan(groups, memory=1) -> list:
    return [groups]
'''
NEW = """
from dataclasses import dataclass
from pydantic import Field

@dataclass
class Config:
    seqs: int = 64
    chunked: bool = True
    ratio: float = Field(default=0.9, gt=0)

def plan(groups, memory=1) -> dict:
    check(groups)
    return {}

def check(groups):
    if not groups:
        raise ValueError("no groups")
"""


def tree(folder: Path, text: str) -> Provider:
    (folder / "engine").mkdir(parents=True)
    (folder / "engine" / "__init__.py").write_text(text)
    return Provider.open("engine", str(folder))


def call(symbol: str, given: list[str], **more: Any) -> dict[str, Any]:
    return {
        "symbol": symbol,
        "file": "user.py",
        "line": 3,
        "column": 0,
        "scope": "",
        "anchor": None,
        "given": given,
        **more,
    }


@pytest.fixture
def risks(tmp_path: Path) -> list[dict[str, Any]]:
    symbols = ["engine.Config", "engine.plan"]
    was = baseline.facts(tree(tmp_path / "old", OLD), symbols)
    now = baseline.facts(tree(tmp_path / "new", NEW), symbols)
    return baseline.compare(now, was, [call("engine.Config", ["seqs"]), call("engine.plan", ["groups"])], set())


def test_a_changed_default_is_a_risk_only_where_the_parameter_is_left_unset(risks: list[dict[str, Any]]) -> None:
    found = {(risk["detail"], risk["was"], risk["now"]) for risk in risks if risk["rule"] == "changed-default"}
    assert found == {("chunked", "chunked = None", "chunked = True")}


def test_a_changed_return_annotation_and_a_new_raise_below_the_callee_are_risks(risks: list[dict[str, Any]]) -> None:
    by_rule = {risk["rule"]: risk for risk in risks}
    assert (by_rule["changed-return"]["was"], by_rule["changed-return"]["now"]) == ("-> list", "-> dict")
    assert "raise ValueError('no groups')" in by_rule["new-raise"]["detail"]
    assert {risk["confidence"] for risk in risks} == {"risk"}


def test_nothing_changed_gives_nothing(tmp_path: Path) -> None:
    facts = baseline.facts(tree(tmp_path, NEW), ["engine.Config", "engine.plan", "engine.gone"])
    assert baseline.compare(facts, facts, [call("engine.Config", []), call("engine.gone", [])], set()) == []
    assert facts["engine.gone"] is None


def test_findings_learn_what_was_there(tmp_path: Path) -> None:
    was = baseline.facts(tree(tmp_path, OLD), ["engine.plan", "engine.gone"])
    findings = [
        {"symbol": "engine.plan", "was": None},
        {"symbol": "engine.gone", "was": None},
        {"symbol": "engine.plan", "was": "x"},
    ]
    baseline.annotate(findings, was, "engine 1.0")
    assert [finding["was"] for finding in findings] == [
        "plan(groups, memory=1) -> list (engine 1.0)",
        "not in engine 1.0",
        "x",
    ]


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real venv: a provider that changes itself when imported, and a consumer whose second module breaks."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "engine").mkdir()
    (site / "engine" / "__init__.py").write_text(
        "print('noise on stdout')\n"
        "def plan(groups, memory=1): ...\n"
        "def same(a, *, b=2): ...\n"
        "def wrapped(a): ...\n"
        "_old = wrapped\n"
        "globals()['wrapped'] = lambda a, extra: _old(a)\n"
        "class Model:\n    def run(self, x): ...\n"
        "del Model.run\n"
    )
    (site / "user").mkdir()
    (site / "user" / "__init__.py").write_text("import engine\n")
    (site / "user" / "second.py").write_text("from engine import gone\n")
    (site / "user" / "tests.py").write_text("import engine\nraise SystemExit\n")
    return folder


def test_the_interpreter_and_the_sources_are_compared(venv: Path) -> None:
    symbols = ["engine.plan", "engine.same", "engine.wrapped", "engine.Model.run", "engine.nothing"]
    request = {"consumer": "user", "provider": "engine", "venv": str(venv), "symbols": symbols}
    answer = runtime.compare(request, lambda *_, **__: None)
    found = {finding["symbol"]: finding for finding in answer["findings"]}
    assert set(found) == {"user.second", "engine.wrapped", "engine.Model.run"}
    assert found["user.second"]["confidence"] == "proved"
    assert "cannot import name 'gone'" in found["user.second"]["error"]
    assert "only in the running interpreter: extra" in found["engine.wrapped"]["detail"]
    assert answer["modules"]["user"] is None
    assert answer["agreed"] == 3  # plan, same, and nothing: neither side has it


def test_without_an_interpreter_there_is_nothing_to_ask(tmp_path: Path, venv: Path) -> None:
    site = str(next(venv.glob("lib/python*/site-packages")))
    request = {
        "consumer": "user",
        "provider": "engine",
        "provider_path": site,
        "consumer_path": site,
        "venv": str(tmp_path),
        "symbols": [],
    }
    with pytest.raises(AgentError, match="no interpreter to ask"):
        runtime.compare(request, lambda *_, **__: None)


def document(root: Path) -> dict[str, Any]:
    (root / "user").mkdir()
    (root / "user" / "a.py").write_text("import engine\nengine.plan(\n    specs=1)\n")
    tree(root, NEW)
    finding = {
        "id": "f1", "rule": "unknown-kwarg", "kind": "unknown-kwarg", "confidence": "proved", "symbol": "engine.plan",
        "detail": "specs",
        "file": "user/a.py", "line": 2, "anchor": {"end_line": 3}, "now_at": "engine/__init__.py:11",
    }  # fmt: skip
    return {
        "consumer": {"package": "user", "path": str(root)},
        "provider": {"package": "engine", "path": str(root)},
        "findings": [finding],
    }


def test_checks_by_hand_show_use_and_definition_and_run_without_a_shell(tmp_path: Path) -> None:
    root = tmp_path / "it's $(touch evil) here"
    root.mkdir()
    checks = shell.checks(document(root), run=True)
    outputs = {check["purpose"]: check for check in checks}
    assert outputs["how the consumer uses it"]["output"] == "engine.plan(\n    specs=1)\n"
    assert outputs["what the provider has now"]["output"].startswith("def plan(groups, memory=1) -> dict:")
    assert outputs["whether the parameter is there"]["exit"] == 1
    assert not list(tmp_path.rglob("evil"))
    shown = subprocess.run(outputs["how the consumer uses it"]["command"], shell=True, capture_output=True, text=True)
    assert shown.stdout == "engine.plan(\n    specs=1)\n"


def test_output_of_a_check_is_bounded_and_a_missing_program_is_said() -> None:
    long = shell.execute({"argv": [sys.executable, "-c", "print('x' * 100000)"]})
    assert len(long["output"]) < shell.MAX_OUTPUT + 100
    assert "characters more" in long["output"]
    assert shell.execute({"argv": ["/no/such/program"]})["exit"] == 127
