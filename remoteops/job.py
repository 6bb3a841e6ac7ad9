"""The job of an extraction: the host's workload, what is resumed, and what the command line says, as one JSON
object."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from remoteops import runs
from remoteops.errors import UsageError
from remoteops.inventory import Host
from remoteops.remote import Agent
from remoteops.schema import Workload

OnEvent = Callable[[dict[str, Any]], None]
LOCAL = "local:"
ENGINES = ("auto", "connector", "generator", "generator-stock")
# option -> (least, most); None: no limit
RANGES: dict[str, tuple[int, int | None]] = {
    "samples": (1, None),
    "max_length": (1, None),
    "reference": (0, None),
    "max_dropped": (0, 1),
}


@dataclass(frozen=True)
class Options:
    """What the command line changes of the host's workload; None leaves it as it is.

    ``layers``: "default" or ids, counted as completed layers. ``reference``: rows recomputed with transformers (None:
    2 where the model is small). ``max_dropped``: share of rows that may be unusable. ``resume``: a run whose output
    folder and settings are taken up again.
    """

    samples: int | None = None
    seed: int | None = None
    max_length: int | None = None
    layers: str | Sequence[int] | None = None
    dataset: str | None = None
    model: str | None = None
    output: str | None = None
    format: str | None = None
    engine: str | None = None
    dtype: str | None = None
    reference: int | None = None
    max_dropped: float | None = None
    resume: str | None = None
    rehearse: bool = False
    patch: bool = False
    force: bool = False
    allow_second: bool = False


def build(host: Host, options: Options, agent: Agent) -> dict[str, Any]:
    """The job from the workload, what is resumed, and the options, in rising order of weight. ``out`` None: the run's
    own folder."""
    work = host.workload
    job: dict[str, Any] = {
        "engine": work.engine,
        "model": work.model,
        "dataset": work.dataset,
        "samples": work.samples,
        "seed": work.seed,
        "max_length": work.max_length,
        "layers": list(work.layers) if not isinstance(work.layers, str) else work.layers,
        "dtype": work.dtype,
        "tensor_parallel": work.tensor_parallel,
        "format": work.format,
        "out": work.output,
        "trust_remote_code": work.trust_remote_code,
        "gpu_memory_utilization": work.gpu_memory_utilization,
        "max_batched_tokens": work.max_batched_tokens,
        "engine_args": dict(work.engine_args),
        "reference": 0,
    }
    if options.resume is not None:
        before = agent.call(
            "run.job", {**runs.base(host), "run": None if options.resume in ("last", "") else options.resume}
        )
        job.update({name: value for name, value in before["job"].items() if name in job}, out=before["out"])
    for name in (
        "samples",
        "seed",
        "max_length",
        "dataset",
        "model",
        "format",
        "engine",
        "dtype",
        "reference",
        "max_dropped",
    ):
        value = getattr(options, name)
        if value is not None:
            job[name] = value
    if options.output is not None:
        job["out"] = options.output
    if options.layers is not None:
        job["layers"] = options.layers if isinstance(options.layers, str) else list(options.layers)
    for name in ("model", "dataset"):
        if not job[name]:
            raise UsageError(
                f"no {name} is named for {host.name}",
                host=host.name,
                tried=f"`{name}` of its workload",
                hint=f"set it in inventory.yaml, or give --{name}",
            )
    _refuse(host, job)
    return job


def look_over(host: Host, options: Options) -> None:
    """Refuse what the command line alone shows to be wrong, before anything is started or connected to. Raises
    UsageError."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    _refuse(host, given)
    dataset = str(given.get("dataset", host.workload.dataset or ""))
    if dataset.startswith(LOCAL) and options.resume is None:
        local_file(host, dataset)


def _refuse(host: Host, job: Mapping[str, Any]) -> None:
    """What the inventory's schema allows is all that the command line may say, and is refused before a model is
    loaded for it."""
    for name in ("format", "dtype", "engine"):
        allowed = ENGINES if name == "engine" else get_args(Workload.model_fields[name].annotation)
        if name in job and job[name] not in allowed:
            raise UsageError(
                f"there is no {name} '{job[name]}'",
                host=host.name,
                tried=f"--{name} {job[name]}",
                hint="one of " + ", ".join(allowed),
            )
    for name, (least, most) in RANGES.items():
        value = job.get(name)
        if value is not None and (value < least or (most is not None and value > most)):
            flag = name.replace("_", "-")
            raise UsageError(
                f"{flag} must be {f'at least {least}' if most is None else f'from {least} to {most}'}, not {value}",
                host=host.name,
                tried=f"--{flag} {value}",
                hint="leave it out for the whole dataset" if name == "samples" else "",
            )
    layers = job.get("layers")
    if layers is not None and layers != "default":
        words = layers.replace(",", " ").split() if isinstance(layers, str) else [str(one) for one in layers]
        if not words or not all(one.removeprefix("-").isdigit() for one in words):
            raise UsageError(
                f"layer ids are whole numbers, not {layers!r}",
                host=host.name,
                tried=f"--layers {layers}",
                hint="--layers default, or for example --layers 2,30,58,61",
            )


def place_dataset(host: Host, dataset: str, agent: Agent, tell: OnEvent) -> str:
    """The dataset's path on the host; a local file (``local:PATH``) is uploaded under its content's hash, once."""
    if not dataset.startswith(LOCAL):
        return dataset
    path = local_file(host, dataset)
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    name = f"{host.state_dir}/datasets/{digest.hexdigest()[:16]}-{path.name}"
    there = agent.link.exec(
        ["sh", "-c", 'case $1 in "~/"*) set -- "$HOME/${1#"~/"}";; esac; [ -f "$1" ] && wc -c <"$1"; true', "sh", name],
        check=False,
    )
    if there.stdout.strip() != str(path.stat().st_size).encode():
        tell({"event": "upload", "path": str(path), "bytes": path.stat().st_size})
        agent.link.upload(path, name, mode=0o600)
    return name


def local_file(host: Host, dataset: str) -> Path:
    """The file that ``local:PATH`` names. Raises UsageError when it is not there."""
    path = Path(dataset[len(LOCAL) :]).expanduser()
    if not path.is_file():
        raise UsageError(
            f"no local file {path}",
            host=host.name,
            tried=dataset,
            hint="local: takes one file; a folder must lie on the host",
        )
    return path


def label(job: Mapping[str, Any]) -> str:
    model = str(job["model"]).rstrip("/").rsplit("/", 1)[-1]
    return f"{model} {job['samples'] or 'all'} samples {job['engine']}"
