"""One sample's file, read back: what is wrong with it, and what tells it from other samples.

Reading must keep pace with GPUs that write gigabytes a second, so a sample is looked at in one pass of one kernel per
tensor, memory mapped and without the GIL (6.8 GB/s on one core of 2026, from the page cache); only a sample that this
pass finds suspicious is taken apart. Nothing in a file is executed.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any, Dict, List, Mapping, NamedTuple, Tuple

Problem = Tuple[str, Dict[str, Any]]  # the words, and facts such as the slot
_TORCH_DTYPES = {"float32": "torch.float32", "bfloat16": "torch.bfloat16", "float16": "torch.float16"}
_PRINTED = 8  # tokens whose states make a sample's fingerprint


class Finding(NamedTuple):
    """What ``inspect`` saw. ``fingerprint`` is equal for samples with equal states (and seldom for others)."""

    problems: List[Problem]
    readable: bool
    size: int
    fingerprint: bytes


def inspect(path: str, row: Any, header: Mapping[str, Any]) -> Finding:
    """Compare a file with its row (``index``, ``input_ids``, ``loss_mask``) and the manifest's header."""
    try:
        return _inspect(read_sample(path), os.stat(path).st_size, row, header)
    except Exception as error:  # noqa: BLE001 - whatever lies there under a sample's name
        said = " ".join(str(error).split())[:200] or type(error).__name__
        return Finding([("unreadable: %s" % said, {})], False, 0, b"")


def _inspect(sample: Mapping[str, Any], size: int, row: Any, header: Mapping[str, Any]) -> Finding:
    problems: List[Problem] = []
    if sample["input_ids"] != row.input_ids:
        problems.append(
            ("other tokens than its row (%d for %d)" % (len(sample["input_ids"]), len(row.input_ids)), {})
        )
    if sample["loss_mask"] is not None and sample["loss_mask"] != row.loss_mask:
        problems.append(("another loss mask than its row", {}))
    states, layers = sample["states"], header["layers"]
    count = len(states) if isinstance(states, (list, tuple)) else (states.shape[1] if states.dim() == 3 else -1)
    if count != len(layers):
        problems.append(("%d layers, %d were asked for" % (count, len(layers)), {}))
    elif _suspicious(states):
        for slot, state in enumerate(slots(states)):
            problems += _of_slot(state, slot, layers[slot], row, header)
    else:
        for slot, state in enumerate(slots(states)):
            problems += _of_form(state, slot, layers[slot], row, header)
    return Finding(problems, True, size, _fingerprint(states))


def same_states(path: str, other: str) -> bool:
    """Whether two samples hold the same states, to the last bit. Raises what reading raises."""
    import torch

    mine, theirs = slots(read_sample(path)["states"]), slots(read_sample(other)["states"])
    return len(mine) == len(theirs) and all(
        a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)) for a, b in zip(mine, theirs)
    )


def read_sample(path: str) -> Dict[str, Any]:
    """{"input_ids": [int], "loss_mask": [int] | None, "states": tensor [S, L, H] or list of [S, H]}; memory mapped."""
    import torch

    if path.endswith(".safetensors"):
        from safetensors import safe_open

        with safe_open(path, framework="pt") as stream:
            return {
                "input_ids": stream.get_tensor("token_ids").tolist(),
                "loss_mask": None,
                "states": stream.get_tensor("hidden_states"),
            }
    data = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    return {
        "input_ids": data["input_ids"].tolist(),
        "loss_mask": data["loss_mask"].tolist(),
        "states": data["hidden_states"],
    }


def slots(states: Any) -> List[Any]:
    """The layers of a sample as L tensors [S, H]."""
    return list(states) if isinstance(states, (list, tuple)) else list(states.unbind(1))


def _suspicious(states: Any) -> bool:
    """Whether some value is not finite, or some layer's first token is all zeros (as it is when the layer is)."""
    import torch

    for tensor in states if isinstance(states, (list, tuple)) else [states]:
        if tensor.numel() and not bool(torch.isfinite(torch.stack(torch.aminmax(tensor)).float()).all()):
            return True
    return any(not bool(state[:1].any()) for state in slots(states))


def _of_form(state: Any, slot: int, layer: int, row: Any, header: Mapping[str, Any]) -> List[Problem]:
    name = "slot %d (layer id %d)" % (slot, layer)
    expected = [len(row.input_ids), header["hidden_size"]]
    if list(state.shape) != expected:
        return [("%s has shape %s, expected %s" % (name, list(state.shape), expected), {"slot": slot})]
    if str(state.dtype) != _TORCH_DTYPES.get(header["dtype"]):
        found = str(state.dtype).replace("torch.", "")
        return [("%s is %s, expected %s" % (name, found, header["dtype"]), {"slot": slot})]
    return []


def _of_slot(state: Any, slot: int, layer: int, row: Any, header: Mapping[str, Any]) -> List[Problem]:
    import torch

    problems = _of_form(state, slot, layer, row, header)
    bad = int((~torch.isfinite(state)).sum())
    if bad:
        text = "slot %d (layer id %d) has %d values that are not finite" % (slot, layer, bad)
        problems.append((text, {"slot": slot, "count": bad}))
    elif state.numel() and not bool(state.any()):
        problems.append(("slot %d (layer id %d) is all zeros" % (slot, layer), {"slot": slot}))
    return problems


def _bits(state: Any) -> Any:
    import torch

    return state.contiguous().flatten().view(torch.uint8)


def _fingerprint(states: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for state in slots(states):
        digest.update(repr((tuple(state.shape), str(state.dtype))).encode())
        length = state.shape[0]
        for token in sorted({(length - 1) * step // (_PRINTED - 1) for step in range(_PRINTED)} if length else ()):
            digest.update(memoryview(_bits(state[token]).numpy()))
    return digest.digest()
