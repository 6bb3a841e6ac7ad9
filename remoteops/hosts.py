"""`fab hosts`: what each name of the inventory resolves to once ssh_config has had its say. Opens no connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remoteops.errors import RemoteOpsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from remoteops.inventory import Host, Inventory


def describe(inventory: Inventory, only: Sequence[str] = ()) -> dict[str, Any]:
    """Document remoteops.hosts/1: for each host its target, jump hosts, keys, interpreter, venv and groups.

    ``only``: names and groups; nothing or "all" means every host. Raises UnknownHost.
    """
    names = [host.name for host in inventory.select(only)] if only and "all" not in only else inventory.names
    return {
        "schema": "remoteops.hosts/1",
        "file": str(inventory.path),
        "default": inventory.default,
        "groups": {name: list(members) for name, members in inventory.groups.items()},
        "hosts": [{**describe_one(inventory.host(name)), "default": name == inventory.default} for name in names],
    }


def describe_one(host: Host) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": host.name,
        "connect": host.connect,
        "target": "",
        "jump": "",
        "keys": [],
        "python": host.python,
        "venv": host.venv,
        "state_dir": host.state_dir,
        "model": host.workload.model,
        "groups": list(host.groups),
        "notices": [],
    }
    if host.connect == "local":
        return {**entry, "target": "this machine"}
    if host.connect == "lab":
        return {**entry, "target": f"embedded, profile {host.lab.profile}", "venv": "built in the lab's cache"}
    from remoteops.ssh.route import resolve

    try:
        route = resolve(host)
    except RemoteOpsError as error:
        return {**entry, "target": f"not usable: {error.message}"}
    *before, target = route.hops
    user = getattr(target.identity, "user", None)
    entry["target"] = f"{user}@{target.address}:{target.port}" if user else f"{target.address}:{target.port}"
    entry["jump"] = " then ".join(f"{hop.identity.user}@{hop.address}:{hop.port}" for hop in before) or (
        f"command: {target.proxy_command}" if target.proxy_command else ""
    )
    entry["keys"] = list(target.identity.files)
    entry["notices"] = list(route.notices)
    return entry
