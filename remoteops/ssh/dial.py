"""Opening a route: TCP or a proxy command, jump hosts, handshake, host key, login; each step bounded and named."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

import paramiko

from remoteops.errors import LinkError, LinkTimeout, RemoteOpsError, Unreachable
from remoteops.ssh.auth import authenticate
from remoteops.ssh.route import Hop, Route
from remoteops.ssh.wire import LinkTransport, Wire

_BUSY = ("Exceeded MaxStartups", "Not allowed at this time")  # what newer sshds say before they close


class Dialled:
    """An open route: ``transport`` to the host itself, and all that must be closed with it."""

    def __init__(self) -> None:
        self.transports: list[LinkTransport] = []
        self.proxies: list[ProxyProcess] = []
        self.notices: list[str] = []
        self.logins: list[str] = []

    @property
    def transport(self) -> LinkTransport:
        return self.transports[-1]

    def close(self) -> None:
        for transport in reversed(self.transports):
            transport.hang_up()
        for proxy in self.proxies:
            proxy.close()


class ProxyProcess:
    """A ProxyCommand on a socket pair, so that its death is an end of file and not a spinning thread."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.socket, theirs = socket.socketpair()
        try:
            # ssh hands the command to the user's shell as well; `exec` spares a process to kill later.
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except BaseException:
            self.socket.close()
            raise
        finally:
            theirs.close()
        self._errors = b""
        self._reader = threading.Thread(target=self._read_errors, name="remoteops-proxy-stderr", daemon=True)
        self._reader.start()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        while chunk := os.read(self._process.stderr.fileno(), 4096):
            self._errors = (self._errors + chunk)[-4096:]

    def said(self) -> str:
        """What it wrote on stderr and how it ended, for error messages."""
        try:
            status = self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            status = None
        text = self._errors.decode("utf-8", "replace").strip()
        ended = "" if status is None else f"ended with status {status}"
        return "; ".join(part for part in (ended, text) if part)

    def close(self) -> None:
        self.socket.close()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reader.join(1)
        if self._process.stderr is not None and not self._reader.is_alive():
            self._process.stderr.close()


def dial(route: Route) -> Dialled:
    """Open every hop. Raises Unreachable, LinkTimeout, a host key error or AuthFailed; nothing stays open then."""
    dialled = Dialled()
    try:
        for hop in route.hops:
            _open(hop, route, dialled)
    except BaseException:
        dialled.close()
        raise
    return dialled


def _open(hop: Hop, route: Route, dialled: Dialled) -> None:
    proxy: ProxyProcess | None = None
    sock: Any
    if dialled.transports:
        sock = _through(dialled.transports[-1], hop, route, dialled)
    elif hop.proxy_command:
        try:
            proxy = ProxyProcess(hop.proxy_command)
        except OSError as error:
            raise Unreachable(
                f"the proxy command could not be started: {error.strerror}",
                host=route.host,
                tried=hop.proxy_command,
                hint="ProxyCommand in ssh_config",
            ) from None
        dialled.proxies.append(proxy)
        sock = proxy.socket
    else:
        sock = connect_tcp(hop, route.host)
    transport = _handshake(sock, hop, route, proxy)
    dialled.transports.append(transport)
    dialled.notices += hop.host_keys.notices
    dialled.logins.append(authenticate(transport, hop.identity, host=_named(hop, route), timeout=hop.timeouts.auth))
    transport.settle()


def _named(hop: Hop, route: Route) -> str:
    return route.host if hop is route.hops[-1] else f"{route.host} (jump host {hop.label})"


