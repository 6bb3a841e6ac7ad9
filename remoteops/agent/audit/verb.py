"""The agent's verb ``audit``."""
from __future__ import annotations

from typing import Any, Dict

from remoteops.agent.audit import engine


def audit(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """Runs the audit of the request on this machine; see ``engine.audit``."""
    return engine.audit(request)
