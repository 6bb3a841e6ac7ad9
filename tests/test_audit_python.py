"""What Python's own functions and types do with the provider is judged as if it were written out."""

from __future__ import annotations

import textwrap

import pytest
from audit_fixtures import Pair

MARKS = {"!": "proved", "?": "risk"}


def check(pair, app):
    """Each line that ends in ``# !`` is a break, in ``# ?`` a risk, in ``# ~`` not decided, and no other line is."""
    wanted, got = {}, {}
    for number, line in enumerate(textwrap.dedent(app).splitlines(), 1):
        if line[-3:-1] == "# ":
            wanted[number] = line[-1]
    for finding in pair.document["findings"]:
        got.setdefault(finding["line"], "?" if finding["confidence"] == "risk" else "!")
    for line, _reason in pair.unresolved:
        got.setdefault(line, "~")
    assert got == wanted


LIB = """
    import collections, dataclasses, enum, typing
    lam = lambda x, y=2: [x]
    Point = collections.namedtuple("Point", "x y", defaults=[0])
    Typed = typing.NamedTuple("Typed", [("a", int), ("b", str)])
    Color = enum.Enum("Color", "RED GREEN")
    Made = dataclasses.make_dataclass("Made", ["a", ("b", int), ("c", int, dataclasses.field(default=1))])
    Open = collections.namedtuple("Open", names())
    class Derived(collections.namedtuple("Derived", ["p", "q"])):
        def total(self): return self.p + self.q
    class Opts(typing.TypedDict):
        depth: int
    @dataclasses.dataclass
    class Conf:
        a: int
        b: int = 2
    class Err(Exception):
        def __init__(self, code): self.code = code
    class Worse(Err):
        detail = ""
    class Box:
        turn = lambda self, angle: angle
        label: str = "b"
        def words(self): return ["a", "b"]
        def nothing(self):
            self.done = True
        def stub(self): raise NotImplementedError
        def options(self) -> Opts: return {"depth": 1}
        def named(self) -> str: return self.label
        async def later(self): return {"k": 1}
        def maybe(self, x): return "text" if x else self
"""


def test_classes_and_functions_made_by_a_call(tmp_path):
    app = """
        import lib
        lib.lam(1); lib.lam(1, y=3); lib.lam(1).append(2)
        lib.lam()                       # !
        lib.lam(1, z=2)                 # !
        lib.Point(1); lib.Point(1, y=2).x
        lib.Point(1, 2, 3)              # !
        lib.Point(1).z                  # !
        lib.Typed(1)                    # !
        lib.Color.RED.value; lib.Color("RED")
        lib.Color.BLUE                  # !
        lib.Made(1, 2).c
        lib.Made(1)                     # !
        lib.Derived(1, 2).total(); lib.Derived(1, q=2).p
        lib.Derived(1)                  # !
        lib.Open(1, 2, 3).whatever      # ~
        lib.Box().turn(1)
        lib.Box().turn()                # !
        lib.Box.turn(None, 2)
    """
    check(Pair(tmp_path, {"lib/__init__.py": LIB}, app), app)


def test_lookups_by_name(tmp_path):
    app = """
        import importlib, lib
        from importlib import import_module
        getattr(lib, "Box"); getattr(lib, "gone", None)
        getattr(lib, "gone")                            # !
        getattr(lib.Box(), "gone")                      # !
        name = input()
        getattr(lib, name)                              # ~
        import_module("lib").Box
        import_module("lib").Gone                       # !
        import_module("lib.gone")                       # !
        import_module(f"lib.{name}")                    # ~
        try:
            import_module("lib.gone")
        except ImportError:
            pass
        if hasattr(lib, "gone"):
            getattr(lib, "gone")
    """
    check(Pair(tmp_path, {"lib/__init__.py": LIB}, app), app)


