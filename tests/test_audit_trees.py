"""The hand-checked truth on real releases; runs where REMOTEOPS_TREES names a folder of <package>-<version> trees.

Beside them it may hold ``truth`` (truth.jsonl, silent.jsonl, ok.jsonl, conditional.jsonl).
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import pytest

from remoteops import rules
from remoteops.agent.audit import engine

TREES = Path(os.environ.get("REMOTEOPS_TREES", "/nonexistent"))
TRUTH = Path(os.environ.get("REMOTEOPS_TRUTH", str(TREES / "truth")))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (TRUTH / "truth.jsonl").exists(), reason="REMOTEOPS_TREES and its truth are not here"),
]


def records(name):
    path = TRUTH / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@functools.cache
def document(consumer, provider):
    paths = {
        f"{side}_path": str(TREES / spec.replace("==", "-"))
        for side, spec in (("consumer", consumer), ("provider", provider))
    }
    names = {"consumer": consumer.split("==")[0], "provider": provider.split("==")[0]}
    return engine.audit({**names, **paths, "contracts": list(rules.contracts())})


def findings(record):
    found = document(record["consumer"], record["provider"])["findings"]
    return [f for f in found if (f["file"], f["line"], f["kind"]) == (record["file"], record["line"], record["kind"])]


def test_every_true_break_is_found_where_it_is():
    missed = []
    for record in [*records("truth.jsonl"), *records("silent.jsonl")]:
        found = [f for f in findings(record) if f["confidence"] != "risk"]
        if record["kind"] in ("unknown-kwarg", "missing-required"):
            found = [f for f in found if (f["detail"], f["symbol"]) == (record["detail"], record["symbol"])]
        if not found:
            missed.append((record["provider"], record["line"], record["kind"]))
    assert not missed


def test_no_fine_site_is_called_a_break():
    assert not [f for record in records("ok.jsonl") for f in findings(record) if f["confidence"] != "risk"]


def test_conditional_breaks_are_risks():
    for record in records("conditional.jsonl"):
        assert [f for f in findings(record) if f["confidence"] == "risk"], record


def test_nothing_is_called_a_break_that_is_not_in_the_truth():
    true = {
        (r["provider"], r["file"], r["line"], r["kind"]) for r in [*records("truth.jsonl"), *records("silent.jsonl")]
    }
    pairs = {(r["consumer"], r["provider"]) for r in records("ok.jsonl")}
    wrong = [
        (p, f["file"], f["line"], f["kind"])
        for c, p in sorted(pairs)
        for f in document(c, p)["findings"]
        if f["confidence"] != "risk"
    ]
    assert not [w for w in wrong if w not in true]
