"""Everything that can go wrong with a connection ends within its bound, as the right error, and leaves nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import sshd
from link_fixtures import relay_to, write_config
from test_link_hostkeys import RELAY

from remoteops import transport
from remoteops.errors import ConnectionLost, LinkTimeout, Unreachable
from remoteops.remote import open_agent
from remoteops.ssh import dial
from remoteops.transport import connect

# Each bound below is a second or two: a fault that is not noticed runs into this limit and fails.
pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(25)]
QUICK = {"connect": 1, "banner": 1, "auth": 2, "channel": 1, "silence": 1}


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def accept_once(listener: socket.socket, answer: bytes, *, hold: bool) -> threading.Thread:
    """A server that says ``answer`` and then holds the connection, or closes it."""

    def serve() -> None:
        listener.settimeout(10)
        try:
            conn, _ = listener.accept()
        except OSError:
            return
        with conn:
            conn.sendall(answer)
            conn.settimeout(10)
            while hold and conn.recv(4096):
                pass

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def test_a_banner_that_never_comes(server, listener):
    thread = accept_once(listener, b"", hold=True)
    with pytest.raises(LinkTimeout, match="no SSH banner within 1 s"):
        connect(server.host(port=listener.getsockname()[1], timeouts=QUICK))
    thread.join()


def test_a_server_that_is_no_sshd(server, listener):
    thread = accept_once(listener, b"HTTP/1.1 400 Bad Request\r\n\r\n" * 200, hold=True)
    with pytest.raises(Unreachable, match="does not speak SSH"):
        connect(server.host(port=listener.getsockname()[1], timeouts=QUICK))
    thread.join()


def test_a_handshake_that_stalls(server):
    with (
        relay_to(server, stall_after=10) as (_, fields),
        pytest.raises(LinkTimeout, match="stalls in the key exchange"),
    ):
        connect(server.host(**fields, timeouts=QUICK))


def test_a_connection_that_is_refused(server):
    with pytest.raises(Unreachable, match="refuses the connection"):
        connect(server.host(port=sshd.free_port(), timeouts=QUICK))


def test_a_name_without_an_address(server):
    with pytest.raises(Unreachable, match="no address for the name"):
        connect(server.host(address="no-such-host.invalid", timeouts=QUICK))


def test_a_connection_that_is_never_accepted(server):
    """A listener whose queue is full: the kernel drops our SYN, as a firewall would."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = []
        for _ in range(4):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
            fillers.append(sock)
        time.sleep(0.1)
        with pytest.raises((Unreachable, LinkTimeout), match="within 1 s"):
            connect(server.host(port=full.getsockname()[1], timeouts=QUICK))
        for sock in fillers:
            sock.close()


def test_logins_that_are_dropped_are_tried_again(server, monkeypatch):
    """An sshd past MaxStartups closes before its banner."""
    monkeypatch.setattr(transport.time, "sleep", lambda seconds: None)
    with socket.create_server(("127.0.0.1", 0)) as front:
        dropped = 2

        def serve() -> None:
            for _ in range(dropped):
                front.accept()[0].close()
            conn, _ = front.accept()
            upstream = socket.create_connection((server.address, server.port))
            pumps = [threading.Thread(target=pump, args=pair) for pair in ((conn, upstream), (upstream, conn))]
            for item in pumps:
                item.start()
            for item in pumps:
                item.join()
            conn.close()
            upstream.close()

        def pump(source: socket.socket, sink: socket.socket) -> None:
            try:
                while data := source.recv(65536):
                    sink.sendall(data)
                sink.shutdown(socket.SHUT_WR)
            except OSError:
                pass

        thread = threading.Thread(target=serve)
        thread.start()
        kind, key = (server.folder / "host_key.pub").read_text().split()[:2]
        known = server.folder / "known_hosts.front"
        known.write_text(f"[127.0.0.1]:{front.getsockname()[1]} {kind} {key}\n")
        with connect(server.host(port=front.getsockname()[1], known_hosts=(str(known),))) as link:
            assert link.exec(["true"]).exit_status == 0
        thread.join()


