"""What trainers read beside the samples: token_freq.pt, and for the newest ones an Arrow dataset.

Both are made of a run's rows in arrays, never number by number: 10^8 tokens take seconds, not minutes.
"""

from __future__ import annotations

import array
import io
import os
import shutil
from typing import Any, Iterator, Optional, Sequence, Tuple

from remoteops.agent import manifest

DATASET = "dataset"
_TOGETHER = 256  # rows counted at once: each count is as long as the vocabulary
_CHUNK = 50_000  # rows of one Arrow chunk; its offsets have 32 bits


def token_frequencies(run_dir: str, rows: Sequence[Any]) -> str:
    """Write {token id: count} over the trained tokens of all rows, as the vocabulary mapping of the trainers reads it.

    Returns the path.
    """
    import torch

    counts = torch.zeros(0, dtype=torch.int64)
    for joined, flags in _joined(rows, _TOGETHER):
        ids, trained = torch.frombuffer(joined, dtype=torch.int64), torch.frombuffer(flags, dtype=torch.bool)
        more = torch.bincount(ids[trained], minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    used = counts.nonzero().flatten()
    path = os.path.join(run_dir, "token_freq.pt")
    temporary = path + manifest.PARTIAL
    held = io.BytesIO()
    torch.save(dict(zip(used.tolist(), counts[used].tolist())), held)  # onto a full disk its error names no disk
    with open(temporary, "wb") as stream:
        stream.write(held.getbuffer())
    os.replace(temporary, path)
    return path


def arrow_dataset(out: str, rows: Sequence[Any]) -> Optional[str]:
    """Arrow dataset whose row k is the k-th sample, and dataset/hidden_states/hs_k linked to that sample's file.

    The trainer counts rows of its dataset while files are named by the source's row; the links join the two when rows
    were chosen or dropped. None when ``datasets`` is not in the venv.
    """
    try:
        import datasets
    except ImportError:
        return None
    path, temporary = os.path.join(out, DATASET), os.path.join(out, ".%s%s" % (DATASET, manifest.PARTIAL))
    shutil.rmtree(temporary, ignore_errors=True)
    sequence = getattr(datasets, "Sequence", None) or datasets.List
    features = datasets.Features(
        {
            "input_ids": sequence(datasets.Value("int64")),
            "loss_mask": sequence(datasets.Value("int64")),
            "seq_len": datasets.Value("int64"),
            "row": datasets.Value("int64"),
        }
    )
    made = datasets.Dataset(datasets.table.InMemoryTable(_table(rows)), info=datasets.DatasetInfo(features=features))
    made.set_format(type="torch")
    datasets.disable_progress_bars()
    made.save_to_disk(temporary)
    os.mkdir(os.path.join(temporary, "hidden_states"))
    for position, row in enumerate(rows):
        os.symlink(
            os.path.join("..", "..", manifest.file_name("safetensors", row.index)),
            os.path.join(temporary, "hidden_states", manifest.file_name("safetensors", position)),
        )
    shutil.rmtree(path, ignore_errors=True)
    os.replace(temporary, path)
    return path


def _table(rows: Sequence[Any]) -> Any:
    import pyarrow
    import torch

    def lists(offsets: array.array[int], values: Any) -> Any:
        places = pyarrow.Array.from_buffers(pyarrow.int32(), len(offsets), [None, pyarrow.py_buffer(offsets)])
        return pyarrow.ListArray.from_arrays(places, values)

    names = ("input_ids", "loss_mask", "seq_len", "row")
    kinds = (pyarrow.list_(pyarrow.int64()), pyarrow.list_(pyarrow.int64()), pyarrow.int64(), pyarrow.int64())
    tables = []
    for first, (joined, flags) in enumerate(_joined(rows, _CHUNK)):
        some = rows[first * _CHUNK : (first + 1) * _CHUNK]
        offsets = array.array("i", [0])
        for row in some:
            offsets.append(offsets[-1] + len(row.input_ids))
        ids = pyarrow.Array.from_buffers(pyarrow.int64(), len(joined), [None, pyarrow.py_buffer(joined)])
        mask = pyarrow.array(torch.frombuffer(flags, dtype=torch.uint8).to(torch.int64).numpy())
        lengths = pyarrow.array([len(row.input_ids) for row in some], pyarrow.int64())
        indexes = pyarrow.array([row.index for row in some], pyarrow.int64())
        tables.append(pyarrow.table([lists(offsets, ids), lists(offsets, mask), lengths, indexes], names=list(names)))
    if not tables:
        return pyarrow.table([pyarrow.array([], kind) for kind in kinds], names=list(names))
    return pyarrow.concat_tables(tables)


def _joined(rows: Sequence[Any], together: int) -> Iterator[Tuple[array.array[int], bytearray]]:
    """The token ids (int64) and loss masks (0 or 1 a byte) of ``together`` rows at once, end to end."""
    for first in range(0, len(rows), together):
        ids, flags = array.array("q"), bytearray()
        for row in rows[first : first + together]:
            ids.fromlist(list(row.input_ids))
            flags += bytes(row.loss_mask)
        yield ids, flags
