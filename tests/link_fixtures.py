"""What the tests of the link share: one sshd a session, a relay that stalls or cuts, a check for what is left open."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sshd


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sshd.Sshd]:
    """A running sshd that tests share; they must not change it."""
    if sshd.SSHD is None:
        pytest.skip("no sshd on this machine")
    with sshd.running(tmp_path_factory.mktemp("sshd")) as running:
        yield running


def sockets() -> set[str]:
    """Sockets that this process holds, as inode names."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found.add(target)
    return found


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails the test when threads or sockets of ours outlive it."""
    threads, held = set(threading.enumerate()), sockets()
    yield
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        more = [item.name for item in threading.enumerate() if item not in threads and item.is_alive()]
        if not more and not sockets() - held:
            return
        time.sleep(0.05)
    pytest.fail(f"left over: threads {more}, sockets {sockets() - held}")


class Relay:
    """A TCP relay to a server. ``stall`` stops passing bytes (the connection stays), ``cut`` closes all.

    ``stall_after``: stops by itself after so many bytes from the server. ``cut_after_sent``: cuts after so many bytes
    to the server.
    """

    def __init__(
        self,
        port: int,
        *,
        address: str = "127.0.0.1",
        stall_after: int | None = None,
        cut_after_sent: int | None = None,
    ) -> None:
        self._target = (address, port)
        self._stall_after = stall_after
        self._cut_after_sent = cut_after_sent
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self._stalled = threading.Event()
        self._closing = threading.Event()
        self.connections = 0
        self.to_server = 0
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []

    def _accept(self) -> None:
        while not self._closing.is_set():
            ready, _, _ = select.select([self._listener], [], [], 0.05)
            if not ready:
                continue
            client, _ = self._listener.accept()
            self.connections += 1
            with contextlib.suppress(OSError):
                upstream = socket.create_connection(self._target)
                self._pairs.append((client, upstream))
                thread = threading.Thread(target=self._pump, args=(client, upstream), daemon=True)
                thread.start()
                self._threads.append(thread)

    def _pump(self, client: socket.socket, upstream: socket.socket) -> None:
        from_server = 0
        try:
            while not self._closing.is_set():
                if self._stalled.is_set():
                    time.sleep(0.02)
                    continue
                ready, _, _ = select.select([client, upstream], [], [], 0.05)
                for source in ready:
                    if self._stalled.is_set():
                        break
                    data = source.recv(65536)
                    if not data:
                        return
                    if source is upstream:
                        from_server += len(data)
                    else:
                        self.to_server += len(data)
                    (client if source is upstream else upstream).sendall(data)
                    if self._stall_after is not None and from_server >= self._stall_after:
                        self._stalled.set()
                    if self._cut_after_sent is not None and self.to_server >= self._cut_after_sent:
                        self._cut_after_sent = None
                        return
        except OSError:
            pass
        finally:
            client.close()
            upstream.close()

    def stall(self) -> None:
        self._stalled.set()

    def cut(self) -> None:
        for client, upstream in self._pairs:
            for sock in (client, upstream):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closing.set()
        self.cut()
        for thread in self._threads:
            thread.join(2)
        self._listener.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def relay_to(server: sshd.Sshd, **options: int | None) -> Iterator[tuple[Relay, dict[str, object]]]:
    """A relay before a server, and the Host fields that go through it."""
    with Relay(server.port, address=server.address, **options) as relay:  # type: ignore[arg-type]
        kind, key = (server.folder / "host_key.pub").read_text().split()[:2]
        known = server.folder / f"known_hosts.{relay.port}"
        known.write_text(f"[127.0.0.1]:{relay.port} {kind} {key}\n")
        yield relay, {"address": "127.0.0.1", "port": relay.port, "known_hosts": (str(known),)}


def write_config(folder: Path, text: str) -> str:
    """An ssh_config in ``folder``; gives its path."""
    path = folder / "ssh_config"
    path.write_text(text)
    return str(path)
