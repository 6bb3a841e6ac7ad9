"""`fab patch`: plan + apply + proof (without the import) against two audits of the same pair, which it rests on.

    python bench/patch.py --consumer DIR --provider DIR [--rounds 5]

DIR holds the package (speculators/, vllm/), as a site-packages does. A venv that holds copies of both is made and
patched over the agent's door on this machine; each round begins unpatched. *first*: nothing is known of the pair;
*after probe*: `fab probe` has looked before, as it does when it says "fab patch". The peer is the audit verb alone,
asked twice with an empty cache in the same round. Seconds of wall time (median), and CPU seconds of both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

ROUND = """
import json, sys, time
began = time.perf_counter()
from remoteops import patch, probe
from remoteops.remote import open_agent
from remoteops.schema import Host, Workload
venv, state, cache, mode = sys.argv[1:]
host = Host(name="here", connect="local", venv=venv, state_dir=state, cache_dir=cache,
            workload=Workload(consumer="speculators", provider="vllm"))
with open_agent(host) as agent:
    agent.call("hello", {})
    if mode == "audits":
        began = time.perf_counter()
        for _ in range(2):
            agent.call("audit", {**probe.audit_request(host, model=None), "refresh": True})
    else:
        if mode == "after probe":
            probe.probe(host, baseline=None, agent=agent)
        began = time.perf_counter()
        planned = patch.plan(host, agent=agent)
        done = patch.apply(host, planned, prove=False, agent=agent)
        assert done.applied and not done.proof["audit"]["breaks"], done
    print(json.dumps({"seconds": time.perf_counter() - began}))
    if mode != "audits":
        patch.revert(host, agent=agent)
"""


def venv(folder: Path, consumer: Path, provider: Path) -> Path:
    """A venv with copies of both packages and their metadata (Python files only)."""
    site = folder / "venv" / "lib" / "python3" / "site-packages"
    for root, name in ((consumer, "speculators"), (provider, "vllm")):
        for part in (root / name, *root.glob(f"{name}*.dist-info")):
            shutil.copytree(part, site / part.name, ignore=_not_python if part.name == name else None)
    python = folder / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (folder / "venv" / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).parent}\n")
    return folder / "venv"


def _not_python(folder: str, names: list[str]) -> list[str]:
    return [n for n in names if not n.endswith((".py", ".pyi")) and not os.path.isdir(os.path.join(folder, n))]


def once(place: Path, folder: Path, mode: str) -> dict[str, float]:
    """One round in a process of its own: wall seconds from the plan on, CPU seconds of everything."""
    cache = folder / "cache"
    shutil.rmtree(cache / "audit", ignore_errors=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    argv = [sys.executable, "-c", ROUND, str(place), str(folder / "state"), str(cache), mode]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, cwd=Path(__file__).resolve().parent.parent)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": json.loads(done.stdout)["seconds"], "cpu": cpu}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--consumer", type=Path, required=True)
    parser.add_argument("--provider", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    modes = ("audits", "first", "after probe")
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    with tempfile.TemporaryDirectory() as name:
        place = venv(Path(name), options.consumer, options.provider)
        once(place, Path(name), "audits")  # ships the agent, fills the caches of the file system
        for number in range(options.rounds):
            for mode in modes:
                found[mode].append(once(place, Path(name), mode))
            told = ", ".join(f"{mode} {found[mode][-1]['seconds']:.2f} s" for mode in modes)
            print(f"round {number + 1}: {told}", flush=True)

    def middle(mode: str, key: str) -> float:
        return statistics.median(one[key] for one in found[mode])

    today = time.strftime("%Y-%m-%d")
    load = os.getloadavg()[0]
    for mode in modes:
        print(f"{mode:<12} {middle(mode, 'seconds'):.2f} s, {middle(mode, 'cpu'):.2f} CPU s")
    ratio = middle("after probe", "seconds") / middle("audits", "seconds")
    print(f"plan + apply + proof after a probe: {ratio:.2f} of two audits ({today}, load {load:.1f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
