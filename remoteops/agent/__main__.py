"""Runs one verb: ``python3 -I agent-<hash>.pyz VERB`` with the request on stdin and events on stdout."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import os
import select
import sys
import time

from remoteops.agent import quickjson
from remoteops.agent.protocol import ERROR, PROTOCOL, READS, RESULT, AgentError, Emitter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List

    Handler = Callable[[Dict[str, Any], Emitter], Dict[str, Any]]

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
    "patch.audit": "remoteops.agent.shadow:audit",
    "preflight": "remoteops.agent.preflight:preflight",
    "run.start": "remoteops.agent.runs:start",
    "run.list": "remoteops.agent.runs:list_runs",
    "run.status": "remoteops.agent.runs:status",
    "run.job": "remoteops.agent.jobs:job",
    "run.stop": "remoteops.agent.runs:stop",
    "run.follow": "remoteops.agent.follow:follow",
    "leftovers": "remoteops.agent.leftovers:leftovers",
    "rehearsal.make": "remoteops.agent.rehearse:make",
    "verify": "remoteops.agent.verify:verify",
    "pull.list": "remoteops.agent.pull:list_files",
}


def load(verb: str) -> Handler:
    """The handler of a verb. Raises AgentError(UsageError) for one that this agent does not know."""
    if verb not in VERBS:
        raise AgentError("UsageError", "the agent knows no verb %r" % verb, hint="verbs: " + ", ".join(sorted(VERBS)))
    module, _, function = VERBS[verb].partition(":")
    __import__(module)
    handler: Handler = getattr(sys.modules[module], function)
    return handler


def main(argv: List[str]) -> int:
    """Exit status 0 after a result, 1 after an error event; both are also in the stream."""
    # stdout belongs to events alone: whatever else prints (a library, a child) goes to stderr. stdin is the operator's
    # sign of life: no child may hold it.
    events = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    line = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    emit = Emitter(events)
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    verb = argv[0] if argv else ""
    try:
        request = read_request(line)
        watch = request.pop("watch", None)
        if request.pop("protocol", PROTOCOL) != PROTOCOL:
            raise AgentError("UsageError", "this agent speaks protocol %d" % PROTOCOL)
        handler = load(verb)
        if watch:
            _thread.start_new_thread(_watch, (line, float(watch), emit, verb in READS, _thread.get_ident()))
        emit(RESULT, data=handler(request, emit))
        return 0
    except AgentError as error:
        emit(ERROR, **error.fields())
    except KeyboardInterrupt:
        emit(ERROR, kind="Interrupted", message="interrupted", tried="", hint="", data={})
    except Exception as error:  # noqa: BLE001 - the door: whatever happens leaves as one typed event
        import traceback

        emit(
            ERROR,
            kind="AgentCrashed",
            message="%s: %s" % (type(error).__name__, error),
            tried="verb %s" % " ".join(argv),
            hint="this is a defect of remoteops; the traceback is in data",
            data={"traceback": traceback.format_exc()},
        )
    return 1


def read_request(fd: int) -> Dict[str, Any]:
    """The request from the first line of ``fd`` (or from all of it, where it is spread over lines by hand)."""
    text = b""
    while True:
        chunk = os.read(fd, 65536)
        text += chunk
        if not chunk and not text.strip():
            return {}
        if not chunk or b"\n" in chunk:
            try:
                request = quickjson.loads(text.decode("utf-8"))
            except ValueError as error:
                if chunk:
                    continue
                raise AgentError("UsageError", "the request is no JSON: %s" % error) from None
            if not isinstance(request, dict):
                raise AgentError("UsageError", "the request must be a JSON object")
            return request


def _watch(fd: int, patience: float, emit: Emitter, interrupt: bool, main_thread: int) -> None:
    """Waits for the operator to go (see protocol.py)."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while True:
        try:
            if not poll.poll(int(patience * 1000)) or not os.read(fd, 65536):
                break
        except OSError:
            break
    emit.gone.set()
    if not interrupt:
        return
    _signal.pthread_kill(main_thread, _signal.SIGINT)
    time.sleep(0.8)
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
