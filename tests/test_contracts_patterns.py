"""AST patterns: what they match, what they bind, what they refuse."""

from __future__ import annotations

import ast

import pytest

from remoteops.agent.audit import patterns


def found(pattern: str, code: str, **bound: str) -> list[str]:
    names = {name: ast.parse(text, mode="eval").body for name, text in bound.items()}
    return [ast.unparse(node) for node, _ in patterns.find(pattern, ast.parse(code), names)]


@pytest.mark.parametrize(
    ("pattern", "code", "hits"),
    [
        ("$X.schedule()", "a.schedule(); b.c.schedule(); schedule()", 2),
        ("$X.schedule()", "a.schedule(1)", 0),
        ("f(...)", "f(); f(1, *a, k=2, **b)", 2),
        ("f(..., k=$V)", "f(k=1); f(1, k=2, j=3); f(j=1)", 2),
        ("f(k=$V)", "f(k=1, j=2)", 0),
        ("f($A, $A)", "f(x, x); f(x, y)", 1),
        ("$R[0]", "a[0]; a[1]; a['0']", 1),
        ("$ROWS[$O : $O + $L]", "h[o:o + n]; h[o:p + n]; h[o:]", 1),
        (
            'raise E("~must be called")',
            "raise E('x() must be called first'); raise E('no'); raise E(f'{n} must be called')",
            2,
        ),
        ("if $I in self.layers: ...", "if i in self.layers:\n    a()\n    b()\nelse:\n    c()", 1),
        ("while ...: ...", "while x: pass", 1),
        ("for $A, $B in $C: ...", "for i, x in enumerate(y): pass", 1),
        ("$X[0] if $R is not None else $X", "return_ = a[0] if r is not None else a", 1),
        (
            "def f(): ...",
            "def f(self, x: int = 3) -> int:\n    '''doc'''\n    return 1\nasync def f(): pass\ndef g(): pass",
            2,
        ),
        ('d["a"] = $V', "d['a'] = 1; d['b'] = 1", 1),
        ('{"a": $V}', "{'a': 1}; {'a': 1, 'b': 2}", 1),
        ("assert len($R.h) >= $N", "assert len(request.h) >= n, 'text'", 1),
    ],
)
def test_pattern_matches_that_often(pattern: str, code: str, hits: int) -> None:
    assert len(found(pattern, code)) == hits


def test_a_name_given_from_outside_must_match_the_same_code() -> None:
    code = "states = rpc()\nstates[0]\nother[0]"
    assert found("$RESULT[0]", code, RESULT="states") == ["states[0]"]


def test_bindings_hold_the_nodes() -> None:
    (_, bound), *_ = patterns.find("$X.add($Y)", ast.parse("queue.add(item)"))
    assert {name: ast.unparse(node) for name, node in bound.items()} == {"X": "queue", "Y": "item"}


def test_matches_come_in_source_order() -> None:
    assert found("f($X)", "f(f(1))\nf(2)") == ["f(f(1))", "f(1)", "f(2)"]


def test_a_store_and_a_load_of_one_name_are_the_same_code() -> None:
    tree = ast.parse("x = rpc()\nx[0]")
    assert patterns.same(tree.body[0].targets[0], tree.body[1].value.value)


@pytest.mark.parametrize("text", ["def (", "a; b", ""])
def test_a_pattern_that_is_no_single_statement_is_refused_by_name(text: str) -> None:
    with pytest.raises(patterns.PatternError, match="pattern"):
        patterns.compile_pattern(text)


@pytest.mark.parametrize(
    ("pattern", "needle"),
    [
        ("$X.schedule()", "schedule"),
        ('$P.get("hidden_states_path")', "hidden_states_path"),
        ("$A[$B : $B + $C]", ""),
        ('raise E("~some text")', "raise"),
    ],
)
def test_needle_is_the_longest_name_of_a_pattern(pattern: str, needle: str) -> None:
    assert patterns.needle(pattern) == needle


def test_needle_never_hides_a_match() -> None:
    for pattern in ("$X.f(k=$V)", "for $A in sorted($B): ...", 'd["a"] = $V', 'raise Error("~x")'):
        code = pattern.replace("$X", "x").replace("$V", "1").replace("$A", "a").replace("$B", "b").replace("~", "")
        assert patterns.needle(pattern) in code
        assert found(pattern, code)
