"""The one owner of the embedded host's paths, and what each profile is made of.

    <cache>/lab/<profile>/
      venv/             the host's: virtual environment with torch, vLLM and speculators
      home/             the host's: HOME of every session (models, data, runs, agent)
      sshd/             the server's: host key, configuration, authorized_keys, log, pid
      operator/         ours: user key, known_hosts, ssh_config, state.json, build markers, build.log

<cache> is $REMOTEOPS_CACHE, or remoteops/ in $XDG_CACHE_HOME, or ~/.cache/remoteops.
After the build the operator's side reads only operator/; everything of the host's goes over the link.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remoteops.errors import LabError, UsageError

Report = Callable[[str], None]
HERE = Path(__file__).resolve().parent


def cache_root() -> Path:
    """Where everything large lies, outside any checkout."""
    named = os.environ.get("REMOTEOPS_CACHE")
    if named:
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()).absolute() / "remoteops"


@dataclass(frozen=True)
class Profile:
    """A pair of releases: what is installed, how it is checked, and what it costs."""

    name: str
    title: str
    python: tuple[str, ...]
    torch: str
    packages: tuple[str, ...]
    requirements: Path
    remove: tuple[str, ...]
    imports: tuple[str, ...]
    download_gb: dict[str, float]
    disk_gb: dict[str, float]

    @property
    def fingerprint(self) -> str:
        """Changes with anything that makes an existing venv another one."""
        parts = [self.torch, *self.packages, *self.remove, self.requirements.read_text(encoding="utf-8")]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def profiles() -> dict[str, Profile]:
    """All profiles of profiles.yaml by name."""
    from ruamel.yaml import YAML

    raw = YAML(typ="safe", pure=True).load((HERE / "profiles.yaml").read_text(encoding="utf-8"))
    return {
        name: Profile(
            name,
            item["title"],
            tuple(item["python"]),
            str(item["torch"]),
            tuple(item["packages"]),
            HERE / item["requirements"],
            tuple(item["remove"]),
            tuple(item["imports"]),
            dict(item["download_gb"]),
            dict(item["disk_gb"]),
        )
        for name, item in raw.items()
    }


def profile(name: str) -> Profile:
    known = profiles()
    if name not in known:
        raise UsageError(f"the lab has no profile '{name}'", hint="profiles: " + ", ".join(known))
    return known[name]


class Place:
    """Paths and the state record of one profile's host."""

    def __init__(self, name: str, root: Path | None = None) -> None:
        self.name = name
        self.root = (root or cache_root()) / "lab" / name
        self.venv = self.root / "venv"
        self.python = self.venv / "bin" / "python"
        self.home = self.root / "home"
        self.server = self.root / "sshd"
        self.operator = self.root / "operator"
        self.user_key = self.operator / "id_ed25519"
        self.known_hosts = self.operator / "known_hosts"
        self.ssh_config = self.operator / "ssh_config"
        self.state_file = self.operator / "state.json"
        self.build_log = self.operator / "build.log"
        self.markers = self.operator / "build"

    def state(self) -> dict[str, Any]:
        try:
            found = json.loads(self.state_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def remember(self, **changes: Any) -> None:
        state = {**self.state(), **changes}
        temporary = self.state_file.with_suffix(f".tmp.{os.getpid()}")
        temporary.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self.state_file)

    def prepare(self) -> None:
        """Create the folders, private to the user. Raises LabError where the cache cannot be written."""
        try:
            for folder in (self.root, self.home, self.server, self.operator, self.markers):
                folder.mkdir(parents=True, exist_ok=True)
            for folder in (self.home, self.server, self.operator):
                folder.chmod(0o700)
        except OSError as error:
            raise LabError(
                f"the lab's cache {self.root} cannot be written: {error.strerror}",
                host="lab",
                hint="set REMOTEOPS_CACHE to a folder of yours with room for about 9 GB",
            ) from None

    @contextlib.contextmanager
    def locked(self, report: Report) -> Iterator[None]:
        """One builder at a time; whoever comes second waits and then finds the work done."""
        with (self.operator / "lock").open("w") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                report("another remoteops is preparing this lab; waiting for it")
                fcntl.flock(stream, fcntl.LOCK_EX)
            yield


def to_stderr(line: str) -> None:
    """The report of whoever has no console: plain lines on stderr."""
    sys.stderr.write(f"lab: {line}\n")
    sys.stderr.flush()
