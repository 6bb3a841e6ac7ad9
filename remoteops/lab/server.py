"""The embedded host's SSH server: private keys, a free loopback port, a HOME of its own.

OpenSSH where there is one, as root and as a plain user; otherwise (or where OpenSSH will not let this account in: a
locked password, no /run/sshd) the asyncssh server of embedded.py. REMOTEOPS_LAB_SSHD=openssh|asyncssh forces one.
Nothing of the system's sshd and nothing in ~/.ssh is read or written.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from remoteops.errors import LabError, LinkError
from remoteops.lab.place import Place, Report

if TYPE_CHECKING:
    from remoteops.inventory import Host

_CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey "{server}/host_key"
PidFile "{server}/pid"
AuthorizedKeysFile "{server}/authorized_keys"
AuthenticationMethods publickey
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
StrictModes no
PrintMotd no
AcceptEnv LANG LC_* LAB_*
SetEnv "HOME={home}"
ForceCommand "{server}/session"
Subsystem sftp internal-sftp
MaxStartups 200:30:400
MaxSessions 100
LogLevel INFO
"""

# sshd takes HOME and the working folder from the account; the lab's sessions live in the lab's home instead.
_SESSION = """\
#!/bin/sh
HOME='{home}'; export HOME
cd "$HOME" || exit 1
case "$SSH_ORIGINAL_COMMAND" in
  '') exec "${{SHELL:-/bin/sh}}" ;;
  internal-sftp*) for sftp in /usr/lib/openssh/sftp-server /usr/libexec/openssh/sftp-server /usr/libexec/sftp-server \\
      /usr/lib/ssh/sftp-server; do [ -x "$sftp" ] && exec "$sftp"; done; echo "no sftp-server" >&2; exit 1 ;;
  *) exec "${{SHELL:-/bin/sh}}" -c "$SSH_ORIGINAL_COMMAND" ;;
esac
"""


def ensure(place: Place, report: Report) -> None:
    """Have the server listening and record its port. Raises LabError with the server's own log."""
    if running(place):
        return
    make_keys(place)
    port = _port(place.state().get("port"))
    problems: list[str] = []
    for kind in _kinds(report):
        problem = _start_openssh(place, port) if kind == "openssh" else _start_embedded(place, port)
        if not problem:
            _write_client_files(place, port)
            problem = _self_test(place, port)
        if not problem:
            place.remember(server=kind, port=port, pid=_pid(place), user=getpass.getuser())
            report(f"{kind} server on 127.0.0.1 port {port}")
            return
        stop(place)
        problems.append(f"{kind}: {problem}")
    raise LabError(
        "the lab's SSH server does not start",
        host="lab",
        tried="; ".join(problems),
        hint=f"the server's log is {place.server}/log; `fab lab.down --purge` starts anew",
    )


def running(place: Place) -> bool:
    """True when our own server process is alive; whether it answers is for the link to find out."""
    return bool(place.state().get("port")) and _alive(place)


def stop(place: Place) -> bool:
    """End the listening server; sessions that are open end with their clients. True when there was one."""
    if not _alive(place):
        return False
    pid = _pid(place)
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    for _ in range(100):
        if not _alive(place):
            break
        time.sleep(0.02)
    else:
        os.kill(pid, signal.SIGKILL)
    (place.server / "pid").unlink(missing_ok=True)
    return True


def _kinds(report: Report) -> list[str]:
    forced = os.environ.get("REMOTEOPS_LAB_SSHD")
    if forced in ("openssh", "asyncssh"):
        return [forced]
    if forced:
        raise LabError(f"REMOTEOPS_LAB_SSHD is '{forced}'", host="lab", hint="it can be openssh or asyncssh")
    if sshd_path():
        return ["openssh", "asyncssh"]
    report("no OpenSSH server here: using the embedded one (asyncssh)")
    return ["asyncssh"]


def sshd_path() -> str | None:
    """sshd is rarely in a user's PATH, and must be started by its absolute path."""
    search = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin", "/sbin", "/usr/lib/ssh"])
    found = shutil.which("sshd", path=search)
    return str(Path(found).resolve()) if found else None


# -- keys and client files ------------------------------------------------------------------------------------------


