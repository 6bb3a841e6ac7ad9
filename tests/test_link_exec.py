"""Commands and their bytes go through a link unharmed."""

from __future__ import annotations

import os
import resource
import shlex
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sshd
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remoteops.errors import CommandFailed, LinkTimeout, SessionRefused, UsageError
from remoteops.inventory import Host
from remoteops.ssh.process import Tail, command_line
from remoteops.transport import BaseLink, connect


@pytest.fixture(scope="module")
def remote(server):
    with connect(server.host()) as link:
        yield link


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    with connect(Host(name="here", connect="local")) as link:
        yield link


@pytest.fixture(params=["remote", "local"])
def link(request) -> BaseLink:
    return request.getfixturevalue(request.param)


PRINT = [
    sys.executable,
    "-c",
    "import os, sys; os.write(1, '\\0'.join(sys.argv[1:]).encode('utf-8', 'surrogateescape'))",
]
NASTY = [
    "a b",
    "'",
    '"',
    "\\",
    "\\\\n",
    "$HOME",
    "`id`",
    "$(id)",
    "; touch x",
    "*",
    "",
    "-n",
    "!x",
    "a\nb\n",
    "é€",
    "\x1e",
    "#",
    "~",
    "{a,b}",
]


def test_every_word_arrives_as_it_is(link):
    assert link.exec([*PRINT, *NASTY]).stdout.decode().split("\0") == NASTY


words = st.lists(
    st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=20), max_size=4
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words)
def test_any_words_survive_the_shells_on_the_way(tmp_path_factory, words):
    line = command_line([*PRINT, *words], {}, "marker")
    done = subprocess.run(
        ["sh", "-c", 'IFS= read -r l && eval "$l"'], input=line.encode(), capture_output=True, check=True
    )
    assert done.stdout.split(b"marker\n", 1)[1].decode() == "\0".join(words)


def test_environment_is_literal_and_no_shell_reads_it(link, tmp_path):
    value = f"a b; touch {tmp_path}/injected $(touch {tmp_path}/injected) 'x' \"y\" \\ \n end"
    assert link.exec(["sh", "-c", 'printf %s "$X"'], env={"X": value}).stdout.decode() == value
    assert not (tmp_path / "injected").exists()


def test_bad_words_and_names_are_refused_before_anything_runs(remote):
    for argv, env in ((["true", "a\0b"], {}), ([], {}), (["true"], {"A B": "x"}), (["true"], {"A": "x\0"})):
        with pytest.raises(UsageError):
            remote.exec(argv, env=env)


def test_the_command_is_not_shown_in_the_process_list(remote):
    shown = remote.exec(["ps", "-eo", "args"], env={"SECRET_TOKEN": "hunter2hunter2"}).stdout
    assert b"hunter2" not in shown


def test_exit_status_and_signal_are_told_apart(link):
    assert link.exec(["sh", "-c", "exit 7"], check=False).exit_status == 7
    killed = link.exec(["sh", "-c", "kill -9 $$"], check=False)
    assert killed.exit_signal == "KILL" and killed.exit_status is None
    with pytest.raises(CommandFailed, match="status 3: why") as caught:
        link.exec(["sh", "-c", "echo why >&2; exit 3"])
    assert caught.value.data["exit_status"] == 3
    with pytest.raises(CommandFailed, match="killed by SIGTERM"):
        link.exec(["sh", "-c", "kill $$"])


def test_a_command_that_is_not_there_is_status_127(link):
    assert link.exec(["no-such-command-anywhere"], check=False).exit_status == 127


def test_bytes_are_bytes(link):
    payload = bytes(range(256)) * 4000
    assert link.exec(["cat"], stdin=payload).stdout == payload
    assert link.exec(["cat"], stdin=(payload[n : n + 1000] for n in range(0, len(payload), 1000))).stdout == payload


def test_a_character_split_over_two_packets_stays_whole(link):
    seen: list[bytes] = []
    script = (
        "import sys,time;w=sys.stdout.buffer;"
        "w.write(b'\\xe2\\x82');w.flush();time.sleep(.2);w.write(b'\\xac');w.flush()"
    )
    link.exec([sys.executable, "-c", script], on_stdout=seen.append)
    assert b"".join(seen).decode() == "€"


