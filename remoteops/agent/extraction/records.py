"""The raw records of a dataset on this host: JSONL, JSON, text, Parquet, Arrow, and folders of them.

A record's index is its position in the dataset, whatever is selected later. Parquet and Arrow need pyarrow, which
every venv with speculators has. Nothing is downloaded: a name that is no path on this host is an error.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence, Tuple, Union

from remoteops.agent.protocol import AgentError

JSON_LINES = (".jsonl", ".ndjson", ".jsonlines")
TEXT = (".txt", ".text")
ARROW = (".arrow", ".feather")
PARQUET = (".parquet", ".pq")
KNOWN = (*JSON_LINES, ".json", *TEXT, *PARQUET, *ARROW)
Record = Union[Dict[str, Any], ValueError]


class Records(NamedTuple):
    """A dataset: its files, the number of records, and a reader of chosen ones (ascending indices -> pairs of index
    and record).

    A record that cannot be read comes as a ValueError saying why, so that its row can be named.
    """

    path: str
    files: List[str]
    count: int  # type: ignore[assignment]  # a tuple's own count() is not needed
    pick: Callable[[Sequence[int]], Iterator[Tuple[int, Record]]]

    def sha256(self) -> str:
        """Hash of the content of all files, in order; the names do not count, so a moved dataset stays the same one."""
        digest = hashlib.sha256()
        for name in self.files:
            with open(name, "rb") as stream:
                for block in iter(lambda: stream.read(1 << 20), b""):
                    digest.update(block)
        return digest.hexdigest()


def files_of(path: str) -> List[str]:
    """The data files behind a path, in order.

    A folder is a saved Hugging Face dataset (state.json; of a DatasetDict its ``train`` split) or a folder of files
    of one kind. Raises AgentError(DatasetError).
    """
    full = os.path.abspath(os.path.expanduser(path))
    if os.path.isfile(full):
        if not full.endswith(KNOWN):
            raise AgentError(
                "DatasetError", "%s: no known kind of dataset" % full, hint="known endings: " + " ".join(KNOWN)
            )
        return [full]
    if not os.path.isdir(full):
        raise AgentError(
            "DatasetError",
            "no dataset %s on this host" % path,
            tried=full,
            hint="give a path on the host, or a local file (it is then uploaded); nothing is downloaded",
        )
    if os.path.isfile(os.path.join(full, "dataset_dict.json")):
        splits = _json(os.path.join(full, "dataset_dict.json")).get("splits", [])
        if "train" not in splits and len(splits) != 1:
            raise AgentError(
                "DatasetError", "%s has the splits %s and no train" % (full, splits), hint="name the split's folder"
            )
        return files_of(os.path.join(full, "train" if "train" in splits else str(splits[0])))
    if os.path.isfile(os.path.join(full, "state.json")):
        state = _json(os.path.join(full, "state.json"))
        named = [
            os.path.join(full, os.path.basename(str(one.get("filename", "")))) for one in state.get("_data_files", [])
        ]
        gone = [name for name in named if not os.path.isfile(name)]
        if gone or not named:
            raise AgentError(
                "DatasetError",
                "%s is not whole: %s missing" % (full, ", ".join(gone) or "its data files are"),
                hint="save it again",
            )
        return named
    for endings in (PARQUET, ARROW, JSON_LINES, (".json",), TEXT):
        found = sorted(
            os.path.join(full, name) for name in os.listdir(full) if name.endswith(endings) and not name.startswith(".")
        )
        if endings == (".json",):
            found = [
                name
                for name in found
                if os.path.basename(name) not in ("dataset_info.json", "dataset_infos.json", "config.json")
            ]
        if found:
            return found
    raise AgentError(
        "DatasetError", "no data files in %s" % full, tried="files ending in " + " ".join(KNOWN), hint="name the file"
    )


def open_records(path: str) -> Records:
    """Raises AgentError(DatasetError) for a dataset that is missing, empty, unreadable or of no known kind; so does
    reading on."""
    try:
        return _open(path, files_of(path))
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: str, error: OSError) -> AgentError:
    """The error for a dataset that the system does not let us read."""
    return AgentError(
        "DatasetError",
        "%s cannot be read: %s" % (path, error.strerror or error),
        tried=str(error.filename or ""),
        hint="check its owner, mode and mount on the host",
    )


def _open(path: str, files: List[str]) -> Records:
    kind = os.path.splitext(files[0])[1]
    if kind in JSON_LINES or (kind == ".json" and not _is_array(files[0])):
        records = _lines(path, files, _parse)
    elif kind in TEXT:
        records = _lines(path, files, lambda line: {"text": line.decode("utf-8").rstrip("\r\n")})
    elif kind == ".json":
        records = _array(path, files)
    else:
        records = _tables(path, files, kind in PARQUET)
    if not records.count:
        raise AgentError("DatasetError", "the dataset %s has no records" % path, tried=", ".join(files))
    return records._replace(pick=_told(path, records.pick))


def _told(path: str, pick: Callable[[Sequence[int]], Iterator[Tuple[int, Record]]]) -> Any:
    """``pick`` whose faults (a disk's or a network's, a damaged table) come as DatasetError with the place."""

    def picked(wanted: Sequence[int]) -> Iterator[Tuple[int, Record]]:
        last, source = -1, pick(wanted)
        while True:
            try:
                last, record = next(source)
            except StopIteration:
                return
            except Exception as error:  # pyarrow's errors are of many families
                raise AgentError(
                    "DatasetError",
                    "%s cannot be read on from record %d: %s" % (path, last + 1, " ".join(str(error).split())[:300]),
                    tried="%s" % type(error).__name__,
                    hint="is the file whole, and its disk or mount in order?",
                ) from error
            yield last, record

    return picked


def _lines(path: str, files: List[str], parse: Callable[[bytes], Record]) -> Records:
    """Blank lines are no records (as datasets' own JSON reader has it)."""
    count = 0
    for name in files:
        with open(name, "rb") as stream:
            count += sum(1 for line in stream if line.strip())

    def pick(wanted: Sequence[int]) -> Iterator[Tuple[int, Record]]:
        chosen, index, last = set(wanted), -1, max(wanted, default=-1)
        for name in files:
            with open(name, "rb") as stream:
                for line in stream:
                    if not line.strip():
                        continue
                    index += 1
                    if index > last:
                        return
                    if index in chosen:
                        yield index, _readable(parse, line)

    return Records(path, files, count, pick)


def _readable(parse: Callable[[bytes], Record], line: bytes) -> Record:
    try:
        return parse(line)
    except (ValueError, RecursionError) as error:  # the latter: thousands of brackets
        return ValueError("unreadable: %s" % error)


def _array(path: str, files: List[str]) -> Records:
    rows: List[Any] = []
    for name in files:
        try:
            with open(name, "rb") as stream:
                rows.extend(json.load(stream))
        except (ValueError, RecursionError) as error:
            raise AgentError("DatasetError", "%s is no JSON: %s" % (name, error)) from None

    def pick(wanted: Sequence[int]) -> Iterator[Tuple[int, Record]]:
        for index in sorted(wanted):
            row = rows[index]
            yield (
                index,
                row if isinstance(row, dict) else ValueError("a record must be an object, not %s" % type(row).__name__),
            )

    return Records(path, files, len(rows), pick)


def _tables(path: str, files: List[str], parquet: bool) -> Records:
    try:
        import pyarrow
        import pyarrow.dataset
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise AgentError(
            "MissingPackage",
            "reading %s needs pyarrow in the venv" % path,
            hint="pip install pyarrow there, or give JSONL",
        ) from None

    def batches(name: str) -> Iterator[Any]:
        if parquet:
            with pyarrow.parquet.ParquetFile(name) as source:
                yield from source.iter_batches(batch_size=1024)
            return
        with pyarrow.memory_map(name) as source:
            try:
                yield from pyarrow.ipc.open_stream(source)
            except pyarrow.ArrowInvalid:  # the random-access layout (feather v2)
                source.seek(0)
                reader = pyarrow.ipc.open_file(source)
                for number in range(reader.num_record_batches):
                    yield reader.get_batch(number)

    try:
        count = sum(
            pyarrow.parquet.read_metadata(name).num_rows if parquet else sum(batch.num_rows for batch in batches(name))
            for name in files
        )
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise AgentError("DatasetError", "%s cannot be read: %s" % (path, error), hint="is the file whole?") from None

    def pick(wanted: Sequence[int]) -> Iterator[Tuple[int, Record]]:
        queue, base = sorted(wanted), 0
        for name in files:
            for batch in batches(name):
                inside = []
                while queue and queue[0] < base + batch.num_rows:
                    inside.append(queue.pop(0) - base)
                if inside:
                    for offset, row in zip(inside, batch.take(pyarrow.array(inside)).to_pylist()):
                        yield base + offset, row
                base += batch.num_rows
                if not queue:
                    return

    return Records(path, files, count, pick)


def _parse(line: bytes) -> Record:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError("a record must be an object, not %s" % type(value).__name__)
    return value


def _is_array(path: str) -> bool:
    """A .json file holds one array, or (as many tools write it) one object a line."""
    with open(path, "rb") as stream:
        return opens_array(stream.read(4096))


def opens_array(beginning: bytes) -> bool:
    """Does a JSON text that begins so hold an array? (A byte order mark may stand before it.)"""
    return beginning.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _json(path: str) -> Dict[str, Any]:
    try:
        with open(path, "rb") as stream:
            value = json.load(stream)
    except (OSError, ValueError) as error:
        raise AgentError(
            "DatasetError", "%s cannot be read: %s" % (path, error), hint="save the dataset again"
        ) from None
    return value if isinstance(value, dict) else {}
