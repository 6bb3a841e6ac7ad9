"""Preflight of where it would run: output folder, disk, GPUs, memory, other runs."""

from __future__ import annotations

import os
import tempfile
from typing import Any, Dict, Optional

from remoteops.agent import disk, estimate, gpus, manifest, modelinfo
from remoteops.agent.extraction import records
from remoteops.agent.protocol import AgentError
from remoteops.agent.rundir import TERMINAL, all_runs, runs_root
from remoteops.agent.sheet import GIB, Sheet

# Bytes of dataset that are hashed to compare it with a folder's manifest; more would take longer than a preflight may.
HASH_UP_TO = 4 << 30


def check_output(sheet: Sheet) -> None:
    out = sheet.out()
    found = manifest.read(out) if os.path.isdir(out) else None
    if found is not None:
        now = identity(sheet)
        changes = manifest.changed(found.header, {**found.header, **now})
        sheet.done_rows = len(found.entries)
        if changes:
            sheet.add(
                "output folder",
                False,
                "%s was written for something else: %s" % (out, "; ".join(one["text"] for one in changes)),
                "the same model, dataset, layers and dtype",
                "choose another output folder, or ask for what was asked before",
                "OutputMismatch",
            )
            return
    probe = disk.existing(out)
    try:
        with tempfile.NamedTemporaryFile(dir=probe, prefix=".remoteops-", suffix=manifest.PARTIAL):
            pass
    except OSError as error:
        sheet.add(
            "output folder",
            False,
            "%s cannot be written: %s" % (probe, error.strerror),
            "a folder this user may write",
            "check owner and mode, or set `output`",
        )
        return
    same = disk.device(out) == disk.device(os.path.join(out, ".staging"))
    sheet.add(
        "output folder",
        same,
        "%s%s" % (out, "; %d samples are there and will be kept" % sheet.done_rows if sheet.done_rows else ""),
        "writable, and one file system with its temporary files",
        "use a folder whose subfolders lie on the same file system",
    )


def identity(sheet: Sheet) -> Dict[str, Any]:
    """What can be told now of what the run's header will say."""
    now: Dict[str, Any] = {
        "format": sheet.job.get("format"),
        "max_length": sheet.job.get("max_length"),
        "model": sheet.job.get("model"),
        "dataset": sheet.job.get("dataset"),
    }
    if sheet.layers:
        now["layers"] = sheet.layers
    if sheet.shape:
        now.update(dtype=sheet.dtype(), model_fingerprint=modelinfo.fingerprint(sheet.shape.folder))
    try:
        files = records.files_of(str(sheet.job.get("dataset")))
        if sum(os.path.getsize(name) for name in files) <= HASH_UP_TO:
            now["dataset_sha256"] = records.Records("", files, 0, lambda wanted: iter(())).sha256()
    except AgentError:
        pass
    return now


def check_disk(sheet: Sheet) -> None:
    out = sheet.out()
    have = disk.space(out)
    found = "%.1f GiB free at %s (%s)" % (have["free"] / GIB, have["path"], have["source"])
    if sheet.shape is None or sheet.size is None or sheet.layers is None:
        sheet.add("disk", None, found, "unknown: the model or the dataset could not be read", kind="DiskTooSmall")
        return
    rows = max(0, sheet.size["wanted"] - sheet.done_rows)
    each = estimate.sample_bytes(
        sheet.size["tokens_a_row"], len(sheet.layers), sheet.shape.hidden_size, sheet.dtype() or "float32"
    )
    most = estimate.sample_bytes(
        min(float(sheet.job["max_length"]), sheet.size["tokens_a_row"] * 4),
        len(sheet.layers),
        sheet.shape.hidden_size,
        sheet.dtype() or "float32",
    )
    reserve = int(sheet.job.get("disk_reserve") or disk.RESERVE)
    need = rows * each + reserve
    sheet.size.update(
        bytes=rows * each,
        bytes_a_token=len(sheet.layers) * sheet.shape.hidden_size * modelinfo.DTYPE_BYTES.get(sheet.dtype() or "", 4),
    )
    text = "about %.1f GiB (%d rows x %d tokens x %d layers x %d x %s) and %.1f GiB kept free" % (
        rows * each / GIB,
        rows,
        sheet.size["tokens_a_row"],
        len(sheet.layers),
        sheet.shape.hidden_size,
        sheet.dtype(),
        reserve / GIB,
    )
    enough = need <= have["free"]
    tight = enough and rows * most + reserve > have["free"]
    sheet.add(
        "disk",
        False if not enough else None if tight else True,
        found + ("; long rows could need more, the run then pauses" if tight else ""),
        text,
        "free space, fewer --samples, a shorter --max-length, or `output` on a larger disk",
        "DiskTooSmall",
    )
    if have["files"] is not None and have["files"] < rows + 100:
        sheet.add(
            "inodes",
            False,
            "%d files can still be made" % have["files"],
            "%d" % (rows + 100),
            "use another file system",
            "DiskTooSmall",
        )