def test_ten_mebibytes_on_both_streams_at_once(link):
    script = "import sys\nfor _ in range(160): sys.stdout.write('o'*65536); sys.stderr.write('e'*65536)"
    totals = {"out": 0, "err": 0}

    def count(name):
        def add(data: bytes) -> None:
            assert set(data) == {ord(name[0])}
            totals[name] += len(data)

        return add

    link.exec([sys.executable, "-c", script], on_stdout=count("out"), on_stderr=count("err"))
    assert totals == {"out": 10 << 20, "err": 10 << 20}


def test_large_output_keeps_head_and_tail(link):
    done = link.exec(["sh", "-c", "echo first; head -c 20000000 /dev/zero; echo; echo last"])
    assert done.stdout.startswith(b"first\n") and done.stdout.endswith(b"last\n")
    assert b"bytes left out" in done.stdout and len(done.stdout) < 2 * 1024 * 1024 + 100


@pytest.mark.slow
def test_a_gigabyte_of_output_takes_no_memory(remote):
    count = 0

    def add(data: bytes) -> None:
        nonlocal count
        count += len(data)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    remote.exec(["head", "-c", "1000000000", "/dev/zero"], on_stdout=add)
    assert count == 1_000_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000  # KiB


def test_input_that_nobody_reads_does_not_hide_the_exit_status(link):
    assert link.exec(["sh", "-c", "exit 5"], stdin=b"x" * 5_000_000, check=False).exit_status == 5


def test_an_input_that_fails_to_be_made_is_the_error(remote):
    def chunks():
        yield b"one"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        remote.exec(["cat"], stdin=chunks())


def test_a_child_that_holds_the_streams_does_not_hold_the_caller(link):
    done = link.exec(["sh", "-c", "sleep 30 & echo $!"], timeout=15)
    pid = int(done.stdout)
    assert done.exit_status == 0
    os.kill(pid, 9)


def test_a_timeout_is_a_typed_error(link, nothing_left):
    with pytest.raises(LinkTimeout, match=r"did not end within 0.5 s"):
        link.exec(["sleep", "20"], timeout=0.5)


def test_one_link_serves_many_threads(remote):
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(remote.exec(["echo", str(n)]).stdout)) for n in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(int, results)) == list(range(12))


def test_one_session_at_a_time_is_enough(tmp_path, nothing_left):
    with (
        sshd.running(tmp_path / "s", options=["MaxSessions 1"]) as one,
        connect(one.host(timeouts={"channel": 5})) as link,
    ):
        results: list[int | None] = []
        threads = [
            threading.Thread(target=lambda: results.append(link.exec(["sleep", "0.1"]).exit_status)) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [0] * 4
        holder = link.start(["cat"])
        with connect(one.host(timeouts={"channel": 1})) as other:
            assert other.exec(["true"]).exit_status == 0
        holder.close()


def test_no_sessions_at_all_is_named(tmp_path, nothing_left):
    with (
        sshd.running(tmp_path / "s", options=["MaxSessions 0"]) as none,
        connect(none.host(timeouts={"channel": 1})) as link,
        pytest.raises(SessionRefused, match="MaxSessions"),
    ):
        link.exec(["true"])


def shell_user_script(tmp_path: Path, body: str) -> str:
    """A login shell by ForceCommand: what sshd would have the user's shell run comes in SSH_ORIGINAL_COMMAND."""
    script = tmp_path / "shell"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return f"ForceCommand {script}"


@pytest.mark.parametrize(
    "body",
    [
        "echo 'Welcome to gpu8'; printf 'motd without newline'; echo noise >&2; exec sh -c \"$SSH_ORIGINAL_COMMAND\"",
        'head -c 100000 /dev/zero; exec sh -c "$SSH_ORIGINAL_COMMAND"',
        'exec dash -c "$SSH_ORIGINAL_COMMAND"',
        'exec bash --restricted -c "$SSH_ORIGINAL_COMMAND"',
        'cd /; unset HOME LANG; exec env -i PATH=/usr/bin:/bin sh -c "$SSH_ORIGINAL_COMMAND"',
    ],
    ids=["banner", "flood", "dash", "restricted bash", "bare environment"],
)
def test_whatever_the_login_shell_prints_or_is_the_output_is_the_commands(tmp_path, body):
    with sshd.running(tmp_path / "s", options=[shell_user_script(tmp_path, body)]) as odd, connect(odd.host()) as link:
        done = link.exec([*PRINT, *NASTY])
        assert done.stdout.decode().split("\0") == NASTY and done.stderr == b""


@pytest.mark.parametrize("shell", ["fish", "csh", "tcsh", "zsh", "busybox"])
def test_other_login_shells_understand_the_launcher(tmp_path, shell):
    import shutil

    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"no {shell} on this machine")
    command = f"{path} sh" if shell == "busybox" else path
    option = shell_user_script(tmp_path, f'exec {command} -c "$SSH_ORIGINAL_COMMAND"')
    with sshd.running(tmp_path / "s", options=[option]) as odd, connect(odd.host()) as link:
        assert link.exec([*PRINT, *NASTY]).stdout.decode().split("\0") == NASTY


