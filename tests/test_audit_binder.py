"""The argument binder does what a call and inspect.Signature.bind do, and is sure only where the call leaves no
choice.
"""

from __future__ import annotations

import ast
import inspect

from hypothesis import given, settings
from hypothesis import strategies as st

from remoteops.agent.audit.signatures import arguments_of, bind, from_arguments

NAMES = ["a", "b", "c", "d", "e"]


@st.composite
def definitions(draw):
    """Text of a parameter list, as any ``def`` may have it."""
    names = draw(st.permutations(NAMES))
    counts = [draw(st.integers(0, 2)) for _ in range(3)]
    star, double = draw(st.sampled_from(["", "*", "*args"])), draw(st.booleans())
    only, plain, keyword = names[: counts[0]], names[2 : 2 + counts[1]], names[4 : 4 + min(counts[2], 1)]
    first_default = draw(st.integers(0, len(only) + len(plain)))
    positional = [name + ("=0" if place >= first_default else "") for place, name in enumerate([*only, *plain])]
    parts = positional[: len(only)] + (["/"] if only else []) + positional[len(only) :]
    keywords = [name + draw(st.sampled_from(["", "=0"])) for name in keyword]
    if star == "*args" or keywords:
        parts += [star if star == "*args" else "*", *keywords]
    return ", ".join(parts + (["**rest"] if double else []))


calls = st.tuples(st.integers(0, 5), st.lists(st.sampled_from([*NAMES, "z"]), unique=True, max_size=4))


def shapes(parameters: str, count: int, keywords: list[str], extra: str = ""):
    tree = ast.parse(f"def f({parameters}): pass").body[0]
    arguments = ["0"] * count + [f"{name}=0" for name in keywords] + ([extra] if extra else [])
    call = ast.parse(f"f({', '.join(arguments)})", mode="eval").body
    return bind(from_arguments(tree.args), arguments_of(call))


def accepts(function, count: int, keywords: list[str]) -> bool:
    try:
        function(*[0] * count, **dict.fromkeys(keywords, 0))
    except TypeError:
        return False
    return True


@settings(max_examples=600, deadline=None)
@given(definitions(), calls)
def test_a_call_fits_exactly_when_python_binds_it(parameters, call):
    space: dict = {}
    exec(f"def f({parameters}): pass", space)
    count, keywords = call
    signature = inspect.signature(space["f"])
    fits = accepts(space["f"], count, keywords)
    only = {p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_ONLY}
    if not only & set(keywords):  # where Signature.bind is stricter than a call: f(a=0) on `def f(a=0, /, **rest)`
        assert accepts(signature.bind, count, keywords) is fits
    outcome = shapes(parameters, count, keywords)
    assert outcome.fits is fits, (parameters, call, outcome)
    assert not outcome.open


@settings(max_examples=300, deadline=None)
@given(definitions(), calls, st.lists(st.sampled_from([*NAMES, "z"]), unique=True, max_size=4), st.integers(0, 3))
def test_hidden_arguments_never_make_a_call_a_break_that_some_content_would_fit(parameters, call, hidden, more):
    """If any content of ``*x`` or ``**x`` binds, no problem may be reported."""
    space: dict = {}
    exec(f"def f({parameters}): pass", space)
    signature, (count, keywords) = inspect.signature(space["f"]), call
    for extra, args, kwargs in (("**x", 0, hidden), ("*x", more, [])):
        try:
            signature.bind(
                *[0] * (count + args), **dict.fromkeys(keywords, 0), **{k: 0 for k in kwargs if k not in keywords}
            )
        except TypeError:
            continue
        source = (
            ["0"] * count
            + ([extra] if extra == "*x" else [])
            + [f"{k}=0" for k in keywords]
            + ([extra] if extra == "**x" else [])
        )
        tree = ast.parse(f"def f({parameters}): pass").body[0]
        outcome = bind(from_arguments(tree.args), arguments_of(ast.parse(f"f({', '.join(source)})", mode="eval").body))
        assert outcome.fits, (parameters, source, outcome)


def test_literal_star_arguments_are_spelled_out():
    call = ast.parse("f(*(1, 2), **{'k': 3})", mode="eval").body
    shape = arguments_of(call)
    assert (shape.positional, shape.keywords, shape.star, shape.double_star) == (2, ("k",), False, False)


def test_a_signature_reads_as_python_writes_it():
    text = "(a, b=1, /, c: int = 2, *args, d, e=3, **rest)"
    tree = ast.parse(f"def f{text}: pass").body[0]
    assert from_arguments(tree.args).text() == text
