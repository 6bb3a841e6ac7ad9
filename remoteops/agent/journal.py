"""All or nothing over several files: a write-ahead journal, and what puts things right after a kill at any point.

    <store>/
      state.json     the committed state; renamed into place, and that rename is the commit
      state.next     the state that a transaction will commit
      journal.json   exists only while a transaction is on its way: which files, their hashes, the names used beside
      them
      blobs/<sha256> bytes of files, before and after
      lock           held (flock) by the process that works here; says who

Everything that needs space happens before the first file is touched; after that there are only renames and unlinks,
so a
full disk cannot stop an undo. The original's inode is kept beside the file under another name until the commit: undoing
is a rename, and hardlinked siblings (uv, conda) never see a changed byte.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import signal
import stat
import time
import uuid
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional

from remoteops.agent.bytecode import drop_bytecode
from remoteops.agent.protocol import AgentError
from remoteops.agent.rundir import read_json, write_json

MISSING = "missing"
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGPIPE)


class Change(NamedTuple):
    """One file: absolute path, hash it must have, hash it gets, mtime it gets (ns; None: now), symlink target or
    None.
    """

    path: str
    before: str
    after: str
    mtime_ns: Optional[int] = None
    link: Optional[str] = None


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def hash_of(path: str) -> str:
    """sha256 of a file's bytes, or "missing"."""
    try:
        with open(path, "rb") as stream:
            return sha256(stream.read())
    except (FileNotFoundError, NotADirectoryError):
        return MISSING