def test_an_account_that_may_not_run_commands_says_why(tmp_path):
    option = shell_user_script(tmp_path, "echo 'This account is currently not available.'; exit 1")
    with sshd.running(tmp_path / "s", options=[option]) as odd, connect(odd.host()) as link:  # noqa: SIM117
        with pytest.raises(SessionRefused, match="not available"):
            link.exec(["true"])


def test_set_env_and_send_env_of_ssh_config_reach_a_server_that_takes_them(server, tmp_path, monkeypatch):
    monkeypatch.setenv("LAB_SENT", "from here")
    config = tmp_path / "ssh_config"
    config.write_text('Host *\n SetEnv LAB_SET="a b"\n SendEnv LAB_SE*\n')
    with connect(server.host(ssh_config=str(config))) as link:
        assert link.exec(["sh", "-c", 'echo "$LAB_SET/$LAB_SENT"']).stdout == b"a b/from here\n"


def test_compression_works(server, tmp_path):
    config = tmp_path / "ssh_config"
    config.write_text("Host *\n Compression yes\n")
    with connect(server.host(ssh_config=str(config))) as link:
        assert link.exec(["cat"], stdin=b"x" * 1_000_000).stdout == b"x" * 1_000_000
        assert link.transport.remote_compression.startswith("zlib")


def test_an_authenticated_cipher_and_no_delay_are_in_use(remote):
    import socket

    assert remote.transport.local_cipher == "aes128-gcm@openssh.com"
    assert remote.transport.wire._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_inventorys_environment_is_set_for_every_command(server):
    with connect(server.host(env={"HF_HOME": "/data/hf"})) as link:
        assert link.exec(["sh", "-c", "echo $HF_HOME"]).stdout == b"/data/hf\n"
        assert link.exec(["sh", "-c", "echo $HF_HOME"], env={"HF_HOME": "x"}).stdout == b"x\n"


def test_a_command_for_another_user_goes_through_sudo_without_a_question(tmp_path):
    """A stand-in for sudo that records how it was called: what is tested is our side."""
    folder = tmp_path / "bin"
    folder.mkdir()
    sudo = folder / "sudo"
    sudo.write_text(
        f'#!/bin/sh\nprintf "%s " "$@" > {tmp_path}/called\nwhile [ "$1" != -- ]; do shift; done; shift; exec "$@"\n'
    )
    sudo.chmod(0o755)
    with sshd.running(tmp_path / "s", environment={"PATH": f"{folder}:/usr/bin:/bin"}) as odd:
        with connect(odd.host(sudo_user="venvowner")) as link:
            assert link.exec([*PRINT, *NASTY]).stdout.decode().split("\0") == NASTY
            assert (tmp_path / "called").read_text().startswith("-n -H -u venvowner -- sh")
        sudo.write_text("#!/bin/sh\necho 'Hast du heute schon nachgedacht?' >&2; exit 1\n")
        with (
            connect(odd.host(sudo_user="venvowner")) as link,
            pytest.raises(SessionRefused, match="sudo ended") as caught,
        ):
            link.exec(["true"])
        assert "NOPASSWD" in str(caught.value)


def test_head_and_tail_are_kept_at_any_split():
    for step in (1, 3, 7, 100):
        keep = Tail(10, 5)
        data = bytes(range(100))
        for at in range(0, 100, step):
            keep.add(data[at : at + step])
        assert keep.value() == data[:10] + b"\n[... 85 bytes left out ...]\n" + data[-5:]
    whole = Tail(10, 5)
    whole.add(b"0123456789abcde")
    assert whole.value() == b"0123456789abcde"


def test_shlex_is_what_quotes():
    assert shlex.quote("a b") in command_line(["echo", "a b"], {}, "m")
