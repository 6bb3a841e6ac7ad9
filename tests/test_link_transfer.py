"""Files arrive whole or not at all, go on where they stopped, and never land outside the folder."""

from __future__ import annotations

import hashlib
import os
import subprocess
import threading
from pathlib import Path

import pytest
import sshd
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from link_fixtures import relay_to

from remoteops.errors import ConnectionLost, DiskTooSmall, TransferFailed
from remoteops.inventory import Host
from remoteops.ssh import transfer
from remoteops.ssh.transfer import safe_join
from remoteops.transport import BaseLink, connect

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def remote(server):
    with connect(server.host()) as link:
        yield link


@pytest.fixture(scope="module")
def local():
    with connect(Host(name="here", connect="local")) as link:
        yield link


@pytest.fixture(params=["remote", "local"])
def link(request) -> BaseLink:
    return request.getfixturevalue(request.param)


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


SIZES = [0, 1, 65536, 5 * 1024 * 1024 + 7]


@pytest.mark.parametrize("size", SIZES)
def test_there_and_back_is_the_same_file(link, tmp_path, size):
    data = os.urandom(size)
    source = tmp_path / "source"
    source.write_bytes(data)
    target = tmp_path / "a folder" / 'it\'s a "file"'
    seen: list[tuple[int, int]] = []
    assert link.upload(source, str(target), mode=0o640, progress=lambda done, total: seen.append((done, total))) == sha(
        data
    )
    assert target.read_bytes() == data and target.stat().st_mode & 0o777 == 0o640
    assert seen == sorted(seen) and (not size or seen[-1] == (size, size))
    back = tmp_path / "back"
    seen.clear()
    assert link.download(str(target), back, progress=lambda done, total: seen.append((done, total))) == sha(data)
    assert back.read_bytes() == data and (not size or seen[-1] == (size, size))
    assert sorted(item.name for item in target.parent.iterdir()) == [target.name]
    assert not [item for item in tmp_path.iterdir() if item.name.endswith(".part")]


def test_bytes_can_be_uploaded_and_home_is_the_hosts(remote, server):
    remote.upload(b"hello", "~/sub/file.txt")
    assert (server.home / "sub/file.txt").read_bytes() == b"hello"
    remote.upload(b"other", "~/sub/file.txt")
    assert (server.home / "sub/file.txt").read_bytes() == b"other"


def test_a_broken_upload_goes_on_where_it_stopped(server, tmp_path):
    data = os.urandom(30_000_000)
    source = tmp_path / "source"
    source.write_bytes(data)
    target = tmp_path / "target"
    with relay_to(server, cut_after_sent=15_000_000) as (relay, fields):
        with connect(server.host(**fields)) as link, pytest.raises(ConnectionLost, match="goes on where it stopped"):
            link.upload(source, str(target))
        assert not target.exists()
        already = relay.to_server
        # The host may still be taking in what was under way; the next upload must cope with a part that grows no more.
        with connect(server.host(**fields)) as link:
            assert link.upload(source, str(target)) == sha(data)
        assert relay.to_server - already < 25_000_000
    assert target.read_bytes() == data


def test_a_part_of_another_file_is_not_continued(remote, tmp_path):
    data = os.urandom(6_000_000)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(data)
    key = sha(str(len(data)).encode())[:16]
    (tmp_path / f".target.{key}.part").write_bytes(b"x" * 1_000_000)
    assert remote.upload(source, str(target)) == sha(data)
    assert target.read_bytes() == data


def test_a_broken_download_goes_on_where_it_stopped(server, tmp_path):
    data = os.urandom(30_000_000)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(data)
    with relay_to(server) as (relay, fields):

        def cut(done: int, total: int) -> None:
            if done > 10_000_000:
                relay.cut()

        with connect(server.host(**fields)) as link, pytest.raises(ConnectionLost, match="goes on where it stopped"):
            link.download(str(source), target, progress=cut)
    assert not target.exists()
    first: list[int] = []
    with connect(server.host()) as link:
        assert link.download(str(source), target, progress=lambda done, total: first.append(done)) == sha(data)
    assert first[0] > 10_000_000 and target.read_bytes() == data


def test_a_download_that_does_not_match_is_refused(remote, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"what is there")
    with pytest.raises(TransferFailed, match="checksum"):
        remote.download(str(source), target, sha256=sha(b"what was promised"))
    assert not target.exists() and list(tmp_path.iterdir()) == [source]


def test_a_stale_part_is_thrown_away_and_the_file_comes_whole(remote, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"new content")
    part = tmp_path / f".target.{sha(str(source).encode())[:16]}.part"
    part.write_bytes(b"old")
    assert remote.download(str(source), target) == sha(b"new content") and target.read_bytes() == b"new content"


