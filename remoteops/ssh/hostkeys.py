"""Whether a server's key is accepted: the one decision that every connection of ours passes (see LinkTransport)."""

from __future__ import annotations

import base64
import binascii
import contextlib
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, SSHCertificate, SSHCertificateType
from cryptography.hazmat.primitives.serialization.ssh import load_ssh_public_identity

from remoteops.errors import HostKeyChanged, HostKeyRevoked, HostKeyUnknown, LinkError
from remoteops.ssh.known_hosts import (
    Entry,
    KnownHosts,
    accept,
    blob_type,
    fingerprint,
    glob_matches,
    host_name,
    line_for,
)

ALGORITHMS = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "rsa-sha2-512",
    "rsa-sha2-256",
)
CERTIFICATE = "-cert-v01@openssh.com"
_OF_TYPE = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256")}
Policy = Literal["strict", "accept-new"]


@dataclass
class HostKeyPolicy:
    """What one server has to prove.

    ``address`` and ``port`` as dialled, ``alias`` (HostKeyAlias) instead of both where set; ``files`` are read, the
    first is written to under ``accept-new``; ``notices`` collects what a user should know after a success.
    """

    host: str
    address: str
    port: int
    files: Sequence[str]
    policy: Policy = "strict"
    alias: str | None = None
    hash_names: bool = False
    algorithms: Sequence[str] = ALGORITHMS
    revoked_files: Sequence[str] = ()
    notices: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.policy not in ("strict", "accept-new"):
            raise ValueError(f"no such host key policy: {self.policy}")
        self.known = KnownHosts(self.files)
        self.name = self.alias.lower() if self.alias else host_name(self.address, self.port)
        self._bare = (self.alias or self.address).lower()

    def offer(self) -> list[str]:
        """Algorithms to ask the server for: certificates where an authority is known, then the key types listed."""
        listed = [algorithm for kind in self._listed_types() for algorithm in _OF_TYPE.get(kind, (kind,))]
        plain = [item for item in listed if item in self.algorithms] + [
            item for item in self.algorithms if item not in listed
        ]
        certificates = [item + CERTIFICATE for item in self.algorithms] if self._authorities() else []
        return certificates + plain

    def check(self, key_type: str, blob: bytes) -> None:
        """Raises HostKeyUnknown, HostKeyChanged or HostKeyRevoked unless the key is acceptable."""
        why = ""
        if key_type.endswith(CERTIFICATE):
            why, blob = self._check_certificate(blob)
            if not why:
                return
        self._refuse_revoked(blob)
        verdict = self.known.judge(self.name, blob)
        if verdict.state == "unknown" and self.name != self._bare:
            # As ssh does: a key listed for the host without its port is good for any of its ports.
            without_port = self.known.judge(self._bare, blob)
            if without_port.state in ("known", "revoked"):
                verdict = without_port
        if verdict.state == "revoked" and verdict.entry is not None:
            self._revoked(blob, verdict.entry)
        if verdict.state == "changed" and verdict.entry is not None:
            self._changed(blob, verdict.entry)
        if verdict.state == "unknown":
            self._unknown(blob, why)

    def _listed_types(self) -> list[str]:
        return self.known.key_types(self.name) or self.known.key_types(self._bare)

    def _authorities(self) -> list[Entry]:
        return self.known.about({self.name, self._bare}, "@cert-authority")

    def _refuse_revoked(self, blob: bytes) -> None:
        for name in (self.name, self._bare):
            entry = self.known.revoked(name, blob)
            if entry is not None:
                self._revoked(blob, entry)
        for file in self.revoked_files:
            try:
                text = Path(file).expanduser().read_bytes()
            except OSError as error:
                # As ssh does: a list of revoked keys that cannot be read lets nobody in.
                raise HostKeyRevoked(
                    f"the list of revoked host keys cannot be read: {file}: {error.strerror}",
                    host=self.host,
                    hint="repair the file, or RevokedHostKeys in ssh_config",
                ) from None
            if text.startswith(b"SSHKRL\n"):
                raise LinkError(
                    f"{file} is a binary revocation list, which remoteops cannot read",
                    host=self.host,
                    tried="RevokedHostKeys of ssh_config",
                    hint="list the revoked public keys in it as text",
                )
            if base64.b64encode(blob) in text.split():
                raise HostKeyRevoked(
                    f"the host's key {fingerprint(blob)} is revoked in {file}",
                    host=self.host,
                    hint="do not connect; ask whoever runs the host for its new key",
                )

    def _revoked(self, blob: bytes, entry: Entry) -> None:
        raise HostKeyRevoked(
            f"the host's key {fingerprint(blob)} is marked @revoked at {entry.where}",
            host=self.host,
            tried=f"connect to {self.name}",
            hint="do not connect; ask whoever runs the host for its new key",
            file=entry.file,
            line=entry.line,
            fingerprint=fingerprint(blob),
        )

    def _changed(self, blob: bytes, entry: Entry) -> None:
        raise HostKeyChanged(
            f"the host's {blob_type(blob)} key is not the one known: it is {fingerprint(blob)}, "
            f"{entry.where} has {fingerprint(entry.blob)}",
            host=self.host,
            tried=f"connect to {self.name}",
            hint=f"somebody may be listening in. If the host was reinstalled, compare the fingerprint with its own "
            f"(ssh-keygen -lf on its console), then delete line {entry.line} of {entry.file} and connect again",
            file=entry.file,
            line=entry.line,
            fingerprint=fingerprint(blob),
            known=fingerprint(entry.blob),
        )

    def _unknown(self, blob: bytes, why: str) -> None:
        line = line_for(self.name, blob, hashed=self.hash_names)
        file = Path(self.files[0]).expanduser() if self.files else None
        others = self._listed_types()
        if self.policy == "accept-new" and file is not None and not others and not why:
            try:
                accept(file, line)
            except OSError as error:
                raise HostKeyUnknown(
                    f"the host's key could not be recorded in {file}: {error.strerror or error}",
                    host=self.host,
                    tried="host_key: accept-new",
                    hint="make that file writable",
                ) from None
            self.notices.append(
                f"first contact with {self.name}: accepted its {blob_type(blob)} key {fingerprint(blob)}, "
                f"recorded in {file}"
            )
            return
        message = f"the host's key is not known: {self.name} has {blob_type(blob)} {fingerprint(blob)}"
        if others:
            message += f"; known for it: {', '.join(others)}, which it does not offer"
        if why:
            message += f"; its certificate is no good: {why}"
        where = str(file) if file is not None else "~/.ssh/known_hosts"
        # The very key that was seen, not one fetched again later; works behind jump hosts too.
        command = f"printf '%s\\n' {shlex.quote(line)} >> {shlex.quote(where)}"
        raise HostKeyUnknown(
            message,
            host=self.host,
            tried="looked in " + (", ".join(str(item) for item in self.known.files) or "no file"),
            hint=f"check {fingerprint(blob)} against its own (ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub there, "
            f"or ssh-keyscan -p {self.port} {self.address} | ssh-keygen -lf - from a network you trust), then run:\n"
            f"      {command}",
            command=command,
            line=line,
            file=where,
            fingerprint=fingerprint(blob),
            complaints=self.known.complaints[:20],
        )

    def _check_certificate(self, blob: bytes) -> tuple[str, bytes]:
        """Why the certificate is not accepted ("" when it is), and the plain key it certifies."""
        try:
            identity = load_ssh_public_identity(blob_type(blob).encode() + b" " + base64.b64encode(blob))
        except (ValueError, UnsupportedAlgorithm) as error:
            raise HostKeyUnknown(f"the host's certificate cannot be read: {error}", host=self.host) from None
        if not isinstance(identity, SSHCertificate):
            return "it is no certificate", blob
        plain = _wire(identity.public_key())
        authority = _wire(identity.signature_key())
        self._refuse_revoked(plain)
        self._refuse_revoked(authority)
        now = time.time()
        if not any(entry.blob == authority for entry in self._authorities()):
            return f"signed by {fingerprint(authority)}, which no @cert-authority line names", plain
        try:
            identity.verify_cert_signature()
        except InvalidSignature:
            return "its signature is wrong", plain
        if identity.type is not SSHCertificateType.HOST:
            return "it is a user's certificate", plain
        if identity.critical_options:
            return "it has critical options", plain
        if not identity.valid_after <= now < identity.valid_before:
            return "it is not valid now", plain
        principals = [name.decode("utf-8", "replace").lower() for name in identity.valid_principals]
        if principals and not any(glob_matches(name, self._bare) for name in principals):
            return f"it is for {', '.join(principals)}, not for {self._bare}", plain
        return "", plain


def _wire(key: object) -> bytes:
    """A public key in ssh's wire format."""
    text: bytes = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)  # type: ignore[attr-defined]
    with contextlib.suppress(binascii.Error, IndexError):
        return base64.b64decode(text.split()[1])
    return b""
