"""The ``generator`` engine: speculators' generator up to its scheduler, our loop, capture and writing in the workers.

The library's ``generate()`` returns tensors through RPC, copies them while the GPU waits, and runs one batch at a
time. Here a step's RPC carries the scheduler's output one way and counts the other; requests are finished as soon as
their prompt is computed; the worker does not wait for a sampled token, so the next step is prepared while the GPU
works.
"""

from __future__ import annotations

import inspect
import signal
import threading
import time
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Tuple

from remoteops.agent.extraction import library
from remoteops.agent.extraction.arena import memory_for
from remoteops.agent.extraction.reporting import Reporter, WorkerDied
from remoteops.agent.extraction.slices import CaptureError, chunks_of
from remoteops.agent.extraction.worker import CLASS_PATH, Setup
from remoteops.agent.protocol import AgentError

MEMORY = 4 << 30  # bytes of (pinned) host memory for samples on their way to disk
WAIT = 1.0  # seconds of one RPC that waits
GRACE = 15.0  # seconds an executor gets to notice a dead worker by itself
STUCK = 3  # empty schedules in a row that are believed


class GeneratorEngine:
    """``run(rows, store, gate)`` computes every row and has it written; ``gate`` is a disk.Gate or None."""

    name = "generator"

    def __init__(self, job: Mapping[str, Any], reporter: Reporter, memory: int = MEMORY, threads: int = 8) -> None:
        self._job = job
        self._reporter = reporter
        self._most, self._threads = memory, threads
        self._library = library.start(job, worker=CLASS_PATH)
        self._executor = self._library.executor
        self._scheduler = self._library.scheduler
        self._config = self._library.vllm_config
        self._requests = _RequestFactory(self._library)
        self._budget = int(self._config.scheduler_config.max_num_batched_tokens)
        self._open = False
        self._stats: Dict[str, Any] = {}
        self._guard = _WorkerGuard(self._executor)

    def run(self, rows: Sequence[Any], store: Any, gate: Any = None) -> Dict[str, Any]:
        """Write every row. Returns the counts. Raises CaptureError (states that cannot be right), AgentError (a row
        that cannot fit, a failed write) or what the engine raised. May be called again, with the same store."""
        self._check_lengths(rows)
        if not self._open:
            layout = "LSH" if self._job["format"] == "speculators-v1" else "SLH"
            ranks = self._call(
                "remoteops_open",
                Setup(list(self._job["layers"]), layout, self._budget, self._memory(rows), self._threads, store, gate),
            )
            self._agree([(one["dtype"], one["hidden"]) for one in ranks])
            self._open = True
            self._reporter.notice("capturing on rank 0 of %d" % len(ranks), ranks=ranks)
        before = dict(self._stats)
        try:
            self._loop(iter(rows))
            after = self._finish()
        except (RuntimeError, TimeoutError, WorkerDied) as error:
            gone = self._guard.gone()
            if not gone:
                raise
            raise AgentError(
                "RunFailed",
                "the engine lost %s" % "; ".join(gone),
                tried=str(error)[:500],
                hint="SIGKILL with no cause in the log is mostly the kernel, out of memory (dmesg); resume the run",
            ) from error
        return {key: after[key] - before.get(key, 0) for key in ("samples", "tokens", "bytes", "dropped")}

    def close(self) -> None:
        self._guard.stop()
        if self._open and not self._guard.dead and not getattr(self._executor, "is_failed", False):
            self._call("remoteops_close")
        self._executor.shutdown()

    # the loop

    def _loop(self, rows: Iterator[Any]) -> None:
        from vllm.v1.request import RequestStatus

        waiting: Dict[str, Any] = {}  # asked for, not begun
        running: Dict[str, Any] = {}  # begun, not complete
        totals: Dict[str, int] = {}
        queued, empty, more = 0, 0, True
        while True:
            while (
                more
                and not self._reporter.stopping
                and queued < 4 * self._budget
                and len(waiting) < 4 * library.SEQUENCES
            ):
                row = next(rows, None)
                if row is None:
                    more = False
                    break
                request = "row-%d" % row.index
                self._scheduler.add_request(self._requests.make(request, row.input_ids))
                waiting[request], totals[request] = row, len(row.input_ids)
                queued += len(row.input_ids)
            if self._reporter.stopping and waiting:
                self._scheduler.finish_requests(list(waiting), RequestStatus.FINISHED_ABORTED)
                waiting.clear()
            if not waiting and not running:
                return
            step = self._scheduler.schedule()
            if not step.total_num_scheduled_tokens:
                empty += 1
                if empty > STUCK:
                    raise AgentError(
                        "RunFailed",
                        "the scheduler runs nothing although %d prompts wait" % (len(waiting) + len(running)),
                        tried="%d schedules in a row" % empty,
                        hint="the KV cache is too small: raise gpu_memory_utilization or lower max_length",
                    )
                continue
            empty = 0
            chunks = chunks_of(step, totals)
            begun = {chunk.request: waiting.pop(chunk.request) for chunk in chunks if chunk.request in waiting}
            running.update(begun)
            if not self._admit([len(row.input_ids) for row in begun.values()]):
                self._call("remoteops_stop", list(running))
                return
            self._absorb(self._call("remoteops_step", step, chunks, begun))
            complete = [chunk.request for chunk in chunks if chunk.last]
            if complete:
                self._scheduler.finish_requests(complete, RequestStatus.FINISHED_ABORTED)
            for request in complete:
                del running[request]
                queued -= totals.pop(request)

    def _admit(self, lengths: List[int]) -> bool:
        """Wait until the samples that begin have room in host memory. False: stopped while the disk had no room."""
        sizes = [length * self._row_bytes for length in lengths]
        if not sizes or sum(sizes) + max(sizes) * 2 < self._free:
            return True
        while True:
            before = self._free
            stats = self._call("remoteops_wait", sizes, 0.0 if before == self._room else WAIT)[0]
            self._absorb([stats])
            if self._free >= sum(sizes) or self._free == self._room:
                return True
            if self._reporter.stopping and stats["pending"] and self._free == before:
                return False

    def _finish(self) -> Dict[str, Any]:
        """Wait until everything submitted is on disk; on a stop, as long as writing goes on."""
        written = -1
        while True:
            stats: Dict[str, Any] = self._call("remoteops_wait", [], WAIT)[0]
            self._absorb([stats])
            if not stats["pending"]:
                break
            if self._reporter.stopping and stats["samples"] == written:
                self._call("remoteops_stop", [])
            written = stats["samples"]
        self._reporter.progress(stats["samples"], stats["tokens"], stats["bytes"], force=True)
        return stats

    def _absorb(self, replies: List[Dict[str, Any]]) -> None:
        """Take the counts; all ranks must have run the same tokens, and no write may have failed."""
        self._agree([one["step"] for one in replies if "step" in one])
        stats = self._stats = replies[0]
        self._free, self._room = stats["free"], stats["room"]
        if stats["errors"]:
            index, text = stats["errors"][0]
            raise AgentError(
                "RunFailed",
                "row %d could not be written: %s" % (index, text),
                tried="%d rows failed" % len(stats["errors"]),
                hint="see the folder's owner, quota and mount; what is written stays, and the run can be resumed",
            )
        self._reporter.progress(stats["samples"], stats["tokens"], stats["bytes"])

    # the workers

    def _call(self, method: str, *args: Any) -> List[Any]:
        """One RPC to every rank; the replies in rank order, whatever shape this executor returns."""
        replies = self._executor.collective_rpc(method, args=args)
        if hasattr(replies, "result"):
            replies = replies.result()
        return list(replies)

    @staticmethod
    def _agree(values: List[Any]) -> None:
        if any(value != values[0] for value in values[1:]):
            raise CaptureError("the tensor-parallel ranks do not agree: %s" % values)

    def _memory(self, rows: Sequence[Any]) -> int:
        width = int(self._config.model_config.get_hidden_size()) * self._config.model_config.dtype.itemsize
        self._row_bytes = len(self._job["layers"]) * width
        room = memory_for([len(row.input_ids) for row in rows], self._row_bytes, self._most)
        self._free = self._room = room
        return room

    def _check_lengths(self, rows: Sequence[Any]) -> None:
        cache = self._config.cache_config
        blocks = int(cache.num_gpu_blocks or 0)
        room = min(
            int(self._config.model_config.max_model_len) - 1,
            (blocks - 1) * int(cache.block_size) if blocks else 1 << 60,
        )
        for row in rows:
            if not row.input_ids or len(row.input_ids) > room:
                raise AgentError(
                    "RunFailed",
                    "row %d has %d tokens; the engine takes 1 to %d" % (row.index, len(row.input_ids), room),
                    tried="max_model_len %d, %d KV blocks of %d tokens"
                    % (self._config.model_config.max_model_len, blocks, cache.block_size),
                    hint="lower max_length, or give the KV cache more memory",
                )


