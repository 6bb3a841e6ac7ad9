"""Which consumer works with which provider, before the plan and after it: writes docs/compatibility.md.

    python bench/compatibility.py                        audit every pair, plan, audit the planned tree again
    python bench/compatibility.py --check                the same on the trees at hand; fails when the table is old
    python bench/compatibility.py --outcome EVENTS --consumer 0.9.0 --provider 0.32.0
                                                         enter a run of `fab extract` that verified itself
    python bench/compatibility.py --extract PYTHON [--provider-path DIR] --consumer 0.3.0 --provider 0.17.1
                                                         real extraction in a venv, compared with transformers

Trees come from ``--trees DIR`` (DIR/<name>-<version>/<package>) or from the package index, cached. The figures are kept
in bench/compatibility.json; the page is made from it. An audit imports nothing; a plan is tried on a copy.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from remoteops import planning, probe, sources
from remoteops.errors import RemoteOpsError

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "compatibility.json"
ENGINES, KILLS = HERE / "engines.json", HERE / "kills.json"
PAGE = HERE.parent / "docs" / "compatibility.md"
CONSUMERS = ("0.3.0", "0.4.0.1")  # 0.4.0 has the same data generation code
FIRST, LAST = "0.11.0", "0.33.0"


def tree(name: str, version: str, trees: Path | None, *, offline: bool) -> sources.Tree | None:
    """The sources of a release; None when they cannot be had."""
    if trees is not None:
        folder = trees / f"{name}-{version}"
        return sources.local_tree(folder, name) if folder.is_dir() else None
    try:
        return sources.cached(f"{name}=={version}") if offline else sources.fetch(f"{name}=={version}")
    except RemoteOpsError:
        return None


def planned(consumer: sources.Tree, provider: sources.Tree, folder: Path) -> tuple[sources.Tree, planning.Plan]:
    """A copy of the consumer with the plan applied; the audits before and after are in the plan."""
    root = Path(consumer.path)
    shutil.copytree(root / consumer.package, folder / consumer.package)
    patched = dataclasses.replace(consumer, path=str(folder))

    def preview(contents: Mapping[str, bytes]) -> dict[str, Any]:
        for file, data in contents.items():
            (folder / file).write_bytes(data)
        return probe.audit_trees(patched, provider)

    document = probe.audit_trees(consumer, provider)
    texts = {file: (root / file).read_bytes() for file in document["files"]}
    return patched, planning.converge(document, texts, preview, always=True)


def pair(consumer: sources.Tree, provider: sources.Tree) -> dict[str, Any]:
    """One pair's record: breaks and risks before, both after, the fixes, and what is left with the reason."""
    with tempfile.TemporaryDirectory() as folder:
        _, plan = planned(consumer, provider, Path(folder))
    before = plan.document
    after = plan.previews[-1] if plan.previews else before
    left = {planning.identity(r.finding): r.why for r in plan.remaining}
    return {
        "breaks": sum(map(planning.breaks, before["findings"])),
        "risks": sum(not planning.breaks(f) for f in before["findings"]),
        "breaks_after": sum(map(planning.breaks, after["findings"])),
        "risks_after": sum(not planning.breaks(f) for f in after["findings"]),
        "fixes": sorted({fix.id for fix in plan.fixes}),
        "risks_left": sorted({f["rule"] for f in after["findings"] if not planning.breaks(f)}),
        "left": sorted(
            {
                left.get(planning.identity(f), f"{f['kind']} {f['symbol']} ({f['detail']})")
                for f in after["findings"]
                if planning.breaks(f)
            }
        ),
    }


def _pair(arguments: tuple[str, str, sources.Tree, sources.Tree]) -> tuple[str, str, dict[str, Any]]:
    consumer, provider, ours, theirs = arguments
    try:
        return consumer, provider, pair(ours, theirs)
    except RemoteOpsError as error:
        return consumer, provider, {"error": error.message}


