"""What this machine keeps between two commands: source trees, matrix results, and the YAML of knowledge/ as JSON."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

__all__ = ["cache_dir", "load_yaml", "write_beside"]


def cache_dir() -> Path:
    """Where everything is kept: ``$XDG_CACHE_HOME/remoteops`` (``~/.cache/remoteops``)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "remoteops"


def write_beside(place: Path, text: str) -> None:
    """Write a cache file under another name and rename it, so that nobody reads half of it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    beside = place.with_name(f".{place.name}.{os.getpid()}.part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(place)


def load_yaml(entry: Any) -> Any:
    """A YAML file of ours; its content is kept as JSON, because parsing YAML takes longer than an audit."""
    data: bytes = entry.read_bytes()
    place = cache_dir() / "knowledge" / f"{hashlib.sha256(data).hexdigest()[:32]}.json"
    try:
        return json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        from ruamel.yaml import YAML

        loaded = YAML(typ="safe", pure=True).load(data.decode("utf-8"))
    with contextlib.suppress(OSError):
        write_beside(place, json.dumps(loaded))
    return loaded
