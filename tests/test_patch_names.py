"""A recipe writes code for the consumer as it is: names that the file has not are a reason to refuse."""

from __future__ import annotations

import pytest

from remoteops import drafting, recipes
from remoteops.errors import PatchError

SOURCE = b"def go(engine):\n    for %s in engine.steps():\n        engine.run(%s)\n"
FINDING = {"file": "tool/run.py", "line": 3, "kind": "behaviour", "symbol": "engine.run", "detail": "x", "rule": "r"}


def test_names_that_nothing_binds_are_told() -> None:
    text = b"import os\nTOP = 1\nclass A:\n"
    text += b"    def f(self, a):\n        b = [c for c in a]\n        return os, TOP, b, len, A, nowhere\n"
    assert drafting.undefined(text) == {"nowhere"}
    assert drafting.undefined(b"from os import *\ndef f():\n    return nowhere\n") == set()
    assert drafting.undefined(b"def f(:\n") == set()
    made = b"\xef\xbb\xbfdef f():\r\n    global made\r\n    made = 1\r\ndef g():\r\n    return __name__\r\n"
    assert drafting.undefined(made) == set()


@pytest.mark.parametrize("name", ["step", "other"])
def test_a_recipe_that_needs_another_name_is_refused_and_leaves_nothing(name: str) -> None:
    source = SOURCE.replace(b"%s", name.encode())
    planner = drafting.Planner({"tool/run.py": source})
    edit = {"edit": "insert-after", "scope": "go", "statement": "engine.run($x)", "code": "engine.sample(step)"}
    recipe = _recipe(edit)
    if name == "step":
        planner.fix(FINDING, recipe, {})
        assert b"engine.sample(step)" in planner.results([])["tool/run.py"][0]
    else:
        with pytest.raises(PatchError, match=r"writes names that tool/run\.py has not: step"):
            planner.fix(FINDING, recipe, {})
        assert planner.results([]) == {}


def _recipe(edit: dict[str, str]) -> recipes.Recipe:
    return recipes.Recipe("sample", "sample after each run", ({"kind": "behaviour"},), ((edit,),))
