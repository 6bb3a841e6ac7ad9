"""Runs on a host, asked from here: launch, status, list, stop, leftovers; and the overview of many hosts at once.

Every function takes a ``Host`` and returns plain data (a dict with "schema" and "host"); none prints. An ``agent``
that is already open may be given, so that a caller with several questions connects once.
"""

from __future__ import annotations

import getpass
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from remoteops.door import using
from remoteops.errors import ConnectionLost, LinkTimeout, RemoteOpsError, Unreachable
from remoteops.inventory import Host
from remoteops.remote import Agent

OnEvent = Callable[[dict[str, Any]], None]
AT_ONCE = 32
"""Hosts asked at the same time by ``overview``."""
PAUSES = (0.5, 2.0, 5.0, 10.0)
"""Seconds before a launch or a stop is asked again after the link was lost."""


def base(host: Host) -> dict[str, Any]:
    """What every request about runs carries: where this host keeps them."""
    return {"state_dir": host.state_dir}


def who() -> str:
    """Who asks, as others will read it: user@machine of the operator."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):
        return "an operator"


def launch(
    host: Host, request: dict[str, Any], *, force: bool = False, allow_second: bool = False, agent: Agent | None = None
) -> dict[str, Any]:
    """Start a program on the host that outlives this connection; it was seen alive when this returns.

    ``request`` as the agent's ``run.start`` takes it ("argv", "env", "cwd", "request", "label", …).
    Returns {"run", "path", "pid", "survives", "warning", …}. Raises RunActive, GpuBusy, HostStateError, LinkError.
    """
    # The token makes a second call after a lost link give the run that the first one started.
    asked = {**base(host), **request, "force": force, "allow_second": allow_second, "token": secrets.token_hex(8)}
    data = _patient(host, agent, "run.start", asked)
    return {"schema": "remoteops.launch/1", "host": host.name, **data}


def status(host: Host, run: str | None = None, *, agent: Agent | None = None) -> dict[str, Any]:
    """The status of one run (none named: the newest). Raises RunNotFound, LinkError."""
    with using(host, agent) as door:
        return {**door.call("run.status", {**base(host), "run": run}), "host": host.name}


def list(host: Host, *, limit: int = 20, agent: Agent | None = None) -> dict[str, Any]:
    """{"runs": [status, newest first], "total", "host"}. Raises LinkError."""
    with using(host, agent) as door:
        return {
            "schema": "remoteops.runs/1",
            "host": host.name,
            **door.call("run.list", {**base(host), "limit": limit}),
        }


def stop(
    host: Host, run: str | None, *, grace: float = 60.0, on_event: OnEvent | None = None, agent: Agent | None = None
) -> dict[str, Any]:
    """Ask a run to end, then kill what is left of it; returns its final status once nothing is left and its GPU
    memory is free.

    ``grace``: seconds between asking and killing. Raises RunNotFound, HostStateError (processes that not even
    SIGKILL ends), LinkError.
    """
    request = {**base(host), "run": run, "grace": grace, "by": who()}
    if run is None:
        request["run"] = status(host, agent=agent)["run"]  # asked again, "the newest" must be the same one
    return {**_patient(host, agent, "run.stop", request, on_event), "host": host.name}


def _patient(
    host: Host, agent: Agent | None, verb: str, request: dict[str, Any], on_event: OnEvent | None = None
) -> dict[str, Any]:
    """Call a verb that may safely be asked twice; after a lost link it is asked again over a new one."""
    for pause in (*PAUSES, None):
        try:
            with using(host, agent) as door:
                return door.call(verb, request, on_event=on_event)
        except (ConnectionLost, LinkTimeout, Unreachable) as error:
            if pause is None or (isinstance(error, Unreachable) and pause == PAUSES[0]):
                raise
            agent = None
            time.sleep(pause)
    raise AssertionError("unreachable")


def leftovers(host: Host, *, agent: Agent | None = None) -> dict[str, Any]:
    """{"leftovers": [{"pid", "user", "command", "memory", "gpus", "sort", "run"}], "gpus"}. Raises LinkError."""
    with using(host, agent) as door:
        return {"schema": "remoteops.leftovers/1", "host": host.name, **door.call("leftovers", base(host))}


def stop_leftovers(host: Host, *, grace: float = 10.0, agent: Agent | None = None) -> dict[str, Any]:
    """End the processes that runs left behind; those of other people are named and left alone.

    Returns {"ended": [...], "left": [...]}. Raises LinkError.
    """
    with using(host, agent) as door:
        data = door.call("run.stop", {**base(host), "leftovers": True, "grace": grace})
    return {"schema": "remoteops.leftovers/1", "host": host.name, **data}


def overview(
    hosts: Sequence[Host], *, limit: int = 3, on_host: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """The runs of many hosts, asked at once; a host that cannot be asked has "error" and does not hold up the others.

    ``on_host`` gets each host's part as it arrives (in any order, one at a time).
    """

    def ask(host: Host) -> dict[str, Any]:
        try:
            return list(host, limit=limit)
        except RemoteOpsError as error:
            return {"schema": "remoteops.runs/1", "host": host.name, "runs": [], "error": error.as_dict()}

    parts: dict[str, dict[str, Any]] = {}
    if hosts:
        with ThreadPoolExecutor(max_workers=min(AT_ONCE, len(hosts))) as pool:
            for done in as_completed([pool.submit(ask, host) for host in hosts]):
                part = done.result()
                parts[part["host"]] = part
                if on_host is not None:
                    on_host(part)
    return {"schema": "remoteops.overview/1", "hosts": [parts[host.name] for host in hosts]}
