"""speculators' VllmHiddenStatesGenerator (<= 0.4), started with the settings of a job.

The library builds vLLM's configuration from constants. While its constructor runs, the configuration classes in its
module are replaced by ones that add the job's settings; nothing of the library's files is touched. What the library
calls wrongly on this vLLM stays wrong here: that is what the audit finds and ``fab patch`` mends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import os
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Set

from remoteops.agent.protocol import AgentError

MODULE = "speculators.data_generation.vllm_hidden_states_generator"
BATCHED_TOKENS = 8192
SEQUENCES = 256
_NESTED = {"compilation_config": "CompilationConfig", "kernel_config": "KernelConfig"}
_CONFIGS = ("ModelConfig", "CacheConfig", "ParallelConfig", "SchedulerConfig", "LoadConfig", "VllmConfig")


def start(job: Mapping[str, Any], *, worker: Optional[str] = None, chunked: bool = True) -> Any:
    """A ready generator: workers up, model loaded, KV cache allocated.

    ``worker``: class path of the worker extension instead of the library's. Raises AgentError(AuditBroken) when the
    library and vLLM do not fit, AgentError(MissingPackage) when it is not there.
    """
    try:
        module = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "vllm":
            raise _broken(error) from error
        raise AgentError(
            "MissingPackage",
            "speculators' generator cannot be imported: %s" % error,
            tried="import %s" % MODULE,
            hint="the generator engines need speculators <= 0.4 in this venv; newer ones: --engine connector",
        ) from error
    except (ImportError, AttributeError) as error:
        raise _broken(error) from error
    layers = sorted({max(0, depth - 1) for depth in job["layers"]})
    arguments: Dict[str, Any] = {
        "model_path": job["model"],
        "layer_ids": layers,
        "max_model_len": context_length(job),
        "tensor_parallel_size": int(job.get("tensor_parallel") or 1),
    }
    if job.get("gpu_memory_utilization"):
        arguments["gpu_memory_utilization"] = float(job["gpu_memory_utilization"])
    with settings(module, job, worker, chunked):
        try:
            return module.VllmHiddenStatesGenerator(**arguments)
        except (TypeError, AttributeError, ImportError) as error:
            raise _broken(error) from error


def context_length(job: Mapping[str, Any]) -> int:
    """max_model_len: the longest prompt plus the one token that vLLM always leaves room for."""
    return int((job.get("engine_args") or {}).get("max_model_len") or int(job.get("max_length") or 2048) + 1)


def batched_tokens(job: Mapping[str, Any]) -> int:
    return int(job.get("max_batched_tokens") or BATCHED_TOKENS)


@contextlib.contextmanager
def settings(module: Any, job: Mapping[str, Any], worker: Optional[str], chunked: bool) -> Iterator[None]:
    """Within this block, ``module``'s configuration classes and tokenizer loader take the job's settings."""
    extra = dict(job.get("engine_args") or {})
    budget = batched_tokens(job) if chunked else max(batched_tokens(job), context_length(job))
    added: Dict[str, Dict[str, Any]] = {
        "ModelConfig": {
            "trust_remote_code": bool(job.get("trust_remote_code")),
            "dtype": job.get("dtype") or "auto",
            "max_model_len": context_length(job),
            "seed": int(job.get("seed") or 0),
            **(text_only(parameters(module.ModelConfig)) if hasattr(module, "ModelConfig") else {}),
        },
        "CacheConfig": {"enable_prefix_caching": False},
        "ParallelConfig": {"worker_extension_cls": worker} if worker else {},
        "SchedulerConfig": {
            "max_num_batched_tokens": budget,
            "max_num_seqs": min(SEQUENCES, budget),  # vLLM refuses more sequences than tokens a step
            "enable_chunked_prefill": chunked,
            "async_scheduling": False,
        },
        "LoadConfig": {},
        "VllmConfig": {},
    }
    before = {
        name: getattr(module, name) for name in (*_CONFIGS, "AutoTokenizer", "AutoConfig") if hasattr(module, name)
    }
    used = set()
    for name in _CONFIGS:
        if name in before:
            known = parameters(before[name])
            mine = {key: value for key, value in {**added[name], **extra}.items() if key in known}
            for key, kind in _NESTED.items():
                if isinstance(mine.get(key), dict):
                    mine[key] = getattr(importlib.import_module("vllm.config"), kind)(**mine[key])
            used |= set(mine)
            setattr(module, name, _with(before[name], mine))
    left = sorted(set(extra) - used - {"max_model_len"})
    if left:
        raise AgentError(
            "UsageError",
            "engine_args that no vLLM configuration here takes: %s" % ", ".join(left),
            tried="fields of %s" % ", ".join(_CONFIGS),
            hint="correct engine_args of the workload",
        )
    for name in ("AutoTokenizer", "AutoConfig"):
        if name in before:
            setattr(module, name, _Loader(before[name], bool(job.get("trust_remote_code"))))
    restore_memory = _cpu_memory(module, job)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
        restore_memory()


def text_only(known: Set[str]) -> Dict[str, Any]:
    """The keyword, where vLLM has it (>= 0.17), that leaves out the vision tower of models like Kimi-K2.5.

    Rows are tokens. Otherwise vLLM loads the tower, needs the model's image processor, and runs the largest image once.
    """
    return {"language_model_only": True} if "language_model_only" in known else {}


def parameters(config: Any) -> Set[str]:
    """Every keyword a configuration class takes, whatever builds its constructor."""
    names = {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()
    try:
        names |= {
            one.name
            for one in inspect.signature(config).parameters.values()
            if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)
        }
    except (TypeError, ValueError):
        pass
    return names


def _with(config: Any, mine: Mapping[str, Any]) -> Callable[..., Any]:
    def build(*args: Any, **kwargs: Any) -> Any:
        return config(*args, **{**kwargs, **mine})

    return build


class _Loader:
    """from_pretrained with the job's trust_remote_code; the library hard-codes it for one and leaves it out for the
    other."""

    def __init__(self, loader: Any, trust: bool) -> None:
        self._loader = loader
        self._trust = trust

    def from_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        return self._loader.from_pretrained(*args, **{**kwargs, "trust_remote_code": self._trust})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _cpu_memory(module: Any, job: Mapping[str, Any]) -> Callable[[], None]:
    """On a host without a GPU the library's question for free GPU memory is answered from VLLM_CPU_KVCACHE_SPACE
    (GiB)."""
    import torch

    if torch.cuda.is_available():
        return lambda: None
    space = int(float(os.environ.get("VLLM_CPU_KVCACHE_SPACE") or 1) * 2**30)
    share = float(job.get("gpu_memory_utilization") or 0.8) * float(getattr(module, "CACHE_MEMORY_FRACTION", 0.2))
    answer = (int(space / share), int(space / share))
    asked, named = torch.cuda.mem_get_info, getattr(module, "mem_get_info", None)
    torch.cuda.mem_get_info = lambda *_args, **_kwargs: answer
    if named is not None:
        module.mem_get_info = lambda *_args, **_kwargs: answer

    def restore() -> None:
        torch.cuda.mem_get_info = asked
        if named is not None:
            module.mem_get_info = named

    return restore


def _broken(error: BaseException) -> AgentError:
    return AgentError(
        "AuditBroken",
        "speculators and vLLM do not fit: %s: %s" % (type(error).__name__, error),
        tried="%s.VllmHiddenStatesGenerator" % MODULE,
        hint="fab probe shows what does not fit; fab patch mends it",
    )
