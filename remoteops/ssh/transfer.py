"""Files over an exec channel: atomic, checksummed, resumable; two thirds of the time of scp.

On the host it takes only sh, cat, tail, wc, mv and one of sha256sum, shasum, openssl, python3; large files go much
faster where python3 is in PATH. The part that has
arrived lies beside the target as ".NAME.KEY.part"; the target's name appears only when all of it is checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from remoteops.errors import ConnectionLost, DiskTooSmall, LinkError, TransferFailed
from remoteops.ssh.pipeline import read_ahead
from remoteops.ssh.process import Process
from remoteops.ssh.scripts import COMMIT, DISCARD, DOWNLOAD, UPLOAD

if TYPE_CHECKING:
    from remoteops.ssh.baselink import BaseLink

CHUNK = 1024 * 1024  # bytes read from a local file at a time
SMALL = 4 * 1024 * 1024  # up to here the checksum is made before sending, which saves a round trip
Progress = Callable[[int, int], None]


def _shell(script: str, *arguments: str) -> list[str]:
    return ["sh", "-c", script, "sh", *arguments]


class _Talk:
    """A script on the host that talks in lines on one stream (0 stdout, 1 stderr)."""

    def __init__(self, link: BaseLink, what: str, argv: list[str]) -> None:
        self._link = link
        self._what = what
        self.process: Process = link.start(argv)
        self._lines = [b"", b""]

    def line(self, stream: int, keyword: str, count: int) -> list[str]:
        """The ``count`` words after ``keyword`` on the next line. Raises TransferFailed when something else comes."""
        while b"\n" not in self._lines[stream]:
            got = self.process.read()
            if got is None:
                raise self.failed()
            self._take(got)
        first, _, rest = self._lines[stream].partition(b"\n")
        words = first.decode("utf-8", "replace").split()
        if len(words) != count + 1 or words[0] != keyword:
            raise self.failed()  # a complaint of the script, or a host that talks nonsense
        self._lines[stream] = rest
        return words[1:]

    def _take(self, got: tuple[bytes, bytes]) -> None:
        for index in (0, 1):
            self._lines[index] = (self._lines[index] + got[index])[-65536:]

    def wait(self) -> None:
        """Until it ends. Raises what its exit status means."""
        while (got := self.process.read()) is not None:
            self._take(got)
        if self.process.exit_status != 0:
            raise self.failed()

    def failed(self) -> LinkError | DiskTooSmall:
        while (got := self.process.read(5)) not in (None, (b"", b"")):
            assert got is not None
            self._take(got)
        self._link._check_started(["sh"], self.process)
        said = self._lines[1].decode("utf-8", "replace").strip()
        host = self._link.host.name
        if "No space left" in said or "uota exceeded" in said:
            return DiskTooSmall(
                f"the disk of the host is full: {said.splitlines()[-1][:300]}",
                host=host,
                tried=self._what,
                hint="free space there (the part that had arrived was removed)",
            )
        status = self.process.exit_status
        return TransferFailed(
            f"{self._what} failed: {said.splitlines()[-1][:300] if said else f'status {status}'}",
            host=host,
            tried=self._what,
            hint="check the path and its permissions on the host",
            exit_status=status,
        )


def upload(
    link: BaseLink, local: Path | bytes, remote: str, *, mode: int = 0o644, progress: Progress | None = None
) -> str:
    """See BaseLink.upload."""
    what = f"upload of {'data' if isinstance(local, bytes) else local} to {remote}"
    try:
        with _open(local) as source:
            size = os.fstat(source.fileno()).st_size if not isinstance(local, bytes) else len(local)
            return _upload(link, source, size, remote, mode, progress, what)
    except OSError as error:
        if isinstance(local, bytes):
            raise
        raise TransferFailed(
            f"{local} cannot be read: {error.strerror or error}", host=link.host.name, tried=what
        ) from None


@contextlib.contextmanager
def _open(local: Path | bytes) -> Iterator[BinaryIO]:
    if isinstance(local, bytes):
        import io

        yield io.BytesIO(local)
        return
    with local.open("rb") as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError("no regular file")
        yield stream


def _upload(
    link: BaseLink, source: BinaryIO, size: int, remote: str, mode: int, progress: Progress | None, what: str
) -> str:
    digest = hashlib.sha256()
    small = size <= SMALL
    expected = hashlib.sha256(source.read()).hexdigest() if small else "-"
    key = expected[:16] if small else hashlib.sha256(f"{size}".encode()).hexdigest()[:16]
    talk = _Talk(link, what, _shell(UPLOAD, remote, key, str(size), f"{mode:o}", expected))
    try:
        have, old, free = talk.line(0, "part", 3)
        offset = _resumable(source, digest, _number(have, what), old, size)
        # Whatever df says of a strange mount is no reason not to try.
        room = int(free) * 1024 if free.isascii() and free.isdigit() and len(free) <= 18 else None
        if room is not None and room < size - int(have):
            talk.process.close()
            raise DiskTooSmall(
                f"the file needs {size} bytes and the host has {room} free there",
                host=link.host.name,
                tried=what,
                hint="free space, or choose another folder",
                need=size,
                free=room,
            )
        talk.process.send(b"append\n" if offset else b"fresh\n")
        sent = offset
        with contextlib.closing(read_ahead(source, size - sent, CHUNK, digest)) as chunks:
            for chunk in chunks:
                if not talk.process.send(chunk):
                    break
                sent += len(chunk)
                if progress is not None:
                    progress(sent, size)
        talk.process.finish_input()
        if not small:
            there, sum_there = talk.line(0, "sum", 2)
        talk.wait()
    except ConnectionLost as error:
        error.hint = "try again: the same upload goes on where it stopped"
        raise
    finally:
        talk.process.close()
    if sent != size:
        raise TransferFailed(f"{what}: the file shrank while it was read", host=link.host.name, tried=what)
    if small:
        return expected
    if there != str(size) or sum_there != digest.hexdigest():
        link.exec(_shell(DISCARD, remote, key), check=False)
        raise TransferFailed(
            f"{what}: what arrived is not what was sent",
            host=link.host.name,
            tried=what,
            hint="try again; if it repeats, suspect the host's disk or memory",
            sent=digest.hexdigest(),
            arrived=sum_there,
        )
    link.exec(_shell(COMMIT, remote, key, f"{mode:o}"))
    return digest.hexdigest()


def _number(text: str, what: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise TransferFailed(
            f"{what}: the host gave {text[:40]!r} for a size", tried=what, hint="do not trust this host's answers"
        )
    return int(text)


def _resumable(source: BinaryIO, digest: hashlib._Hash, have: int, old: str, size: int) -> int:
    """The offset to go on at: ``have`` when the part there is a prefix of our file, else 0. Leaves ``source`` at it."""
    source.seek(0)
    if 0 < have <= size and len(old) == 64:
        prefix = hashlib.sha256()
        left = have
        while left and (chunk := source.read(min(CHUNK, left))):
            prefix.update(chunk)
            left -= len(chunk)
        if not left and prefix.hexdigest() == old:
            digest.update(b"")
            source.seek(0)
            for _ in range(0, have, CHUNK):
                digest.update(source.read(min(CHUNK, have - source.tell())))
            source.seek(have)
            return have
    source.seek(0)
    return 0


def download(
    link: BaseLink, remote: str, local: Path, *, sha256: str | None = None, progress: Progress | None = None
) -> str:
    """See BaseLink.download."""
    local = Path(local)
    what = f"download of {remote}"
    part = local.with_name(f".{local.name}.{(sha256 or hashlib.sha256(remote.encode()).hexdigest())[:16]}.part")
    for attempt in (1, 2):
        resumed, found, wanted = _fetch(link, remote, part, sha256, progress, what)
        if found == wanted:
            os.replace(part, local)
            return found
        part.unlink(missing_ok=True)
        if not resumed or attempt == 2:
            break  # a part of an older file is the usual reason: once more from the start
    raise TransferFailed(
        f"{what}: the checksum is wrong",
        host=link.host.name,
        tried=what,
        arrived=found,
        expected=wanted,
        hint="the file on the host changed, or its disk is failing; list it again and retry",
    )


def _fetch(
    link: BaseLink, remote: str, part: Path, sha256: str | None, progress: Progress | None, what: str
) -> tuple[bool, str, str]:
    """Bring the part up to the whole file; whether it was resumed, its checksum, and the one it should have."""
    talk = _Talk(link, what, _shell(DOWNLOAD, remote, "-" if sha256 else "sum"))
    try:
        size = _number(talk.line(1, "size", 1)[0], what)
        # Never through a link that somebody put there, never readable by others before it is whole.
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with os.fdopen(fd, "r+b", buffering=0) as sink:
            digest = hashlib.sha256()
            have = os.fstat(fd).st_size
            have = have if have <= size else 0
            free = shutil.disk_usage(part.parent).free
            if size - have > free:
                raise DiskTooSmall(
                    f"the file has {size} bytes, and {free} are free in {part.parent} on this machine",
                    tried=what,
                    hint="choose another folder, or pull fewer samples",
                    need=size,
                    free=free,
                )
            sink.truncate(have)
            while chunk := sink.read(CHUNK):
                digest.update(chunk)
            talk.process.send(b"%d\n" % have)
            talk.process.finish_input()
            done = have
            while (got := talk.process.read()) is not None:
                data, errors = got
                talk._take((b"", errors))
                if not data:
                    continue
                done += len(data)
                if done > size:
                    raise TransferFailed(
                        f"{what}: the file grew while it was read",
                        host=link.host.name,
                        tried=what,
                        hint="wait until the run has finished writing it",
                    )
                # The connection's own thread goes on beside this: neither call holds the interpreter.
                view = memoryview(data)
                while view:
                    view = view[sink.write(view) :]
                digest.update(data)
                if progress is not None:
                    progress(done, size)
        talk.wait()
        if done != size:
            raise TransferFailed(
                f"{what}: {done} of {size} bytes came",
                host=link.host.name,
                tried=what,
                hint="try again: it goes on there",
            )
        wanted = sha256 or talk.line(1, "sum", 1)[0]
        return have > 0, digest.hexdigest(), wanted
    except ConnectionLost as error:
        error.hint = "try again: the same download goes on where it stopped"
        raise
    except OSError as error:
        if isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError) or error.errno:
            raise TransferFailed(
                f"{what}: {part.parent}: {error.strerror}", tried=what, hint="check the folder on this machine"
            ) from None
        raise
    finally:
        talk.process.close()


def safe_join(folder: Path, name: str) -> Path:
    """Where a file that a host calls ``name`` may be written: inside ``folder``, or TransferFailed.

    Refuses absolute names, "..", empty parts, control characters, drive letters, and any way through a link that
    already lies in the folder. The host chooses names; it must not choose places.
    """
    parts = name.split("/")
    bad = (
        not name
        or name.startswith(("/", "~"))
        or "\\" in name
        or "\0" in name
        or len(name) > 4096
        or any(part in ("", ".", "..") or len(part.encode("utf-8", "surrogateescape")) > 255 for part in parts)
        or any(ord(char) < 32 or ord(char) == 127 or 0x80 <= ord(char) < 0xA0 for char in name)
        or ":" in parts[0][1:2]
    )
    target = folder
    if not bad:
        for part in parts:
            target = target / part
            if target.is_symlink():
                bad = True
    if bad:
        raise TransferFailed(
            f"the host named a file {name[:200]!r}, which may not be written here",
            tried=f"write into {folder}",
            hint="do not trust this host's answers",
            name=name[:200],
        )
    return target
