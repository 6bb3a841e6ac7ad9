"""A tiny model of the same architecture, so that a whole run can be tried in a minute: the real config cut down, the
real tokenizer, random weights.

What is kept is what code paths depend on: the class, head sizes, attention kind, expert routing, vocabulary,
positions, layer patterns. What shrinks is width and depth. A quantised checkpoint is rehearsed unquantised; that part
is not rehearsed, and the notes say so. ``<venv>/bin/python -m remoteops.agent.extraction.rehearsal MODEL TARGET TP
LAYERS`` prints one JSON object.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from typing import Any, Dict, List, Mapping, Tuple

from remoteops.agent import modelinfo
from remoteops.agent.rundir import write_json

HEADS = 4
EXPERTS = 8
BLOCK = 128  # widths stay multiples of this times TP: kernels tile by it
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")
_FEEDS = ("intermediate_size", "n_inner", "ffn_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_KEPT_OUT = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")


def shrink(config: Mapping[str, Any], tensor_parallel: int, layers: int) -> Tuple[Dict[str, Any], List[str]]:
    """The config cut to ``layers`` decoder layers that ``tensor_parallel`` GPUs can share, and notes on what that
    leaves out."""
    small = copy.deepcopy(dict(config))
    notes: List[str] = []
    text = small
    for name in modelinfo.NESTED:
        inner = small.get(name)
        if isinstance(inner, dict) and any(key in inner for key in _DEPTHS):
            text = inner
            break
    _shrink_text(text, tensor_parallel, layers)
    if text is not small:
        for key in (*_WIDTHS, *_DEPTHS):  # some configs repeat them at the top
            if key in small and key in text:
                small[key] = text[key]
    for name in ("vision_config", "audio_config", "visual"):
        if isinstance(small.get(name), dict):
            for key in (*_DEPTHS, "depth", "vt_num_hidden_layers"):
                if isinstance(small[name].get(key), int):
                    small[name][key] = min(2, small[name][key])
            for key in ("out_hidden_size", "text_hidden_size", "projection_dim", "mm_hidden_size_out"):
                if small[name].get(key) == modelinfo.first(dict(config.get(_nested(config)) or config), _WIDTHS):
                    small[name][key] = text[_named(text, _WIDTHS)]
    for owner in (small, text):
        if owner.pop("quantization_config", None) is not None:
            notes.append("the checkpoint is quantised; the rehearsal runs without that")
        owner.pop("compression_config", None)
    return small, notes


def make(model: str, target: str, tensor_parallel: int, layers: int, seed: int = 0) -> Dict[str, Any]:
    """Write the tiny model into ``target``. Returns {"model","weights": "random"|"dummy","notes","layers"}.

    "dummy": transformers does not know the architecture, the engine must invent the weights (load_format dummy) and
    rows cannot be recomputed. Raises AgentError(MissingModel).
    """
    folder = modelinfo.find(model)
    modelinfo.read(folder)
    with open(os.path.join(folder, "config.json"), "rb") as stream:
        config, notes = shrink(json.load(stream), tensor_parallel, layers)
    temporary = target + ".part"
    shutil.rmtree(temporary, ignore_errors=True)
    os.makedirs(temporary)
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if os.path.isfile(path) and not name.endswith((*_KEPT_OUT, ".index.json")) and name != "config.json":
            shutil.copyfile(path, os.path.join(temporary, name))
    write_json(os.path.join(temporary, "config.json"), config)
    weights = "random"
    try:
        _weights(temporary, seed)
    except Exception as error:  # noqa: BLE001 - any model the library cannot build; the engine can still invent weights
        weights = "dummy"
        notes.append(
            "weights are the engine's dummies (transformers: %s: %s)" % (type(error).__name__, str(error)[:200])
        )
        write_json(os.path.join(temporary, "config.json"), config)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(temporary, target)
    return {"model": target, "weights": weights, "notes": notes, "layers": layers}


def _shrink_text(text: Dict[str, Any], tensor_parallel: int, layers: int) -> None:
    depth, width = _named(text, _DEPTHS), _named(text, _WIDTHS)
    before = int(text[depth])
    text[depth] = min(layers, before)
    for key, value in list(text.items()):
        if isinstance(value, list) and len(value) == before:  # a pattern over the layers: keep each kind it holds
            text[key] = _pattern(value, text[depth])
    heads_key = next((key for key in ("num_attention_heads", "n_head", "n_heads", "num_heads") if key in text), None)
    if heads_key is not None:
        heads = int(text[heads_key])
        groups = int(text.get("num_key_value_heads") or heads)
        size = int(text.get("head_dim") or int(text[width]) // heads)
        fewer = min(heads, max(HEADS, tensor_parallel))
        text[heads_key] = fewer
        if text.get("num_key_value_heads"):
            text["num_key_value_heads"] = (
                fewer
                if groups == heads
                else max(1, min(groups, max(tensor_parallel, fewer // max(1, heads // groups))))
            )
        if "kv_lora_rank" not in text:
            text[width] = fewer * size if "head_dim" not in text else max(fewer * size, BLOCK)
        else:
            text[width] = max(4 * BLOCK, min(int(text[width]), BLOCK * tensor_parallel))
    for key in _FEEDS:
        if isinstance(text.get(key), int):
            text[key] = min(text[key], max(2 * text[width], BLOCK * tensor_parallel))
    for key in _EXPERTS:
        if isinstance(text.get(key), int) and text[key] > 0:
            groups = int(text.get("n_group") or 1)
            text[key] = min(text[key], max(EXPERTS, 2 * groups, int(text.get("num_experts_per_tok") or 1)))
    if isinstance(text.get("first_k_dense_replace"), int):
        text["first_k_dense_replace"] = min(text["first_k_dense_replace"], 1)
    if text.get("num_nextn_predict_layers"):
        text["num_nextn_predict_layers"] = 0
    if isinstance(text.get("max_window_layers"), int):
        text["max_window_layers"] = min(text["max_window_layers"], text[depth])


def _pattern(values: List[Any], count: int) -> List[Any]:
    """``count`` entries that hold every kind of the pattern where they can: the last kinds come last, as they do in
    the model."""
    kept = list(values[:count])
    missing = [one for one in values if one not in kept]
    unique: List[Any] = []
    for one in missing:
        if one not in unique:
            unique.append(one)
    for offset, one in enumerate(reversed(unique[:count])):
        kept[count - 1 - offset] = one
    return kept


def _weights(folder: str, seed: int) -> None:
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(seed)
    try:
        model = transformers.AutoModelForCausalLM.from_config(config)
    except ValueError:
        model = transformers.AutoModelForImageTextToText.from_config(config)
    kind = str(getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or "bfloat16").replace(
        "torch.", ""
    )
    model.to(getattr(torch, kind, torch.bfloat16)).save_pretrained(folder)


def _nested(config: Mapping[str, Any]) -> str:
    return next((name for name in modelinfo.NESTED if isinstance(config.get(name), dict)), "")


def _named(config: Mapping[str, Any], names: Tuple[str, ...]) -> str:
    return next(name for name in names if isinstance(config.get(name), int))


def main(argv: List[str]) -> int:
    from remoteops.agent.protocol import AgentError

    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        json.dump(make(argv[0], argv[1], int(argv[2]), int(argv[3])), answer)
    except AgentError as error:
        json.dump({"error": error.fields()}, answer)
    answer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
