"""The use case: audit, plan, apply, prove, revert, on a real venv with a small consumer and provider, through the
verbs.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from remoteops import errors, patch, planning, probe
from remoteops.agent.__main__ import load
from remoteops.agent.protocol import AgentError
from remoteops.schema import Host, Workload

PROVIDER = {
    "engine/__init__.py": "",
    "engine/core/__init__.py": "",
    "engine/core/plan.py": "def make_plan(config, groups, memory):\n    return (config, groups, memory)\n",
    "engine/core/cache.py": "def helper():\n    return 1\n",
    "engine/request.py": "class Request:\n    def __init__(self, ident, tokens):\n        self.ident = ident\n",
}
CONSUMER = {
    "tool/__init__.py": "",
    "tool/run.py": (
        "from engine.core.cache import (\n    helper,  # it\n    make_plan,\n)\n"
        "from engine.request import Request\n\n\n"
        "def go():\n"
        "    plan = make_plan(config=1, groups=2, specs=3, memory=4)  # the plan\n"
        "    return Request(\n        ident=helper(),\n        tokens=[1],\n        eos=2,\n    ), plan\n"
    ),
}


REQUEST = "class Request:\n    def __init__(self, {}):\n        pass\n"


class Verbs:
    """The agent's verbs in this process, with errors as the operator sees them."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def call(
        self, verb: str, request: dict[str, Any], *, on_event: Any = None, timeout: float | None = None
    ) -> dict[str, Any]:
        self.calls.append(verb)
        try:
            return load(verb)(request, lambda *args, **fields: None)
        except AgentError as error:
            kind = errors.by_kind(error.kind)
            raise kind(error.message, tried=error.tried, hint=error.hint, **error.data) from error


