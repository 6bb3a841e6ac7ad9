"""Authentication: the agent (bounded), key files and certificates, and passwords only where the inventory allows them."""

from __future__ import annotations

import base64
import binascii
import contextlib
import copy
import getpass
import io
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paramiko
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from paramiko.agent import AgentKey, AgentSSH

from remoteops.errors import AuthFailed, LinkTimeout
from remoteops.ssh.wire import LinkTransport

AGENT_TIMEOUT = 5.0  # seconds for listing the agent's keys; a stale forwarded socket accepts and never answers
DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
Ask = Callable[[str], "str | None"]


@dataclass(frozen=True)
class Identity:
    """How to prove who we are to one server."""

    user: str
    files: tuple[str, ...] = ()  # key files named by the inventory or ssh_config, in order
    certificates: tuple[str, ...] = ()
    agent: str | None = None  # socket path; None: do not use an agent
    only_files: bool = False  # IdentitiesOnly
    defaults: bool = True  # also try ~/.ssh/id_*
    passwords: bool = False  # ask for a password, and answer keyboard-interactive
    ask: bool = True  # may the user be asked for a passphrase (BatchMode no)


@dataclass
class Attempts:
    """What was tried, in words; what the server says it allows."""

    tried: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)


class Secrets:
    """Passphrases and passwords of this process: each is asked for once, whoever needs it, even from fifty threads."""

    def __init__(self, ask: Ask | None = None) -> None:
        self._ask = ask or _ask_terminal
        self._lock = threading.Lock()
        self._answers: dict[str, str | None] = {}
        self._keys: dict[str, paramiko.PKey | str] = {}

    def answer(self, question: str) -> str | None:
        """What the user typed; None when nobody could be asked."""
        with self._lock:
            if question not in self._answers:
                self._answers[question] = self._ask(question)
            return self._answers[question]

    def key(self, file: str, *, ask: bool = True) -> paramiko.PKey | str:
        """The private key in a file, or in words why it cannot be had. Decrypted once a process."""
        with self._lock:
            known = self._keys.get(file)
        if known is None or isinstance(known, str):
            known = self._load(file, ask)
            with self._lock:
                self._keys[file] = known
        return known

    def _load(self, file: str, ask: bool) -> paramiko.PKey | str:
        path = Path(file)
        try:
            mode = path.stat().st_mode
            if os.name == "posix" and stat.S_IMODE(mode) & 0o077 and path.stat().st_uid == os.getuid():
                return f"others can read it (mode {stat.S_IMODE(mode):o}); run: chmod 600 {file}"
            return _read_key(path, None)
        except OSError as error:
            return (error.strerror or str(error)).lower()
        except _Encrypted:
            pass
        except Exception as error:  # noqa: BLE001 - paramiko and cryptography raise many kinds for a bad file
            return f"not a private key that can be read ({str(error)[:120] or type(error).__name__})"
        if not ask:
            return f"it has a passphrase and BatchMode forbids to ask; run: ssh-add {file}"
        passphrase = self.answer(f"Passphrase for {file}: ")
        if not passphrase:
            return f"it has a passphrase and nobody could be asked; run: ssh-add {file}"
        try:
            return _read_key(path, passphrase)
        except Exception:  # noqa: BLE001 - a wrong passphrase shows as several kinds
            return "wrong passphrase"


def _ask_terminal(question: str) -> str | None:
    if not sys.stdin or not sys.stdin.isatty():
        return None
    with contextlib.suppress(EOFError):
        return getpass.getpass(question)
    return None


class _Encrypted(Exception):
    pass


def _read_key(path: Path, passphrase: str | None) -> paramiko.PKey:
    """A private key in any format that cryptography reads (OpenSSH, PEM, PKCS8). Raises _Encrypted, ValueError, OSError."""
    data = path.read_bytes()
    if passphrase is None and is_encrypted(str(path)):
        raise _Encrypted
    password = passphrase.encode() if passphrase else None
    if b"BEGIN OPENSSH PRIVATE KEY" in data:
        loaded: Any = serialization.load_ssh_private_key(data, password)
    else:
        loaded = serialization.load_pem_private_key(data, password)
    kinds = {
        ed25519.Ed25519PrivateKey: paramiko.Ed25519Key,
        ec.EllipticCurvePrivateKey: paramiko.ECDSAKey,
        rsa.RSAPrivateKey: paramiko.RSAKey,
    }
    wanted = next((key for kind, key in kinds.items() if isinstance(loaded, kind)), None)
    if wanted is None:
        raise ValueError(f"keys of this kind ({type(loaded).__name__}) are not supported")
    text = loaded.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    key: paramiko.PKey = wanted.from_private_key(io.StringIO(text.decode()))
    return key


SECRETS = Secrets()


