"""paramiko's Transport with what a machine needs: exit signals, a bound on buffers, a heartbeat, a real end."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import paramiko
from paramiko.common import MSG_CHANNEL_DATA, MSG_CHANNEL_EXTENDED_DATA, MSG_CHANNEL_REQUEST, cMSG_GLOBAL_REQUEST

# paramiko logs every lost connection with a traceback; without a handler Python prints that on stderr.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

# AEAD first: in one pass it encrypts and authenticates, which is what makes bulk transfers faster than scp.
CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")
MACS = ("hmac-sha2-256-etm@openssh.com", "hmac-sha2-512-etm@openssh.com", "hmac-sha2-256", "hmac-sha2-512")
READ = 256 * 1024  # bytes taken from the socket at once
KEX = tuple(paramiko.Transport._preferred_kex)
WINDOW = 2 * 1024 * 1024  # bytes a channel may have under way; larger ones make paramiko's buffer slower, not faster
KeyCheck = Callable[[str, bytes], None]


class Wire:
    """A socket that remembers when bytes last came in and that closes for real, whoever is blocked on it."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self.heard = time.monotonic()
        self._ahead = b""
        self._at = 0
        self.head = b""  # the first bytes that came: what a server says that is no sshd

    @property
    def _closed(self) -> bool:
        """paramiko asks this of its socket when the interpreter ends."""
        return bool(getattr(self._sock, "_closed", getattr(self._sock, "closed", False)))

    def recv(self, size: int) -> bytes:
        """Up to ``size`` bytes. Takes from the socket all that is there: paramiko asks twice for every packet."""
        if self._at == len(self._ahead):
            self._ahead = self._sock.recv(READ)
            self._at = 0
            self.heard = time.monotonic()
            if len(self.head) < 256:
                self.head += self._ahead[: 256 - len(self.head)]
        data = self._ahead[self._at : self._at + size]
        self._at += len(data)
        return data

    def send(self, data: bytes) -> int:
        return int(self._sock.send(data))

    def settimeout(self, seconds: float | None) -> None:
        self._sock.settimeout(seconds)

    def getpeername(self) -> Any:
        return self._sock.getpeername() if hasattr(self._sock, "getpeername") else ("", 0)

    def close(self) -> None:
        if isinstance(self._sock, socket.socket):
            try:
                self._sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # not connected any more: closing is all that is left
        self._sock.close()


class LinkTransport(paramiko.Transport):  # type: ignore[misc]
    """One SSH connection.

    ``check_key(key type, key blob)`` is called in the handshake before anything secret is sent; whatever it
    raises ends the connection. There is no way to build one without it.
    """

    def __init__(self, wire: Wire, check_key: KeyCheck) -> None:
        self._check_key = check_key
        self._key_offer: tuple[str, ...] = self._preferred_keys
        self.wire = wire
        super().__init__(wire)
        self.daemon = True

    def _verify_key(self, host_key: bytes, sig: bytes) -> None:
        super()._verify_key(host_key, sig)
        self._check_key(self.host_key_type, host_key)

    def apply(self, hop: Any) -> None:
        """Take over what a Hop asks for: the algorithms on offer, in order, and compression."""
        self._key_offer = tuple(name for name in hop.host_keys.offer() if name in self._key_info)
        self._preferred_ciphers = tuple(name for name in hop.ciphers if name in self._cipher_info)
        self._preferred_macs = tuple(name for name in hop.macs if name in self._mac_info)
        self._preferred_kex = tuple(name for name in hop.kex if name in self._kex_info)
        self.use_compression(hop.compression)

    @property
    def preferred_keys(self) -> tuple[str, ...]:
        return self._key_offer

    def ping(self) -> None:
        """Ask the server for a sign of life; the answer is seen as bytes on the wire, not waited for."""
        message = paramiko.Message()
        message.add_byte(cMSG_GLOBAL_REQUEST)
        message.add_string("keepalive@openssh.com")
        message.add_boolean(True)
        self._send_message(message)

    def hang_up(self) -> None:
        """End the connection and its thread, even when the other side is frozen."""
        self.active = False
        self.packetizer.close()
        self.wire.close()
        if threading.current_thread() is not self:
            self.join(5)


def _on_request(channel: paramiko.Channel, message: paramiko.Message) -> None:
    """paramiko drops the name of the signal that killed a command; keep it."""
    start = message.packet.tell()
    if message.get_text() == "exit-signal":
        message.get_boolean()
        channel.exit_signal = message.get_text()
        channel.status_event.set()
        return
    message.packet.seek(start)
    channel._handle_request(message)


def _bounded(
    feed: Callable[[paramiko.Channel, paramiko.Message], None],
) -> Callable[[paramiko.Channel, paramiko.Message], None]:
    """paramiko takes any amount of data; a server that ignores the window would fill our memory."""

    def feed_bounded(channel: paramiko.Channel, message: paramiko.Message) -> None:
        feed(channel, message)
        if len(channel.in_buffer) + len(channel.in_stderr_buffer) > 2 * WINDOW + 65536:
            raise paramiko.SSHException("the server sent more than the channel's window allows")

    return feed_bounded


LinkTransport._channel_handler_table = {
    **paramiko.Transport._channel_handler_table,
    MSG_CHANNEL_REQUEST: _on_request,
    MSG_CHANNEL_DATA: _bounded(paramiko.Channel._feed),
    MSG_CHANNEL_EXTENDED_DATA: _bounded(paramiko.Channel._feed_extended),
}


class Heartbeat(threading.Thread):
    """Ends a connection that has been silent for ``silence`` seconds, though asked; ``reason`` then says so.

    One deadline of ours instead of TCP's: it sees a dropped path and a frozen sshd alike. ``ticks`` are called
    about every ``silence / 3`` seconds, for whoever must show the host that the operator is still there.
    """

    def __init__(self, transport: LinkTransport, silence: float) -> None:
        super().__init__(name="remoteops-heartbeat", daemon=True)
        self._transport = transport
        self._silence = silence
        self._stop_event = threading.Event()
        self.ticks: set[Callable[[], None]] = set()
        self.reason: str | None = None

    def run(self) -> None:
        wire = self._transport.wire
        step = self._silence / 3
        while not self._stop_event.wait(min(step, max(0.05, wire.heard + self._silence - time.monotonic()))):
            if not self._transport.is_active():
                return
            quiet = time.monotonic() - wire.heard
            if quiet >= self._silence:
                self.reason = f"no sign of life from the host for {quiet:.0f} s (heartbeat unanswered)"
                self._transport.hang_up()
                return
            # A frozen peer can fill the socket: whoever holds the send lock then blocks, and so would a ping.
            if self._transport.packetizer._Packetizer__write_lock.acquire(timeout=step):
                self._transport.packetizer._Packetizer__write_lock.release()
                threading.Thread(target=self._ping, daemon=True, name="remoteops-ping").start()
            for tick in list(self.ticks):
                tick()

    def _ping(self) -> None:
        try:
            self._transport.ping()
        except (EOFError, OSError, paramiko.SSHException):
            pass  # the connection is over; whoever uses it says so

    def stop(self) -> None:
        self._stop_event.set()
        if threading.current_thread() is not self:
            self.join(5)
