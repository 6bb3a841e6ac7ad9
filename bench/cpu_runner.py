"""For bench/engines.py: lets the CPU runner of vLLM 0.18 to 0.21 do what its GPU runner does for extract_hidden_states.

There the CPU runner loads no drafter (before 0.20) and never tells the model which layers to give (before 0.22), so
that the connector cannot run on a CPU. What is tried on those releases is our connector against their scheduler, cache
and connector interface, which GPU hosts have too. Loaded into the workers as vLLM's ``worker_extension_cls``.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker import cpu_model_runner

RUNNER = cpu_model_runner.CPUModelRunner
_load = RUNNER.load_model


def needed() -> bool:
    return not hasattr(RUNNER, "_setup_eagle3_aux_hidden_state_outputs")


def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
    _load(self, *args, **kwargs)
    drafter = getattr(self, "drafter", None)
    if drafter is not None and getattr(drafter, "model", None) is None:
        drafter.load_model(self.model)
    if self.use_aux_hidden_state_outputs:
        hf_config = self.speculative_config.draft_model_config.hf_config
        self.model.set_aux_hidden_state_layers(tuple(hf_config.eagle_aux_hidden_state_layer_ids))


class Extension:
    """Nothing of its own: being loaded is enough."""


if needed():
    RUNNER.load_model = load_model
