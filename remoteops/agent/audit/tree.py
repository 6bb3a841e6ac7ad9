"""The files of one package, in a folder or a zip."""

from __future__ import annotations

import os
import re
import stat
import zipfile
from typing import Dict, Iterator, List, Optional, Tuple

EXTENSION = re.compile(r"^(\w+)(?:\.[\w-]+)*\.(?:so|pyd)$")


SKIP = {"__pycache__", ".git", ".hg", ".tox", ".venv", "node_modules"}


class Tree:
    """Files of one top-level package. ``roots`` are the folders (or zip members) that hold its modules."""

    def __init__(
        self, package: str, roots: List[str], base: str, *, single: bool = False, archive: Optional[str] = None
    ) -> None:
        self.package = package
        self.roots = roots
        self.base = base
        self.single = single
        self.archive = archive
        self.version: Optional[str] = None
        self.distribution: Optional[str] = None
        self.requires: List[str] = []
        self.requires_python: Optional[str] = None
        self.folders_seen: Dict[str, None] = {}
        self.files_seen: Dict[str, None] = {}
        self._listing: Dict[str, Dict[str, bool]] = {}
        self._zip: Optional[zipfile.ZipFile] = zipfile.ZipFile(archive) if archive else None
        self._members: Optional[Dict[str, Dict[str, bool]]] = None
        self._all: Optional[List[Tuple[str, str]]] = None

    def names_in(self, folder: str) -> Dict[str, bool]:
        """Names in a folder -> whether it is a folder. Empty when there is no such folder."""
        if folder not in self._listing:
            self.folders_seen[folder] = None
            self._listing[folder] = self._zip_names(folder) if self._zip else scan(folder)
        return self._listing[folder]

    def _zip_names(self, folder: str) -> Dict[str, bool]:
        if self._members is None:
            assert self._zip is not None
            self._members = {"": {}}
            for name in self._zip.namelist():
                parts = name.rstrip("/").split("/")
                for depth in range(len(parts)):
                    parent = "/".join(parts[:depth])
                    is_folder = depth < len(parts) - 1 or name.endswith("/")
                    self._members.setdefault(parent, {})[parts[depth]] = is_folder
        return self._members.get(folder, {})

    def find(self, module: str) -> Optional[Tuple[str, str]]:
        """(kind, path) of a module by dotted name: kind is ``package``, ``module``, ``stub``, ``extension`` or
        ``namespace``.
        """
        parts = module.split(".")
        if parts[0] != self.package:
            return None
        if self.single:
            return ("module", self.roots[0]) if len(parts) == 1 else None
        folders = self.roots
        if len(parts) > 1:
            for name in parts[1:-1]:
                folders = [join(f, name) for f in folders if self.names_in(f).get(name)]
            folders, last = folders, parts[-1]
            found = None
            for folder in folders:
                names = self.names_in(folder)
                if names.get(last):
                    inside = self._package(join(folder, last))
                    if inside[0] != "namespace":
                        return inside
                    found = found or inside
                if names.get(last + ".py") is False:
                    return "module", join(folder, last + ".py")
                if names.get(last + ".pyi") is False:
                    return "stub", join(folder, last + ".pyi")
                for name, is_folder in names.items():
                    if not is_folder and name.startswith(last + ".") and EXTENSION.match(name):
                        return "extension", join(folder, name)
                if names.get(last + ".pyc") is False:
                    return "extension", join(folder, last + ".pyc")
            return found
        for folder in folders:
            inside = self._package(folder)
            if inside[0] != "namespace":
                return inside
        return ("namespace", folders[0]) if folders else None

    def _package(self, folder: str) -> Tuple[str, str]:
        names = self.names_in(folder)
        for name, kind in (("__init__.py", "package"), ("__init__.pyi", "stub")):
            if names.get(name) is False:
                return kind, join(folder, name)
        for name, is_folder in names.items():
            if not is_folder and name.startswith("__init__.") and EXTENSION.match(name):
                return "extension", join(folder, name)
        return "namespace", folder

    def read(self, path: str) -> bytes:
        """Bytes of one file. Raises OSError (also for a bad archive member)."""
        self.files_seen[path] = None
        if self._zip is None:
            return read_plain(path)
        try:
            return self._zip.read(path)
        except (KeyError, zipfile.BadZipFile, RuntimeError) as error:
            raise OSError("%s: %s" % (path, error)) from error

    def files(self) -> List[Tuple[str, str]]:
        """(module name, path) of every Python file, in a stable order; follows links to folders once."""
        if self._all is None:
            found: List[Tuple[str, str]] = []
            if self.single:
                found.append((self.package, self.roots[0]))
            else:
                visited: Dict[str, None] = {}
                for root in self.roots:
                    found.extend(self._below(root, self.package, visited))
            self._all = found
        return self._all

    def _below(self, folder: str, dotted: str, visited: Dict[str, None]) -> Iterator[Tuple[str, str]]:
        pending = [(folder, dotted)]
        while pending:
            folder, dotted = pending.pop()
            real = folder if self._zip else os.path.realpath(folder)
            if real in visited:
                continue
            visited[real] = None
            names = self.names_in(folder)
            for name in sorted(names):
                if names[name]:
                    if name.isidentifier() and name not in SKIP:
                        pending.append((join(folder, name), dotted + "." + name))
                elif name.endswith(".py"):
                    stem = name[:-3]
                    yield (dotted if stem == "__init__" else dotted + "." + stem), join(folder, name)

    def relative(self, path: str) -> str:
        """Path relative to the folder that holds the package."""
        if self.archive:
            return path
        for root in self.roots:
            holder = os.path.dirname(root)
            if path.startswith(holder + os.sep):
                return path[len(holder) + 1 :].replace(os.sep, "/")
        return path

    @property
    def path(self) -> str:
        return self.archive or os.path.dirname(self.roots[0])


def join(folder: str, name: str) -> str:
    return folder + "/" + name if folder else name


def read_plain(path: str) -> bytes:
    """A plain file's bytes, by the system's own calls: thousands are read. A named pipe, which would be waited for, and
    anything else that is no plain file raises OSError.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("%s: not a plain file" % path)
        parts = [os.read(handle, status.st_size + 1)]
        while len(parts[-1]) > 0 and sum(map(len, parts)) < status.st_size:
            parts.append(os.read(handle, status.st_size))
        return parts[0] if len(parts) == 1 else b"".join(parts)
    finally:
        os.close(handle)


def scan(folder: str) -> Dict[str, bool]:
    names: Dict[str, bool] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    names[entry.name] = entry.is_dir()
                except OSError:
                    continue  # a link into itself
    except OSError:
        return {}
    return names
