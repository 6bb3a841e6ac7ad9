"""Reads back what was written and compares it with the rows it was made from; one pass, one sample in memory at a
time."""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any, Callable, Dict, List, Mapping, Optional

from remoteops.agent import manifest
from remoteops.agent.extraction.output import read_rows
from remoteops.agent.protocol import AgentError

NAMED = 200  # problems listed one by one; all are counted
_TORCH_DTYPES = {"float32": "torch.float32", "bfloat16": "torch.bfloat16", "float16": "torch.float16"}


class Report:
    """Collects problems: {"index","file","problem", …}."""

    def __init__(self) -> None:
        self.problems: List[Dict[str, Any]] = []
        self.count = 0
        self.rows: set[int] = set()

    def add(self, index: int, file: str, problem: str, **facts: Any) -> None:
        self.count += 1
        self.rows.add(index)
        if len(self.problems) < NAMED:
            self.problems.append({"index": index, "file": file, "problem": problem, **facts})


def check(
    out: str,
    emit: Optional[Callable[..., Any]] = None,
    *,
    reference: int = 0,
    job: Optional[Mapping[str, Any]] = None,
    device: Optional[str] = None,
    reject: bool = False,
) -> Dict[str, Any]:
    """Every row present, its tokens, shape, dtype, finite values, no two samples with the same states and other
    tokens; lengths.

    ``reject`` enters wrong rows in the manifest, so that a resume does them again.
    ``reference``: that many rows are recomputed with transformers and compared per layer (reference.py).
    ``emit(event, **fields)`` gets ``progress``. Returns {"ok", "rows", "checked", "problem_count", "problem_rows",
    "problems", "lengths", "bytes", "tokens", "reference"?}. Raises AgentError(OutputMismatch) for a folder without
    manifest or rows.
    """
    found = manifest.read(out)
    if found is None:
        raise AgentError("OutputMismatch", "no manifest in %s" % out, hint="is this the output folder of a run?")
    header, report = found.header, Report()
    began = time.monotonic()
    lengths: List[int] = []
    seen: Dict[str, Any] = {}
    total = size = checked = 0
    wanted = set()
    expected_rows = sum(1 for _ in read_rows(out))
    for number, row in enumerate(read_rows(out), 1):
        wanted.add(row.index)
        name = manifest.file_name(header["format"], row.index)
        entry = found.entries.get(row.index)
        path = os.path.join(out, name)
        if not os.path.exists(path):
            report.add(row.index, name, "missing" if entry else "missing, and not in the manifest")
            continue
        if entry is None:
            report.add(row.index, name, "not in the manifest")
        elif entry.get("rejected"):
            report.add(row.index, name, "rejected before: %s" % entry["rejected"])
            continue
        elif os.stat(path).st_size != entry.get("bytes"):
            report.add(row.index, name, "%d bytes, the manifest says %s" % (os.stat(path).st_size, entry.get("bytes")))
        try:
            sample = read_sample(path)
        except Exception as error:  # noqa: BLE001
            report.add(row.index, name, "unreadable: %s" % (" ".join(str(error).split())[:200] or type(error).__name__))
            continue
        checked += 1
        total += len(row.input_ids)
        size += os.stat(path).st_size
        lengths.append(len(row.input_ids))
        _check_sample(report, row, name, sample, header)
        digest = _digest(sample)
        other = seen.setdefault(digest, (row.index, row.input_ids))
        if other[1] != row.input_ids:
            report.add(row.index, name, "the same states as row %d, which has other tokens" % other[0], other=other[0])
        del sample
        if emit is not None and (number % 50 == 0 or number == expected_rows):
            emit("progress", samples=number, samples_total=expected_rows, tokens=total, bytes=size)
    for index in sorted(set(found.entries) - wanted):
        report.add(index, found.entries[index]["file"], "in the manifest, and no row asks for it")
    if reject:
        _reject(out, found, report)
    partial = [name for name in os.listdir(out) if name.endswith(manifest.PARTIAL)]
    result: Dict[str, Any] = {
        "schema": "remoteops.verify/1",
        "out": os.path.abspath(out),
        "ok": not report.count,
        "rows": expected_rows,
        "checked": checked,
        "tokens": total,
        "bytes": size,
        "problem_count": report.count,
        "problem_rows": sorted(report.rows),
        "problems": report.problems,
        "lengths": statistics(lengths),
        "unfinished": partial,
        "layers": header["layers"],
        "convention": header["convention"],
        "dtype": header["dtype"],
        "format": header["format"],
        "hidden_size": header["hidden_size"],
    }
    result["seconds"] = {"read": round(time.monotonic() - began, 3)}
    if reference:
        from remoteops.agent.extraction import reference as recompute

        compared = recompute.compare(
            out,
            header,
            reference,
            trust_remote_code=bool((job or {}).get("trust_remote_code")),
            device=device,
            emit=emit,
        )
        result["reference"] = compared
        result["seconds"]["reference"] = round(time.monotonic() - began - result["seconds"]["read"], 3)
        if compared.get("ok") is False:
            result["ok"] = False
    return result


