"""From a Host of the inventory and ssh_config to the hops that a connection takes."""
from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from remoteops.ssh.auth import Identity
from remoteops.ssh.hostkeys import HostKeyPolicy
from remoteops.ssh.wire import CIPHERS, MACS


@dataclass(frozen=True)
class Bounds:
    """Seconds each step may take."""

    connect: float = 10
    banner: float = 15
    auth: float = 20
    channel: float = 10
    silence: float = 15


@dataclass(frozen=True)
class Hop:
    """One server on the way: where, as whom, and what it must prove."""

    label: str
    address: str
    port: int
    identity: Identity
    host_keys: HostKeyPolicy
    timeouts: Bounds
    proxy_command: str | None = None
    family: int = socket.AF_UNSPEC
    bind_address: str | None = None
    compression: bool = False
    ciphers: Sequence[str] = CIPHERS
    macs: Sequence[str] = MACS
    kex: Sequence[str] = ()


@dataclass(frozen=True)
class Route:
    """All hops; the last one is the host. ``environment`` is sent as SSH env requests (SetEnv, SendEnv)."""

    host: str
    hops: tuple[Hop, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    @property
    def target(self) -> Hop:
        return self.hops[-1]


def resolve(host: Any) -> Route:
    """The route to a Host. Raises InventoryError or UsageError for settings that contradict each other."""
    bounds = Bounds(**{name: float(getattr(host.timeouts, name)) for name in Bounds.__dataclass_fields__})
    address, port = host.address or host.name, host.port or 22
    files = tuple(os.path.expanduser(item) for item in (host.known_hosts or ("~/.ssh/known_hosts", "/etc/ssh/ssh_known_hosts")))
    identity = Identity(host.user or getpass.getuser(), tuple(os.path.expanduser(item) for item in host.identity_files),
                        agent=os.environ.get("SSH_AUTH_SOCK"), passwords=host.password_auth)
    policy = HostKeyPolicy(host.name, address, port, files, host.host_key)
    return Route(host.name, (Hop(host.name, address, port, identity, policy, bounds),))
