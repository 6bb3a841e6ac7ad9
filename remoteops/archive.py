"""The agent as one file: a zip archive whose bytes depend only on the sources in it."""

from __future__ import annotations

import functools
import hashlib
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

_WHEN = (1980, 1, 1, 0, 0, 0)
# The archive's entry, and that of its unpacked twin. Written so that a Python too old for the agent says so.
_MAIN = b"""\
import sys
if sys.version_info < (3, 9):
    sys.stderr.write("remoteops: Python %d.%d is too old\\n" % sys.version_info[:2])
    sys.exit(69)
root = __file__.rpartition("/")[0]
if root not in sys.path:
    sys.path.insert(0, root)
from remoteops.agent.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@dataclass(frozen=True)
class Archive:
    """``name`` carries the hash of ``data``; ``sha256`` is all of it."""

    name: str
    data: bytes
    sha256: str


@functools.cache
def build() -> Archive:
    """The archive of this installation's agent: no times, owners or order of the file system in it."""
    package = Path(__file__).resolve().parent
    files = {"__main__.py": _MAIN, "remoteops/__init__.py": b""}
    for path in sorted((package / "agent").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix in (".py", ".json"):
            files["remoteops/" + path.relative_to(package).as_posix()] = path.read_bytes()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(files):
            info = zipfile.ZipInfo(name, _WHEN)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.create_system = 3
            info.external_attr = 0o644 << 16
            archive.writestr(info, files[name])
    data = buffer.getvalue()
    digest = hashlib.sha256(data).hexdigest()
    return Archive(f"agent-{digest[:20]}.pyz", data, digest)
