"""The part of the ``generator`` engine that runs inside vLLM's worker processes.

vLLM mixes ``HiddenStatesWorker`` into its worker class (``worker_extension_cls``), so every method is an RPC; all
names start with ``remoteops_``, but for three that speculators' generator calls while it starts. Spawned workers
import this module from the agent archive on PYTHONPATH. Only rank 0 keeps states and writes; the others run the same
steps.
"""

from __future__ import annotations

import os
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from remoteops.agent.extraction.capture import Capture
from remoteops.agent.extraction.slices import CaptureError, Chunk
from remoteops.agent.extraction.writer import Sample, Writer

CLASS_PATH = "remoteops.agent.extraction.worker.HiddenStatesWorker"


class Setup(NamedTuple):
    """What every rank is told once. ``memory``: bytes of host memory for samples on their way to disk."""

    layers: List[int]
    layout: str
    max_tokens: int
    memory: int
    threads: int
    store: Any
    gate: Any


class HiddenStatesWorker:
    """Mixed into vLLM's worker: ``self.model_runner``, ``self.rank``, ``self.device``, ``self.execute_model`` are the
    worker's."""

    model_runner: Any
    device: Any

    def remoteops_open(self, setup: Setup) -> Dict[str, Any]:
        """Install the hooks. The reply says what this rank is, so that the caller can see that all ranks agree."""
        from vllm.distributed import get_tp_group

        runner = self.model_runner
        config = runner.model_config
        rank = get_tp_group().rank_in_group
        device = torch.device(getattr(runner, "device", None) or self.device)
        self.remoteops_capture = Capture(
            setup.layers,
            layout=setup.layout,
            hidden=config.get_hidden_size(),
            dtype=config.dtype,
            device=device,
            max_tokens=setup.max_tokens,
            memory=setup.memory,
            keeps=rank == 0,
        )
        self.remoteops_capture.install(runner.model)
        self.remoteops_order = _batch_order(runner)
        self.remoteops_rows: Dict[str, Any] = {}
        self.remoteops_writer: Optional[Writer] = Writer(setup.store, setup.gate, setup.threads) if rank == 0 else None
        return {
            "rank": rank,
            "pid": os.getpid(),
            "runner": type(runner).__module__,
            "device": str(device),
            "dtype": str(config.dtype),
            "hidden": config.get_hidden_size(),
        }

    @torch.inference_mode()  # type: ignore[untyped-decorator, unused-ignore]
    def remoteops_step(self, scheduler_output: Any, chunks: Sequence[Chunk], rows: Dict[str, Any]) -> Dict[str, Any]:
        """Run one step, capture it, hand complete prompts to the writer. ``rows``: request -> Row of the prompts that
        begin here."""
        capture = self.remoteops_capture
        capture.begin(chunks)
        try:
            output = self.execute_model(scheduler_output)  # type: ignore[attr-defined]
            done = capture.end(chunks, self.remoteops_order() if capture.keeps else ())
        finally:
            capture.active = False
        _settle(self, output)
        if self.remoteops_writer is None:
            return {"step": scheduler_output.total_num_scheduled_tokens}
        self.remoteops_rows.update(rows)
        for request, states, size, ready, release in done:
            self.remoteops_writer.submit(Sample(self.remoteops_rows.pop(request), states, size, ready, release))
        return {"step": scheduler_output.total_num_scheduled_tokens, **self.remoteops_stats()}

    def remoteops_wait(self, sizes: List[int], timeout: float) -> Dict[str, Any]:
        """Wait until samples of these sizes have room on their way to disk; an empty list waits for everything
        written."""
        if self.remoteops_writer is None:
            return {}
        if sizes:
            self.remoteops_capture.ranges.wait(sizes, timeout)
        else:
            self.remoteops_writer.drain(timeout)
        return self.remoteops_stats()

    def remoteops_stats(self) -> Dict[str, Any]:
        writer = self.remoteops_writer
        return (
            {}
            if writer is None
            else {
                **writer.stats(),
                "free": self.remoteops_capture.ranges.free,
                "room": self.remoteops_capture.ranges.size,
            }
        )

    def remoteops_stop(self, requests: Sequence[str]) -> None:
        """Forget prompts that will not be finished, and do not wait for disk space any more."""
        self.remoteops_capture.forget(requests)
        if self.remoteops_writer is not None:
            self.remoteops_writer.stop()

    def remoteops_close(self) -> None:
        self.remoteops_capture.remove()
        if self.remoteops_writer is not None:
            self.remoteops_writer.close()

    # What speculators' generator calls by name while it starts; the capture is ours, so there is nothing to do.

    def _setup_hidden_states_capture(self, layer_ids: Sequence[int]) -> None:
        self.remoteops_library_layers = list(layer_ids)

    def _reset_capture(self) -> None:
        raise CaptureError("generate() of the library was called on a worker of remoteops")


def _batch_order(runner: Any) -> Any:
    """A function that gives the request ids in the order of the last step's flat batch.

    The V1 model runner keeps its batch (``input_batch.req_ids``). The V2 one makes a new one a step; its
    ``prepare_inputs`` returns it, and is watched for that. Raises CaptureError for a runner that has neither.
    """
    if hasattr(runner, "input_batch"):
        return lambda: list(runner.input_batch.req_ids)
    prepare = getattr(runner, "prepare_inputs", None)
    if prepare is None:
        raise CaptureError(
            "%s.%s keeps no batch order that is known here (neither input_batch nor prepare_inputs); "
            "use the connector engine, or VLLM_USE_V2_MODEL_RUNNER=0" % (type(runner).__module__, type(runner).__name__)
        )
    last: List[Tuple[str, ...]] = [()]

    def watched(*args: Any, **kwargs: Any) -> Any:
        batch = prepare(*args, **kwargs)
        last[0] = tuple(batch.req_ids)
        return batch

    runner.prepare_inputs = watched
    return lambda: last[0]


def _settle(worker: Any, output: Any) -> None:
    """End the step the way the model runner wants it, without waiting for a sampled token.

    The V1 runner keeps the logits for ``sample_tokens``; nobody wants a token, so the state is dropped (sampling
    would wait for the GPU). The V2 runner advances its own counters while sampling, so there it runs. Older ones have
    sampled already.
    """
    runner = worker.model_runner
    if output is not None:
        return
    if hasattr(runner, "input_batch") and hasattr(runner, "execute_model_state"):
        runner.execute_model_state = None
    elif hasattr(worker, "sample_tokens"):
        worker.sample_tokens(None)
