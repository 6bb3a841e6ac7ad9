"""Whatever an edit returns parses, differs from the source only at the anchor, and is a fixed point."""

from __future__ import annotations

import ast
import io
import os
import textwrap
import tokenize

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remoteops.edits import edit
from remoteops.errors import AnchorNotFound

SETTINGS = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "40")), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

values = st.sampled_from(
    [
        "1",
        "'a,b'",
        '"x"',
        "(1, 2)",
        "[i for i in y]",
        "lambda p, q=2: (p, q)",
        "g(h=1, i=2)",
        "{**d}",
        "f'{x!r}'",
        "not z",
        "(yield_)",
        "a if b else c",
        '"""t\nu"""',
        "-1",
        "self.m.n[0]",
    ]
)
comments = st.sampled_from(["", "", "", "  # note", " # type: ignore[x]", "#"])
gaps = st.sampled_from([" ", " ", "", "  "])
NAMES = ["alpha", "beta", "gamma", "delta"]


@st.composite
def arguments(draw: st.DrawFn) -> list[tuple[str, str]]:
    """(text, keyword name or "")"""
    found = [(draw(values), "") for _ in range(draw(st.integers(0, 2)))]
    if draw(st.booleans()):
        found.append(("*rest", ""))
    for name in draw(st.permutations(NAMES))[: draw(st.integers(0, 4))]:
        equal = draw(st.sampled_from(["=", "=", " = "]))
        found.append((f"{name}{equal}{draw(values)}", name))
    return found


@st.composite
def calls(draw: st.DrawFn, callee: str) -> str:
    """A call in any layout: one line, one argument a line, mixed, with comments wherever they may stand."""
    found = [text for text, _ in draw(arguments())]
    several = draw(st.booleans())
    text = f"{callee}{draw(st.sampled_from(['', '', ' ']))}("
    if several and found:
        text += draw(comments) + "\n"
    for i, argument in enumerate(found):
        last = i == len(found) - 1
        indent = "        " if several and text.endswith("\n") else ""
        comma = "" if last and draw(st.booleans()) else ","
        text += indent + argument
        if several and draw(st.integers(0, 9)) == 0:
            text += "  # before the comma\n        "
        text += comma
        if several and draw(st.integers(0, 3)):
            text += draw(comments) + "\n"
            if draw(st.integers(0, 5)) == 0:
                text += "\n        # on its own\n"
        elif not last:
            text += draw(gaps)
    if several:
        text += "" if text.endswith("\n") else draw(st.sampled_from(["", "\n"]))
        text += "    " if text.endswith("\n") else ""
    return text + ")"


@st.composite
def sources(draw: st.DrawFn) -> tuple[bytes, str, str]:
    """(file, text, newline): functions around the one call of ``target``, with other calls as decoys."""
    body = draw(
        st.lists(
            st.sampled_from(["pass", "x = other(alpha=1, beta=2)", "obj.attr(1)", "s = '''a\nb'''", "# lone", ""]),
            max_size=4,
        )
    )
    before = draw(st.sampled_from(["x = ", "return ", "", "self.y = z = ", "yield "]))
    text = '"""Doc."""\nimport os\n\n\nclass K:\n    def m(self, x):\n'
    text += "".join(f"        {line}\n" if line else "\n" for line in body)
    call = draw(calls("self.target"))
    text += f"        {before}{call}{draw(comments)}\n"
    text += draw(
        st.sampled_from(
            ["", "        self.y = 1\n", "\n    # tail\n    def n(self):\n        self.attr = other(alpha=3)\n"]
        )
    )
    if draw(st.booleans()):
        text = text.rstrip("\n")
    try:
        compile(text, "<fuzz>", "exec", dont_inherit=True)
    except SyntaxError:  # "# before the comma" in an odd place, a comment swallowing a comma
        text = '"""Doc."""\n\n\ndef m(self):\n    self.target(1, alpha=2,  # c\n        beta=3)  # end\n'
    newline = draw(st.sampled_from(["\n", "\n", "\r\n"]))
    data = text.replace("\n", newline).encode()
    if draw(st.booleans()):
        data = b"\xef\xbb\xbf" + data
    return data, text, newline


def comments_of(data: bytes) -> list[str]:
    return [t.string for t in tokenize.tokenize(io.BytesIO(data).readline) if t.type == tokenize.COMMENT]


def keywords_of(data: bytes) -> dict[str, str]:
    call = target_of(data)
    return {k.arg: ast.unparse(k.value) for k in call.keywords if k.arg}


