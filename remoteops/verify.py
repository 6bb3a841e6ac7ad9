"""The use case of ``fab verify``: the host reads back what a run wrote; only the report travels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remoteops import runs
from remoteops.door import using
from remoteops.errors import UsageError
from remoteops.inventory import Host
from remoteops.remote import Agent

OnEvent = Callable[[dict[str, Any]], None]


def verify(
    host: Host,
    run: str | None = None,
    *,
    out: str | None = None,
    reference: int = 0,
    device: str | None = None,
    agent: Agent | None = None,
    on_event: OnEvent | None = None,
) -> dict[str, Any]:
    """Check a run's samples (none named: the newest run; ``out``: a folder on the host instead).

    ``reference`` rows are recomputed with transformers, on ``device`` (None: CPU). Returns the document
    remoteops.verify/1; its "ok" is the answer. Raises UsageError, RunNotFound, OutputMismatch, MissingVenv,
    MissingPackage, LinkError.
    """
    if reference < 0:
        raise UsageError(
            "reference is a number of rows", host=host.name, tried=f"reference {reference}", hint="0 or more"
        )
    request = {**runs.base(host), "run": run, "out": out, "venv": host.venv, "reference": reference, "device": device}
    with using(host, agent) as door:
        report = door.call("verify", {**request, "env": {**host.env, **host.workload.env}}, on_event=on_event)
    return {**report, "schema": "remoteops.verify/1", "host": host.name}


def exit_code(report: dict[str, Any]) -> int:
    """0 when everything is as it should be, else 1."""
    return 0 if report.get("ok") is True else 1
