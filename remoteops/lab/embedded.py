"""The embedded host's SSH server where no OpenSSH server is installed: asyncssh, in a process of its own.

Run as ``python -m remoteops.lab.embedded FOLDER PORT HOME``; it detaches itself once it listens. FOLDER holds host_key
and authorized_keys and gets pid and log. What runs behind it behaves as behind OpenSSH: a login without a terminal,
HOME as working folder, output delivered to its end before the exit status, signals by name, SFTP and forwarding; a
command outlives a client that went away, until it writes to the closed pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import asyncssh

_CHUNK = 65536


class Server(asyncssh.SSHServer):  # type: ignore[misc]
    """Public keys only; forwarding allowed, as on a plain host."""

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> bool:
        return True

    def server_requested(self, listen_host: str, listen_port: int) -> bool:
        return True


class Sessions:
    """Starts the commands of all connections in one home."""

    def __init__(self, home: str) -> None:
        self.home = home
        user = os.environ.get("USER") or os.environ.get("LOGNAME") or "lab"
        self.environment = {
            "HOME": home,
            "USER": user,
            "LOGNAME": user,
            "SHELL": "/bin/sh",
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        }

    async def __call__(self, process: Any) -> None:
        argv = ["/bin/sh", "-c", process.command] if process.command else ["/bin/sh"]
        sent = {key: value for key, value in process.env.items() if key == "LANG" or key.startswith(("LC_", "LAB_"))}
        loop = asyncio.get_running_loop()
        pipes, protocol = await loop.subprocess_exec(
            lambda: asyncio.subprocess.SubprocessStreamProtocol(limit=_CHUNK, loop=loop),
            *argv,
            cwd=self.home,
            env={**self.environment, **sent},
            start_new_session=True,
        )
        child = asyncio.subprocess.Process(pipes, protocol, loop)
        feed = asyncio.create_task(_feed(process, child))
        try:
            await asyncio.gather(_drain(child.stdout, process.stdout), _drain(child.stderr, process.stderr))
            status = await child.wait()
        except (asyncssh.Error, ConnectionError, BrokenPipeError):
            # The client is gone. The command keeps running, as under OpenSSH, with its pipes closed at our end.
            for descriptor in (0, 1, 2):
                if (pipe := pipes.get_pipe_transport(descriptor)) is not None:
                    pipe.close()
            return
        finally:
            feed.cancel()
        if status < 0:
            with contextlib.suppress(ValueError):
                process.exit_with_signal(signal.Signals(-status).name.removeprefix("SIG"))
                return
        process.exit(status if status >= 0 else 255)


async def _feed(process: Any, child: Any) -> None:
    """The client's input to the command; its end is the command's end of file."""
    try:
        while data := await process.stdin.read(_CHUNK):
            child.stdin.write(data)
            await child.stdin.drain()
    except (asyncssh.Error, ConnectionError, BrokenPipeError):
        pass
    finally:
        child.stdin.close()


async def _drain(source: Any, sink: Any) -> None:
    """One of the command's outputs to the client, to its very end, as fast as the client takes it."""
    while data := await source.read(_CHUNK):
        sink.write(data)
        await sink.drain()


async def serve(folder: Path, port: int, home: str) -> Any:
    """Listen on loopback. Raises OSError when the port is taken."""
    return await asyncssh.listen(
        "127.0.0.1",
        port,
        server_factory=Server,
        server_host_keys=[str(folder / "host_key")],
        authorized_client_keys=str(folder / "authorized_keys"),
        process_factory=Sessions(home),
        encoding=None,
        sftp_factory=True,
        allow_scp=True,
        keepalive_interval=30,
        keepalive_count_max=10,
        line_editor=False,
    )


def main(argv: list[str]) -> int:
    """Exit status 0 when the detached server listens, 1 when it cannot (the reason on stderr)."""
    folder, port, home = Path(argv[0]), int(argv[1]), argv[2]
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        with os.fdopen(reader, "rb") as stream:
            answer = stream.read()
        if answer != b"ready":
            sys.stderr.write(answer.decode(errors="replace") or "the server did not start")
        return 0 if answer == b"ready" else 1
    os.close(reader)
    os.setsid()
    if os.fork():
        os._exit(0)
    loop = asyncio.new_event_loop()
    try:
        server = loop.run_until_complete(serve(folder, port, home))
    except (OSError, asyncssh.Error, ValueError) as error:
        os.write(writer, str(error).encode())
        os._exit(1)
    os.chdir(home)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    (folder / "pid").write_text(f"{os.getpid()}\n", encoding="ascii")
    os.write(writer, b"ready")
    os.close(writer)
    loop.add_signal_handler(signal.SIGTERM, loop.stop)
    loop.run_forever()
    server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