def target_of(data: bytes) -> ast.Call:
    return next(
        n
        for n in ast.walk(ast.parse(data))
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "target"
    )


def check(data: bytes, request: dict) -> bytes:
    """Properties of every edit; returns the edited bytes."""
    after = edit(data, [request]).data
    assert edit(after, [request]).data == after
    ast.parse(after)
    assert comments_of(after) == comments_of(data)
    assert after.startswith(b"\xef\xbb\xbf") == data.startswith(b"\xef\xbb\xbf")
    assert after.count(b"\r\n") == after.count(b"\n") if b"\r\n" in data else b"\r" not in after
    call = target_of(data)
    lines = data.splitlines(keepends=True)
    head = b"".join(lines[: call.lineno - 1])
    tail = b"".join(lines[call.end_lineno :])
    assert after.startswith(head) and after.endswith(tail)
    return after


@SETTINGS
@given(sources(), st.sampled_from(NAMES))
def test_drop_keyword(source: tuple[bytes, str, str], name: str) -> None:
    data = source[0]
    after = check(data, {"edit": "drop-keyword", "call": "target", "keyword": name})
    wanted = {k: v for k, v in keywords_of(data).items() if k != name}
    assert keywords_of(after) == wanted
    assert [ast.unparse(a) for a in target_of(after).args] == [ast.unparse(a) for a in target_of(data).args]


@SETTINGS
@given(sources(), st.sampled_from(["False", "self.c.d", "'q'", "f(1, b=2)"]))
def test_add_keyword(source: tuple[bytes, str, str], value: str) -> None:
    data = source[0]
    after = check(data, {"edit": "add-keyword", "call": "target", "keyword": "extra", "value": value})
    assert keywords_of(after) == {**keywords_of(data), "extra": value}
    assert [ast.unparse(a) for a in target_of(after).args] == [ast.unparse(a) for a in target_of(data).args]


@SETTINGS
@given(sources(), st.sampled_from(NAMES))
def test_rename_keyword(source: tuple[bytes, str, str], name: str) -> None:
    data = source[0]
    request = {"edit": "rename-keyword", "call": "target", "keyword": name, "to": "renamed"}
    if name not in keywords_of(data):
        try:
            edit(data, [request])
        except AnchorNotFound:
            return
        raise AssertionError("a keyword that is not there was renamed")
    after = check(data, request)
    assert keywords_of(after) == {("renamed" if k == name else k): v for k, v in keywords_of(data).items()}


@SETTINGS
@given(sources())
def test_rename_attribute_and_statements(source: tuple[bytes, str, str]) -> None:
    data = source[0]
    call = target_of(data)
    after = edit(data, [{"edit": "rename-attribute", "attribute": "target", "to": "goal"}]).data
    assert after == data.replace(b"self.target", b"self.goal")
    assert edit(after, [{"edit": "rename-attribute", "attribute": "target", "to": "goal"}]).data == after
    docstring = {"edit": "insert-before", "statement": "import os", "code": "import sys", "scope": ""}
    if b"import os" in data:
        inserted = edit(data, [docstring]).data
        assert inserted.replace(b"import sys\r\n", b"").replace(b"import sys\n", b"") == data
        assert edit(inserted, [docstring]).data == inserted
        assert target_of(inserted).lineno == call.lineno + 1


@SETTINGS
@given(
    st.lists(st.sampled_from(["a", "b", "c", "target", "e"]), min_size=1, max_size=5, unique=True),
    st.booleans(),
    st.booleans(),
    comments,
)
def test_rename_import(names: list[str], several: bool, indented: bool, comment: str) -> None:
    if several:
        text = "from p.q import (\n" + "".join(f"    {n},{comment}\n" for n in names) + ")\n"
    else:
        text = f"from p.q import {', '.join(names)}{comment}\n"
    if indented:
        text = "try:\n" + textwrap.indent(text, "    ") + "except ImportError:\n    pass\n"
    data = text.encode()
    request = {"edit": "rename-import", "name": "p.q.target", "to": "r.s.target"}
    if "target" not in names:
        try:
            edit(data, [request])
        except AnchorNotFound:
            return
        raise AssertionError("an import that is not there was renamed")
    after = edit(data, [request]).data
    assert edit(after, [request]).data == after
    assert comments_of(after) == comments_of(data)
    found = {(n.module, a.name) for n in ast.walk(ast.parse(after)) if isinstance(n, ast.ImportFrom) for a in n.names}
    assert found == {("r.s" if n == "target" else "p.q", n) for n in names}
