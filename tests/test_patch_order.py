"""Contracts and recipes of a generator that keeps every request to the end and loses the order of the layers: found in
the sources, mended by the plan, and run before and after against an engine with two slots.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from audit_fixtures import write

from remoteops import planning, rules
from remoteops.agent.audit import engine

PROVIDER = {
    "vllm/__init__.py": "",
    "vllm/v1/__init__.py": "",
    "vllm/v1/core/__init__.py": "",
    "vllm/v1/core/sched/__init__.py": "",
    "vllm/v1/core/sched/scheduler.py": """
        class Scheduler:
            def schedule(self):
                if len(self.running) == self.max_num_running_reqs:
                    return None
            def finish_requests(self, request_ids, finished_status): ...
            def update_from_output(self, scheduler_output, output): ...
    """,
    "vllm/v1/executor/__init__.py": "",
    "vllm/v1/executor/abstract.py": """
        class Executor:
            def execute_model(self, scheduler_output): ...
            def sample_tokens(self, output): ...
    """,
}
GENERATOR = """
    from reader import torch
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.executor.abstract import Executor

    class RequestStatus:
        FINISHED_ABORTED = 1

    class VllmHiddenStatesGenerator:
        def __init__(self, layer_ids):
            self.layer_ids = layer_ids
            self.scheduler = Scheduler()
            self.executor = Executor()

        def generate(self, input_ids_list):
            request_id_to_idx = {f"req_{i}": i for i in range(len(input_ids_list))}
            request_id_to_prompt_len = {r: len(input_ids_list[i]) for r, i in request_id_to_idx.items()}
            request_num_computed = dict.fromkeys(request_id_to_idx, 0)
            all_prefill_complete = False
            while (
                scheduler_output := self.scheduler.schedule()
            ).total_num_scheduled_tokens > 0 and not all_prefill_complete:
                for req_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
                    request_num_computed[req_id] += num_tokens
                all_prefill_complete = all(request_num_computed[r] >= n for r, n in request_id_to_prompt_len.items())
                model_output = self.executor.execute_model(scheduler_output)
                self.executor.sample_tokens(model_output)
            self.scheduler.finish_requests(list(request_id_to_idx.keys()), RequestStatus.FINISHED_ABORTED)
            results = []
            for req_id, i in request_id_to_idx.items():
                layer_states = list(self.executor.states[req_id])
                input_ids_tensor = torch.as_tensor(input_ids_list[i], dtype=torch.long)
                results.append((input_ids_tensor, layer_states))
            return results
"""
WORKER = """
    def forward(model, states, wanted):
        aux_hidden_states = []
        for depth, layer in enumerate(model):
            states = layer(states)
            if depth in wanted:
                aux_hidden_states.append(states)
        return aux_hidden_states
