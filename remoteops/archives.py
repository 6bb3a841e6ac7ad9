"""Python sources out of wheels, sdists and folders: nothing is built, nothing is run, nothing but sources is written.

A wheel on a server is read through HTTP ranges: its directory and its .py members are fetched, the compiled parts
(hundreds of megabytes in some) are not.
"""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath
from typing import Any

from remoteops.errors import TransferFailed

SOURCE_SUFFIXES = (".py", ".pyi")
SOURCE_FOLDERS = ("src", "python", "lib")  # what lies in these is installed; beside a package at the top, tests may lie
COMPILED_SUFFIXES = (".so", ".pyd", ".pyx")
MAX_MEMBER = 32 * 2**20  # bytes; a source file beyond this is data in disguise
BLOCK = 2**20

Fetch = Callable[[int, int], bytes]


class RangeFile(io.RawIOBase):
    """A read-only file over ``fetch(first, last)`` (byte positions, both included), read in cached blocks."""

    def __init__(self, size: int, fetch: Fetch, block: int = BLOCK) -> None:
        self.size = size
        self.fetched = 0
        self._fetch = fetch
        self._block = block
        self._blocks: dict[int, bytes] = {}
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        end = self.size if size is None or size < 0 else min(self.size, self._position + size)
        parts = []
        while self._position < end:
            number, start = divmod(self._position, self._block)
            piece = self._get(number)[start : start + end - self._position]
            if not piece:
                raise TransferFailed(
                    "the server sent less than it announced", tried=f"bytes {self._position}-{end - 1}"
                )
            parts.append(piece)
            self._position += len(piece)
        return b"".join(parts)

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _get(self, number: int) -> bytes:
        if number not in self._blocks:
            first = number * self._block
            data = self._fetch(first, min(self.size, first + self._block) - 1)
            self.fetched += len(data)
            self._blocks[number] = data
            if len(self._blocks) > 64:  # members are read in file order: old blocks are not needed again
                self._blocks.pop(next(iter(self._blocks)))
        return self._blocks[number]


def remote_file(session: Any, url: str) -> RangeFile | None:
    """The file behind ``url`` as a RangeFile, or None where the server does not answer ranges."""
    answer = session.get(url, headers={"Range": "bytes=0-0", "Accept-Encoding": "identity"})
    total = answer.headers.get("content-range", "").rpartition("/")[2]
    if answer.status_code != 206 or not total.isdigit():
        return None

    def fetch(first: int, last: int) -> bytes:
        part = session.get(url, headers={"Range": f"bytes={first}-{last}", "Accept-Encoding": "identity"})
        if part.status_code != 206:
            raise TransferFailed("the server stopped answering ranges", tried=f"bytes {first}-{last}", hint="try again")
        return bytes(part.content)

    return RangeFile(int(total), fetch)


def unpack_wheel(archive: Path | RangeFile, target: Path) -> list[str]:
    """Write the sources and METADATA of a wheel (or egg) under ``target``; returns its top-level import names."""
    with zipfile.ZipFile(archive) as wheel:
        members = sorted((info for info in wheel.infolist() if not info.is_dir()), key=lambda info: info.header_offset)
        for info in members:
            path = PurePosixPath(info.filename)
            if ".data" in path.parts[0] and len(path.parts) > 2 and path.parts[1] in ("purelib", "platlib"):
                path = PurePosixPath(*path.parts[2:])
            if _is_metadata(path):
                _write(target, PurePosixPath("METADATA"), wheel.read(info))
            elif (
                path.suffix in SOURCE_SUFFIXES
                and info.file_size <= MAX_MEMBER
                and not path.parts[0].endswith((".data", ".dist-info"))
            ):
                _write(target, path, wheel.read(info))
            elif path.suffix in COMPILED_SUFFIXES:
                _write(target, path, b"")  # empty: says that the module exists and that its source is not at hand
    return top_level(target)


def complete_from_wheel(archive: RangeFile, target: Path, package: str) -> None:
    """Add to an sdist's tree what only the big wheel has: marks of compiled modules, and generated sources.

    The wheel's directory is a request or two; the sources that the sdist has already are not fetched again.
    """
    with zipfile.ZipFile(archive) as wheel:
        for info in wheel.infolist():
            path = PurePosixPath(info.filename)
            if path.parts[0] != package or (target / path).exists():
                continue
            if path.suffix in COMPILED_SUFFIXES:
                _write(target, path, b"")
            elif path.suffix in SOURCE_SUFFIXES and info.file_size <= MAX_MEMBER:
                _write(target, path, wheel.read(info))


