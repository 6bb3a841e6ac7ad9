"""Takes the residual stream at chosen depths while the model runs, and lays it out as the files need it.

Hooks on the decoder layers, so that no model's ``forward`` has to be rewritten: a layer that returns ``(hidden,
residual)`` has the sum as its state; one that returns a tensor has that. Depth k is the number of completed layers (0
= embeddings, N = after the last layer, before the final norm).

On a GPU nothing here waits: states go into one of a few device buffers, a side stream copies each prompt's rows to
pinned host memory, and an event tells the writer when they are there.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from remoteops.agent.extraction.arena import Ranges
from remoteops.agent.extraction.slices import CaptureError, Chunk, Coverage, placed

BUFFERS = 3  # one being filled, one being copied, one of slack


def decoder_layers(model: Any) -> Tuple[Any, Any]:
    """``(module that owns .layers, the layers)`` of a vLLM model: the language model inside wrappers, found by shape.

    Raises CaptureError naming what was looked at when no module list of layers is found, or when layers live on
    another pipeline rank.
    """
    seen, todo = [], [model]
    if hasattr(model, "get_language_model"):
        todo.insert(0, model.get_language_model())
    while todo:
        one = todo.pop(0)
        layers = getattr(one, "layers", None)
        if layers is not None and len(layers) and hasattr(layers[0], "forward"):
            if any(type(layer).__name__ == "PPMissingLayer" for layer in layers):
                raise CaptureError("the model is cut over pipeline ranks; use tensor parallel instead")
            return one, layers
        seen.append(type(one).__name__)
        todo += [
            getattr(one, name)
            for name in ("language_model", "model", "decoder", "transformer", "text_model")
            if getattr(one, name, None) is not None and len(seen) < 16
        ]
    raise CaptureError("no decoder layers found in %s" % " > ".join(seen))


class Capture:
    """Captures one engine process's steps. ``keeps`` is False on ranks that only take part in collectives.

    ``layout``: ``"SLH"`` (one tensor [tokens, layers, hidden] a sample) or ``"LSH"`` (a list of [tokens, hidden]).
    """

    def __init__(
        self,
        layers: Sequence[int],
        *,
        layout: str,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        max_tokens: int,
        memory: int,
        keeps: bool,
    ) -> None:
        self.ids = list(layers)
        self.layout = layout
        self.hidden = hidden
        self.dtype = dtype
        self.device = device
        self.keeps = keeps
        self.active = False
        self._total = 0
        self._turn = 0
        self._hits: List[int] = []
        self._hooks: List[Any] = []
        self._requests: Dict[str, _Pending] = {}
        self._cuda = device.type == "cuda"
        self._started: Optional[Any] = None
        shape = (max_tokens, len(self.ids), hidden) if layout == "SLH" else (len(self.ids), max_tokens, hidden)
        count = (BUFFERS if self._cuda else 1) if keeps else 0
        self._buffers = [torch.empty(shape, dtype=dtype, device=device) for _ in range(count)]
        self._copied: List[Optional[Any]] = [None] * count
        self._stream = torch.cuda.Stream(device) if self._cuda and keeps else None
        self._memory = torch.empty(memory if keeps else 0, dtype=torch.uint8, pin_memory=self._cuda)
        self.ranges = Ranges(self._memory.numel())

    def install(self, model: Any) -> None:
        _, layers = decoder_layers(model)
        if max(self.ids) > len(layers):
            raise CaptureError("layer %d was asked for; the model has %d" % (max(self.ids), len(layers)))
        self._hooks.append(layers[0].register_forward_pre_hook(self._before_first, with_kwargs=True))
        for slot, depth in enumerate(self.ids):
            if depth:
                self._hooks.append(
                    layers[depth - 1].register_forward_hook(
                        lambda _module, _args, output, slot=slot: self._take(slot, output)
                    )
                )

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def sample_bytes(self, tokens: int) -> int:
        return int(tokens * len(self.ids) * self.hidden * self.dtype.itemsize)

    # one step

    def begin(self, chunks: Sequence[Chunk]) -> None:
        """Before the model runs. Waits until the step before has read its inputs (the runner's staging buffers are
        reused)."""
        if self._started is not None:
            self._started.synchronize()
        self._total = sum(chunk.count for chunk in chunks)
        self._hits = []
        self.active = True
        if self.keeps and self._cuda:
            self._turn = (self._turn + 1) % len(self._buffers)
            copied = self._copied[self._turn]
            if copied is not None:
                torch.cuda.current_stream(self.device).wait_event(copied)

    def end(self, chunks: Sequence[Chunk], order: Sequence[Any]) -> List[Tuple[str, Any, int, Any, Any]]:
        """After the model ran: ``(request, states, bytes, ready, release)`` of every prompt that is complete now."""
        self.active = False
        if sorted(self._hits) != list(range(len(self.ids))):
            raise CaptureError(
                "the model ran without passing layers %s (compiled, or replaced by another path?)"
                % [depth for slot, depth in enumerate(self.ids) if slot not in self._hits]
            )
        if not self.keeps:
            return []
        places = placed(chunks, order)
        done = []
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                done = self._copy(places)
                event = torch.cuda.Event()
                event.record(self._stream)
            self._copied[self._turn] = event
            ready = event.synchronize
        else:
            done, ready = self._copy(places), None
        return [(request, pending.states, pending.size, ready, pending.release) for request, pending in done]

    def forget(self, requests: Sequence[str]) -> None:
        for request in requests:
            pending = self._requests.pop(request, None)
            if pending is not None:
                pending.release()

    def _copy(self, places: Sequence[Tuple[int, Chunk]]) -> List[Tuple[str, _Pending]]:
        buffer, done = self._buffers[self._turn], []
        for offset, chunk in places:
            pending = self._requests.get(chunk.request)
            if pending is None:
                pending = self._requests[chunk.request] = self._reserve(chunk.total)
            rows, source = slice(chunk.start, chunk.start + chunk.count), slice(offset, offset + chunk.count)
            if self.layout == "SLH":
                pending.states[rows].copy_(buffer[source], non_blocking=True)
            else:
                for slot, state in enumerate(pending.states):
                    state[rows].copy_(buffer[slot, source], non_blocking=True)
            if pending.coverage.add(chunk):
                done.append((chunk.request, self._requests.pop(chunk.request)))
        return done

    def _reserve(self, tokens: int) -> _Pending:
        size = self.sample_bytes(tokens)
        offset = self.ranges.take(size)
        # The caller asked for room before the step; what does not fit all the same (a sample larger than the whole
        # piece, or fragments) gets memory of its own rather than a deadlock.
        flat = self._memory[offset : offset + size] if offset is not None else torch.empty(size, dtype=torch.uint8)
        values = flat.view(self.dtype)
        states: Any
        if self.layout == "SLH":
            states = values.view(tokens, len(self.ids), self.hidden)
        else:
            states = list(values.view(len(self.ids), tokens, self.hidden).unbind(0))
        return _Pending(tokens, size, states, self.ranges, offset)

    # hooks

    def _before_first(self, _module: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
        if not self.active:
            return
        if self._cuda:
            if self._started is None:
                self._started = torch.cuda.Event()
            self._started.record(torch.cuda.current_stream(self.device))
        for slot, depth in enumerate(self.ids):
            if depth == 0:
                hidden = kwargs.get("hidden_states")
                if hidden is None:
                    hidden = next((one for one in args if torch.is_tensor(one) and one.is_floating_point()), None)
                if hidden is None:
                    raise CaptureError(
                        "the first layer gets no hidden states by a name known here; layer 0 is not available"
                    )
                self._take(slot, hidden)

    def _take(self, slot: int, output: Any) -> None:
        if not self.active:
            return
        hidden, residual = output if isinstance(output, tuple) and len(output) == 2 else (output, None)
        if isinstance(hidden, tuple):
            hidden, residual = hidden[0], None
        if not torch.is_tensor(hidden):
            raise CaptureError("a decoder layer returned %s; states cannot be read from it" % type(output).__name__)
        if hidden.shape[0] < self._total:
            # Sequence parallel: each rank holds a part of the rows. A collective, so every rank comes here.
            from vllm.distributed import tensor_model_parallel_all_gather

            hidden = tensor_model_parallel_all_gather(hidden if residual is None else hidden + residual, 0)
            residual = None
        self._hits.append(slot)
        if not self.keeps:
            return
        rows = self._total
        buffer = self._buffers[self._turn]
        target = buffer[:rows, slot] if self.layout == "SLH" else buffer[slot, :rows]
        if residual is None:
            target.copy_(hidden[:rows])
        else:
            torch.add(hidden[:rows], residual[:rows], out=target)


class _Pending:
    """A prompt on its way: its host memory and how much of it is filled."""

    def __init__(self, tokens: int, size: int, states: Any, ranges: Ranges, offset: Optional[int]) -> None:
        self.coverage = Coverage(tokens)
        self.size = size
        self.states = states
        self._ranges = ranges
        self._offset = offset

    def release(self) -> None:
        if self._offset is not None:
            self._ranges.give(self._offset, self.size)
            self._offset = None
