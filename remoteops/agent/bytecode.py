"""Stale bytecode of a source file that was replaced."""

from __future__ import annotations

import os
from typing import Iterable, List


def bytecode_of(path: str, prefixes: Iterable[str]) -> List[str]:
    """Every .pyc made from ``path``: any interpreter, any optimisation level, checked or unchecked, in its own
    ``__pycache__`` and under each PYTHONPYCACHEPREFIX in ``prefixes``."""
    folder, name = os.path.split(path)
    stem = name[:-3] if name.endswith(".py") else name
    folders = [os.path.join(folder, "__pycache__")]
    for prefix in prefixes:
        for real in {folder, os.path.realpath(folder)}:
            folders.append(os.path.join(os.path.expanduser(prefix), real.lstrip(os.sep)))
    found = []
    for cache in folders:
        try:
            names = os.listdir(cache)
        except OSError:
            continue
        # "x.cpython-311.pyc", "x.cpython-311.opt-1.pyc", and a half-written "x.cpython-311.pyc.140213"
        found += [os.path.join(cache, entry) for entry in names if entry.startswith(stem + ".") and ".pyc" in entry]
    return found


def drop_bytecode(path: str, prefixes: Iterable[str]) -> None:
    """Remove it. Raises OSError when a file cannot be removed: old code would go on running."""
    for cached in bytecode_of(path, prefixes):
        try:
            os.unlink(cached)
        except FileNotFoundError:
            pass
