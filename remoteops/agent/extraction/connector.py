"""The ``connector`` engine: vLLM's extract_hidden_states in this process, without an HTTP server.

vLLM's LLM runs the prompts; ``kv_connector.RowConnector`` inside it writes every sample under its final name and its
line in the manifest. This side feeds prompts, counts lines, and notices what went wrong.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any, Dict, Iterator, Mapping, Optional, Sequence, Set

from remoteops.agent import disk, manifest
from remoteops.agent.extraction import library
from remoteops.agent.extraction.reporting import Reporter, last_errors
from remoteops.agent.protocol import AgentError

SEQUENCES = 256
POLL = 0.002  # seconds between two looks at the manifest while only writing is left
PATIENCE = 120.0  # seconds without a written sample, with free disk, after which the run fails
LOG_LAG = 0.5  # seconds until what a process printed is in the log
GIVE_UP = 20.0  # seconds after a stop that writing may stand still (a full disk)


class ConnectorEngine:
    """``run(rows, store, gate)`` like every engine; where samples go is told to vLLM at its start, so ``store`` must
    be the job's."""

    name = "connector"

    def __init__(self, job: Mapping[str, Any], reporter: Reporter, memory: int = 1 << 30, threads: int = 8) -> None:
        from vllm import LLM

        self._job = job
        self._reporter = reporter
        self._run = reporter.run.path
        for name in ("writer.errors", "writer.stop"):
            try:
                os.unlink(os.path.join(self._run, name))
            except FileNotFoundError:
                pass
        # A rank that waits for disk space must not look dead to the others.
        os.environ.setdefault("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "86400")
        self._budget = library.batched_tokens(job)
        self._llm = LLM(**arguments(job, self._run, memory, threads))
        self._engine = self._llm.llm_engine

    def run(self, rows: Sequence[Any], store: Any, gate: Any = None) -> Dict[str, Any]:
        """Write every row. Raises AgentError for a failed write or a connector that wrote nothing, or what vLLM
        raised."""
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        self._counts = _Counts(
            str(self._job["out"]), {row.index for row in rows}, os.path.join(self._run, "writer.errors")
        )
        watcher = threading.Thread(target=self._let_go, daemon=True)
        watcher.start()
        try:
            self._feed(iter(rows), parameters)
            self._wait_for_files()
            counts = self._counts.look()
        except Exception as error:
            if type(error).__name__ != "EngineDeadError":
                raise
            raise self._died(error) from error
        finally:
            self._counts.close()
        self._reporter.progress(counts["samples"], counts["tokens"], counts["bytes"], force=True)
        return {key: counts[key] for key in ("samples", "tokens", "bytes")}

    def _died(self, error: Exception) -> AgentError:
        """vLLM only says that its engine is dead; which of its processes went first stands in the log."""
        time.sleep(LOG_LAG)
        causes = last_errors(self._reporter.run.log)
        return AgentError(
            "RunFailed",
            "vLLM's engine died" + (": %s" % causes[0] if causes else ""),
            tried=str(error)[:500],
            hint="a process that died with no other cause in the log was mostly killed by the kernel, out of memory "
            "(dmesg); what is written stays, and the run can be resumed",
        )

    def close(self) -> None:
        core = getattr(self._engine, "engine_core", None)
        if core is not None and hasattr(core, "shutdown"):
            core.shutdown()

    def _feed(self, rows: Iterator[Any], parameters: Any) -> None:
        flying: Dict[str, int] = {}
        more, tokens = True, 0
        while more or flying:
            while more and not self._reporter.stopping and tokens < 8 * self._budget and len(flying) < 4 * SEQUENCES:
                row = next(rows, None)
                if row is None:
                    more = False
                    break
                request = "row-%d" % row.index
                self._engine.add_request(request, {"prompt_token_ids": list(row.input_ids)}, parameters)
                flying[request] = len(row.input_ids)
                tokens += len(row.input_ids)
            if self._reporter.stopping and flying:
                self._engine.abort_request(list(flying))
                return
            for output in self._engine.step():
                if output.finished:
                    tokens -= flying.pop(output.request_id, 0)
            self._told()

    def _wait_for_files(self) -> None:
        """Until every asked row has its line; after a stop, until writing stands still."""
        last, since = -1, time.monotonic()
        quiet = 2.0 if self._reporter.stopping else PATIENCE
        while not self._counts.complete:
            counts = self._told()
            if counts["samples"] != last:
                last, since = counts["samples"], time.monotonic()
            elif time.monotonic() - since > quiet and (self._reporter.stopping or not self._paused()):
                if self._reporter.stopping:
                    return
                missing = sorted(self._counts.missing)
                raise AgentError(
                    "RunFailed",
                    "%d samples were computed and never written (row %d, ...)" % (len(missing), missing[0]),
                    tried="waiting %d s for the connector" % quiet,
                    hint="the log has the connector's error; fab probe shows "
                    "whether this vLLM calls it; --engine generator is the other way",
                )
            time.sleep(POLL)

    def _told(self) -> Dict[str, int]:
        counts = self._counts.look()
        if self._counts.error:
            raise AgentError(
                "RunFailed",
                "a row could not be written: %s" % self._counts.error,
                hint="see the folder's owner, quota and mount; what is written stays, and the run can be resumed",
            )
        self._reporter.progress(counts["samples"], counts["tokens"], counts["bytes"])
        return counts

    def _paused(self) -> bool:
        reserve = self._job.get("disk_reserve")
        return bool(
            disk.space(str(self._job["out"]))["free"]
            < (disk.RESERVE if reserve is None else int(reserve)) + (256 << 20)
        )

    def _let_go(self) -> None:
        """After a stop, writers that wait for a full disk are told to give up, so that the engine can end."""
        while not self._reporter.stopping:
            time.sleep(0.5)
        before = -1
        while self._counts.samples != before:
            before = self._counts.samples
            time.sleep(GIVE_UP)
        with open(os.path.join(self._run, "writer.stop"), "wb"):
            pass


def arguments(job: Mapping[str, Any], run: str, memory: int, threads: int) -> Dict[str, Any]:
    """Keyword arguments of vLLM's LLM for a job; what the user put into engine_args wins, but for what makes the
    states right."""
    from remoteops.agent.extraction import kv_connector

    reserve = job.get("disk_reserve")
    settings = {
        "out": str(job["out"]),
        "format": str(job["format"]),
        "layers": list(job["layers"]),
        "memory": int(memory),
        "threads": int(threads),
        "sync": str(job.get("sync") or "end"),
        "run": run,
        "reserve": disk.RESERVE if reserve is None else int(reserve),
    }
    chosen: Dict[str, Any] = {
        "model": str(job["model"]),
        "dtype": job.get("dtype") or "auto",
        "seed": int(job.get("seed") or 0),
        "trust_remote_code": bool(job.get("trust_remote_code")),
        "tensor_parallel_size": int(job.get("tensor_parallel") or 1),
        "max_model_len": library.context_length(job),
        "max_num_batched_tokens": library.batched_tokens(job),
        "max_num_seqs": min(SEQUENCES, library.batched_tokens(job)),
        "enforce_eager": True,
        "enable_chunked_prefill": True,
        "disable_log_stats": True,
        **library.text_only(_engine_parameters()),
    }
    if job.get("gpu_memory_utilization"):
        chosen["gpu_memory_utilization"] = float(job["gpu_memory_utilization"])
    chosen.update(job.get("engine_args") or {})
    chosen.update(
        enable_prefix_caching=False,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(job["layers"])}},
        },
        kv_transfer_config={
            "kv_connector": kv_connector.CLASS_NAME,
            "kv_connector_module_path": kv_connector.MODULE_PATH,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "shared_storage_path": run,
                "use_synchronization_lock": False,
                kv_connector.SETTINGS: settings,
            },
        },
    )
    return chosen


