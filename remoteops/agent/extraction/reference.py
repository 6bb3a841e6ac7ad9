"""Recomputes rows with transformers and compares: an answer by other code, which also proves the layer convention.

States are taken by hooks: the input of the first decoder layer is id 0, the output of layer k-1 is id k; so id N is
the last layer's output before the final norm (transformers' own ``hidden_states[-1]`` is behind it). Each stored slot
is also compared with the ids beside its own: a convention that is off by one shows as a neighbour that fits better.
"""

from __future__ import annotations

import os
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

from remoteops.agent import manifest, modelinfo
from remoteops.agent.extraction.output import read_rows
from remoteops.agent.preflight_host import available_memory

TOLERANCE = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.25}
"""Largest median over tokens of the relative error that counts as the same computation; 8 layers of hot random
weights reach 0.1 in bfloat16."""
WORST = {"float32": 1e-3}
"""Largest error of a single token, where rounding alone cannot reach it."""


def compare(
    out: str,
    header: Mapping[str, Any],
    count: int,
    *,
    trust_remote_code: bool = False,
    device: Optional[str] = None,
    emit: Optional[Callable[..., Any]] = None,
) -> Dict[str, Any]:
    """Recompute ``count`` rows (shortest to longest, evenly) in float32 from the weights as the run's dtype rounds
    them.

    Returns {"ok" (None when it could not be done, with "reason"), "rows", "dtype", "max_relative_error", "layers":
    {id: {"max_relative_error", "worst_token_error", "median_relative_error", "max_absolute_error", "nearest"}}}.
    max_relative_error is |A-B| / |B| of a row's whole state [S, H], the largest over the rows; worst_token_error and
    median_relative_error are the same ratio of single tokens; ``nearest`` is the id whose state fits best.
    """
    found = manifest.read(out)
    rows = _choose([row for row in read_rows(out) if found is not None and row.index in found.entries], count)
    if not rows:
        return {"ok": None, "reason": "there is no sample to compare", "rows": []}
    try:
        folder = modelinfo.find(str(header["model"]))
        shape = modelinfo.read(folder)
        if modelinfo.fingerprint(folder) != header["model_fingerprint"]:
            return {
                "ok": None,
                "reason": "the model in %s is not the one the samples were made with" % folder,
                "rows": [],
            }
        problem = _does_not_fit(shape, device)
        if problem:
            return {"ok": None, "reason": problem, "rows": []}
        model = _load(folder, str(header["dtype"]), trust_remote_code, device)
        return _compare(out, header, rows, model, shape, device, emit)
    except Exception as error:  # noqa: BLE001
        return {
            "ok": None,
            "reason": "transformers could not recompute: %s: %s"
            % (type(error).__name__, " ".join(str(error).split())[:300]),
            "rows": [],
        }


