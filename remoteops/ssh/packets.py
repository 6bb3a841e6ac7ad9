"""Bulk data through paramiko: several packets at once out, no copies in, and buffers that do not shift their bytes.

paramiko takes one packet of 32 KB at a time: a Message, three copies, two locks, a random pad and a system call for
each, which at 500 MB are 15,000 of them and more time than the cipher itself needs. Under an AEAD cipher
(aes128-gcm, aes256-gcm: what a Link asks for first) a packet depends on the one before it only by a counter, so a
batch of them can be built in one buffer and sent in one call. Everything else (other ciphers, compression, the first
key exchange, hex dumps for debugging) goes paramiko's own way, packet by packet.

What this rests on, as of paramiko 5.1 (a Packetizer that does not find the state it knows leaves all to paramiko;
tests/test_link_packets.py compares both ways byte by byte):

* the state of both directions lies in attributes of Packetizer that its methods read afresh for every packet;
* whoever sends data holds Transport.clear_to_send_lock (_send_user_message) and then the packetizer's write lock, and
  keys change only while clear_to_send is not set: a batch never spans a change of keys;
* keys are counted by bytes and packets, and a counter over its limit only sets a flag: a batch may run over the limit
  by its own length (half a megabyte of 512).
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import paramiko
from cryptography.exceptions import InvalidTag
from paramiko.buffered_pipe import BufferedPipe, PipeTimeout
from paramiko.common import MSG_CHANNEL_DATA
from paramiko.packet import NeedRekeyException

BATCH = 16  # packets at most in one go
SLOW = 0.05  # seconds after which a batch counts as slow, and the next one is made smaller: pings wait behind it
LARGEST = 1 << 20  # bytes of a packet we take; OpenSSH's own are at most a quarter of that
_GATHER = 0.002  # seconds in which a small window may grow before it is used
_SMALL = 4096  # bytes below which a piece is added to the one before
_PACK = 65536  # bytes of small pieces that make a large one
_SLACK = 512  # bytes of a packet that is not data; where there is more, a piece of it would hold on to all of that


_length = struct.Struct(">I").unpack_from  # of a packet, without these four bytes and its tag
_head = struct.Struct(">BBII").unpack_from  # padding, type of message; in data also its channel and size


class Ahead(Protocol):
    """What a Packetizer reads from (ssh/wire.py's Wire)."""

    def ahead(self, size: int) -> memoryview:
        """The next ``size`` bytes, which stay; valid until the next call. Raises TimeoutError, EOFError, OSError."""

    def skip(self, size: int) -> None:
        """Go on behind them."""

    def arrived(self) -> memoryview:
        """All bytes that have come and that nobody took; valid until the next call of ``ahead``."""


class Batch:
    """Data for one channel, in the pieces that become packets."""

    def __init__(self, channel: int, pieces: Sequence[memoryview]) -> None:
        self.head = struct.pack(">BI", MSG_CHANNEL_DATA, channel)
        self.pieces = pieces


class ChannelData:
    """Data for a channel, out of one packet or several; paramiko's loop takes it for a Message."""

    __slots__ = ("_channel", "pieces", "seqno")

    def __init__(self, channel: int, pieces: list[memoryview], seqno: int) -> None:
        self._channel = channel
        self.pieces = pieces
        self.seqno = seqno

    def get_int(self) -> int:
        """The channel's number: the loop asks for that, once."""
        return self._channel


# The class bears the name of paramiko's: Python then reads self.__iv_out as that class's own attribute.
class Packetizer(paramiko.packet.Packetizer):  # type: ignore[misc]
    """paramiko's Packetizer with a short way for AEAD ciphers; ``socket`` has the methods of Ahead as well."""

    # The state of paramiko's that is used here; nothing is set by these lines.
    __socket: Any
    __closed: bool
    __remainder: bytes
    __dump_packets: bool
    __need_rekey: bool
    __write_lock: threading.RLock
    __aead_in: bool
    __aead_out: bool
    __block_engine_in: Any
    __block_engine_out: Any
    __block_size_in: int
    __block_size_out: int
    __mac_size_in: int
    __mac_size_out: int
    __compress_engine_in: Any
    __compress_engine_out: Any
    __iv_in: bytes
    __iv_out: bytes
    __sequence_number_in: int
    __sequence_number_out: int
    __sent_bytes: int
    __sent_packets: int
    __received_bytes: int
    __received_packets: int
    __received_bytes_overflow: int
    __received_packets_overflow: int

    def __init__(self, socket: Ahead) -> None:
        super().__init__(socket)
        known = vars(self)
        self._fits = "_initial_kex_done" in known and all(name in known for name in Packetizer.__annotations__)
        self._most = BATCH
        self._out = memoryview(b"")
        self._opened: deque[tuple[int, Any]] = deque()
        self.on_other_keys: Callable[[], None] = lambda: None

    @property
    def most(self) -> int:
        """Packets that a batch should have now."""
        return self._most

    def _is_short(self, aead: bool, compressor: Any) -> bool:
        return aead and compressor is None and self._initial_kex_done and not self.__dump_packets

    def send_message(self, data: Any) -> None:
        """Send a Message, or a Batch. Raises EOFError when the connection is over."""
        if not isinstance(data, Batch):
            super().send_message(data)
            return
        with self.__write_lock if self._fits else contextlib.nullcontext():
            if self._fits and self._is_short(self.__aead_out, self.__compress_engine_out):
                self._send_batch(data)
                return
        for piece in data.pieces:
            message = paramiko.Message()
            message.add_bytes(data.head)
            message.add_string(bytes(piece))
            super().send_message(message)

    def _send_batch(self, batch: Batch) -> None:
        """You hold the write lock."""
        encrypt, block = self.__block_engine_out.encrypt, self.__block_size_out
        fixed, counter = self.__iv_out[:4], int.from_bytes(self.__iv_out[4:], "big")
        count = len(batch.pieces)
        room = sum(map(len, batch.pieces)) + count * (13 + len(batch.head) + block + self.__mac_size_out)
        if len(self._out) < room:
            self._out = memoryview(bytearray(room))
        pads = os.urandom(count * (4 + block))
        at = 0
        for number, piece in enumerate(batch.pieces):
            payload = len(batch.head) + 4 + len(piece)
            padding = 3 + block - (payload + 4) % block
            length = (1 + payload + padding).to_bytes(4, "big")
            pad = pads[number * (4 + block) :][:padding]
            plain = b"".join((bytes((padding,)), batch.head, len(piece).to_bytes(4, "big"), piece, pad))
            # The length goes in the clear and is authenticated; the nonce counts packets (RFC 5647, section 7).
            sealed = encrypt(fixed + (counter + number).to_bytes(8, "big"), plain, length)
            self._out[at : at + 4] = length
            self._out[at + 4 : at + 4 + len(sealed)] = sealed
            at += 4 + len(sealed)
        self.__iv_out = fixed + (counter + count).to_bytes(8, "big")
        self.__sequence_number_out = (self.__sequence_number_out + count) & 0xFFFFFFFF
        started = time.monotonic()
        self.write_all(self._out[:at])
        slow = time.monotonic() - started > SLOW
        self._most = max(1, count // 2) if slow else min(BATCH, 2 * self._most)
        self.__sent_bytes += at
        self.__sent_packets += count
        if self.__sent_packets >= self.REKEY_PACKETS or self.__sent_bytes >= self.REKEY_BYTES:
            self._want_other_keys()

    def _want_other_keys(self) -> None:
        if not self.__need_rekey:
            self.__received_bytes_overflow = 0
            self.__received_packets_overflow = 0
            self._trigger_rekey()

    def _trigger_rekey(self) -> None:
        super()._trigger_rekey()
        self.on_other_keys()

    def read_message(self) -> tuple[int, Any]:
        """The type of the next message and the message; data for a channel comes as ChannelData, from all the packets
        that have arrived. Raises SSHException, NeedRekeyException, EOFError."""
        if not self._opened:
            if not self._fits or self.__remainder or not self._is_short(self.__aead_in, self.__compress_engine_in):
                return super().read_message()  # type: ignore[no-any-return]
            (length,) = _length(self._ahead(4), 0)
            if length > LARGEST:
                raise paramiko.SSHException(f"the server sent a packet of {length} bytes, which none can have")
            self._ahead(4 + length + self.__mac_size_in)
            self._open_arrived()
        return self._opened.popleft()

    def _open_arrived(self) -> None:
        """Open the packets that are there, while they are data for one channel; of another one just the first.

        Nothing is opened behind another message: it may be the one after which other keys hold.
        """
        arrived, decrypt, block, tag = (
            self.__socket.arrived(),
            self.__block_engine_in.decrypt,
            self.__block_size_in,
            self.__mac_size_in,
        )
        fixed, counter = self.__iv_in[:4], int.from_bytes(self.__iv_in[4:], "big")
        pieces: list[memoryview] = []
        channel = -1
        at = packets = 0
        try:
            while len(arrived) - at >= 4:
                (length,) = _length(arrived, at)
                start, end = at + 4, at + 4 + length + tag
                if end > len(arrived):
                    break
                if length < 12 or length % block:
                    raise paramiko.SSHException(f"the server sent a packet of {length} bytes, which none can have")
                nonce = fixed + (counter + packets).to_bytes(8, "big")
                plain = decrypt(nonce, arrived[start:end], arrived[at:start])
                at = end
                packets += 1
                padding, kind, to, size = _head(plain)
                if kind != MSG_CHANNEL_DATA or (pieces and to != channel):
                    break
                channel = to
                if 10 + size + padding > length:
                    raise paramiko.SSHException("the server sent data that is longer than its packet")
                pieces.append(_piece(plain, size))
        except InvalidTag:
            raise paramiko.SSHException("a packet was changed on its way (wrong authentication tag)") from None
        self.__socket.skip(at)
        number = self.__sequence_number_in
        self.__iv_in = fixed + (counter + packets).to_bytes(8, "big")
        self.__sequence_number_in = (number + packets) & 0xFFFFFFFF
        self._count(at, packets)
        if pieces:
            self._opened.append((MSG_CHANNEL_DATA, ChannelData(channel, pieces, number)))
        if len(pieces) < packets:
            if padding + 2 > length:
                raise paramiko.SSHException("the server sent a packet that is all padding")
            last = (number + packets - 1) & 0xFFFFFFFF
            if kind == MSG_CHANNEL_DATA:
                if 10 + size + padding > length:
                    raise paramiko.SSHException("the server sent data that is longer than its packet")
                self._opened.append((kind, ChannelData(to, [_piece(plain, size)], last)))
            else:
                message = paramiko.Message(plain[2 : length - padding])
                message.seqno = last
                self._opened.append((kind, message))

    def _count(self, size: int, packets: int) -> None:
        """As paramiko counts what a key has taken."""
        self.__received_bytes += size
        self.__received_packets += packets
        if self.__need_rekey:
            self.__received_bytes_overflow += size
            self.__received_packets_overflow += packets
            if (
                self.__received_packets_overflow >= self.REKEY_PACKETS_OVERFLOW_MAX
                or self.__received_bytes_overflow >= self.REKEY_BYTES_OVERFLOW_MAX
            ):
                raise paramiko.SSHException("the server ignores that other keys are asked for")
        elif self.__received_packets >= self.REKEY_PACKETS or self.__received_bytes >= self.REKEY_BYTES:
            self._want_other_keys()

    def _ahead(self, size: int) -> memoryview:
        """The next ``size`` bytes of the wire; waits as paramiko's read_all does."""
        while True:
            try:
                return self.__socket.ahead(size)  # type: ignore[no-any-return]
            except TimeoutError:
                pass
            except OSError as error:
                if error.errno != errno.EAGAIN:
                    if self.__closed:
                        raise EOFError from None
                    raise
            if self.__closed or self.handshake_timed_out():
                raise EOFError
            if self.__need_rekey and not self.__socket.arrived():
                raise NeedRekeyException
            self._check_keepalive()


def _piece(plain: bytes, size: int) -> memoryview:
    """The data of a packet; a copy where a server put much behind it that nobody asked for."""
    data = memoryview(plain)[10 : 10 + size]
    return data if len(plain) - size <= _SLACK else memoryview(bytes(data))


def send_data(channel: paramiko.Channel, data: memoryview) -> int:
    """Send as much of ``data`` as a batch and the channel's window take; waits for a window.

    The number of bytes sent; 0 when the channel takes no more. Raises OSError when it is closed.
    """
    pieces: list[memoryview] = []
    sent = 0
    most = getattr(channel.transport.packetizer, "most", 1)
    with channel.lock:
        if channel.closed:
            raise OSError(errno.EPIPE, "the channel is closed")
        # The window comes back in small parts; a batch is worth a short wait for some of them.
        wanted = min(len(data), most * channel.out_max_packet_size, getattr(channel, "full_window", 0) // 8)
        if channel.out_window_size < wanted:
            until = time.monotonic() + _GATHER
            while channel.out_window_size < wanted and (left := until - time.monotonic()) > 0 and not channel.closed:
                channel.out_buffer_cv.wait(left)
        while sent < len(data) and len(pieces) < most and (channel.out_window_size or not pieces):
            size = channel._wait_for_send_window(len(data) - sent)
            if not size:
                break
            pieces.append(data[sent : sent + size])
            sent += size
    if pieces:
        channel.transport._send_user_message(Batch(channel.remote_chanid, pieces))
    return sent


class Pieces(BufferedPipe):  # type: ignore[misc]
    """paramiko's BufferedPipe without its array, which moves all bytes behind those that are taken."""

    def __init__(self) -> None:
        super().__init__()
        # Small ones are packed: a million packets of a byte each must not take a million objects.
        self._pieces: deque[memoryview | bytearray] = deque()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def read_ready(self) -> bool:
        return self._size > 0

    def feed(self, data: bytes) -> None:
        self.feed_all([memoryview(data)])

    def feed_all(self, pieces: list[memoryview]) -> None:
        with self._lock:
            for piece in pieces:
                if len(piece) >= _SMALL:
                    self._pieces.append(piece)
                elif self._pieces and isinstance(self._pieces[-1], bytearray) and len(self._pieces[-1]) < _PACK:
                    self._pieces[-1] += piece
                else:
                    self._pieces.append(bytearray(piece))
                self._size += len(piece)
            if self._event is not None:
                self._event.set()
            self._cv.notify_all()

    def read(self, nbytes: int, timeout: float | None = None) -> bytes:
        until = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while not self._size and not self._closed:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise PipeTimeout
                self._cv.wait(left)
            return self._take(nbytes)

    def empty(self) -> bytes:
        with self._lock:
            return self._take(self._size)

    def _take(self, most: int) -> bytes:
        """You hold the lock."""
        taken: list[memoryview] = []
        left = min(most, self._size)
        self._size -= left
        while left:
            piece = memoryview(self._pieces.popleft())
            if len(piece) > left:
                self._pieces.appendleft(piece[left:])
                piece = piece[:left]
            taken.append(piece)
            left -= len(piece)
        if not self._size and self._event is not None and not self._closed:
            self._event.clear()
        return b"".join(taken)


