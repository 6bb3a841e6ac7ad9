"""Runs one verb: ``python3 -I agent-<hash>.pyz VERB`` with the request on stdin and events on stdout."""
from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from typing import Any, Callable, Dict, List

from remoteops.agent.protocol import ERROR, PROTOCOL, RESULT, AgentError, Emitter

# verb -> "module:function"; the function takes (request, emit) and returns the result's data.
VERBS: Dict[str, str] = {
    "hello": "remoteops.agent.facts:hello",
    "facts": "remoteops.agent.facts:facts",
    "audit": "remoteops.agent.audit.verb:audit",
    "audit.runtime": "remoteops.agent.audit.runtime:compare",
    "audit.shell": "remoteops.agent.audit.shell:run_checks",
    "patch.read": "remoteops.agent.patches:read",
    "patch.apply": "remoteops.agent.patches:apply",
    "patch.revert": "remoteops.agent.patches:revert",
    "patch.status": "remoteops.agent.patches:status",
    "patch.prove": "remoteops.agent.patches:prove",
    "preflight": "remoteops.agent.preflight:preflight",
    "run.start": "remoteops.agent.runs:start",
    "run.list": "remoteops.agent.runs:list_runs",
    "run.status": "remoteops.agent.runs:status",
    "run.stop": "remoteops.agent.runs:stop",
    "run.follow": "remoteops.agent.follow:follow",
    "leftovers": "remoteops.agent.leftovers:leftovers",
    "verify": "remoteops.agent.verify:verify",
    "pull.list": "remoteops.agent.pull:list_files",
}

Handler = Callable[[Dict[str, Any], Emitter], Dict[str, Any]]


def load(verb: str) -> Handler:
    """The handler of a verb. Raises AgentError(UsageError) for one that this agent does not know."""
    if verb not in VERBS:
        raise AgentError("UsageError", "the agent knows no verb %r" % verb, hint="verbs: " + ", ".join(sorted(VERBS)))
    module, _, function = VERBS[verb].partition(":")
    handler: Handler = getattr(importlib.import_module(module), function)
    return handler


def main(argv: List[str]) -> int:
    """Exit status 0 after a result, 1 after an error event; both are also in the stream."""
    # stdout belongs to events alone: whatever else prints (a library, a child) goes to stderr.
    events = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    emit = Emitter(events)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        verb = argv[0] if argv else ""
        raw = sys.stdin.buffer.read()
        request = json.loads(raw) if raw.strip() else {}
        if request.get("protocol", PROTOCOL) != PROTOCOL:
            raise AgentError("UsageError", "this agent speaks protocol %d" % PROTOCOL)
        emit(RESULT, data=load(verb)(request, emit))
        return 0
    except AgentError as error:
        emit(ERROR, **error.fields())
    except KeyboardInterrupt:
        emit(ERROR, kind="Interrupted", message="interrupted", tried="", hint="", data={})
    except Exception as error:  # noqa: BLE001 - the door: whatever happens leaves as one typed event
        emit(ERROR, kind="AgentCrashed", message="%s: %s" % (type(error).__name__, error), tried="verb %s" % " ".join(argv),
             hint="this is a defect of remoteops; the traceback is in data", data={"traceback": traceback.format_exc()})
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
