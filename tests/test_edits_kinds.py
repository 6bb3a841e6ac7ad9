"""Edits: what each kind does, what it leaves alone, and when it refuses."""

from __future__ import annotations

import pytest

from remoteops.edits import edit
from remoteops.errors import AnchorNotFound, PatchError, UsageError


def run(text: str, *edits: dict, name: str = "a.py") -> str:
    data = text.encode("utf-8")
    once = edit(data, edits, name).data
    assert edit(once, edits, name).data == once, "a second application must change nothing"
    return once.decode("utf-8")


CALL = """\
x = make(
    first,  # one
    b=2,  # two
    # about c
    c=f(3, 4),
)  # end
"""


@pytest.mark.parametrize(
    ("before", "keyword", "after"),
    [
        ("f(a, b=1, c=2)\n", "b", "f(a, c=2)\n"),
        ("f(a, b=1)\n", "b", "f(a)\n"),
        ("f(b=1)\n", "b", "f()\n"),
        ("f(a, b=1,)\n", "b", "f(a,)\n"),
        ("f(\n    a,\n    b=1,\n)\n", "b", "f(\n    a,\n)\n"),
        ("f(\n    b=1,\n)\n", "b", "f(\n)\n"),
        ("f(\n    a,\n    b=1\n)\n", "b", "f(\n    a\n)\n"),
        ("f(a,\n  b=1)\n", "b", "f(a)\n"),
        ("f(a,  # kept\n  b=1)\n", "b", "f(a,  # kept\n  )\n"),
        ("f(\n    a,\n    b=(\n        1\n    ),\n    c=3,\n)\n", "b", "f(\n    a,\n    c=3,\n)\n"),
        ("f(a, b=lambda x, y: (x, y), c=3)\n", "b", "f(a, c=3)\n"),
        ("f(a, b=1  # kept\n  , c=3)\n", "b", "f(a,   # kept\n   c=3)\n"),
    ],
)
def test_drop_keyword_leaves_a_call_as_a_person_would(before: str, keyword: str, after: str) -> None:
    assert run(before, {"edit": "drop-keyword", "call": "f", "keyword": keyword}) == after


def test_drop_keyword_keeps_every_comment() -> None:
    after = run(CALL, {"edit": "drop-keyword", "call": "make", "keyword": "b"})
    for comment in ("# one", "# two", "# about c", "# end"):
        assert comment in after
    assert "b=2" not in after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("f()\n", "f(k=1)\n"),
        ("f(a)\n", "f(a, k=1)\n"),
        ("f(a,)\n", "f(a, k=1,)\n"),
        ("f(\n    a,  # why\n)\n", "f(\n    a,  # why\n    k=1,\n)\n"),
        ("f(\n    a  # why\n)\n", "f(\n    a,  # why\n    k=1\n)\n"),
        ("f(a\n  )\n", "f(a, k=1\n  )\n"),
        ("f( # c\n)\n", "f(k=1 # c\n)\n"),
        ("f(*args)\n", "f(*args, k=1)\n"),
        ("if x:\n\ty = f(\n\t\ta,\n\t)\n", "if x:\n\ty = f(\n\t\ta,\n\t\tk=1,\n\t)\n"),
    ],
)
def test_add_keyword_follows_the_layout_of_the_call(before: str, after: str) -> None:
    assert run(before, {"edit": "add-keyword", "call": "f", "keyword": "k", "value": "1"}) == after


@pytest.mark.parametrize("text", ["f(k=2)\n", "f(**more)\n", "f(x for x in y)\n"])
def test_add_keyword_refuses_what_it_would_have_to_guess(text: str) -> None:
    with pytest.raises(AnchorNotFound, match=r"a\.py:1"):
        run(text, {"edit": "add-keyword", "call": "f", "keyword": "k", "value": "1"})


def test_add_keyword_takes_a_value_from_the_call_itself() -> None:
    after = run(
        "s = Scheduler(config=self.c)\n",
        {
            "edit": "add-keyword",
            "call": "Scheduler",
            "keyword": "size",
            "value": "$config.size",
            "bind": {"config": {"argument": "config"}},
        },
    )
    assert after == "s = Scheduler(config=self.c, size=self.c.size)\n"


def test_rename_keyword_touches_the_name_alone() -> None:
    assert (
        run("f( a = 1 , b=2)\n", {"edit": "rename-keyword", "call": "f", "keyword": "a", "to": "z"})
        == "f( z = 1 , b=2)\n"
    )
    with pytest.raises(AnchorNotFound, match="both"):
        run("f(a=1, z=2)\n", {"edit": "rename-keyword", "call": "f", "keyword": "a", "to": "z"})


def test_a_position_picks_one_of_several_and_its_absence_is_refused() -> None:
    text = "def g():\n    f(a=1)\n    f(a=2)\n"
    drop = {"edit": "drop-keyword", "call": "f", "keyword": "a"}
    assert run(text, {**drop, "line": 3, "column": 4}) == "def g():\n    f(a=1)\n    f()\n"
    with pytest.raises(AnchorNotFound, match=r"2 times \(lines 2, 3\)") as caught:
        run(text, drop)
    assert caught.value.data["line"] == 2


