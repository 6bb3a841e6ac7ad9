"""The part of the ``connector`` engine that runs inside vLLM: a KV connector that writes samples as they are read by
trainers.

vLLM's extract_hidden_states keeps the states of a prompt in a KV cache of their own. Its example connector copies
them out of there into a staging file under the GIL, in the order of the scheduler's list (0.22-0.23), and holds
blocks until every rank has said so (0.24-0.30, which leaks with tensor parallel). This one is told by its scheduler
side which prompts are complete in a step and in which blocks they lie, gathers them in one piece right after they are
cached, and frees nothing late. Loaded by ``kv_connector_module_path``; the stock class is kept as the base for what
differs by release: cache layout, registration, block size.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as stock
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from remoteops.agent import lines
from remoteops.agent.disk import Gate
from remoteops.agent.extraction.arena import Ranges
from remoteops.agent.extraction.formats import Store
from remoteops.agent.extraction.tracker import PromptTracker, Save, cache_group
from remoteops.agent.extraction.writer import Sample, Writer

MODULE_PATH = "remoteops.agent.extraction.kv_connector"
CLASS_NAME = "RowConnector"
SETTINGS = "remoteops"  # key in kv_connector_extra_config
ERRORS = "writer.errors"  # in the run directory: one JSON line {"index", "error"} a sample that could not be written
STOP = "writer.stop"  # in the run directory: made to give up waiting for disk space


class RowMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler side tells the worker side each step."""

    def __init__(self) -> None:
        self.saves: List[Save] = []


