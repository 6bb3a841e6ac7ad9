"""Transfers for accounts that may run no commands (ForceCommand internal-sftp): slower, and checked by reading back."""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import paramiko

from remoteops.errors import ConnectionLost, TransferFailed
from remoteops.ssh.wire import LinkTransport

CHUNK = 256 * 1024
Progress = Callable[[int, int], None]


def upload(
    transport: LinkTransport, source: BinaryIO, size: int, remote: str, mode: int, progress: Progress | None, host: str
) -> str:
    """Write beside the target, read back, rename. Gives the sha256. Raises TransferFailed, ConnectionLost."""
    what = f"upload to {remote} by sftp"
    with _Session(transport, what, host) as sftp:
        path = remote[2:] if remote.startswith("~/") else remote
        _make_folders(sftp, posixpath.dirname(path))
        part = posixpath.join(posixpath.dirname(path), f".{posixpath.basename(path)}.part")
        digest = hashlib.sha256()
        with sftp.open(part, "wb") as sink:
            sink.set_pipelined(True)
            done = 0
            while chunk := source.read(CHUNK):
                sink.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done, size)
        if _digest(sftp, part) != digest.hexdigest():
            sftp.remove(part)
            raise TransferFailed(f"{what}: what arrived is not what was sent", host=host, tried=what, hint="try again")
        sftp.chmod(part, mode)
        sftp.posix_rename(part, path)
        return digest.hexdigest()


def download(
    transport: LinkTransport, remote: str, local: Path, sha256: str | None, progress: Progress | None, host: str
) -> str:
    """Write beside the target, check, rename. Gives the sha256. Raises TransferFailed, ConnectionLost."""
    what = f"download of {remote} by sftp"
    part = local.with_name(f".{local.name}.sftp.part")
    with _Session(transport, what, host) as sftp:
        path = remote[2:] if remote.startswith("~/") else remote
        size = int(sftp.stat(path).st_size or 0)
        digest = hashlib.sha256()
        part.unlink(missing_ok=True)
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            with os.fdopen(fd, "wb") as sink, sftp.open(path, "rb") as stream:
                # Without a bound all requests are queued at once, and large files stall.
                stream.prefetch(size, max_concurrent_requests=64)
                done = 0
                while done < size and (chunk := stream.read(min(CHUNK, size - done))):
                    sink.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    if progress is not None:
                        progress(done, size)
            if done != size or digest.hexdigest() != (sha256 or digest.hexdigest()):
                raise TransferFailed(
                    f"{what}: the checksum is wrong",
                    host=host,
                    tried=what,
                    hint="the file on the host changed; list it again and retry",
                )
            os.replace(part, local)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return digest.hexdigest()


class _Session:
    """An sftp session whose errors are ours."""

    def __init__(self, transport: LinkTransport, what: str, host: str) -> None:
        self._transport = transport
        self._what = what
        self._host = host

    def __enter__(self) -> Any:
        try:
            self._client = self._transport.open_sftp_client()
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise TransferFailed(
                f"{self._what}: neither commands nor sftp work on this host",
                host=self._host,
                tried=self._what,
                hint="look at ForceCommand and Subsystem in its sshd_config",
            ) from error
        return self._client

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._client is not None:
            self._client.close()
        if isinstance(error, EOFError | paramiko.SSHException) or (error and not self._transport.is_active()):
            raise ConnectionLost(
                f"the connection was lost during the {self._what}", host=self._host, hint="try again"
            ) from None
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            raise TransferFailed(
                f"{self._what} failed: {reason}", host=self._host, tried=self._what, hint="check the path on the host"
            ) from None


def _make_folders(sftp: Any, folder: str) -> None:
    if not folder or folder == "/":
        return
    try:
        sftp.stat(folder)
    except FileNotFoundError:
        _make_folders(sftp, posixpath.dirname(folder))
        sftp.mkdir(folder)


def _digest(sftp: Any, path: str) -> str:
    digest = hashlib.sha256()
    with sftp.open(path, "rb") as stream:
        stream.prefetch(max_concurrent_requests=64)
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
