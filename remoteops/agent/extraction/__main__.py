"""The child of a run: ``<venv>/bin/python -m remoteops.agent.extraction RUN_DIR``.

Reads the job from request.json ("extraction"), tells events.jsonl how it goes, writes the samples that are missing,
checks what lies there. Exit status 0: done, or stopped as asked; 1: failed (a ``failure`` event says why). SIGTERM:
finish what is in flight.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import traceback
from typing import Any, Callable, ContextManager, Dict, List, Mapping, Optional, Tuple

from remoteops.agent import disk, modelinfo
from remoteops.agent.extraction import dataset, output
from remoteops.agent.extraction.arena import memory_for
from remoteops.agent.extraction.reporting import Interrupted, Reporter, last_errors
from remoteops.agent.lines import FULL
from remoteops.agent.protocol import AgentError
from remoteops.agent.rundir import RunDir, read_json

QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "TOKENIZERS_PARALLELISM": "false",
}
ENGINES = {
    "connector": "remoteops.agent.extraction.connector:ConnectorEngine",
    "generator": "remoteops.agent.extraction.generator:GeneratorEngine",
    "generator-stock": "remoteops.agent.extraction.stock:StockEngine",
}
SETTLE_RESERVE = 16 << 20  # bytes that must be free before the files beside the samples are tried again
SHUTDOWN = 60.0  # seconds that the libraries get to end by themselves


def main(argv: List[str]) -> int:
    run = RunDir(argv[0])
    reporter = Reporter(run)
    reporter.listen()
    try:
        request = read_json(run.request) or {}
        job = request.get("extraction")
        if not isinstance(job, dict):
            raise AgentError("UsageError", "%s holds no extraction" % run.request, hint="start runs with fab extract")
        return extract(dict(job), reporter)
    except Interrupted:
        reporter.outcome("stopped", **reporter.written)
        return 0
    except AgentError as error:
        reporter.failure(error.kind, error.message, error.hint, tried=error.tried, data=error.data)
    except BaseException as error:  # noqa: BLE001 - the end of the process: whatever it was leaves as one event
        traceback.print_exc()
        if reporter.stopping:  # whoever stops a run may end its workers too
            reporter.notice("stopped while the engine ended: %s: %s" % (type(error).__name__, str(error).strip()[:500]))
            reporter.outcome("stopped", **reporter.written)
            return 0
        reporter.failure(
            "RunFailed",
            "%s: %s" % (type(error).__name__, str(error).strip()[:2000]),
            "the causes are the last error lines of the log: fab tail-logs",
            causes=last_errors(run.log),
        )
    reporter.outcome("failed", **reporter.written)
    return 1


def extract(job: Dict[str, Any], reporter: Reporter) -> int:
    """One job from its rows to its check. Raises AgentError, Interrupted, and whatever the libraries raise."""
    for name, value in {**QUIET, **{str(key): str(value) for key, value in (job.get("env") or {}).items()}}.items():
        if name in (job.get("env") or {}) or name not in os.environ:
            os.environ[name] = value
    job["out"] = job.get("out") or reporter.run.out
    reporter.phase("load")
    reporter.interruptible = True  # nothing is in flight yet
    loaded, shape, found = _prepare(job)
    todo, again = found.todo(loaded.rows)
    _announce(reporter, loaded, todo, again)
    notes: Optional[str] = None
    closing: Optional[_Closing] = None
    if todo:
        with _inspector(job, shape, loaded.rows, reporter) as beside:
            notes = beside.notes if beside is not None else None
            engine = _engine(job, shape, reporter, todo)
            reporter.interruptible = False
            closing = _Closing(engine.close)
            try:
                reporter.phase("extract", engine=engine.name)
                counts = engine.run(todo, _store(job, shape, engine.name), _gate(job, reporter))
            except BaseException:
                closing.start()
                closing.wait()
                raise
            closing.start()  # taking vLLM down takes seconds; what was written is settled and checked meanwhile
        if reporter.stopping:
            closing.wait()
            if beside is not None:
                beside.raise_if_hopeless()
            _settle(job, shape, loaded, reporter)
            reporter.outcome("stopped", **counts)
            return 0
    try:
        reporter.interruptible = True
        reporter.phase("verify")
        made = _settle(job, shape, loaded, reporter)
        from remoteops.agent.extraction import check

        reference = int(job.get("reference") or 0)
        report = check.check(str(job["out"]), None, reference=reference, job=job, reject=True, notes=notes)
    finally:  # whatever came of it: how the run ended is told when the engine has ended too
        if closing is not None and closing.is_alive():
            reporter.phase("close")
            closing.wait()
    summary = {
        "rows": len(loaded.rows),
        "written": len(todo),
        "written_tokens": sum(len(row.input_ids) for row in todo),
        "report": report,
        "made": made,
        "dataset": {**loaded.report, "dropped": loaded.report["dropped"][:50]},
    }
    if not report["ok"]:
        reporter.failure(
            "VerifyFailed",
            "%d problems in %s" % (report.get("problem_count", 0), job["out"]),
            "fab verify names the rows; fab extract --resume last does them again",
            report=report,
        )
    reporter.outcome("done" if report["ok"] else "failed", **summary)
    return 0 if report["ok"] else 1


def _prepare(job: Dict[str, Any]) -> Tuple[Any, Any, Any]:
    """The rows, the model's shape, and the output folder; the job's model and out become absolute paths."""
    shape = modelinfo.read(modelinfo.find(str(job["model"])))
    job["model"] = shape.folder
    job["out"] = os.path.abspath(os.path.expanduser(str(job["out"])))
    job["dtype"] = modelinfo.stored_dtype(str(job.get("dtype") or "auto"), shape)
    loaded = dataset.load(job, vocab_size=shape.vocab_size)
    return loaded, shape, output.prepare(job, loaded, shape)


def _announce(reporter: Reporter, loaded: Any, todo: List[Any], again: Mapping[int, str]) -> None:
    total, left = len(loaded.rows), sum(len(row.input_ids) for row in todo)
    tokens_total = sum(len(row.input_ids) for row in loaded.rows)
    reporter.count(total, tokens_total, total - len(todo), tokens_total - left)
    report = {key: loaded.report.get(key) for key in ("rows_total", "selected", "truncated", "dataset_sha256")}
    reporter.notice(
        "%d rows, %d tokens; %d rows are there already" % (total, tokens_total, total - len(todo)),
        dropped=len(loaded.report.get("dropped") or []),
        **report,
    )
    if again:
        first = sorted(again)[:20]
        reporter.notice("%d rows are done again" % len(again), reasons={str(index): again[index] for index in first})
    reporter.progress(0, 0, 0, force=True)


def _engine(job: Dict[str, Any], shape: Any, reporter: Reporter, todo: List[Any]) -> Any:
    """The engine the job names, started. Raises AgentError(UsageError) for an unknown name."""
    from remoteops.agent.extraction import hostkind

    name = str(job.get("engine") or "auto")
    if name == "auto":
        name = hostkind.preferred_engine()
        reporter.notice("engine: %s" % name)
    for text in hostkind.adapt(job, shape, name):
        reporter.notice(text)
    if name not in ENGINES:
        raise AgentError("UsageError", "no engine %r" % name, hint="engines: auto, " + ", ".join(ENGINES))
    module, _, kind = ENGINES[name].partition(":")
    memory = memory_for([len(row.input_ids) for row in todo], _token_bytes(job, shape))
    return getattr(importlib.import_module(module), kind)(job, reporter, memory, hostkind.writer_threads())


def _inspector(job: Mapping[str, Any], shape: Any, rows: List[Any], reporter: Reporter) -> ContextManager[Any]:
    """Reads samples back beside a run that is long enough, on a host with a core to spare; None otherwise."""
    from remoteops.agent.extraction.inspector import WORTH_IT, Inspector

    size = sum(len(row.input_ids) for row in rows) * _token_bytes(job, shape)
    if size < WORTH_IT or (os.cpu_count() or 1) < 4:
        return contextlib.nullcontext()
    return Inspector(str(job["out"]), reporter)


def _token_bytes(job: Mapping[str, Any], shape: Any) -> int:
    return len(job["layers"]) * int(shape.hidden_size) * modelinfo.DTYPE_BYTES.get(str(job["dtype"]), 4)


def _store(job: Mapping[str, Any], shape: Any, engine: str) -> Any:
    from remoteops.agent.extraction.formats import Store

    return Store(
        str(job["out"]),
        str(job["format"]),
        list(job["layers"]),
        engine,
        sync=str(job.get("sync") or "end"),
        hidden_size=shape.hidden_size,
    )


def _gate(job: Mapping[str, Any], reporter: Reporter) -> Any:
    reserve = job.get("disk_reserve")
    return disk.Gate(str(job["out"]), disk.RESERVE if reserve is None else int(reserve), reporter.run.path)


def _settle(job: Mapping[str, Any], shape: Any, loaded: Any, reporter: Reporter) -> Dict[str, Any]:
    """Make what was written durable and write what belongs beside it."""
    from remoteops.agent import manifest

    while True:
        try:
            current = manifest.read(str(job["out"]))
            if current is not None:
                _store(job, shape, "").sync_all(current.entries.values())
            return output.finish(str(job["out"]), reporter.run.path, job, loaded, shape)
        except OSError as error:
            # The samples are there; what belongs beside them is small, and waits for room as they did.
            if error.errno not in FULL:
                raise
            gate = disk.Gate(str(job["out"]), SETTLE_RESERVE, reporter.run.path)
            if not gate.wait(0, lambda: reporter.stopping, failed=True):
                raise


class _Closing(threading.Thread):
    """Takes the engine down. Nobody waits for that for ever; a shutdown that hangs must not hide what happened."""

    def __init__(self, close: Callable[[], Any]) -> None:
        super().__init__(name="remoteops-closing", daemon=True)
        self._close = close

    def run(self) -> None:
        try:
            self._close()
        except BaseException as error:  # noqa: BLE001 - shutting down; reported in the log only
            sys.stderr.write("shutdown: %s: %s\n" % (type(error).__name__, error))

    def wait(self) -> None:
        self.join(SHUTDOWN)


def _leave(status: int) -> None:
    """End the process at once: the engine is closed, and taking torch and vLLM down takes seconds and may hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _leave(main(sys.argv[1:]))