class RowConnector(stock.ExampleHiddenStatesConnector):  # type: ignore[misc]
    """See the module. Settings (JSON) come in kv_connector_extra_config["remoteops"]."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._settings: Dict[str, Any] = self._kv_transfer_config.get_from_extra_config(SETTINGS, {})
        group, block_size = cache_group(kv_cache_config, vllm_config.cache_config.block_size)
        self._row_block_size = block_size
        self._tracker = PromptTracker(group)
        self._sink: Optional[_Sink] = None

    # scheduler side

    def build_connector_meta(self, scheduler_output: Any) -> RowMetadata:
        meta = RowMetadata()
        meta.saves = self._tracker.step(scheduler_output)
        return meta

    def request_finished(self, request: Any, block_ids: Any) -> Tuple[bool, Optional[Dict[str, Any]]]:
        self._tracker.forget(request.request_id)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Tuple[bool, Optional[Dict[str, Any]]]:
        return self.request_finished(request, block_ids)

    # worker side

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if layer_name not in self.cache_layers or not self.has_connector_metadata():
            return
        metadata = self._get_connector_metadata()
        if not isinstance(metadata, RowMetadata) or not metadata.saves:
            return
        if self._sink is None:
            from vllm.distributed import get_tensor_model_parallel_rank

            self._sink = _Sink(self._settings, kv_layer.device, keeps=get_tensor_model_parallel_rank() == 0)
        self._sink.take(metadata.saves, kv_layer, self._row_block_size)
        metadata.saves = []

    def wait_for_save(self) -> None:
        """Nothing to wait for: the gather is on the model's stream, and writing has its own memory."""

    def register_kv_caches(self, kv_caches: Dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        _cache_in_wide_pieces()

    def get_finished(self, finished_req_ids: Any) -> Tuple[None, None]:
        return None, None

    def get_finished_count(self) -> Optional[int]:
        return 1

    def shutdown(self) -> None:
        if self._sink is not None:
            self._sink.close()


class _Sink:
    """Rank 0's way from the cache to the files."""

    def __init__(self, settings: Dict[str, Any], device: torch.device, *, keeps: bool) -> None:
        self._keeps = keeps
        if not keeps:
            return
        self._cuda = device.type == "cuda"
        self._split = settings["format"] == "speculators-v1"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._memory = torch.empty(int(settings["memory"]), dtype=torch.uint8, pin_memory=self._cuda)
        self._ranges = Ranges(self._memory.numel())
        self._rows = _Rows(settings)
        self._errors = os.path.join(settings["run"], ERRORS)
        self._stop = os.path.join(settings["run"], STOP)
        self._reported = 0
        store = Store(settings["out"], settings["format"], settings["layers"], "connector", sync=settings["sync"])
        self._writer = Writer(
            store,
            _StoppableGate(Gate(settings["out"], int(settings["reserve"]), settings["run"]), self._stop),
            int(settings["threads"]),
            failed=self._failed,
        )

    def take(self, saves: Sequence[Save], kv_layer: torch.Tensor, block_size: int) -> None:
        if not self._keeps:
            return
        total = sum(len(save.token_ids) for save in saves)
        slots = torch.empty(total, dtype=torch.long, pin_memory=self._cuda)
        offset = 0
        for save in saves:
            length = len(save.token_ids)
            blocks = torch.tensor(save.block_ids[: (length + block_size - 1) // block_size], dtype=torch.long)
            slots[offset : offset + length] = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[
                :length
            ]
            offset += length
        states = stock.extract_from_kv_cache(wide(kv_layer), slots.to(kv_layer.device, non_blocking=True), total).view(
            kv_layer.dtype
        )
        size = states[0].numel() * states.element_size()
        while not self._ranges.wait([size * len(save.token_ids) for save in saves], 1.0):
            if os.path.exists(self._stop):
                break  # what waits is dropped by the writer; what comes now finds room or memory of its own
        samples, offset = [], 0
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(kv_layer.device))
            with torch.cuda.stream(self._stream):
                for save in saves:
                    samples.append(self._copy(save, states[offset : offset + len(save.token_ids)]))
                    offset += len(save.token_ids)
                event = torch.cuda.Event()
                event.record(self._stream)
            states.record_stream(self._stream)
            ready = event.synchronize
        else:
            for save in saves:
                samples.append(self._copy(save, states[offset : offset + len(save.token_ids)]))
                offset += len(save.token_ids)
            ready = None
        for sample in samples:
            sample.ready = ready
            self._writer.submit(sample)

    def close(self) -> None:
        if self._keeps:
            self._writer.drain(60.0)
            self._writer.close()

    def _copy(self, save: Save, states: torch.Tensor) -> Sample:
        size = states.numel() * states.element_size()
        offset = self._ranges.take(size)
        flat = self._memory[offset : offset + size] if offset is not None else torch.empty(size, dtype=torch.uint8)
        host = flat.view(states.dtype)
        kept: Any
        if self._split:
            kept = list(host.view(states.shape[1], states.shape[0], states.shape[2]).unbind(0))
            for slot, one in enumerate(kept):
                one.copy_(states[:, slot], non_blocking=True)
        else:
            kept = host.view(states.shape)
            kept.copy_(states, non_blocking=True)
        return Sample(
            self._rows.get(save), kept, size, None, None if offset is None else lambda: self._ranges.give(offset, size)
        )

    def _failed(self, index: int, error: str) -> None:
        try:
            lines.append(self._errors, json.dumps({"index": index, "error": error}).encode() + b"\n", mode=0o644)
        except OSError as problem:  # the engine's side notices that the row never came; the log says why
            sys.stderr.write("row %d could not be written: %s (nor told: %s)\n" % (index, error, problem))


class _Rows:
    """Rows by index. Token ids come with the prompt; loss masks (needed by one format only) from the output folder's
    rows."""

    def __init__(self, settings: Dict[str, Any]) -> None:
        self._masks: Optional[Dict[int, List[int]]] = None
        if settings["format"] == "speculators-v1":
            from remoteops.agent.extraction.output import read_rows

            self._masks = {row.index: row.loss_mask for row in read_rows(settings["out"])}

    def get(self, save: Save) -> Any:
        from remoteops.agent.extraction.dataset import Row

        return Row(save.index, save.token_ids, [] if self._masks is None else self._masks[save.index])


class _StoppableGate:
    """The disk gate, given up when the run's stop file appears (the process that waits hears no signal)."""

    def __init__(self, gate: Gate, stop: str) -> None:
        self._gate = gate
        self._stop = stop

    def wait(self, size: int, stop: Any, *, failed: bool = False) -> bool:
        return self._gate.wait(size, lambda: stop() or os.path.exists(self._stop), failed=failed)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in pieces of 16 bytes, where it can be seen so: indexing kernels work element by element, so
    that rows move eight times faster as complex128 than as bfloat16. On the CPU, and where it does not fit, the
    tensor itself."""
    width = 16 // tensor.element_size() if tensor.element_size() <= 16 else 0
    if (
        tensor.device.type != "cuda"
        or width < 2
        or tensor.dim() < 2
        or tensor.stride(-1) != 1
        or tensor.shape[-1] % width
    ):
        return tensor
    if tensor.storage_offset() % width or any(stride % width for stride in tensor.stride()[:-1]):
        return tensor
    return tensor.view(torch.complex128)


def _cache_in_wide_pieces() -> None:
    """Have vLLM put states into their cache in wide pieces. Its function only indexes, so it is called with other
    views of the same memory."""
    from vllm.model_executor.models import extract_hidden_states as model

    put = getattr(model, "basic_cache", None)
    if put is None or hasattr(put, "remoteops"):
        return

    def in_wide_pieces(to_cache: torch.Tensor, kv_cache: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        source, target = wide(to_cache), wide(kv_cache)
        if source.dtype != target.dtype:
            source, target = to_cache, kv_cache
        return put(source, target, *args, **kwargs)

    in_wide_pieces.remoteops = True  # type: ignore[attr-defined]
    model.basic_cache = in_wide_pieces
