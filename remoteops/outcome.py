"""What became of an extraction: where its time went, and the error that a failed one stands for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from remoteops import errors
from remoteops.errors import RemoteOpsError, RunFailed
from remoteops.inventory import Host


def seconds(
    before: Mapping[str, float],
    phases: Mapping[str, float],
    after: Mapping[str, float],
    report: Mapping[str, Any],
    began: float | None,
) -> dict[str, float]:
    """Seconds of every step; ``toolkit`` is what is neither patching, nor a rehearsal's model, nor the engine's
    start, compute or end, nor transformers'.

    ``began``: time.monotonic() when the command began; None leaves total and toolkit out.
    """
    found = {**before, **{f"run.{name}": value for name, value in phases.items()}, **after}
    if began is not None:
        found["total"] = round(time.monotonic() - began, 3)
        engine = sum(phases.get(name, 0.0) for name in ("load", "extract", "close"))
        spent = engine + (report.get("seconds") or {}).get("reference", 0.0)
        found["toolkit"] = round(found["total"] - spent - found.get("patch", 0.0) - found.get("rehearse", 0.0), 3)
    return found


def failure(
    host: Host, run: str, story: Mapping[str, Any], status: Mapping[str, Any], document: dict[str, Any]
) -> RemoteOpsError:
    """The error a run that is not done stands for: the kind its engine named, with the error lines of its log as
    causes."""
    failure = story.get("failure") or status.get("last_error") or {}
    kind = errors.by_kind(str(failure.get("kind") or "RunFailed"))
    causes = [str(one) for one in failure.get("causes") or ()]
    message = failure.get("message") or status.get("reason") or f"the run is {status.get('state')}"
    resume = f"fab tail-logs --run {run} shows the log; fab extract --resume {run} goes on where it stopped"
    return (kind if kind is not RemoteOpsError else RunFailed)(
        f"{message}\n  cause: {causes[0]}" if causes and causes[0] not in str(message) else str(message),
        host=host.name,
        tried=f"run {run}",
        hint=failure.get("hint") or resume,
        causes=causes,
        document=document,
    )
