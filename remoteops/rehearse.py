"""``fab extract --rehearse``: the whole path with a tiny model of the same architecture, made on the host."""

from __future__ import annotations

from typing import Any

from remoteops import runs
from remoteops.inventory import Host
from remoteops.remote import Agent

SAMPLES = 8


def prepare(host: Host, job: dict[str, Any], agent: Agent) -> tuple[dict[str, Any], dict[str, Any]]:
    """The job with the tiny model in place of the real one, and what was made ({"model","weights","notes","layers"}).

    Same dataset, tokenizer, format, engine, tensor parallel and environment; at most 8 rows; written into the run's
    own folder, so that the real run's output folder stays empty. Raises MissingModel, MissingVenv, RunFailed.
    """
    ids = job["layers"]
    slots = 4 if isinstance(ids, str) else len(ids)
    request = {**runs.base(host), "venv": host.venv, "env": {**host.env, **host.workload.env}, "model": job["model"]}
    made = agent.call("rehearsal.make", {**request, "tensor_parallel": job["tensor_parallel"], "slots": slots})
    depth = int(made["layers"])
    small = {**job, "model": made["model"], "out": None, "samples": min(int(job["samples"] or SAMPLES), SAMPLES)}
    small["layers"] = "default" if slots == 4 else [*range(depth - slots + 1, depth + 1)]
    if made["weights"] == "dummy":
        small["engine_args"] = {**job["engine_args"], "load_format": "dummy"}
        small["load_format"], small["reference"] = "dummy", 0
    return small, made