def make_keys(place: Place) -> None:
    """Host key and user key (ed25519), made once."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    for file in (place.server / "host_key", place.user_key):
        if file.is_file() and file.with_name(file.name + ".pub").is_file():
            continue
        key = Ed25519PrivateKey.generate()
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        file.unlink(missing_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(private)
        file.with_name(file.name + ".pub").write_bytes(public + b" remoteops-lab\n")
    authorized = place.user_key.with_name(place.user_key.name + ".pub").read_bytes()
    (place.server / "authorized_keys").write_bytes(authorized)


def _write_client_files(place: Place, port: int) -> None:
    key = " ".join((place.server / "host_key.pub").read_text(encoding="ascii").split()[:2])
    place.known_hosts.write_text(f"[127.0.0.1]:{port} {key}\n", encoding="ascii")
    place.ssh_config.write_text(
        f'# ssh -F "{place.ssh_config}" lab\nHost lab lab-{place.name}\n  HostName 127.0.0.1\n  Port {port}\n'
        f'  User {getpass.getuser()}\n  IdentityFile "{place.user_key}"\n  IdentitiesOnly yes\n  IdentityAgent none\n'
        f'  UserKnownHostsFile "{place.known_hosts}"\n  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking yes\n',
        encoding="utf-8",
    )


# -- starting -------------------------------------------------------------------------------------------------------


def _start_openssh(place: Place, port: int) -> str:
    """'' when it listens, else what it said."""
    sshd = sshd_path()
    if sshd is None:
        return "no sshd is installed"
    if '"' in str(place.root) or "'" in str(place.root):
        return "sshd cannot take a path with quotes"
    if os.geteuid() == 0:
        try:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        except OSError as error:
            return f"/run/sshd: {error.strerror}"
    config, session, log = (place.server / name for name in ("sshd_config", "session", "log"))
    config.write_text(_CONFIG.format(port=port, server=place.server, home=place.home), encoding="utf-8")
    session.write_text(_SESSION.format(home=place.home), encoding="utf-8")
    session.chmod(0o700)
    checked = subprocess.run([sshd, "-t", "-f", str(config)], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if checked.returncode:
        return checked.stderr.strip().splitlines()[-1] if checked.stderr.strip() else "its configuration is refused"
    # Without -D sshd detaches by itself; a clean environment keeps the operator's out of the sessions.
    started = subprocess.run(
        [sshd, "-f", str(config), "-E", str(log)],
        capture_output=True,
        text=True,
        cwd="/",
        stdin=subprocess.DEVNULL,
        env={"PATH": os.environ.get("PATH", os.defpath)},
    )
    if started.returncode:
        return started.stderr.strip() or f"exit {started.returncode}"
    return _wait(place, port)


def _start_embedded(place: Place, port: int) -> str:
    source = str(Path(__file__).resolve().parents[2])
    started = subprocess.run(
        [sys.executable, "-m", "remoteops.lab.embedded", str(place.server), str(port), str(place.home)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd="/",
        env={"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": source, "USER": getpass.getuser()},
    )
    return _wait(place, port) if started.returncode == 0 else (started.stderr.strip() or f"exit {started.returncode}")


def _wait(place: Place, port: int) -> str:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if _pid(place) is not None and _banner(port):
            return ""
        time.sleep(0.01)
    log = place.server / "log"
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:] if log.is_file() else []
    return "no answer in 10 s; " + " / ".join(said)


def as_host(place: Place, name: str = "lab", port: int | None = None) -> Host:
    """The embedded host as an ordinary SSH host: everything the link needs, nothing from the user's ssh_config."""
    from remoteops.inventory import Host

    return Host(
        name=name,
        address="127.0.0.1",
        port=port or int(place.state()["port"]),
        user=getpass.getuser(),
        identity_files=(str(place.user_key),),
        known_hosts=(str(place.known_hosts),),
        ssh_config=str(place.ssh_config),
    )


def _self_test(place: Place, port: int) -> str:
    """'' when a login and a command work: an account may be locked, or its shell refuse logins."""
    from remoteops.transport import connect

    try:
        with connect(as_host(place, port=port)) as link:
            where = link.exec(["pwd"], timeout=20).stdout.decode().strip()
    except LinkError as error:
        return f"{error.message} ({error.tried})"
    reached = bool(where) and Path(where).resolve() == place.home.resolve()
    return "" if reached else f"a session starts in {where or 'nowhere'}"


def _port(preferred: object) -> int:
    """A free loopback port; the one used before where it is still free, so that links find the host again."""
    # A server that was killed a moment ago may still be giving its port back.
    for port in ([preferred] * 10 if isinstance(preferred, int) else []) + [0]:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                time.sleep(0.05)
                continue
            return int(probe.getsockname()[1])
    raise LabError("there is no free port on 127.0.0.1", host="lab", hint="close some listening programs")


def _banner(port: int) -> bytes:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
            connection.settimeout(2)
            return connection.recv(64)
    except OSError:
        return b""


def _pid(place: Place) -> int | None:
    try:
        return int((place.server / "pid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _alive(place: Place) -> bool:
    """The recorded process runs and is ours: its command line names this lab's folder."""
    pid = _pid(place)
    if pid is None:
        return False
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        answer = subprocess.run(["ps", "-o", "command=", "-p", str(pid)], capture_output=True)
        command = answer.stdout
    return str(place.server).encode() in command
