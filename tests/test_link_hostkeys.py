"""No connection is made to a host that does not prove who it is, on any way a connection can take."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest
import sshd
from link_fixtures import write_config

import remoteops
from remoteops import transport
from remoteops.errors import HostKeyChanged, HostKeyRevoked, HostKeyUnknown, Unreachable
from remoteops.ssh.route import resolve
from remoteops.ssh.wire import LinkTransport, Wire
from remoteops.transport import connect

pytestmark = pytest.mark.usefixtures("nothing_left")
TRUE = ["true"]


def known(tmp_path: Path, *lines: str) -> tuple[str]:
    file = tmp_path / "known_hosts"
    file.write_text("".join(f"{line}\n" for line in lines))
    return (str(file),)


def public(path: Path) -> str:
    return " ".join(Path(f"{path}.pub").read_text().split()[:2])


def works(host) -> bool:
    with connect(host) as link:
        return link.exec(TRUE).exit_status == 0


def test_an_unknown_key_is_refused_with_the_command_that_accepts_it(server, tmp_path):
    files = known(tmp_path)
    with pytest.raises(HostKeyUnknown) as caught:
        connect(server.host(known_hosts=files))
    text = str(caught.value)
    fingerprint = subprocess.run(
        ["ssh-keygen", "-lf", f"{server.host_key}.pub"], capture_output=True, text=True
    ).stdout.split()[1]
    assert fingerprint in text and "printf" in text and files[0] in text
    subprocess.run(["sh", "-c", caught.value.data["command"]], check=True)
    assert works(server.host(known_hosts=files))


def test_a_changed_key_is_refused_with_file_and_line_even_under_accept_new(server, tmp_path):
    other = sshd.keygen(tmp_path / "other")
    files = known(tmp_path, "# a comment", f"[127.0.0.1]:{server.port} {public(other)}")
    for policy in ("strict", "accept-new"):
        with pytest.raises(HostKeyChanged, match=r"known_hosts:2") as caught:
            connect(server.host(known_hosts=files, host_key=policy))
        assert caught.value.data["line"] == 2 and "delete line 2" in str(caught.value)
    assert Path(files[0]).read_text().count("\n") == 2


def test_ssh_config_cannot_turn_the_check_off(server, tmp_path):
    other = sshd.keygen(tmp_path / "other")
    files = known(tmp_path, f"[127.0.0.1]:{server.port} {public(other)}")
    config = write_config(tmp_path, f"Host *\n StrictHostKeyChecking no\n UserKnownHostsFile {files[0]}\n")
    host = server.host(ssh_config=config)
    open_host = host.model_copy(update={"known_hosts": None})
    with pytest.raises(HostKeyChanged):
        connect(open_host)


def test_accept_new_writes_what_it_accepted_and_says_so(server, tmp_path):
    file = tmp_path / "deep" / "known_hosts"
    with connect(server.host(known_hosts=(str(file),), host_key="accept-new")) as link:
        assert any("first contact" in notice and "SHA256:" in notice for notice in link.notices)
    assert file.read_text() == f"[127.0.0.1]:{server.port} {public(server.host_key)}\n"
    with connect(server.host(known_hosts=(str(file),))) as link:
        assert not link.notices


def test_what_a_user_should_know_is_told_once(server, tmp_path, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(transport, "tell", lines.append)
    host = server.host(name="new-host", known_hosts=(str(tmp_path / "known_hosts"),), host_key="accept-new")
    assert works(host) and works(host)
    assert len(lines) == 1 and lines[0].startswith("new-host: first contact")


def test_accept_new_hashes_names_where_ssh_config_says_so(server, tmp_path):
    file = tmp_path / "known_hosts"
    config = write_config(tmp_path, "Host *\n HashKnownHosts yes\n")
    assert works(server.host(known_hosts=(str(file),), host_key="accept-new", ssh_config=config))
    assert file.read_text().startswith("|1|") and works(server.host(known_hosts=(str(file),)))


def test_accept_new_that_cannot_write_refuses(server, tmp_path):
    (tmp_path / "known_hosts").mkdir()
    with pytest.raises(HostKeyUnknown, match="could not be recorded"):
        connect(server.host(known_hosts=(str(tmp_path / "known_hosts"),), host_key="accept-new"))


def test_a_revoked_key_is_refused_though_it_is_listed_too(server, tmp_path):
    line = public(server.host_key)
    files = known(tmp_path, f"[127.0.0.1]:{server.port} {line}", f"@revoked * {line}")
    with pytest.raises(HostKeyRevoked, match=r"known_hosts:2"):
        connect(server.host(known_hosts=files, host_key="accept-new"))


def test_revoked_host_keys_of_ssh_config_count(server, tmp_path):
    config = write_config(tmp_path, f"Host *\n RevokedHostKeys {server.host_key}.pub\n")
    with pytest.raises(HostKeyRevoked):
        connect(server.host(ssh_config=config))
    config = write_config(tmp_path, f"Host *\n RevokedHostKeys {tmp_path}/missing\n")
    with pytest.raises(HostKeyRevoked, match="cannot be read"):
        connect(server.host(ssh_config=config))


def test_wildcards_negations_and_hashes_in_a_file_with_markers(server, tmp_path):
    line = public(server.host_key)
    authority = public(sshd.keygen(tmp_path / "ca"))
    assert works(
        server.host(
            known_hosts=known(tmp_path, f"@cert-authority *.org {authority}", f"[127.0.0.?]:{server.port} {line}")
        )
    )
    with pytest.raises(HostKeyUnknown):
        connect(
            server.host(known_hosts=known(tmp_path, f"[127.0.0.*]:{server.port},![127.0.0.1]:{server.port} {line}"))
        )
    files = known(tmp_path, f"[127.0.0.1]:{server.port} {line}")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", files[0]], check=True, capture_output=True)
    assert works(server.host(known_hosts=files))


def test_a_key_known_without_the_port_is_good_for_any_port(server, tmp_path):
    assert works(server.host(known_hosts=known(tmp_path, f"127.0.0.1 {public(server.host_key)}")))


def test_host_key_alias_is_the_name_that_is_looked_up(server, tmp_path):
    config = write_config(tmp_path, "Host *\n HostKeyAlias cluster\n")
    assert works(server.host(ssh_config=config, known_hosts=known(tmp_path, f"cluster {public(server.host_key)}")))
    with pytest.raises(HostKeyUnknown, match="cluster"):
        connect(server.host(ssh_config=config, known_hosts=known(tmp_path)))


def test_a_host_known_by_another_key_type_is_asked_for_that_one(tmp_path):
    rsa = sshd.keygen(tmp_path / "rsa", "rsa", "", "-b", "2048")
    with sshd.running(tmp_path / "s", options=[f"HostKey {rsa}"]) as server:
        files = known(tmp_path, f"[127.0.0.1]:{server.port} {public(rsa)}")
        assert works(server.host(known_hosts=files))


@pytest.mark.parametrize("policy", ["strict", "accept-new"])
def test_a_host_known_only_by_a_type_it_no_longer_has_is_refused(server, tmp_path, policy):
    rsa = sshd.keygen(tmp_path / "rsa", "rsa", "", "-b", "2048")
    files = known(tmp_path, f"[127.0.0.1]:{server.port} {public(rsa)}")
    with pytest.raises(HostKeyUnknown, match="known for it: ssh-rsa"):
        connect(server.host(known_hosts=files, host_key=policy))


def certified(tmp_path: Path, *arguments: str) -> tuple[Path, list[str], Path]:
    """An authority, sshd options for a host key with a certificate of it, and the key."""
    authority, key = sshd.keygen(tmp_path / "ca"), sshd.keygen(tmp_path / "hk")
    subprocess.run(["ssh-keygen", "-q", "-s", str(authority), "-I", "host", "-h", *arguments, f"{key}.pub"], check=True,
                   capture_output=True)  # fmt: skip
    return authority, [f"HostKey {key}", f"HostCertificate {key}-cert.pub"], key


def test_a_certificate_of_a_known_authority_is_enough(tmp_path):
    authority, options, _ = certified(tmp_path, "-n", "127.0.0.1")
    with sshd.running(tmp_path / "s", options=options) as server:
        assert works(server.host(known_hosts=known(tmp_path, f"@cert-authority 127.0.0.* {public(authority)}")))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [(("-n", "elsewhere"), "it is for elsewhere"), (("-n", "127.0.0.1", "-V", "20200101:20200102"), "not valid now")],
)
def test_a_certificate_that_does_not_fit_is_refused_with_the_reason(tmp_path, arguments, why):
    authority, options, _ = certified(tmp_path, *arguments)
    with sshd.running(tmp_path / "s", options=options) as server:
        files = known(tmp_path, f"@cert-authority * {public(authority)}")
        for policy in ("strict", "accept-new"):
            with pytest.raises(HostKeyUnknown, match=why):
                connect(server.host(known_hosts=files, host_key=policy))


def test_a_certificate_of_another_authority_falls_back_to_the_plain_key(tmp_path):
    _, options, key = certified(tmp_path, "-n", "127.0.0.1")
    stranger = sshd.keygen(tmp_path / "stranger")
    with sshd.running(tmp_path / "s", options=options) as server:
        authority_line = f"@cert-authority * {public(stranger)}"
        with pytest.raises(HostKeyUnknown, match="no @cert-authority line names"):
            connect(server.host(known_hosts=known(tmp_path, authority_line)))
        assert works(server.host(known_hosts=known(tmp_path, authority_line, f"127.0.0.1 {public(key)}")))


def test_a_revoked_authority_or_key_is_refused_behind_a_good_certificate(tmp_path):
    authority, options, key = certified(tmp_path, "-n", "127.0.0.1")
    with sshd.running(tmp_path / "s", options=options) as server:
        for revoked in (authority, key):
            files = known(tmp_path, f"@cert-authority * {public(authority)}", f"@revoked * {public(revoked)}")
            with pytest.raises(HostKeyRevoked):
                connect(server.host(known_hosts=files))


@pytest.mark.parametrize("way", ["direct", "jump", "proxy command", "fabric's ad hoc command"])
def test_every_way_to_a_host_checks_its_key(server, tmp_path, way):
    """The same wrong key, by each way a user can take to the host."""
    with sshd.running(tmp_path / "bastion") as bastion:
        other = sshd.keygen(tmp_path / "other")
        line = f"[127.0.0.1]:{server.port} {public(other)}"
        files = known(tmp_path, line, bastion.known_hosts.read_text().strip())
        fields: dict[str, object] = {"known_hosts": files}
        if way == "jump":
            fields["jump"] = f"{bastion.user}@127.0.0.1:{bastion.port}"
            (bastion.folder / "authorized_keys").write_text(Path(f"{server.user_key}.pub").read_text())
        elif way == "proxy command":
            relay = tmp_path / "relay.py"
            relay.write_text(RELAY)
            fields["ssh_config"] = write_config(tmp_path, f"Host *\n ProxyCommand python3 {relay} %h %p\n")
        host = server.host(**fields)
        with pytest.raises(HostKeyChanged):
            if way.startswith("fabric"):
                from remoteops import fleet

                fleet.shell(host, "true")
            else:
                connect(host)
        # And the same way works when the key is right, so that it was the key that stopped it.
        assert works(
            server.host(
                **{
                    **fields,
                    "known_hosts": (*known(tmp_path, bastion.known_hosts.read_text().strip()), str(server.known_hosts)),
                }
            )
        )


RELAY = """
import socket, sys, threading, os
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
def up():
    while data := os.read(0, 65536): s.sendall(data)
    s.shutdown(socket.SHUT_WR)
