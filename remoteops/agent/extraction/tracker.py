"""Follows prompts through vLLM's scheduler until they are complete (no torch, no vLLM import; duck-typed on the
scheduler's output)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Dict, List, Tuple


@dataclass(frozen=True)
class Save:
    """A prompt whose states are complete after this step."""

    index: int
    token_ids: List[int]
    block_ids: List[int]


class PromptTracker:
    """Scheduler side: follows each request's blocks and computed tokens until its prompt is complete. No vLLM
    types."""

    def __init__(self, group: int = 0) -> None:
        self._group = group
        self._prompts: Dict[str, List[int]] = {}
        self._blocks: Dict[str, List[int]] = {}

    def step(self, output: Any) -> List[Save]:
        """The prompts that this step completes, each once."""
        computed: Dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self._prompts[new.req_id] = list(new.prompt_token_ids or [])
            self._blocks[new.req_id] = list(new.block_ids[self._group])
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        resumed = getattr(cached, "resumed_req_ids", None)
        flags = getattr(cached, "resumed_from_preemption", None)
        for at, request in enumerate(cached.req_ids):
            if request not in self._prompts:
                continue
            blocks = cached.new_block_ids[at]
            again = request in resumed if resumed is not None else bool(flags and flags[at])
            if again:
                self._blocks[request] = list(blocks[self._group]) if blocks else []
            elif blocks:
                self._blocks[request] += blocks[self._group]
            computed[request] = cached.num_computed_tokens[at]
        saves = []
        for request, begun in computed.items():
            prompt = self._prompts[request]
            if begun + output.num_scheduled_tokens.get(request, 0) >= len(prompt):
                saves.append(Save(row_index(request), prompt, self._blocks.pop(request)))
                del self._prompts[request]
        return saves

    def forget(self, request: str) -> None:
        self._prompts.pop(request, None)
        self._blocks.pop(request, None)


def row_index(request: str) -> int:
    """The row of a request id: vLLM may have added a suffix to the ``row-N`` it was given. Raises ValueError for a
    stranger."""
    match = re.match(r"row-(\d+)(\D|$)", request)
    if match is None:
        raise ValueError("no request of remoteops: %s" % request)
    return int(match.group(1))


def cache_group(kv_cache_config: Any, block_size: int) -> Tuple[int, int]:
    """``(group, block size)`` of the hidden states' KV cache: its own group where there are several, else the only
    one."""
    groups = list(getattr(kv_cache_config, "kv_cache_groups", None) or [])
    marked = [at for at, group in enumerate(groups) if type(group.kv_cache_spec).__name__ == "HiddenStateCacheSpec"]
    at = marked[0] if len(marked) == 1 else 0
    return (at, int(groups[at].kv_cache_spec.block_size)) if groups else (0, int(block_size))
