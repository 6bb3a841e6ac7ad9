"""Which rows of which prompt a scheduler step computes (no torch, no vLLM import; duck-typed on vLLM's scheduler
output).

One step runs a flat batch: the tokens of several requests one after the other, in the order of the model runner's own
batch. A request may be cut into chunks over several steps, and may start again from its first token after a
preemption.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Mapping, Sequence, Tuple


@dataclass(frozen=True)
class Chunk:
    """Rows ``[start, start + count)`` of the prompt of ``request``, which has ``total`` tokens."""

    request: str
    start: int
    count: int
    total: int

    @property
    def first(self) -> bool:
        return self.start == 0

    @property
    def last(self) -> bool:
        return self.start + self.count >= self.total


class CaptureError(Exception):
    """The engine did not compute what it was asked to; the message names the request and the rows."""


def starts(scheduler_output: Any) -> Dict[str, int]:
    """Tokens already computed before this step, for each scheduled request.

    New requests carry it one by one. Running ones come as one object of parallel lists, or (before that) as a list of
    objects.
    """
    found: Dict[str, int] = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
    cached = scheduler_output.scheduled_cached_reqs
    if hasattr(cached, "req_ids"):
        found.update(zip(cached.req_ids, cached.num_computed_tokens))
    else:
        found.update({one.req_id: one.num_computed_tokens for one in cached})
    return found


def chunks_of(scheduler_output: Any, totals: Mapping[str, int]) -> List[Chunk]:
    """The step's chunks; ``totals`` gives each request's prompt length.

    Raises CaptureError for a request that nobody asked for or a step beyond a prompt's end.
    """
    begun = starts(scheduler_output)
    result = []
    for request, count in scheduler_output.num_scheduled_tokens.items():
        if request not in totals or request not in begun:
            raise CaptureError("the scheduler ran a request that was not asked for: %s" % request)
        chunk = Chunk(request, int(begun[request]), int(count), totals[request])
        if chunk.start + chunk.count > chunk.total:
            raise CaptureError(
                "%s: rows %d..%d of a prompt of %d tokens were scheduled"
                % (request, chunk.start, chunk.start + chunk.count, chunk.total)
            )
        result.append(chunk)
    return result


def placed(chunks: Iterable[Chunk], order: Sequence[Any]) -> List[Tuple[int, Chunk]]:
    """``(offset in the flat batch, chunk)`` in the batch's own order of request ids.

    ``order`` may hold requests that this step does not run (they take no rows). Raises CaptureError when a chunk's
    request is not in the batch: its rows would be unknown.
    """
    by_request = {chunk.request: chunk for chunk in chunks}
    result, offset = [], 0
    for request in order:
        chunk = by_request.pop(request, None) if request is not None else None
        if chunk is not None:
            result.append((offset, chunk))
            offset += chunk.count
    if by_request:
        raise CaptureError("not in the model runner's batch: %s" % ", ".join(sorted(by_request)))
    return result


class Coverage:
    """How much of one prompt has arrived. A chunk that starts over (preemption) is taken; a gap is an error."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.rows = 0

    def add(self, chunk: Chunk) -> bool:
        """True when the prompt is complete now. Raises CaptureError on rows that were never computed."""
        if chunk.start > self.rows:
            raise CaptureError(
                "%s: rows %d..%d were never computed (a prefix cache that is on?)"
                % (chunk.request, self.rows, chunk.start)
            )
        self.rows = chunk.start + chunk.count
        return self.rows >= self.total
