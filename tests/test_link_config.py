"""ssh_config gives what ``ssh -G`` gives."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from link_fixtures import write_config

from remoteops.errors import InventoryError
from remoteops.inventory import Host
from remoteops.ssh.config import SshConfig, expand_hostname, split_words
from remoteops.ssh.route import parse_jump, resolve

SSH = shutil.which("ssh")


def ssh_g(path: str, alias: str) -> dict[str, list[str]]:
    """What OpenSSH itself makes of the file."""
    shown = subprocess.run([SSH or "ssh", "-G", "-F", path, alias], capture_output=True, text=True, check=True).stdout
    values: dict[str, list[str]] = {}
    for line in shown.splitlines():
        key, _, value = line.partition(" ")
        values.setdefault(key, []).append(value)
    return values


CASES = {
    "first value wins": "Host gpu1\n User one\nHost *\n User two\n Port 2200\n",
    "negation": "Host * !gpu1\n User no\nHost gpu*\n User yes\n",
    "equals and quotes": 'Host=gpu1\n User="a b"\n Port = 2201\n',
    "hostname token": "Host gpu1\n HostName %h.example.org\n",
    "match host": "Host gpu1\n HostName real.example.org\nMatch host real.example.org\n User matched\n",
    "match originalhost": "Match originalhost gpu1 user nobody-here\n User no\nMatch originalhost gpu1,gpu2\n User yes\n",  # noqa: E501
    "match exec": 'Match exec "test %n = gpu1"\n User yes\nMatch exec false\n Port 1\n',
    "match negated": "Match !exec false\n User yes\n",
    "match all": "Match host other\n User no\nMatch all\n User all\n",
    "match final": "Match final host *.example.org\n User finally\nHost gpu1\n HostName gpu1.example.org\n",
    "host in the final pass": "Match final all\nHost !gpu1 *\n ProxyJump j1\nHost gpu1\n HostName h1.example\n",
    "case": "hOsT GPU1 gpu1\n uSeR x\n",
    "identity files add up": "Host gpu1\n IdentityFile /a\nHost *\n IdentityFile /b\n",
    "comment": "# nothing\nHost gpu1 # a comment\n User x # trailing\n",
    "proxyjump none": "Host gpu1\n ProxyJump none\nHost *\n ProxyJump bastion\n",
    "jump before command": "Host gpu1\n ProxyJump bastion\nHost *\n ProxyCommand nc %h %p\n",
    "command before jump": "Host gpu1\n ProxyCommand nc %h %p\nHost *\n ProxyJump bastion\n",
    "strict": "Host *\n StrictHostKeyChecking accept-new\n UserKnownHostsFile /k1 /k2\n",
    "serveralive": "Host *\n ServerAliveInterval 7\n ServerAliveCountMax 2\n",
    "alias": "Host gpu1\n HostKeyAlias cluster\n HashKnownHosts yes\n",
    "setenv": 'Host gpu1\n SetEnv A=1 "B=two words"\nHost *\n SetEnv C=3\n',
    "tag": "Host gpu1\n Port 2222\n Compression yes\n IdentitiesOnly yes\n",
}
KEYS = (
    "user", "hostname", "port", "identityfile", "proxyjump", "proxycommand", "stricthostkeychecking", "userknownhostsfile",  # noqa: E501
    "serveraliveinterval", "serveralivecountmax", "hostkeyalias", "hashknownhosts", "setenv", "compression", "identitiesonly",  # noqa: E501
)  # fmt: skip


def ours(path: str, alias: str, key: str) -> list[str]:
    options = SshConfig(path).lookup(alias)
    if key == "hostname":
        return [expand_hostname(options)]
    words = options.words(key)
    if key in ("identityfile", "setenv", "sendenv"):
        return words
    return [" ".join(words)] if words else []


@pytest.mark.skipif(SSH is None, reason="no ssh client to compare with")
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_ssh_g(tmp_path, name):
    path = write_config(tmp_path, CASES[name])
    theirs = ssh_g(path, "gpu1")
    for key in KEYS:
        mine = ours(path, "gpu1", key)
        if key == "proxyjump" and mine == ["none"]:
            mine = []
        if key == "stricthostkeychecking" and mine in (["yes"], ["no"]):
            continue
        if mine:
            assert theirs.get(key) == mine, key
        elif key in ("proxyjump", "proxycommand", "hostkeyalias", "setenv"):
            assert key not in theirs


words = st.lists(
    st.sampled_from(["Host gpu1", "Host *", "Host gpu* !gpu2", "Host !gpu1 *", "Match host gpu1", "Match all", "Match !host gpu1",  # noqa: E501
                     "Match originalhost gpu*", "User a", "User b", "Port 2200", "Port 2300", "HostName h1.example", "HostName %h.x",  # noqa: E501
                     "ProxyJump j1", "ProxyJump none", "ProxyCommand nc", "HostKeyAlias k", "Compression yes", "IdentityFile /x",  # noqa: E501
                     "Match final all", "Match canonical", "Match user a"]),
    max_size=9,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(SSH is None, reason="no ssh client to compare with")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words)
def test_any_mix_of_blocks_is_read_as_ssh_g_reads_it(tmp_path, lines):
    path = write_config(tmp_path, "\n".join(lines) + "\n")
    theirs = ssh_g(path, "gpu1")
    for key in ("user", "hostname", "port", "proxyjump", "proxycommand", "hostkeyalias", "identityfile"):
        mine = ours(path, "gpu1", key)
        if mine and mine != ["none"]:
            assert theirs.get(key) == mine, (key, lines)
        elif key in ("proxyjump", "proxycommand", "hostkeyalias"):
            assert key not in theirs, (key, lines)


def test_include_takes_globs_and_stays_inside_its_block(tmp_path):
    folder = tmp_path / "conf.d"
    folder.mkdir()
    (folder / "1.conf").write_text("User inside\nHost gpu2\n User two\n")
    (folder / "2.conf").write_text("Host *\n Port 2222\n")
    path = write_config(tmp_path, f"Host gpu1\n Include {folder}/*.conf\n Compression yes\nHost *\n User outside\n")
    one, two = SshConfig(path).lookup("gpu1"), SshConfig(path).lookup("gpu2")
    assert one.text("user") == "inside" and one.text("port") == "2222" and one.flag("compression")
    assert two.text("user") == "outside" and two.text("port") is None
    if SSH is not None:
        for alias in ("gpu1", "gpu2"):
            for key in ("user", "compression"):
                assert ssh_g(path, alias)[key] == (ours(path, alias, key) or ["no"])


def test_a_file_that_includes_itself_is_named(tmp_path):
    path = write_config(tmp_path, f"Include {tmp_path}/ssh_config\n")
    with pytest.raises(InventoryError, match="16 files deep"):
        SshConfig(path).lookup("gpu1")


@pytest.mark.parametrize(("text", "line"), [("Host gpu1\n Port\n", 2), ('User "open\n', 1), ("!!\n", 1)])
def test_a_broken_line_is_named(tmp_path, text, line):
    path = write_config(tmp_path, text)
    with pytest.raises(InventoryError, match=f"ssh_config:{line}"):
        SshConfig(path).lookup("gpu1")


def test_words_are_split_as_in_a_shell():
    assert split_words('a "b c" d\\ e "f\\"g" # no') == ["a", "b c", "d e", 'f"g']


def host(tmp_path: Path, text: str, **fields) -> Host:
    return Host(**{"name": "gpu1", "ssh_config": write_config(tmp_path, text), **fields})


def test_what_the_inventory_says_wins_over_ssh_config(tmp_path):
    text = "Host gpu1\n HostName a.example\n User x\n Port 1\n StrictHostKeyChecking no\n ServerAliveInterval 60\n ConnectTimeout 3\n"  # noqa: E501
    route = resolve(
        host(tmp_path, text, address="b.example", user="y", port=2, timeouts={"silence": 9}, host_key="strict")
    )
    hop = route.target
    assert (hop.address, hop.identity.user, hop.port, hop.timeouts.silence, hop.timeouts.connect) == (
        "b.example",
        "y",
        2,
        9,
        3,
    )
    assert hop.host_keys.policy == "strict"


def test_ssh_config_decides_what_the_inventory_leaves_open(tmp_path):
    text = "Host gpu1\n HostName a.example\n ServerAliveInterval 4\n ServerAliveCountMax 2\n Compression yes\n HostKeyAlias c\n"  # noqa: E501
    hop = resolve(host(tmp_path, text)).target
    assert hop.address == "a.example" and hop.timeouts.silence == 8 and hop.compression and hop.host_keys.name == "c"


def test_strict_host_key_checking_no_cannot_turn_the_check_off(tmp_path):
    route = resolve(host(tmp_path, "Host *\n StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n"))
    assert route.target.host_keys.policy == "accept-new"
    assert os.devnull not in [str(item) for item in route.target.host_keys.files]
    assert any("a changed key is still refused" in notice for notice in route.notices)


def test_options_that_matter_and_are_not_supported_are_reported(tmp_path):
    text = "Host *\n PKCS11Provider /usr/lib/p.so\n KnownHostsCommand /bin/k\n GSSAPIAuthentication no\n Nonsense 1\n"
    notices = resolve(host(tmp_path, text)).notices
    assert [item for item in notices if ":2: pkcs11provider" in item and "ssh-agent" in item]
    assert [item for item in notices if "knownhostscommand" in item] and [
        item for item in notices if "unknown option nonsense" in item
    ]
    assert not [item for item in notices if "gssapi" in item]


def test_several_jump_hosts_with_their_own_users(tmp_path):
    text = "Host gpu1\n ProxyJump a@h1:2201,b@h2\nHost h2\n HostName two.example\n Port 2202\n"
    hops = resolve(host(tmp_path, text)).hops
    assert [(hop.identity.user, hop.address, hop.port) for hop in hops[:2]] == [
        ("a", "h1", 2201),
        ("b", "two.example", 2202),
    ]
    assert len(hops) == 3 and hops[2].address == "gpu1"


def test_proxy_jump_none_means_direct(tmp_path):
    assert len(resolve(host(tmp_path, "Host gpu1\n ProxyJump none\nHost *\n ProxyJump bastion\n")).hops) == 1


def test_a_jump_for_every_host_does_not_send_the_jump_host_through_itself(tmp_path):
    hops = resolve(host(tmp_path, "Host *\n ProxyJump me@bastion\n")).hops
    assert [hop.address for hop in hops] == ["bastion", "gpu1"]
    assert len(resolve(host(tmp_path, "Host *\n ProxyJump bastion\n", name="bastion")).hops) == 1


def test_the_first_jump_hosts_own_jump_counts(tmp_path):
    text = "Host gpu1\n ProxyJump inner\nHost inner\n ProxyJump outer\n"
    assert [hop.address for hop in resolve(host(tmp_path, text)).hops] == ["outer", "inner", "gpu1"]


def test_jumps_in_a_circle_are_refused(tmp_path):
    text = "Host gpu1\n ProxyJump a\nHost a\n ProxyJump b\nHost b\n ProxyJump a\n"
    with pytest.raises(InventoryError, match="circle"):
        resolve(host(tmp_path, text))


def test_the_inventorys_jump_wins(tmp_path):
    hops = resolve(host(tmp_path, "Host gpu1\n ProxyJump bastion\n", jump="me@[::1]:2022")).hops
    assert (hops[0].identity.user, hops[0].address, hops[0].port) == ("me", "::1", 2022)
    assert len(resolve(host(tmp_path, "Host *\n ProxyJump bastion\n", jump="none")).hops) == 1


@pytest.mark.parametrize("text", ["", "@h", "h:0", "h:99999", "[::1", "a b@c:d:e"])
def test_a_broken_jump_is_refused(text):
    with pytest.raises(InventoryError):
        parse_jump(text, "gpu1")


def test_tokens_and_variables_are_put_into_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("KEYS", "/keys")
    text = "Host gpu1\n HostName a.example\n User me\n Port 2222\n IdentityFile ${KEYS}/%r@%h-%p-%n\n ProxyCommand nc %h %p %%\n"  # noqa: E501
    hop = resolve(host(tmp_path, text)).target
    assert "/keys/me@a.example-2222-gpu1" in hop.identity.files and hop.proxy_command == "nc a.example 2222 %"


def test_algorithm_lists_add_remove_and_replace(tmp_path):
    hop = resolve(
        host(tmp_path, "Host *\n Ciphers -*gcm*\n MACs ^hmac-sha2-512\n HostKeyAlgorithms ssh-ed25519\n")
    ).target
    assert not [name for name in hop.ciphers if "gcm" in name] and hop.macs[0] == "hmac-sha2-512"
    assert list(hop.host_keys.algorithms) == ["ssh-ed25519"]


def test_the_default_offers_an_authenticated_cipher_first(tmp_path):
    assert resolve(host(tmp_path, "")).target.ciphers[0] == "aes128-gcm@openssh.com"


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=200))
def test_any_text_is_read_or_refused_with_its_line(tmp_path, text):
    path = Path(write_config(tmp_path, ""))
    path.write_text(text, errors="surrogateescape" if not text.isascii() else None, encoding="utf-8")
    try:
        SshConfig(str(path)).lookup("gpu1")
    except InventoryError as error:
        assert str(path) in str(error)
