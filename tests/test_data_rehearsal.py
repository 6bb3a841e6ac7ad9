"""A rehearsal's model is small and still takes the code paths of the real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from remoteops.agent.extraction import rehearsal
from tests.data_fixtures import in_venv

KIMI: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "hidden_size": 7168,
    "vision_config": {"vt_num_hidden_layers": 27, "text_hidden_size": 7168},
    "quantization_config": {"quant_method": "compressed-tensors"},
    "text_config": {
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "first_k_dense_replace": 1,
        "vocab_size": 163840,
        "max_position_embeddings": 262144,
    },
}
GEMMA: dict[str, Any] = {
    "num_hidden_layers": 12,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
}


@pytest.mark.parametrize("parallel", [1, 2, 8])
def test_a_nested_mixture_of_experts_keeps_its_kinds_of_layers_and_shares_among_the_gpus(parallel: int) -> None:
    small, notes = rehearsal.shrink(KIMI, parallel, 4)
    text = small["text_config"]
    assert text["num_hidden_layers"] == 4
    assert small["hidden_size"] == text["hidden_size"] == small["vision_config"]["text_hidden_size"] <= 1024
    assert text["num_attention_heads"] % parallel == 0
    assert text["n_routed_experts"] >= text["num_experts_per_tok"]
    assert text["first_k_dense_replace"] == 1
    assert text["moe_intermediate_size"] % (128 * parallel) == 0
    for kept in ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "vocab_size", "max_position_embeddings"):
        assert text[kept] == KIMI["text_config"][kept]
    assert "quantization_config" not in small
    assert "quantised" in notes[0]
    assert KIMI["text_config"]["num_hidden_layers"] == 61


def test_every_kind_of_a_layer_pattern_is_in_the_small_model() -> None:
    small, _ = rehearsal.shrink(GEMMA, 2, 4)
    assert small["layer_types"] == ["sliding_attention"] * 3 + ["full_attention"]
    assert small["head_dim"] == 128
    assert small["num_attention_heads"] % small["num_key_value_heads"] == 0
    assert small["num_key_value_heads"] >= 2


MAKE = """
import json, pathlib, sys, data_models
from remoteops.agent import modelinfo
from remoteops.agent.extraction import reference, rehearsal
folder = pathlib.Path(sys.argv[1])
data_models.tokenizer("chatml", folder / "real")
made = rehearsal.make(str(folder / "real"), str(folder / "small"), 1, 4)
shape = modelinfo.read(made["model"])
model = reference._load(made["model"], "float32", False, None)
states = reference.capture(model, [1, 2, 3], [0, 4])
assert (folder / "small" / "tokenizer.json").read_bytes() == (folder / "real" / "tokenizer.json").read_bytes()
made.update(depth=shape.num_layers, rows=len(states[4]), finite=bool(states[4].isfinite().all()))
print("RESULT" + json.dumps(made))
"""


@pytest.mark.lab
def test_the_small_model_loads_and_computes_though_the_real_one_has_no_weights_yet(tmp_path: Path) -> None:
    made = json.loads(in_venv(MAKE, str(tmp_path)).split("RESULT")[1])
    assert made["weights"] == "random"
    assert (made["depth"], made["rows"], made["finite"]) == (4, 3, True)
