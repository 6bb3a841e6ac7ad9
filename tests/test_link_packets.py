"""Batches of packets are what paramiko itself would have sent and read, whatever cipher, window or change of keys."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest
import sshd
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st
from link_fixtures import write_config
from paramiko.common import MSG_CHANNEL_DATA, MSG_CHANNEL_EOF

from remoteops.errors import ConnectionLost
from remoteops.ssh.packets import BATCH, LARGEST, Batch, ChannelData, Packetizer, Pieces, send_data
from remoteops.ssh.wire import CIPHERS, LATER, LinkTransport, Wire
from remoteops.transport import connect

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(60)]
KEY, NONCE = AESGCM(b"k" * 16), b"fixd" + (2**32 - 3).to_bytes(8, "big")
COUNTS = ["sent_bytes", "sent_packets", "sequence_number_out", "iv_out", "need_rekey"]
COUNTS_IN = ["received_bytes", "received_packets", "sequence_number_in", "iv_in", "need_rekey"]


def keyed(packetizer: paramiko.packet.Packetizer) -> paramiko.packet.Packetizer:
    packetizer.set_outbound_cipher(KEY, 16, None, 16, None, aead=True, iv_out=NONCE)
    packetizer.set_inbound_cipher(KEY, 16, None, 16, None, aead=True, iv_in=NONCE)
    packetizer._initial_kex_done = True
    return packetizer


def state(packetizer: paramiko.packet.Packetizer, names: list[str]) -> list[object]:
    return [getattr(packetizer, f"_Packetizer__{name}") for name in names]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    for end in (left, right):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_000_000)
        end.settimeout(2)
    with left, right:
        yield left, right


def message(kind: int, channel: int, data: bytes) -> paramiko.Message:
    made = paramiko.Message()
    made.add_byte(bytes([kind]))
    made.add_int(channel)
    made.add_string(data)
    return made


SIZES = [1, 5, 6, 7, 8, 100, 32704, 32704, 4, 32768]


def test_paramiko_reads_a_batch_as_its_own_packets_and_counts_the_same(pair):
    left, right = pair
    data = [os.urandom(size) for size in SIZES]
    ours, theirs = keyed(Packetizer(Wire(left))), keyed(paramiko.packet.Packetizer(right))
    ours.send_message(Batch(7, [memoryview(item) for item in data]))
    for item in data:
        kind, got = theirs.read_message()
        assert (kind, got.get_int(), got.get_binary(), got.get_remainder()) == (MSG_CHANNEL_DATA, 7, item, b"")
    sink, drain = socket.socketpair()
    with sink, drain:
        sink.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_000_000)
        peer = keyed(paramiko.packet.Packetizer(sink))
        for item in data:
            peer.send_message(message(MSG_CHANNEL_DATA, 7, item))
    assert state(ours, COUNTS) == state(peer, COUNTS)


def test_what_paramiko_sends_is_read_in_order_and_counted_the_same(pair):
    left, right = pair
    theirs, ours = keyed(paramiko.packet.Packetizer(left)), keyed(Packetizer(Wire(right)))
    sent = [(MSG_CHANNEL_DATA, 1, os.urandom(size)) for size in SIZES]
    sent[3:3] = [(MSG_CHANNEL_EOF, 1, b""), (MSG_CHANNEL_DATA, 2, b"other"), (MSG_CHANNEL_DATA, 2, b" channel")]
    for item in sent:
        theirs.send_message(message(*item))
    got: list[tuple[int, int, bytes]] = []
    calls = 0
    while sum(len(item[2]) for item in got) < sum(len(item[2]) for item in sent):
        kind, read = ours.read_message()
        calls += 1
        if isinstance(read, ChannelData):
            got += [(kind, read.get_int(), bytes(piece)) for piece in read.pieces]
        else:
            got.append((kind, read.get_int(), read.get_binary()))
            assert read.seqno == 3
    assert got == sent and calls < len(sent)
    sink, source = socket.socketpair()
    with sink, source:
        sink.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_000_000)
        writer, reader = keyed(paramiko.packet.Packetizer(sink)), keyed(paramiko.packet.Packetizer(source))
        for item in sent:
            writer.send_message(message(*item))
            reader.read_message()
    assert state(ours, COUNTS_IN) == state(reader, COUNTS_IN)


def test_a_packet_that_was_changed_or_is_too_large_ends_the_connection(pair):
    left, right = pair
    theirs, ours = keyed(paramiko.packet.Packetizer(left)), keyed(Packetizer(Wire(right)))
    out: list[bytes] = []
    theirs.write_all = out.append
    theirs.send_message(message(MSG_CHANNEL_DATA, 1, b"x" * 100))
    left.sendall(out[0][:50] + bytes([out[0][50] ^ 1]) + out[0][51:])
    with pytest.raises(paramiko.SSHException, match="changed on its way"):
        ours.read_message()
    ours = keyed(Packetizer(Wire(right)))
    left.sendall((LARGEST + 16).to_bytes(4, "big") + b"x" * 64)
    with pytest.raises(paramiko.SSHException, match="which none can have"):
        ours.read_message()


def test_what_a_server_puts_behind_its_data_is_not_kept(pair):
    left, right = pair
    theirs, ours = keyed(paramiko.packet.Packetizer(left)), keyed(Packetizer(Wire(right)))
    for channel in (1, 1, 2):
        sent = message(MSG_CHANNEL_DATA, channel, b"d" * 5000)
        sent.add_bytes(bytes(200_000))
        theirs.send_message(sent)
    read = [ours.read_message()[1]]
    while sum(len(one.pieces) for one in read) < 3:
        read.append(ours.read_message()[1])
    assert [one.get_int() for one in read for _ in one.pieces] == [1, 1, 2]
    for piece in (piece for one in read for piece in one.pieces):
        assert bytes(piece) == b"d" * 5000 and len(piece.obj) < 6000


def test_a_timeout_asks_for_other_keys_and_an_end_is_an_end(pair):
    left, right = pair
    ours = keyed(Packetizer(Wire(right)))
    right.settimeout(0.01)
    ours._trigger_rekey()
    with pytest.raises(paramiko.packet.NeedRekeyException):
        ours.read_message()
    left.close()
    with pytest.raises(EOFError):
        ours.read_message()


def round_trip(link, tmp_path: Path, size: int = 6_000_000) -> None:
    data = os.urandom(size)
    (tmp_path / "source").write_bytes(data)
    link.upload(tmp_path / "source", str(tmp_path / "there"))
    assert (tmp_path / "there").read_bytes() == data
    link.download(str(tmp_path / "there"), tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data
    echoed = bytearray()
    link.exec(["cat"], stdin=data, on_stdout=echoed.extend)
    assert bytes(echoed) == data
    for name in ("source", "there", "back"):
        (tmp_path / name).unlink()


def test_keys_change_in_the_middle_of_transfers_because_either_side_wants_it(tmp_path, monkeypatch):
    changes = []
    real = LinkTransport._parse_newkeys
    monkeypatch.setattr(
        LinkTransport, "_parse_newkeys", lambda self, m: (changes.append(self), real(self, m))[1], raising=True
    )
    with sshd.running(tmp_path / "eager", options=["RekeyLimit 1M"]) as eager, connect(eager.host()) as link:
        round_trip(link, tmp_path, 3_000_000)
        assert len(changes) > 3
    changes.clear()
    monkeypatch.setattr(Packetizer, "REKEY_BYTES", 1_000_000)
    with sshd.running(tmp_path / "plain") as plain, connect(plain.host()) as link:
        round_trip(link, tmp_path, 3_000_000)
        assert len(changes) > 3


def test_a_server_that_asks_without_end_while_keys_are_exchanged_fills_no_memory(pair, monkeypatch):
    transport = LinkTransport(Wire(pair[0]), lambda kind, key: None)
    monkeypatch.setattr("threading.current_thread", lambda: transport)
    for number in range(LATER):
        transport._send_user_message(str(number))
    with pytest.raises(paramiko.SSHException, match="without end"):
        transport._send_user_message("one more")
    monkeypatch.undo()


def test_a_channel_that_closes_while_keys_are_exchanged_does_not_stop_the_thread_that_reads(pair, monkeypatch):
    """paramiko's reading thread answers a close through _send_user_message, which waits for the end of the exchange:
    for itself. A link that carried many files would freeze at one of its changes of keys."""
    transport = LinkTransport(Wire(pair[0]), lambda kind, key: None)
    sent: list[str] = []
    monkeypatch.setattr(transport, "_send_message", sent.append)
    monkeypatch.setattr(paramiko.Transport, "_parse_newkeys", lambda self, message: self.clear_to_send.set())
    transport.active = True
    steps: list[list[str]] = []

    def read() -> None:
        transport._send_user_message("close")
        steps.append(list(sent))
        transport._parse_newkeys(paramiko.Message())
        steps.append(list(sent))

    monkeypatch.setattr(transport, "run", read)
    transport.clear_to_send.clear()
    transport.start()
    transport.join(5)
    assert steps == [[], ["close"]]


@pytest.mark.parametrize("cipher", CIPHERS)
def test_every_cipher_carries_data_both_ways(server, tmp_path, cipher):
    config = write_config(tmp_path, f"Host *\n Ciphers {cipher}\n")
    with connect(server.host(ssh_config=config)) as link:
        assert link.transport.remote_cipher == link.transport.local_cipher == cipher
        round_trip(link, tmp_path, 2_000_000)


def test_compression_carries_data_both_ways(tmp_path):
    config = write_config(tmp_path, "Host *\n Compression yes\n")
    with sshd.running(tmp_path / "s", options=["Compression yes"]) as own, connect(own.host(ssh_config=config)) as link:
        assert link.transport.local_compression.startswith("zlib")
        round_trip(link, tmp_path, 2_000_000)


def test_a_paramiko_with_other_insides_does_its_own_work(server, tmp_path, monkeypatch):
    monkeypatch.setitem(Packetizer.__annotations__, "_Packetizer__not_there", "int")
    monkeypatch.setattr(Packetizer, "_send_batch", None)
    monkeypatch.setattr(Packetizer, "_open_arrived", None)
    with connect(server.host()) as link:
        round_trip(link, tmp_path, 2_000_000)


def test_several_channels_send_and_receive_at_once(server, tmp_path):
    data = [os.urandom(3_000_000 + number) for number in range(4)]
    echoed = [bytearray() for _ in data]
    with connect(server.host()) as link:
        threads = [
            threading.Thread(target=link.exec, args=(["cat"],), kwargs={"stdin": item, "on_stdout": back.extend})
            for item, back in zip(data, echoed, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [bytes(back) for back in echoed] == data


@pytest.mark.parametrize(("number", "said"), [(signal.SIGKILL, "lost"), (signal.SIGSTOP, "no sign of life")])
def test_an_sshd_that_ends_or_freezes_in_the_middle_of_an_upload(tmp_path, number, said):
    source = tmp_path / "source"
    source.write_bytes(os.urandom(30_000_000))
    with sshd.running(tmp_path / "s") as own, connect(own.host(timeouts={"silence": 1})) as link:

        def fault(done: int, total: int) -> None:
            if 5_000_000 < done < 6_100_000:
                own.signal_sessions(number)

        with pytest.raises(ConnectionLost, match=said):
            link.upload(source, str(tmp_path / "there"), progress=fault)
    assert not (tmp_path / "there").exists()


def test_a_slow_reader_of_much_input_is_not_taken_for_a_dead_host(server):
    data = os.urandom(8_000_000)
    with connect(server.host(timeouts={"silence": 0.6})) as link:
        done = link.exec(["sh", "-c", "head -c 1000000 | wc -c; sleep 1.3; wc -c"], stdin=data)
    first, rest = map(int, done.stdout.split())
    assert first == 1_000_000 and 0 < rest <= 7_000_000


class Open(paramiko.ServerInterface):
    def check_auth_none(self, username: str) -> int:
        return paramiko.AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED


def test_a_window_smaller_than_a_batch_is_kept(tmp_path):
    ours, theirs = socket.socketpair()
    server = paramiko.Transport(theirs, default_window_size=32768, default_max_packet_size=4096)
    server.add_server_key(paramiko.ECDSAKey.generate())
    server.start_server(event=threading.Event(), server=Open())
    client = LinkTransport(Wire(ours), lambda kind, key: None)
    client._preferred_ciphers = CIPHERS[:1]
    try:
        client.start_client(timeout=5)
        client.auth_none("somebody")
        channel = client.open_session()
        taken = server.accept(5)
        received = bytearray()

        def take() -> None:
            while part := taken.recv(10_000):
                received.extend(part)
                assert len(taken.in_buffer) <= 32768

        thread = threading.Thread(target=take)
        thread.start()
        data = os.urandom(500_000)
        view = memoryview(data)
        while view:
            sent = send_data(channel, view)
            assert 0 < sent <= BATCH * 4096
            view = view[sent:]
        channel.shutdown_write()
        thread.join()
        assert received == data
    finally:
        client.hang_up()
        server.close()
        server.join(5)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=9000) | st.integers(min_value=1, max_value=20_000), max_size=30))
def test_pieces_give_back_the_bytes_in_order(steps):
    pipe, expected = Pieces(), b""
    for step in steps:
        if isinstance(step, bytes):
            pipe.feed(step)
            expected += step
        elif expected:
            got = pipe.read(step, 0.0)
            assert got == expected[:step]
            expected = expected[step:]
        assert len(pipe) == len(expected) and pipe.read_ready() == bool(expected)
    assert pipe.empty() == expected
    with pytest.raises(paramiko.buffered_pipe.PipeTimeout):
        pipe.read(1, 0.0)
    pipe.close()
    assert pipe.read(1) == b""


def test_many_small_pieces_take_few_objects():
    pipe = Pieces()
    for _ in range(100_000):
        pipe.feed(b"x")
    assert len(pipe._pieces) <= 2 and pipe.read(1 << 20) == b"x" * 100_000


def test_a_descriptor_is_not_let_go_while_the_reading_thread_may_wait_on_it(pair):
    """Its number would belong to the next connection, and the reader would wait for that one's bytes."""
    wire, over = Wire(pair[0]), threading.Event()
    wire.reader = threading.Thread(target=over.wait)
    wire.reader.start()
    wire.close()
    assert pair[0].fileno() != -1 and pair[1].recv(1) == b""
    over.set()
    wire.reader.join()
    wire.close()
    assert pair[0].fileno() == -1
