"""From a Host of the inventory and ssh_config to the hops that a connection takes."""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from remoteops.errors import InventoryError
from remoteops.ssh.auth import Identity
from remoteops.ssh.config import Options, SshConfig, expand, expand_hostname, expand_path, host_matches
from remoteops.ssh.hostkeys import ALGORITHMS, HostKeyPolicy, Policy
from remoteops.ssh.known_hosts import glob_matches
from remoteops.ssh.wire import CIPHERS, KEX, MACS

_WAYS = {"proxyjump", "proxycommand"}


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
    kex: Sequence[str] = KEX


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
    """The route to a Host: what the inventory says first, then ssh_config as for ``ssh NAME`` (and ``ssh ADDRESS``).

    Raises InventoryError for settings that cannot be carried out.
    """
    config = SshConfig(host.ssh_config)
    options = config.lookup(host.name, user=host.user, hostname=host.address, port=host.port)
    if host.address and host.address != host.name:
        _fill(options, config.lookup(host.address, user=host.user, port=host.port))
    notices = list(options.notices)
    explicit = getattr(host, "model_fields_set", None)
    policy = host.host_key if explicit is None or "host_key" in explicit else None
    base = _Settings(host, config, policy, notices)
    target = base.hop(options, host.name, own_files=host.identity_files)
    hops = [*base.jumps(options, host.jump), target]
    if len(hops) > 1:
        hops[-1] = replace(target, proxy_command=None)
    return Route(host.name, tuple(hops), _environment(options), tuple(dict.fromkeys(notices)))


def _fill(options: Options, more: Options) -> None:
    """Take from ``more`` what ``options`` leaves open; repeatable options are joined."""
    for key, words in more.values.items():
        if key in ("identityfile", "certificatefile", "sendenv"):
            options.values[key] = list(dict.fromkeys([*options.words(key), *words]))
        elif key not in options.values and not (key in _WAYS and _WAYS & options.values.keys()):
            options.values[key] = words
        options.where.setdefault(key, more.where.get(key, ""))
    options.notices += [notice for notice in more.notices if notice not in options.notices]


