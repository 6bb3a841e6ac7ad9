"""What a model folder says about itself, read from its files alone (no framework, no weights loaded)."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any, Dict, List, Mapping, NamedTuple, Optional

from remoteops.agent.protocol import AgentError

DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_LENGTH = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


class Shape(NamedTuple):
    """The sizes an extraction needs. ``dtype`` is the checkpoint's, or None when config.json does not say."""

    folder: str
    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_length: Optional[int]
    dtype: Optional[str]
    nested: str
    remote_code: bool
    weight_bytes: int
    missing_weights: List[str]


def find(model: str, env: Optional[Mapping[str, str]] = None) -> str:
    """The folder of a model given as a path, or as an id in the host's Hugging Face cache.

    Raises AgentError(MissingModel) naming every place that was looked at.
    """
    env = os.environ if env is None else env
    path = os.path.expanduser(model)
    tried = [path]
    if os.path.isdir(path):
        return os.path.abspath(path)
    looks_like_id = not os.path.isabs(path) and not model.startswith((".", "~")) and 0 < model.count("/") < 2
    if looks_like_id:
        home = env.get("HF_HOME") or os.path.join(
            env.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
        )
        hub = os.path.expanduser(
            env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
        )
        base = os.path.join(hub, "models--" + model.replace("/", "--"))
        tried.append(base)
        revision = _text(os.path.join(base, "refs", "main"))
        snapshots = os.path.join(base, "snapshots")
        names = [revision] if revision else (sorted(os.listdir(snapshots)) if os.path.isdir(snapshots) else [])
        for name in reversed(names):
            if os.path.isfile(os.path.join(snapshots, name, "config.json")):
                return os.path.join(snapshots, name)
    raise AgentError(
        "MissingModel",
        "no model folder %s" % model,
        tried="; ".join(tried),
        hint="set `model` of the host's workload to a folder on the host, or download it there first",
    )


def read(folder: str) -> Shape:
    """Sizes from config.json, also where they lie in a nested text_config (Kimi-K2.5 and other multimodal models).

    Raises AgentError(MissingModel) for a folder without a readable config.json or without the sizes.
    """
    path = os.path.join(folder, "config.json")
    try:
        with open(path, "rb") as stream:
            config = json.load(stream)
    except OSError as error:
        raise AgentError(
            "MissingModel",
            "no readable config.json in %s" % folder,
            tried=str(error),
            hint="the folder of a Hugging Face checkpoint has one; is the download complete?",
        ) from None
    except ValueError as error:
        raise AgentError("MissingModel", "%s is no JSON: %s" % (path, error), hint="download the model again") from None
    nested, text = "", config
    for name in NESTED:
        inner = config.get(name)
        if isinstance(inner, dict) and first(inner, _LAYERS) is not None:
            nested, text = name, inner
            break
    layers, hidden = first(text, _LAYERS), first(text, _HIDDEN)
    if layers is None or hidden is None:
        raise AgentError(
            "MissingModel",
            "%s names no number of layers or no hidden size" % path,
            tried="keys %s and %s, also in %s" % (", ".join(_LAYERS), ", ".join(_HIDDEN), ", ".join(NESTED)),
            hint="is this a language model's folder?",
        )
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    weights, missing = _weights(folder)
    architectures = config.get("architectures") or text.get("architectures") or []
    return Shape(
        folder=folder,
        architecture=str(architectures[0]) if architectures else "",
        model_type=str(config.get("model_type", "")),
        num_layers=layers,
        hidden_size=hidden,
        vocab_size=first(text, ("vocab_size",)) or first(config, ("vocab_size",)) or 0,
        max_length=_max_length(text),
        dtype=str(dtype).replace("torch.", "") if dtype else None,
        nested=nested,
        remote_code=bool(config.get("auto_map")),
        weight_bytes=sum(weights.values()),
        missing_weights=missing,
    )


def stored_dtype(requested: str, shape: Shape) -> str:
    """The dtype states will have on disk. ``auto`` is what vLLM makes of the checkpoint: float32 becomes bfloat16,
    unknown too."""
    if requested and requested != "auto":
        return {"half": "float16", "float": "float32"}.get(requested, requested)
    return shape.dtype if shape.dtype in ("float16", "bfloat16") else "bfloat16"


def fingerprint(folder: str) -> str:
    """A hash of config.json and of 64 KiB from the start, middle and end of each weight file.

    It changes when the model is exchanged or fine-tuned; reading half a terabyte to know that would take minutes.
    """
    digest = hashlib.sha256()
    with open(os.path.join(folder, "config.json"), "rb") as stream:
        digest.update(stream.read())
    weights, _ = _weights(folder)
    for name in sorted(weights):
        size = weights[name]
        digest.update(("%s %d\n" % (name, size)).encode("utf-8", "surrogateescape"))
        with open(os.path.join(folder, name), "rb") as stream:
            for offset in (0, size // 2, max(0, size - 65536)):
                stream.seek(offset)
                digest.update(stream.read(65536))
    return digest.hexdigest()


def _weights(folder: str) -> tuple[Dict[str, int], List[str]]:
    """Weight files with their bytes (safetensors alone where there are any), and the shards an index names but the
    folder lacks."""
    found: Dict[str, int] = {}
    for entry in os.scandir(folder):
        if entry.name.endswith(_WEIGHTS) and entry.is_file():
            found[entry.name] = entry.stat().st_size
    if any(name.endswith(".safetensors") for name in found):
        found = {name: size for name, size in found.items() if name.endswith(".safetensors")}
    missing = []
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        try:
            with open(os.path.join(folder, index), "rb") as stream:
                named = set(json.load(stream).get("weight_map", {}).values())
        except (OSError, ValueError, AttributeError):
            continue
        missing = sorted(str(name) for name in named if not os.path.isfile(os.path.join(folder, str(name))))
        break
    return found, missing


def first(config: Mapping[str, Any], names: tuple[str, ...]) -> Optional[int]:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _max_length(config: Mapping[str, Any]) -> Optional[int]:
    """Positions the model was made for. A rope factor multiplies them unless the original length is named beside it
    (then max_position_embeddings is already the extended one), which is how vLLM derives its own limit."""
    length = first(config, _LENGTH)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    factor = rope.get("factor") if isinstance(rope, dict) else None
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
    if (
        length
        and isinstance(factor, (int, float))
        and factor > 1
        and kind not in ("llama3", "longrope", "su", "mrope", "default")
    ):
        original = rope.get("original_max_position_embeddings")
        return int((original or length) * factor)
    return length


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read().strip()
    except OSError:
        return ""
