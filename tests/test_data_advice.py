"""What is known about models: advice that names the release or the setting, and profiles that are valid workloads."""

from __future__ import annotations

from typing import Any

import pytest

from remoteops import advice
from remoteops.agent.extraction import layers
from remoteops.inventory import Workload


def found(version: str, architecture: str = "KimiK25ForConditionalGeneration") -> dict[str, Any]:
    return {"shape": {"architecture": architecture}, "versions": {"vllm": version, "torch": "2.10.0"}}


SET = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "1200"}


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("0.14.1", ["older than 0.15.0"]),
        ("0.17.0", ["refuses this model", "drops id 61"]),
        ("0.22.1rc1+cu129", ["regression", "drops id 61"]),
        ("0.24.0", ["drops id 61"]),
        ("0.25.0", []),
        ("", []),
    ],
)
def test_releases_that_are_known_to_fail_are_named_with_the_reason(version: str, told: list[str]) -> None:
    checks = advice.checks(found(version), SET)
    assert len(checks) == len(told)
    assert all(any(word in check["found"] for check in checks) for word in told)
    assert all(check["ok"] is None for check in checks), "advice never stops a run"


def test_a_timeout_that_the_first_step_exceeds_is_asked_for_until_it_is_set() -> None:
    checks = advice.checks(found("0.33.0"), {})
    assert [check["need"] for check in checks] == ["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=1200 in the workload's env"]
    assert advice.checks(found("0.33.0"), SET) == []


def test_nothing_is_said_about_models_nothing_is_known_of() -> None:
    assert advice.checks(found("0.17.0", "LlamaForCausalLM"), {}) == []
    assert advice.checks({"shape": None, "versions": {}}, {}) == []


def test_profiles_are_workloads() -> None:
    for name, profile in advice.load("profiles")["profiles"].items():
        fields = {key: value for key, value in profile.items() if key in Workload.model_fields}
        assert Workload(**fields), name
        assert set(profile) - set(fields) <= {"why"}
    kimi = advice.load("profiles")["profiles"]["kimi-k2.5-8gpu"]
    assert (kimi["tensor_parallel"], kimi["trust_remote_code"]) == (8, True)
    assert kimi["env"]["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] == "1200"


def test_the_agents_conventions_are_those_that_are_written_down() -> None:
    written = {name: item["offset"] for name, item in advice.load("layers")["conventions"].items()}
    assert written == layers.OFFSETS
    assert advice.conventions([2, 30, 58, 61]) == {"layer-output": [1, 29, 57, 60]}
    assert advice.conventions([0, 61]) == {}
