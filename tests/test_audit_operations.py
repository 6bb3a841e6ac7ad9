"""What Python does with an object by itself needs special methods, and a class may refuse a store."""

from __future__ import annotations

from audit_fixtures import Pair
from test_audit_python import check

LIB = """
    from typing import *
    from dataclasses import *
    import abc
    class Full:
        def __enter__(self): return self
        def __exit__(self, *a): ...
        def __iter__(self): return iter([Full()])
        def __len__(self): return 1
        def __getitem__(self, i): return self
        async def later(self): return self
        @property
        def only(self): return {"a": 1}
        @property
        def both(self): return 1
        @both.setter
        def both(self, value): ...
    class Bare:
        def __init__(self): self.n = 1
        def nothing(self): self.n = 2
    class Open(Bare):
        def __getattr__(self, name): return 1
    class Async:
        async def __aenter__(self): return self
        async def __aexit__(self, *a): ...
    class Slotted:
        __slots__ = ("a",)
    @dataclass(frozen=True)
    class Frozen:
        v: int = 1
    class Row(NamedTuple):
        a: int
    class Owes(abc.ABC):
        @abc.abstractmethod
        def must(self): ...
    class Pays(Owes):
        def must(self): ...
    class Meta(type):
        def __getattr__(cls, name): return 1
    class Served(metaclass=Meta): ...
"""


def test_special_methods(tmp_path):
    app = """
        import lib
        f, b = lib.Full(), lib.Bare()
        with f as inner: inner.only
        with b: pass                            # !
        for one in f: one.only
        for one in b: pass                      # !
        for one in b.nothing(): pass            # !
        len(f), f[0], lib.Row(1)[0], len(lib.Row(1))
        len(b)                                  # !
        b[0]                                    # !
        async def run():
            (await f.later()).only
            await b                             # !
            async with lib.Async(): pass
            async with f: pass                  # !
        with lib.Async(): pass                  # !
        class Mine(lib.Bare):
            def __len__(self): return 3
        len(Mine())
    """
    check(Pair(tmp_path, {"lib/__init__.py": LIB}, app), app)


def test_stores_that_are_refused(tmp_path):
    app = """
        import lib
        lib.Full().both = 2
        lib.Full().only = 2                     # !
        lib.Slotted().a = 1
        lib.Slotted().zz = 1                    # !
        lib.Frozen().v = 2                      # !
        lib.Row(1).a = 2                        # !
        lib.Bare().fresh = 2
        b = lib.Bare()
        b.n += 1
        b.gone += 1                             # !
        del lib.GONE                            # !
        lib.Full().only.gone                    # !
    """
    check(Pair(tmp_path, {"lib/__init__.py": LIB}, app), app)


def test_classes_that_owe_methods_or_make_attributes(tmp_path):
    app = """
        import lib
        lib.Pays().must()
        lib.Owes()                              # !
        lib.Served.anything                     # ~
        b = lib.Bare()
        if isinstance(b, lib.Full):
            b.only_there
        lib.Row(1).zz                           # !
        raise lib.Gone("x")                     # !
    """
    check(Pair(tmp_path, {"lib/__init__.py": LIB}, app), app)


def test_what_is_not_awaited(tmp_path):
    lib = """
        import functools, wraps
        class Item:
            n = 1
        async def fetch(x): return Item()
        async def many(): return [Item()]
        async def stream():
            yield Item()
        @wraps.eager
        async def eager(): return Item()
    """
    app = """
        import asyncio, lib
        async def run():
            item = await lib.fetch(1)
            item.n
            late = lib.fetch(1)
            late.n                              # !
            (await late).n
            for one in lib.many(): one.n        # !
            for one in await lib.many(): one.n
            with lib.fetch(1): pass             # !
            async for one in lib.stream(): one.n
            done = lib.eager()
            done.n
            tasks = [lib.fetch(n) for n in range(3)]
            for found in await asyncio.gather(*tasks): found.n
            late.close()
        asyncio.run(lib.fetch(1)).n
    """
    check(Pair(tmp_path, {"lib/__init__.py": lib}, app), app)
