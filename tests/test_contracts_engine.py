"""Contracts on small packages: when one applies, when it is excluded, when it stays open."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from remoteops.agent.audit import contracts as evaluator
from remoteops.agent.audit import engine

PROVIDER = {
    "__init__.py": "",
    "runner.py": """
        class Base:
            def shutdown(self): ...

        class Runner(Base):
            def __init__(self, config=None, *, workers: int = 1): ...
            def step(self, batch):
                if self.state is not None:
                    raise RuntimeError("State error: finish() must be called")
            def finish(self): ...
            def rpc(self, name, rank=None):
                replies = [1]
                return replies[0] if rank is not None else replies
    """,
    "config.py": """
        from dataclasses import dataclass

        DEFAULT_FAST = frozenset({"FastModel"})

        @dataclass
        class Config:
            seqs: int = 8
            chunked: bool = True

            @property
            def fast(self):
                if not any(a in DEFAULT_FAST for a in self.names):
                    return False
                return True
    """,
    "models/__init__.py": "",
    "models/all.py": """
        class Gate: ...
        class FastModel(Gate): ...
        class SlowModel: ...
        class Child(FastModel): ...

        def supports(model): ...
    """,
}


def write(root: Path, package: str, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


@pytest.fixture
def audit(tmp_path: Path) -> Any:
    """audit(consumer source, contract, …) -> document; ``provider`` replaces files of the stub provider."""

    def run(
        code: str, *contracts: dict[str, Any], provider: dict[str, str] | None = None, model: str | None = None
    ) -> dict[str, Any]:
        write(tmp_path, "engine", {**PROVIDER, **(provider or {})})
        write(tmp_path, "user", {"__init__.py": "", "work.py": code})
        request = {
            "consumer": "user",
            "provider": "engine",
            "consumer_path": str(tmp_path),
            "provider_path": str(tmp_path),
        }
        return engine.audit({**request, "contracts": list(contracts), "model": model})

    return run


def contract(**more: Any) -> dict[str, Any]:
    base = {
        "id": "c", "title": "t", "provider": "engine", "when": "first-batch", "symbol": "{call}", "detail": "d",
        "error": "e", "uses": {"call": {"call": "*Runner.step"}}, "shape": {"exists": "engine.runner.Runner.finish"},
    }  # fmt: skip
    return {**base, **more}


def behaviours(document: dict[str, Any]) -> list[tuple[str, int, str]]:
    return [(f["rule"], f["line"], f["confidence"]) for f in document["findings"] if f["contract"]]


STEP = """
from engine.runner import Runner

class Work:
    def __init__(self):
        self.runner = Runner()

    def go(self, batches):
        for batch in batches:
            self.runner.step(batch)
"""


def test_a_second_call_that_is_missing_is_a_finding_at_the_first_one(audit: Any) -> None:
    shape = {"body": "engine.runner.Runner.step", "has": 'raise RuntimeError("~must be called")'}
    one = contract(absent=[{"call": "*.finish", "in": "class"}], shape=shape, now_from="engine.runner.Runner.step")
    document = audit(STEP, one)
    assert behaviours(document) == [("c", 10, "contract")]
    finding = next(f for f in document["findings"] if f["contract"])
    assert finding["scope"] == "Work.go"
    assert finding["now_at"] == "engine/runner.py:7"
    assert finding["file"] == "user/work.py"
    assert finding["symbol"].endswith("Runner.step")
    assert behaviours(audit(STEP + "            self.runner.finish()\n", one)) == []


def test_the_shape_decides_and_not_the_name_of_a_release(audit: Any) -> None:
    one = contract(shape={"body": "engine.runner.Runner.step", "has": 'raise RuntimeError("~must be called")'})
    calm = {"runner.py": "class Runner:\n    def step(self, batch):\n        return 1\n"}
    assert behaviours(audit(STEP, one, provider=calm)) == []


def test_what_neither_applies_nor_is_excluded_is_reported_as_undecided(audit: Any) -> None:
    document = audit(STEP, contract(shape={"body": "engine.gone.Thing", "has": "raise $X"}))
    assert behaviours(document) == []
    assert [entry["contract"] for entry in document["unresolved"] if entry.get("contract")] == ["c"]
    excluded = audit(STEP, contract(shape={"body": "engine.gone.Thing", "has": "raise $X", "missing": False}))
    assert not [entry for entry in excluded["unresolved"] if entry.get("contract")]


def test_a_contract_about_another_provider_is_passed_over(audit: Any) -> None:
    assert behaviours(audit(STEP, contract(provider="other"))) == []


CONFIG = "from engine.config import Config\n\ndef make(**more):\n    return Config({arguments})\n"


@pytest.mark.parametrize(
    ("arguments", "applies"),
    [("", True), ("seqs=1", True), ("chunked=False", False), ("1, False", False), ("1", True)],
)
def test_a_default_matters_only_where_it_is_left_unset(audit: Any, arguments: str, applies: bool) -> None:
    one = contract(
        symbol="{config}.chunked",
        uses={"config": {"call": "engine.config.Config", "without": ["chunked"]}},
        shape={"parameter": "{config.target}", "name": "chunked", "default": ["True"]},
    )
    document = audit(CONFIG.format(arguments=arguments), one)
    assert bool(behaviours(document)) is applies


def test_a_call_that_unpacks_a_dictionary_leaves_it_open(audit: Any) -> None:
    one = contract(
        symbol="{config}",
        uses={"config": {"call": "engine.config.Config", "without": ["chunked"]}},
        shape={"parameter": "{config.target}", "name": "chunked", "default": ["True"]},
    )
    document = audit(CONFIG.format(arguments="**more"), one)
    assert behaviours(document) == []
    assert any("**more" in entry["reason"] for entry in document["unresolved"] if entry.get("contract"))


RPC = "from engine.runner import Runner\n\ndef go():\n    runner = Runner()\n    {use}\n"


@pytest.mark.parametrize(
    ("use", "applies"),
    [
        ("first = runner.rpc('x', rank=0)[0]", True),
        ("all = runner.rpc('x', rank=0)\n    return all[0]", True),
        ("all = runner.rpc('x', 0)\n    return all[0]", True),
        ("all = runner.rpc('x', rank=0)\n    return all", False),
        ("all = runner.rpc('x')\n    return all[0]", False),
        ("all = runner.rpc('x', rank=0)\n    return other[0]", False),
    ],
)
def test_what_is_done_with_a_result_is_followed_by_name(audit: Any, use: str, applies: bool) -> None:
    one = contract(
        uses={"call": {"call": "*Runner.rpc", "with": {"rank": "$R"}, "result": "$RESULT[0]"}},
        shape={"body": "{call.target}", "has": "$X[0] if $R is not None else $X"},
    )
    assert bool(behaviours(audit(RPC.format(use=use), one))) is applies


LOOP = """
from engine.runner import Runner

