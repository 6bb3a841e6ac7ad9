"""known_hosts files, read as OpenSSH reads them: hashed names, wildcards, negation, [host]:port, markers."""

from __future__ import annotations

import base64
import binascii
import fcntl
import hashlib
import hmac
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MAX_LINE = 64 * 1024  # bytes; a longer line is no known_hosts line
Marker = Literal["", "@cert-authority", "@revoked"]


@dataclass(frozen=True)
class Entry:
    """One line: ``patterns`` as written, ``key_type`` and ``blob`` (the key in wire format), and where it stands."""

    marker: Marker
    patterns: str
    key_type: str
    blob: bytes
    file: str
    line: int

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"

    def matches(self, name: str) -> bool:
        """Whether the line speaks of ``name`` (a lower-case host name, or "[name]:port")."""
        if self.patterns.startswith("|"):
            return _matches_hash(self.patterns, name)
        found = False
        for pattern in self.patterns.lower().split(","):
            negated = pattern.startswith("!")
            if glob_matches(pattern[1:] if negated else pattern, name):
                if negated:
                    return False
                found = True
        return found


def glob_matches(pattern: str, text: str) -> bool:
    """ssh's patterns: ``*`` any run, ``?`` one character, nothing else is special."""
    parts = (".*" if char == "*" else "." if char == "?" else re.escape(char) for char in re.sub(r"\*+", "*", pattern))
    return re.fullmatch("".join(parts), text, re.DOTALL) is not None


def _matches_hash(hashed: str, name: str) -> bool:
    parts = hashed.split("|")
    if len(parts) != 4 or parts[1] != "1":
        return False
    try:
        salt, digest = base64.b64decode(parts[2], validate=True), base64.b64decode(parts[3], validate=True)
    except (binascii.Error, ValueError):
        return False
    return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)


def host_name(host: str, port: int) -> str:
    """The name under which a host and port are listed."""
    return host.lower() if port == 22 else f"[{host.lower()}]:{port}"


def parse(text: bytes, file: str) -> tuple[list[Entry], list[str]]:
    """The entries of a file's bytes, and a complaint ("file:line: why") for each line that is none; never raises."""
    entries: list[Entry] = []
    complaints: list[str] = []
    for number, raw in enumerate(text.split(b"\n"), 1):
        line = raw.strip(b" \t\r")
        if not line or line.startswith(b"#"):
            continue
        found = _entry(line, file, number) if len(line) <= MAX_LINE else "the line is too long"
        if isinstance(found, Entry):
            entries.append(found)
        else:
            complaints.append(f"{file}:{number}: {found}")
    return entries, complaints


def _entry(line: bytes, file: str, number: int) -> Entry | str:
    try:
        fields = re.split("[ \t]+", line.decode("utf-8"))
    except UnicodeDecodeError:
        return "no UTF-8 text"
    marker: Marker = ""
    if fields[0].startswith("@"):
        if fields[0] == "@cert-authority":
            marker = "@cert-authority"
        elif fields[0] == "@revoked":
            marker = "@revoked"
        else:
            return f"unknown marker {fields[0][:40]}"
        fields = fields[1:]
    if len(fields) < 3:
        return "host names, key type and key expected"
    try:
        blob = base64.b64decode(fields[2], validate=True)
    except (binascii.Error, ValueError):
        return "the key is no base64"
    if blob_type(blob) != fields[1]:
        return f"the key is no {fields[1][:60]} key"
    return Entry(marker, fields[0], fields[1], blob, file, number)


def blob_type(blob: bytes) -> str:
    """The type name inside a key in wire format; "" when there is none."""
    size = int.from_bytes(blob[:4], "big")
    if len(blob) < 4 + size or not 0 < size < 200:
        return ""
    return blob[4 : 4 + size].decode("ascii", "replace")


def fingerprint(blob: bytes) -> str:
    """SHA256:… as ssh-keygen -l prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


@dataclass(frozen=True)
class Verdict:
    """What the files say of a key: known, unknown, changed (another key of that type is listed) or revoked."""

    state: Literal["known", "unknown", "changed", "revoked"]
    entry: Entry | None = None


class KnownHosts:
    """All known_hosts files of one connection, in order; missing files are empty, unreadable ones are complaints."""

    def __init__(self, files: Sequence[str | Path]) -> None:
        self.files = [Path(file).expanduser() for file in files]
        self.entries: list[Entry] = []
        self.complaints: list[str] = []
        for file in self.files:
            try:
                text = file.read_bytes()
            except FileNotFoundError:
                continue
            except OSError as error:
                self.complaints.append(f"{file}: {error.strerror or error}")
                continue
            entries, complaints = parse(text, str(file))
            self.entries += entries
            self.complaints += complaints

    def about(self, names: Iterable[str], marker: Marker = "") -> list[Entry]:
        wanted = list(names)
        return [entry for entry in self.entries if entry.marker == marker and any(map(entry.matches, wanted))]

    def key_types(self, name: str) -> list[str]:
        """Types of the keys listed for a name, first listed first: what to ask the server for first."""
        return list(dict.fromkeys(entry.key_type for entry in self.about([name])))

    def revoked(self, name: str, blob: bytes) -> Entry | None:
        return next((entry for entry in self.about([name], "@revoked") if entry.blob == blob), None)

    def judge(self, name: str, blob: bytes) -> Verdict:
        """What is known of ``blob`` as the key of ``name`` (see host_name). A listed key wins over a changed one."""
        revoked = self.revoked(name, blob)
        if revoked is not None:
            return Verdict("revoked", revoked)
        listed = self.about([name])
        same = next((entry for entry in listed if entry.blob == blob), None)
        if same is not None:
            return Verdict("known", same)
        other = next((entry for entry in listed if entry.key_type == blob_type(blob)), None)
        return Verdict("changed", other) if other is not None else Verdict("unknown")


def line_for(name: str, blob: bytes, *, hashed: bool = False) -> str:
    """The known_hosts line that accepts a key."""
    if hashed:
        salt = os.urandom(20)
        digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
        name = f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"
    return f"{name} {blob_type(blob)} {base64.b64encode(blob).decode()}"


def accept(file: Path, line: str) -> None:
    """Add a line to a known_hosts file: one locked append, whole or not at all. Raises OSError.

    Appending keeps what a concurrent ``ssh`` writes, which replacing the file would lose.
    """
    file = file.expanduser()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        size = os.fstat(fd).st_size
        text = line.encode() + b"\n"
        if size and os.pread(fd, 1, size - 1) != b"\n":
            text = b"\n" + text
        try:
            written = os.write(fd, text)
            os.fsync(fd)
        except OSError:
            os.ftruncate(fd, size)
            raise
        if written != len(text):
            os.ftruncate(fd, size)
            raise OSError("no space for the whole line")
    finally:
        os.close(fd)
