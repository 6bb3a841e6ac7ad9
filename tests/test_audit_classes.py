"""Classes: constructors that decorators and bases make, methods through bases, attributes set in methods."""

from __future__ import annotations

import pytest
from audit_fixtures import Pair

CONFIG = """
    from dataclasses import InitVar, dataclass, field, KW_ONLY
    import dataclasses
    from typing import ClassVar, NamedTuple, Annotated
    import enum, attr, msgspec
    import pydantic
    from pydantic import BaseModel, ConfigDict, Field
    from pydantic.dataclasses import dataclass as pydantic_dataclass

    def config(cls=None, *, config=None, **kwargs):
        merged = ConfigDict(extra="forbid")
        if config is not None:
            merged.update(config)
        def decorator(cls):
            return pydantic_dataclass(cls, config=merged, **kwargs)
        if cls is None:
            return decorator
        return decorator(cls)

    def same(cls):
        return cls

    @dataclass
    class Base:
        a: int
        b: int = 0
        made: int = field(init=False, default=1)
        LIMIT: ClassVar[int] = 3

    @dataclass
    class Derived(Base):
        once: InitVar[int] = 0
        c: list = field(default_factory=list)
        _: KW_ONLY
        d: int = 5

    @config
    class Strict:
        x: InitVar[int]
        y: int = Field(default=1, ge=0)

    @same
    @pydantic_dataclass
    class Loose:
        x: int

    @config(config=ConfigDict(arbitrary_types_allowed=True))
    class Called:
        x: int

    class Model(BaseModel):
        model_config = ConfigDict(extra="forbid")
        name: str
        size: Annotated[int, Field(default=3)]
        needed: int = Field(...)
        _private: int = 0

    class Lenient(BaseModel):
        name: str = "x"

    class Packed(msgspec.Struct, kw_only=True):
        p: int
        q: int = 0

    @attr.define
    class Attrs:
        _hidden: int
        shown: int = attr.field(factory=int)

    class Point(NamedTuple):
        x: int
        y: int = 0

    class Colour(enum.Enum):
        RED = enum.auto()
        BLUE = 2
"""


@pytest.mark.parametrize(
    ("call", "problems"),
    [
        ("Base(1, 2)", []),
        ("Base(1, made=2)", [("unknown-kwarg", "made")]),
        ("Base()", [("missing-required", "a")]),
        ("Derived(1, 2, 3, [], d=4)", []),
        ("Derived(1, 2, 3, [], 4)", [("too-many-positional", "4")]),
        ("Strict(x=1)", []),
        ("Strict(y=1)", [("missing-required", "x")]),
        ("Strict(x=1, z=2)", [("unknown-kwarg", "z")]),
        ("Strict(x=1).y", []),
        ("Strict(x=1).x", [("missing-attribute", "x")]),
        ("Loose(x=1, anything=2)", []),
        ("Loose()", [("missing-required", "x")]),
        ("Called(x=1, z=1)", [("unknown-kwarg", "z")]),
        ("Model(name='a', needed=1)", []),
        ("Model(name='a')", [("missing-required", "needed")]),
        ("Model(name='a', needed=1, other=2)", [("unknown-kwarg", "other")]),
        ("Model('a', needed=1)", [("missing-required", "name"), ("too-many-positional", "0")]),
        ("Lenient(whatever=1)", []),
        ("Packed(p=1)", []),
        ("Packed(q=1)", [("missing-required", "p")]),
        ("Packed(p=1, r=1)", [("unknown-kwarg", "r")]),
        ("Attrs(hidden=1)", []),
        ("Attrs(_hidden=1)", [("missing-required", "hidden"), ("unknown-kwarg", "_hidden")]),
        ("Point(1).y", []),
        ("Point(1, 2, 3)", [("too-many-positional", "2")]),
        ("Colour.RED.value", []),
        ("Colour.GREEN", [("missing-attribute", "GREEN")]),
        ("dataclasses.replace(Base(1), a=2)", []),
    ],
)
def test_generated_constructors(tmp_path, call, problems):
    pair = Pair(
        tmp_path,
        {"lib/conf.py": CONFIG},
        f"from lib.conf import *\n{call}\n".replace(
            "*", call.split("(")[0].split(".")[0] if not call.startswith("dataclasses") else "Base, dataclasses"
        ),
    )
    assert sorted((kind, detail) for _line, kind, detail in pair.breaks) == sorted(problems)
    assert not pair.unresolved
    dropped = {"Loose(x=1, anything=2)": "anything", "Lenient(whatever=1)": "whatever"}.get(call)
    assert pair.risks == ([(2, "unknown-kwarg", dropped)] if dropped else [])  # pydantic drops it without a word


def test_methods_come_through_bases_in_other_modules(tmp_path):
    lib = {
        "lib/base.py": "from abc import ABC\nclass Root(ABC):\n    def start(self, timeout=1): ...\n    @property\n    def state(self) -> 'State': ...\nclass State:\n    done: bool\n",  # noqa: E501
        "lib/impl.py": "from lib.base import Root\nclass Engine(Root):\n    def run(self, *, fast=False): ...\n",
    }
    app = "from lib.impl import Engine\ne = Engine()\ne.start(timeout=2)\ne.run(fast=True)\ne.state.done\ne.state.gone\ne.start(wait=1)\ne.halt()\n"  # noqa: E501
    assert Pair(tmp_path, lib, app).breaks == [
        (6, "missing-attribute", "gone"),
        (7, "unknown-kwarg", "wait"),
        (8, "missing-attribute", "halt"),
    ]