class _RequestFactory:
    """vLLM's Request by the keywords that this release takes."""

    def __init__(self, generator: Any) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self._request, self._sampling = Request, SamplingParams
        known = library.parameters(Request.__init__)
        self._fixed: Dict[str, Any] = {
            key: value
            for key, value in {
                "pooling_params": None,
                "arrival_time": 0.0,
                "multi_modal_kwargs": None,
                "multi_modal_hashes": None,
                "multi_modal_placeholders": None,
                "mm_features": None,
                "eos_token_id": getattr(getattr(generator, "tokenizer", None), "eos_token_id", None),
            }.items()
            if key in known
        }
        hasher = getattr(generator, "block_hasher", None)
        if hasher is not None and "block_hasher" in known:
            self._fixed["block_hasher"] = hasher
        needed = [
            one.name
            for one in inspect.signature(Request.__init__).parameters.values()
            if one.default is one.empty and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        ]
        unknown = set(needed) - set(self._fixed) - {"self", "request_id", "prompt_token_ids", "sampling_params"}
        if unknown:
            raise AgentError(
                "AuditBroken",
                "vLLM's Request wants arguments that are not known here: %s" % ", ".join(sorted(unknown)),
                hint="use --engine connector",
            )

    def make(self, name: str, tokens: Sequence[int]) -> Any:
        return self._request(
            request_id=name,
            prompt_token_ids=list(tokens),
            sampling_params=self._sampling(max_tokens=1, temperature=0.0),
            **self._fixed,
        )