class _Settings:
    """What all hops of one route share."""

    def __init__(self, host: Any, config: SshConfig, policy: Policy | None, notices: list[str]) -> None:
        self._host = host
        self._config = config
        self._policy = policy
        self._notices = notices
        self._bounds = Bounds(**{name: float(getattr(host.timeouts, name)) for name in Bounds.__dataclass_fields__})
        self._set_bounds: frozenset[str] = frozenset(getattr(host.timeouts, "model_fields_set", ()))

    def jumps(self, options: Options, named: str | None) -> list[Hop]:
        text = named if named is not None else options.text("proxyjump")
        if text is None or text.strip().lower() in ("none", ""):
            return []
        if named is None:
            # ssh reads ProxyJump's value up to the first blank; several hosts are joined by commas.
            text = expand(text, options)
        specs = [parse_jump(part, self._host.name) for part in text.split(",")]
        if named is None:
            # `Host *` with a ProxyJump also matches the jump host itself: it needs no jump to itself.
            specs = [
                spec
                for spec in specs
                if spec[1].lower() not in (self._host.name.lower(), (self._host.address or "").lower())
            ]
        return self._chain(specs, [self._host.name])

    def _chain(self, specs: list[tuple[str | None, str, int | None]], seen: list[str]) -> list[Hop]:
        """The hops for a list of jump hosts. The first one's own ProxyJump or ProxyCommand counts, as with ssh -J."""
        hops: list[Hop] = []
        for index, (user, name, port) in enumerate(specs):
            options = self._config.lookup(name, user=user, port=port)
            self._notices += [notice for notice in options.notices if notice not in self._notices]
            hop = self.hop(options, name, own_files=())
            before = options.text("proxyjump")
            if index == 0 and before is not None and before.lower() != "none":
                further = [
                    item
                    for item in (parse_jump(part, name) for part in expand(before, options).split(","))
                    if item[1].lower() != name.lower()
                ]  # `Host *` with a ProxyJump names the jump host itself too
                if name in seen or len(seen) > 8:
                    raise InventoryError(
                        f"ProxyJump goes in a circle: {' -> '.join([*seen, name])}",
                        host=self._host.name,
                        hint="put `ProxyJump none` under the first jump host in ssh_config",
                    )
                hops += self._chain(further, [*seen, name])
            hops.append(hop if not hops else replace(hop, proxy_command=None))
        return hops

    def hop(self, options: Options, label: str, *, own_files: Sequence[str]) -> Hop:
        address = expand_hostname(options)
        port = int(options.number("port") or 22)
        command = options.text("proxycommand")
        if command is not None and command.lower() == "none":
            command = None
        ciphers, macs, kex = (
            self._algorithms(options, key, preferred)
            for key, preferred in (("ciphers", CIPHERS), ("macs", MACS), ("kexalgorithms", KEX))
        )
        return Hop(
            label,
            address,
            port,
            self._identity(options, own_files),
            self._host_keys(options, address, port),
            self._timeouts(options),
            proxy_command=expand(command, options) if command else None,
            family={"inet": socket.AF_INET, "inet6": socket.AF_INET6}.get(
                (options.text("addressfamily") or "").lower(), socket.AF_UNSPEC
            ),
            bind_address=options.text("bindaddress"),
            compression=bool(options.flag("compression")),
            ciphers=ciphers,
            macs=macs,
            kex=kex,
        )

    def _identity(self, options: Options, own_files: Sequence[str]) -> Identity:
        files = [os.path.expanduser(item) for item in own_files]
        files += [expand_path(item, options) for item in options.words("identityfile") if item.lower() != "none"]
        if not own_files:
            files += [os.path.expanduser(item) for item in self._host.identity_files]  # for jump hosts, after their own
        only_none = [item.lower() for item in options.words("identityfile")] == ["none"]
        agent = options.text("identityagent") or os.environ.get("SSH_AUTH_SOCK")
        if agent is not None and agent.startswith("$"):
            agent = os.environ.get(agent.lstrip("$").strip("{}"))
        elif agent == "SSH_AUTH_SOCK":
            agent = os.environ.get("SSH_AUTH_SOCK")
        if agent is not None:
            agent = None if agent.lower() in ("none", "") else expand_path(agent, options)
        methods = options.text("preferredauthentications")
        keys = options.flag("pubkeyauthentication") is not False and (
            methods is None or "publickey" in methods.split(",")
        )
        passwords = (
            self._host.password_auth
            and not options.flag("batchmode")
            and options.flag("passwordauthentication") is not False
        )
        return Identity(
            options.text("user") or getpass.getuser(),
            tuple(dict.fromkeys(files)) if keys else (),
            tuple(expand_path(item, options) for item in options.words("certificatefile") if item.lower() != "none"),
            agent if keys else None,
            only_files=bool(options.flag("identitiesonly")) or only_none,
            defaults=keys and not only_none,
            passwords=bool(passwords),
            ask=not options.flag("batchmode"),
        )

    def _host_keys(self, options: Options, address: str, port: int) -> HostKeyPolicy:
        files = [os.path.expanduser(item) for item in self._host.known_hosts or ()]
        if not files:
            user = options.words("userknownhostsfile") or ["~/.ssh/known_hosts", "~/.ssh/known_hosts2"]
            system = options.words("globalknownhostsfile") or ["/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2"]
            files = [expand_path(item, options) for item in [*user, *system] if item.lower() != "none"]
        notices: list[str] = []
        policy = self._policy or self._strictness(options)
        if policy == "accept-new" and (not files or files[0] == os.devnull):
            # Keys accepted into /dev/null would be accepted again whatever they are: the check would be off.
            own = os.path.expanduser("~/.local/state/remoteops/known_hosts")
            self._notices.append(
                f"UserKnownHostsFile keeps no keys: those accepted are kept in {own}, and changed ones refused"
            )
            files = [own, *(item for item in files if item != os.devnull)]
        offer = self._algorithms(options, "hostkeyalgorithms", ALGORITHMS)
        revoked = options.text("revokedhostkeys")
        return HostKeyPolicy(
            self._host.name,
            address,
            port,
            files,
            policy,
            options.text("hostkeyalias"),
            bool(options.flag("hashknownhosts")),
            offer or ALGORITHMS,
            (expand_path(revoked, options),) if revoked and revoked.lower() != "none" else (),
            notices,
        )

    def _strictness(self, options: Options) -> Policy:
        """StrictHostKeyChecking; nothing in ssh_config can make us take a changed key."""
        value = (options.text("stricthostkeychecking") or "ask").lower()
        if value in ("no", "off", "false"):
            where = options.where.get("stricthostkeychecking", "ssh_config")
            self._notices.append(
                f"{where}: StrictHostKeyChecking {value} is read as accept-new: a changed key is still refused"
            )
        return "accept-new" if value in ("no", "off", "false", "accept-new") else "strict"

    def _timeouts(self, options: Options) -> Bounds:
        bounds = self._bounds
        connect = options.number("connecttimeout")
        if connect and "connect" not in self._set_bounds:
            bounds = replace(bounds, connect=connect)
        interval = options.number("serveraliveinterval")
        if interval and "silence" not in self._set_bounds:
            count = options.number("serveralivecountmax")
            bounds = replace(bounds, silence=interval * (3 if count is None else max(1.0, count)))
        return bounds

    def _algorithms(self, options: Options, key: str, preferred: Sequence[str]) -> tuple[str, ...]:
        """An algorithm list of ssh_config (+added, -removed, ^first, or a whole list) over our own order."""
        text = options.text(key)
        if text is None:
            return tuple(preferred)
        sign, names = (text[0], text[1:]) if text[0] in "+-^" else ("", text)
        wanted = names.split(",")
        if sign == "-":
            return tuple(name for name in preferred if not host_matches(wanted, name))
        if sign == "+":
            return tuple(dict.fromkeys([*preferred, *wanted]))
        if sign == "^":
            return tuple(dict.fromkeys([*wanted, *preferred]))
        return tuple(wanted)


def parse_jump(text: str, host: str) -> tuple[str | None, str, int | None]:
    """[user@]host[:port] or ssh://…; IPv6 addresses in brackets. Raises InventoryError."""
    spec = text.strip().removeprefix("ssh://").rstrip("/")
    user, at, rest = spec.rpartition("@")
    parts = re.fullmatch(r"\[([^\]]+)\](?::(\d+))?|([^:\[\]]+)(?::(\d+))?|([0-9A-Fa-f:]+)", rest)
    name = parts and (parts.group(1) or parts.group(3) or parts.group(5))
    port = parts and (parts.group(2) or parts.group(4))
    if not name or re.search(r"\s", spec) or (at and not user) or (port and not 0 < int(port) < 65536):
        raise InventoryError(
            f"no jump host: {text!r}", host=host, key="jump", hint="write [user@]host[:port], several joined by commas"
        )
    return user or None, name, int(port) if port else None


def _environment(options: Options) -> dict[str, str]:
    """SendEnv and SetEnv, for the server's AcceptEnv to take or leave."""
    sent = {
        name: value
        for name, value in os.environ.items()
        if any(glob_matches(item, name) for item in options.words("sendenv"))
    }
    for item in options.words("setenv"):
        name, equals, value = item.partition("=")
        if equals:
            sent[name] = value
    return sent