def test_logins_that_are_always_dropped_end_in_an_error_that_names_maxstartups(server, monkeypatch):
    monkeypatch.setattr(transport.time, "sleep", lambda seconds: None)
    with socket.create_server(("127.0.0.1", 0)) as front:
        done = threading.Event()

        def serve() -> None:
            front.settimeout(0.1)
            while not done.is_set():
                try:
                    front.accept()[0].close()
                except TimeoutError:
                    continue

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(Unreachable, match="MaxStartups"):
            connect(server.host(port=front.getsockname()[1], timeouts=QUICK))
        done.set()
        thread.join()


def test_a_path_that_goes_silent_under_a_command(server):
    with relay_to(server) as (relay, fields), connect(server.host(**fields, timeouts=QUICK)) as link:
        process = link.start(["sh", "-c", "echo started; sleep 60"])
        assert process.read() == (b"started\n", b"")
        relay.stall()
        with pytest.raises(ConnectionLost, match="no sign of life"):
            while process.read() is not None:
                pass
        with pytest.raises(ConnectionLost):
            link.exec(["true"])


def test_a_quiet_command_on_a_healthy_path_lives_longer_than_the_silence(server):
    with connect(server.host(timeouts=QUICK)) as link:
        assert link.exec(["sh", "-c", "sleep 2.5; echo done"]).stdout == b"done\n"


def test_a_path_that_goes_silent_before_a_command(server):
    with relay_to(server) as (relay, fields), connect(server.host(**fields, timeouts=QUICK)) as link:
        relay.stall()
        with pytest.raises((ConnectionLost, LinkTimeout)):
            link.exec(["true"])


def test_a_path_that_goes_silent_while_much_is_sent(server):
    with relay_to(server) as (relay, fields), connect(server.host(**fields, timeouts=QUICK)) as link:

        def chunks():
            for number in range(4000):
                if number == 20:
                    relay.stall()
                yield b"x" * 65536

        with pytest.raises(ConnectionLost, match="no sign of life"):
            link.exec(["sh", "-c", "cat >/dev/null"], stdin=chunks())


def test_an_sshd_that_is_frozen(tmp_path):
    with sshd.running(tmp_path / "s") as own, connect(own.host(timeouts=QUICK)) as link:
        process = link.start(["sh", "-c", "echo started; sleep 60"])
        assert process.read() == (b"started\n", b"")
        own.signal_sessions(signal.SIGSTOP)
        with pytest.raises(ConnectionLost, match="no sign of life"):
            while process.read() is not None:
                pass


def test_an_sshd_that_is_killed(tmp_path):
    with sshd.running(tmp_path / "s") as own, connect(own.host()) as link:
        process = link.start(["sh", "-c", "echo started; sleep 3"])
        assert process.read() == (b"started\n", b"")
        own.signal_sessions(signal.SIGKILL)
        with pytest.raises(ConnectionLost, match="lost"):
            while process.read() is not None:
                pass


def test_a_connection_that_is_cut(server):
    with relay_to(server) as (relay, fields), connect(server.host(**fields)) as link:
        process = link.start(["sh", "-c", "echo started; sleep 3"])
        assert process.read() == (b"started\n", b"")
        relay.cut()
        with pytest.raises(ConnectionLost):
            while process.read() is not None:
                pass


def bastion_fields(bastion: sshd.Sshd, server: sshd.Sshd, tmp_path: Path) -> dict[str, object]:
    (bastion.folder / "authorized_keys").write_text(Path(f"{server.user_key}.pub").read_text())
    known = tmp_path / "known_hosts"
    known.write_text(bastion.known_hosts.read_text() + server.known_hosts.read_text())
    return {"jump": f"{bastion.user}@127.0.0.1:{bastion.port}", "known_hosts": (str(known),)}