class _WorkerGuard:
    """Ends a wait for a worker that is dead: some executors only notice when they are asked the next time."""

    def __init__(self, executor: Any) -> None:
        self._stop = threading.Event()
        self.dead = False
        workers = [getattr(worker, "proc", None) for worker in getattr(executor, "workers", None) or []]
        self._processes = [process for process in workers if process is not None]
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR2, self._raise)
            threading.Thread(target=self._watch, name="remoteops-workers", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def gone(self) -> List[str]:
        """The workers that ended by themselves, each with how. Those that the executor took down after them (SIGTERM)
        are named only when there is no other."""
        deadline = time.monotonic() + 2.0  # one that has just died is not yet collected
        while time.monotonic() < deadline and all(process.is_alive() for process in self._processes):
            time.sleep(0.05)
        found: List[Tuple[int, str]] = []
        for at, process in enumerate(self._processes):
            code = process.exitcode
            if code:
                how = "ended by %s" % signal.Signals(-code).name if code < 0 else "exit status %d" % code
                found.append((code, "worker %d (pid %s, %s)" % (at, process.pid, how)))
        own = [text for code, text in found if code != -signal.SIGTERM]
        return own or [text for _, text in found]

    def _watch(self) -> None:
        while not self._stop.wait(1.0):
            if any(not process.is_alive() for process in self._processes):
                self.dead = True
                # The executor's own monitor is faster where there is one.
                if not self._stop.wait(GRACE):
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
                return

    def _raise(self, _number: int, _frame: Any) -> None:
        raise WorkerDied("a worker process of the engine is gone")
