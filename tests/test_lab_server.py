"""The embedded host's SSH server, OpenSSH and asyncssh alike: private, on loopback, with a home of its own."""

from __future__ import annotations

import getpass
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from remoteops import lab
from remoteops.errors import CommandFailed, HostKeyChanged, LabError, Unreachable
from remoteops.lab import server
from remoteops.lab.place import Place, cache_root, profile, profiles
from remoteops.transport import connect

KINDS = ["asyncssh"] + (["openssh"] if server.sshd_path() else [])


def start(kind: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A running server in a cache of its own, started with a HOME of the operator that must stay empty."""
    monkeypatch.setenv("REMOTEOPS_LAB_SSHD", kind)
    monkeypatch.setenv("HOME", str(root / "operator-home"))
    (root / "operator-home").mkdir()
    found = Place("seed", root=root / "cache with a space")
    found.prepare()
    server.ensure(found, lambda line: None)
    return found


@pytest.fixture(params=KINDS, scope="module")
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """One for all tests that leave it as it is."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = start(request.param, tmp_path_factory.mktemp("lab"), monkeypatch)
    yield found
    server.stop(found)


@pytest.fixture(params=KINDS)
def own(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """One for a test that breaks it."""
    found = start(request.param, tmp_path, monkeypatch)
    yield found
    server.stop(found)


def test_a_session_lives_in_the_labs_own_home(place: Place) -> None:
    with connect(server.as_host(place)) as link:
        said = link.exec(["sh", "-c", 'pwd; echo "$HOME"']).stdout.decode().split("\n")[:2]
    assert said == [str(place.home), str(place.home)]


def test_nothing_is_written_to_the_users_home(place: Place) -> None:
    with connect(server.as_host(place)) as link:
        link.exec(["sh", "-c", "echo x > made-here"])
    assert list((place.root.parents[2] / "operator-home").iterdir()) == []
    assert (place.home / "made-here").is_file()


def test_the_operators_environment_does_not_reach_the_host(place: Place) -> None:
    with connect(server.as_host(place)) as link:
        names = {line.split("=")[0] for line in link.exec(["env"]).stdout.decode().splitlines()}
    assert not names & {"REMOTEOPS_LAB_SSHD", "SSH_AUTH_SOCK", "VIRTUAL_ENV", "PYTHONPATH", "PYTEST_CURRENT_TEST"}


def test_it_listens_on_loopback_only(place: Place) -> None:
    port = int(place.state()["port"])
    listening = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True).stdout if _has("ss") else ""
    lines = [line.split()[3] for line in listening.splitlines() if line.split()[3].endswith(f":{port}")]
    assert lines in ([], [f"127.0.0.1:{port}"])
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        assert connection.recv(8) == b"SSH-2.0-"


def test_its_keys_are_private(place: Place) -> None:
    for file in (place.user_key, place.server / "host_key"):
        assert file.stat().st_mode & 0o077 == 0
    for folder in (place.home, place.server, place.operator):
        assert folder.stat().st_mode & 0o077 == 0


def test_another_key_is_refused(place: Place, tmp_path: Path) -> None:
    other = Place("seed", root=tmp_path / "other")
    other.prepare()
    server.make_keys(other)
    host = server.as_host(place).model_copy(
        update={"identity_files": (str(other.user_key),), "ssh_config": "/dev/null"}
    )
    from remoteops.errors import AuthFailed

    with pytest.raises(AuthFailed):
        connect(host)


def test_a_changed_host_key_is_refused(own: Place, tmp_path: Path) -> None:
    other = Place("seed", root=tmp_path / "other")
    other.prepare()
    server.make_keys(other)
    key = " ".join((other.server / "host_key.pub").read_text().split()[:2])
    own.known_hosts.write_text(f"[127.0.0.1]:{own.state()['port']} {key}\n")
    with pytest.raises(HostKeyChanged):
        connect(server.as_host(own))


def test_exit_codes_and_signals_arrive(place: Place) -> None:
    with connect(server.as_host(place)) as link:
        assert link.exec(["sh", "-c", "exit 7"], check=False).exit_status == 7
        killed = link.exec(["sh", "-c", "kill -TERM $$"], check=False)
        # OpenSSH reports the signal of what it started; behind a login shell that may be 128 + 15.
        assert killed.exit_signal == "TERM" or killed.exit_status == 143
        with pytest.raises(CommandFailed):
            link.exec(["false"])


def test_both_outputs_arrive_whole_and_input_too(place: Place) -> None:
    size = 3_000_000
    script = f"import sys; sys.stdout.write('o' * {size}); sys.stderr.write('e' * {size}); sys.exit(3)"
    counts = {"out": 0, "err": 0}
    with connect(server.as_host(place)) as link:

        def count(name: str, data: bytes) -> None:
            counts[name] += len(data)

        done = link.exec(
            [sys.executable, "-c", script],
            check=False,
            on_stdout=lambda data: count("out", data),
            on_stderr=lambda data: count("err", data),
        )
        assert done.exit_status == 3
        assert counts == {"out": size, "err": size}
        assert link.exec(["wc", "-c"], stdin=b"x" * size).stdout.strip() == str(size).encode()


def test_files_travel_both_ways(place: Place, tmp_path: Path) -> None:
    data = os.urandom(300_000)
    with connect(server.as_host(place)) as link:
        link.upload(data, f"{place.home}/up load")
        link.download(f"{place.home}/up load", tmp_path / "down")
    assert (tmp_path / "down").read_bytes() == data


def test_it_can_be_a_jump_host(place: Place) -> None:
    host = server.as_host(place)
    config = Path(str(host.ssh_config)).read_text() + "\n"
    two = place.operator / "two"
    two.write_text(
        config.replace("Host lab", "Host first") + config.replace("Host lab", "Host second\n  ProxyJump first")
    )
    with connect(host.model_copy(update={"name": "second", "ssh_config": str(two), "address": None})) as link:
        assert link.exec(["pwd"]).stdout.decode().strip() == str(place.home)


def test_a_server_that_was_killed_comes_back_on_its_port(own: Place) -> None:
    port = own.state()["port"]
    os.kill(int((own.server / "pid").read_text()), 9)
    deadline = time.monotonic() + 10
    while server.running(own) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not server.running(own)
    server.ensure(own, lambda line: None)
    assert own.state()["port"] == port
    with connect(server.as_host(own)) as link:
        link.exec(["true"])


def test_a_taken_port_is_replaced(own: Place) -> None:
    server.stop(own)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        own.remember(port=taken.getsockname()[1])
        server.ensure(own, lambda line: None)
        assert own.state()["port"] != taken.getsockname()[1]


def test_stopping_ends_the_server_and_no_foreign_process(own: Place) -> None:
    host = server.as_host(own)
    assert server.stop(own)
    with pytest.raises(Unreachable):
        connect(host)
    # A pid file that names somebody else's process, as after a reboot.
    (own.server / "pid").write_text(f"{os.getpid()}\n")
    assert not server.running(own)
    assert not server.stop(own)


def test_a_command_outlives_a_client_that_went_away_until_it_writes(place: Place) -> None:
    script = "echo started; i=0; while [ $i -lt 100 ]; do i=$((i+1)); sleep 0.1; echo $i > tick; done"
    program = (
        "import sys, os; from remoteops.inventory import Host; from remoteops.transport import connect\n"
        "host = Host.model_validate_json(sys.argv[1]); link = connect(host)\n"
        "link.exec(['sh', '-c', sys.argv[2]], on_stdout=lambda data: os._exit(9))\n"
    )
    host = server.as_host(place).model_dump_json()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    gone = subprocess.run([sys.executable, "-c", program, host, script], env=environment)
    assert gone.returncode == 9
    tick = place.home / "tick"
    first = tick.read_text() if tick.is_file() else ""
    deadline = time.monotonic() + 10
    while (tick.read_text() if tick.is_file() else "") == first and time.monotonic() < deadline:
        time.sleep(0.05)
    assert tick.read_text() != first
    with connect(server.as_host(place)) as link:
        link.exec(["pkill", "-f", "[e]cho .i > tick"], check=False)


def test_an_account_that_openssh_refuses_gets_the_embedded_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not server.sshd_path():
        pytest.skip("no sshd here")
    # A login shell that refuses: what a service account has.
    monkeypatch.setattr(server, "_SESSION", "#!/bin/sh\necho 'This account is not available'\nexit 1\n")
    monkeypatch.delenv("REMOTEOPS_LAB_SSHD", raising=False)
    place = Place("seed", root=tmp_path)
    place.prepare()
    server.ensure(place, lambda line: None)
    try:
        assert place.state()["server"] == "asyncssh"
        with connect(server.as_host(place)) as link:
            assert link.exec(["pwd"]).stdout.decode().strip() == str(place.home)
    finally:
        server.stop(place)


def test_a_wrong_wish_for_a_server_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMOTEOPS_LAB_SSHD", "telnet")
    place = Place("seed", root=tmp_path)
    place.prepare()
    with pytest.raises(LabError, match="openssh or asyncssh"):
        server.ensure(place, lambda line: None)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(LabError, match="REMOTEOPS_CACHE"):
        Place("seed", root=tmp_path / "x").prepare()


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMOTEOPS_CACHE", "/somewhere/big")
    assert cache_root() == Path("/somewhere/big")
    monkeypatch.delenv("REMOTEOPS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_root() == Path("/xdg/remoteops")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "remoteops"


def test_profiles_are_pinned_and_their_fingerprint_follows_what_they_install() -> None:
    for name, one in profiles().items():
        assert one == profile(name)
        lines = [line for line in one.requirements.read_text().splitlines() if line and not line.startswith("#")]
        assert all("==" in line for line in lines)
        assert all("==" in package for package in one.packages)
    assert len({one.fingerprint for one in profiles().values()}) == len(profiles())


def _has(tool: str) -> bool:
    import shutil

    return shutil.which(tool) is not None


def test_the_user_of_the_lab_is_the_operator(place: Place) -> None:
    with connect(server.as_host(place)) as link:
        assert link.exec(["id", "-un"]).stdout.decode().strip() == getpass.getuser()


def test_the_command_that_reaches_the_lab_by_hand_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMOTEOPS_CACHE", str(tmp_path / "with a space"))
    command = lab.status("seed")["labs"][0]["ssh"]
    assert shlex.split(command) == ["ssh", "-F", str(Place("seed").ssh_config), "lab"]