def go(scheduler):
    runner = Runner()
    while scheduler.next():
        {body}
"""


@pytest.mark.parametrize(
    ("body", "applies"),
    [
        ("runner.step(1)", True),
        ("for x in [1]:\n            runner.step(x)", True),
        ("if x:\n            runner.step(1)", False),
    ],
)
def test_in_loop_asks_for_every_pass(audit: Any, body: str, applies: bool) -> None:
    one = contract(uses={"call": {"call": "*Runner.step", "in_loop": "$S.next()"}})
    assert bool(behaviours(audit(LOOP.format(body=body), one))) is applies


GATE = """
from engine.models.all import supports

def check(model):
    if not supports(model):
        raise ValueError
"""


@pytest.mark.parametrize(
    ("model", "found"),
    [(None, ["risk"]), ("SlowModel", ["contract"]), ("FastModel", []), ("Child", []), ("Nothing", ["risk"])],
)
def test_what_depends_on_the_model_is_a_risk_until_the_model_is_named(
    audit: Any, model: str | None, found: list[str]
) -> None:
    one = contract(
        uses={"call": {"call": "*.supports", "guards_raise": True}},
        shape={
            "model_lacks_base": "Gate",
            "under": "engine.models",
            "undecided_detail": "classes without Gate are refused",
        },
    )
    document = audit(GATE, one, model=model)
    assert [confidence for _, _, confidence in behaviours(document)] == found


def test_the_first_case_that_fits_overrides_and_a_case_may_exclude(audit: Any) -> None:
    cases = [
        {"if": {"exists": "engine.config.Config.nothing"}, "confidence": "risk"},
        {"if": {"model_not_in": "engine.config.DEFAULT_FAST"}, "detail": "slow"},
        {"if": {"exists": "engine.config.Config.fast"}, "confidence": "risk"},
    ]
    one = contract(cases=cases)
    assert behaviours(audit(STEP, one)) == [("c", 10, "risk")]
    slow = audit(STEP, one, model="SlowModel")
    assert [(f["confidence"], f["detail"]) for f in slow["findings"] if f["contract"]] == [("contract", "slow")]
    assert behaviours(audit(STEP, contract(cases=[{"excluded": True}]))) == []


def test_uses_must_stand_together_where_that_is_asked(audit: Any) -> None:
    uses = {"rows": {"pattern": "$R[$O : $O + $N]"}, "call": {"call": "*Runner.step", "same": "function"}}
    apart = STEP + "\ndef cut(rows, o, n):\n    return rows[o : o + n]\n"
    together = STEP + "            rows[o : o + n]\n"
    assert behaviours(audit(apart, contract(uses=uses, symbol="{call}"))) == []
    assert behaviours(audit(together, contract(uses=uses, symbol="{call}"))) == [("c", 11, "contract")]


def test_text_of_a_client_that_imports_nothing_of_the_provider_counts(audit: Any) -> None:
    client = "def ask(http):\n    return http.post(f'{http.base}/v1/render', json={}).get('path')\n"
    server = {"serve/__init__.py": "", "serve/routes.py": "ROUTES = ['/v1/other']\n"}
    uses = {"client": {"string": "/v1/render$"}}
    one = contract(uses=uses, symbol="engine.serve", shape={"not": {"under": "engine.serve", "has_text": "v1/render"}})
    assert behaviours(audit(client, one, provider=server)) == [("c", 2, "contract")]
    server["serve/routes.py"] = "ROUTES = ['/v1/render']\n"
    assert behaviours(audit(client, one, provider=server)) == []


@pytest.mark.parametrize(
    "broken",
    [
        {"shape": {"nonsense": 1}},
        {"uses": {"call": {"nonsense": 1}}},
        {"uses": {"call": {"pattern": "def ("}}},
        {"symbol": "{nobody}"},
    ],
)
def test_a_malformed_contract_is_named(audit: Any, broken: dict[str, Any]) -> None:
    with pytest.raises(evaluator.ContractError, match="contract c:"):
        audit(STEP, contract(**broken))
