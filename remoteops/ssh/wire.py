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

from remoteops.ssh.packets import ChannelData, Packetizer, Pieces, send_data

# paramiko logs every lost connection with a traceback; without a handler Python prints that on stderr.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

# AEAD first: in one pass it encrypts and authenticates, which is what makes bulk transfers faster than scp.
CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")
MACS = ("hmac-sha2-256-etm@openssh.com", "hmac-sha2-512-etm@openssh.com", "hmac-sha2-256", "hmac-sha2-512")
READ = 256 * 1024  # bytes taken from the socket at once
IDLE = 15.0  # seconds between two looks of a reading thread that nobody sends anything
FAREWELL = 1.0  # seconds that a jump host gets to take the end of a connection through it
LATER = 4096  # answers kept while keys are exchanged; a server sends nothing then but what was under way
KEX = tuple(paramiko.Transport._preferred_kex)
WINDOW = 2 * 1024 * 1024  # bytes a channel may have under way; larger ones make paramiko's buffer slower, not faster
KeyCheck = Callable[[str, bytes], None]


class Wire:
    """A socket that remembers when bytes last came in and that closes for real, whoever is blocked on it."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self.heard = time.monotonic()
        self._buffer = memoryview(bytearray(READ))
        self._at = self._end = 0  # what lies in the buffer and was not taken
        self.reader: threading.Thread | None = None
        self.head = b""  # the first bytes that came: what a server says that is no sshd

    @property
    def _closed(self) -> bool:
        """paramiko asks this of its socket when the interpreter ends."""
        return bool(getattr(self._sock, "_closed", getattr(self._sock, "closed", False)))

    def _fill(self) -> bool:
        """Take from the socket what is there, behind what was there; False at its end. Raises OSError."""
        room = self._buffer[self._end :]
        if isinstance(self._sock, socket.socket):
            came = self._sock.recv_into(room)
        else:
            data = self._sock.recv(len(room))  # a channel of a jump host
            came = len(data)
            room[:came] = data
        self.heard = time.monotonic()
        if len(self.head) < 256:
            self.head += bytes(room[: min(came, 256 - len(self.head))])
        self._end += came
        return came > 0

    def recv(self, size: int) -> bytes:
        """Up to ``size`` bytes; none at the end. Raises TimeoutError, OSError."""
        if self._at == self._end:
            self._at = self._end = 0
            self._fill()
        data = bytes(self._buffer[self._at : min(self._at + size, self._end)])
        self._at += len(data)
        return data

    def ahead(self, size: int) -> memoryview:
        """The next ``size`` bytes, which stay; valid until the next call. Raises TimeoutError, EOFError, OSError."""
        while self._end - self._at < size:
            if self._at + size > len(self._buffer) or self._at == self._end:
                left = self._buffer[self._at : self._end]
                if size > len(self._buffer):
                    self._buffer = memoryview(bytearray(size))
                self._buffer[: len(left)] = left
                self._at, self._end = 0, len(left)
            if not self._fill():
                raise EOFError
        return self._buffer[self._at : self._at + size]

    def skip(self, size: int) -> None:
        """Go on behind them."""
        self._at += size

    def arrived(self) -> memoryview:
        """All bytes that have come and that nobody took; valid until the next call of ``ahead``."""
        return self._buffer[self._at : self._end]

    def send(self, data: bytes | memoryview) -> int:
        """Send some of ``data``; the number of bytes. Raises TimeoutError, OSError."""
        if isinstance(self._sock, socket.socket):
            return self._sock.send(data)
        return send_data(self._sock, memoryview(data))

    def settimeout(self, seconds: float | None) -> None:
        self._sock.settimeout(seconds)

    def getpeername(self) -> Any:
        return self._sock.getpeername() if hasattr(self._sock, "getpeername") else ("", 0)

    def close(self) -> None:
        """End the connection for whoever waits on it. The descriptor itself goes only when ``reader`` is not using it:
        its number may belong to another connection a moment later, and the reader would then wait for that one."""
        if not isinstance(self._sock, socket.socket):
            # It wakes whoever waits on the channel, then tells the jump host: which blocks when that one is frozen.
            closing = threading.Thread(target=self._close_channel, name="remoteops-close", daemon=True)
            closing.start()
            closing.join(FAREWELL)
            return
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # not connected any more: closing is all that is left
        if self.reader is None or self.reader is threading.current_thread() or not self.reader.is_alive():
            self._sock.close()


    def _close_channel(self) -> None:
        try:
            self._sock.close()
        except (OSError, EOFError, paramiko.SSHException):
            pass  # the jump host is gone as well

    @property
    def carrier(self) -> LinkTransport | None:
        """The connection to the jump host that this one goes through."""
        return None if isinstance(self._sock, socket.socket) else self._sock.get_transport()


class LinkTransport(paramiko.Transport):  # type: ignore[misc]
    """One SSH connection.

    ``check_key(key type, key blob)`` is called in the handshake before anything secret is sent; whatever it
    raises ends the connection. There is no way to build one without it.
    """

    def __init__(self, wire: Wire, check_key: KeyCheck) -> None:
        self._check_key = check_key
        self._key_offer: tuple[str, ...] = self._preferred_keys
        self._later: list[Any] = []
        self.wire = wire
        super().__init__(wire, packetizer_class=Packetizer)
        wire.reader = self
        self.packetizer.on_other_keys = self._on_other_keys
        self.daemon = True

    def _on_other_keys(self) -> None:
        """The reading thread starts the exchange, and may be waiting for bytes: the server is made to send some.

        Whoever else sends holds clear_to_send_lock, so that this goes out before the exchange begins.
        """
        if threading.current_thread() is not self:
            self._send_ping()

    def _send_user_message(self, message: Any) -> None:
        """As paramiko's, which waits while keys are exchanged. The reading thread, which must answer a channel that is
        closed, would wait for itself: what it has to say is kept until the exchange is over."""
        if threading.current_thread() is self and not self.clear_to_send.is_set():
            if len(self._later) >= LATER:
                raise paramiko.SSHException("the server asks without end while keys are exchanged")
            self._later.append(message)
        else:
            super()._send_user_message(message)

    def _parse_newkeys(self, message: paramiko.Message) -> None:
        super()._parse_newkeys(message)
        later, self._later = self._later, []
        for kept in later:
            super()._send_user_message(kept)

    def _verify_key(self, host_key: bytes, sig: bytes) -> None:
        super()._verify_key(host_key, sig)
        self._check_key(self.host_key_type, host_key)

    def settle(self) -> None:
        """Once logged in: the reading thread need not look ten times a second whether it is still wanted, as it must
        for the bounds of the handshake. ``hang_up`` shuts the socket, which wakes it, and so does a wish for keys."""
        self.wire.settimeout(IDLE)

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

    def _parse_channel_open_success(self, message: paramiko.Message) -> None:
        """Before any data can come: the channel gets buffers that take the pieces as they are. ``full_window`` is what
        the server takes at most without an answer (bytes)."""
        channel = self._channels.get(message.get_int())
        if channel is not None and not isinstance(channel.in_buffer, Pieces):
            channel.in_buffer, channel.in_stderr_buffer = Pieces(), Pieces()
            message.get_int()
            channel.full_window = message.get_int()
        message.rewind()
        super()._parse_channel_open_success(message)

    def ping(self) -> None:
        """Ask the server for a sign of life; the answer is seen as bytes on the wire, not waited for. Not while keys
        are exchanged, when nothing else may be sent and both sides speak anyway."""
        with self.clear_to_send_lock:
            if self.clear_to_send.is_set():
                self._send_ping()

    def _send_ping(self) -> None:
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
        if threading.current_thread() is not self and self.is_alive():
            self.join(5)
            self.wire.close()


def _on_request(channel: paramiko.Channel, message: paramiko.Message) -> None:
    """paramiko drops the name of the signal that killed a command; keep it."""
    start = message.packet.tell()
    if message.get_text() == "exit-signal":
        message.get_boolean()
        channel.exit_signal = message.get_text()
        channel.status_event.set()
    else:
        message.packet.seek(start)
        channel._handle_request(message)
    if channel.in_buffer._event is not None:
        channel.in_buffer._event.set()  # whoever waits for output should know that the command ended


def _on_data(channel: paramiko.Channel, message: Any) -> None:
    if not isinstance(message, ChannelData):
        channel._feed(message)
    elif isinstance(channel.in_buffer, Pieces):
        channel.in_buffer.feed_all(message.pieces)
    else:
        channel.in_buffer.feed(b"".join(message.pieces))
    _check_window(channel)


def _on_extended_data(channel: paramiko.Channel, message: paramiko.Message) -> None:
    channel._feed_extended(message)
    _check_window(channel)


def _check_window(channel: paramiko.Channel) -> None:
    """paramiko takes any amount of data; a server that ignores the window would fill our memory."""
    if len(channel.in_buffer) + len(channel.in_stderr_buffer) > 2 * WINDOW + 65536:
        raise paramiko.SSHException("the server sent more than the channel's window allows")


LinkTransport._channel_handler_table = {
    **paramiko.Transport._channel_handler_table,
    MSG_CHANNEL_REQUEST: _on_request,
    MSG_CHANNEL_DATA: _on_data,
    MSG_CHANNEL_EXTENDED_DATA: _on_extended_data,
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
                self._hang_up()
                return
            # Who was just heard need not be asked; the next look still leaves a third of the time for an answer.
            # A frozen peer can fill the socket: whoever holds the send lock then blocks, and so would a ping.
            if quiet >= 0.9 * step and self._transport.packetizer._Packetizer__write_lock.acquire(timeout=step):
                self._transport.packetizer._Packetizer__write_lock.release()
                threading.Thread(target=self._ping, daemon=True, name="remoteops-ping").start()
            for tick in list(self.ticks):
                tick()

    def _hang_up(self) -> None:
        """From the first jump host on: one that is frozen with a full socket holds whoever sends through it, and who
        would close the connection inside it."""
        chain = [self._transport]
        while (carrier := chain[-1].wire.carrier) is not None:
            chain.append(carrier)
        for transport in reversed(chain):
            transport.hang_up()

    def _ping(self) -> None:
        try:
            self._transport.ping()
        except (EOFError, OSError, paramiko.SSHException):
            pass  # the connection is over; whoever uses it says so

    def stop(self) -> None:
        self._stop_event.set()
        if threading.current_thread() is not self:
            self.join(5)
