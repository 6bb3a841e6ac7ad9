"""What a host without a GPU can run is known before the model is loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from remoteops.agent.extraction import hostkind
from remoteops.agent.protocol import AgentError


@pytest.mark.parametrize(
    ("text", "extension", "engine"),
    [
        ("def load_model(self): ...\n", None, "generator"),
        ("def load_model(self): ...\n", "mine.Extension", "generator"),
        ("def load_model(self): self._setup_eagle3_aux_hidden_state_outputs()\n", None, "connector"),
    ],
)
def test_a_cpu_runner_that_names_no_layers_is_told_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, extension: str | None, engine: str
) -> None:
    for name in ("vllm", "vllm/v1", "vllm/v1/worker", "vllm/v1/spec_decode"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "vllm/v1/worker/cpu_model_runner.py").write_text(text)
    (tmp_path / "vllm/v1/spec_decode/extract_hidden_states.py").touch()
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(hostkind, "has_gpu", lambda: False)
    shape = SimpleNamespace(model_type="llama", architecture="LlamaForCausalLM")
    job = {"engine_args": {"worker_extension_cls": extension} if extension else {}}
    assert hostkind.preferred_engine() == engine
    if engine == "connector" or extension:
        hostkind.adapt(job, shape, "connector")
    else:
        with pytest.raises(AgentError, match="CPU backend has no extract_hidden_states") as caught:
            hostkind.adapt(job, shape, "connector")
        assert "--engine generator" in caught.value.hint
    hostkind.adapt(job, shape, "generator")
    monkeypatch.setattr(hostkind, "has_gpu", lambda: True)
    assert hostkind.adapt(job, shape, "connector") == []
    assert hostkind.preferred_engine() == "connector"
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]