def _reject(out: str, found: manifest.Output, report: Report) -> None:
    """Enter the wrong rows in the manifest, so that a resume does them again; a folder that cannot be written stays
    as it is."""
    reasons = {one["index"]: one for one in reversed(report.problems)}
    for index in sorted(report.rows & set(found.entries)):
        if found.entries[index].get("rejected"):
            continue
        name = manifest.file_name(found.header["format"], index)
        try:
            manifest.reject(out, index, name, str(reasons.get(index, {}).get("problem", "wrong")))
        except OSError:
            return


def read_sample(path: str) -> Dict[str, Any]:
    """{"input_ids": [int], "loss_mask": [int] | None, "states": tensor [S, L, H] or list of [S, H]}; memory mapped,
    nothing in the file is executed."""
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


def statistics(lengths: List[int]) -> Dict[str, Any]:
    """Tokens a sample: {"count","min","median","mean","max"}."""
    if not lengths:
        return {"count": 0}
    ordered = sorted(lengths)
    return {
        "count": len(ordered),
        "min": ordered[0],
        "median": ordered[len(ordered) // 2],
        "mean": round(sum(ordered) / len(ordered), 1),
        "max": ordered[-1],
    }


def _check_sample(report: Report, row: Any, name: str, sample: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    import torch

    if sample["input_ids"] != row.input_ids:
        report.add(
            row.index, name, "other tokens than its row (%d for %d)" % (len(sample["input_ids"]), len(row.input_ids))
        )
    if sample["loss_mask"] is not None and sample["loss_mask"] != row.loss_mask:
        report.add(row.index, name, "another loss mask than its row")
    states, layers = sample["states"], header["layers"]
    count = len(states) if isinstance(states, (list, tuple)) else (states.shape[1] if states.dim() == 3 else -1)
    if count != len(layers):
        report.add(row.index, name, "%d layers, %d were asked for" % (count, len(layers)))
        return
    for slot, state in enumerate(slots(states)):
        expected = [len(row.input_ids), header["hidden_size"]]
        if list(state.shape) != expected:
            report.add(
                row.index,
                name,
                "slot %d (layer id %d) has shape %s, expected %s" % (slot, layers[slot], list(state.shape), expected),
                slot=slot,
            )
            continue
        if str(state.dtype) != _TORCH_DTYPES.get(header["dtype"]):
            report.add(
                row.index,
                name,
                "slot %d (layer id %d) is %s, expected %s"
                % (slot, layers[slot], str(state.dtype).replace("torch.", ""), header["dtype"]),
                slot=slot,
            )
        if not state.numel():
            continue
        low, high = torch.aminmax(state)
        if not bool(torch.isfinite(torch.stack((low, high)).float()).all()):
            bad = int((~torch.isfinite(state)).sum())
            report.add(
                row.index,
                name,
                "slot %d (layer id %d) has %d values that are not finite" % (slot, layers[slot], bad),
                slot=slot,
                count=bad,
            )
        elif float(low) == float(high) == 0.0:
            report.add(row.index, name, "slot %d (layer id %d) is all zeros" % (slot, layers[slot]), slot=slot)


def _digest(sample: Mapping[str, Any]) -> str:
    import torch

    digest = hashlib.blake2b(digest_size=16)
    for state in slots(sample["states"]):
        digest.update(memoryview(state.contiguous().flatten().view(torch.uint8).numpy()))
    return digest.hexdigest()
