"""The agent's verb ``audit``."""

from __future__ import annotations

from typing import Any, Dict

from remoteops.agent import modelinfo
from remoteops.agent.audit import engine


def audit(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """Runs the audit of the request on this machine; see ``engine.audit``.

    ``model`` may also be a folder or an id in the model cache: its config.json names the class then.
    """
    model = request.get("model")
    if model and not model.isidentifier():
        request = {**request, "model": modelinfo.read(modelinfo.find(model)).architecture or None}
    return engine.audit(request)
