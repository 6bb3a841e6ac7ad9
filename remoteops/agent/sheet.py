"""What preflight checks write down, and what later checks learn from earlier ones."""

from __future__ import annotations

import os
from typing import Any, Dict, List, Mapping, Optional

from remoteops.agent import capabilities, modelinfo, venv
from remoteops.agent.rundir import runs_root

GIB = float(1 << 30)


class Sheet:
    """The request of a preflight and its checks so far. A fact that was not learned is None, and checks that need it
    say None too."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.request = request
        self.job: Dict[str, Any] = dict(request.get("job") or {})
        self.env = {**os.environ, **{key: str(value) for key, value in (request.get("env") or {}).items()}}
        self.checks: List[Dict[str, Any]] = []
        self.venv: Optional[venv.Venv] = None
        self.shape: Optional[modelinfo.Shape] = None
        self.layers: Optional[List[int]] = None
        self.able: Optional[capabilities.Capabilities] = None
        self.size: Optional[Dict[str, Any]] = None
        self.done_rows = 0

    def add(
        self, name: str, ok: Optional[bool], found: str, need: str, hint: str = "", kind: str = "PreflightFailed"
    ) -> None:
        """``ok``: True, False, or None when it could not be told. ``kind``: the error class that a False stands for."""
        self.checks.append(
            {"name": name, "ok": ok, "found": found, "need": need, "hint": hint if ok is not True else "", "kind": kind}
        )

    def dtype(self) -> Optional[str]:
        """The dtype of the states on disk."""
        return modelinfo.stored_dtype(str(self.job.get("dtype") or "auto"), self.shape) if self.shape else None

    def out(self) -> str:
        """The output folder; where none is named it will lie in the run's own folder, which does not exist yet."""
        named = self.job.get("out")
        if named:
            return os.path.abspath(os.path.expanduser(str(named)))
        return os.path.join(runs_root(dict(self.request)), "NEW", "out")
