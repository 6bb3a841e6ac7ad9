"""One process on the host: bytes in, two streams of bytes out, its exit status or signal."""

from __future__ import annotations

import os
import re
import shlex
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import paramiko
from paramiko.common import cMSG_CHANNEL_WINDOW_ADJUST

from remoteops.errors import CommandFailed, UsageError
from remoteops.ssh.packets import send_data
from remoteops.ssh.wire import WINDOW

# What every host is asked to run. It means the same to sh, bash, rbash, csh, fish and zsh, shows nothing of the
# command or its environment in `ps`, and has no length limit: the real command comes as the first line of stdin.
LAUNCHER = """sh -c 'IFS= read -r l && eval "$l"'"""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_PACKET = 32768 - 64  # bytes of data in a channel packet
_GATHER = 0.001  # seconds between two reads of a stream that comes in full packets
_ENOUGH = 256 * 1024  # bytes that need no gathering
_NOISE = 8192  # bytes kept of what came before the start marker (a shell's banner)
_QUIET = 5.0  # seconds between two looks at a command that says nothing
_GRACE = 2.0  # seconds that streams may stay silent and open after the process ended (a child holds them)


class Process(Protocol):
    """A running command; RemoteProcess and LocalProcess have this in common."""

    @property
    def exit_status(self) -> int | None:
        """Once it ended by itself."""

    @property
    def exit_signal(self) -> str | None:
        """The name, without SIG, of what killed it."""

    def send(self, data: bytes) -> bool:
        """Give it input; blocks while it does not read. False once it takes no more. Raises ConnectionLost."""

    def finish_input(self) -> None:
        """End of its stdin."""

    def read(self, timeout: float | None = None) -> tuple[bytes, bytes] | None:
        """New bytes of stdout and stderr; two empty ones after ``timeout`` seconds; None when it is over."""

    def close(self) -> None:
        """Let go of it: its stdin and stdout close, and a verb of the agent ends then."""


def command_line(argv: Sequence[str], env: Mapping[str, str], marker: str) -> str:
    """One line of POSIX shell that prints the marker on both streams and becomes the command. Raises UsageError."""
    if not argv or any("\0" in part for part in (*argv, *env.values())):
        raise UsageError("a command needs at least one word, and none may hold a NUL byte", argv=list(argv))
    bad = [name for name in env if not _NAME.match(name)]
    if bad:
        raise UsageError(f"no name for an environment variable: {bad[0]!r}")
    words = " ".join(map(_quote, argv))
    exports = "".join(f"export {name}={_quote(value)}; " for name, value in env.items())
    line = f"printf '\\036%s\\n' {marker}; printf '\\036%s\\n' {marker} >&2; {exports}exec {words}"
    if "$_n" in line:
        line = "_n=$(printf '\\nx'); _n=${_n%x}; " + line
    return line + "\n"


def _quote(word: str) -> str:
    # The line ends at a newline, so a newline inside a word is put in by the host's shell.
    return shlex.quote(word).replace("\n", "'\"$_n\"'")


class _Wake:
    """What paramiko's buffers signal; unlike an Event they cannot clear it for each other."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def clear(self) -> None:
        pass

    def wait(self, timeout: float | None) -> None:
        self._event.wait(timeout)
        self._event.clear()


class RemoteProcess:
    """A command on an SSH channel; see Process. ``lost`` makes the error for a connection that ended."""

    def __init__(self, channel: paramiko.Channel, marker: str, lost: Lost, on_close: Closed) -> None:
        self._channel = channel
        self._lost = lost
        self._on_close = on_close
        self._wake = _Wake()
        channel.in_buffer.set_event(self._wake)
        channel.in_stderr_buffer.set_event(self._wake)
        self._heads: list[bytes | None] = [b"", b""]
        self._marker = b"\x1e" + marker.encode() + b"\n"
        self.noise = b""
        self.started = False
        self._over = False
        self._in_bulk = False
        self._ended_at: float | None = None

    @property
    def exit_status(self) -> int | None:
        status = int(self._channel.exit_status)
        return None if status < 0 else status

    @property
    def exit_signal(self) -> str | None:
        return getattr(self._channel, "exit_signal", None)

    @property
    def ended(self) -> bool:
        return self.exit_status is not None or self.exit_signal is not None

    def send(self, data: bytes) -> bool:
        view = memoryview(data)
        while view:
            try:
                sent = send_data(self._channel, view)
            except (OSError, EOFError, paramiko.SSHException):
                sent = 0
            if not sent:
                if self._channel.closed and not self.ended and not self._channel.get_transport().is_active():
                    raise self._lost()
                return False
            view = view[sent:]
        return True

    def send_ready(self) -> bool:
        return bool(self._channel.send_ready())

    def finish_input(self) -> None:
        try:
            self._channel.shutdown_write()
        except (OSError, EOFError, paramiko.SSHException):
            pass  # the end shows in read()

    def read(self, timeout: float | None = None) -> tuple[bytes, bytes] | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            out, err = self._drain()
            if out or err:
                self._ended_at = None
                self._in_bulk = len(out) + len(err) >= _PACKET
                return out, err
            if self._over:
                return None
            if self._finished():
                self._over = True
                continue  # what arrived between the last drain and the end
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return b"", b""
            # Data, an end and an exit status wake us; only for a child that keeps the streams open is there no sign.
            longest = _GRACE / 4 if self.ended else _QUIET
            self._wake.wait(longest if left is None else min(longest, left))
            if self._in_bulk and len(self._channel.in_buffer) < _ENOUGH:
                # Let a few packets gather: taking each by itself only makes two threads fight for the interpreter.
                time.sleep(_GATHER)

    def _finished(self) -> bool:
        channel = self._channel
        at_end = channel.closed or (
            channel.eof_received and not channel.recv_ready() and not channel.recv_stderr_ready()
        )
        if self.ended:
            # Children that kept the streams open must not keep the caller.
            if self._ended_at is None:
                self._ended_at = time.monotonic()
            return at_end or time.monotonic() - self._ended_at > _GRACE
        if channel.closed:
            # Without a status: the link died, or (with a live transport) the server threw the session out.
            raise self._lost()
        return False

    def _drain(self) -> tuple[bytes, bytes]:
        channel = self._channel
        return self._strip(0, self._take(channel.in_buffer)), self._strip(1, self._take(channel.in_stderr_buffer))

    def _take(self, buffer: Any) -> bytes:
        """Everything in one of paramiko's buffers. Not Channel.recv: that loses what it took when it cannot answer."""
        if not buffer.read_ready():
            return b""
        data: bytes = buffer.read(2 * WINDOW, 0.0)
        channel = self._channel
        room = channel._check_add_window(len(data))
        if room > 0:
            message = paramiko.Message()
            message.add_byte(cMSG_CHANNEL_WINDOW_ADJUST)
            message.add_int(channel.remote_chanid)
            message.add_int(room)
            try:
                channel.get_transport()._send_user_message(message)
            except (OSError, EOFError, paramiko.SSHException):
                pass  # the connection is over: read() says so once everything that came is taken
        return data

    def _strip(self, stream: int, data: bytes) -> bytes:
        """Drop what a noisy login shell printed before the command started."""
        head = self._heads[stream]
        if head is None or not data:
            return data
        head += data
        at = head.find(self._marker)
        if at < 0:
            keep = len(self._marker) + _NOISE
            self._heads[stream] = head[-keep:] if len(head) > 4 * keep else head
            return b""
        self._heads[stream] = None
        self.noise += head[:at][-_NOISE:]
        self.started = True
        return head[at + len(self._marker) :]

    def not_started(self) -> bytes:
        """What the login shell said instead of running the command."""
        return b"".join(head for head in self._heads if head)[-_NOISE:]

    def close(self) -> None:
        try:
            self._channel.close()
        except (OSError, EOFError, paramiko.SSHException):
            pass
        self._on_close()