class BoundedAgent(AgentSSH):
    """An SSH agent that answers within seconds or is named as stale."""

    def __init__(self, path: str, patience: float) -> None:
        super().__init__()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(AGENT_TIMEOUT)
        try:
            sock.connect(path)
            self._connect(sock)
        except BaseException:
            sock.close()
            raise
        sock.settimeout(patience)  # a signature may wait for a touch on a hardware key

    def _send_message(self, msg: Any) -> Any:
        try:
            return super()._send_message(msg)
        except TimeoutError:
            # Signing runs in paramiko's own thread, which cannot cope with an OSError of one argument.
            raise paramiko.SSHException("it accepts and does not answer") from None

    def close(self) -> None:
        self._close()


def authenticate(
    transport: LinkTransport, identity: Identity, *, host: str, timeout: float, secrets: Secrets | None = None
) -> str:
    """Log in; gives in words what did it. Raises AuthFailed (``tried``, and data ``allowed``) or LinkTimeout."""
    transport.auth_timeout = timeout
    attempts = Attempts()
    deadline = time.monotonic() + timeout
    agent: BoundedAgent | None = None
    try:
        agent, agent_keys = _agent_keys(identity, timeout, attempts)
        for name, make in _candidates(identity, agent_keys, secrets or SECRETS, attempts):
            key = make()
            if isinstance(key, str):
                attempts.tried.append(f"{name}: {key}")
                continue
            if _try(
                transport, lambda key=key: transport.auth_publickey(identity.user, key), name, attempts, host, deadline
            ):
                return name
            if attempts.allowed and "publickey" not in attempts.allowed:
                break
        if not attempts.allowed and _try(
            transport, lambda: transport.auth_none(identity.user), "", attempts, host, deadline
        ):
            return "no credentials at all"
        if identity.passwords and _with_password(transport, identity, secrets or SECRETS, attempts, host, deadline):
            return "password"
    finally:
        if agent is not None:
            agent.close()
    raise _failed(identity, attempts, host)


def _failed(identity: Identity, attempts: Attempts, host: str, message: str = "") -> AuthFailed:
    allowed = ", ".join(attempts.allowed) or "it did not say"
    hint = f"the server allows: {allowed}. "
    if "publickey" in attempts.allowed or not attempts.allowed:
        hint += "Name the right key under identity_files, or load it: ssh-add FILE"
    if not identity.passwords and {"password", "keyboard-interactive"} & set(attempts.allowed):
        hint += "; or set password_auth: true to be asked for a password"
    return AuthFailed(
        message or f"the host let '{identity.user}' not in",
        host=host,
        hint=hint,
        tried="; ".join(attempts.tried) or "nothing: there was no key to try",
        allowed=attempts.allowed,
        user=identity.user,
    )


def _try(
    transport: LinkTransport,
    call: Callable[[], Sequence[str]],
    name: str,
    attempts: Attempts,
    host: str,
    deadline: float,
) -> bool:
    """Whether this attempt logged in; a refusal is noted, an end of the connection raises."""
    transport.auth_timeout = max(0.1, deadline - time.monotonic())
    try:
        more = list(call())
    except paramiko.BadAuthenticationType as refused:
        attempts.allowed = list(refused.allowed_types)
        if name:
            attempts.tried.append(f"{name}: the server allows no such method")
        return False
    except paramiko.AuthenticationException as refused:
        if time.monotonic() >= deadline:
            raise LinkTimeout(
                "the host did not finish authentication in time",
                host=host,
                tried="; ".join([*attempts.tried, name]),
                hint="sshd may hang on PAM, LDAP or a full disk; raise timeouts.auth if it is only slow",
            ) from None
        if not transport.is_active():
            raise AuthFailed(
                "the host closed the connection during authentication",
                host=host,
                allowed=attempts.allowed,
                tried="; ".join([*attempts.tried, name]),
                hint="too many keys were offered, or the account may not log in: name one key under "
                "identity_files (or IdentitiesOnly yes in ssh_config), and look at sshd's log",
            ) from None
        attempts.tried.append(f"{name}: refused" if str(refused) == "Authentication failed." else f"{name}: {refused}")
        attempts.allowed = attempts.allowed or []
        return False
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise AuthFailed(
            f"authentication broke off: {error or type(error).__name__}",
            host=host,
            allowed=attempts.allowed,
            tried="; ".join([*attempts.tried, name]),
            hint="look at sshd's log on the host",
        ) from None
    if more:
        attempts.allowed = more
        attempts.tried.append(f"{name}: accepted, and the server wants more")
        return False
    return transport.is_authenticated()


