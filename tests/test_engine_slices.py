"""Which rows of which prompt a scheduler step computes, and when a prompt is complete."""

from __future__ import annotations

from types import SimpleNamespace as NS
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remoteops.agent.extraction.slices import CaptureError, Chunk, Coverage, chunks_of, placed, starts
from remoteops.agent.extraction.tracker import PromptTracker, cache_group, row_index


def step(new: dict[str, tuple[int, int]], running: dict[str, tuple[int, int]] | None = None, **extra: Any) -> NS:
    """A scheduler output: request -> (already computed, scheduled now)."""
    running = running or {}
    cached = NS(
        req_ids=list(running),
        num_computed_tokens=[begun for begun, _ in running.values()],
        new_block_ids=extra.pop("blocks", [None] * len(running)),
        resumed_req_ids=extra.pop("resumed", set()),
    )
    return NS(
        scheduled_new_reqs=[
            NS(
                req_id=name,
                num_computed_tokens=begun,
                prompt_token_ids=extra.get("prompts", {}).get(name),
                block_ids=extra.get("new_blocks", {}).get(name, ([],)),
            )
            for name, (begun, _) in new.items()
        ],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={name: now for name, (_, now) in {**new, **running}.items()},
    )


def test_new_and_running_requests_start_where_the_scheduler_says() -> None:
    assert starts(step({"a": (0, 5)}, {"b": (16, 8)})) == {"a": 0, "b": 16}


def test_an_older_scheduler_sends_running_requests_as_a_list() -> None:
    output = step({"a": (0, 5)})
    output.scheduled_cached_reqs = [NS(req_id="b", num_computed_tokens=7)]
    assert starts(output) == {"a": 0, "b": 7}


def test_chunks_name_their_rows_and_the_last_one_is_known() -> None:
    first, last = chunks_of(step({"a": (0, 5)}, {"b": (16, 8)}), {"a": 9, "b": 24})
    assert (first, first.first, first.last) == (Chunk("a", 0, 5, 9), True, False)
    assert (last, last.first, last.last) == (Chunk("b", 16, 8, 24), False, True)


def test_a_step_beyond_the_prompt_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"rows 8\.\.10 of a prompt of 9"):
        chunks_of(step({}, {"a": (8, 2)}), {"a": 9})


def test_a_request_that_nobody_asked_for_is_refused() -> None:
    with pytest.raises(CaptureError, match="ghost"):
        chunks_of(step({"ghost": (0, 1)}), {})


def test_rows_lie_in_the_order_of_the_batch_not_of_the_scheduler() -> None:
    a, b, c = Chunk("a", 0, 3, 3), Chunk("b", 0, 2, 9), Chunk("c", 4, 5, 9)
    assert placed([a, b, c], ["c", "finished", None, "a", "b"]) == [(0, c), (5, a), (8, b)]


def test_a_chunk_outside_the_batch_is_an_error() -> None:
    with pytest.raises(CaptureError, match="b"):
        placed([Chunk("a", 0, 1, 1), Chunk("b", 0, 1, 1)], ["a"])


def test_a_preempted_prompt_may_start_over() -> None:
    cover = Coverage(10)
    assert not cover.add(Chunk("a", 0, 6, 10))
    assert not cover.add(Chunk("a", 0, 4, 10))
    assert cover.add(Chunk("a", 4, 6, 10))


def test_rows_that_a_prefix_cache_skipped_are_an_error() -> None:
    with pytest.raises(CaptureError, match=r"rows 0\.\.16 were never computed"):
        Coverage(20).add(Chunk("a", 16, 4, 20))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_schedule_that_covers_a_prompt_completes_it_exactly_at_its_end(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 60))
    rows, at, cover, complete = [-1] * total, 0, Coverage(total), False
    while not complete:
        if at and data.draw(st.booleans()):
            at = 0  # preempted
        count = data.draw(st.integers(1, total - at))
        complete = cover.add(Chunk("a", at, count, total))
        rows[at : at + count] = range(at, at + count)
        at += count
        assert complete == (at == total)
    assert rows == list(range(total))


# the connector's scheduler side


def test_a_prompt_is_saved_once_in_the_step_that_completes_it() -> None:
    tracker = PromptTracker()
    prompts = {"row-3": list(range(20))}
    assert tracker.step(step({"row-3": (0, 8)}, prompts=prompts, new_blocks={"row-3": ([7],)})) == []
    saves = tracker.step(step({}, {"row-3": (8, 12)}, blocks=[([9, 4],)]))
    assert [(save.index, save.token_ids, save.block_ids) for save in saves] == [(3, list(range(20)), [7, 9, 4])]
    assert tracker.step(step({}, {"row-3": (20, 1)})) == []


def test_a_resumed_request_has_only_its_new_blocks() -> None:
    tracker = PromptTracker()
    tracker.step(step({"row-1-ab12": (0, 8)}, prompts={"row-1-ab12": [1] * 16}, new_blocks={"row-1-ab12": ([7],)}))
    saves = tracker.step(step({}, {"row-1-ab12": (0, 16)}, blocks=[([2, 3],)], resumed={"row-1-ab12"}))
    assert saves[0].index == 1 and saves[0].block_ids == [2, 3]


def test_a_request_that_comes_back_as_new_starts_over() -> None:
    tracker = PromptTracker()
    tracker.step(step({"row-1": (0, 8)}, prompts={"row-1": [1] * 16}, new_blocks={"row-1": ([7],)}))
    saves = tracker.step(step({"row-1": (0, 16)}, prompts={"row-1": [1] * 16}, new_blocks={"row-1": ([5, 6],)}))
    assert saves[0].block_ids == [5, 6]


def test_blocks_come_from_the_hidden_states_own_group() -> None:
    class HiddenStateCacheSpec:
        block_size = 4

    class FullAttentionSpec:
        block_size = 16

    groups = NS(kv_cache_groups=[NS(kv_cache_spec=FullAttentionSpec()), NS(kv_cache_spec=HiddenStateCacheSpec())])
    assert cache_group(groups, 16) == (1, 4)
    assert cache_group(None, 16) == (0, 16)
    tracker = PromptTracker(group=1)
    saves = tracker.step(step({"row-0": (0, 4)}, prompts={"row-0": [1] * 4}, new_blocks={"row-0": ([1], [8])}))
    assert saves[0].block_ids == [8]


@pytest.mark.parametrize("name,index", [("row-0", 0), ("row-12", 12), ("row-7-a1b2", 7)])
def test_a_row_is_read_from_its_request(name: str, index: int) -> None:
    assert row_index(name) == index


@pytest.mark.parametrize("name", ["row-", "cmpl-1", "7", "arow-1"])
def test_a_stranger_is_not_taken_for_a_row(name: str) -> None:
    with pytest.raises(ValueError, match="no request of remoteops"):
        row_index(name)