class Lost(Protocol):
    def __call__(self) -> Exception: ...


class Closed(Protocol):
    def __call__(self) -> None: ...


def send_exec(
    channel: paramiko.Channel, command: str, environment: Mapping[str, str], first: bytes, timeout: float
) -> bool | None:
    """Ask for a command and send the ``first`` bytes of its stdin behind the question, which spares a round trip.

    True when the server agrees, False when it refuses, None when it does not answer in time.
    """
    transport = channel.get_transport()
    for name, value in environment.items():
        message = _request(channel, "env", reply=False)
        message.add_string(name)
        message.add_string(value)
        transport._send_user_message(message)
    message = _request(channel, "exec", reply=True)
    message.add_string(command)
    channel._event_pending()
    transport._send_user_message(message)
    while first and (sent := channel.send(first[:_PACKET])):
        first = first[sent:]
    if not channel.event.wait(timeout):
        return None
    return bool(channel.event_ready)


def _request(channel: paramiko.Channel, kind: str, *, reply: bool) -> paramiko.Message:
    message = paramiko.Message()
    message.add_byte(paramiko.common.cMSG_CHANNEL_REQUEST)
    message.add_int(channel.remote_chanid)
    message.add_string(kind)
    message.add_boolean(reply)
    return message


class Tail:
    """Head and tail of a stream, in bounded memory."""

    def __init__(self, head: int, tail: int) -> None:
        self._room = head
        self._limit = tail
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        if self._room > 0:
            self._head += data[: self._room]
            data, self._room = data[self._room :], self._room - len(data)
        if data:
            self._tail += data[-self._limit :] if self._limit else b""
            if len(self._tail) > 2 * self._limit:
                del self._tail[: -self._limit]

    def value(self) -> bytes:
        """Everything, or head, a line that says how much is missing, and tail."""
        tail = bytes(self._tail[-self._limit :]) if self._limit else b""
        missing = self.total - len(self._head) - len(tail)
        gap = f"\n[... {missing} bytes left out ...]\n".encode() if missing else b""
        return bytes(self._head) + gap + tail


def failed(argv: Sequence[str], process: Process, stderr: bytes, host: str | None) -> CommandFailed:
    """The error for a command that ended badly."""
    ending = (
        f"was killed by SIG{process.exit_signal}" if process.exit_signal else f"ended with status {process.exit_status}"
    )
    said = stderr.decode("utf-8", "replace").strip()
    last = said.splitlines()[-1][:300] if said else ""
    return CommandFailed(
        f"`{shlex.join(argv)[:200]}` {ending}" + (f": {last}" if last else ""),
        host=host,
        argv=list(argv),
        exit_status=process.exit_status,
        exit_signal=process.exit_signal,
        stderr=said[-4000:],
        tried=shlex.join(argv)[:500],
        hint=""
        if not process.exit_signal
        else "SIGKILL usually means that memory ran out: dmesg on the host"
        if process.exit_signal == "KILL"
        else "",
    )


def new_marker() -> str:
    return "remoteops-" + os.urandom(8).hex()