@pytest.mark.parametrize(("name", "why"), [("missing", "does not exist"), ("folder", "no regular file")])
def test_what_cannot_be_downloaded_is_named(link, tmp_path, name, why):
    (tmp_path / "folder").mkdir()
    with pytest.raises(TransferFailed, match=why):
        link.download(str(tmp_path / name), tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_what_cannot_be_uploaded_is_named(link, tmp_path):
    with pytest.raises(TransferFailed, match="cannot be read"):
        link.upload(tmp_path / "missing", str(tmp_path / "target"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(TransferFailed, match="is a folder"):
        link.upload(b"x", str(tmp_path / "folder"))
    with pytest.raises(TransferFailed):
        link.upload(b"x", "/proc/no/such/place")


def test_a_folder_that_cannot_be_written_here_is_named(remote, tmp_path):
    (tmp_path / "source").write_bytes(b"x")
    with pytest.raises(TransferFailed, match="No such file"):
        remote.download(str(tmp_path / "source"), tmp_path / "missing" / "target")


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 8 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.getuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]).returncode:
        pytest.skip("needs root to mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_too_small_is_known_before_anything_is_sent(remote, tmp_path, small_disk):
    source = tmp_path / "source"
    source.write_bytes(b"x" * 20_000_000)
    with pytest.raises(DiskTooSmall, match="20000000 bytes") as caught:
        remote.upload(source, str(small_disk / "target"))
    assert caught.value.data["need"] == 20_000_000 and list(small_disk.iterdir()) == []


@pytest.mark.parametrize("free", ["²", "9" * 5000])
def test_a_free_space_that_is_no_number_keeps_no_file_from_going(remote, tmp_path, monkeypatch, free):
    real = transfer._Talk.line

    def line(self, stream, keyword, count):
        words = real(self, stream, keyword, count)
        return [*words[:2], free] if keyword == "part" else words

    monkeypatch.setattr(transfer._Talk, "line", line)
    remote.upload(b"data", str(tmp_path / "target"))
    assert (tmp_path / "target").read_bytes() == b"data"


def test_a_disk_that_fills_up_meanwhile_is_a_typed_error_and_leaves_nothing(remote, tmp_path, small_disk):
    source = tmp_path / "source"
    source.write_bytes(os.urandom(7_000_000))

    def fill(done: int, total: int) -> None:
        if not (small_disk / "other").exists():
            (small_disk / "other").write_bytes(b"x" * 5_000_000)

    with pytest.raises(DiskTooSmall, match="full"):
        remote.upload(source, str(small_disk / "target"), progress=fill)
    assert [item.name for item in small_disk.iterdir()] == ["other"]


def test_several_transfers_share_a_link(remote, tmp_path):
    payloads = {f"f{number}": os.urandom(2_000_000 + number) for number in range(6)}
    threads = [
        threading.Thread(target=remote.upload, args=(data, str(tmp_path / name))) for name, data in payloads.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((tmp_path / name).read_bytes() == data for name, data in payloads.items())


def test_a_part_on_this_side_that_is_a_link_is_not_followed(remote, tmp_path):
    source, target, victim = tmp_path / "source", tmp_path / "target", tmp_path / "victim"
    source.write_bytes(b"from the host")
    victim.write_bytes(b"precious")
    (tmp_path / f".target.{sha(str(source).encode())[:16]}.part").symlink_to(victim)
    with pytest.raises(TransferFailed):
        remote.download(str(source), target)
    assert victim.read_bytes() == b"precious"


def test_an_account_for_sftp_alone_can_still_take_and_give_files(tmp_path):
    with sshd.running(tmp_path / "s", options=["ForceCommand internal-sftp"]) as odd, connect(odd.host()) as link:
        data = os.urandom(1_000_000)
        target = tmp_path / "sub" / "target"
        assert link.upload(data, str(target), mode=0o600) == sha(data)
        assert target.read_bytes() == data and target.stat().st_mode & 0o777 == 0o600
        assert link.download(str(target), tmp_path / "back", sha256=sha(data)) == sha(data)
        with pytest.raises(TransferFailed, match="checksum"):
            link.download(str(target), tmp_path / "other", sha256=sha(b""))
        with pytest.raises(TransferFailed):
            link.download(str(tmp_path / "missing"), tmp_path / "other")


BAD = ["", "/etc/passwd", "../x", "a/../../x", "a/./b", "a//b", "~/x", "a\0b", "a\nb", "a\x1b[31m", "C:evil", "a\\b", "..", ".", "x" * 300, "a/" * 3000 + "a",  # noqa: E501
       "a\x9bb"]  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_names_that_would_leave_the_folder_are_refused(tmp_path, name):
    with pytest.raises(TransferFailed, match="may not be written here"):
        safe_join(tmp_path, name)


def test_names_through_a_link_are_refused(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/link").symlink_to(tmp_path)
    for name in ("link/x", "link"):
        with pytest.raises(TransferFailed):
            safe_join(tmp_path / "in", name)
    assert safe_join(tmp_path / "in", "sub/data_1.pt") == tmp_path / "in/sub/data_1.pt"


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=60) | st.lists(st.sampled_from(["..", ".", "", "a", "~", "b c"]), max_size=6).map("/".join))
def test_no_name_leads_out_of_the_folder(tmp_path, name):
    try:
        target = safe_join(tmp_path, name)
    except TransferFailed:
        return
    assert Path(os.path.normpath(target)).is_relative_to(tmp_path) and target != tmp_path
