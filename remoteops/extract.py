"""The use case of ``fab extract``: preflight -> audit -> (patch) -> start -> follow -> what came out.

The run itself is detached: it outlives this process and the link, and goes on when following stops. Nothing here
prints; what happens is told to a ``logs.Sink`` and to ``on_event``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from remoteops import advice, errors, logs, outcome, patch, probe, runs
from remoteops.agent import capabilities
from remoteops.agent.extraction import layers as layer_ids
from remoteops.agent.protocol import AgentError
from remoteops.door import using
from remoteops.errors import AuditBroken, PreflightFailed, RemoteOpsError
from remoteops.inventory import Host
from remoteops.job import LOCAL, OnEvent, Options, build, label, local_file, look_over, place_dataset
from remoteops.remote import Agent

REFERENCE_UP_TO = (
    8 << 30
)  # bytes of weights up to which two rows are recomputed with transformers when nothing else is said
UNSKIPPABLE = ("interpreter", "model", "layers")  # without these there is no job to start


@dataclass
class Started:
    """A run that was started, and all that led to it. ``as_dict`` is the --json document."""

    host: str
    run: str
    path: str
    out: str
    engine: str
    why_engine: list[str]
    job: dict[str, Any]
    preflight: dict[str, Any]
    audit: dict[str, Any] | None
    patched: dict[str, Any] | None
    survives: str
    warning: str | None
    skipped: list[str]
    rehearsal: dict[str, Any] | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        audit = (
            None if self.audit is None else {"breaks": len(probe.breaks(self.audit)), "sites": self.audit.get("sites")}
        )
        return {
            "schema": "remoteops.extract/1",
            "host": self.host,
            "run": self.run,
            "path": self.path,
            "out": self.out,
            "engine": self.engine,
            "why_engine": self.why_engine,
            "layers": self.job["layers"],
            "convention": layer_ids.CONVENTION,
            "layers_elsewhere": advice.conventions(list(self.job["layers"])),
            "dtype": self.job["dtype"],
            "format": self.job["format"],
            "job": self.job,
            "checks": self.preflight["checks"],
            "estimate": self.preflight.get("estimate"),
            "audit": audit,
            "patched": self.patched,
            "survives": self.survives,
            "warning": self.warning,
            "skipped": self.skipped,
            "rehearsal": self.rehearsal,
            "seconds": dict(self.seconds),
        }


def extract(
    host: Host,
    options: Options | None = None,
    *,
    sink: logs.Sink | None = None,
    on_event: OnEvent | None = None,
    detach: bool = False,
    what: logs.What | None = None,
    agent: Agent | None = None,
) -> dict[str, Any]:
    """Start an extraction and (unless ``detach``) follow it to its end.

    Returns the document remoteops.extract/1; followed, it also has "state", "samples", "tokens", "tokens_per_s",
    "report" (of the check at the end), "seconds" of every phase. Raises UsageError, PreflightFailed and its more
    exact kinds (MissingVenv, MissingPackage, MissingModel, DatasetError, DiskTooSmall, GpuBusy, RunActive,
    OutputMismatch), AuditBroken, and what the run failed with (RunFailed, VerifyFailed, …); Interrupted when
    following was stopped (the run goes on).
    """
    began = time.monotonic()
    look_over(host, options or Options())
    with using(host, agent) as door:
        connected = time.monotonic() - began
        started = start(host, options or Options(), agent=door, on_event=on_event)
        started.seconds = {"connect": round(connected, 3), **started.seconds}
        document = started.as_dict()
        (on_event or _ignore)({"event": "started", **document})
        if detach:
            return document
        return finish(host, started, sink=sink, what=what, began=began, agent=door)


def check(host: Host, agent: Agent, options: Options | None = None) -> dict[str, Any]:
    """The preflight alone: nothing is uploaded, nothing started. Returns the document remoteops.preflight/1 with "job".

    A local dataset is only looked for; what it holds cannot be checked on the host then. Raises UsageError,
    RunNotFound, LinkError.
    """
    job = build(host, options or Options(), agent)
    if str(job["dataset"]).startswith(LOCAL):
        local_file(host, str(job["dataset"]))
    request = {**runs.base(host), "job": job, "venv": host.venv, "env": {**host.env, **host.workload.env}}
    found = agent.call("preflight", request)
    found["checks"] += advice.checks(found, request["env"])
    return {**found, "host": host.name, "job": job}


def start(host: Host, options: Options, *, agent: Agent, on_event: OnEvent | None = None) -> Started:
    """Everything up to the run's start, with one agent. Raises as ``extract``."""
    tell = on_event or _ignore
    clock = _Clock(tell)
    job = build(host, options, agent)
    with clock("upload"):
        job["dataset"] = place_dataset(host, str(job["dataset"]), agent, tell)
    made: dict[str, Any] | None = None
    if options.rehearse:
        from remoteops import rehearse

        with clock("rehearse"):
            job, made = rehearse.prepare(host, job, agent)
        tell({"event": "rehearsal", **made})
    env = {**host.env, **host.workload.env}
    asked = {"job": job, "venv": host.venv, "env": env, "allow_second": options.allow_second}
    with clock("preflight"):
        found = agent.call("preflight", {**runs.base(host), **asked})
    found["checks"] += advice.checks(found, env)
    tell({"event": "preflight", **found})
    skipped = _judge(host, found, options.force)
    job["layers"], job["dtype"] = found["layers"], found["dtype"] if job["dtype"] == "auto" else job["dtype"]
    if options.reference is None and job.get("load_format") != "dummy":
        job["reference"] = 2 if found["shape"]["weight_bytes"] <= REFERENCE_UP_TO else 0
    able = capabilities.from_dict(found["capabilities"] or {})
    document: dict[str, Any] | None = None
    patched: dict[str, Any] | None = None
    if _wants_generator(job, able, found):
        with clock("audit"):
            document = _audit(host, found, agent)
        if probe.breaks(document) and options.patch:
            with clock("patch"):
                patched = _patch(host, agent, found["shape"]["architecture"] or None, tell)
            with clock("audit"):
                document = _audit(host, found, agent)
        tell({"event": "audit", "breaks": len(probe.breaks(document)), "findings": probe.breaks(document)})
    job["engine"], why = _engine(host, job, able, found, document, options.force, skipped)
    if found["layers"] and not job["engine"].startswith("connector"):
        _local(host, lambda: layer_ids.translate(found["layers"], job["engine"]))
    tell(
        {
            "event": "engine",
            "engine": job["engine"],
            "why": why,
            "layers": job["layers"],
            "convention": layer_ids.CONVENTION,
        }
    )
    python = found["python"]
    request = {
        "argv": [python, "-u", "-m", "remoteops.agent.extraction", "{run_dir}"],
        "env": {**env, "PYTHONPATH": ":".join(["{agent}", *filter(None, [env.get("PYTHONPATH")])])},
        "label": label(job),
        "request": {"extraction": job, "host": host.name},
        "expect_outcome": True,
        "out": job["out"] or "{run_dir}/out",
    }
    with clock("start"):
        launched = runs.launch(host, request, force=options.force, allow_second=options.allow_second, agent=agent)
    return Started(
        host=host.name,
        run=launched["run"],
        path=launched["path"],
        out=job["out"] or f"{launched['path']}/out",
        engine=job["engine"],
        why_engine=why,
        job=job,
        preflight=found,
        audit=document,
        patched=patched,
        survives=launched["survives"],
        warning=launched.get("warning"),
        skipped=skipped,
        rehearsal=made,
        seconds=clock.seconds,
    )


