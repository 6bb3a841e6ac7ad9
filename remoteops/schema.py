"""What may stand in inventory.yaml, as models: field names, types, bounds and one line of help each.

The models are frozen. ``json_schema()`` is the same knowledge for editors (docs/inventory.schema.json).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, StrictStr


def _listed(value: Any) -> Any:
    """One string stands for a list of one."""
    return (value,) if isinstance(value, str) else value


def _plain_env(value: Any) -> Any:
    """Environment values may be written as numbers; everything else stays as it is and is judged by its type."""
    if not isinstance(value, Mapping):
        return value
    return {
        key: str(item) if isinstance(item, int | float) and not isinstance(item, bool) else item
        for key, item in value.items()
    }


Texts = Annotated[tuple[StrictStr, ...], BeforeValidator(_listed)]
Seconds = Annotated[float, Field(gt=0, le=3600)]
Env = Annotated[Mapping[StrictStr, StrictStr], BeforeValidator(_plain_env)]
Layers = Literal["default"] | tuple[StrictInt, ...]


class Record(BaseModel):
    """Base of all: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class Timeouts(Record):
    """Seconds that each step of a connection may take."""

    connect: Seconds = Field(10.0, description="TCP connection")
    banner: Seconds = Field(15.0, description="the server's first line")
    auth: Seconds = Field(20.0, description="authentication")
    channel: Seconds = Field(10.0, description="opening a channel")
    silence: Seconds = Field(12.0, description="how long the host may leave a heartbeat unanswered")


class LabSpec(Record):
    """Which embedded host stands behind ``connect: lab``."""

    profile: StrictStr = Field("seed", description="a name in remoteops/lab/profiles.yaml: seed, current")
    model: StrictStr = Field("llama", description="the tiny model its workload uses: llama, qwen3")


class Workload(Record):
    """What is extracted on a host. Paths are paths on the host."""

    consumer: StrictStr = Field("speculators", description="the package that reaches into the provider")
    provider: StrictStr = Field("vllm", description="the package that is reached into")
    model: StrictStr = Field("", description="model folder on the host, or a model id")
    tensor_parallel: StrictInt = Field(1, ge=1, le=1024, description="GPUs one model is spread over")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field("auto", description="dtype of the states")
    layers: Layers = Field("default", description="completed layers to keep; default is 2, N//2, N-3, N")
    max_length: StrictInt = Field(2048, ge=1, description="tokens; longer conversations are cut")
    dataset: StrictStr = Field("", description="conversations: a file or folder on the host, or local:PATH")
    output: StrictStr | None = Field(None, description="folder on the host; none: inside the run's own folder")
    format: Literal["speculators-v1", "safetensors"] = Field("speculators-v1", description="what the trainer reads")
    engine: StrictStr = Field("auto", description="auto, connector, generator, generator-stock")
    samples: StrictInt | None = Field(None, ge=1, description="rows of the dataset; none: all")
    seed: StrictInt = Field(0, description="order of the rows where samples is below their number")
    trust_remote_code: StrictBool = Field(False, description="run Python code that comes with the model")
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1, description="share of each GPU's memory")
    max_batched_tokens: StrictInt | None = Field(None, ge=1, description="tokens of one step")
    engine_args: Mapping[StrictStr, Any] = Field(default_factory=dict, description="passed to the engine as they are")
    env: Env = Field(default_factory=dict, description="environment of the run")
    profile: StrictStr | None = Field(None, description="a workload profile that fills what is not set here")


class HostSpec(Record):
    """One host: how to reach it and what lies there. What is not set is taken from ~/.ssh/config."""

    connect: Literal["ssh", "local", "lab"] = Field("ssh", description="over SSH, on this machine, or the lab")
    address: StrictStr | None = Field(None, description="name or IP; none: the host's own name, by ssh_config")
    user: StrictStr | None = Field(None, description="login name")
    port: StrictInt | None = Field(None, ge=1, le=65535, description="SSH port")
    identity_files: Texts = Field((), description="private keys on this machine")
    jump: StrictStr | None = Field(None, description="[user@]host[:port] to go through; several with commas")
    host_key: Literal["strict", "accept-new"] = Field("strict", description="what happens to an unknown host key")
    known_hosts: Texts | None = Field(None, description="known_hosts files; none: as ssh_config says")
    ssh_config: StrictStr | None = Field(None, description="ssh_config file; none: the user's")
    timeouts: Timeouts = Field(default_factory=Timeouts, description="seconds for each step of a connection")
    password_auth: StrictBool = Field(False, description="ask for a password where keys fail")
    sudo_user: StrictStr | None = Field(None, description="user that owns the venv (sudo -n)")
    python: StrictStr | None = Field(None, description="interpreter of the agent, absolute; none: look for one")
    venv: StrictStr | None = Field(None, description="virtual environment with vLLM and speculators")
    state_dir: StrictStr = Field("~/.local/state/remoteops", description="runs and patch state on the host")
    cache_dir: StrictStr = Field("~/.cache/remoteops", description="where the agent lies on the host")
    env: Env = Field(default_factory=dict, description="environment of everything that runs on the host")
    lab: LabSpec = Field(default_factory=LabSpec, description="only with connect: lab")
    workload: Workload = Field(default_factory=Workload, description="what is extracted there")


class Host(HostSpec):
    """A host of the inventory with defaults, workload profile and groups worked in."""

    name: StrictStr
    groups: tuple[StrictStr, ...] = ()


class Document(Record):
    """The whole file."""

    default: StrictStr | None = Field(None, description="the host that tasks aim at without -H")
    defaults: HostSpec = Field(default_factory=HostSpec, description="for every host that does not say otherwise")
    profiles: Mapping[StrictStr, Workload] = Field(default_factory=dict, description="named workloads")
    groups: Mapping[StrictStr, Texts] = Field(default_factory=dict, description="names for several hosts (-H GROUP)")
    hosts: Mapping[StrictStr, HostSpec | None] = Field(default_factory=dict, description="the hosts by name")


def json_schema() -> dict[str, Any]:
    """JSON schema of inventory.yaml, for editors."""
    schema = Document.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "remoteops inventory",
        **{key: value for key, value in schema.items() if key != "title"},
    }
