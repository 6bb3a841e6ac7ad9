"""Are the engines right? Every prompt of a run on real vLLM is recomputed with transformers.

    python bench/engines.py --python PYTHON --engine connector --shape qwen3
    python bench/engines.py --python PYTHON --provider-path WHEEL --consumer 0.3.0 --trees DIR --engine generator

The second form puts an unpacked vLLM (and the consumer, with the plan of ``fab patch`` applied) before what the venv
holds. Each prompt goes through one engine process: first a mix (one token to longer than the token budget, shared
prefixes, the same prompt twice) under a KV cache so small and chunks so short that vLLM preempts, then 64 prompts in
one step, then one alone. float32. Results are kept in bench/engines.json, of which bench/compatibility.py makes its
page.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "engines.json"
LAYERS = 8
VOCABULARY = 1024
LONGEST = 1600  # max_length; vLLM keeps one position more, and takes no longer prompt
BLOCK, BLOCKS, BUDGET, PIECE = 32, 64, 512, 64  # tokens, blocks, tokens a step, tokens of one prompt in a step
BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_attention_heads": 2, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 2,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 32,
            "v_head_dim": 64,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
    ),
}


def prompts(seed: int = 7) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """(a mix, 64 that fit one step, one alone)."""
    draw = random.Random(seed)

    def prompt(length: int) -> list[int]:
        return [draw.randrange(4, VOCABULARY) for _ in range(length)]

    prefix, twice = prompt(64), prompt(96)
    shared = [prefix, *[prefix + prompt(extra) for extra in (1, 11, 21, 31, 300)], twice, list(twice)]
    mixed = [prompt(length) for length in [3, 17, 200, 64, 500, 1, 33, 400, 128] * 4]
    long = [prompt(length) for length in (1500, 600, 600, 700, 600, 650, 600, LONGEST)]
    return [*long, *mixed, *shared], [prompt(1 + i % 8) for i in range(64)], [prompt(130)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="the interpreter of a venv with vLLM")
    parser.add_argument("--provider-path", type=Path, help="an unpacked vLLM wheel, put before the venv's own")
    parser.add_argument("--consumer", help="release of speculators, planned for this vLLM (generator engines)")
    parser.add_argument("--trees", type=Path, help="folder with <name>-<version>/<package> (else: the cache)")
    parser.add_argument("--bare", action="store_true", help="with an empty speculators/__init__.py")
    parser.add_argument("--engine", default="connector", choices=["connector", "generator"])
    parser.add_argument("--shape", default="llama", choices=sorted(SHAPES))
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--format", default="safetensors", choices=["safetensors", "speculators-v1"])
    parser.add_argument("--layers", type=json.loads, default=[0, 2, 5, LAYERS])
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "remoteops-engines")
    parser.add_argument("--lock", default="", help="a file that is locked while vLLM runs")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.child)
    record = measure(options)
    text = json.dumps(record)
    print(text)
    if "error" not in record:
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
        keys = ("engine", "vllm", "shape", "tensor_parallel", "format")
        results = [one for one in results if any(one[key] != record[key] for key in keys)]
        results.append(record)
        results.sort(key=lambda one: [_ordered(one[key]) for key in keys])
        RESULTS.write_text("[\n" + ",\n".join(json.dumps(one, sort_keys=True) for one in results) + "\n]\n")
    return int("error" in record or record["max_relative_error"] >= 1e-5)


def _ordered(value: Any) -> tuple[Any, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in str(value).split(".")), str(value)  # type: ignore[return-value]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One engine in a process of its own; {"error", "log"} when it gave no answer."""
    options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        path = [str(ROOT), str(ROOT / "bench")]
        if options.consumer:
            path.insert(0, planned(options, Path(folder)))
        if options.provider_path:
            path.insert(0, str(options.provider_path))
        job = {name: getattr(options, name) for name in ("engine", "shape", "tensor_parallel", "format", "layers")}
        job.update(work=str(options.work), folder=folder, bare=options.bare)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        log = options.work / f"last-{os.getpid()}.log"
        with log.open("wb") as stream, locked(options.lock):
            done = subprocess.run(
                [options.python, __file__, "--child", json.dumps(job)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=stream,
                timeout=900,
                check=False,
            )
    lines = done.stdout.decode().strip().splitlines()
    if done.returncode or not lines:
        return {**job, "error": f"status {done.returncode}", "log": log.read_text(errors="replace")[-2500:]}
    return dict(json.loads(lines[-1]))


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold ``path`` locked ("" for none): several of these on one machine, one vLLM at a time."""
    if not path:
        yield
        return
    with Path(path).open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def planned(options: argparse.Namespace, folder: Path) -> str:
    """The consumer as ``fab patch`` would leave it for this vLLM; the folder that holds it."""
    sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
    import compatibility

    from remoteops import sources

    ours = compatibility.tree("speculators", options.consumer, options.trees, offline=False)
    assert ours is not None, f"no sources of speculators {options.consumer}"
    provider = options.provider_path or compatibility.site_packages(options.python)
    tree, _ = compatibility.planned(ours, sources.local_tree(provider, "vllm"), folder / "consumer")
    if options.bare:
        (Path(tree.path) / "speculators" / "__init__.py").write_text("")
    return str(tree.path)


def build(folder: Path, shape: str) -> None:
    """A small model with hot random weights, so that tokens differ clearly, and a tokenizer of one word a token."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    name, arguments = SHAPES[shape]
    config = getattr(transformers, name + "Config")(**BASE, **arguments)
    model = getattr(transformers, name + "ForCausalLM")(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(6)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="t1", eos_token="t2", pad_token="t3"
    ).save_pretrained(folder)


def child(job: dict[str, Any]) -> int:
    """Inside the venv: run, recompute, one JSON line on the real stdout."""
    channel = os.dup(1)
    os.dup2(2, 1)
    try:
        answer = json.dumps(run(job)).encode()
        status = 0
    except BaseException:  # noqa: BLE001 - the log gets it, the caller an empty answer
        import traceback

        traceback.print_exc()
        answer, status = b"", 1
    os.write(channel, answer + b"\n")
    os._exit(status)


def run(job: dict[str, Any]) -> dict[str, Any]:
    import importlib

    import transformers

    from remoteops.agent import modelinfo
    from remoteops.agent.extraction import check, hostkind, output
    from remoteops.agent.extraction.__main__ import ENGINES, QUIET
    from remoteops.agent.extraction.arena import memory_for
    from remoteops.agent.extraction.dataset import Loaded, Row
    from remoteops.agent.extraction.formats import Store
    from remoteops.agent.extraction.reporting import Reporter
    from remoteops.agent.rundir import RunDir

    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    model = Path(job["work"]) / f"{job['shape']}-{transformers.__version__.split('.')[0]}"
    if not (model / "tokenizer.json").exists():
        build(model, job["shape"])
    parts = prompts()
    rows = [Row(index, ids, [1] * len(ids)) for index, ids in enumerate(ids for part in parts for ids in part)]
    out, run_dir = Path(job["folder"]) / "out", Path(job["folder"]) / "run"
    run_dir.mkdir()
    wanted: dict[str, Any] = {
        "model": str(model),
        "dataset": "generated",
        "layers": job["layers"],
        "dtype": "float32",
        "tensor_parallel": job["tensor_parallel"],
        "format": job["format"],
        "samples": None,
        "max_length": LONGEST,
        "max_batched_tokens": BUDGET,
        "out": str(out),
        "engine_args": small_cache(job["engine"], job["tensor_parallel"]),
        "disk_reserve": 1 << 20,
        "seed": 0,
    }
    shape = modelinfo.read(str(model))
    hostkind.adapt(wanted, shape, job["engine"])
    output.prepare(wanted, Loaded(rows, {"dataset_sha256": "generated"}), shape)
    module, _, kind = ENGINES[job["engine"]].partition(":")
    began = time.monotonic()
    memory = memory_for([len(row.input_ids) for row in rows], 4 * len(job["layers"]) * shape.hidden_size)
    engine = getattr(importlib.import_module(module), kind)(
        wanted, Reporter(RunDir(str(run_dir))), memory, hostkind.writer_threads()
    )
    loaded = time.monotonic()
    preemptions = watch(engine)
    store = Store(str(out), job["format"], job["layers"], job["engine"], hidden_size=shape.hidden_size)
    at = 0
    for part in parts:
        engine.run(rows[at : at + len(part)], store)
        at += len(part)
    counted = preemptions()
    computed = time.monotonic()
    report = check.check(str(out), None, reference=len(rows), job=wanted)
    if not report["ok"]:
        raise RuntimeError(json.dumps(report, default=str)[:3000])
    found = report["reference"]
    versions = output.versions()
    engine.close()
    return {
        "engine": job["engine"],
        "vllm": __import__("vllm").__version__.split("+")[0],
        "torch": versions["torch"],
        "transformers": versions["transformers"],
        "speculators": None if job["engine"] == "connector" else __import__("speculators.version").version.version
        if not job["bare"]
        else "bare",
        "shape": job["shape"],
        "tensor_parallel": job["tensor_parallel"],
        "format": job["format"],
        "layers": job["layers"],
        "rows": len(rows),
        "compared": len(found["rows"]),
        "tokens": found["tokens"],
        "preemptions": counted,
        "max_relative_error": found["max_relative_error"],
        "worst_token_error": max(one["worst_token_error"] for one in found["layers"].values()),
        "completed_runner": "worker_extension_cls" in wanted["engine_args"],
        "seconds": {"load": round(loaded - began, 1), "extract": round(computed - loaded, 1)},
    }


def small_cache(engine: str, ranks: int) -> dict[str, Any]:
    """Arguments under which vLLM has to preempt: many prompts begun, short chunks, hardly any blocks, and no promise
    that a prompt which begins has room to its end (newer releases make one)."""
    from vllm.config import SchedulerConfig

    from remoteops.agent.extraction.library import parameters

    chosen: dict[str, Any] = {
        "block_size": BLOCK,
        "num_gpu_blocks_override": BLOCKS,
        "long_prefill_token_threshold": PIECE,
    }
    if "scheduler_reserve_full_isl" in parameters(SchedulerConfig):
        chosen["scheduler_reserve_full_isl"] = False
    if engine == "connector":
        chosen["disable_log_stats"] = False  # its counters are the proof
        if ranks == 1:  # everything in one process: two imports of vLLM less
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            chosen["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
        import cpu_runner

        if cpu_runner.needed():
            chosen["worker_extension_cls"] = "cpu_runner.Extension"
    return chosen


def watch(engine: Any) -> Any:
    """A function that gives how often vLLM itself says that it preempted a request."""
    scheduler = getattr(engine, "_scheduler", None)
    if scheduler is None:

        def by_metrics() -> int:
            found = {one.name: one for one in engine._llm.get_metrics()}
            return int(found["vllm:num_preemptions"].value)

        return by_metrics
    counts: dict[str, int] = {}
    finish = scheduler.finish_requests

    def finished(requests: Any, *args: Any, **kwargs: Any) -> Any:
        for name in [requests] if isinstance(requests, str) else requests:
            counts[name] = scheduler.requests[name].num_preemptions
        return finish(requests, *args, **kwargs)

    scheduler.finish_requests = finished
    return lambda: sum(counts.values())


if __name__ == "__main__":
    sys.exit(main())