def _agent_keys(identity: Identity, patience: float, attempts: Attempts) -> tuple[BoundedAgent | None, list[AgentKey]]:
    if identity.agent is None:
        return None, []
    try:
        agent = BoundedAgent(identity.agent, patience)
    except (OSError, paramiko.SSHException, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        attempts.tried.append(f"agent at {identity.agent}: {reason}")
        return None, []
    return agent, list(agent.get_keys())


def _candidates(
    identity: Identity, agent_keys: list[AgentKey], secrets: Secrets, attempts: Attempts
) -> Iterator[tuple[str, Callable[[], paramiko.PKey | str]]]:
    """Keys in the order that costs the fewest refusals: named files, the rest of the agent, the default files.

    A named file whose key the agent holds is taken from the agent; encrypted ones come last, so that nobody
    is asked for a passphrase that is not needed.
    """
    held = {key.asbytes(): key for key in agent_keys}
    used: set[bytes] = set()
    later: list[tuple[str, Callable[[], paramiko.PKey | str]]] = []
    for file in identity.files:
        blob = public_blob(file)
        if blob in held and blob is not None:
            used.add(blob)
            yield f"key {file} (held by the agent)", lambda key=held[blob], file=file: _certified(key, file, identity)
        elif is_encrypted(file):
            later.append(
                (f"key {file}", lambda file=file: _certified(secrets.key(file, ask=identity.ask), file, identity))
            )
        else:
            yield f"key {file}", lambda file=file: _certified(secrets.key(file, ask=identity.ask), file, identity)
    if not identity.only_files:
        for key in agent_keys:
            if key.asbytes() not in used:
                yield f"agent key {getattr(key, 'comment', '') or key.get_name()}", lambda key=key: key
    if identity.defaults and not identity.files:
        for name in DEFAULT_KEYS:
            file = os.path.expanduser(name)
            if os.path.exists(file) and (public_blob(file) not in held):
                later.append(
                    (f"key {file}", lambda file=file: _certified(secrets.key(file, ask=identity.ask), file, identity))
                )
    later.sort(key=lambda item: is_encrypted(item[0][4:]))
    yield from later


def _certified(key: paramiko.PKey | str, file: str, identity: Identity) -> paramiko.PKey | str:
    """The key with the certificate that belongs to it, where there is one (CertificateFile, or FILE-cert.pub)."""
    if isinstance(key, str):
        return key
    for certificate in (*identity.certificates, f"{file}-cert.pub"):
        if os.path.exists(certificate):
            with_certificate = copy.copy(key)  # the key itself is shared by all connections of the process
            with contextlib.suppress(Exception):
                with_certificate.load_certificate(certificate)
                return with_certificate
    return key


def public_blob(file: str) -> bytes | None:
    """The public key that belongs to a key file (FILE.pub, or FILE itself when that is a public key)."""
    for candidate in (f"{file}.pub", file):
        try:
            fields = Path(candidate).read_bytes()[:65536].split()
            if len(fields) >= 2 and not fields[0].startswith(b"-"):
                return paramiko.pkey.PublicBlob.from_string(b" ".join(fields[:2]).decode()).key_blob
        except (OSError, ValueError):
            continue
    return None


def is_encrypted(file: str) -> bool:
    """Whether a private key file wants a passphrase, told from its text alone."""
    try:
        text = Path(file).read_bytes()[:65536]
    except OSError:
        return False
    if b"BEGIN OPENSSH PRIVATE KEY" in text:
        with contextlib.suppress(binascii.Error, ValueError, IndexError):
            body = base64.b64decode(b"".join(text.split(b"-----")[2].split()))
            return not body[len(b"openssh-key-v1\0") :].startswith(b"\0\0\0\4none")
    return b"ENCRYPTED" in text


def _with_password(
    transport: LinkTransport, identity: Identity, secrets: Secrets, attempts: Attempts, host: str, deadline: float
) -> bool:
    question = f"Password for {identity.user}@{host}: "
    if "password" in attempts.allowed:
        password = secrets.answer(question)
        if password is None:
            attempts.tried.append("password: nobody could be asked (no terminal)")
            return False
        deadline = max(deadline, time.monotonic() + 20)
        if _try(
            transport,
            lambda: transport.auth_password(identity.user, password, fallback=False),
            "password",
            attempts,
            host,
            deadline,
        ):
            return True
    if "keyboard-interactive" in attempts.allowed:

        def handler(title: str, instructions: str, prompts: Sequence[tuple[str, bool]]) -> list[str]:
            return [
                secrets.answer(question if "assword" in text else f"{identity.user}@{host}: {text}") or ""
                for text, _ in prompts
            ]

        return _try(
            transport,
            lambda: transport.auth_interactive(identity.user, handler),
            "keyboard-interactive",
            attempts,
            host,
            max(deadline, time.monotonic() + 60),
        )
    return False