class Bench:
    """A venv with both packages installed."""

    def __init__(self, folder: Path) -> None:
        self.venv = folder / "venv"
        venv.create(self.venv, with_pip=False, symlinks=True)
        self.site = self.venv / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        self.agent = Verbs()
        self.host = Host(
            name="box",
            connect="local",
            venv=str(self.venv),
            state_dir=str(folder / "state"),
            cache_dir=str(folder / "cache"),
            workload=Workload(consumer="tool", provider="engine"),
        )
        self.install("engine", PROVIDER)
        self.install("tool", CONSUMER)

    def install(self, package: str, files: dict[str, str], version: str = "1.0") -> None:
        subprocess.run(["rm", "-rf", str(self.site / package)], check=True)
        for name, text in files.items():
            path = self.site / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        info = self.site / f"{package}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")

    def plan(self, **more: Any) -> patch.Planned:
        return patch.plan(self.host, agent=self.agent, **more)  # type: ignore[arg-type]

    def apply(self, planned: patch.Planned, **more: Any) -> patch.Outcome:
        return patch.apply(self.host, planned, agent=self.agent, **more)  # type: ignore[arg-type]

    def revert(self) -> dict[str, Any]:
        return patch.revert(self.host, agent=self.agent)  # type: ignore[arg-type]

    def state(self) -> str:
        return str(patch.status(self.host, agent=self.agent)["state"])  # type: ignore[arg-type]

    def text(self) -> str:
        return (self.site / "tool/run.py").read_text()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_audit_plan_apply_prove_revert(bench: Bench) -> None:
    planned = bench.plan()
    # the unknown "specs" is only seen once make_plan is imported from where it is now: the plan looked behind it
    assert [fix.id for fix in planned.plan.fixes] == ["rename-import", "drop-keyword", "drop-keyword"]
    assert bench.text() == CONSUMER["tool/run.py"], "planning writes nothing"
    assert not planned.plan.remaining and planned.plan.as_dict()["breaks_planned"] == 0
    done = bench.apply(planned)
    assert done.applied and done.proof["audit"]["breaks"] == 0 and done.proof["import"]["modules"] == ["tool.run"]
    assert bench.text() == (
        "from engine.core.cache import (\n    helper,  # it\n)\nfrom engine.core.plan import make_plan\n"
        "from engine.request import Request\n\n\n"
        "def go():\n"
        "    plan = make_plan(config=1, groups=2, memory=4)  # the plan\n"
        "    return Request(\n        ident=helper(),\n        tokens=[1],\n    ), plan\n"
    )
    ran = subprocess.run(
        [bench.venv / "bin/python", "-c", "from tool.run import go; print(go()[1])"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "(1, 2, 4)\n"
    assert bench.state() == "patched"
    assert bench.revert()["reverted"][0]["outcome"] == "reverted"
    assert bench.text() == CONSUMER["tool/run.py"] and bench.state() == "clean"


def test_every_hunk_names_the_finding_behind_it(bench: Bench) -> None:
    found = bench.plan().plan
    (file,) = found.files
    told = {found.finding(name)["rule"] for hunk in file.hunks for name in hunk.findings}
    assert told == {"moved-symbol", "unknown-kwarg"}
    assert all(hunk.findings for hunk in file.hunks)
    assert found.diff.startswith("--- a/tool/run.py\n+++ b/tool/run.py\n@@ -1,")
    applied = subprocess.run(
        ["patch", "-p1", "--dry-run"], input=found.diff, text=True, cwd=bench.site, capture_output=True, check=False
    )
    assert applied.returncode == 0, applied.stdout + applied.stderr


def test_a_second_run_finds_the_patch_in_place(bench: Bench) -> None:
    bench.apply(bench.plan())
    again = bench.plan()
    assert again.done and bench.apply(again).already


def test_another_provider_changes_the_patch_from_the_original_on(bench: Bench) -> None:
    """Same version number, other sources: what counts is what is there."""
    bench.apply(bench.plan())
    bench.install(
        "engine",
        {
            **PROVIDER,
            "engine/request.py": "class Request:\n    def __init__(self, ident, tokens, eos):\n        pass\n",
        },
    )
    again = bench.plan()
    assert not again.done
    bench.apply(again)
    assert "eos=2" in bench.text() and "specs=3" not in bench.text()
    bench.install(
        "engine",
        {
            **PROVIDER,
            "engine/core/cache.py": PROVIDER["engine/core/cache.py"]
            + "def make_plan(config, groups, specs, memory):\n    return 0\n",
            "engine/request.py": "class Request:\n    def __init__(self, ident, tokens, eos):\n        pass\n",
        },
    )
    none = bench.plan()
    assert none.plan.empty and not none.done
    bench.apply(none)
    assert bench.text() == CONSUMER["tool/run.py"] and bench.state() == "clean"


def test_only_limits_the_plan(bench: Bench) -> None:
    planned = bench.plan(only=("moved-symbol",))
    assert [fix.id for fix in planned.plan.fixes] == ["rename-import"]
    done = bench.apply(planned)
    assert done.applied and done.proof["audit"]["breaks"] == 2
    assert "specs=3" in bench.text() and "engine.core.plan" in bench.text()


def test_only_a_name_that_can_mean_something(bench: Bench) -> None:
    with pytest.raises(errors.UsageError, match="there is no such rule") as caught:
        bench.plan(only=("unknown-kwargs",))
    assert caught.value.hint == "did you mean 'unknown-kwarg'?" and bench.agent.calls == []
    assert bench.plan(only=("slice-by-request",)).plan.empty and bench.plan(only=("unknown-*",)).plan.files


def test_what_cannot_be_fixed_is_told_in_one_line(bench: Bench) -> None:
    bench.install(
        "engine",
        {
            **PROVIDER,
            "engine/request.py": REQUEST.format("ident, tokens, needed, eos=1"),
        },
    )
    (left,) = bench.plan().plan.remaining
    assert (
        left.finding["detail"] == "needed"
        and "no fix is known (" in left.why
        and "\n" not in left.why
    )


def test_an_import_that_fails_takes_the_patch_back(bench: Bench) -> None:
    text = "from engine.request import check\n\nVALUE = check(level=1, old=2)\n"
    bench.install("tool", {"tool/__init__.py": "", "tool/run.py": text})
    bench.install(
        "engine",
        {
            **PROVIDER,
            "engine/request.py": "def check(level):\n    raise RuntimeError('level %r is for GPUs' % level)\n",
        },
    )
    with pytest.raises(errors.PatchError, match=r"do not import.*level 1 is for GPUs"):
        bench.apply(bench.plan())
    assert bench.text() == text and bench.state() == "clean"
    assert bench.apply(bench.plan(), prove=False).applied


def test_a_venv_that_does_not_import_without_the_patch_either_is_named_as_the_fault(bench: Bench) -> None:
    broken = {**CONSUMER, "tool/__init__.py": "from engine.request import Request\nimport no_such_package\n"}
    bench.install("tool", broken)
    with pytest.raises(errors.PatchError) as caught:
        bench.apply(bench.plan())
    assert "tool does not import in this venv, with the patch or without: ModuleNotFoundError" in caught.value.message
    assert caught.value.hint.startswith('File "') and "tool/__init__.py" in caught.value.hint
    assert "Traceback" not in str(caught.value) and str(caught.value).count("\n") == 2
    assert bench.state() == "clean"


def test_a_patch_that_does_not_hold_what_it_claims_is_taken_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = bench.plan()
    ours = bench.agent.call

    def lying(verb: str, request: dict[str, Any], **more: Any) -> dict[str, Any]:
        if verb == "audit":
            return dict(planned.plan.document)
        return ours(verb, request, **more)

    monkeypatch.setattr(bench.agent, "call", lying)
    with pytest.raises(errors.PatchError, match="did not resolve what it claims"):
        bench.apply(planned)
    assert bench.text() == CONSUMER["tool/run.py"] and bench.state() == "clean"


def test_a_failed_proof_brings_the_earlier_patch_back_not_the_original(bench: Bench) -> None:
    bench.apply(bench.plan(only=("moved-symbol",)))
    before = bench.text()
    bench.install(
        "engine",
        {
            **PROVIDER,
            "engine/request.py": "raise RuntimeError('no GPU')\n" + REQUEST.format("ident, tokens"),
        },
    )
    with pytest.raises(errors.PatchError, match="does not import in this venv"):
        bench.apply(bench.plan())
    assert bench.text() == before and bench.state() == "patched"


def test_a_file_that_changes_after_the_plan_is_not_overwritten(bench: Bench) -> None:
    planned = bench.plan()
    edited = bench.text() + "# mine\n"
    (bench.site / "tool/run.py").write_text(edited)
    with pytest.raises(errors.FileChanged):
        bench.apply(planned)
    assert bench.text() == edited


def test_round_trips_are_few(bench: Bench) -> None:
    planned = bench.plan()
    assert bench.agent.calls.count("patch.audit") <= 3 and len(bench.agent.calls) <= 4
    bench.install(
        "tool",
        {"tool/__init__.py": "", "tool/run.py": "from engine.request import Request\nr = Request(1, [2], eos=3)\n"},
    )
    bench.agent.calls.clear()
    planned = bench.plan()
    assert bench.agent.calls == ["patch.audit"], "no import fails: there is nothing to look behind"
    bench.agent.calls.clear()
    bench.apply(planned, prove=False)
    assert bench.agent.calls == ["patch.apply", "audit"]


def test_an_audit_that_was_made_is_not_made_again(bench: Bench) -> None:
    """fab probe, fab patch, fab patch, fab extract: each finds what the one before it looked at."""
    probe.probe(bench.host, baseline=None, agent=bench.agent)
    planned = bench.plan()
    assert planned.plan.document["cached"]
    bench.apply(planned, prove=False)
    assert probe.probe(bench.host, baseline=None, agent=bench.agent)["cached"], "the proof's audit"
    (again, third) = (bench.plan(), bench.plan())
    assert again.done and third.done and third.plan.document["cached"], "the view of the originals is kept"
    path = bench.site / "tool" / "more.py"
    path.write_text("from engine.core.plan import gone\n")
    found = bench.plan().plan.document
    assert "cached" not in found and any(f["file"] == "tool/more.py" for f in found["findings"]), "and not for ever"


def test_a_plan_for_a_model_is_proved_for_that_model(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    call = bench.agent.call

    def heard(verb: str, request: dict[str, Any], **more: Any) -> dict[str, Any]:
        asked.append((verb, request.get("model")))
        return call(verb, request, **more)

    monkeypatch.setattr(bench.agent, "call", heard)
    bench.apply(bench.plan(model="LlamaForCausalLM"), prove=False)
    assert {model for verb, model in asked if verb.endswith("audit")} == {"LlamaForCausalLM"}


def test_plan_is_pure_and_the_same_for_the_same_audit() -> None:
    source = b"def f():\n    return make(a=1, b=2)\n"
    finding = {
        "kind": "unknown-kwarg",
        "rule": "unknown-kwarg",
        "confidence": "proved",
        "symbol": "lib.make",
        "detail": "b",
        "file": "x.py",
        "line": 2,
        "scope": "f",
        "fix": None,
    }
    one, two = (planning.plan_from({"findings": [finding]}, {"x.py": source}) for _ in range(2))
    assert one == two and one.files[0].planned == b"def f():\n    return make(a=1)\n"
    risk = {**finding, "confidence": "risk"}
    assert planning.plan_from({"findings": [risk]}, {"x.py": source}).empty


def test_two_findings_with_one_cure_count_as_resolved_by_it() -> None:
    source = (
        b"class HiddenStatesWorkerExtension:\n    def _setup_hidden_states_capture(self, ids):\n"
        b"        model = self.m\n        if not supports_eagle3(model):\n            raise ValueError(model)\n"
        b"        base_model = model.model\n"
    )
    findings = [
        {
            "kind": "behaviour",
            "rule": rule,
            "confidence": "contract",
            "symbol": "s",
            "detail": "d",
            "file": "a/custom_worker.py",
            "line": line,
            "fix": {"recipe": rule},
        }
        for rule, line in (("drop-supports-eagle3-gate", 4), ("unwrap-language-model", 6))
    ]
    plan = planning.plan_from({"findings": findings}, {"a/custom_worker.py": source})
    assert not plan.remaining and [fix.id for fix in plan.fixes] == [
        "drop-supports-eagle3-gate",
        "unwrap-language-model",
    ]
    assert plan.files[0].planned.count(b"get_language_model()") == 1


@pytest.mark.parametrize(
    ("call", "mended"),
    [
        ("check(check(1, old=2), old=3)", "check(check(1))"),
        ("check(1, **dict(old=2))", None),
        ("functools.partial(check, old=2)(1)", None),
    ],
)
def test_a_keyword_is_taken_out_where_it_is_given_or_it_is_said_that_it_is_not(
    bench: Bench, call: str, mended: str | None
) -> None:
    text = f"import functools\nfrom engine.request import check\n\n\ndef go():\n    return {call}\n"
    bench.install("tool", {"tool/__init__.py": "", "tool/run.py": text})
    bench.install("engine", {**PROVIDER, "engine/request.py": "def check(level):\n    return level\n"})
    planned = bench.plan()
    if mended:
        assert bench.apply(planned).applied and bench.text() == text.replace(call, mended)
    else:
        assert planned.plan.empty
        assert all("passes no old by name" in item.why for item in planned.plan.remaining)


def test_an_edit_by_hand_after_the_patch_is_kept_and_patched_beside(bench: Bench) -> None:
    more = "from engine.request import Request\n\nMORE = Request('a', [1], kind=2)\n"
    bench.install("tool", {**CONSUMER, "tool/more.py": more})
    bench.install("engine", {**PROVIDER, "engine/request.py": REQUEST.format("ident, tokens, kind=1")})
    bench.apply(bench.plan(), prove=False)
    mine = bench.text() + "# mine\n"
    (bench.site / "tool/run.py").write_text(mine)
    planned = bench.plan()
    assert planned.plan.empty and bench.state() == "edited since"
    assert bench.apply(planned, prove=False).already, "nothing to do is no reason to take the patch out"
    bench.install("engine", {**PROVIDER, "engine/request.py": REQUEST.format("ident, tokens")})
    planned = bench.plan()
    assert [file.file for file in planned.plan.files] == ["tool/more.py"]
    assert bench.apply(planned, prove=False).changed == (str(bench.site / "tool/more.py"),)
    assert bench.text() == mine and "kind" not in (bench.site / "tool/more.py").read_text()
    with pytest.raises(errors.FileChanged):
        bench.revert()
    assert "kind" not in (bench.site / "tool/more.py").read_text(), "all or nothing"
    patch.revert(bench.host, force=True, agent=bench.agent)  # type: ignore[arg-type]
    assert bench.text() == CONSUMER["tool/run.py"] and (bench.site / "tool/more.py").read_text() == more
