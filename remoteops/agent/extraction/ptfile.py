"""A .pt file as torch.save lays it out, without torch.save: tensors go from memory to the file in one gathered write.

torch.save copies every storage through its own writer while it holds the interpreter's lock, so writer threads queue
up behind each other and behind the thread that feeds the GPU. The container is an ordinary zip archive: stored
entries, 64-byte aligned, a pickle that names the storages. torch.load reads it with weights_only and mmap like any
other.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections import OrderedDict
from typing import Any, List, Mapping, Sequence, Tuple, Union

ROOT = "archive"
ALIGNMENT = 64
LIMIT = 0xFFFFFFFF - (1 << 24)
"""Bytes of an archive; beyond it zip64 would be needed, and torch.save does it."""
_STORAGES = {
    "torch.float32": "FloatStorage",
    "torch.bfloat16": "BFloat16Storage",
    "torch.float16": "HalfStorage",
    "torch.int64": "LongStorage",
}
Part = Union[bytes, memoryview]


class _Stored:
    """Stands for a tensor in the pickle: its storage is an entry of the archive."""

    def __init__(self, tensor: Any, key: str) -> None:
        self.tensor, self.key = tensor, key


class _Storage:
    def __init__(self, kind: Any, key: str, count: int) -> None:
        self.kind, self.key, self.count = kind, key, count


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return ("storage", obj.kind, obj.key, "cpu", obj.count) if isinstance(obj, _Storage) else None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, _Stored):
            return NotImplemented
        import torch

        tensor = obj.tensor
        storage = _Storage(getattr(torch, _STORAGES[str(tensor.dtype)]), obj.key, tensor.numel())
        arguments: Tuple[Any, ...] = (storage, 0, tuple(tensor.shape), tuple(tensor.stride()), False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments


def parts(sample: Mapping[str, Any]) -> List[Part]:
    """The bytes of the file, in order, without copying a tensor.

    ``sample``: str -> contiguous CPU tensor or a list of them (float32, bfloat16, float16, int64). Raises ValueError
    when it would be larger than LIMIT or holds another dtype.
    """
    tensors: List[Any] = []

    def stored(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [stored(one) for one in value]
        if str(value.dtype) not in _STORAGES:
            raise ValueError("no storage for %s" % value.dtype)
        tensors.append(value)
        return _Stored(value, str(len(tensors) - 1))

    tree = {name: stored(value) for name, value in sample.items()}
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(tree)
    entries: List[Tuple[str, Part]] = [("data.pkl", stream.getvalue()), ("byteorder", b"little")]
    entries += [("data/%d" % number, _bytes(tensor)) for number, tensor in enumerate(tensors)]
    entries.append(("version", b"3\n"))
    if sum(len(data) for _, data in entries) > LIMIT:
        raise ValueError("too large for a plain zip archive")
    return _archive(entries)


def _bytes(tensor: Any) -> memoryview:
    import torch

    if not tensor.numel():
        return memoryview(b"")
    return memoryview(tensor.flatten().view(torch.uint8).numpy())


def _archive(entries: Sequence[Tuple[str, Part]]) -> List[Part]:
    """A zip archive of stored entries; each one's data begins at a multiple of 64 bytes, as torch wants it for mmap."""
    out: List[Part] = []
    directory = bytearray()
    at = 0
    for name, data in entries:
        path = ("%s/%s" % (ROOT, name)).encode("ascii")
        padding = -(at + 30 + len(path) + 4) % ALIGNMENT
        extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        checksum = zlib.crc32(data)
        fields = (20, 0, 0, 0, 33, checksum, len(data), len(data), len(path), len(extra))
        header = struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", *fields) + path + extra
        directory += struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", 20, *fields[:9], 0, 0, 0, 0, 0, at) + path
        out += [header, data]
        at += len(header) + len(data)
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, len(entries), len(entries), len(directory), at, 0)
    return [*out, bytes(directory), end]