def test_replacing_fields(tmp_path):
    app = """
        import dataclasses, lib
        c, p = lib.Conf(1), lib.Point(1)
        dataclasses.replace(c, b=3).a
        dataclasses.replace(c, zz=3)                    # !
        p._replace(x=3)
        p._replace(zz=3)                                # !
        more = dict(input())
        dataclasses.replace(c, **more)                  # ~
    """
    check(Pair(tmp_path, {"lib/__init__.py": LIB}, app), app)


def test_what_an_exception_carries(tmp_path):
    app = """
        import lib
        try:
            lib.Box()
        except (lib.Err, OSError) as e:
            e.code, e.args
        try:
            lib.Box()
        except lib.Err as e:
            e.add_note("x"); e.__cause__; e.reason      # !
        try:
            lib.Box()
        except lib.Err as e:
            e.detail
        try:
            lib.Box()
        except lib.Gone:                                # ?
            pass
    """
    check(Pair(tmp_path, {"lib/__init__.py": LIB}, app), app)


def test_results_of_plain_types(tmp_path):
    app = """
        import lib
        b = lib.Box()
        b.words().append("c"); b.words()[0].upper()
        b.words().size                                  # !
        b.options().items()
        b.options().depth                               # !
        b.options()["depth"]
        b.named().upper()
        b.named().size                                  # !
        b.label.gone                                    # ?
        b.nothing().x                                   # !
        r = b.nothing()
        if r is not None:
            r.x
        b.stub().x                                      # ~
        b.maybe(1).words
        async def run():
            (await b.later()).items()
            (await b.later()).k                         # !
    """
    check(Pair(tmp_path, {"lib/__init__.py": LIB}, app), app)


@pytest.mark.parametrize("text", ["Thing = make()", "Thing = registry['x']"])
def test_what_is_called_and_not_known_is_not_called_fine(tmp_path, text):
    lib = f"import other\nfrom other import make, registry\n{text}\n"
    pair = Pair(tmp_path, {"lib/__init__.py": lib}, "import lib\nfrom lib import Thing\nThing(1)\nlib.Thing(1)\n")
    assert [line for line, _reason in pair.unresolved] == [3, 4]
    assert not pair.clean and not pair.document["findings"]


def test_keywords_in_a_dict_that_is_spelled_out(tmp_path):
    lib = "def f(a, b=1, *, c=2): ...\n"
    app = """
        import functools, lib
        FIXED = {"a": 1, "zz": 2}
        SHARED = {"a": 1}
        SHARED["zz"] = 3
        def plain(flag):
            kw = dict(a=1, b=2)
            lib.f(**kw)
            kw["zz"] = 1
            lib.f(**kw)                     # !
            kw.pop("zz")
            lib.f(**kw)
            lib.f(1, **kw)                  # !
            kw: dict[str, int] = {"a": 1}
            kw.update(c=3)
            lib.f(**kw)
            kw.update({"yy": 3})
            lib.f(**kw)                     # !
            del kw["yy"]
            lib.f(**kw)
        def sometimes(flag):
            kw = {"a": 1}
            if flag:
                kw["zz"] = 1
            lib.f(**kw)                     # ?
            if flag:
                kw = {"a": 2, "c": 3}
            else:
                kw = {"a": 2}
            lib.f(**kw)
        def not_known(flag, register):
            kw = {"b": 1}
            register(kw)
            lib.f(**kw)                     # ~
            more = register()
            lib.f(**more)                   # ~
            loop = {}
            for n in flag:
                lib.f(**loop)               # ~
                loop["a"] = n
            args = [1]
            register(args)
            lib.f(*args)                    # ~
        def module_level():
            lib.f(**FIXED)                  # !
            lib.f(**SHARED)                 # ~
        def places():
            args = [1, 2]
            lib.f(*args)
            args.append(3)
            lib.f(*args)                    # !
            three = (1, 2, 3)
            lib.f(*three, c=1)              # !
    """
    check(Pair(tmp_path, {"lib/__init__.py": lib}, app), app)


