"""What an extraction has to know about the host it runs on: which engine is there, and what a host without a GPU
needs."""

from __future__ import annotations

import importlib.util
import os
from typing import Any, Dict, List, Optional

from remoteops.agent.protocol import AgentError

CPU_RUNNER = "vllm.v1.worker.cpu_model_runner"
CPU_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1"}


def preferred_engine() -> str:
    """``connector`` where vLLM has extract_hidden_states with a connector, else ``generator``. Used when nobody
    audited."""
    names = ("vllm.v1.spec_decode.extract_hidden_states", "vllm.v1.worker.gpu.spec_decode.extract_hidden_states")
    there = any(_there(name) for name in names)
    return "connector" if there and (has_gpu() or _cpu_runner_extracts() is not False) else "generator"


def has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def adapt(job: Dict[str, Any], shape: Any, engine: str) -> List[str]:
    """Settings without which vLLM on a CPU host does not run, or runs wrongly; what the user set stays. Returns what
    was done, as text.

    Sources: vLLM's CPU backend has no MLA; its rotary_embedding op gives wrong values for the 3-D tensors that
    DeepSeek's attention passes; two workers on one NUMA node need their cores named; its runner can extract from 0.22
    on. Raises AgentError(RunFailed) where the engine cannot run there.
    """
    if has_gpu():
        return []
    if engine == "connector" and "worker_extension_cls" not in (job.get("engine_args") or {}):
        if _cpu_runner_extracts() is False:
            raise AgentError(
                "RunFailed",
                "this vLLM's CPU backend has no extract_hidden_states",
                tried="%s names no layers to capture" % CPU_RUNNER,
                hint="vLLM 0.22 or newer has it; on this one --engine generator, or a host with a GPU",
            )
    done = ["no GPU: running vLLM on the CPU"]
    for name, value in CPU_DEFAULTS.items():
        os.environ.setdefault(name, value)
    ranks = int(job.get("tensor_parallel") or 1)
    if ranks > 1 and not os.environ.get("VLLM_CPU_OMP_THREADS_BIND"):
        bind = cores(ranks, sorted(os.sched_getaffinity(0)))
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = bind
        done.append("cores of the %d ranks: %s" % (ranks, bind))
    if "deepseek" in (shape.model_type + shape.architecture).lower() or "kimi" in shape.model_type.lower():
        os.environ.setdefault("VLLM_MLA_DISABLE", "1")
        arguments = job["engine_args"] = dict(job.get("engine_args") or {})
        compilation = dict(arguments.get("compilation_config") or {})
        if "custom_ops" not in compilation:
            arguments["compilation_config"] = {**compilation, "custom_ops": ["none"]}
        done.append("MLA off, custom operations off (their CPU versions are missing or wrong for this model)")
    return done


def cores(ranks: int, available: List[int]) -> str:
    """``"0-3|4-7"``: the cores of each rank. Ranks share cores when there are fewer cores than ranks."""
    each = max(1, len(available) // ranks)
    groups = [available[i * each : (i + 1) * each] or [available[i % len(available)]] for i in range(ranks)]
    return "|".join(",".join(map(str, group)) for group in groups)


def writer_threads() -> int:
    """Threads that write samples: enough for a fast disk, fewer where there are few cores."""
    return max(2, min(8, (os.cpu_count() or 2) // 2))


def _cpu_runner_extracts() -> Optional[bool]:
    """Does vLLM's CPU runner tell the model which layers to give (as its GPU runner always did)? None: cannot see."""
    try:
        spec = importlib.util.find_spec(CPU_RUNNER)
        with open(str(spec.origin if spec else ""), encoding="utf-8", errors="replace") as stream:
            return "_setup_eagle3_aux_hidden_state_outputs" in stream.read()
    except (ImportError, AttributeError, ValueError, OSError):
        return None


def _there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, AttributeError, ValueError):
        return False