def test_a_jump_host_that_dies_or_freezes(server, tmp_path):
    for number in (signal.SIGKILL, signal.SIGSTOP):
        with sshd.running(tmp_path / f"bastion{number}") as bastion:
            fields = bastion_fields(bastion, server, tmp_path)
            with connect(server.host(**fields, timeouts=QUICK)) as link:
                process = link.start(["sh", "-c", "echo started; sleep 3"])
                assert process.read() == (b"started\n", b"")
                bastion.signal_sessions(number)
                with pytest.raises(ConnectionLost):
                    while process.read() is not None:
                        pass


def test_a_way_to_the_jump_host_that_freezes_under_an_upload_with_its_socket_full(server, tmp_path, monkeypatch):
    def small(*arguments):
        sock = connect_tcp(*arguments)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
        return sock

    def listen(sock, *arguments):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        really_listen(sock, *arguments)

    connect_tcp, really_listen = dial.connect_tcp, socket.socket.listen
    monkeypatch.setattr(dial, "connect_tcp", small)
    monkeypatch.setattr(socket.socket, "listen", listen)
    source = tmp_path / "source"
    source.write_bytes(os.urandom(20_000_000))
    with sshd.running(tmp_path / "bastion") as bastion, relay_to(bastion) as (relay, way):
        fields = bastion_fields(bastion, server, tmp_path)
        known = tmp_path / "known_hosts"
        known.write_text(known.read_text() + Path(way["known_hosts"][0]).read_text())
        fields["jump"] = f"{bastion.user}@127.0.0.1:{relay.port}"
        with (
            connect(server.host(**fields, timeouts={"silence": 1})) as link,
            pytest.raises(ConnectionLost, match="no sign of life"),
        ):
            link.upload(source, str(tmp_path / "target"), progress=lambda done, _: done > 4e6 and relay.stall())


def test_a_jump_host_that_may_not_forward_or_cannot_reach_the_host(server, tmp_path):
    with sshd.running(tmp_path / "no", options=["AllowTcpForwarding no"]) as bastion:  # noqa: SIM117
        with pytest.raises(Unreachable, match="AllowTcpForwarding"):
            connect(server.host(**bastion_fields(bastion, server, tmp_path), timeouts=QUICK))
    with sshd.running(tmp_path / "yes") as bastion:
        fields = bastion_fields(bastion, server, tmp_path)
        with pytest.raises(Unreachable, match=r"jump host 127.0.0.1 could not connect"):
            connect(server.host(**fields, port=sshd.free_port(), timeouts=QUICK))


def test_two_jump_hosts_in_a_row(server, tmp_path):
    with sshd.running(tmp_path / "one") as one, sshd.running(tmp_path / "two") as two:
        fields = bastion_fields(one, server, tmp_path)
        bastion_fields(two, server, tmp_path)
        known = tmp_path / "known_hosts"
        known.write_text("".join(item.known_hosts.read_text() for item in (one, two, server)))
        jump = f"{one.user}@127.0.0.1:{one.port},{two.user}@127.0.0.1:{two.port}"
        with connect(server.host(**{**fields, "jump": jump})) as link:
            assert link.exec(["echo", "through"]).stdout == b"through\n"
            assert link.description.count("->") == 2


def test_a_proxy_command_that_dies_is_noticed_at_once(server, tmp_path):
    relay = tmp_path / "relay.py"
    relay.write_text(RELAY)
    pid = tmp_path / "pid"
    config = write_config(
        tmp_path, f"Host *\n ProxyCommand sh -c 'echo $$ > {pid}; exec {sys.executable} {relay} %h %p'\n"
    )
    with connect(server.host(ssh_config=config)) as link:
        process = link.start(["sh", "-c", "echo started; sleep 3"])
        assert process.read() == (b"started\n", b"")
        os.kill(int(pid.read_text()), signal.SIGKILL)
        with pytest.raises(ConnectionLost, match="proxy command"):
            while process.read() is not None:
                pass


def test_a_proxy_command_ends_with_its_link(server, tmp_path):
    relay = tmp_path / "relay.py"
    relay.write_text(RELAY)
    pid = tmp_path / "pid"
    config = write_config(
        tmp_path, f"Host *\n ProxyCommand sh -c 'echo $$ > {pid}; exec {sys.executable} {relay} %h %p'\n"
    )
    with connect(server.host(ssh_config=config)) as link:
        link.exec(["true"])
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_closing_twice_and_using_a_closed_link(server):
    link = connect(server.host())
    link.close()
    link.close()
    with pytest.raises(ConnectionLost, match="this side closed it"):
        link.exec(["true"])


