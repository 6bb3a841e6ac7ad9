"""A small package in a site-packages of its own, and requests for the patch verbs."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
from pathlib import Path
from typing import Any

from remoteops.agent import patches

BEFORE = {"pkg/__init__.py": b"", "pkg/a.py": b"VALUE = 1\n", "pkg/b.py": b"OTHER = 'old'\r\n"}
AFTER = {"pkg/a.py": b"VALUE = 2\n", "pkg/b.py": b"OTHER = 'new'\r\n"}


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def quiet(event: str, **fields: Any) -> None:
    """The emitter of a verb that tells nothing."""


class Site:
    """``root``: the site-packages; ``state``: the state folder."""

    def __init__(self, folder: Path, files: dict[str, bytes] | None = None) -> None:
        self.root = folder / "site"
        self.state = folder / "state"
        self.extra: dict[str, Any] = {}
        for name, data in (files or BEFORE).items():
            self.write(name, data)

    def write(self, name: str, data: bytes) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def install(self, version: str = "1.0", files: dict[str, bytes] | None = None) -> None:
        """What pip does: the files, then a dist-info with RECORD."""
        for old in self.root.glob("pkg-*.dist-info"):
            for path in old.iterdir():
                path.unlink()
            old.rmdir()
        rows = io.StringIO()
        for name, data in (files or BEFORE).items():
            path = self.root / name
            if path.exists():
                path.unlink()  # an installer puts a new file there, it does not write into the old one
            self.write(name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            csv.writer(rows).writerow([name, f"sha256={digest}", len(data)])
        self.write(f"pkg-{version}.dist-info/RECORD", rows.getvalue().encode())

    def request(
        self, wanted: dict[str, bytes] | None = None, audited: dict[str, bytes] | None = None, **more: Any
    ) -> dict[str, Any]:
        found: dict[str, Any] = {
            "state_dir": str(self.state),
            "root": str(self.root),
            "package": "pkg",
            **self.extra,
            **more,
        }
        if wanted is not None:
            known = {**BEFORE, **(audited or {})}
            found["files"] = [
                {"path": str(self.root / name), "before": sha(known[name]), "data": base64.b64encode(data).decode()}
                for name, data in wanted.items()
            ]
        return found

    def apply(self, wanted: dict[str, bytes] = AFTER, **more: Any) -> dict[str, Any]:
        return patches.apply(self.request(wanted, **more), quiet)

    def revert(self, **more: Any) -> list[dict[str, Any]]:
        return patches.revert(self.request(**more), quiet)["reverted"]

    def status(self, **more: Any) -> dict[str, Any]:
        return patches.status(self.request(**more), quiet)

    def files(self) -> dict[str, bytes]:
        return {name: (self.root / name).read_bytes() for name in BEFORE}

    def left_over(self) -> list[str]:
        return [path.name for path in self.root.rglob("*") if "remoteops" in path.name]


def inode(path: Path) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_ino, status.st_nlink
