"""Recipes are data: they load, their patterns parse, and the contracts and recipes that name each other exist."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from remoteops import planning, recipes, rules
from remoteops.edits import KINDS, edit, patterns
from remoteops.errors import AnchorNotFound

RECIPES = recipes.load()
EDITS = [(name, e) for name, recipe in RECIPES.items() for variant in recipe.variants for e in variant]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_it_does_and_why(name: str) -> None:
    recipe = RECIPES[name]
    assert recipe.title and recipe.why.endswith((".", "!")) and recipe.reference
    assert recipe.variants or recipe.impossible


@pytest.mark.parametrize(("name", "wanted"), EDITS)
def test_every_edit_is_known_and_its_patterns_parse(name: str, wanted: dict[str, Any]) -> None:
    assert wanted["edit"] in KINDS, name
    bound = set(wanted.get("bind") or {})
    for key in ("old", "new", "value"):
        if key in wanted and wanted["edit"] in ("replace-expression", "add-keyword"):
            patterns.expression(wanted[key])
    for key in ("statement", "old"):
        if key in wanted and wanted["edit"] != "replace-expression":
            patterns.statement(wanted[key])
            bound |= patterns.holes(wanted[key])
    if "code" in wanted:
        compile(patterns.python(textwrap.dedent(wanted["code"])), name, "exec", dont_inherit=True)
        assert patterns.holes(wanted["code"]) <= bound, name
    if wanted["edit"] == "replace-expression":
        assert patterns.holes(wanted["new"]) <= bound | patterns.holes(wanted["old"]), name


def test_every_recipe_that_a_contract_names_exists() -> None:
    named = {contract["id"]: (contract.get("fix") or {}).get("recipe") for contract in rules.contracts()}
    missing = {contract: recipe for contract, recipe in named.items() if recipe and recipe not in RECIPES}
    assert missing == {}


def test_every_contract_that_a_recipe_names_exists_or_is_spare() -> None:
    known = {contract["id"] for contract in rules.contracts()}
    named = {(name, p["contract"]) for name, r in RECIPES.items() for p in r.resolves if "contract" in p}
    spare = {"finish-when-prompt-done", "unwrap-language-model"}  # reached by the finding's own fix or symbol
    assert {name for name, contract in named if contract not in known} <= spare


def test_no_recipe_looks_at_a_version() -> None:
    for name, recipe in RECIPES.items():
        assert not any("version" in key for pattern in recipe.resolves for key in pattern), name


GENERATOR = """
class VllmHiddenStatesGenerator:
    def generate(self, prompts):
        input_ids_list = prompts
        schedule_iterations = 0
        while (
            scheduler_output := self.scheduler.schedule()
        ).total_num_scheduled_tokens > 0:
            schedule_iterations += 1
            self.executor.execute_model(scheduler_output)
            for req_id in scheduler_output.num_scheduled_tokens:
                self.scheduler.finish_requests([req_id], RequestStatus.FINISHED_ABORTED)
        captured = self.executor.collective_rpc("_get_captured_states")
        aux_hidden_states = captured[0]
        seq_lens = [len(ids) for ids in input_ids_list]
        results = []
        offset = 0
        for i, seq_len in enumerate(seq_lens):
            layer_states = [h[offset : offset + seq_len] for h in aux_hidden_states]
            results.append(layer_states)
            offset += seq_len
        return results
"""
WORKER = """
class HiddenStatesWorkerExtension:
    def _store_captured_states(self, aux_hidden_states):
        if self._captured_states is None:
            self._captured_states = [list(h) for h in aux_hidden_states]
        else:
            for i, h in enumerate(aux_hidden_states):
                self._captured_states[i].extend(h)

    def _setup_hidden_states_capture(self, layer_ids):
        self._captured_states = None

    def _reset_capture(self):
        self._captured_states = None
"""


class Rows(list):  # type: ignore[type-arg]
    """A tensor's rows: a list of indices picks them, in that order."""

    def __getitem__(self, index: Any) -> Any:
        return [list.__getitem__(self, i) for i in index] if isinstance(index, list) else list.__getitem__(self, index)


