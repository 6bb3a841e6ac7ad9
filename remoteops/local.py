"""A process on this machine, with the shape of one on a host."""

from __future__ import annotations

import os
import queue
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

_CHUNK = 256 * 1024  # bytes a read
_AHEAD = 16  # reads that may wait for the consumer


class LocalProcess:
    """See remoteops.ssh.process.Process. It runs in a session of its own, so that Ctrl-C reaches only the operator."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], sudo_user: str | None = None) -> None:
        words = list(argv)
        if sudo_user:
            words = [
                "sudo",
                "-n",
                "-H",
                "-u",
                sudo_user,
                "--",
                "env",
                *(f"{name}={value}" for name, value in env.items()),
                *words,
            ]
        try:
            self._child = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **env},
                start_new_session=True,
            )
        except OSError as error:
            # As a shell would: a command that cannot be started is a status and a line on stderr.
            status = 127 if isinstance(error, FileNotFoundError) else 126
            text = f"{words[0]}: {error.strerror}"
            self._child = subprocess.Popen(
                ["/bin/sh", "-c", 'printf "%s\\n" "$1" >&2; exit "$2"', "sh", text, str(status)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        self._queue: queue.Queue[tuple[int, bytes]] = queue.Queue(_AHEAD)
        self._open = 2
        self._closing = False
        assert self._child.stdout is not None and self._child.stderr is not None
        self._threads = [
            threading.Thread(target=self._pump, args=(index, stream), name="remoteops-local", daemon=True)
            for index, stream in enumerate((self._child.stdout, self._child.stderr))
        ]
        for thread in self._threads:
            thread.start()

    def _pump(self, index: int, stream: IO[bytes]) -> None:
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLIN)
        while not self._closing:
            # Not a blocking read: a grandchild can hold the pipe open for as long as it likes.
            if not poll.poll(200):
                continue
            data = os.read(stream.fileno(), _CHUNK)
            while not self._closing:
                try:
                    self._queue.put((index, data), timeout=0.2)
                    break
                except queue.Full:
                    continue
            if not data:
                return

    @property
    def exit_status(self) -> int | None:
        code = self._child.poll()
        return None if code is None or code < 0 else code

    @property
    def exit_signal(self) -> str | None:
        code = self._child.poll()
        return None if code is None or code >= 0 else signal.Signals(-code).name[3:]

    def send(self, data: bytes) -> bool:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(data)
            self._child.stdin.flush()
        except (OSError, ValueError):
            return False
        return True

    def send_ready(self) -> bool:
        return self._child.poll() is None

    def finish_input(self) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.close()
        except OSError:
            pass  # it ended without reading

    def read(self, timeout: float | None = None) -> tuple[bytes, bytes] | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        ended_at: float | None = None
        while self._open:
            left = 0.2 if deadline is None else min(0.2, max(0.0, deadline - time.monotonic()))
            try:
                index, data = self._queue.get(timeout=left) if left else self._queue.get_nowait()
            except queue.Empty:
                if deadline is not None and time.monotonic() >= deadline:
                    return b"", b""
                if self._child.poll() is not None:
                    ended_at = ended_at or time.monotonic()
                    if time.monotonic() - ended_at > 2:
                        return None  # a child of it holds the streams open
                continue
            if not data:
                self._open -= 1
                continue
            return (data, b"") if index == 0 else (b"", data)
        self._child.wait()
        return None

    def close(self) -> None:
        """Close its streams; it has a second to notice before it is terminated."""
        self._closing = True
        self.finish_input()
        try:
            self._child.wait(1.0)
        except subprocess.TimeoutExpired:
            self._child.terminate()
            try:
                self._child.wait(2.0)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
        for thread in self._threads:
            thread.join()
        for stream in (self._child.stdout, self._child.stderr):
            if stream is not None:
                stream.close()
