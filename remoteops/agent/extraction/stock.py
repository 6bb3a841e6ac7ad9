"""The ``generator-stock`` engine: the library's own ``generate()``, as it is on that host. The peer of ``generator``
in bench/.

It returns tensors through RPC and the files are written here. What it silently gets wrong (short or foreign rows)
cannot be seen from outside except by length, and that is checked.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence

from remoteops.agent.extraction import library
from remoteops.agent.extraction.reporting import Reporter
from remoteops.agent.extraction.slices import CaptureError
from remoteops.agent.extraction.writer import Sample, Writer
from remoteops.agent.protocol import AgentError

BATCH = 8  # what the library's own script takes


class StockEngine:
    """``run(rows, store, gate)`` like every engine. Layer 0 (embeddings) does not exist here."""

    name = "generator-stock"

    def __init__(self, job: Mapping[str, Any], reporter: Reporter, memory: int = 0, threads: int = 4) -> None:
        del memory  # it comes back through RPC, a batch at a time
        if min(job["layers"]) < 1:
            raise AgentError(
                "UsageError", "the library's generator cannot give layer 0 (embeddings)", hint="use --engine generator"
            )
        self._job = job
        self._reporter = reporter
        self._threads = threads
        self._library = library.start(job, chunked=False)

    def run(self, rows: Sequence[Any], store: Any, gate: Any = None) -> Dict[str, Any]:
        order = sorted(set(self._job["layers"]))  # asked for so, each once: it comes so, from a patched library too
        slots = [order.index(depth) for depth in self._job["layers"]]
        writer = Writer(store, gate, self._threads)
        try:
            for batch in batches(rows, library.batched_tokens(self._job)):
                if self._reporter.stopping:
                    break
                results = self._library.generate([list(row.input_ids) for row in batch])
                for row, result in zip(batch, results):
                    states = [result["hidden_states"][slot] for slot in slots]
                    if any(state.shape[0] != len(row.input_ids) for state in states):
                        raise CaptureError(
                            "row %d: %s rows came back for %d tokens"
                            % (row.index, [state.shape[0] for state in states], len(row.input_ids))
                        )
                    writer.submit(Sample(row, states, sum(state.numel() * state.element_size() for state in states)))
                self._told(writer)
            while not writer.drain(1.0):
                self._told(writer)
                if self._reporter.stopping:
                    writer.stop()
            return self._told(writer)
        finally:
            writer.close()

    def close(self) -> None:
        self._library.executor.shutdown()

    def _told(self, writer: Writer) -> Dict[str, Any]:
        stats = writer.stats()
        if stats["errors"]:
            index, text = stats["errors"][0]
            raise AgentError(
                "RunFailed",
                "row %d could not be written: %s" % (index, text),
                hint="see the folder's owner, quota and mount",
            )
        self._reporter.progress(stats["samples"], stats["tokens"], stats["bytes"])
        return {key: stats[key] for key in ("samples", "tokens", "bytes", "dropped")}


def batches(rows: Sequence[Any], budget: int) -> List[List[Any]]:
    """Batches of at most BATCH rows and ``budget`` tokens (a row longer than that is one of its own): what the
    library computes right."""
    result: List[List[Any]] = []
    tokens = 0
    for row in rows:
        if not result or len(result[-1]) == BATCH or tokens + len(row.input_ids) > budget:
            result.append([])
            tokens = 0
        result[-1].append(row)
        tokens += len(row.input_ids)
    return result