class Engine:
    """Scheduler, executor and runner in one: takes steps as given, and runs a step's requests shortest first."""

    def __init__(self, prompts: list[list[int]], steps: list[dict[int, int]], worker: Any) -> None:
        self.prompts, self.steps, self.worker = prompts, list(steps), worker
        self.requests = {f"req_0_{i}": Request(len(ids)) for i, ids in enumerate(prompts)}
        self.finished: list[str] = []
        self.scheduler = self.executor = self
        self.input_batch = self
        self.worker.model_runner = self
        self.worker._setup_hidden_states_capture([])

    def schedule(self) -> Any:
        step = self.steps.pop(0) if self.steps else {}
        self.num_scheduled_tokens = {f"req_0_{i}": n for i, n in step.items()}
        self.total_num_scheduled_tokens = sum(step.values())
        for i, n in step.items():
            self.requests[f"req_0_{i}"].num_computed_tokens += n
        return self

    def execute_model(self, output: Any) -> None:
        self.req_ids = sorted(output.num_scheduled_tokens, key=output.num_scheduled_tokens.__getitem__)
        rows = []
        for req_id in self.req_ids:
            end = self.requests[req_id].num_computed_tokens
            start = end - output.num_scheduled_tokens[req_id]
            rows += [(int(req_id[6:]), self.prompts[int(req_id[6:])][i]) for i in range(start, end)]
        self.worker._store_captured_states([rows])

    def finish_requests(self, ids: list[str], status: Any) -> None:
        self.finished += ids

    def collective_rpc(self, name: str) -> Any:
        return (
            [Rows([Rows(h) for h in self.worker._captured_states])]
            if name == "_get_captured_states"
            else [getattr(self.worker, name)()]
        )


class Request:
    def __init__(self, length: int) -> None:
        self.num_prompt_tokens, self.num_computed_tokens = length, 0


def run(generator: str, worker: str, prompts: list[list[int]], steps: list[dict[int, int]]) -> tuple[Any, Engine]:
    names: dict[str, Any] = {"RequestStatus": type("RequestStatus", (), {"FINISHED_ABORTED": 1})}
    exec(generator, names)
    exec(worker, names)
    engine = Engine(prompts, steps, names["HiddenStatesWorkerExtension"]())
    subject = names["VllmHiddenStatesGenerator"]()
    subject.scheduler = subject.executor = engine
    return subject.generate(prompts), engine


@pytest.fixture(scope="module")
def sliced() -> tuple[str, str]:
    """Generator and worker with recipe slice-by-request applied."""
    sources = {"lib/vllm_hidden_states_generator.py": GENERATOR.encode(), "lib/custom_worker.py": WORKER.encode()}
    finding = {
        "kind": "behaviour",
        "rule": "x",
        "confidence": "contract",
        "symbol": "s",
        "detail": "d",
        "line": 1,
        "file": "lib/custom_worker.py",
        "fix": {"recipe": "slice-by-request"},
    }
    plan = planning.plan_from({"findings": [finding], "files": dict.fromkeys(sources, "")}, sources)
    assert not plan.remaining
    texts = {file.file: file.planned.decode() for file in plan.files}
    return texts["lib/vllm_hidden_states_generator.py"], texts["lib/custom_worker.py"]


PROMPTS = [[10, 11, 12, 13], [20], [30, 31, 32], [40, 41]]
WANTED = [[[(i, token) for token in ids]] for i, ids in enumerate(PROMPTS)]


@pytest.mark.parametrize(
    "steps",
    [
        [{0: 4, 1: 1, 2: 3, 3: 2}],
        [{0: 4}, {3: 2}, {1: 1, 2: 3}],
        [{0: 2}, {0: 2, 1: 1}, {2: 1, 3: 2}, {2: 2}],
    ],
    ids=["one step, moved within it", "skipped and taken later", "prompts in parts"],
)
def test_slice_by_request_gives_each_prompt_its_own_rows(sliced: tuple[str, str], steps: list[dict[int, int]]) -> None:
    found, engine = run(*sliced, PROMPTS, steps)
    assert found == WANTED
    assert sorted(engine.finished) == sorted(f"req_0_{i}" for i in range(4))
    assert run(GENERATOR, WORKER, PROMPTS, steps)[0] != WANTED, (
        "the case must be one that goes wrong without the recipe"
    )


def test_slice_by_request_fails_when_a_prompt_was_not_run_to_its_end(sliced: tuple[str, str]) -> None:
    with pytest.raises(RuntimeError, match=r"Prompts \[2\] were not run to their end \(9 of 10 rows"):
        run(*sliced, PROMPTS, [{0: 4, 1: 1, 2: 2, 3: 2}])


def test_sample_tokens_is_called_once_in_either_form() -> None:
    (one,), (two,) = RECIPES["sample-tokens-second-call"].variants
    after = edit(b"def f(e, o):\n    e.execute_model(o)\n", [one]).data
    assert after == b"def f(e, o):\n    if e.execute_model(o) is None:\n        e.sample_tokens(None)\n"
    after = edit(b"def f(e, o):\n    r = e.execute_model(o)\n    return r\n", [two]).data
    assert b"    if r is None:\n        r = e.sample_tokens(None)\n    return r\n" in after
    with pytest.raises(AnchorNotFound):
        edit(b"def f(e, o):\n    return e.execute_model(o)\n", [one])