def check_gpus(sheet: Sheet) -> None:
    wanted = int(sheet.job.get("tensor_parallel") or 1)
    if sheet.venv is not None and sheet.venv.cpu_only:
        sheet.add("gpus", True, "vLLM here is built for CPUs", "none")
        return
    cards = gpus.Gpus()
    found = cards.devices() if cards.present else []
    if not found:
        other = os.path.exists("/dev/kfd") or os.path.exists("/dev/accel")
        sheet.add(
            "gpus",
            None if other else False,
            "an accelerator whose state cannot be read here" if other else "no GPU",
            "%d" % wanted,
            "is the driver loaded? nvidia-smi shows the same",
            "GpuBusy",
        )
        return
    visible = gpus.visible(sheet.env.get("CUDA_VISIBLE_DEVICES"), found)
    usable = [one for one in found if one["index"] in visible][:wanted]
    share = float(sheet.job.get("gpu_memory_utilization") or 0.9)
    busy = [one for one in usable if one["memory_total"] - one["memory_used"] < share * one["memory_total"]]
    text = "%d visible (%s)" % (len(visible), usable[0]["name"] if usable else "none")
    if len(usable) < wanted:
        sheet.add(
            "gpus",
            False,
            text,
            "%d for tensor_parallel" % wanted,
            "lower tensor_parallel, or check CUDA_VISIBLE_DEVICES",
            "GpuBusy",
        )
    elif busy:
        holders = [
            "pid %s on GPU %s" % (one["pid"], one["gpu"])
            for one in cards.processes()
            if one["gpu"] in [card["index"] for card in busy]
        ]
        sheet.add(
            "gpus",
            False,
            "%s; GPU %s: %.1f of %.1f GiB are taken (%s)"
            % (
                text,
                busy[0]["index"],
                busy[0]["memory_used"] / GIB,
                busy[0]["memory_total"] / GIB,
                ", ".join(holders[:4]) or "by whom is not shown",
            ),
            "%d %% of each free" % (100 * share),
            "fab stop --leftovers ends what earlier engines left; or lower gpu_memory_utilization",
            "GpuBusy",
        )
    else:
        sheet.add("gpus", True, text + ", free", "%d" % wanted)
    weights = sheet.shape.weight_bytes / wanted if sheet.shape else 0
    if usable and weights > share * usable[0]["memory_total"]:
        sheet.add(
            "gpu memory",
            False,
            "%.0f GiB a GPU" % (usable[0]["memory_total"] / GIB),
            "%.0f GiB of weights on each of %d" % (weights / GIB, wanted),
            "more GPUs (tensor_parallel), or a quantised checkpoint",
            "GpuBusy",
        )


def check_memory(sheet: Sheet) -> None:
    if sheet.venv is None or not sheet.venv.cpu_only or sheet.shape is None:
        return
    free = available_memory()
    need = int(sheet.shape.weight_bytes * 1.2) + (2 << 30)
    sheet.add(
        "memory",
        None if free is None else free >= need,
        "unknown" if free is None else "%.1f GiB available" % (free / GIB),
        "%.1f GiB" % (need / GIB),
        "a smaller model, or more memory",
    )


def check_other_runs(sheet: Sheet) -> None:
    from remoteops.agent.liveness import current_status

    going = [run.id for run in all_runs(runs_root(dict(sheet.request))) if current_status(run)["state"] not in TERMINAL]
    sheet.add(
        "other runs",
        not going or bool(sheet.request.get("allow_second")),
        ", ".join(going) or "none",
        "none on this host",
        "follow it (fab tail-logs), stop it (fab stop), or start beside it (--allow-second)",
        "RunActive",
    )


def available_memory() -> Optional[int]:
    """Bytes that can be had without swapping; None where the kernel does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as stream:
            for line in stream:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None
