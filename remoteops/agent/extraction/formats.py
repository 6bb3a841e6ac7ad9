"""Writes one sample as a trainer reads it, under a temporary name first.

``speculators-v1`` (trainers of speculators <= 0.4): data_{i}.pt, a dict of input_ids [S] int64, hidden_states (a list
of L tensors [S, H]) and loss_mask [S] int64. ``safetensors`` (>= 0.5): hs_{i}.safetensors with hidden_states [S, L,
H] and token_ids [S] int64; the loss mask lies in the dataset beside it (finish.py). i is the dataset's row in both.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import struct
from typing import Any, Dict, Iterable, List, Sequence

from remoteops.agent import manifest
from remoteops.agent.extraction import ptfile
from remoteops.agent.extraction.layers import CONVENTION

SYNC = ("file", "end", "none")
_DTYPES = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}
_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_SIZES = {"F32": 4, "BF16": 2, "F16": 2}
_COUNTER = itertools.count()


class Store:
    """The output folder as an engine sees it; holds plain values only, so it can be sent to worker processes.

    ``layers``: completed-layers ids in slot order. ``sync``: ``file`` = each sample is on the disk before its name
    is, ``end`` = the caller runs ``sync_all`` once, ``none``. Rename alone is enough against killed processes;
    syncing is against a machine that dies.
    """

    def __init__(
        self, out: str, fmt: str, layers: Sequence[int], engine: str, sync: str = "end", hidden_size: int = 0
    ) -> None:
        manifest.file_name(fmt, 0)
        if sync not in SYNC:
            raise ValueError("sync is one of %s" % ", ".join(SYNC))
        self.out, self.fmt, self.layers, self.engine, self.sync, self.hidden_size = (
            out,
            fmt,
            list(layers),
            engine,
            sync,
            hidden_size,
        )

    def write(self, row: Any, states: Any) -> Dict[str, Any]:
        """Write one sample and its manifest line; returns the line.

        ``states``: L tensors [S, H] or one [S, L, H]; any device, one floating dtype. Raises ValueError for a wrong
        shape (nothing is written) and OSError as it comes (ENOSPC, EDQUOT: the temporary file is gone, the call can
        be repeated).
        """
        import torch

        length, slots = len(row.input_ids), len(self.layers)
        if isinstance(states, (list, tuple)):
            shape = (len(states), *states[0].shape) if states else (0,)
            if any(tuple(one.shape) != shape[1:] or one.dtype != states[0].dtype for one in states):
                raise ValueError(
                    "row %d: slots differ: %s" % (row.index, [(tuple(one.shape), str(one.dtype)) for one in states])
                )
            ordered = (shape[1], shape[0], *shape[2:]) if len(shape) == 3 else shape
            dtype = states[0].dtype if states else None
        else:
            ordered, dtype = tuple(states.shape), states.dtype
        if len(ordered) != 3 or ordered[:2] != (length, slots) or (self.hidden_size and ordered[2] != self.hidden_size):
            raise ValueError(
                "row %d: states are [tokens, layers, hidden] = %s, and %s was expected"
                % (row.index, list(ordered), [length, slots, self.hidden_size or "H"])
            )
        if str(dtype) not in _DTYPES:
            raise ValueError("row %d: dtype %s is not one of %s" % (row.index, dtype, ", ".join(_NAMES.values())))
        name = manifest.file_name(self.fmt, row.index)
        temporary = self._temporary(name)
        try:
            if self.fmt == "safetensors":
                block = torch.stack(tuple(states), dim=1) if isinstance(states, (list, tuple)) else states
                _write_safetensors(temporary, row.input_ids, block.detach().cpu().contiguous(), self.sync == "file")
            else:
                layers = states if isinstance(states, (list, tuple)) else states.unbind(1)
                _write_pt(temporary, row, layers, self.sync == "file")
            size = os.stat(temporary).st_size
            os.replace(temporary, os.path.join(self.out, name))
        except BaseException:
            _remove(temporary)
            raise
        if self.sync == "file":
            manifest.sync_folder(self.out)
        return self._line(row, name, size, _NAMES[_DTYPES[str(dtype)]])

    def adopt(self, row: Any, path: str) -> Dict[str, Any]:
        """Take a finished safetensors file (vLLM's connector writes the same two tensors) as the sample of ``row``.

        Its header is checked, then it is renamed. Raises ValueError when it is not that sample, OSError(EXDEV) from
        another file system.
        """
        if self.fmt != "safetensors":
            raise ValueError("only the safetensors format adopts files")
        try:
            header = manifest.safetensors_header(path)
            states, tokens = header["hidden_states"], header["token_ids"]
        except manifest.Identified as error:
            raise ValueError("row %d: %s" % (row.index, error)) from None
        except KeyError as error:
            raise ValueError("row %d: no tensor %s in %s" % (row.index, error, os.path.basename(path))) from None
        length = len(row.input_ids)
        shape = list(states["shape"])
        if (
            len(shape) != 3
            or shape[:2] != [length, len(self.layers)]
            or (self.hidden_size and shape[2] != self.hidden_size)
        ):
            raise ValueError(
                "row %d: states are %s, and %s was expected"
                % (row.index, shape, [length, len(self.layers), self.hidden_size or "H"])
            )
        if read_safetensors(path, "token_ids", header) != list(row.input_ids) or tokens["dtype"] != "I64":
            raise ValueError("row %d: the file holds other tokens" % row.index)
        if states["dtype"] not in _NAMES:
            raise ValueError("row %d: dtype %s" % (row.index, states["dtype"]))
        name = manifest.file_name(self.fmt, row.index)
        if self.sync == "file":
            _sync(path)
        size = os.stat(path).st_size
        os.chmod(path, 0o644)  # vLLM writes 0600; whoever trains may be another user
        os.replace(path, os.path.join(self.out, name))
        if self.sync == "file":
            manifest.sync_folder(self.out)
        return self._line(row, name, size, _NAMES[states["dtype"]])

    def sync_all(self, entries: Iterable[Any] = ()) -> None:
        """Make the named samples (manifest lines or file names) and the manifest durable. A no-op for sync ``none``."""
        if self.sync != "end":
            return
        for entry in entries:
            try:
                _sync(
                    os.path.join(self.out, entry["file"] if isinstance(entry, dict) else os.path.basename(str(entry)))
                )
            except FileNotFoundError:
                continue  # done again by the next resume
        _sync(os.path.join(self.out, manifest.NAME))
        manifest.sync_folder(self.out)

    def _temporary(self, name: str) -> str:
        return os.path.join(self.out, ".%s.%d.%d%s" % (name, os.getpid(), next(_COUNTER), manifest.PARTIAL))

    def _line(self, row: Any, name: str, size: int, dtype: str) -> Dict[str, Any]:
        entry = {
            "index": row.index,
            "file": name,
            "tokens": len(row.input_ids),
            "tokens_sha256": manifest.tokens_sha256(row.input_ids),
            "layers": self.layers,
            "convention": CONVENTION,
            "dtype": dtype,
            "bytes": size,
            "sha256": None,
            "engine": self.engine,
        }
        manifest.append(self.out, entry)
        return entry


def read_safetensors(path: str, name: str, header: Dict[str, Dict[str, Any]]) -> List[int]:
    """The values of a one-dimensional I64 tensor of a safetensors file."""
    import array
    import sys

    begin, end = (int(one) for one in header[name]["data_offsets"])
    with open(path, "rb") as stream:
        length = struct.unpack("<Q", stream.read(8))[0]
        stream.seek(8 + length + begin)
        values = array.array("q", stream.read(end - begin))
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def _write_safetensors(path: str, ids: Sequence[int], states: Any, sync: bool) -> None:
    """``states``: contiguous CPU tensor [S, L, H]. One gathered write without a copy, so that writer threads do not
    hold each other up."""
    import array
    import sys

    import torch

    tokens = array.array("q", ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    kind = _DTYPES[str(states.dtype)]
    first, second = len(ids) * 8, states.numel() * _SIZES[kind]
    header = json.dumps(
        {
            "token_ids": {"dtype": "I64", "shape": [len(ids)], "data_offsets": [0, first]},
            "hidden_states": {"dtype": kind, "shape": list(states.shape), "data_offsets": [first, first + second]},
        },
        separators=(",", ":"),
    ).encode("ascii")
    header += b" " * (-len(header) % 8)
    _write_all(
        path,
        [
            struct.pack("<Q", len(header)) + header,
            tokens.tobytes(),
            memoryview(states.flatten().view(torch.uint8).numpy()),
        ],
        sync,
    )


def _write_all(path: str, parts: List[Any], sync: bool) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        views = [memoryview(part).cast("B") for part in parts]
        while views:
            count = os.writev(fd, views)
            if count == 0 and any(view.nbytes for view in views):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if views:
                views[0] = views[0][count:]
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)


def _write_pt(path: str, row: Any, layers: Sequence[Any], sync: bool) -> None:
    import torch

    sample = {
        "input_ids": torch.tensor(row.input_ids, dtype=torch.long),
        "hidden_states": [one.detach().cpu().contiguous() for one in layers],
        "loss_mask": torch.tensor(row.loss_mask, dtype=torch.long),
    }
    try:
        _write_all(path, list(ptfile.parts(sample)), sync)
    except ValueError:  # beyond 4 GiB
        # A slice of a larger tensor would drag its whole storage into the file.
        sample["hidden_states"] = [one.clone() for one in sample["hidden_states"]]
        with open(path, "xb") as stream:
            torch.save(sample, stream)
            stream.flush()
            if sync:
                os.fsync(stream.fileno())


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
