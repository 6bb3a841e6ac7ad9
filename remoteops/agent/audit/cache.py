"""The result of an audit, kept until any file that it looked at changes.

A stored document is used again only if every folder listed and every file read still has the same size, times and
inode, and the
request is the same. A damaged or foreign cache file counts as none. Files are written beside and renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zlib
from typing import Any, Dict, Iterable, List, Optional

FORMAT = 1
MAX_ENTRIES = 24
IGNORED = ("cache_dir", "state_dir", "protocol", "refresh")


def _file(folder: str, request: Dict[str, Any], code: str) -> str:
    plain = {k: v for k, v in request.items() if k not in IGNORED}
    name = hashlib.sha256((code + json.dumps(plain, sort_keys=True, default=str)).encode()).hexdigest()[:32]
    return os.path.join(folder, "audit", name + ".z")


def _stamp(path: str) -> Optional[List[int]]:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def load(folder: str, request: Dict[str, Any], code: str) -> Optional[Dict[str, Any]]:
    """The document of the same request over the same files, or None."""
    try:
        with open(_file(folder, request, code), "rb") as handle:
            stored = json.loads(zlib.decompress(handle.read()))
        if stored["format"] != FORMAT or not isinstance(stored["document"], dict):
            return None
        for path, stamp in stored["stamps"].items():
            if _stamp(path) != stamp:
                return None
        document: Dict[str, Any] = stored["document"]
        return document
    except (OSError, ValueError, KeyError, TypeError, AttributeError, zlib.error):
        return None


def save(folder: str, request: Dict[str, Any], code: str, document: Dict[str, Any], paths: Iterable[str]) -> None:
    """Keeps a document with the stamps of what it was made from. A folder that cannot be written to is no error."""
    target = _file(os.path.expanduser(folder), request, code)
    stamps = {path: _stamp(path) for path in paths}
    data = zlib.compress(
        json.dumps({"format": FORMAT, "stamps": stamps, "document": document}, default=str).encode(
            "utf-8", "surrogatepass"
        ),
        1,
    )
    try:
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".new-")
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        os.replace(temporary, target)
        _trim(os.path.dirname(target))
    except OSError:
        return


def _trim(folder: str) -> None:
    names = [os.path.join(folder, n) for n in os.listdir(folder)]
    names.sort(key=lambda n: (_stamp(n) or [0, 0])[1])
    for name in names[:-MAX_ENTRIES]:
        os.unlink(name)


def code_stamp() -> str:
    """Changes with the engine: an archive's or a source folder's own stamps."""
    here = os.path.dirname(os.path.abspath(__file__))
    if not os.path.isdir(here):  # inside an archive
        while here and not os.path.exists(here):
            here = os.path.dirname(here)
        return str(_stamp(here))
    return str([_stamp(os.path.join(here, n)) for n in sorted(os.listdir(here)) if n.endswith(".py")])
