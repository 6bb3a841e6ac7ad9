"""Where pip on this machine looks for packages: asked from pip itself, so that mirrors and local folders are honoured.

Only the settings that say where and how to look are read: index-url, extra-index-url, find-links, no-index,
trusted-host, cert, proxy. A setting from the environment (PIP_INDEX_URL …) wins over the files, as it does in pip.
"""

from __future__ import annotations

import ast
import functools
import os
import shutil
import ssl
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_LISTS = ("extra-index-url", "find-links", "trusted-host")
_KEYS = ("index-url", "no-index", "cert", "proxy", *_LISTS)
# pip reads the section of its command over [global].
_SECTIONS = ("global", "download")


@dataclass(frozen=True)
class PipSettings:
    """What pip's configuration says about where packages are."""

    index_url: str | None = None
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()
    no_index: bool = False
    cert: str | None = None
    proxy: str | None = None
    asked: str = field(default="environment only", compare=False)


def read() -> PipSettings:
    """The settings of the pip of this interpreter (or the first on PATH); without a pip, of the environment alone."""
    asked, found = _files()
    values = dict(found)
    for key in _KEYS:
        name = "PIP_" + key.upper().replace("-", "_")
        if name in os.environ:
            values[key] = os.environ[name]
    return PipSettings(
        index_url=values.get("index-url") or None,
        extra_index_urls=_split(values.get("extra-index-url")),
        find_links=_split(values.get("find-links")),
        trusted_hosts=_split(values.get("trusted-host")),
        no_index=values.get("no-index", "").lower() in ("1", "true", "yes", "on"),
        cert=values.get("cert") or None,
        proxy=values.get("proxy") or None,
        asked=asked,
    )


@functools.cache
def _files() -> tuple[str, dict[str, str]]:
    """What pip's configuration files say, and the command that told: asked once, for starting pip takes a second."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PIP_") or name == "PIP_CONFIG_FILE"
    }
    for command in _pips():
        try:
            done = subprocess.run(
                [*command, "config", "list"], capture_output=True, text=True, timeout=60, check=True, env=environment
            )
        except (OSError, subprocess.SubprocessError):
            continue
        return " ".join(command) + " config list", parse(done.stdout)
    return "environment only", {}


def parse(shown: str) -> dict[str, str]:
    """The values of `pip config list` (lines such as ``global.index-url='…'``), the strongest section winning."""
    found: dict[str, tuple[int, str]] = {}
    for line in shown.splitlines():
        name, separator, raw = line.partition("=")
        section, _, key = name.rpartition(".")
        if not separator or key not in _KEYS or section not in _SECTIONS:
            continue
        try:
            value = str(ast.literal_eval(raw))
        except (ValueError, SyntaxError):
            value = raw
        rank = _SECTIONS.index(section)
        if key not in found or rank >= found[key][0]:
            found[key] = (rank, value)
    return {key: value for key, (_, value) in found.items()}


def finder(settings: PipSettings) -> Any:
    """An ``unearth.PackageFinder`` that looks where pip would, for packages of any platform and Python.

    Nothing is built or imported: only files are listed and fetched.
    """
    from unearth import PackageFinder
    from unearth.fetchers.sync import PyPIClient

    options: dict[str, Any] = {"trusted_hosts": settings.trusted_hosts, "timeout": 60.0, "follow_redirects": True}
    if settings.cert:
        options["verify"] = ssl.create_default_context(cafile=settings.cert)
    if settings.proxy:
        options["proxy"] = settings.proxy
    indexes = [] if settings.no_index else [settings.index_url or default_index(), *settings.extra_index_urls]
    links = [path for path in settings.find_links if "://" in path or Path(path).expanduser().exists()]
    if not indexes and not links:
        links = [str(Path.cwd())]  # an empty list would make unearth fall back to its default index
    return PackageFinder(session=PyPIClient(**options), index_urls=indexes, find_links=links, ignore_compatibility=True)


def default_index() -> str:
    """The index that the tools use when nobody names one (this project names none itself)."""
    from unearth import PackageFinder

    return str(PackageFinder().sources[0]["url"])


def _pips() -> list[list[str]]:
    found = [[sys.executable, "-m", "pip"]]
    found += [[path] for path in (shutil.which("pip"), shutil.which("pip3")) if path]
    return found


def _split(value: str | None) -> tuple[str, ...]:
    return tuple((value or "").split())