def capture(model: Any, ids: Sequence[int], wanted: Sequence[int], device: Optional[str] = None) -> Dict[int, Any]:
    """States [S, H] in float32 by completed-layers id for one prompt. Raises ValueError for a model whose layers are
    not found."""
    import torch

    layers = decoder_layers(model)
    states: Dict[int, Any] = {}
    handles = []

    def before(_module: Any, args: Any, kwargs: Any) -> None:
        states[0] = (args[0] if args else kwargs["hidden_states"]).detach()[0].float().cpu()

    def after(number: int) -> Callable[..., None]:
        def keep(_module: Any, _args: Any, output: Any) -> None:
            states[number] = (output[0] if isinstance(output, (tuple, list)) else output).detach()
            states[number] = states[number].reshape(-1, states[number].shape[-1])[: len(ids)].float().cpu()

        return keep

    if 0 in wanted:
        handles.append(layers[0].register_forward_pre_hook(before, with_kwargs=True))
    handles += [layers[one - 1].register_forward_hook(after(one)) for one in wanted if one > 0]
    try:
        with torch.inference_mode():
            model(input_ids=torch.tensor([list(ids)], device=device or "cpu"), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return states


def decoder_layers(model: Any) -> Any:
    """The decoder layers of the language model: the longest list of modules, by name ``layers``, ``h`` or ``blocks``,
    outside a vision tower."""
    import torch

    found = [
        (len(module), name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and name.rsplit(".", 1)[-1] in ("layers", "h", "blocks")
        and not any(part in name for part in ("vision", "visual", "audio"))
    ]
    if not found:
        raise ValueError("the decoder layers of %s were not found" % type(model).__name__)
    return max(found, key=lambda one: one[0])[2]


def _compare(
    out: str,
    header: Mapping[str, Any],
    rows: Sequence[Any],
    model: Any,
    shape: modelinfo.Shape,
    device: Optional[str],
    emit: Optional[Callable[..., Any]],
) -> Dict[str, Any]:
    from remoteops.agent.extraction.samples import read_sample, slots

    ids = list(header["layers"])
    near = sorted({other for one in ids for other in (one - 1, one, one + 1) if 0 <= other <= shape.num_layers})
    errors: Dict[int, List[float]] = {one: [] for one in ids}
    rows_off: Dict[int, float] = dict.fromkeys(ids, 0.0)
    absolute: Dict[int, float] = dict.fromkeys(ids, 0.0)
    distance: Dict[int, Dict[int, float]] = {one: {} for one in ids}
    for number, row in enumerate(rows, 1):
        truth = capture(model, row.input_ids, near, device)
        stored = slots(read_sample(os.path.join(out, manifest.file_name(header["format"], row.index)))["states"])
        for one, state in zip(ids, stored):
            state = state.float()
            errors[one] += relative(state, truth[one]).tolist()
            rows_off[one] = max(rows_off[one], float((state - truth[one]).norm() / truth[one].norm()))
            absolute[one] = max(absolute[one], float((state - truth[one]).abs().max()))
            for other in (one - 1, one, one + 1):
                if other in truth:
                    distance[one][other] = distance[one].get(other, 0.0) + float(relative(state, truth[other]).mean())
        if emit is not None:
            emit("progress", phase="reference", samples=number, samples_total=len(rows))
    dtype = str(header["dtype"])
    layers = {
        str(one): {
            "max_relative_error": rows_off[one],
            "worst_token_error": max(errors[one]),
            "median_relative_error": sorted(errors[one])[len(errors[one]) // 2],
            "max_absolute_error": absolute[one],
            "nearest": min(distance[one], key=lambda other: distance[one][other]),
        }
        for one in ids
    }
    good = all(
        one["nearest"] == int(name)
        and one["median_relative_error"] <= TOLERANCE.get(dtype, 0.25)
        and one["worst_token_error"] <= WORST.get(dtype, float("inf"))
        for name, one in layers.items()
    )
    return {
        "ok": good,
        "rows": [row.index for row in rows],
        "tokens": sum(len(row.input_ids) for row in rows),
        "dtype": dtype,
        "max_relative_error": max(one["max_relative_error"] for one in layers.values()),
        "layers": layers,
    }


def relative(state: Any, truth: Any) -> Any:
    """|state - truth| / |truth| of each token: [S]."""
    return (state - truth).norm(dim=-1) / truth.norm(dim=-1).clamp_min(1e-12)


def _choose(rows: Sequence[Any], count: int) -> List[Any]:
    ordered = sorted(rows, key=lambda row: (len(row.input_ids), row.index))
    if count >= len(ordered):
        return ordered
    if count == 1:
        return [ordered[-1]]
    return [ordered[round(position * (len(ordered) - 1) / (count - 1))] for position in range(count)]


def _does_not_fit(shape: modelinfo.Shape, device: Optional[str]) -> Optional[str]:
    """Why the float32 model does not fit, or None. Checkpoints in half precision double when they are widened."""
    need = int(shape.weight_bytes * (1 if shape.dtype == "float32" else 2) * 1.25) + (1 << 30)
    if device and device.startswith("cuda"):
        import torch

        free: Optional[int] = torch.cuda.mem_get_info()[0]
    else:
        free = available_memory()
    if free is not None and need > free:
        return "the model does not fit: %.0f GiB are needed in float32 and %.0f GiB are free" % (
            need / 2**30,
            free / 2**30,
        )
    return None


def _load(folder: str, dtype: str, trust_remote_code: bool, device: Optional[str]) -> Any:
    import torch
    import transformers

    release = tuple(int(one) for one in transformers.__version__.split(".")[:2])
    name = "dtype" if release >= (4, 56) else "torch_dtype"
    options: Dict[str, Any] = {
        name: getattr(torch, dtype),
        "trust_remote_code": trust_remote_code,
        "attn_implementation": "eager",
        "local_files_only": True,
    }
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    except ValueError:  # a multimodal model has no causal-LM class; its whole model runs on text as well
        model = transformers.AutoModel.from_pretrained(folder, **options)
    return model.float().eval().to(device or "cpu")
