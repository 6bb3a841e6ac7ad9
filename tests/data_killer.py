"""Run by the lab's python (torch): a run of the real writer, killed at random moments until nothing is left to do.

``python data_killer.py FOLDER FORMAT ROUNDS`` prints one JSON object. torch is imported once; every "run" is a fork
of it, killed with SIGKILL.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import sys
import time

import torch

from remoteops.agent import manifest, modelinfo
from remoteops.agent.extraction import check, dataset, formats, output, samples

ROWS, HIDDEN = 24, 64


def states(index: int, length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return [torch.randn(length, HIDDEN, generator=generator) for _ in range(4)]


def work(job: dict, loaded: dataset.Loaded, shape: modelinfo.Shape, run_dir: str) -> None:
    """One run to its end: only what is missing is written."""
    found = output.prepare(job, loaded, shape)
    todo, _ = found.todo(loaded.rows)
    store = formats.Store(found.path, job["format"], job["layers"], "fake", "end", HIDDEN)
    for row in todo:
        store.write(row, states(row.index, len(row.input_ids)))
        time.sleep(0.002)
    store.sync_all([])
    output.finish(found.path, run_dir, job, loaded, shape)


def final_names_are_whole(out: pathlib.Path) -> list[str]:
    """Samples under a final name that cannot be read: there must never be one."""
    bad = []
    for path in out.iterdir() if out.exists() else ():
        if path.name.startswith(("data_", "hs_")) and path.suffix in (".pt", ".safetensors"):
            try:
                samples.read_sample(str(path))
            except Exception as error:  # noqa: BLE001 - whatever a broken file raises is the finding
                bad.append(f"{path.name}: {error}")
    return bad


def main(folder: str, fmt: str, rounds: int) -> dict:
    base = pathlib.Path(folder)
    shape = modelinfo.read(str(base / "model"))
    job = {
        "model": str(base / "model"),
        "dataset": str(base / "rows.jsonl"),
        "samples": None,
        "seed": 0,
        "max_length": 400,
        "layers": [2, 4, 5, 8],
        "dtype": "float32",
        "format": fmt,
    }
    loaded = dataset.load(job)
    whole = {**job, "out": str(base / "undisturbed")}
    work(whole, loaded, shape, folder)
    job["out"] = str(base / "killed")
    chance = random.Random(7)
    killed, bad, counts = 0, [], []
    for _ in range(rounds):
        child = os.fork()
        if child == 0:
            try:
                work(job, loaded, shape, folder)
            finally:
                os._exit(0)
        time.sleep(chance.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        killed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        bad += final_names_are_whole(base / "killed")
        found = manifest.read(job["out"])
        counts.append(len(found.entries) if found else 0)
    work(job, loaded, shape, folder)
    report = check.check(job["out"])
    same = True
    for row in loaded.rows:
        name = manifest.file_name(fmt, row.index)
        one, other = (samples.read_sample(str(base / place / name)) for place in ("undisturbed", "killed"))
        same &= one["input_ids"] == other["input_ids"] == row.input_ids
        same &= all(
            torch.equal(a, b) for a, b in zip(samples.slots(one["states"]), samples.slots(other["states"]), strict=True)
        )
    return {
        "killed": killed,
        "bad": bad,
        "counts": counts,
        "ok": report["ok"],
        "problems": report["problems"],
        "same": same,
        "left": [n for n in os.listdir(job["out"]) if n.endswith(".part")],
    }


if __name__ == "__main__":
    sys.stdout.write("RESULT" + json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