def test_a_scope_narrows_the_search() -> None:
    text = "class A:\n    def m(self):\n        f(a=1)\n    def n(self):\n        f(a=2)\n"
    assert "f(a=1)" in run(text, {"edit": "drop-keyword", "call": "f", "keyword": "a", "scope": "A.n"})


def test_positions_are_those_of_the_audited_text_also_after_earlier_edits() -> None:
    text = "import m\nf(a=1)\nf(a=2)\nf(a=3)\n"
    edits = [
        {"edit": "insert-after", "statement": "import m", "code": "import n\nimport o"},
        {"edit": "drop-keyword", "call": "f", "keyword": "a", "line": 3, "column": 0},
        {"edit": "add-keyword", "call": "f", "keyword": "b", "value": "9", "line": 4, "column": 0},
    ]
    assert edit(text.encode(), edits).data.decode() == "import m\nimport n\nimport o\nf(a=1)\nf()\nf(a=3, b=9)\n"


def test_rename_attribute() -> None:
    assert (
        run(
            "y = self.model.old(1).old\n",
            {"edit": "rename-attribute", "attribute": "old", "to": "new", "receiver": "self.model"},
        )
        == "y = self.model.new(1).old\n"
    )
    with pytest.raises(AnchorNotFound, match="2 times"):
        run("a.old\nb.old\n", {"edit": "rename-attribute", "attribute": "old", "to": "new"})
    with pytest.raises(AnchorNotFound, match="no attribute"):
        run("a.other\n", {"edit": "rename-attribute", "attribute": "old", "to": "new"})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from a.b import x\n", "from c.d import x\n"),
        ("from a.b import x as y  # noqa\n", "from c.d import x as y  # noqa\n"),
        ("from a.b import w, x\n", "from a.b import w\nfrom c.d import x\n"),
        (
            "from a.b import (\n    x,  # it\n    w,\n)\nq = 1\n",
            "from a.b import (\n    # it\n    w,\n)\nfrom c.d import x\nq = 1\n",
        ),
        ("if T:\n    from a.b import w, x as z\n", "if T:\n    from a.b import w\n    from c.d import x as z\n"),
        ("from a.b import w, x\nfrom c.d import v\n", "from a.b import w\nfrom c.d import v, x\n"),
    ],
)
def test_rename_import_keeps_the_name_that_the_file_uses(before: str, after: str) -> None:
    assert run(before, {"edit": "rename-import", "name": "a.b.x", "to": "c.d.x"}) == after


def test_rename_import_of_a_renamed_symbol_keeps_the_local_name() -> None:
    assert (
        run("from a import x\nx()\n", {"edit": "rename-import", "name": "a.x", "to": "b.y"})
        == "from b import y as x\nx()\n"
    )
    assert (
        run("from a import w, x\n", {"edit": "rename-import", "name": "a.x", "to": "b.y"})
        == "from a import w\nfrom b import y as x\n"
    )


def test_rename_import_of_a_module() -> None:
    assert (
        run("import a.b\na.b.f()\n", {"edit": "rename-import", "name": "a.b", "to": "c.d"}) == "import c.d\nc.d.f()\n"
    )
    assert (
        run("import a.b as m\nm.f()\n", {"edit": "rename-import", "name": "a.b", "to": "c.d"})
        == "import c.d as m\nm.f()\n"
    )


def test_replace_expression_with_holes_and_bindings() -> None:
    text = "r = e.call(\n    1,\n)\nfirst = r[0]\nother = q[0]\n"
    after = run(text, {"edit": "replace-expression", "old": "$r[0]", "new": "$r", "bind": {"r": {"target-of": "call"}}})
    assert after == "r = e.call(\n    1,\n)\nfirst = r\nother = q[0]\n"


def test_replace_expression_by_something_that_holds_it_is_done_once() -> None:
    assert run("y = x + 1\n", {"edit": "replace-expression", "old": "x", "new": "f(x)"}) == "y = f(x) + 1\n"
    assert run("a(b[1], b[1])\n", {"edit": "replace-expression", "old": "b[1]", "new": "c", "all": True}) == "a(c, c)\n"
    with pytest.raises(AnchorNotFound, match="2 times"):
        run("a(b[1], b[1])\n", {"edit": "replace-expression", "old": "b[1]", "new": "c"})


def test_replace_statement_uses_the_files_own_indentation_and_line_ends() -> None:
    text = "def f(self):\r\n\tself.e.run(out)  # step\r\n\treturn 1\r\n"
    after = run(
        text, {"edit": "replace-statement", "old": "$e.run($o)", "code": "if $e.run($o) is None:\n    $e.more(None)\n"}
    )
    assert after == "def f(self):\r\n\tif self.e.run(out) is None:\r\n\t\tself.e.more(None)  # step\r\n\treturn 1\r\n"


