"""known_hosts files are read as OpenSSH reads them."""

from __future__ import annotations

import base64
import subprocess
import threading
from pathlib import Path

import pytest
import sshd
from hypothesis import given, settings
from hypothesis import strategies as st

from remoteops.ssh.hostkeys import HostKeyPolicy
from remoteops.ssh.known_hosts import KnownHosts, accept, fingerprint, glob_matches, host_name, line_for, parse


def key_of(path: Path) -> tuple[str, str, bytes]:
    kind, text = Path(f"{path}.pub").read_text().split()[:2]
    return kind, text, base64.b64decode(text)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str, bytes]]:
    folder = tmp_path_factory.mktemp("keys")
    return {
        "ed25519": key_of(sshd.keygen(folder / "a")),
        "other": key_of(sshd.keygen(folder / "b")),
        "rsa": key_of(sshd.keygen(folder / "c", "rsa", "", "-b", "2048")),
        "ecdsa": key_of(sshd.keygen(folder / "d", "ecdsa")),
    }


def written(tmp_path: Path, *lines: str) -> KnownHosts:
    file = tmp_path / "known_hosts"
    file.write_text("\n".join(lines) + "\n")
    return KnownHosts([file])


@pytest.mark.parametrize(
    ("patterns", "name", "known"),
    [
        ("gpu1", "gpu1", True),
        ("GPU1", "gpu1", True),
        ("gpu1,10.0.0.1", "10.0.0.1", True),
        ("gpu*", "gpu17", True),
        ("gpu?", "gpu17", False),
        ("*.example.org,!bad.example.org", "good.example.org", True),
        ("*.example.org,!bad.example.org", "bad.example.org", False),
        ("!bad.example.org,*.example.org", "bad.example.org", False),
        ("!bad.example.org", "good.example.org", False),
        ("[gpu1]:2222", "[gpu1]:2222", True),
        ("[gpu1]:2222", "gpu1", False),
        ("gpu1", "[gpu1]:2222", False),
        ("[*.example.org]:2222", "[a.example.org]:2222", True),
        ("[::1]:2222", "[::1]:2222", True),
    ],
)
def test_patterns_match_as_in_openssh(tmp_path, keys, patterns, name, known):
    kind, text, blob = keys["ed25519"]
    verdict = written(tmp_path, f"{patterns} {kind} {text}").judge(name, blob)
    assert (verdict.state == "known") is known