def test_what_is_handed_on_is_judged_where_it_arrives(tmp_path):
    lib = """
        import dataclasses, functools
        def f(a, b=1, *, c=2): ...
        def fwd(*args, **kwargs):
            return f(*args, **kwargs)
        @functools.wraps(f)
        def wrapped(*args, **kwargs):
            with lock():
                result = f(*args, **kwargs)
            return result
        def takes_out(x, **kwargs):
            kwargs.pop("zz", None)
            kwargs["b"] = 3
            return f(x, **kwargs)
        def either(flag, **kwargs):
            if flag:
                return f(**kwargs)
            return print(**kwargs)
        def far(**kwargs):
            return fwd(1, **kwargs)
        def rewritten(**kwargs):
            kwargs = clean(kwargs)
            return f(1, **kwargs)
        def inject(fn):
            @functools.wraps(fn)
            def inner(*args, **kwargs):
                return fn(connection(), *args, **kwargs)
            return inner
        @inject
        def query(connection, sql): ...
        @dataclasses.dataclass
        class Base:
            a: int = 1
            @classmethod
            def make(cls, **fields):
                return cls(**fields)
        class Plain:
            def __init__(self, size): ...
        class Sub(Plain):
            def __init__(self, name, **kwargs):
                super().__init__(**kwargs)
    """
    app = """
        import functools, lib
        lib.fwd(1, c=3); lib.wrapped(1, 2); lib.far(c=1)
        lib.fwd(1, zz=2)                        # !
        lib.fwd()                               # !
        lib.wrapped(1, zz=2)                    # !
        lib.far(zz=1)                           # !
        lib.takes_out(1, zz=1)
        lib.takes_out(1, yy=1)                  # !
        lib.either(True, zz=1)                  # ?
        lib.rewritten(zz=1)                     # ~
        lib.query("select")
        lib.query("select", 1)                  # !
        lib.Base.make(a=2)
        lib.Base.make(zz=2)                     # !
        lib.Sub("n", size=1)
        lib.Sub("n")                            # !
        lib.Sub("n", size=1, zz=2)              # !
        run(functools.partial(lib.f, zz=1))     # ?
        run(functools.partial(lib.f, c=1))
    """
    check(Pair(tmp_path, {"lib/__init__.py": lib}, app), app)


def test_versions_taken_apart(tmp_path):
    lib = "__version__ = '2.7.1'\ndef new(): ...\n"
    app = """
        import lib
        from packaging.version import parse
        OLD = lib.__version__.startswith("1.")
        MAJOR = int(lib.__version__.split(".")[0])
        if OLD:
            lib.old()
        if MAJOR < 2:
            lib.old()
        elif parse(lib.__version__).major >= 2:
            lib.new()
            lib.gone()                          # !
        else:
            lib.old()
    """
    path = tmp_path / "lib-1.0" / "lib-2.7.1.dist-info"
    path.mkdir(parents=True)
    (path / "METADATA").write_text("Metadata-Version: 2.1\nName: lib\nVersion: 2.7.1\n")
    (path / "top_level.txt").write_text("lib\n")
    check(Pair(tmp_path, {"lib/__init__.py": lib}, app), app)


def test_a_function_of_another_class_put_into_a_class_is_a_method(tmp_path):
    lib = """
        class Representation:
            def shown(self, mark): return mark
        class Model:
            shown = Representation.shown
        def one_of(x) -> "Union[A, B, C]": ...
        class A:
            only = 1
        class B: ...
        class C: ...
        from typing import Union
    """
    app = """
        import lib
        lib.Model().shown(",")
        lib.Model().shown()                     # !
        class Mine(lib.Model):
            def __repr__(self): return self.shown("x")
        lib.one_of(1).only                      # ?
        lib.one_of(1).none                      # !
    """
    check(Pair(tmp_path, {"lib/__init__.py": lib}, app), app)
