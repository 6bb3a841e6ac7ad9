"""The ``generator-stock`` engine writes layers in the order of the job, whichever order the library returns."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import pytest

from remoteops.agent.extraction import library, stock


class Row(NamedTuple):
    index: int  # type: ignore[assignment]
    input_ids: list[int]


class States:
    """One layer's states: two numbers a token."""

    def __init__(self, depth: int, tokens: int) -> None:
        self.depth, self.shape = depth, (tokens, 2)

    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    def element_size(self) -> int:
        return 4


class Library:
    """As the library is: captures upwards, each layer once; patched, it gives them in the order of its ids."""

    def __init__(self, ids: list[int], patched: bool) -> None:
        self.ids = ids if patched else sorted(set(ids))

    def generate(self, batch: list[list[int]]) -> list[dict[str, Any]]:
        return [{"hidden_states": [States(k + 1, len(ids)) for k in self.ids]} for ids in batch]


class Kept:
    """A store and a reporter at once."""

    stopping = False

    def __init__(self) -> None:
        self.written: dict[int, list[int]] = {}

    def write(self, row: Row, states: list[States]) -> None:
        self.written[row.index] = [one.depth for one in states]

    def progress(self, *counts: int) -> None:
        pass


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("layers", [[8, 2, 6, 4], [2, 4, 6, 8], [3, 2, 3, 5]])
def test_layers_are_written_in_the_order_of_the_job(
    monkeypatch: pytest.MonkeyPatch, layers: list[int], patched: bool
) -> None:
    started: list[list[int]] = []

    class Generator(Library):
        def __init__(self, layer_ids: list[int], **_: Any) -> None:
            started.append(layer_ids)
            super().__init__(layer_ids, patched)

    module = type("module", (), {"VllmHiddenStatesGenerator": Generator})
    monkeypatch.setitem(sys.modules, library.MODULE, module)
    monkeypatch.setattr(library, "_cpu_memory", lambda *_: lambda: None)
    kept = Kept()
    engine = stock.StockEngine({"layers": layers, "model": "m"}, kept, threads=1)  # type: ignore[arg-type]
    engine.run([Row(i, [1] * (i + 1)) for i in range(11)], kept)
    assert kept.written == dict.fromkeys(range(11), layers)
    assert started == [sorted({depth - 1 for depth in layers})]
