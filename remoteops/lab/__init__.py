"""The embedded host ``lab``: a private sshd, real vLLM on the CPU, a tiny model; otherwise a host like any other.

``resolve(host)`` turns a host with ``connect: lab`` into an ordinary SSH host and brings it up first where needed.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from remoteops.errors import UsageError
from remoteops.lab.place import Place, Report, profile, profiles, to_stderr

if TYPE_CHECKING:
    from remoteops.inventory import Host

__all__ = ["down", "endpoint", "resolve", "status", "up"]


def resolve(host: Host, report: Report = to_stderr) -> Host:
    """The lab as the SSH host it is. Does nothing but read one record when the lab is up.

    Raises LabError when it cannot be built or started.
    """
    if host.connect != "lab":
        return host
    place = Place(host.lab.profile)
    _bring_up(place, host, report)
    return _as_ssh(place, host)


endpoint = resolve


def up(name: str = "seed", report: Report = to_stderr) -> dict[str, Any]:
    """Build, start and furnish the host of a profile; returns its status."""
    from remoteops.inventory import Host, LabSpec

    place = Place(profile(name).name)
    _bring_up(place, Host(name="lab", connect="lab", lab=LabSpec(profile=name)), report)
    return status(name)


def status(name: str | None = None) -> dict[str, Any]:
    """What there is of the lab: for each profile whether it is built and running, its port, versions and size."""
    from remoteops.lab import server

    labs = []
    for each in [profile(name).name] if name else profiles():
        place = Place(each)
        state = place.state()
        labs.append(
            {
                "profile": each,
                "title": profile(each).title,
                "root": str(place.root),
                "built": "venv" in state,
                "running": server.running(place),
                "server": state.get("server"),
                "port": state.get("port"),
                "versions": state.get("versions", {}),
                "furnished": "furnished" in state,
                "ssh": shlex.join(["ssh", "-F", str(place.ssh_config), "lab"]),
            }
        )
    return {"schema": "remoteops.lab/1", "labs": labs}


def down(name: str | None = None, *, purge: bool = False, report: Report = to_stderr) -> dict[str, Any]:
    """Stop the server of one profile, or of all; ``purge`` also removes everything that profile has on disk."""
    import shutil

    from remoteops.lab import server

    done = []
    for each in [profile(name).name] if name else profiles():
        place = Place(each)
        there = purge and place.root.exists()
        if there:
            _unused(place)
        stopped = server.stop(place)
        if there:
            report(f"{each}: removing {place.root}")
            shutil.rmtree(place.root)
        done.append({"profile": each, "stopped": stopped, "purged": there, "root": str(place.root)})
    return {"schema": "remoteops.lab.down/1", "purge": purge, "labs": done}


def _unused(place: Place) -> None:
    """Raises UsageError when a process runs out of the lab's venv: a run would lose its files under its feet."""
    from remoteops.agent import venvusers

    users = venvusers.users_of([str(place.venv)])
    if users:
        raise UsageError(
            f"{place.venv} is in use: pid {users[0]['pid']}, {users[0]['command']}; nothing was removed",
            tried=f"remove {place.root}",
            hint="`fab stop` ends a run, `fab stop --leftovers` what earlier ones left; then again",
        )


def _bring_up(place: Place, host: Host, report: Report) -> None:
    from remoteops.lab import server

    spec = profile(place.name)
    state = place.state()
    if state.get("venv") != spec.fingerprint or not place.python.exists():
        from remoteops.lab import build

        place.prepare()
        with place.locked(report):
            build.ensure(place, spec, report)
    if not server.running(place):
        place.prepare()
        with place.locked(report):
            server.ensure(place, report)
    from remoteops.lab import furnish

    if place.state().get("furnished") != furnish.wanted(place):
        with place.locked(report):
            furnish.ensure(place, _as_ssh(place, host), report)


def _as_ssh(place: Place, host: Host) -> Host:
    from remoteops.lab import server

    found = server.as_host(place, host.name)
    known = ("address", "port", "user", "identity_files", "known_hosts", "ssh_config")
    return host.model_copy(
        update={
            **{field: getattr(found, field) for field in known},
            "connect": "ssh",
            "host_key": "strict",
            "jump": None,
            "venv": host.venv or str(place.venv),
            "python": host.python or place.state().get("python"),
        }
    )