"""
CONSUMER = {
    "reader/__init__.py": "",
    "reader/torch.py": "long = int\ndef as_tensor(data, dtype):\n    return list(data)\n",
    "reader/vllm_hidden_states_generator.py": GENERATOR,
    "reader/custom_worker.py": WORKER,
}
RULES = {"slots-held-to-the-end", "states-in-layer-order"}
FILE = "reader/vllm_hidden_states_generator.py"


class Step:
    def __init__(self, tokens: dict[str, int]) -> None:
        self.num_scheduled_tokens = tokens
        self.total_num_scheduled_tokens = sum(tokens.values())


class Engine:
    """Two slots, one token of each running prompt a step; layers captured upwards, each once."""

    def __init__(self, prompts: list[list[int]], layers: list[int]) -> None:
        self.left = {f"req_{i}": len(ids) for i, ids in enumerate(prompts)}
        self.running: list[str] = []
        self.told: set[str] = set()
        self.ended: list[str] = []
        self.states: dict[str, list[int]] = {}
        self.layers = sorted(set(layers))

    def schedule(self) -> Step:
        self.told |= set(self.ended)
        waiting = [name for name in self.left if name not in (*self.running, *self.ended)]
        self.running += waiting[: 2 - len(self.running)]
        tokens = {name: 1 for name in self.running if self.left[name]}
        for name in tokens:
            self.left[name] -= 1
        return Step(tokens)

    def execute_model(self, output: Step) -> None:
        for name in output.num_scheduled_tokens:
            self.states[name] = self.layers

    def sample_tokens(self, output: Any) -> None:
        pass

    def finish_requests(self, names: list[str], status: Any) -> None:
        self.ended += [name for name in names if name not in self.ended]
        self.running = [name for name in self.running if name not in self.ended]


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    return audit(tmp_path, CONSUMER)


def audit(folder: Path, consumer: dict[str, str]) -> dict[str, Any]:
    write(folder / "lib", PROVIDER)
    write(folder / "app", consumer)
    request = {"consumer": "reader", "provider": "vllm", "consumer_path": str(folder / "app")}
    return engine.audit({**request, "provider_path": str(folder / "lib"), "contracts": [*rules.contracts()]})


def found(document: dict[str, Any]) -> set[str]:
    return {f["rule"] for f in document["findings"]} & RULES


def planned(folder: Path, document: dict[str, Any]) -> dict[str, str]:
    sources = {file: (folder / "app" / file).read_bytes() for file in document["files"]}
    plan = planning.plan_from(document, sources, sorted(RULES))
    assert not plan.remaining
    return {file.file: file.planned.decode() for file in plan.files}


@pytest.fixture
def imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    monkeypatch.syspath_prepend(str(tmp_path / "app"))
    yield
    for name in [n for n in sys.modules if n.split(".")[0] in ("vllm", "reader")]:
        del sys.modules[name]


def generate(source: str, prompts: list[list[int]], layers: list[int]) -> tuple[list[Any], Engine]:
    names: dict[str, Any] = {}
    exec(source, names)
    subject = names["VllmHiddenStatesGenerator"](layers)
    subject.scheduler = subject.executor = fake = Engine(prompts, layers)
    return subject.generate(prompts), fake


PROMPTS = [[1, 2, 3], [4], [5, 6], [7], [8, 9]]


@pytest.mark.usefixtures("imports")
def test_more_prompts_than_slots_are_computed_and_layers_come_as_asked(
    tmp_path: Path, document: dict[str, Any]
) -> None:
    assert found(document) == RULES
    source = (tmp_path / "app" / FILE).read_text()
    with pytest.raises(KeyError):  # the fault itself: the third prompt never gets a slot
        generate(source, PROMPTS, [0])
    assert generate(source, PROMPTS[:2], [6, 3, 1])[0][0][1] == [1, 3, 6], "the fault itself: ascending"
    text = planned(tmp_path, document)[FILE]
    results, fake = generate(text, PROMPTS, [6, 1, 3, 1])
    assert results == [(ids, [6, 1, 3, 1]) for ids in PROMPTS]
    assert sorted(fake.ended) == [f"req_{i}" for i in range(5)]
    assert len(set(fake.ended) - fake.told) == 1, "only the last one still waits for a step that tells the workers"
    (tmp_path / "app" / FILE).write_text(text)
    assert found(audit(tmp_path, {})) == set(), "the planned text is not complained of again"


@pytest.mark.parametrize(
    ("old", "new", "gone"),
    [
        ("self.executor.sample_tokens(model_output)",
         "self.scheduler.update_from_output(scheduler_output, model_output)",
         "slots-held-to-the-end"),
        ("self.executor.sample_tokens(model_output)",
         "self.scheduler.finish_requests([*scheduler_output.num_scheduled_tokens], RequestStatus.FINISHED_ABORTED)",
         "slots-held-to-the-end"),
        ("layer_states = list(self.executor.states[req_id])",
         "layer_states = [self.executor.states[req_id][self.order.index(k)] for k in self.layer_ids]",
         "states-in-layer-order"),
    ],
    ids=["the scheduler ends them", "ended in the loop", "put back in order"],
)  # fmt: skip
def test_a_consumer_that_does_it_right_is_not_told(tmp_path: Path, old: str, new: str, gone: str) -> None:
    assert old in GENERATOR
    document = audit(tmp_path, {**CONSUMER, FILE: GENERATOR.replace(old, new)})
    assert found(document) == RULES - {gone}


def test_without_sample_tokens_the_end_follows_the_step(tmp_path: Path) -> None:
    old = "                self.executor.sample_tokens(model_output)\n"
    document = audit(tmp_path, {**CONSUMER, FILE: GENERATOR.replace(old, "")})
    text = planned(tmp_path, document)[FILE]
    assert text.index("execute_model(scheduler_output)") < text.index("if not all_prefill_complete:")
