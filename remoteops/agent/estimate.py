"""How many tokens, and so how many bytes, a dataset will make; from its files alone, in about a second, before
anything is tokenised."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any, Dict, Iterator, Mapping, Optional, Sequence

from remoteops.agent.extraction import records
from remoteops.agent.modelinfo import DTYPE_BYTES
from remoteops.agent.protocol import AgentError

LOOK_AT = 64 << 20  # bytes of text that are read; the rest is taken to be alike
BYTES_A_TOKEN = (
    3.5  # English and code, JSON's own characters included; other scripts make fewer bytes a token look like more
)
OVERHEAD = 4096  # bytes of a sample beside its states


def dataset(
    path: str, max_length: int, venv_python: Optional[str] = None, import_path: Optional[str] = None
) -> Dict[str, Any]:
    """{"rows", "tokens_a_row" (estimate, cut at max_length), "exact_rows" (bool), "columns" (of the first
    record that can be read)}.

    Tables need the venv's Python (pyarrow). Raises AgentError(DatasetError).
    """
    try:
        return _estimate(path, records.files_of(path), max_length, venv_python, import_path)
    except OSError as error:
        raise records.unreadable(path, error) from error


def _estimate(
    path: str, files: Sequence[str], max_length: int, venv_python: Optional[str], import_path: Optional[str]
) -> Dict[str, Any]:
    if os.path.splitext(files[0])[1] in (*records.PARQUET, *records.ARROW):
        return _table(path, max_length, venv_python, import_path)
    if not any(os.path.getsize(name) for name in files):
        raise AgentError("DatasetError", "the dataset %s is empty" % path, tried=", ".join(files))
    rows = seen = 0
    tokens = 0.0
    columns: Optional[Sequence[str]] = None
    for line in _lines(files):
        rows += 1
        seen += len(line)
        tokens += min(max_length, _tokens(line))
        if not columns:
            columns = ["text"] if files[0].endswith(records.TEXT) else _columns(line)
        if seen > LOOK_AT:
            break
    if not rows:
        raise AgentError("DatasetError", "the dataset %s has no records" % path, tried=", ".join(files))
    total = sum(os.path.getsize(name) for name in files)
    exact = seen <= LOOK_AT
    return {
        "rows": rows if exact else int(rows * total / seen),
        "tokens_a_row": tokens / rows,
        "exact_rows": exact,
        "columns": list(columns or []),
    }


def sample_bytes(tokens: float, layers: int, hidden_size: int, dtype: str) -> int:
    """Bytes of one sample of that many tokens."""
    return int(tokens * layers * hidden_size * DTYPE_BYTES.get(dtype, 4) + tokens * 16 + OVERHEAD)


def _lines(files: Sequence[str]) -> Iterator[bytes]:
    for name in files:
        with open(name, "rb") as stream:
            if name.endswith(".json") and records.opens_array(stream.read(4096)):
                stream.seek(0)
                try:
                    for row in json.load(stream):
                        yield json.dumps(row).encode()
                except (ValueError, RecursionError) as error:
                    raise AgentError("DatasetError", "%s is no JSON: %s" % (name, error)) from None
                continue
            stream.seek(0)
            for line in stream:
                if line.strip():
                    yield line


def _tokens(line: bytes) -> float:
    if b'"input_ids"' in line:
        return line.count(b",") / (2.0 if b'"loss_mask"' in line else 1.0) + 1
    return len(line) / BYTES_A_TOKEN


def _columns(line: bytes) -> Sequence[str]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return []
    return sorted(map(str, value)) if isinstance(value, Mapping) else []


_CHILD = """
import json, sys
from remoteops.agent.extraction import records
found = records.open_records(sys.argv[1])
rows = [row for _, row in found.pick(range(min(found.count, 200)))]
print(json.dumps({"rows": found.count, "sizes": [len(json.dumps(row, default=str)) for row in rows],
                  "ids": [len(row["input_ids"]) for row in rows if row.get("input_ids") is not None], "columns":
                  sorted(rows[0])}))
"""


def _table(path: str, max_length: int, venv_python: Optional[str], import_path: Optional[str]) -> Dict[str, Any]:
    if not venv_python:
        raise AgentError(
            "DatasetError", "%s is a table, and only the venv can read it" % path, hint="set `venv` of the host"
        )
    done = subprocess.run(
        [venv_python, "-c", _CHILD, path],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": import_path or ""},
        timeout=60,
        check=False,
    )
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise AgentError(
            "DatasetError",
            "%s cannot be read: %s" % (path, said[-1][:300] if said else "no word"),
            tried="pyarrow in the venv",
        )
    answer = json.loads(done.stdout)
    sizes = [float(one) for one in answer["ids"]] or [one / BYTES_A_TOKEN for one in answer["sizes"]]
    return {
        "rows": answer["rows"],
        "tokens_a_row": sum(min(max_length, one) for one in sizes) / max(1, len(sizes)),
        "exact_rows": True,
        "columns": answer["columns"],
    }
