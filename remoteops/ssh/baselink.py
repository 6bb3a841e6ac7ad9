"""What a link to a host and one to this machine have in common: running a command to its end, and copying files."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from remoteops.errors import ConnectionLost, LinkTimeout
from remoteops.ssh import transfer
from remoteops.ssh.process import Process, Tail, failed

HEAD = 1024 * 1024  # bytes of stdout kept from its beginning
TAIL = 1024 * 1024  # bytes of stdout kept from its end
STDERR = 64 * 1024  # bytes of stderr kept from its end
TICK = 10.0  # seconds between signs of life to a verb on this machine
Sink = Callable[[bytes], None]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Completed:
    """A command that ended: ``exit_status`` or ``exit_signal`` (a name without SIG), and its bytes.

    ``stdout`` is whole up to 2 MiB, then its head and tail with a line between that says what is left out;
    ``stderr`` is the tail (64 KiB).
    """

    exit_status: int | None
    exit_signal: str | None
    stdout: bytes
    stderr: bytes


class BaseLink:
    """What Link and LocalLink have in common; ``start`` is all they do differently."""

    host: Any
    description: str

    def start(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Process:
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the connection; twice does no harm."""

    def every_while(self, tick: Callable[[], None]) -> Callable[[], None]:
        """Call ``tick`` every few seconds until the function given back is called."""
        over = threading.Event()

        def run() -> None:
            while not over.wait(TICK):
                tick()

        threading.Thread(target=run, name="remoteops-tick", daemon=True).start()
        return over.set

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | Iterable[bytes] = b"",
        env: Mapping[str, str] | None = None,
        on_stdout: Sink | None = None,
        on_stderr: Sink | None = None,
        timeout: float | None = None,
        check: bool = True,
    ) -> Completed:
        """Run a command and wait for it.

        Parameters: ``argv`` goes to the host word by word (no shell reads it), ``env`` is added to its environment,
        ``on_stdout`` and ``on_stderr`` see the bytes as they come. Memory stays bounded whatever comes.
        Raises CommandFailed (``check`` and not status 0), LinkTimeout after ``timeout`` seconds, ConnectionLost.
        """
        out, err = Tail(0 if on_stdout else HEAD, STDERR if on_stdout else TAIL), Tail(0, STDERR)
        deadline = None if timeout is None else time.monotonic() + timeout
        process = self.start(argv, env=env)
        feeder = Feeder(process, stdin)
        try:
            feeder.start()
            while True:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise LinkTimeout(
                        f"`{argv[0]}` did not end within {timeout:g} s",
                        host=self.host.name,
                        tried=" ".join(argv)[:500],
                        hint="it may still run on the host",
                        stderr=err.value().decode("utf-8", "replace"),
                    )
                got = process.read(left)
                if got is None:
                    break
                for data, keep, sink in ((got[0], out, on_stdout), (got[1], err, on_stderr)):
                    if data:
                        keep.add(data)
                        if sink is not None:
                            sink(data)
            feeder.raise_error()
        finally:
            process.close()
            feeder.join()
        self._check_started(argv, process)
        done = Completed(process.exit_status, process.exit_signal, out.value(), err.value())
        if check and done.exit_status != 0:
            raise failed(argv, process, done.stderr, self.host.name)
        return done

    def _check_started(self, argv: Sequence[str], process: Process) -> None:
        """Raises when the login shell (or sudo) ended before it ran anything."""

    def upload(self, local: Path | bytes, remote: str, *, mode: int = 0o644, progress: Progress | None = None) -> str:
        """Copy a file (or bytes) to the host; gives its sha256. ``remote`` ("~/" is the home there) appears only when
        all of it is there and checked. A broken copy of the same content goes on where it stopped.
        Raises TransferFailed, DiskTooSmall, ConnectionLost."""
        return transfer.upload(self, local, remote, mode=mode, progress=progress)

    def download(self, remote: str, local: Path, *, sha256: str | None = None, progress: Progress | None = None) -> str:
        """Copy a file from the host; gives its sha256. ``local`` appears only when all of it is there and checked.
        Raises TransferFailed, ConnectionLost."""
        return transfer.download(self, remote, local, sha256=sha256, progress=progress)


class Feeder:
    """Gives a process its stdin; from a thread when there is more than the channel takes at once."""

    def __init__(self, process: Process, stdin: bytes | Iterable[bytes]) -> None:
        self._process = process
        self._stdin = stdin
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        if isinstance(self._stdin, bytes) and len(self._stdin) <= 65536:
            if self._stdin:
                self._process.send(self._stdin)
            self._process.finish_input()
            return
        self._thread = threading.Thread(target=self._run, name="remoteops-stdin", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for chunk in [self._stdin] if isinstance(self._stdin, bytes) else self._stdin:
                if not self._process.send(chunk):
                    return  # it reads no more: its own exit status says whether that is wrong
            self._process.finish_input()
        except BaseException as error:  # noqa: BLE001 - carried to the thread that waits for the command
            self._error = error
            self._process.close()

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(5)
            if self._error is not None and not isinstance(self._error, ConnectionLost):
                raise self._error