def finish(
    host: Host,
    started: Started,
    *,
    sink: logs.Sink | None = None,
    what: logs.What | None = None,
    began: float | None = None,
    agent: Agent | None = None,
) -> dict[str, Any]:
    """Follow a started run to its end and say what came out of it. Raises what the run failed with, or Interrupted."""
    clock = _Clock(_ignore)
    with clock("follow"):
        followed = logs.follow(
            [logs.Target(host, started.run)],
            sink or _Silent(),
            what or logs.What(lines=None, log=sink is not None, status=True),
        )
    if followed.errors[0] is not None:
        raise followed.errors[0]
    status = followed.statuses[0] or {}
    with clock("summary"), using(host, agent) as door:
        story = door.call("run.job", {**runs.base(host), "run": started.run})
    summary = (story.get("outcome") or {}).get("summary") or {}
    report = summary.get("report") or {}
    extracting = story["phases"].get("extract")
    written = summary.get("written_tokens")
    tokens = report.get("tokens") or status.get("tokens") or 0
    document = {
        **started.as_dict(),
        "state": status.get("state"),
        "samples": report.get("checked") or status.get("samples") or 0,
        "tokens": tokens,
        "bytes": report.get("bytes") or status.get("bytes"),
        "tokens_per_s": round((written if written is not None else tokens) / extracting, 1) if extracting else None,
        "report": report,
        "made": summary.get("made"),
        "dataset": summary.get("dataset"),
        "status": status,
        "seconds": outcome.seconds(started.seconds, story["phases"], clock.seconds, report, began),
    }
    if status.get("state") == "done":
        return document
    raise outcome.failure(host, started.run, story, status, document)


