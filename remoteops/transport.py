"""Link: one verified, kept-alive SSH connection to a host; LocalLink: the same for this machine.

    with connect(host) as link:
        done = link.exec(["nvidia-smi", "-L"])

Every connection of remoteops is opened here (or in ssh/dial.py, below it): there is no other door.
"""

from __future__ import annotations

import io
import random
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import paramiko

from remoteops.errors import (
    ConnectionLost,
    LinkError,
    LinkTimeout,
    SessionRefused,
    Unreachable,
    UsageError,
)
from remoteops.local import LocalProcess
from remoteops.ssh import sftp
from remoteops.ssh.baselink import BaseLink, Completed, Progress
from remoteops.ssh.dial import Dialled, describe, dial
from remoteops.ssh.process import (
    LAUNCHER,
    Process,
    RemoteProcess,
    command_line,
    new_marker,
    send_exec,
)
from remoteops.ssh.route import Route, resolve
from remoteops.ssh.wire import WINDOW, Heartbeat, LinkTransport

__all__ = ["BaseLink", "Completed", "Link", "LocalLink", "close_links_of", "connect"]
BUSY_TRIES = 6  # connections to an sshd that drops logins (MaxStartups) before giving up


class Link(BaseLink):
    """An open connection; make one with ``connect``. Its methods may be used from several threads."""

    def __init__(self, host: Any, route: Route, dialled: Dialled) -> None:
        self.host = host
        self.route = route
        self.description = describe(route.hops)
        self.notices = [*route.notices, *dialled.notices]
        self._dialled = dialled
        self._transport: LinkTransport = dialled.transport
        self._heartbeat = Heartbeat(self._transport, route.target.timeouts.silence)
        self._heartbeat.start()
        self._sessions = threading.Condition()
        self._open = 0
        self._closed = False
        self.opened_by = threading.get_ident()

    @property
    def transport(self) -> LinkTransport:
        """The paramiko transport, verified and logged in (for forwarding ports, and for Fabric)."""
        return self._transport

    def start(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> RemoteProcess:
        """Start a command; see BaseLink.exec. Raises SessionRefused, LinkTimeout, ConnectionLost."""
        marker = new_marker()
        line = command_line(argv, {**self.host.env, **(env or {})}, marker).encode("utf-8", "surrogateescape")
        channel = self._session()
        process = RemoteProcess(channel, marker, self._lost, self._session_closed)
        try:
            launcher = LAUNCHER
            if self.host.sudo_user:
                launcher = f"sudo -n -H -u {self.host.sudo_user} -- {LAUNCHER}"
            channel.settimeout(self.route.target.timeouts.channel)
            try:
                agreed = send_exec(channel, launcher, self.route.environment, line, self.route.target.timeouts.channel)
            except (OSError, EOFError, paramiko.SSHException):
                agreed = None if self._transport.is_active() else False
            channel.settimeout(None)
            if not self._transport.is_active():
                raise self._lost()
            if agreed is None:
                raise LinkTimeout(
                    "the host did not answer the request for a command",
                    host=self.host.name,
                    hint="sshd may be overloaded; try again",
                )
            if not agreed:
                raise SessionRefused(
                    "the host refuses to run commands for this user",
                    host=self.host.name,
                    tried="an exec request",
                    hint="its sshd may allow sftp only (ForceCommand); remoteops needs commands",
                )
        except BaseException:
            process.close()
            raise
        return process

    def _session(self) -> paramiko.Channel:
        """A session channel. Where the server allows few (MaxSessions), waits for one of ours to end."""
        limit = self.route.target.timeouts.channel
        deadline = time.monotonic() + limit
        while True:
            if not self._transport.is_active():
                raise self._lost()
            try:
                channel = self._transport.open_channel("session", window_size=WINDOW, timeout=limit)
            except (paramiko.SSHException, EOFError, OSError) as error:
                if not self._transport.is_active():
                    raise self._lost() from None
                if "Timeout" in str(error):
                    raise LinkTimeout(
                        f"the host opened no session within {limit:g} s",
                        host=self.host.name,
                        hint="sshd may be overloaded or frozen; try again",
                    ) from None
                # A refusal (paramiko hands it to any one of the threads that wait for a channel).
                self._wait_for_session(deadline - time.monotonic(), limit, getattr(error, "text", "") or str(error))
                continue
            with self._sessions:
                self._open += 1
            return channel

    def _wait_for_session(self, left: float, limit: float, why: str) -> None:
        with self._sessions:
            if left <= 0 or (self._open == 0 and left < limit - 1):
                raise SessionRefused(
                    f"the host opens no session: {why}",
                    host=self.host.name,
                    tried=f"{self._open} open on this connection, waited {limit - max(left, 0):.0f} s",
                    hint="MaxSessions in the host's sshd_config may be too small",
                )
            self._sessions.wait(min(left, 0.2))

    def _session_closed(self) -> None:
        with self._sessions:
            self._open = max(0, self._open - 1)
            self._sessions.notify_all()

    def _lost(self) -> Exception:
        """The error for a connection that is gone, with the reason where one is known."""
        if self._closed:
            reason = "this side closed it"
        elif self._transport.is_active():
            return ConnectionLost(
                "the host closed the session before its command ended",
                host=self.host.name,
                tried=self.description,
                hint="somebody may have ended the session; try again",
            )
        else:
            error = self._transport.saved_exception
            proxy = next((said for proxy in self._dialled.proxies if (said := proxy.said())), "")
            reason = (
                self._heartbeat.reason
                or (f"the proxy command {proxy}" if proxy else "")
                or str(error or "")
                or "it was closed by the host"
            )
        return ConnectionLost(
            f"the connection was lost: {reason}",
            host=self.host.name,
            tried=self.description,
            hint="a run on the host goes on without it; ask again when the network is back",
        )

    def _check_started(self, argv: Sequence[str], process: Process) -> None:
        if isinstance(process, RemoteProcess) and not process.started:
            raise self.not_started(argv, process)

    def not_started(self, argv: Sequence[str], process: RemoteProcess) -> LinkError:
        said = process.not_started().decode("utf-8", "replace").strip()
        what = "sudo" if self.host.sudo_user else "the login shell"
        return SessionRefused(
            f"{what} ended (status {process.exit_status}) before it ran anything"
            + (f": {said[-300:]}" if said else ""),
            host=self.host.name,
            tried=" ".join(argv)[:500],
            argv=list(argv),
            exit_status=process.exit_status,
            exit_signal=process.exit_signal,
            stderr=said,
            hint=f"`sudo -n -u {self.host.sudo_user} true` must work there without a password (NOPASSWD in sudoers)"
            if self.host.sudo_user
            else "look at the account's shell and rc files on the host",
        )

    def upload(self, local: Path | bytes, remote: str, *, mode: int = 0o644, progress: Progress | None = None) -> str:
        """See BaseLink.upload; by sftp where the account may run no commands."""
        try:
            return super().upload(local, remote, mode=mode, progress=progress)
        except SessionRefused:
            if self.host.sudo_user:
                raise
            with io.BytesIO(local) if isinstance(local, bytes) else local.open("rb") as source:
                size = source.seek(0, io.SEEK_END)
                source.seek(0)
                return sftp.upload(self._transport, source, size, remote, mode, progress, self.host.name)

    def download(self, remote: str, local: Path, *, sha256: str | None = None, progress: Progress | None = None) -> str:
        """See BaseLink.download; by sftp where the account may run no commands."""
        try:
            return super().download(remote, local, sha256=sha256, progress=progress)
        except SessionRefused:
            if self.host.sudo_user:
                raise
            return sftp.download(self._transport, remote, Path(local), sha256, progress, self.host.name)

    def every_while(self, tick: Callable[[], None]) -> Callable[[], None]:
        self._heartbeat.ticks.add(tick)
        return lambda: self._heartbeat.ticks.discard(tick)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._heartbeat.stop()
        self._dialled.close()


class LocalLink(BaseLink):
    """This machine, with the methods of a Link (``connect: local``)."""

    def __init__(self, host: Any) -> None:
        self.host = host
        self.description = "this machine"
        self.notices: list[str] = []

    def start(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> LocalProcess:
        return LocalProcess(argv, {**self.host.env, **(env or {})}, self.host.sudo_user)


def connect(host: Any) -> Link | LocalLink:
    """Open a Link to a Host of the inventory.

    Raises Unreachable, LinkTimeout, HostKeyUnknown, HostKeyChanged, HostKeyRevoked, AuthFailed. An sshd that drops
    logins because too many are under way (MaxStartups) is asked again, with growing pauses of random length.
    """
    if host.connect == "local":
        return LocalLink(host)
    if host.connect == "lab":
        from remoteops.lab import endpoint

        host = endpoint(host)
    if host.connect != "ssh":
        raise UsageError(f"connect: {host.connect} is no way to reach a host", host=host.name, hint="ssh, local or lab")
    route = resolve(host)
    for attempt in range(1, BUSY_TRIES + 1):
        try:
            link = Link(host, route, dial(route))
        except LinkError as error:
            if isinstance(error, Unreachable) and error.data.get("early") and attempt < BUSY_TRIES:
                time.sleep(random.uniform(0.1, 0.25) * 2 ** (attempt - 1))
                continue
            if route.notices:
                # What we could not carry out of ssh_config may be the reason.
                error.hint = "; ".join(part for part in (error.hint, "note: " + "; ".join(route.notices)) if part)
            raise
        _opened.add(link)
        for notice in link.notices:
            if (host.name, notice) not in _told:
                _told.add((host.name, notice))
                tell(f"{host.name}: {notice}")
        return link
    raise AssertionError("unreachable")


def tell(line: str) -> None:
    """What a user should know of a connection that worked: an accepted key, an option that has no effect.

    The command layer puts its own function here; each line comes once a process.
    """


_told: set[tuple[str, str]] = set()
_opened: weakref.WeakSet[Link] = weakref.WeakSet()


def close_links_of(threads: set[int]) -> None:
    """Close the links that these threads opened, so that whoever waits on one is let go (Ctrl-C)."""
    for link in list(_opened):
        if link.opened_by in threads:
            link.close()
