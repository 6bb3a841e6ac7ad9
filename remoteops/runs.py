"""Runs on a host, asked from here: launch, status, list, stop, leftovers; and the overview of many hosts at once.

Every function takes a ``Host`` and returns plain data (a dict with "schema" and "host"); none prints. An ``agent``
that is already open may be given, so that a caller with several questions connects once.
"""

from __future__ import annotations

import getpass
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from remoteops.errors import RemoteOpsError
from remoteops.inventory import Host
from remoteops.remote import Agent, open_agent

OnEvent = Callable[[dict[str, Any]], None]
AT_ONCE = 32
"""Hosts asked at the same time by ``overview``."""


@contextmanager
def _using(host: Host, agent: Agent | None) -> Iterator[Agent]:
    if agent is not None:
        yield agent
        return
    with open_agent(host) as opened:
        yield opened


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
    with _using(host, agent) as door:
        data = door.call("run.start", {**base(host), **request, "force": force, "allow_second": allow_second})
    return {"schema": "remoteops.launch/1", "host": host.name, **data}


def status(host: Host, run: str | None = None, *, agent: Agent | None = None) -> dict[str, Any]:
    """The status of one run (none named: the newest). Raises RunNotFound, LinkError."""
    with _using(host, agent) as door:
        return {**door.call("run.status", {**base(host), "run": run}), "host": host.name}


def list(host: Host, *, limit: int = 20, agent: Agent | None = None) -> dict[str, Any]:
    """{"runs": [status, newest first], "total", "host"}. Raises LinkError."""
    with _using(host, agent) as door:
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
    with _using(host, agent) as door:
        data = door.call("run.stop", {**base(host), "run": run, "grace": grace, "by": who()}, on_event=on_event)
    return {**data, "host": host.name}


def leftovers(host: Host, *, agent: Agent | None = None) -> dict[str, Any]:
    """{"leftovers": [{"pid", "user", "command", "memory", "gpus", "sort", "run"}], "gpus"}. Raises LinkError."""
    with _using(host, agent) as door:
        return {"schema": "remoteops.leftovers/1", "host": host.name, **door.call("leftovers", base(host))}


def stop_leftovers(host: Host, *, grace: float = 10.0, agent: Agent | None = None) -> dict[str, Any]:
    """End the processes that runs left behind; those of other people are named and left alone.

    Returns {"ended": [...], "left": [...]}. Raises LinkError.
    """
    with _using(host, agent) as door:
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
            for part in pool.map(ask, hosts):
                parts[part["host"]] = part
                if on_host is not None:
                    on_host(part)
    return {"schema": "remoteops.overview/1", "hosts": [parts[host.name] for host in hosts]}