def test_an_overriding_method_and_overloads_count_as_at_run_time(tmp_path):
    lib = {
        "lib/m.py": """
            from typing import overload
            class Base:
                @overload
                def call(self, a: int) -> int: ...
                @overload
                def call(self, a: str) -> str: ...
                def call(self, a): ...
            class Sub(Base):
                def call(self, a, extra=None): ...
        """
    }
    assert Pair(
        tmp_path, lib, "from lib.m import Sub, Base\nSub().call(1, extra=2)\nBase().call(1, extra=2)\n"
    ).breaks == [(3, "unknown-kwarg", "extra")]


def test_attributes_set_in_methods_exist_and_getattr_leaves_it_open(tmp_path):
    lib = {
        "lib/m.py": """
            class A:
                def __init__(self):
                    self.one, self.two = 1, B()
                    setattr(self, "three", 3)
            class B:
                def fill(self):
                    self.late: int = 1
            class Open:
                def __getattr__(self, name): ...
        """
    }
    app = "from lib.m import A, Open\na = A()\na.one\na.two.late\na.three\na.four\na.two.none\nOpen().anything\n"
    pair = Pair(tmp_path, lib, app)
    assert pair.breaks == [(6, "missing-attribute", "four"), (7, "missing-attribute", "none")]
    assert [line for line, _ in pair.unresolved] == [8]


def test_a_base_that_is_not_at_hand_leaves_a_class_open(tmp_path):
    lib = {"lib/m.py": "from elsewhere import Base\nclass A(Base):\n    def f(self): ...\n"}
    pair = Pair(tmp_path, lib, "from lib.m import A\nA(1).g()\n")
    assert not pair.breaks and {line for line, _ in pair.unresolved} == {2}


def test_decorators_keep_replace_or_hide_a_signature(tmp_path):
    lib = {
        "lib/m.py": """
            import functools, foreign
            def traced(name):
                def decorate(f):
                    @functools.wraps(f)
                    def inner(*args, **kwargs):
                        return f(*args, **kwargs)
                    return inner
                return decorate
            def renamed(f):
                def inner(*args, **kwargs):
                    kwargs["b"] = kwargs.pop("old")
                    return f(*args, **kwargs)
                return inner
            @traced("x")
            def kept(a): ...
            @renamed
            def rewritten(a, b): ...
            @foreign.magic
            def hidden(a): ...
        """
    }
    pair = Pair(
        tmp_path,
        lib,
        "from lib.m import *\nfrom lib.m import kept, rewritten, hidden\nkept(b=1)\nrewritten(1, old=2)\nhidden(b=1)\nhidden(a=1)\n",  # noqa: E501
    )
    assert pair.breaks == [(3, "missing-required", "a"), (3, "unknown-kwarg", "b")]
    assert [line for line, _ in pair.unresolved] == [4, 5]


def test_what_may_be_otherwise_at_run_time_is_no_break(tmp_path):
    lib = {
        "lib/m.py": """
            import functools, sys
            def inject(f):
                @functools.wraps(f)
                def inner(*args, **kwargs):
                    return f(42, *args, **kwargs)
                return inner
            @inject
            def injected(conn, x): ...
            class Meta(type):
                def __call__(cls, *args, **kwargs): ...
            class Made(metaclass=Meta):
                def __init__(self, a): ...
            class Other:
                def __init__(self, a):
                    self.a = a
            class Changed:
                def __new__(cls, a):
                    return Other(a)
            class Reader:
                def __get__(self, owner, kind): ...
            class Plain:
                read = Reader()
            if sys.platform == "linux":
                def f(a, b=1): ...
            else:
                def f(a, b): ...
            async def later(): ...
            class Turned:
                @property
                def size(self) -> int: ...
        """
    }
    app = """
        from lib.m import injected, Made, Changed, Plain, f, later, Turned
        injected(1)
        Made(1, 2, x=3)
        Changed(1).a
        Plain().read.anything
        p = Plain()
        p.mine = 1
        p.mine
        f(1)
        later().result                                      # 11
        Turned().size()                                     # 12
        f(1, c=2)                                           # 13
    """
    pair = Pair(tmp_path, lib, app)
    assert pair.breaks == [
        (11, "missing-attribute", "result"),
        (12, "missing-attribute", "__call__"),
        (13, "unknown-kwarg", "c"),
    ]
    assert (10, "missing-required", "b") in pair.risks


def test_what_the_consumer_puts_there_itself_is_there(tmp_path):
    app = "import lib.m\nfrom lib.m import C\nlib.m.fresh = 1\nlib.m.fresh\nsetattr(lib.m, 'other', 2)\nlib.m.other\nlib.m.gone\n"  # noqa: E501
    app += "c = C()\nsetattr(c, 'late', 1)\nc.late\nc.gone\n"
    pair = Pair(tmp_path, {"lib/m.py": "class C: ...\n"}, app)
    assert pair.breaks == [(7, "missing-attribute", "gone"), (11, "missing-attribute", "gone")]