def connect_tcp(hop: Hop, host: str) -> socket.socket:
    """A connected socket with TCP_NODELAY. Raises Unreachable; every address of the name is tried within the time."""
    deadline = time.monotonic() + hop.timeouts.connect
    target = f"{hop.address}:{hop.port}"
    try:
        addresses = socket.getaddrinfo(hop.address, hop.port, hop.family, socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise Unreachable(
            f"there is no address for the name '{hop.address}'",
            host=host,
            tried=f"look up {hop.address} ({error})",
            hint="check address in the inventory, HostName in ssh_config, or the VPN",
        ) from None
    tried: list[str] = []
    for family, kind, protocol, _, place in addresses:
        address: Any = place
        left = deadline - time.monotonic()
        if left <= 0:
            break
        sock = socket.socket(family, kind, protocol)
        sock.settimeout(left)
        try:
            if hop.bind_address:
                sock.bind((hop.bind_address, 0))
            sock.connect(address)
            _set_no_delay(sock)
        except OSError as error:
            sock.close()
            reason = "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error))
            tried.append(f"{address[0]!s} port {address[1]}: {reason}")
            last = error
            continue
        return sock
    refused = bool(tried) and getattr(last, "errno", None) == errno.ECONNREFUSED
    hint = (
        "nothing listens there: is sshd running, is the port right?"
        if refused
        else "is the host up, is the address right, does a firewall or a missing VPN drop the packets?"
    )
    raise Unreachable(
        f"no TCP connection to {target} within {hop.timeouts.connect:g} s"
        if not refused
        else f"{target} refuses the connection",
        host=host,
        tried="; ".join(tried),
        hint=hint,
    )


def _set_no_delay(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _through(transport: LinkTransport, hop: Hop, route: Route, dialled: Dialled) -> paramiko.Channel:
    via = route.hops[len(dialled.transports) - 1]
    try:
        channel: paramiko.Channel = transport.open_channel(
            "direct-tcpip", (hop.address, hop.port), ("127.0.0.1", 0), timeout=hop.timeouts.connect
        )
    except paramiko.ChannelException as error:
        raise Unreachable(
            f"jump host {via.label} could not connect to {hop.address}:{hop.port}: {error.text or error}",
            host=route.host,
            tried=f"{via.label} -> {hop.address}:{hop.port}",
            hint="is the host up, and may the jump host forward (AllowTcpForwarding)?",
        ) from None
    except (paramiko.SSHException, EOFError, OSError) as error:
        if isinstance(error, paramiko.SSHException) and "Timeout" in str(error):
            raise Unreachable(
                f"no TCP connection from jump host {via.label} to {hop.address}:{hop.port} within "
                f"{hop.timeouts.connect:g} s",
                host=route.host,
                tried=f"{via.label} -> {hop.address}:{hop.port}",
                hint="is the host up, does a firewall drop the packets?",
            ) from None
        raise Unreachable(
            f"the connection to jump host {via.label} broke: {error or type(error).__name__}",
            host=route.host,
            hint="try again; if it stays, look at the jump host",
        ) from None
    return channel


def _handshake(sock: Any, hop: Hop, route: Route, proxy: ProxyProcess | None) -> LinkTransport:
    host = _named(hop, route)
    wire = Wire(sock)
    transport = LinkTransport(wire, hop.host_keys.check)
    transport.apply(hop)
    transport.banner_timeout = hop.timeouts.banner
    transport.handshake_timeout = hop.timeouts.banner
    transport.channel_timeout = hop.timeouts.channel
    target = f"{hop.address}:{hop.port}"
    started = time.monotonic()
    try:
        transport.start_client(timeout=2 * hop.timeouts.banner)
        return transport
    except RemoteOpsError as error:
        transport.hang_up()
        error.host = error.host or host
        raise
    except (paramiko.SSHException, EOFError, OSError) as error:
        late = time.monotonic() - started >= hop.timeouts.banner - 0.2
        text = str(error) or type(error).__name__
        banner = transport.remote_version or ""
        transport.hang_up()
        if proxy is not None and (said := proxy.said()):
            raise Unreachable(
                f"the proxy command gave no connection: {said}",
                host=host,
                tried=proxy.command,
                hint="run it by hand; ProxyCommand in ssh_config",
            ) from None
        said_first = wire.head.split(b"\n")[0].strip().decode("utf-8", "replace")[:100]
        if not banner and said_first and not said_first.startswith(_BUSY):
            raise Unreachable(
                f"{target} does not speak SSH; it says {said_first!r}",
                host=host,
                tried=f"connect to {target}",
                hint="is the port right?",
            ) from None
        if late and not banner:
            raise LinkTimeout(
                f"{target} accepts connections and sends no SSH banner within {hop.timeouts.banner:g} s",
                host=host,
                tried=f"connect to {target}",
                hint="sshd may be frozen or overloaded, or another service listens there",
            ) from None
        if late:
            raise LinkTimeout(
                f"{target} stalls in the key exchange ({hop.timeouts.banner:g} s)",
                host=host,
                tried=f"talked to {banner}",
                hint="sshd may be frozen; a broken path MTU looks the same (large packets are lost)",
            ) from None
        if not banner:
            # The way in which an sshd past MaxStartups says no: it is worth another try (see transport.connect).
            raise Unreachable(
                f"{target} closed the connection before its banner",
                host=host,
                tried=f"connect to {target}",
                hint="sshd may have too many logins under way (MaxStartups), or ban this address",
                early=True,
            ) from None
        if "ncompatible" in text or "no acceptable" in text.lower():
            raise LinkError(
                f"no algorithm in common with {banner}: {text}",
                host=host,
                tried=f"talked to {target}",
                hint="update sshd on the host, or the algorithm options in ssh_config",
            ) from None
        raise Unreachable(
            f"the handshake with {target} broke off: {text}",
            host=host,
            tried=f"talked to {banner}",
            hint="look at sshd's log on the host",
            early=isinstance(error, EOFError | ConnectionResetError),
        ) from None


def describe(hops: Sequence[Hop]) -> str:
    return " -> ".join(f"{hop.identity.user}@{hop.address}:{hop.port}" for hop in hops)
