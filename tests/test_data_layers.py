"""Layer ids: one convention, the default, collisions, translation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remoteops.agent.extraction import layers
from remoteops.agent.protocol import AgentError


@pytest.mark.parametrize(
    ("depth", "ids"), [(61, [2, 30, 58, 61]), (32, [2, 16, 29, 32]), (36, [2, 18, 33, 36]), (8, [2, 4, 5, 8])]
)
def test_default_ids_are_those_a_server_would_feed_the_draft(depth: int, ids: list[int]) -> None:
    assert layers.resolve("default", depth) == ids
    assert layers.resolve(None, depth) == ids


@given(st.integers(4, 200))
def test_default_ids_never_collide_and_always_end_with_the_last_state(depth: int) -> None:
    ids = layers.resolve("default", depth)
    assert len(set(ids)) == 4
    assert ids == sorted(ids)
    assert ids[-1] == depth
    assert ids[0] >= 1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_model_too_shallow_for_the_default_is_refused_with_ids_to_name(depth: int) -> None:
    with pytest.raises(AgentError, match="no three different inner layers") as caught:
        layers.resolve("default", depth)
    assert "--layers" in caught.value.hint


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ([2, 9], "outside 0..8"),
        ([-1, 8], "outside 0..8"),
        ([2, 2, 8], "twice"),
        ([8, 2], "ascend"),
        ("2,x", "whole numbers"),
        ([], "no layer ids"),
    ],
)
def test_ids_that_make_no_sense_are_refused(asked: object, told: str) -> None:
    with pytest.raises(AgentError, match=told) as caught:
        layers.resolve(asked, 8)  # type: ignore[arg-type]
    assert caught.value.kind == "UsageError"


def test_ids_may_come_as_text() -> None:
    assert layers.resolve("0, 3,8", 8) == [0, 3, 8]


def test_the_librarys_own_generator_counts_one_less_and_cannot_name_the_embedding() -> None:
    assert layers.translate([2, 30, 58, 61], "generator-stock") == [1, 29, 57, 60]
    assert layers.translate([0, 61], "connector") == layers.translate([0, 61], "generator") == [0, 61]
    with pytest.raises(AgentError, match="embedding"):
        layers.translate([0, 8], "generator-stock")


def test_what_a_trainer_would_trip_over_is_said() -> None:
    assert layers.concerns([2, 4, 5, 8], 8) == []
    assert "id 8" in " ".join(layers.concerns([2, 4, 5, 7], 8))
    assert "expect 4" in " ".join(layers.concerns([2, 5, 8], 8))