threading.Thread(target=up, daemon=True).start()
while data := s.recv(65536): os.write(1, data)
"""


def test_a_jump_host_has_to_prove_itself_too(server, tmp_path):
    with sshd.running(tmp_path / "bastion", known=False) as bastion:
        host = server.host(jump=f"{bastion.user}@127.0.0.1:{bastion.port}")
        with pytest.raises(HostKeyUnknown, match=f"{bastion.port}"):
            connect(host)


def test_a_transport_cannot_be_made_without_a_check():
    with pytest.raises(TypeError):
        LinkTransport(Wire(None))  # type: ignore[call-arg]


def test_nothing_else_in_the_package_opens_ssh_connections():
    """Only ssh/dial.py builds transports; nobody uses paramiko's SSHClient or Fabric's Connection to connect."""
    package = Path(remoteops.__file__).parent
    openers = {"SSHClient", "Connection", "SerialGroup", "ThreadingGroup", "AutoAddPolicy", "WarningPolicy", "Transport",  # noqa: E501
               "LinkTransport", "SSHClientConnection", "set_missing_host_key_policy"}  # fmt: skip
    allowed = {("ssh/dial.py", "LinkTransport")}
    found = set()
    for file in package.rglob("*.py"):
        relative = file.relative_to(package).as_posix()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in openers:
                    found.add((relative, name))
    assert found <= allowed, found - allowed


def test_the_key_is_checked_before_anything_secret_is_sent(tmp_path, server):
    """The server's log shows no login attempt of a client that refuses its key."""
    with sshd.running(tmp_path / "s") as fresh:
        with pytest.raises(HostKeyUnknown):
            connect(fresh.host(known_hosts=known(tmp_path)))
        assert "userauth" not in fresh.log_text().lower() and "publickey" not in fresh.log_text().lower()


def test_a_proxy_command_that_cannot_start_or_dies_is_named(server, tmp_path):
    config = write_config(tmp_path, "Host *\n ProxyCommand echo no route to bastion >&2; exit 9\n")
    with pytest.raises(Unreachable, match="no route to bastion"):
        connect(server.host(ssh_config=config))
    assert resolve(server.host(ssh_config=config)).target.proxy_command is not None