def audit_all(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """consumer -> provider -> record, for every pair whose trees can be had."""
    offline = options.check and options.trees is None
    providers = options.provider or releases(options, offline=offline)
    ours = {v: tree("speculators", v, options.trees, offline=offline) for v in options.consumer or CONSUMERS}
    theirs = {v: tree("vllm", v, options.trees, offline=offline) for v in providers}
    jobs = [(c, p, a, b) for c, a in ours.items() for p, b in theirs.items() if a is not None and b is not None]
    found: dict[str, dict[str, Any]] = {}
    with concurrent.futures.ProcessPoolExecutor(max_workers=options.jobs) as pool:
        for consumer, provider, record in pool.map(_pair, jobs):
            found.setdefault(consumer, {})[provider] = record
            print(f"speculators {consumer} x vllm {provider}: {record}", file=sys.stderr)
    return found


def releases(options: argparse.Namespace, *, offline: bool) -> list[str]:
    """Final releases of the provider from FIRST to LAST, oldest first."""
    from packaging.version import Version

    if options.trees is not None:
        names = [path.name.removeprefix("vllm-") for path in options.trees.glob("vllm-*")]
    elif offline:
        names = list(next(iter(load()["pairs"].values()), {}))
    else:
        names = sources.releases(f"vllm>={FIRST},<={LAST}")
    return sorted((n for n in names if Version(FIRST) <= Version(n) <= Version(LAST)), key=Version)


def extract(options: argparse.Namespace) -> dict[str, Any]:
    """Plan for one pair as installed, extract with the planned consumer in the venv, compare with transformers."""
    (consumer,) = options.consumer
    ours = tree("speculators", consumer, options.trees, offline=False)
    theirs = sources.local_tree(options.provider_path or site_packages(options.extract), "vllm")
    assert ours is not None
    with tempfile.TemporaryDirectory() as folder:
        patched, plan = planned(ours, theirs, Path(folder))
        if options.bare:
            os.environ["COMPAT_BLOCK_SIZE"] = "32"
            (Path(patched.path) / "speculators" / "__init__.py").write_text("")
        path = os.pathsep.join([patched.path, *([str(options.provider_path)] if options.provider_path else [])])
        env = {
            **os.environ,
            "PYTHONPATH": path,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        done = subprocess.run(
            [options.extract, str(HERE / "compat_extract.py"), str(options.model)],
            env=env,
            stdout=subprocess.PIPE,
            timeout=1800,
            check=False,
        )
    answer: dict[str, Any] = json.loads(done.stdout or b'{"error": "the process died"}')
    return {**answer, "bare": options.bare, "fixes": sorted({fix.id for fix in plan.fixes})}


def site_packages(python: str) -> Path:
    done = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return Path(done.stdout.strip())


def load() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"pairs": {}, "runs": {}}


def proof(run: dict[str, Any] | None) -> str:
    """A cell: how real extraction went."""
    if run is None:
        return ""
    if "error" in run:
        return "fails: " + " ".join(run["error"].split())[:80]
    wrong = sum(s["wrong"] for s in run["scenarios"].values())
    prompts = sum(s["prompts"] for s in run["scenarios"].values())
    worst = max(s["max_relative_error"] for s in run["scenarios"].values())
    note = " (bare)" if run.get("bare") else ""
    note += "".join(f"; {name}: {text.split('.')[0]}" for name, text in run.get("refused", {}).items())
    return f"{prompts - wrong} of {prompts} prompts equal, {worst:.1e}{note}"


def page(results: dict[str, Any]) -> str:
    """docs/compatibility.md."""
    text = [HEAD]
    for consumer, providers in results["pairs"].items():
        text.append(f"## speculators {consumer}\n")
        text.append("| vLLM | breaks | after | risks | after | fixes | extraction on the CPU |")
        text.append("|---|---|---|---|---|---|---|")
        for provider, record in providers.items():
            if "error" in record:
                text.append(f"| {provider} | {record['error']} | | | | | |")
                continue
            run = proof(results["runs"].get(consumer, {}).get(provider))
            figures = [str(record[key]) for key in ("breaks", "breaks_after", "risks", "risks_after")]
            text.append(f"| {' | '.join([provider, *figures, str(len(record['fixes'])), run])} |")
        lines = {
            line: [p for p, r in providers.items() if line in r.get("left", ())]
            for r in providers.values()
            for line in r.get("left", ())
        }
        text += ["", *(f"- Left on {', '.join(where)}: {line}" for line, where in lines.items()), ""]
        risks = sorted({rule for record in providers.values() for rule in record.get("risks_left", ())})
        text += [f"Still a risk after the plan, for some models: {', '.join(risks) or 'nothing'}.", ""]
        fixes: dict[str, list[str]] = {}
        for provider, record in providers.items():
            for fix in record.get("fixes", ()):
                fixes.setdefault(fix, []).append(provider)
        text += [
            "| fix | vLLM |",
            "|---|---|",
            *(f"| {fix} | {span(where, list(providers))} |" for fix, where in sorted(fixes.items())),
            "",
        ]
    text += [
        "## speculators 0.5 and newer",
        "",
        "These talk to vLLM over HTTP and read the files of its own connector; there is nothing to patch. Runs of",
        "`fab extract` with the connector engine, verified by the run itself against transformers:",
        "",
        "| speculators x vLLM | rows | compared | largest relative error |",
        "|---|---|---|---|",
        *(
            f"| {pair} | {r['rows']} | {r['compared_rows']} | {r['max_relative_error']:.1e} |"
            for pair, r in results.get("connector", {}).items()
        ),
        "",
        *engines(),
    ]
    return "\n".join(text)


def engines() -> list[str]:
    """The section of bench/engines.json and bench/kills.json."""
    runs = json.loads(ENGINES.read_text()) if ENGINES.exists() else []
    text = [ENGINES_HEAD]
    text.append("| engine | vLLM | model | ranks | format | prompts | tokens | preemptions | largest relative error |")
    text.append("|---|---|---|---|---|---|---|---|---|")
    for r in runs:
        notes = [f"speculators {r['speculators']}"] if r["speculators"] else []
        notes += ["runner completed"] if r.get("completed_runner") else []
        name = f"{r['engine']} ({', '.join(notes)})" if notes else r["engine"]
        cells = [name, r["vllm"], r["shape"], r["tensor_parallel"], r["format"], f"{r['compared']} of {r['rows']}"]
        cells.append(r["tokens"])
        text.append(f"| {' | '.join(map(str, cells))} | {r['preemptions']} | {r['max_relative_error']:.1e} |")
    kills = json.loads(KILLS.read_text()) if KILLS.exists() else []
    if not kills:
        return [*text, ""]
    text += ["", KILLS_HEAD]
    text.append("| engine, format, provider | moments | what | files compared | cut short | ended as undisturbed |")
    text.append("|---|---|---|---|---|---|")
    for r in kills:
        what = ", ".join(f"{number} {kind}" for kind, number in r["kinds"].items())
        cells = [f"{r['engine']}, {r['format']}, vLLM {r['vllm']}"]
        cells += [f"{r['moments']} ({r['while_loading']} while loading)", what]
        worst = r["largest_difference"]
        same = "yes, " if r["as_undisturbed"] else "NO, "
        same += f"values within {worst:.1e}" if worst else "to the last bit"
        text.append(f"| {' | '.join(cells)} | {r['files_compared']} | {len(r['partial_files'])} | {same} |")
    return [*text, ""]


def span(where: list[str], everything: list[str]) -> str:
    """Runs of neighbouring releases as "first to last"."""
    runs: list[list[str]] = []
    for version in where:
        at = everything.index(version)
        if runs and everything.index(runs[-1][-1]) == at - 1:
            runs[-1].append(version)
        else:
            runs.append([version])
    return ", ".join(r[0] if len(r) == 1 else f"{r[0]} to {r[-1]}" for r in runs)


HEAD = """\
# What works with what

Made by `bench/compatibility.py`; the figures are in `bench/compatibility.json`. Do not edit.

*breaks*: uses of vLLM that fail for certain, as `fab probe` finds them in the two source trees. *risks*: findings that
depend on the model or the hardware, or that give wrong data without an error. *after*: the same audit of the consumer
with the plan of `fab patch` applied. Risks that are left speak of single model classes (`fab probe --model CLASS`
judges one); a plan can raise their number, because a name that is right for most models is missing in some.

*extraction on the CPU*: a real run in float32 with the stock generator of the patched consumer, 115 prompts (mixed
lengths, one token, shared prefixes, batches above the token budget, more prompts than slots, the same batch twice;
each result in the order given, and its layers in the order asked for: 7, 1, 5, 3, on 0.15.0 ascending) against
transformers. The number is the largest relative error: the largest difference in a layer over the layer's largest
value. Empty: no wheel of that release was run.

(bare): run with an empty `speculators/__init__.py` and cache blocks of 32 tokens. The rest of these releases of
speculators does not import with transformers 5, which these releases of vLLM bring along, so `fab patch` takes its
patch back there and says so: that is no matter of vLLM's interface. Blocks of 16 are refused by vLLM's CPU attention
alone.

speculators 0.4.0 has the same data generation code as 0.4.0.1.

Plans come from the audit of the installed sources; a release number decides nothing.
"""

ENGINES_HEAD = """\
## The engines of remoteops on the CPU

Made by `bench/engines.py`, float32, every prompt recomputed with transformers: a mix of 1 to 1600 tokens
(max_model_len - 1; 1501 where 13493 tokens are told) with shared prefixes and twins under a budget of 512 tokens a
step, at most 64 of one prompt a step, and so small a KV cache that vLLM preempts (its own count is shown); then 64
prompts in one step; then one alone. The number is the largest of |engine - transformers| / |transformers| over a
prompt's state at a layer. `generator` runs with the consumer as `fab patch` leaves it. *runner completed*: the CPU
runner of vLLM 0.18 to 0.21 supports no extract_hidden_states; what its GPU runner does there is added for the trial
(`bench/cpu_runner.py`). *bare* is told above.

A model that also sees (LLaVA's shape: a Llama under `text_config` beside a vision tower, no image processor in the
folder) ran with `generator` on vLLM 0.17.1 as text only (`language_model_only`, which both engines ask for where vLLM
has it): eight rows, 1.1e-06.
"""
KILLS_HEAD = """\
Made by `bench/kills.py`: SIGKILL of a worker, the engine or the supervisor, or a disk filled to the last byte, at
random moments of runs on real vLLM. At each moment every file under a final name is compared with the undisturbed
run's (token ids equal, values within 1e-5), and so is the result of the last resume.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trees", type=Path)
    parser.add_argument("--consumer", action="append")
    parser.add_argument("--provider", action="append")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--extract", metavar="PYTHON")
    parser.add_argument("--outcome", type=Path, metavar="EVENTS")
    parser.add_argument("--provider-path", type=Path)
    parser.add_argument("--model", type=Path, default=Path(tempfile.gettempdir()) / "remoteops-compat-model")
    parser.add_argument("--bare", action="store_true", help="with an empty speculators/__init__.py")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if options.extract:
        answer = extract(options)
        results = load()
        results["runs"].setdefault(options.consumer[0], {})[options.provider[0]] = answer
        print(proof(answer))
    elif options.outcome:
        results = load()
        results.setdefault("connector", {})[f"{options.consumer[0]} x {options.provider[0]}"] = outcome(options.outcome)
    elif options.check:
        return check(load(), audit_all(options))
    else:
        found = audit_all(options)
        results = load()  # again: extractions may have been entered meanwhile
        for consumer, providers in found.items():
            results["pairs"][consumer] = in_order({**results["pairs"].get(consumer, {}), **providers})
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(results))
    return 0


def outcome(events: Path) -> dict[str, Any]:
    """What a finished run says of itself in events.jsonl: rows, tokens, and the comparison with transformers."""
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    (end,) = [line for line in lines if line["event"] == "outcome"]
    report = end["summary"]["report"]
    kept = ("rows", "tokens", "dtype", "layers")
    return {
        **{key: report[key] for key in kept},
        "ok": report["ok"],
        "compared_rows": len(report["reference"]["rows"]),
        "max_relative_error": report["reference"]["max_relative_error"],
    }


def check(results: dict[str, Any], found: dict[str, dict[str, Any]]) -> int:
    """1 when the page is not what the figures give, or when a pair's breaks are not those that it tells."""
    stale = [] if PAGE.read_text() == page(results) else [f"{PAGE.name} is not what {RESULTS.name} gives"]
    for consumer, providers in found.items():
        for provider, record in providers.items():
            told = results["pairs"].get(consumer, {}).get(provider, {})
            stale += [
                f"speculators {consumer} x vllm {provider}: {key} is {record.get(key)}, the page tells {told.get(key)}"
                for key in ("breaks", "breaks_after", "left", "error")
                if record.get(key) != told.get(key)
            ]
    print("\n".join(stale) or f"{sum(map(len, found.values()))} pairs as documented")
    return 1 if stale else 0


def in_order(providers: dict[str, Any]) -> dict[str, Any]:
    from packaging.version import Version

    return {version: providers[version] for version in sorted(providers, key=Version)}


if __name__ == "__main__":
    sys.exit(main())
