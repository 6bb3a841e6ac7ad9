"""``<venv>/bin/python -m remoteops.agent.extraction.verify_child``: one request on stdin, JSON-line events on
stdout."""

from __future__ import annotations

import json
import os
import sys

from remoteops.agent.extraction.check import check
from remoteops.agent.protocol import AgentError, Emitter


def main() -> int:
    events = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print; stdout is for events
    emit = Emitter(events)
    asked = json.loads(sys.stdin.readline())
    try:
        emit(
            "result",
            data=check(
                asked["out"], emit, reference=asked["reference"], job=asked["job"], device=asked["device"], reject=True
            ),
        )
        return 0
    except AgentError as error:
        emit("error", **error.fields())
        return 1


if __name__ == "__main__":
    sys.exit(main())
