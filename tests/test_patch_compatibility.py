"""docs/compatibility.md is what bench/compatibility.json gives, and holds for the pair that is installed here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from remoteops import sources

BENCH = Path(__file__).resolve().parent.parent / "bench" / "compatibility.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compatibility", BENCH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_figures_give(bench: ModuleType) -> None:
    assert bench.PAGE.read_text() == bench.page(bench.load())


def test_every_documented_pair_is_clean_after_its_plan_or_says_why_not(bench: ModuleType) -> None:
    results = bench.load()
    assert {"0.3.0", "0.4.0.1"} <= set(results["pairs"])
    for consumer, providers in results["pairs"].items():
        assert {"0.11.0", "0.12.0", "0.16.0", "0.17.1", "0.20.2", "0.33.0"} <= set(providers), consumer
        for provider, record in providers.items():
            assert "error" not in record, (consumer, provider)
            assert record["breaks_after"] == 0 or record["left"], (consumer, provider)


def test_real_extractions_were_equal_to_transformers(bench: ModuleType) -> None:
    runs = bench.load()["runs"]
    assert {"0.12.0", "0.16.0", "0.17.1"} <= set(runs["0.3.0"])
    assert {"0.12.0", "0.16.0", "0.17.1", "0.32.0"} <= set(runs["0.4.0.1"])
    for consumer, provider, run in [(c, p, run) for c, of in runs.items() for p, run in of.items()]:
        if "error" in run:  # told as it is on the page, and only where transformers 5 is in the way
            assert provider >= "0.28" and "torch" in run["error"], (consumer, provider)
            continue
        assert "refused" not in run, (consumer, provider)
        for name, scenario in run["scenarios"].items():
            assert scenario["wrong"] == 0 and scenario["max_relative_error"] < 1e-5, (consumer, provider, name)


def test_trees_that_are_at_hand_are_as_documented(bench: ModuleType) -> None:
    """The cheap part of the table, again: nothing is downloaded."""
    results = bench.load()
    consumers = [tree for v in results["pairs"] if (tree := sources.cached(f"speculators=={v}"))]
    providers = [tree for v in results["pairs"]["0.3.0"] if (tree := sources.cached(f"vllm=={v}"))]
    if not consumers or not providers:
        pytest.skip("no sources of speculators and vllm in the cache (fab matrix fetches them)")
    for consumer in consumers[:1]:
        for provider in providers[:1]:
            record, told = bench.pair(consumer, provider), results["pairs"][consumer.version][provider.version]
            assert (record["breaks"], record["breaks_after"], record["left"]) == (
                told["breaks"],
                told["breaks_after"],
                told["left"],
            )
