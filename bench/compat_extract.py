"""Runs inside a host's venv: extracts with the (patched) stock generator and compares with transformers. One JSON line.

    python compat_extract.py MODEL_DIR

The scenarios are the ones under which a generator that merely runs gives wrong rows: mixed lengths, shared prefixes, a
batch above max_num_batched_tokens, more prompts than max_num_seqs, the same batch twice, prompts of one token, layers
asked for in no order.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

LAYERS = [7, 1, 5, 3]  # the generator's own convention: id k is the output of layer k; 7 is the last of 8. In no order
VOCABULARY = 512


def build(folder: Path) -> None:
    """A llama of 8 layers with random weights (fixed seed, float32), and a tokenizer with one word a token id."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        torch_dtype="float32",
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.mul_(6.0)  # tokens must differ clearly, or rows of another prompt would pass
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="w1", eos_token="w2", unk_token="w0", pad_token="w3"
    ).save_pretrained(folder)


def scenarios() -> dict[str, list[list[list[int]]]]:
    """Name -> batches, each a list of prompts."""
    rng = random.Random(7)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(4, VOCABULARY) for _ in range(length)]

    prefix = prompt(64)
    shared = [prefix + prompt(n) for n in (50, 30, 30)] + [prefix]
    mixed = [prompt(n) for n in (1, 5, 17, 33, 300, 2, 64, 15, 16)]
    long = [prompt(n) for n in (900, 1740, 1200, 1620, 1000, 1300, 1620, 1740)]
    return {
        "short": [[prompt(7)]],
        "mixed": [mixed, mixed],
        "shared-prefix": [shared, shared[::-1]],
        "over-budget": [long, [prompt(300) for _ in range(40)]],
        "many": [[prompt(20 + i) for i in range(40)]],
    }


def reference(model: Any, prompt: list[int]) -> list[Any]:
    """Outputs of LAYERS from transformers (hooks: the last layer's own output is in no entry of hidden_states)."""
    import torch

    kept: dict[int, Any] = {}
    handles = [
        model.model.layers[i].register_forward_hook(
            lambda module, args, output, i=i: kept.__setitem__(i, output[0] if isinstance(output, tuple) else output)
        )
        for i in LAYERS
    ]
    with torch.no_grad():
        model(torch.tensor([prompt]), use_cache=False)
    for handle in handles:
        handle.remove()
    return [kept[i].reshape(len(prompt), -1) for i in LAYERS]


def references(folder: Path) -> dict[str, list[list[list[Any]]]]:
    """Scenario -> batch -> prompt -> layers, computed with transformers once and kept beside the model."""
    import torch
    from transformers import AutoModelForCausalLM

    place = folder / f"reference-{'-'.join(map(str, LAYERS))}.pt"
    if not place.exists():
        model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
        found = {n: [[reference(model, p) for p in batch] for batch in batches] for n, batches in scenarios().items()}
        torch.save(found, place.with_suffix(".part"))
        place.with_suffix(".part").replace(place)
    kept: dict[str, list[list[list[Any]]]] = torch.load(place)
    return kept


def compare(results: list[Any], prompts: list[list[int]], wanted: list[list[Any]]) -> tuple[int, float]:
    """(prompts that are wrong, largest relative error of the right ones): error = |a-b| / max|b|, over a layer."""
    wrong, worst = 0, 0.0
    if len(results) != len(prompts):
        return len(prompts), 0.0
    for result, prompt, theirs in zip(results, prompts, wanted, strict=True):
        ours = result["hidden_states"]
        fits = list(result["input_ids"]) == prompt and len(ours) == len(theirs)
        fits = fits and all(a.shape == b.shape for a, b in zip(ours, theirs, strict=True))
        error = 1.0
        if fits:
            error = max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))
        if error > 1e-3:
            wrong += 1
        else:
            worst = max(worst, error)
    return wrong, worst


def main(folder: Path) -> dict[str, Any]:
    import torch

    torch.cuda.mem_get_info = lambda *a: (4 << 30, 8 << 30)  # the CPU has no such call
    if not (folder / "config.json").exists():
        build(folder)
    known = references(folder)
    import speculators.data_generation.vllm_hidden_states_generator as stock
    import vllm.config

    model_config = vllm.config.ModelConfig
    stock.ModelConfig = lambda **kw: model_config(**{**kw, "dtype": "float32"})  # "auto" would round to bfloat16
    if hasattr(stock, "mem_get_info"):
        stock.mem_get_info = torch.cuda.mem_get_info
    if os.environ.get("COMPAT_BLOCK_SIZE"):
        stock.VLLM_BLOCK_SIZE = int(os.environ["COMPAT_BLOCK_SIZE"])  # newer CPU attention takes multiples of 32 only
    started = time.monotonic()
    generator = stock.VllmHiddenStatesGenerator(str(folder), layer_ids=list(LAYERS), max_model_len=2048)
    loaded = time.monotonic() - started
    report: dict[str, Any] = {}
    scenarios_done: dict[str, Any] = {}
    for name, batches in scenarios().items():
        wrong, worst, total = 0, 0.0, 0
        for batch, wanted in zip(batches, known[name], strict=True):
            total += len(batch)
            try:
                bad, error = compare(generator.generate(batch), batch, wanted)
            except RuntimeError as refusal:  # told, not silent: the batch counts as wrong, the others still count
                report.setdefault("refused", {})[name] = str(refusal)[:120]
                bad, error = len(batch), 0.0
            wrong, worst = wrong + bad, max(worst, error)
        scenarios_done[name] = {"prompts": total, "wrong": wrong, "max_relative_error": worst}
    return {"load_seconds": round(loaded, 1), "scenarios": scenarios_done, **report}


if __name__ == "__main__":
    channel = os.dup(1)
    os.dup2(2, 1)
    try:
        answer = main(Path(sys.argv[1]))
    except BaseException as error:  # noqa: BLE001 - the answer of a pair that does not work is its error
        answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        if os.environ.get("COMPAT_TRACE"):
            import traceback

            traceback.print_exc()
    os.write(channel, (json.dumps(answer) + "\n").encode())
    os._exit(0)
