"""A real sshd on a free loopback port, private to a test: its own keys, known_hosts and folder.

Works as root (which needs /run/sshd) and as a plain user. Nothing of the user's ~/.ssh or of the system's sshd is read
or written.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SSHD = shutil.which("sshd") or next((p for p in ("/usr/sbin/sshd", "/usr/local/sbin/sshd") if os.path.exists(p)), None)
KEYGEN = shutil.which("ssh-keygen")


def keygen(path: Path, kind: str = "ed25519", passphrase: str = "", *extra: str) -> Path:
    """A new key pair at ``path`` and ``path``.pub."""
    subprocess.run(
        [KEYGEN or "ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", path.name, "-f", str(path), *extra],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return path


def free_port(address: str = "127.0.0.1") -> int:
    with socket.socket() as sock:
        sock.bind((address, 0))
        return int(sock.getsockname()[1])


@dataclass
class Sshd:
    """A running server. ``host()`` is an inventory Host that reaches it and trusts it."""

    folder: Path
    port: int
    address: str
    process: subprocess.Popen[bytes]
    user: str
    log: Path
    config: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def host_key(self) -> Path:
        return self.folder / "host_key"

    @property
    def user_key(self) -> Path:
        return self.folder / "user_key"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def host(self, name: str = "test", **changes: Any) -> Any:
        """A Host; keyword arguments replace its fields (``timeouts`` may be a dict)."""
        from remoteops.inventory import Host

        fields: dict[str, Any] = {
            "name": name,
            "connect": "ssh",
            "address": self.address,
            "port": self.port,
            "user": self.user,
            "identity_files": (str(self.user_key),),
            "known_hosts": (str(self.known_hosts),),
            "ssh_config": os.devnull,
            "cache_dir": str(self.home / ".cache/remoteops"),
            "state_dir": str(self.home / ".local/state/remoteops"),
        }
        return Host(**{**fields, **changes})

    def children(self) -> list[int]:
        """Pids of the processes that serve connections now."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError, IndexError, ValueError):
                    if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == self.process.pid:
                        found.append(int(entry.name))
        return found

    def signal_sessions(self, number: int) -> None:
        """Send a signal to everything sshd forked, grandchildren too (privilege separation)."""
        todo = self.children()
        while todo:
            pid = todo.pop()
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit():
                    with contextlib.suppress(OSError, IndexError, ValueError):
                        stat = (entry / "stat").read_text()
                        if int(stat.rsplit(")", 1)[1].split()[1]) == pid and "(sshd" in stat:
                            todo.append(int(entry.name))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        self.signal_sessions(signal.SIGCONT)
        self.signal_sessions(signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")


def start(
    folder: Path,
    *,
    options: Sequence[str] = (),
    address: str = "127.0.0.1",
    port: int | None = None,
    user: str | None = None,
    host_key: Path | None = None,
    known: bool = True,
    environment: dict[str, str] | None = None,
) -> Sshd:
    """Start a server in ``folder``. ``options`` are sshd_config lines; they win over the defaults here."""
    if SSHD is None or KEYGEN is None:
        raise RuntimeError("no sshd or ssh-keygen on this machine")
    folder.mkdir(parents=True, exist_ok=True)
    os.chmod(folder, 0o755)
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    own_key = folder / "host_key"
    if host_key is not None:
        shutil.copy(host_key, own_key)
        shutil.copy(f"{host_key}.pub", f"{own_key}.pub")
    elif not own_key.exists():
        keygen(own_key)
    if not (folder / "user_key").exists():
        keygen(folder / "user_key")
    authorized = folder / "authorized_keys"
    if not authorized.exists():
        shutil.copy(folder / "user_key.pub", authorized)
    (folder / "home").mkdir(exist_ok=True)
    log = folder / "sshd.log"
    for attempt in range(5):
        chosen = port or free_port(address)
        config = folder / "sshd_config"
        # sshd takes the first value of an option: the test's own come first.
        setenv = " ".join(
            f'"{name}={value}"' for name, value in {"HOME": str(folder / "home"), **(environment or {})}.items()
        )
        config.write_text(
            "\n".join(
                [
                    *options,
                    f"Port {chosen}",
                    f"ListenAddress {address}",
                    f"HostKey {own_key}",
                    f"PidFile {folder / 'sshd.pid'}",
                    f"AuthorizedKeysFile {authorized}",
                    "PasswordAuthentication no",
                    "KbdInteractiveAuthentication no",
                    "UsePAM no",
                    "StrictModes no",
                    "Subsystem sftp internal-sftp",
                    "MaxStartups 200:30:400",
                    "MaxSessions 100",
                    "PermitRootLogin yes",
                    "LogLevel VERBOSE",
                    "PrintMotd no",
                    f"SetEnv {setenv}",
                    "AcceptEnv LAB_*",
                    "",
                ]
            )
        )
        with log.open("ab") as stream:
            process = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        if _listens(process, address, chosen):
            break
        process.kill()
        process.wait()
        if attempt == 4:
            raise RuntimeError(f"sshd does not start: {log.read_text()[-2000:]}")
    server = Sshd(folder, chosen, address, process, user or getpass.getuser(), log, config)
    if known:
        kind, key = (folder / "host_key.pub").read_text().split()[:2]
        server.known_hosts.write_text(f"[{address}]:{chosen} {kind} {key}\n")
    return server


def _listens(process: subprocess.Popen[bytes], address: str, port: int) -> bool:
    for _ in range(200):
        if process.poll() is not None:
            return False
        with contextlib.suppress(OSError), socket.create_connection((address, port), 1):
            return True
        time.sleep(0.02)
    return False


@contextlib.contextmanager
def running(folder: Path, **arguments: Any) -> Iterator[Sshd]:
    """``start`` as a context manager."""
    server = start(folder, **arguments)
    try:
        yield server
    finally:
        server.stop()