def unpack_sdist(archive: Path, target: Path, package: str | None) -> list[str]:
    """Write the sources of one package of an sdist under ``target``.

    An sdist holds more than the package (tests, benchmarks, a src folder), so the folder of ``package`` is looked for;
    without a name every top-level package of the shallowest source folder is taken.
    """
    members = dict(_sdist_members(archive))
    root = _package_root(list(members), package)
    for path, read in members.items():
        if path.suffix in COMPILED_SUFFIXES:
            path, read = path.with_suffix(".so"), bytes
        if path.name in ("PKG-INFO", "METADATA") and len(path.parts) == 2:
            _write(target, PurePosixPath("METADATA"), read())
        if root is None or path.suffix not in (*SOURCE_SUFFIXES, ".so") or not path.is_relative_to(root):
            continue
        inner = path.relative_to(root)
        first = inner.parts[0]
        named = first in (package, f"{package}.py", f"{package}.pyi")
        beside = (package is None or root.name in SOURCE_FOLDERS) and _is_package(members, root, first)
        if not named and not beside:
            continue
        _write(target, inner, read())
    return top_level(target)


def top_level(folder: Path) -> list[str]:
    """Import names in a folder of packages: folders with Python files, and single modules."""
    names = []
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and entry.name.isidentifier() and next(entry.rglob("*.py"), None) is not None:
            names.append(entry.name)
        elif entry.suffix == ".py" and entry.stem.isidentifier() and entry.stem != "setup":
            names.append(entry.stem)
    return names


def requirements(folder: Path) -> dict[str, Any]:
    """Name, version, Requires-Dist and Provides-Extra of the METADATA or PKG-INFO in ``folder`` ({} without one)."""
    for name in ("METADATA", "PKG-INFO"):
        path = folder / name
        if path.is_file():
            headers = HeaderParser().parsestr(path.read_text(encoding="utf-8", errors="replace"))
            return {
                "name": headers.get("Name", ""),
                "version": headers.get("Version", ""),
                "requires": list(headers.get_all("Requires-Dist") or []),
                "extras": list(headers.get_all("Provides-Extra") or []),
            }
    return {}


def _sdist_members(archive: Path) -> Iterator[tuple[PurePosixPath, Callable[[], bytes]]]:
    if zipfile.is_zipfile(archive):
        source = zipfile.ZipFile(archive)
        for info in source.infolist():
            if not info.is_dir() and info.file_size <= MAX_MEMBER:
                yield PurePosixPath(info.filename), lambda info=info: source.read(info)  # type: ignore[misc]
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            wanted = path.suffix in (*SOURCE_SUFFIXES, *COMPILED_SUFFIXES) or path.name in ("PKG-INFO", "METADATA")
            if member.isfile() and wanted and member.size <= MAX_MEMBER:
                handle = tar.extractfile(member)
                data = handle.read() if handle else b""
                yield path, lambda data=data: data  # type: ignore[misc]


def _package_root(paths: list[PurePosixPath], package: str | None) -> PurePosixPath | None:
    """The folder of an sdist that is put on sys.path: that of the shallowest ``package/__init__.py`` (or module)."""
    candidates = []
    for path in paths:
        if package is not None:
            if path.parts[-2:] == (package, "__init__.py"):
                candidates.append(path.parent.parent)
            elif path.name == package + ".py" and len(path.parts) <= 3:
                candidates.append(path.parent)
        elif path.name == "__init__.py" and len(path.parts) in (3, 4) and _is_name(path.parts[-2]):
            candidates.append(path.parent.parent)
    if not candidates and package is not None:  # a namespace package has no __init__.py
        for path in paths:
            if path.suffix == ".py" and package in path.parts[1:-1] and len(path.parts) <= 5:
                candidates.append(PurePosixPath(*path.parts[: path.parts.index(package, 1)]))
    return min(candidates, key=lambda path: (len(path.parts), path.name not in SOURCE_FOLDERS), default=None)


def _is_package(members: dict[PurePosixPath, Any], root: PurePosixPath, first: str) -> bool:
    return _is_name(first) and root / first / "__init__.py" in members


def _is_name(folder: str) -> bool:
    return folder.isidentifier() and folder not in ("tests", "test", "docs", "examples", "benchmarks")


def _is_metadata(path: PurePosixPath) -> bool:
    return len(path.parts) == 2 and (
        (path.parts[0].endswith(".dist-info") and path.name == "METADATA")
        or (path.parts[0] == "EGG-INFO" and path.name == "PKG-INFO")
    )


def _write(target: Path, inner: PurePosixPath, data: bytes) -> None:
    """Write one member; a name that would leave ``target`` (absolute, ..) is refused."""
    if inner.is_absolute() or ".." in inner.parts:
        raise TransferFailed(
            f"the archive holds a member outside its folder: {inner}", hint="do not trust this archive"
        )
    path = target.joinpath(*inner.parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
