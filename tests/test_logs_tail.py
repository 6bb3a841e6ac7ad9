"""Reading a growing log by inode and offset, with real files."""

from __future__ import annotations

import base64
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remoteops.agent import follow, tail
from remoteops.agent.follow import Lines
from remoteops.agent.protocol import AgentError


class Log:
    """A log on disk, its writer, and a reader that remembers its notices."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "log"
        self.notices: list[str] = []
        self.reader = self.new_reader()

    def new_reader(self) -> tail.LogReader:
        return tail.LogReader(str(self.path), lambda kind, text: self.notices.append(kind))

    def append(self, data: bytes) -> None:
        with self.path.open("ab") as stream:
            stream.write(data)

    def rotate(self, keep: int = 5) -> None:
        for number in range(keep, 0, -1):
            old = self.path.with_name(f"log.{number}")
            if old.exists():
                old.rename(self.path.with_name(f"log.{number + 1}"))
        self.path.rename(self.path.with_name("log.1"))
        self.path.touch()

    def copytruncate(self) -> None:
        shutil.copy2(self.path, self.path.with_name("log.1"))
        os.truncate(self.path, 0)

    def read(self) -> bytes:
        """All there is now: empty reads in a row on one file, as the follower does before it believes a rotation."""
        out = b""
        quiet = 0
        while quiet < 3:
            file = self.reader.file
            data = self.reader.read(7)
            out += data
            quiet = 0 if data or self.reader.file != file else quiet + 1
        return out


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def test_appended_bytes_arrive_once(log: Log) -> None:
    log.append(b"one\ntwo")
    assert log.read() == b"one\ntwo"
    log.append(b" and three\n")
    assert log.read() == b" and three\n"


def test_a_log_that_does_not_exist_yet_is_waited_for(log: Log) -> None:
    assert log.read() == b""
    log.append(b"first\n")
    assert log.read() == b"first\n"


def test_the_rest_of_a_renamed_file_comes_before_the_new_one(log: Log) -> None:
    log.append(b"1\n2\n")
    assert log.reader.read(2) == b"1\n"
    log.rotate()
    log.append(b"3\n")
    assert log.read() == b"2\n3\n"
    assert log.notices == ["rotated"]


def test_several_rotations_between_two_looks_lose_nothing(log: Log) -> None:
    log.append(b"1\n2\n")
    assert log.reader.read(2) == b"1\n"
    for number in (3, 4, 5):
        log.rotate()
        log.append(b"%d\n" % number)
    assert log.read() == b"2\n3\n4\n5\n"


def test_the_end_of_a_run_is_told_though_its_log_was_rotated_empty_many_times(log: Log) -> None:
    log.append(b"1\n")
    assert log.read() == b"1\n"
    for _ in range(4):
        log.rotate()
    log.append(b"2\n")
    told: list[bytes] = []
    follower = object.__new__(follow.Follower)
    follower.reader, follower.lines, follower.sent = log.reader, follow.Lines(None, False), 0
    follower.emit = lambda event, **fields: told.append(base64.b64decode(fields["b"]))
    follower._drain()
    assert b"".join(told) == b"2\n"


def test_the_rest_of_a_copied_and_emptied_file_is_read_from_the_copy(log: Log) -> None:
    log.append(b"1\n2\n3\n")
    assert log.reader.read(2) == b"1\n"
    log.copytruncate()
    log.append(b"4\n")
    assert log.read() == b"2\n3\n4\n"


def test_a_file_emptied_and_filled_beyond_the_old_end_is_noticed(log: Log) -> None:
    log.append(b"old line number one\n")
    log.read()
    os.truncate(log.path, 0)
    log.append(b"a new and very much longer line than before\n")
    assert log.read() == b"a new and very much longer line than before\n"
    assert log.notices == ["truncated"]


def test_a_deleted_file_is_read_to_its_end_and_then_its_successor(log: Log) -> None:
    log.append(b"1\n2\n")
    assert log.reader.read(2) == b"1\n"
    log.path.unlink()
    assert log.read() == b"2\n"
    log.append(b"3\n")
    assert log.read() == b"3\n"


def test_going_on_from_a_position_after_the_file_was_renamed(log: Log) -> None:
    log.append(b"1\n2\n3\n")
    assert log.reader.read(2) == b"1\n"
    position = log.reader.position()
    log.rotate()
    log.append(b"4\n")
    log.reader = log.new_reader()
    assert position is not None
    log.reader.resume(position)
    assert log.read() == b"2\n3\n4\n"


def test_going_on_in_another_file_starts_at_its_beginning_and_says_so(log: Log) -> None:
    log.append(b"1\n2\n3\n")
    log.read()
    position = log.reader.position()
    log.path.unlink()
    log.append(b"other\n")
    log.reader = log.new_reader()
    assert position is not None
    log.reader.resume(position)
    assert log.read() == b"other\n" and log.notices == ["replaced"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(["append", "append", "append", "read", "some", "rotate", "copytruncate", "reconnect"]),
        max_size=40,
    )
)
def test_every_line_exactly_once_whatever_happens_to_the_file(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    log = Log(tmp_path_factory.mktemp("log"))
    log.append(b"")
    log.read()  # a follower opens the file first: what was rotated away before is the past
    written = 0
    got = b""
    seen_since_rotation = True
    for step in steps:
        if step == "append":
            for _ in range(3):
                log.append(b"line %d\n" % written)
                written += 1
        elif step == "read":
            got += log.read()
            seen_since_rotation = True
        elif step == "some":
            got += log.reader.read(5)
        elif step == "rotate":
            log.rotate()
        elif step == "copytruncate" and seen_since_rotation:
            got += log.read()  # an empty copy or one nobody read a byte of cannot be told apart from another file
            log.copytruncate()
            seen_since_rotation = False
        elif step == "reconnect" and log.reader.is_open:
            position = log.reader.position()
            log.reader = log.new_reader()
            assert position is not None
            log.reader.resume(position)
    got += log.read()
    assert got == b"".join(b"line %d\n" % number for number in range(written))


# -- where to begin -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "content",
    [b"", b"a", b"a\n", b"a\nb", b"a\nb\n", b"\n\n\n", b"x" * 200_000 + b"\n" + b"y" * 300_000, b"1\n" * 100_000],
)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 1000])
def test_the_last_lines_begin_where_tail_says(tmp_path: Path, content: bytes, count: int) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    try:
        lines = content.splitlines(keepends=True)
        expected = b"".join(lines[-count:]) if count else b""
        assert content[tail.last_lines(fd, count) :] == expected
    finally:
        os.close(fd)


def test_the_last_lines_of_a_huge_log_cost_one_look_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    with path.open("wb") as stream:
        stream.truncate(1 << 30)
        stream.seek(1 << 30)
        stream.write(b"".join(b"\nline %d" % number for number in range(1000)))
    looked = 0
    pread = os.pread

    def counting(fd: int, size: int, offset: int) -> bytes:
        nonlocal looked
        looked += size
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", counting)
    fd = os.open(path, os.O_RDONLY)
    try:
        offset = tail.last_lines(fd, 100)
        assert pread(fd, 20, offset).startswith(b"line 900\n") and looked < 1 << 18
    finally:
        os.close(fd)


@pytest.mark.parametrize(("count", "first"), [(1, 990), (2, 980), (5, 950), (500, 0)])
def test_the_last_matching_lines(tmp_path: Path, count: int, first: int) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"line %d %s\n" % (number, b"." * 300) for number in range(1000)))
    fd = os.open(path, os.O_RDONLY)
    try:
        offset = tail.matching_start(fd, count, Lines(r"line \d*0 ", False).matches)
        assert os.pread(fd, 12, offset).startswith(b"line %d " % first)
    finally:
        os.close(fd)


def test_since_finds_the_byte_by_the_steady_clock_after_the_wall_clock_was_set_back(tmp_path: Path) -> None:
    index = tmp_path / "index"
    index.write_text("0 1000 50\n100 1010 60\n200 400 70\n300 410 80\n")
    assert tail.since(str(index), uptime=65, wall=405) == 200
    assert tail.since(str(index), uptime=60, wall=0) == 100
    assert tail.since(str(index), wall=999) == 0
    assert tail.since(str(index), uptime=1, wall=0) == 0
    assert tail.since(str(index), uptime=1000, wall=0) == 300
    assert tail.since(str(tmp_path / "none"), wall=5) == 0


def test_since_forgets_what_was_before_a_truncation(tmp_path: Path) -> None:
    index = tmp_path / "index"
    index.write_text("0 1000 50\n5000 1010 60\n10 1020 70\n20 1030 80\n")
    assert tail.since(str(index), wall=1005) == 10


# -- filters --------------------------------------------------------------------------------------------------------
def test_grep_keeps_whole_lines_however_they_are_cut_and_the_unfinished_last_one() -> None:
    lines = Lines("b", False)
    kept = b"".join(lines.keep(piece) for piece in (b"aaa\nab", b"c\nxy", b"z\n", b"last b"))
    assert kept + lines.keep(b"", last=True) == b"abc\nlast b"


def test_a_pattern_that_is_none_is_refused_with_words() -> None:
    with pytest.raises(AgentError) as caught:
        Lines("(", False)
    assert caught.value.kind == "UsageError"
