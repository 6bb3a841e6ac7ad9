"""The contracts, recipes and rule pages that ship: well formed, explained, and right on real trees where they are."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from remoteops import recipes, rules
from remoteops.agent.audit import engine, patterns

ROOT = Path(__file__).parent.parent
TREES = os.environ.get("REMOTEOPS_TREES")
needs_trees = pytest.mark.skipif(
    not TREES, reason="REMOTEOPS_TREES names no folder with speculators-<version>/ and vllm-<version>/ source trees"
)


def test_every_rule_has_its_page_and_every_page_its_rule() -> None:
    assert {path.stem for path in (ROOT / "docs" / "rules").glob("*.md")} == set(rules.all_rules())


@pytest.mark.parametrize("rule", sorted(rules.all_rules()))
def test_a_page_says_change_code_error_and_fix(rule: str) -> None:
    text = (ROOT / rules.page(rule)).read_text(encoding="utf-8")
    parts = re.split(r"^## ", text, flags=re.M)
    assert parts[0].startswith(f"# {rule}\n")
    assert [part.splitlines()[0] for part in parts[1:]] == [
        "The provider's change",
        "The consumer's code",
        "The error",
        "The fix",
    ]
    assert all(len(part.split("\n", 1)[1].strip()) > 3 for part in parts[1:])


def walk(value: Any) -> Any:
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from walk(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from walk(inner)


@pytest.mark.parametrize("contract", rules.contracts(), ids=lambda contract: contract["id"])
def test_no_contract_decides_by_a_version_and_all_its_patterns_compile(contract: dict[str, Any]) -> None:
    for part in walk({key: contract.get(key) for key in ("uses", "absent", "shape", "cases")}):
        assert not {"version", "release", "since", "until"} & part.keys()
        for key in ("pattern", "unless", "has", "result", "result_not", "in_loop"):
            if key in part:
                patterns.compile_pattern(part[key])
        for text in (part.get("has_text"), part.get("string")):
            assert text is None or re.compile(text)


def test_a_fix_is_a_recipe_that_exists() -> None:
    for contract in rules.contracts():
        for part in (contract, *contract.get("cases", ())):
            fix = part.get("fix") or {}
            assert fix.get("recipe", next(iter(recipes.load()))) in recipes.load()


def audit(consumer: str, provider: str, model: str | None = None) -> dict[str, Any]:
    assert TREES is not None
    request = {
        "consumer": "speculators", "consumer_path": f"{TREES}/speculators-{consumer}", "provider": "vllm",
        "provider_path": f"{TREES}/vllm-{provider}", "contracts": [*rules.contracts()], "model": model,
    }  # fmt: skip
    return engine.audit(request)


def releases(package: str) -> list[str]:
    found = [path.name.removeprefix(package + "-") for path in Path(TREES or "/nonexistent").glob(f"{package}-*")]
    return sorted(found, key=Version)


def contracts_of(document: dict[str, Any]) -> set[tuple[str, int]]:
    return {(f["rule"], f["line"]) for f in document["findings"] if f["contract"] and f["confidence"] == "contract"}


def expected_030(release: str) -> set[tuple[str, int]]:
    """What was read by hand in the sources of each release (and seen in runs for several)."""
    version, found = Version(release), set()
    if version >= Version("0.11.1"):
        found |= {("single-reply", 267), ("chunked-prefill-default", 194)}
    if Version("0.11.1") <= version < Version("0.22"):
        found.add(("sample-tokens-second-call", 261))
    if version >= Version("0.12"):
        found.add(("prefix-caching-default", 166))
    if version >= Version("0.29"):
        found.add(("kv-layout-unresolved", 156 if version >= Version("0.33") else 136))
    return found


def expected_040(release: str) -> set[tuple[str, int]]:
    version, found = Version(release), set()
    if version <= Version("0.11.0"):
        found.add(("list-reply", 323))
    if version >= Version("0.29"):
        found.add(("kv-layout-unresolved", 163 if version >= Version("0.33") else 143))
    return found


@needs_trees
@pytest.mark.parametrize("release", releases("vllm"))
def test_behaviour_breaks_of_0_3_0_on_every_release(release: str) -> None:
    assert contracts_of(audit("0.3.0", release)) == expected_030(release)


@needs_trees
@pytest.mark.parametrize("release", releases("vllm"))
def test_behaviour_breaks_of_0_4_0_1_on_every_release(release: str) -> None:
    document = audit("0.4.0.1", release)
    found = contracts_of(document)
    assert found - {("v2-runner-input-batch", 106)} == expected_040(release)
    batch = [f["confidence"] for f in document["findings"] if f["line"] == 106 and f["detail"] == "input_batch"]
    if Version(release) >= Version("0.29"):
        assert batch and "risk" not in batch
    else:
        assert set(batch) <= {"risk"}


@needs_trees
@pytest.mark.parametrize(
    ("consumer", "provider", "broken"),
    [
        ("0.5.0", "0.16.0", {"no-hidden-states-connector"}),
        ("0.5.0", "0.17.0", {"last-layer-not-captured"}),
        ("0.5.0", "0.21.0", set()),
        ("0.5.0", "0.32.0", {"client-ignores-lock"}),
        ("0.6.0", "0.32.0", set()),
        ("0.9.0", "0.14.0", {"no-hidden-states-connector", "render-endpoint-missing"}),
        ("0.9.0", "0.32.0", set()),
    ],
)
def test_client_and_server_releases_fit_as_they_did_in_runs(consumer: str, provider: str, broken: set[str]) -> None:
    assert {rule for rule, _ in contracts_of(audit(consumer, provider))} == broken


@needs_trees
@pytest.mark.parametrize(
    ("provider", "model", "confidence"),
    [
        ("0.33.0", "KimiK25ForConditionalGeneration", None),
        ("0.16.0", "DeepseekV3ForCausalLM", "contract"),
        ("0.16.0", "LlamaForCausalLM", None),
        ("0.20.2", "DeepseekV3ForCausalLM", None),
    ],
)
def test_the_capability_gate_is_judged_by_the_model(provider: str, model: str, confidence: str | None) -> None:
    document = audit("0.3.0", provider, model)
    assert next((f["confidence"] for f in document["findings"] if f["rule"] == "eagle3-gate"), None) == confidence


@needs_trees
@pytest.mark.parametrize(
    ("provider", "model", "lines"),
    [("0.33.0", "KimiK25ForConditionalGeneration", [107]), ("0.33.0", "LlamaForCausalLM", []), ("0.33.0", None, [])],
)
def test_a_vision_language_class_has_no_attribute_model(provider: str, model: str | None, lines: list[int]) -> None:
    document = audit("0.3.0", provider, model)
    assert [f["line"] for f in document["findings"] if f["rule"] == "base-model-path"] == lines
