"""manifest.jsonl: what lies in an output folder, and what a resumed run still has to do.

The first line is the header (schema remoteops.manifest/1): everything that decides the content of a sample. Every
other line is one sample that was complete under its final name when the line was written. Lines are appended by one
write each, by any process; a later line of an index replaces an earlier one. A torn line (the machine died) is skipped.
Standard library only: the pull and preflight verbs read it without a venv.
"""

from __future__ import annotations

import array
import errno
import fcntl
import hashlib
import json
import os
import struct
import sys
import time
import zipfile
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from remoteops.agent import lines
from remoteops.agent.protocol import AgentError, encode

SCHEMA = "remoteops.manifest/1"
NAME = "manifest.jsonl"
PATTERNS = {"speculators-v1": "data_%d.pt", "safetensors": "hs_%d.safetensors"}
PARTIAL = ".part"  # every unfinished file ends so; never "pt", which trainers of speculators 0.3 take as a sample

# What must not change under a resumed run, and how each is called in a message.
IDENTITY = {
    "model_fingerprint": "the model",
    "dataset_sha256": "the dataset",
    "layers": "the layer ids",
    "dtype": "the dtype",
    "format": "the output format",
    "max_length": "the maximum length",
    "chat_template_sha256": "the chat template",
}
LOCK = ".remoteops.lock"
_LOCKS: Dict[Tuple[int, int], int] = {}  # (device, inode) -> held until the process ends, also by workers it forks


class Identified(Exception):
    """A sample's file is not what the manifest says; the text says how."""


class Output(NamedTuple):
    """An output folder that a run may write into: its header and the samples already named in the manifest."""

    path: str
    header: Dict[str, Any]
    entries: Dict[int, Dict[str, Any]]

    def todo(self, rows: Iterable[Any]) -> Tuple[List[Any], Dict[int, str]]:
        """The rows without a valid file, and why each one that had something is done again.

        ``rows`` have ``index`` and ``input_ids``. A row is done when its line matches the row's tokens and its file
        passes ``check_file``; a file without a line is not trusted.
        """
        todo, reasons = [], {}
        for row in rows:
            entry = self.entries.get(row.index)
            if entry is None:
                if os.path.exists(os.path.join(self.path, file_name(self.header["format"], row.index))):
                    reasons[row.index] = "a file without a manifest line"
                todo.append(row)
                continue
            try:
                if not entry.get("rejected") and entry.get("tokens_sha256") != tokens_sha256(row.input_ids):
                    raise Identified("made from other tokens")
                check_file(self.path, entry)
            except Identified as error:
                reasons[row.index] = str(error)
                todo.append(row)
        return todo, reasons


def file_name(fmt: str, index: int) -> str:
    """The final name of a sample; the index is the row of the dataset. Raises AgentError(UsageError) for an unknown
    format."""
    try:
        return PATTERNS[fmt] % index
    except KeyError:
        raise AgentError(
            "UsageError", "no output format %r" % fmt, hint="formats: " + ", ".join(sorted(PATTERNS))
        ) from None