class Store:
    """The patch state of one package in one place."""

    def __init__(self, path: str, pycache_prefixes: List[str]) -> None:
        self.path = path
        self.state_path = os.path.join(path, "state.json")
        self.next_path = os.path.join(path, "state.next")
        self.journal_path = os.path.join(path, "journal.json")
        self.blobs = os.path.join(path, "blobs")
        self.pycache_prefixes = pycache_prefixes

    def state(self) -> Dict[str, Any]:
        """The committed state; {} when there is none."""
        return read_json(self.state_path) or {}

    def blob(self, digest: str) -> bytes:
        """Bytes kept under their hash. Raises AgentError(PatchError) when they are gone or damaged."""
        path = os.path.join(self.blobs, digest)
        try:
            with open(path, "rb") as stream:
                data = stream.read()
        except OSError as error:
            raise AgentError(
                "PatchError",
                "a backup is gone: %s" % error,
                tried="read %s" % path,
                hint="reinstall the package, then: fab patch --revert",
            ) from error
        if sha256(data) != digest:
            raise AgentError(
                "PatchError",
                "a backup is damaged: %s" % path,
                tried="read it",
                hint="reinstall the package, then: fab patch --revert",
            )
        return data

    def keep(self, data: bytes) -> str:
        """Put bytes in the store; returns their hash."""
        digest = sha256(data)
        path = os.path.join(self.blobs, digest)
        if hash_of(path) != digest:
            os.makedirs(self.blobs, exist_ok=True)
            try:
                _write(path + ".tmp", data)
            except OSError:
                _unlink(path + ".tmp")
                raise
            os.replace(path + ".tmp", path)
            _sync_dir(self.blobs)
        return digest

    def prune(self, wanted: Iterable[str]) -> None:
        """Drop the blobs that the committed state does not need."""
        keep = set(wanted)
        try:
            names = os.listdir(self.blobs)
        except OSError:
            return
        for name in names:
            if name not in keep:
                _unlink(os.path.join(self.blobs, name))
        if not keep:
            try:
                os.rmdir(self.blobs)
            except OSError:
                pass

    @contextlib.contextmanager
    def locked(self, who: str) -> Iterator[None]:
        """Hold the store. The kernel lets go when the holder dies, so a dead holder never blocks anyone."""
        os.makedirs(self.path, exist_ok=True)
        fd = os.open(os.path.join(self.path, "lock"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise AgentError(
                        "PatchError",
                        "the state folder cannot be locked: %s" % error,
                        tried="flock in %s" % self.path,
                        hint="put state_dir on a file system with locks (inventory.yaml)",
                    ) from error
                holder = os.read(fd, 4096).decode("utf-8", "replace").strip() or "another process"
                raise AgentError(
                    "PatchLocked",
                    "another operator is patching: %s" % holder,
                    tried="lock %s" % self.path,
                    hint="wait until that is done, then ask again",
                ) from error
            os.ftruncate(fd, 0)
            os.lseek(fd, 0, os.SEEK_SET)
            _note(fd, ("%s, pid %d, since %s" % (who, os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S"))).encode("utf-8"))
            yield
        finally:
            os.close(fd)

    # -- transactions ---------------------------------------------------------------------------------------------

    def commit(self, changes: List[Change], state: Dict[str, Any], operation: str) -> None:
        """Make every change and the new state, or none. The blobs of every ``after`` must be in the store.

        Raises AgentError(FileChanged) when a file is not what ``before`` says, AgentError(PatchError) when the system
        refuses (read-only, full); either way everything is as before.
        """
        txn = uuid.uuid4().hex[:12]
        state = dict(state, txn=txn)
        records = [
            {
                "path": c.path,
                "before": c.before,
                "after": c.after,
                "temp": _beside(c.path, txn, "new"),
                "kept": _beside(c.path, txn, "old"),
            }
            for c in changes
        ]
        with _undisturbed():
            try:
                write_json(self.next_path, state)
                write_json(
                    self.journal_path, {"txn": txn, "operation": operation, "pid": os.getpid(), "changes": records}
                )
                _sync_dir(self.path)
                for change, record in zip(changes, records):
                    if change.link is not None:
                        os.symlink(change.link, record["temp"])
                    else:
                        _write_like(record["temp"], self.blob(change.after), change.path, change.mtime_ns)
                for record in records:
                    _keep_original(record["path"], record["kept"])
                for record in records:
                    if hash_of(record["path"]) != record["before"]:
                        raise AgentError(
                            "FileChanged",
                            "%s changed while it was being patched" % record["path"],
                            tried=operation,
                            hint="run fab probe, then fab patch again",
                        )
                    os.replace(record["temp"], record["path"])
                    drop_bytecode(record["path"], self.pycache_prefixes)
                for folder in sorted({os.path.dirname(record["path"]) for record in records}):
                    _sync_dir(folder)
                os.replace(self.next_path, self.state_path)  # the commit
                _sync_dir(self.path)
            except BaseException as error:
                self.recover()
                if isinstance(error, OSError):
                    raise refused(error, operation) from error
                raise
            self.recover()

    def recover(self) -> Optional[str]:
        """Finish or undo a transaction that was cut off. Returns what was done: None, "completed" or "undone"."""
        journal = read_json(self.journal_path)
        if journal is None:
            _unlink(self.next_path)
            return None
        done = self.state().get("txn") == journal["txn"]
        for record in journal["changes"]:
            if not done and _exists(record["kept"]):
                self._restore(record)
            _unlink(record["temp"])
            _unlink(record["kept"])
        for folder in sorted({os.path.dirname(record["path"]) for record in journal["changes"]}):
            _sync_dir(folder)
        _unlink(self.next_path)
        _unlink(self.journal_path)
        _sync_dir(self.path)
        return "completed" if done else "undone"

    def _restore(self, record: Dict[str, Any]) -> None:
        path, kept = record["path"], record["kept"]
        now = hash_of(path)
        if _same_inode(path, kept) or now == record["before"]:
            return
        if now in (record["after"], MISSING):
            os.replace(kept, path)
        # any other hash: somebody wrote the file since; theirs stays, the original is in blobs/
        drop_bytecode(path, self.pycache_prefixes)


def refused(error: OSError, operation: str) -> AgentError:
    """What the user reads when the system says no; nothing was changed then."""
    hints = {
        errno.ENOSPC: "free some space, then ask again",
        errno.EDQUOT: "your quota is used up: free some space",
        errno.EROFS: "the file system is mounted read-only",
        errno.EACCES: "the user may not write there: name its owner as user or sudo_user in inventory.yaml",
    }
    hints[errno.EPERM] = hints[errno.EACCES]
    hints[errno.ENOENT] = hints[errno.ENOTDIR] = "no folder can be there: check state_dir and venv in inventory.yaml"
    return AgentError(
        "PatchError",
        "nothing was changed: %s: %s" % (error.strerror or error, error.filename or ""),
        tried={"apply": "apply the patch", "revert": "take the patch back"}.get(operation, operation),
        hint=hints.get(error.errno or 0, "look at the file and its folder"),
        errno=error.errno,
    )


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals that a lost link or a Ctrl-C sends wait until the transaction is over."""
    try:
        old = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    except (AttributeError, ValueError):
        yield
        return
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def _beside(path: str, txn: str, what: str) -> str:
    return os.path.join(os.path.dirname(path), ".%s.remoteops-%s.%s" % (os.path.basename(path), txn, what))


def _note(fd: int, text: bytes) -> None:
    """Who holds the lock: a courtesy, for which a full disk is no reason to stop."""
    try:
        os.write(fd, text)
    except OSError:
        pass


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _write_like(temp: str, data: bytes, path: str, mtime_ns: Optional[int]) -> None:
    """Write ``data`` with the mode, owner, extended attributes (SELinux context, ACLs) of ``path``."""
    like = os.stat(path)
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as stream:
        stream.write(data)
        stream.flush()
        own = os.fstat(fd)
        mode = stat.S_IMODE(like.st_mode)
        if own.st_uid != like.st_uid:
            os.fchown(fd, like.st_uid, -1)
        if own.st_gid != like.st_gid:
            try:
                os.fchown(fd, -1, like.st_gid)
            except PermissionError:
                # An owner need not be in the file's group. Another group must not get more than everybody has.
                mode &= ~0o070 | (mode & 0o007) << 3
        os.fchmod(fd, mode)
        _copy_xattrs(path, fd)
        # Bytecode is matched by mtime in whole seconds and size: a file edited twice in a second must still differ.
        when = mtime_ns if mtime_ns is not None else time.time_ns()
        if mtime_ns is None and when // 10**9 == like.st_mtime_ns // 10**9:
            when += 10**9
        os.utime(fd, ns=(like.st_atime_ns, when))
        os.fsync(fd)


def _copy_xattrs(path: str, fd: int) -> None:
    if not hasattr(os, "listxattr"):
        return
    try:
        names = os.listxattr(path)
    except OSError:
        return
    for name in names:
        value = os.getxattr(path, name)
        try:
            if os.getxattr(fd, name) == value:
                continue
        except OSError:
            pass
        os.setxattr(fd, name, value)


def _keep_original(path: str, kept: str) -> None:
    """A second name for the file as it is (the link itself, where it is one); a copy where links are not allowed."""
    try:
        os.link(path, kept, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        if os.path.islink(path):
            os.symlink(os.readlink(path), kept)
            return
        with open(path, "rb") as stream:
            _write_like(kept, stream.read(), path, os.stat(path).st_mtime_ns)


def _same_inode(a: str, b: str) -> bool:
    try:
        return os.path.samestat(os.lstat(a), os.lstat(b))
    except OSError:
        return False


def _exists(path: str) -> bool:
    return os.path.lexists(path)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _sync_dir(path: str) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)