def test_a_block_of_dots_matches_any_block() -> None:
    text = "def f(m):\n    if not ok(m):\n        a = 1\n        raise ValueError(a)\n    return m\n"
    after = run(text, {"edit": "replace-statement", "old": "if not ok($m):\n    ...", "code": "$m = $m.inner"})
    assert after == "def f(m):\n    m = m.inner\n    return m\n"


def test_insertions_stand_beside_their_anchor_once() -> None:
    text = "def f():\n    a = 1\n    b = 2  # two\n"
    assert run(text, {"edit": "insert-after", "statement": "b = 2", "code": "c = 3"}) == text + "    c = 3\n"
    assert run(text, {"edit": "insert-before", "statement": "a = 1", "code": "z = 0\ny = 0", "line": 2}) == (
        "def f():\n    z = 0\n    y = 0\n    a = 1\n    b = 2  # two\n"
    )
    with pytest.raises(UsageError, match="again each time"):
        run(text, {"edit": "insert-before", "statement": "a = $x", "code": "a = 5"})


def test_replace_function_needs_the_function_it_was_written_for() -> None:
    text = "class A:\n    @deco\n    # why\n    def m(self):\n        return old(1)\n\nx = 1\n"
    code = "def m(self):\n    return new(2)\n"
    assert run(text, {"edit": "replace-function", "function": "A.m", "code": code}) == text.replace("old(1)", "new(2)")
    with pytest.raises(AnchorNotFound, match="does not hold"):
        run(text, {"edit": "replace-function", "function": "A.m", "code": code, "expects": ["older($x)"]})


def test_insert_method_and_drop_statement() -> None:
    text = "class A:\n    def m(self):\n        x = 1\n        y = 2  # kept\n        return x\n\n\nz = 3\n"
    after = run(
        text,
        {"edit": "insert-method", "class": "A", "code": "def n(self):\n    return 1\n"},
        {"edit": "drop-statement", "statement": "x = 1", "scope": "A.m"},
        {"edit": "drop-statement", "statement": "y = 2", "scope": "A.m"},
    )
    assert (
        after
        == "class A:\n    def m(self):\n        # kept\n        return x\n\n"
        "    def n(self):\n        return 1\n\n\nz = 3\n"
    )
    with pytest.raises(AnchorNotFound, match="another n"):
        run(
            "class A:\n    def n(self):\n        return 5\n",
            {"edit": "insert-method", "class": "A", "code": "def n(self):\n    return 1\n"},
        )


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbff(a=1, b=2)\r\n",
        "# -*- coding: latin-1 -*-\nf(a=1, b='\xe9')\n".encode("latin-1"),
        b"f(a=1, b=2)",
        b"f(a=1, b=2)\r\ng()\n",
        "é = 'ü'; f(a=1, b=2)\n".encode(),
    ],
)
def test_bytes_outside_the_anchor_stay(data: bytes) -> None:
    after = edit(data, [{"edit": "drop-keyword", "call": "f", "keyword": "a"}]).data
    assert after == data.replace(b"a=1, ", b"")


def test_what_cannot_be_edited_safely_is_refused_with_the_reason() -> None:
    with pytest.raises(PatchError, match="does not parse"):
        edit(b"def f(:\n", [], "b.py")
    with pytest.raises(PatchError, match="decoded"):
        edit(b"x = '\xff'\n", [], "b.py")
    with pytest.raises(UsageError, match="no edit"):
        edit(b"x = 1\n", [{"edit": "guess"}])
    with pytest.raises(UsageError, match="lacks 'keyword'"):
        edit(b"f()\n", [{"edit": "drop-keyword", "call": "f"}])


def test_an_edit_tells_the_lines_it_wrote() -> None:
    result = edit(
        b"f(a=1)\ng()\nh()\n",
        [
            {"edit": "insert-before", "statement": "g()", "code": "i()\nj()"},
            {"edit": "add-keyword", "call": "h", "keyword": "k", "value": "1"},
            {"edit": "drop-keyword", "call": "f", "keyword": "zz"},
        ],
    )
    assert result.changed == [[(2, 3)], [(5, 5)], []]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = f(1, c=2), f(2, c=3)\n", "x = f(1), f(2)\n"),
        ("x = f(f(1, c=2), c=3)\n", "x = f(f(1))\n"),
        ("x = f(1, c=f(2, c=3))\n", "x = f(1)\n"),
        ("x = f(1, c=2), g.f(2, c=3)\n", "x = f(1), g.f(2, c=3)\n"),
        ("x = f(1, c=2)\ny = f(1, c=2)\n", "x = f(1)\ny = f(1, c=2)\n"),
    ],
)
def test_a_finding_of_a_line_drops_the_keyword_from_each_such_call_on_it(before: str, after: str) -> None:
    wanted = {"edit": "drop-keyword", "call": "f", "keyword": "c", "line": 1, "column": 4}
    assert run(before, wanted) == after
    renamed = {"edit": "rename-keyword", "call": "f", "keyword": "c", "to": "d", "line": 1, "column": 4}
    assert run("x = f(f(1, c=2), c=3), g.f(c=4)\n", renamed) == "x = f(f(1, d=2), d=3), g.f(c=4)\n"