@pytest.mark.parametrize("name", ["gpu1", "[gpu1]:2222", "2001:db8::1"])
def test_names_hashed_by_ssh_keygen_are_found(tmp_path, keys, name):
    kind, text, blob = keys["ed25519"]
    file = tmp_path / "known_hosts"
    file.write_text(f"{name} {kind} {text}\nelsewhere {kind} {keys['other'][1]}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(file)], check=True, capture_output=True)
    assert name not in file.read_text()
    assert KnownHosts([file]).judge(name, blob).state == "known"
    assert KnownHosts([file]).judge("gpu2", blob).state == "unknown"


def test_lines_we_write_are_found_by_ssh_keygen(tmp_path, keys):
    blob = keys["ed25519"][2]
    for hashed in (False, True):
        file = tmp_path / f"known_hosts.{hashed}"
        accept(file, line_for("[gpu1]:2222", blob, hashed=hashed))
        found = subprocess.run(
            ["ssh-keygen", "-F", "[gpu1]:2222", "-f", str(file)], capture_output=True, text=True, check=True
        )
        assert keys["ed25519"][1] in found.stdout


def test_a_listed_key_wins_over_a_changed_one_and_a_revoked_one_over_both(tmp_path, keys):
    kind, text, blob = keys["ed25519"]
    other = keys["other"][1]
    both = written(tmp_path, f"gpu1 {kind} {other}", f"gpu1 {kind} {text}")
    assert both.judge("gpu1", blob).state == "known"
    revoked = written(tmp_path, f"gpu1 {kind} {text}", f"@revoked * {kind} {text}")
    verdict = revoked.judge("gpu1", blob)
    assert verdict.state == "revoked" and verdict.entry is not None and verdict.entry.line == 2


def test_a_changed_key_says_where_the_known_one_stands(tmp_path, keys):
    kind, text, _ = keys["ed25519"]
    verdict = written(tmp_path, "# first", "", f"gpu1 {kind} {text}").judge("gpu1", keys["other"][2])
    assert verdict.state == "changed" and verdict.entry is not None
    assert verdict.entry.where == f"{tmp_path}/known_hosts:3"


def test_another_key_type_is_unknown_not_changed(tmp_path, keys):
    kind, text, _ = keys["rsa"]
    assert written(tmp_path, f"gpu1 {kind} {text}").judge("gpu1", keys["ed25519"][2]).state == "unknown"


def test_key_types_listed_come_first_in_the_offer(tmp_path, keys):
    file = tmp_path / "known_hosts"
    file.write_text(f"gpu1 {keys['rsa'][0]} {keys['rsa'][1]}\ngpu1 {keys['ecdsa'][0]} {keys['ecdsa'][1]}\n")
    offer = HostKeyPolicy("h", "gpu1", 22, [str(file)]).offer()
    assert offer[:3] == ["rsa-sha2-512", "rsa-sha2-256", "ecdsa-sha2-nistp256"]
    assert not [name for name in offer if "cert" in name]
    file.write_text(f"@cert-authority *.org,gpu1 {keys['rsa'][0]} {keys['rsa'][1]}\n")
    assert HostKeyPolicy("h", "gpu1", 22, [str(file)]).offer()[0] == "ssh-ed25519-cert-v01@openssh.com"


def test_several_files_are_read_and_bad_lines_do_no_harm(tmp_path, keys):
    kind, text, blob = keys["ed25519"]
    (tmp_path / "one").write_bytes(b"gpu1 ssh-ed25519 AAAA\n@oops gpu1 x y\ngpu1\n\xff\xfe\n" + b"x" * 70000 + b"\n")
    (tmp_path / "two").write_text(f"gpu1 {kind} {text} a comment\n")
    known = KnownHosts([tmp_path / "missing", tmp_path / "one", tmp_path / "two"])
    assert known.judge("gpu1", blob).state == "known"
    assert len(known.complaints) == 5 and all(str(tmp_path / "one") in item for item in known.complaints)


def test_accepting_from_many_threads_leaves_whole_lines(tmp_path, keys):
    file = tmp_path / "new" / "known_hosts"
    blob = keys["ed25519"][2]
    threads = [threading.Thread(target=accept, args=(file, line_for(f"gpu{n}", blob))) for n in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries, complaints = parse(file.read_bytes(), str(file))
    assert not complaints and {entry.patterns for entry in entries} == {f"gpu{n}" for n in range(40)}
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700


def test_accepting_keeps_what_is_there_even_without_a_last_newline(tmp_path, keys):
    file = tmp_path / "known_hosts"
    file.write_text("gpu1 ssh-ed25519 AAAA")
    accept(file, line_for("gpu2", keys["ed25519"][2]))
    assert file.read_text().splitlines()[0] == "gpu1 ssh-ed25519 AAAA" and len(file.read_text().splitlines()) == 2


def test_fingerprints_are_those_of_ssh_keygen(tmp_path, keys):
    file = tmp_path / "k.pub"
    file.write_text(f"{keys['rsa'][0]} {keys['rsa'][1]}\n")
    shown = subprocess.run(["ssh-keygen", "-l", "-f", str(file)], capture_output=True, text=True, check=True).stdout
    assert fingerprint(keys["rsa"][2]) in shown


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_read_without_an_exception(data):
    entries, complaints = parse(data, "f")
    lines = [line for line in data.split(b"\n") if line.strip(b" \t\r") and not line.strip(b" \t\r").startswith(b"#")]
    assert len(entries) + len(complaints) == len(lines)


names = st.text(st.sampled_from("abz.*?-[]:!,|1"), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(names, names, st.sampled_from(["", "@revoked ", "@cert-authority "]))
def test_only_lines_that_name_the_host_can_make_a_key_known(patterns, name, marker):
    blob = b"\0\0\0\x0bssh-ed25519\0\0\0\x20" + b"k" * 32
    text = base64.b64encode(blob).decode()
    entries, _ = parse(f"{marker}{patterns} ssh-ed25519 {text}".encode(), "f")
    known = KnownHosts([])
    known.entries = entries
    if known.judge(name, blob).state == "known":
        assert not marker
        positive = [part for part in patterns.lower().split(",") if not part.startswith("!")]
        assert any(glob_matches(part, name) for part in positive)


def test_ports_make_another_name():
    assert host_name("GPU1", 22) == "gpu1" and host_name("GPU1", 2222) == "[gpu1]:2222"
