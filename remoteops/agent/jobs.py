"""What an extraction run was asked for, how long each phase took, and how it came out; read from the run directory."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

from remoteops.agent import manifest
from remoteops.agent.protocol import AgentError
from remoteops.agent.rundir import RunDir, find, read_json
from remoteops.agent.verify import output_of


def job(request: Dict[str, Any], emit: Callable[..., None]) -> Dict[str, Any]:
    """Request: "run" (none: the newest). Result: {"run","path","out","job","phases" {name:
    seconds},"outcome","failure","samples"}.

    Raises AgentError(RunNotFound), and AgentError(UsageError) for a run that is no extraction.
    """
    run = find(request)
    asked = (read_json(run.request) or {}).get("extraction")
    if not isinstance(asked, dict):
        raise AgentError(
            "UsageError",
            "run %s is no extraction" % run.id,
            tried=run.request,
            hint="name a run that fab extract started",
        )
    phases, outcome, failure = _story(run)
    found = None
    try:
        found = manifest.read(output_of(run))
    except AgentError:
        pass
    return {
        "run": run.id,
        "path": run.path,
        "out": output_of(run),
        "job": asked,
        "phases": phases,
        "outcome": outcome,
        "failure": failure,
        "samples": len(found.entries) if found else 0,
    }


def _story(run: RunDir) -> Tuple[Dict[str, float], Optional[Dict[str, Any]], Optional[Dict[str, Any]]]:
    """Seconds between the phase events, each phase ending where the next begins; the last one ends with the outcome."""
    marks: List[Tuple[str, float]] = []
    outcome: Optional[Dict[str, Any]] = None
    failure: Optional[Dict[str, Any]] = None
    for event in run.read_events():
        kind, moment = event.get("event"), event.get("t")
        if kind == "phase" and isinstance(moment, (int, float)):
            marks.append((str(event.get("phase")), float(moment)))
        elif kind == "outcome":
            outcome = event
            if isinstance(moment, (int, float)):
                marks.append(("", float(moment)))
        elif kind == "failure":
            failure = {name: event.get(name) for name in ("kind", "message", "hint", "tried", "causes")}
    phases: Dict[str, float] = {}
    for (name, begin), (_, end) in zip(marks, marks[1:]):  # noqa: RUF007
        if name:
            phases[name] = round(phases.get(name, 0.0) + end - begin, 3)
    return phases, outcome, failure
