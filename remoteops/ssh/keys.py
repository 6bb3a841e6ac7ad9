"""Private keys and what opens them: read in any format, decrypted once a process, asked for once."""

from __future__ import annotations

import base64
import binascii
import contextlib
import getpass
import io
import os
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paramiko
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

Ask = Callable[[str], "str | None"]


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
    """A private key in any format that cryptography reads (OpenSSH, PEM, PKCS8). Raises ValueError, OSError."""
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


def public_blob(file: str) -> bytes | None:
    """The public key that belongs to a key file (FILE.pub, or FILE itself when that is a public key)."""
    for candidate in (f"{file}.pub", file):
        try:
            fields = Path(candidate).read_bytes()[:65536].split()
            if len(fields) >= 2 and not fields[0].startswith(b"-"):
                blob: bytes = paramiko.pkey.PublicBlob.from_string(b" ".join(fields[:2]).decode()).key_blob
                return blob
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