def _judge(host: Host, found: Mapping[str, Any], force: bool) -> list[str]:
    """Raise for the checks that failed, or with ``force`` name them. Raises the class the first failed check stands
    for."""
    failed = [check for check in found["checks"] if check["ok"] is False]
    hard = [check for check in failed if check["name"] in UNSKIPPABLE] if force else failed
    if not hard and not (found["layers"] and found["python"]):
        hard = failed
    if hard:
        kind = errors.by_kind(str(hard[0].get("kind")))
        chosen = kind if kind is not RemoteOpsError else PreflightFailed
        told = "; ".join(
            f"{check['name']}: {check['found']} (needed: {check['need']})"
            if check["need"]
            else f"{check['name']}: {check['found']}"
            for check in hard
        )
        raise chosen(
            f"preflight: {told}",
            host=host.name,
            tried=f"{len(found['checks'])} checks before loading anything",
            hint="; ".join(dict.fromkeys(str(check["hint"]) for check in hard if check["hint"])),
            checks=found["checks"],
        )
    return [str(check["name"]) for check in failed]


def _wants_generator(job: Mapping[str, Any], able: capabilities.Capabilities, found: Mapping[str, Any]) -> bool:
    """Whether a clean audit would lead to the generator; what nobody uses is neither audited nor patched."""
    try:
        engine, _ = capabilities.choose(
            str(job["engine"]),
            able,
            breaks=0,
            tensor_parallel=int(job["tensor_parallel"]),
            layers=found["layers"],
            num_layers=found["shape"]["num_layers"],
        )
    except AgentError:
        return False
    return engine.startswith("generator")


def _engine(
    host: Host,
    job: Mapping[str, Any],
    able: capabilities.Capabilities,
    found: Mapping[str, Any],
    document: Mapping[str, Any] | None,
    force: bool,
    skipped: list[str],
) -> tuple[str, list[str]]:
    breaks = probe.breaks(document) if document is not None else []
    engine, why = _local(
        host,
        lambda: capabilities.choose(
            str(job["engine"]),
            able,
            breaks=0 if force else len(breaks) if document is not None else None,
            tensor_parallel=int(job["tensor_parallel"]),
            layers=found["layers"],
            num_layers=found["shape"]["num_layers"],
            force=force,
        ),
        findings=breaks,
    )
    if breaks and engine.startswith("generator"):
        if not force:
            shown = "; ".join(f"{one['file']}:{one['line']} {one['kind']} {one['symbol']}" for one in breaks[:8])
            raise AuditBroken(
                f"{len(breaks)} breaks between speculators and vLLM would stop the run: {shown}",
                host=host.name,
                tried="audit of what is installed there",
                hint="fab patch shows and mends them; fab extract --patch does both",
                findings=breaks,
            )
        skipped.append("audit")
    return engine, why


def _audit(host: Host, found: Mapping[str, Any], agent: Agent) -> dict[str, Any]:
    return probe.probe(host, agent=agent, baseline=None, model=found["shape"]["architecture"] or None)


def _patch(host: Host, agent: Agent, model: str | None, tell: OnEvent) -> dict[str, Any]:
    planned = patch.plan(host, model=model, agent=agent)
    tell({"event": "patch", **planned.as_dict()})
    return patch.apply(host, planned, agent=agent, on_event=tell).as_dict()


def _local(host: Host, call: Callable[[], Any], **data: Any) -> Any:
    """An AgentError of code that both sides share, as the operator's error."""
    try:
        return call()
    except AgentError as error:
        raise errors.by_kind(error.kind)(
            error.message, host=host.name, tried=error.tried, hint=error.hint, **{**error.data, **data}
        ) from None


class _Clock:
    """Seconds of named steps; each is told when it begins."""

    def __init__(self, tell: OnEvent) -> None:
        self.tell = tell
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.tell({"event": "step", "step": name})
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - began, 3)


class _Silent:
    """A sink that keeps nothing."""

    def log(self, target: int, data: bytes) -> None: ...
    def notice(self, target: int, kind: str, text: str) -> None: ...
    def status(self, target: int, status: dict[str, Any]) -> None: ...
    def ended(self, target: int, status: dict[str, Any]) -> None: ...
    def failed(self, target: int, error: RemoteOpsError) -> None: ...
    def idle(self) -> None: ...


def _ignore(event: dict[str, Any]) -> None:
    pass


__all__ = ["Options", "Started", "extract", "finish", "start"]
