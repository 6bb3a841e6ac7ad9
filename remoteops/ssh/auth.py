"""Authentication: the agent (bounded), key files and certificates, passwords only where the inventory allows them."""

from __future__ import annotations

import contextlib
import copy
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import paramiko
from paramiko.agent import AgentKey, AgentSSH

from remoteops.errors import AuthFailed, LinkTimeout
from remoteops.ssh.keys import SECRETS, Secrets, is_encrypted, public_blob
from remoteops.ssh.wire import LinkTransport

AGENT_TIMEOUT = 5.0  # seconds for listing the agent's keys; a stale forwarded socket accepts and never answers
DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")


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


class BoundedAgent(AgentSSH):  # type: ignore[misc]
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
            if _try(transport, partial(transport.auth_publickey, identity.user, key), name, attempts, host, deadline):
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
    return bool(transport.is_authenticated())


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
            yield f"key {file} (held by the agent)", partial(_certified, held[blob], file, identity)
        elif is_encrypted(file):
            later.append((f"key {file}", partial(_from_file, secrets, file, identity)))
        else:
            yield f"key {file}", partial(_from_file, secrets, file, identity)
    if not identity.only_files:
        for key in agent_keys:
            if key.asbytes() not in used:
                yield f"agent key {getattr(key, 'comment', '') or key.get_name()}", partial(_itself, key)
    if identity.defaults and not identity.files:
        for name in DEFAULT_KEYS:
            file = os.path.expanduser(name)
            if os.path.exists(file) and (public_blob(file) not in held):
                later.append((f"key {file}", partial(_from_file, secrets, file, identity)))
    later.sort(key=lambda item: is_encrypted(item[0][4:]))
    yield from later


def _itself(key: paramiko.PKey) -> paramiko.PKey | str:
    return key


def _from_file(secrets: Secrets, file: str, identity: Identity) -> paramiko.PKey | str:
    return _certified(secrets.key(file, ask=identity.ask), file, identity)


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