def test_a_verb_that_only_looks_is_asked_again_after_a_loss(server, monkeypatch):
    from remoteops import remote

    monkeypatch.setattr(remote, "RETRY_PAUSES", (0.01, 0.01))
    with relay_to(server) as (relay, fields), open_agent(server.host(**fields)) as agent:
        agent.call("hello", {})
        relay.cut()
        assert agent.call("hello", {})["home"]
        assert relay.connections == 2


def test_a_verb_that_changes_something_is_not_repeated(server, monkeypatch):
    with relay_to(server) as (relay, fields), open_agent(server.host(**fields)) as agent:
        agent.call("hello", {})
        relay.cut()
        with pytest.raises(ConnectionLost):
            agent.call("run.start", {"argv": ["true"]})
        assert relay.connections == 1


NETNS = """
set -e
mkdir -p $R/run/netns $R/run/sshd; mount --bind $R/run /run; mount --make-private /run
ip link set lo up; ip netns add gpu; ip link add v0 type veth peer name eth0 netns gpu
ip addr add 10.99.0.1/24 dev v0; ip link set v0 up
ip -n gpu addr add 10.99.0.2/24 dev eth0; ip -n gpu link set eth0 up; ip -n gpu link set lo up
exec "$@"
"""


@pytest.mark.netns
@pytest.mark.slow
@pytest.mark.timeout(60)
def test_packets_that_are_dropped_without_a_word(tmp_path):
    """A host in its own network namespace whose packets vanish: before the connection, and under a command."""
    if os.getuid() != 0 or not all(map(_runs, (["ip", "-V"], ["iptables", "-V"], ["unshare", "-n", "true"]))):
        pytest.skip("needs root, ip, iptables and network namespaces")
    script = tmp_path / "inside.py"
    script.write_text(INSIDE)
    environment = {**os.environ, "R": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    alone = ["unshare", "-n", "-m", "-p", "--fork", "--kill-child", "bash", "-c", NETNS, "bash"]
    command = [*alone, sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50)
    assert done.stdout.splitlines() == ["works", "ConnectionLost no sign of life", "Unreachable no answer"], (
        done.stderr[-3000:]
    )


def _runs(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


INSIDE = """
import subprocess, sys
from pathlib import Path
import sshd
from remoteops.errors import ConnectionLost, Unreachable
from remoteops.transport import connect
folder = Path(sys.argv[1])
with sshd.running(folder / "seed") as seed:
    pass
config = seed.config.read_text().replace("127.0.0.1", "10.99.0.2")
seed.config.write_text(config)
inside = ["ip", "netns", "exec", "gpu"]
subprocess.Popen([*inside, sshd.SSHD, "-D", "-e", "-f", str(seed.config)], stderr=subprocess.DEVNULL)
import time; time.sleep(0.5)
key = (folder / "seed/host_key.pub").read_text()
known = folder / "known"
known.write_text(f"[10.99.0.2]:{seed.port} {key}")
host = seed.host(address="10.99.0.2", known_hosts=(str(known),), timeouts={"connect": 1, "silence": 2})
with connect(host) as link:
    process = link.start(["sh", "-c", "echo started; sleep 30"])
    assert process.read() == (b"started\\n", b"")
    print("works", flush=True)
    for chain in ("INPUT", "OUTPUT"):
        subprocess.run(["ip", "netns", "exec", "gpu", "iptables", "-A", chain, "-j", "DROP"], check=True)
    try:
        while process.read() is not None: pass
    except ConnectionLost as error:
        print("ConnectionLost", "no sign of life" if "no sign of life" in str(error) else error, flush=True)
try:
    connect(host)
except Unreachable as error:
    print("Unreachable", "no answer" if "no answer" in str(error) else error, flush=True)
"""
