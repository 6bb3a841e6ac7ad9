"""Logging in: what is tried, in which order, how often somebody is asked, and what an error tells."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sshd
from link_fixtures import write_config

from remoteops.errors import AuthFailed, LinkTimeout
from remoteops.ssh import auth
from remoteops.transport import connect

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(autouse=True)
def no_agent(monkeypatch, tmp_path):
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """Questions that were put to the user; answers are set with ``asked.answer``."""

    class Asked(list):
        answer: str | None = None

    questions = Asked()

    def ask(question: str) -> str | None:
        time.sleep(0.05)
        questions.append(question)
        return questions.answer

    monkeypatch.setattr(auth, "SECRETS", auth.Secrets(ask))
    return questions


@contextlib.contextmanager
def agent(folder: Path, *keys: Path) -> Iterator[str]:
    path = str(folder / "agent.sock")
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not os.path.exists(path):
            time.sleep(0.01)
        for key in keys:
            subprocess.run(["ssh-add", "-q", str(key)], env={**os.environ, "SSH_AUTH_SOCK": path}, check=True)
        yield path
    finally:
        process.kill()
        process.wait()


def works(host) -> bool:
    with connect(host) as link:
        return link.exec(["true"]).exit_status == 0


def test_a_refused_key_tells_what_was_tried_and_what_the_server_allows(server, tmp_path):
    wrong = sshd.keygen(tmp_path / "wrong")
    with pytest.raises(AuthFailed) as caught:
        connect(server.host(identity_files=(str(wrong),)))
    text = str(caught.value)
    assert f"key {wrong}: refused" in text and "publickey" in text and caught.value.data["allowed"] == ["publickey"]


def test_no_key_at_all_still_says_what_the_server_allows(server):
    with pytest.raises(AuthFailed, match="publickey") as caught:
        connect(server.host(identity_files=()))
    assert "no key to try" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: None, "no such file"),
        (lambda path: path.write_text("nonsense") and path.chmod(0o600), "not a private key"),
        (lambda path: (shutil.copy(path.parent / "good", path), path.chmod(0o644)), "chmod 600"),
    ],
    ids=["missing", "nonsense", "readable by others"],
)
def test_an_unusable_key_file_is_named_with_the_reason(server, tmp_path, make, why):
    sshd.keygen(tmp_path / "good")
    path = tmp_path / "key"
    make(path)
    with pytest.raises(AuthFailed, match=why) as caught:
        connect(server.host(identity_files=(str(path),)))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "extra"), [("ed25519", ()), ("rsa", ("-b", "2048")), ("ecdsa", ()), ("rsa", ("-b", "2048", "-m", "PEM"))]
)
def test_every_kind_of_key_logs_in(tmp_path, kind, extra):
    key = sshd.keygen(tmp_path / "key", kind, "", *extra)
    (tmp_path / "s").mkdir()
    shutil.copy(f"{key}.pub", tmp_path / "s/authorized_keys")
    with sshd.running(tmp_path / "s") as own:
        assert works(own.host(identity_files=(str(key),)))


def test_a_passphrase_is_asked_once_for_many_connections(tmp_path, asked):
    key = sshd.keygen(tmp_path / "key", "ed25519", "open sesame")
    (tmp_path / "s").mkdir()
    shutil.copy(f"{key}.pub", tmp_path / "s/authorized_keys")
    asked.answer = "open sesame"
    with sshd.running(tmp_path / "s") as own:
        results: list[bool] = []
        threads = [
            threading.Thread(target=lambda: results.append(works(own.host(identity_files=(str(key),)))))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [True] * 8 and asked == [f"Passphrase for {key}: "]


@pytest.mark.parametrize(("answer", "why"), [(None, "ssh-add"), ("wrong", "wrong passphrase")])
def test_without_the_right_passphrase_the_error_says_so(server, tmp_path, asked, answer, why):
    key = sshd.keygen(tmp_path / "key", "ed25519", "open sesame")
    asked.answer = answer
    with pytest.raises(AuthFailed, match=why):
        connect(server.host(identity_files=(str(key),)))


def test_nobody_is_asked_where_another_key_does(server, tmp_path, asked):
    locked = sshd.keygen(tmp_path / "locked", "ed25519", "secret")
    assert works(server.host(identity_files=(str(locked), str(server.user_key)))) and not asked


def test_batch_mode_forbids_questions(server, tmp_path, asked):
    locked = sshd.keygen(tmp_path / "locked", "ed25519", "secret")
    config = write_config(tmp_path, "Host *\n BatchMode yes\n")
    with pytest.raises(AuthFailed, match="BatchMode"):
        connect(server.host(identity_files=(str(locked),), ssh_config=config))
    assert not asked


def test_the_agent_logs_in(server, tmp_path, monkeypatch):
    with agent(tmp_path, server.user_key) as path:
        monkeypatch.setenv("SSH_AUTH_SOCK", path)
        assert works(server.host(identity_files=()))
        monkeypatch.delenv("SSH_AUTH_SOCK")
        assert works(
            server.host(identity_files=(), ssh_config=write_config(tmp_path, f"Host *\n IdentityAgent {path}\n"))
        )


def test_identities_only_keeps_the_agents_other_keys_back(server, tmp_path, monkeypatch):
    keys = [sshd.keygen(tmp_path / f"k{n}") for n in range(8)]
    with agent(tmp_path, *keys, server.user_key) as path:
        monkeypatch.setenv("SSH_AUTH_SOCK", path)
        # Nine keys are more than sshd lets one try.
        with pytest.raises(AuthFailed, match="too many keys") as caught:
            connect(server.host(identity_files=()))
        assert "identity_files" in str(caught.value)
        public = tmp_path / "public_only"
        shutil.copy(f"{server.user_key}.pub", f"{public}.pub")
        config = write_config(tmp_path, f"Host *\n IdentitiesOnly yes\n IdentityFile {public}\n")
        assert works(server.host(identity_files=(), ssh_config=config))
        # A named key comes before the agent's others even without IdentitiesOnly.
        assert works(server.host(identity_files=(str(server.user_key),)))


def test_a_stale_agent_does_not_hold_anybody_up(server, tmp_path, monkeypatch):
    path = str(tmp_path / "stale.sock")
    monkeypatch.setattr(auth, "AGENT_TIMEOUT", 0.3)
    monkeypatch.setenv("SSH_AUTH_SOCK", path)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(path)
        stale.listen()
        assert works(server.host())
        with pytest.raises(AuthFailed, match="accepts and does not answer"):
            connect(server.host(identity_files=()))
    with pytest.raises(AuthFailed, match="Connection refused"):
        connect(server.host(identity_files=()))
    os.unlink(path)
    with pytest.raises(AuthFailed, match="No such file"):
        connect(server.host(identity_files=()))


def test_an_agent_that_goes_away_while_it_signs_is_bounded(server, tmp_path, monkeypatch):
    """It lists its keys and never signs."""
    from paramiko import Message

    path = str(tmp_path / "half.sock")
    blob = auth.public_blob(str(server.user_key))
    answer = Message()
    answer.add_byte(b"\x0c")
    answer.add_int(1)
    answer.add_string(blob)
    answer.add_string("half")
    listing = answer.asbytes()
    with socket.socket(socket.AF_UNIX) as half:
        half.bind(path)
        half.listen()

        def serve() -> None:
            conn, _ = half.accept()
            with conn, contextlib.suppress(OSError):  # the client may hang up at any time
                conn.recv(100)
                conn.sendall(len(listing).to_bytes(4, "big") + listing)
                conn.recv(4096)
                time.sleep(3)

        thread = threading.Thread(target=serve)
        thread.start()
        monkeypatch.setenv("SSH_AUTH_SOCK", path)
        with pytest.raises((AuthFailed, LinkTimeout)) as caught:
            connect(server.host(identity_files=(), timeouts={"auth": 1}))
        assert "half" in str(caught.value)
        thread.join()


def test_a_user_certificate_logs_in(tmp_path):
    authority, key = sshd.keygen(tmp_path / "ca"), sshd.keygen(tmp_path / "key")
    user = sshd.getpass.getuser()
    subprocess.run(
        ["ssh-keygen", "-q", "-s", str(authority), "-I", "me", "-n", user, f"{key}.pub"],
        check=True,
        capture_output=True,
    )
    options = [f"TrustedUserCAKeys {authority}.pub"]
    with sshd.running(tmp_path / "s", options=options) as own:
        assert works(own.host(identity_files=(str(key),)))
        moved = tmp_path / "elsewhere-cert.pub"
        shutil.move(f"{key}-cert.pub", moved)
        with pytest.raises(AuthFailed):
            connect(own.host(identity_files=(str(key),)))
        assert works(
            own.host(
                identity_files=(str(key),), ssh_config=write_config(tmp_path, f"Host *\n CertificateFile {moved}\n")
            )
        )


def test_keys_of_ssh_config_and_default_names_are_found(server, tmp_path):
    config = write_config(tmp_path, f"Host test\n IdentityFile {server.user_key}\n User {server.user}\n")
    assert works(server.host(identity_files=(), user=None, ssh_config=config))
    home = tmp_path / "home/.ssh"
    home.mkdir(parents=True)
    shutil.copy(server.user_key, home / "id_ed25519")
    assert works(server.host(identity_files=()))


def test_passwords_are_asked_for_only_where_the_inventory_allows_it(tmp_path, asked):
    asked.answer = "guess"
    with sshd.running(tmp_path / "s", options=["PasswordAuthentication yes", "PubkeyAuthentication no"]) as own:
        with pytest.raises(AuthFailed, match="password_auth: true") as caught:
            connect(own.host())
        assert "password" in caught.value.data["allowed"] and not asked
        with pytest.raises(AuthFailed, match="password: refused"):
            connect(own.host(password_auth=True))
        assert len(asked) == 1 and "Password" in asked[0]


def test_an_sshd_that_hangs_in_authentication_is_bounded(tmp_path):
    sleep = os.path.realpath(shutil.which("sleep") or "/bin/sleep")
    options = [
        f"AuthorizedKeysCommand {sleep} 6",
        f"AuthorizedKeysCommandUser {sshd.getpass.getuser()}",
        "AuthorizedKeysFile none",
    ]
    with sshd.running(tmp_path / "s", options=options) as own:  # noqa: SIM117
        with pytest.raises(LinkTimeout, match="did not finish authentication"):
            connect(own.host(timeouts={"auth": 1}))
