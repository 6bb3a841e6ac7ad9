"""What an installer wrote about a package: its version, and the hashes in RECORD that nobody checks afterwards."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import re
from typing import Any, Dict, List, Optional


def find(root: str, package: str) -> Optional[str]:
    """The .dist-info folder in ``root`` (a site-packages) that owns the import package; None for an editable tree."""
    try:
        names = sorted(name for name in os.listdir(root) if name.endswith(".dist-info"))
    except OSError:
        return None
    wanted = _normal(package)
    for name in names:
        if _normal(name[: -len(".dist-info")].rpartition("-")[0]) == wanted:
            return os.path.join(root, name)
    for name in names:
        if any(path.startswith(package + "/") for path in _record(os.path.join(root, name))):
            return os.path.join(root, name)
    return None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _record(folder: str) -> Dict[str, str]:
    """Path -> "sha256=..." of RECORD."""
    try:
        with open(os.path.join(folder, "RECORD"), encoding="utf-8", newline="") as stream:
            return {row[0]: row[1] for row in csv.reader(stream) if len(row) >= 2}
    except (OSError, UnicodeDecodeError, csv.Error):
        return {}


def identity(root: str, package: str) -> Optional[Dict[str, Any]]:
    """What tells one installation from the next: name, version, and RECORD's inode, mtime (ns) and hash."""
    folder = find(root, package)
    if folder is None:
        return None
    name, _, version = os.path.basename(folder)[: -len(".dist-info")].rpartition("-")
    try:
        with open(os.path.join(folder, "RECORD"), "rb") as stream:
            digest: Optional[str] = hashlib.sha256(stream.read()).hexdigest()
            status = os.fstat(stream.fileno())
        return {
            "name": name,
            "version": version,
            "record": digest,
            "inode": status.st_ino,
            "mtime_ns": status.st_mtime_ns,
        }
    except OSError:
        return {"name": name, "version": version, "record": None, "inode": None, "mtime_ns": None}


def foreign(root: str, package: str) -> List[str]:
    """Python files of the package whose bytes are not those that RECORD names, relative to ``root``."""
    folder = find(root, package)
    found = []
    for path, entry in _record(folder).items() if folder else ():
        algorithm, _, value = entry.partition("=")
        if algorithm != "sha256" or not path.endswith(".py") or not path.startswith(package + "/"):
            continue
        try:
            with open(os.path.join(root, path), "rb") as stream:
                digest = base64.urlsafe_b64encode(hashlib.sha256(stream.read()).digest()).rstrip(b"=").decode("ascii")
        except OSError:
            continue
        if digest != value:
            found.append(path)
    return sorted(found)


def recorded(root: str, package: str, relative: List[str]) -> Dict[str, Optional[str]]:
    """Relative path -> sha256 (hex) that RECORD gives for it; None where it has none."""
    folder = find(root, package)
    record = _record(folder) if folder else {}
    found: Dict[str, Optional[str]] = {}
    for path in relative:
        algorithm, _, value = record.get(path.replace(os.sep, "/"), "").partition("=")
        found[path] = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex() if algorithm == "sha256" else None
    return found