def _engine_parameters() -> Set[str]:
    from vllm.engine.arg_utils import EngineArgs

    return library.parameters(EngineArgs)


class _Counts:
    """Samples of this run as their lines appear in the manifest; errors as the writers report them."""

    def __init__(self, out: str, wanted: set[int], errors: str) -> None:
        self.missing = set(wanted)
        self.error = ""
        self.samples = 0
        self._tokens = self._bytes = 0
        self._errors = errors
        self._rest = b""
        self._stream = open(os.path.join(out, manifest.NAME), "rb")
        self._stream.seek(0, os.SEEK_END)

    def close(self) -> None:
        self._stream.close()

    @property
    def complete(self) -> bool:
        return not self.missing

    def look(self) -> Dict[str, int]:
        data = self._rest + self._stream.read()
        lines = data.split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            entry = _entry(line)
            if entry is not None and entry["index"] in self.missing:
                self.missing.discard(entry["index"])
                self.samples += 1
                self._tokens += int(entry["tokens"])
                self._bytes += int(entry["bytes"])
        if os.path.exists(self._errors):
            with open(self._errors, "rb") as stream:
                found = [_entry(line) for line in stream]
            first: Optional[Dict[str, Any]] = next((one for one in found if one is not None), None)
            if first is not None:
                self.error = "row %d: %s" % (first["index"], first["error"])
        return {"samples": self.samples, "tokens": self._tokens, "bytes": self._bytes}


def _entry(line: bytes) -> Optional[Dict[str, Any]]:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "index" in record else None