def tokens_sha256(ids: Sequence[int]) -> str:
    """Hash of the token ids as little-endian int64."""
    packed = array.array("q", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return hashlib.sha256(packed.tobytes()).hexdigest()


def read(out: str) -> Optional[Output]:
    """The folder's manifest, or None when there is none. Raises AgentError(OutputMismatch) for one that is not ours."""
    header: Optional[Dict[str, Any]] = None
    entries: Dict[int, Dict[str, Any]] = {}
    try:
        with open(os.path.join(out, NAME), "rb") as stream:
            for line in stream:
                try:
                    record = json.loads(line)
                except ValueError:
                    continue  # torn by a crash; its sample is done again
                if not isinstance(record, dict):
                    continue
                if record.get("schema") == SCHEMA:
                    header = header or record
                elif isinstance(record.get("index"), int) and isinstance(record.get("file"), str):
                    entries[record["index"]] = record
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AgentError(
            "OutputMismatch",
            "the manifest of %s cannot be read: %s" % (out, error.strerror),
            hint="check the folder's owner and mode",
        ) from None
    if header is None:
        if entries:
            raise AgentError(
                "OutputMismatch",
                "%s has samples but no header" % os.path.join(out, NAME),
                hint="choose another output folder, or move this one away",
            )
        return None
    return Output(os.path.abspath(out), header, entries)


def open_output(out: str, header: Mapping[str, Any]) -> Output:
    """Create the folder and its manifest, or take up the one that is there.

    ``header`` must hold the keys of IDENTITY. Raises AgentError(OutputMismatch) naming each thing that changed when
    the folder was written for something else, and for samples that lie there without a manifest. Partial files of a
    killed run are removed.
    """
    os.makedirs(out, exist_ok=True)
    found = read(out)
    wanted = {"schema": SCHEMA, "created": round(time.time(), 3), **header}
    if found is None:
        strangers = [name for name in os.listdir(out) if _is_sample(name)]
        if strangers:
            raise AgentError(
                "OutputMismatch",
                "%s holds %d samples that no manifest names (%s)"
                % (out, len(strangers), ", ".join(sorted(strangers)[:3])),
                hint="choose another output folder, or move these away",
            )
        path = os.path.join(out, NAME)
        temporary = path + PARTIAL
        with open(temporary, "wb") as stream:
            stream.write(encode(wanted))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        sync_folder(out)
        found = Output(os.path.abspath(out), json.loads(encode(wanted)), {})
    else:
        changes = changed(found.header, wanted)
        if changes:
            raise AgentError(
                "OutputMismatch",
                "%s was written for something else: %s" % (out, "; ".join(one["text"] for one in changes)),
                tried="resuming into it",
                hint="choose another output folder, or ask for what was asked before",
                changes=changes,
            )
        _end_torn_line(os.path.join(out, NAME))
    sweep(out)
    return found


def lock(out: str) -> None:
    """Keep this folder to this process for its life. Raises AgentError(RunActive) when another one has it.

    File systems without locks (some network ones) are not guarded; run directories are then the only guard.
    """
    os.makedirs(out, exist_ok=True)
    fd = os.open(os.path.join(out, LOCK), os.O_RDWR | os.O_CREAT, 0o644)
    status = os.fstat(fd)
    if (status.st_dev, status.st_ino) in _LOCKS:
        os.close(fd)
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            os.close(fd)
            raise AgentError(
                "RunActive",
                "another run is writing into %s" % out,
                tried="locking %s" % LOCK,
                hint="wait for it, stop it (fab stop), or choose another output folder",
            ) from None
    _LOCKS[status.st_dev, status.st_ino] = fd


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> List[Dict[str, Any]]:
    """What of IDENTITY differs: [{"key","before","now","text"}]."""
    found = []
    for key, name in IDENTITY.items():
        old, new = before.get(key), now.get(key)
        if isinstance(old, (list, tuple)) or isinstance(new, (list, tuple)):
            old, new = list(old or []), list(new or [])
        if old != new:
            label = {"model_fingerprint": "model", "dataset_sha256": "dataset"}.get(key)
            was, is_now = (before.get(label), now.get(label)) if label else (old, new)
            text = (
                "%s changed (%s -> %s)" % (name, was, is_now)
                if was != is_now
                else "%s changed (same name %s, other content)" % (name, was)
            )
            found.append({"key": key, "before": old, "now": new, "text": text})
    return found


def append(out: str, entry: Mapping[str, Any]) -> None:
    """Add one sample's line in one write, so that lines of several processes never mix. Raises OSError."""
    lines.append(os.path.join(out, NAME), encode(dict(entry)), create=False)


def reject(out: str, index: int, file: str, reason: str) -> None:
    """Note that a sample is not right although its file is whole; the next resume does it again."""
    append(out, {"index": index, "file": file, "rejected": reason})


def check_file(out: str, entry: Mapping[str, Any]) -> None:
    """Raise Identified unless the file has the size of its line and a whole container (zip directory, safetensors
    header)."""
    if entry.get("rejected"):
        raise Identified("rejected: %s" % entry["rejected"])
    path = os.path.join(out, os.path.basename(str(entry["file"])))
    try:
        size = os.stat(path).st_size
    except FileNotFoundError:
        raise Identified("the file is missing") from None
    if size != entry.get("bytes"):
        raise Identified("%d bytes, the manifest says %s" % (size, entry.get("bytes")))
    if path.endswith(".safetensors"):
        tensors = safetensors_header(path)
        if set(tensors) < {"hidden_states", "token_ids"}:
            raise Identified("no hidden_states and token_ids in the safetensors header")
    elif not zipfile.is_zipfile(path):
        raise Identified("no whole .pt file")


def safetensors_header(path: str) -> Dict[str, Dict[str, Any]]:
    """The tensors of a safetensors file: name -> {"dtype","shape","data_offsets"}. Raises Identified when the file is
    not whole."""
    size = os.stat(path).st_size
    try:
        with open(path, "rb") as stream:
            length = struct.unpack("<Q", stream.read(8))[0]
            if length > min(size - 8, 100_000_000):
                raise ValueError("header longer than the file")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = max((int(one["data_offsets"][1]) for one in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise Identified("no safetensors file: %s" % error) from None
    if size != 8 + length + end:
        raise Identified("a safetensors file of %d bytes whose header says %d" % (size, 8 + length + end))
    return dict(header)


def sweep(out: str) -> List[str]:
    """Remove what killed writers left under temporary names; says which."""
    gone = []
    for name in os.listdir(out):
        if name.endswith(PARTIAL) and name.startswith("."):
            try:
                os.unlink(os.path.join(out, name))
                gone.append(name)
            except OSError:
                continue
    return gone


def sync_folder(path: str) -> None:
    """Make renames in a folder durable; file systems that cannot (some network ones) are left alone."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)


def _end_torn_line(path: str) -> None:
    """Close a line that a crash cut short, so that the next one does not stick to it."""
    with open(path, "rb+") as stream:
        stream.seek(0, os.SEEK_END)
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            if stream.read(1) != b"\n":
                stream.write(b"\n")


def _is_sample(name: str) -> bool:
    return (name.startswith("data_") and name.endswith(".pt")) or (
        name.startswith("hs_") and name.endswith(".safetensors")
    )
