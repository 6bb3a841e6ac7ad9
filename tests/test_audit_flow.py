"""Objects are followed from where they are made to where they are used, strings and replaced methods included."""

from __future__ import annotations

from audit_fixtures import Pair

ENGINE = {
    "lib/engine.py": """
        from typing import Any, Iterator, Optional, TypeVar
        from contextlib import contextmanager
        T = TypeVar("T")
        class Result:
            text: str
            parts: "list[Part]"
        class Part:
            size: int
        class Engine:
            def __init__(self, size: int): ...
            def step(self) -> Result: ...
            def guess(self) -> Any:
                return Result() if self.ready else [Result()]
            def pair(self):
                return Result(), Part()
            def maybe(self) -> Optional[Result]: ...
            async def soon(self) -> Result: ...
            def each(self) -> Iterator[Part]: ...
            @contextmanager
            def session(self) -> Iterator[Part]:
                yield Part()
        def make(kind: type[T]) -> T: ...
    """
}


def lines(pair):
    return [line for line, kind, _detail in pair.breaks if kind == "missing-attribute"]


def marked(text):
    """Lines that end in ``# !``."""
    return [number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# !")]


def test_objects_are_followed_through_names_and_attributes(tmp_path):
    app = """
        from functools import partial
        from lib.engine import Engine, make, Part
        class App:
            def __init__(self):
                self.engine = Engine(size=1)
            def run(self):
                while (out := self.engine.step()).text:
                    out.gone                                # !
                first, second = self.engine.pair()
                first.text, second.size, second.text        # !
                for part in out.parts:
                    part.size, part.gone                    # !
                with self.engine.session() as s:
                    s.size, s.gone                          # !
                found = {"a": self.engine.step()}
                found["a"].gone                             # !
                [p.gone for p in self.engine.each()]        # !
                make(Part).gone                             # !
                build = partial(Engine, 1)
                build().gone                                # !
                helper(self.engine)
            async def later(self):
                (await self.engine.soon()).gone             # !
        def helper(e):
            e.gone                                          # !
    """
    assert lines(Pair(tmp_path, ENGINE, app)) == marked(app)


def test_conditions_narrow_what_an_object_is(tmp_path):
    app = """
        from lib.engine import Engine, Result
        e = Engine(1)
        r = e.maybe()
        if r is not None:
            r.text
        if hasattr(e, "modern"):
            e.modern()
        else:
            e.step()
        getattr(e, "modern", None)
        try:
            e.modern()
        except AttributeError:
            pass
        x = e.guess()
        if isinstance(x, Result):
            x.gone                                          # !
    """
    pair = Pair(tmp_path, ENGINE, app)
    assert lines(pair) == marked(app) and not pair.risks


def test_arguments_passed_on_are_unresolved_and_wrong_ones_beside_them_are_not(tmp_path):
    app = "from lib.engine import Engine\ndef f(**kw):\n    Engine(**kw)\n    Engine(1, length=2, **kw)\n"
    pair = Pair(tmp_path, ENGINE, app)
    assert pair.breaks == [(4, "unknown-kwarg", "length")] and [line for line, _ in pair.unresolved] == [3]


def test_what_a_function_hands_on_is_judged_there(tmp_path):
    lib = """
        def target(a, b=1): ...
        def forward(first, *args, **kwargs):
            return target(*args, **kwargs)
        def own(first, **kwargs):
            return kwargs.get("b")
    """
    app = (
        "from lib import forward, own\n"
        "forward(0)\n"
        "forward(0, 1)\n"
        "forward(0, a=1, zz=2)\n"
        "own(0, b=2)\n"
    )
    pair = Pair(tmp_path, {"lib/__init__.py": lib}, app)
    assert pair.breaks == [(2, "missing-required", "a"), (4, "unknown-kwarg", "zz")] and not pair.unresolved


WORKERS = {
    "lib/conf.py": "from dataclasses import dataclass\n@dataclass\nclass Conf:\n    extension_path: str = ''\n",
    "lib/run.py": """
        from typing import Callable, Union
        class Pool:
            def __init__(self, conf): ...
            def broadcast(self, method: Union[str, Callable], args: tuple = (), kwargs: dict = None): ...
            def close(self):
                self.broadcast("shutdown")
                self.broadcast("load_model", args=("x",))
    """,
    "lib/work.py": """
        from lib.conf import Conf
        class Runner:
            model: object
        class BaseWorker:
            def shutdown(self): ...
            def load_model(self, name): ...
            def spec(self): ...
        class Worker(BaseWorker):
            def __init__(self):
                self.runner = Runner()
        def start(conf: Conf, cls: type[BaseWorker]):
            if conf.extension_path:
                extra = resolve(conf.extension_path)
                cls.__bases__ = cls.__bases__ + (extra,)
            return cls()
    """,
}


def test_methods_named_in_strings_are_looked_up_on_the_workers_and_what_is_mixed_into_them(tmp_path):
    app = """
        from lib.conf import Conf
        from lib.run import Pool
        class Extension:
            def capture(self):
                self.runner.model
                self.runner.gone                            # 7
                self.nothing                                # 8
        pool = Pool(Conf(extension_path="app.main.Extension"))
        pool.broadcast("spec")
        pool.broadcast("capture")
        pool.broadcast("vanished")                          # 12
        pool.broadcast("load_model", args=("a", "b"))       # 13
    """
    pair = Pair(tmp_path, WORKERS, app)
    assert pair.breaks == [
        (7, "missing-attribute", "gone"),
        (8, "missing-attribute", "nothing"),
        (12, "missing-attribute", "vanished"),
        (13, "too-many-positional", "1"),
    ]


MODELS = {
    "lib/models.py": """
        import torch.nn as nn
        from typing import Protocol, TypeGuard
        class Traced(Protocol):
            traced: bool
        def is_traced(model: object) -> "TypeGuard[Traced]":
            return isinstance(model, Traced)
        class Layer(nn.Module):
            def forward(self, x, residual): ...
        class OddLayer(nn.Module):
            def forward(self, x): ...
        class OneModel(nn.Module):
            def __init__(self):
                self.layers = nn.ModuleList([Layer() for _ in range(3)])
                self.norm = Layer()
            def embed(self, ids): ...
            def forward(self, ids, positions): ...
        class TwoModel(OneModel): ...
        class OddModel(OneModel):
            def __init__(self):
                self.layers = nn.ModuleList([OddLayer()])
                self.norm = Layer()
            def forward(self, ids, positions, deep=None): ...
        class One(nn.Module, Traced):
            def __init__(self):
                self.model = OneModel()
        class Two(nn.Module, Traced):
            def __init__(self):
                self.model = TwoModel()
        class Odd(nn.Module, Traced):
            def __init__(self):
                self.model = OddModel()
            def forward(self, ids):
                return self.model(ids, 0, deep=1)
    """
}
PATCHED = """
    import types
    from lib.models import is_traced
    def patched(self, ids, positions):
        x = self.get_embeddings(ids)                        # 5
        for layer in self.layers:
            x = layer(x, residual=x)                        # 7
        self.owner.note(x)
        return self.norm(x, x)
    class Owner:
        def note(self, x): ...
        def install(self, model):
            if not is_traced(model):
                raise ValueError(model)
            base = model.model
            base.owner = self
            base.forward = types.MethodType(patched, base)
"""


def test_a_function_bound_to_an_object_of_any_class_is_judged_over_all_of_them(tmp_path):
    pair = Pair(tmp_path, MODELS, PATCHED)
    assert pair.breaks == [(5, "missing-attribute", "get_embeddings")]
    assert pair.risks == [(4, "override-mismatch", "deep"), (7, "override-mismatch", "residual")]
    found = {f["detail"]: f for f in pair.document["findings"]}
    assert found["residual"]["classes"] == ["OddLayer"] and found["deep"]["classes"] == ["Odd"]
    assert found["get_embeddings"]["classes"] == ["OddModel", "OneModel", "TwoModel"]
    assert found["get_embeddings"]["symbol"] == "lib.models.OneModel.get_embeddings"  # the one that others derive from


def test_the_model_that_is_run_narrows_the_judgement_to_its_class(tmp_path):
    assert Pair(tmp_path / "one", MODELS, PATCHED, model="One").risks == []
    odd = Pair(tmp_path / "odd", MODELS, PATCHED, model="Odd")
    assert (7, "override-mismatch", "residual") in odd.breaks and (4, "override-mismatch", "deep") in odd.breaks


def test_overrides_are_checked_against_the_calls_that_the_provider_makes(tmp_path):
    lib = {
        "lib/base.py": """
            from abc import ABC, abstractmethod
            class Trainer(ABC):
                def train(self):
                    self.loss(1, items=2)
                    self.log({}, 0)
                def loss(self, batch, items=None): ...
                def log(self, values, start=None): ...
                def other(self, a): ...
                @abstractmethod
                def data(self): ...
        """
    }
    app = """
        from lib.base import Trainer
        class Mine(Trainer):
            def loss(self, batch): ...                      # 4
            def log(self, *args): ...
            def other(self): ...                            # 6
            def train(self):
                return super().train(fast=True)             # 8
        Mine()
    """
    pair = Pair(tmp_path, lib, app)
    assert pair.breaks == [
        (3, "override-mismatch", "data"),
        (4, "override-mismatch", "items"),
        (8, "unknown-kwarg", "fast"),
    ]
    assert pair.risks == [(6, "override-mismatch", "a")]


def test_a_baseline_shows_what_was_renamed_and_what_is_overridden_in_vain(tmp_path):
    body = "\n        for n in range(3):\n            print(n)\n        return ids\n"
    old = {
        "lib/m.py": f"class M:\n    def get(self, ids):{body}    def hook(self):\n        return 1\ndef f(first, second): ...\n"  # noqa: E501
    }
    new = {"lib/m.py": f"class M:\n    def fetch(self, ids):{body}def f(first, later): ...\n"}
    Pair(tmp_path / "old", old, "from lib.m import M\n")
    app = "from lib.m import M, f\nM().get(1)\nf(1, second=2)\nclass Mine(M):\n    def hook(self): ...\n"
    pair = Pair(tmp_path / "new", new, app, baseline_path=str(tmp_path / "old" / "lib-1.0"))
    found = {(f["line"], f["kind"]): f for f in pair.document["findings"]}
    renamed = found[2, "missing-attribute"]
    assert renamed["detail"] == "get: renamed to fetch" and renamed["fix"] == {
        "edit": "rename-attribute",
        "attribute": "get",
        "to": "fetch",
    }
    assert found[3, "unknown-kwarg"]["fix"] == {
        "edit": "rename-keyword",
        "call": "f",
        "keyword": "second",
        "to": "later",
    }
    assert found[5, "override-mismatch"]["confidence"] == "risk"


def test_what_a_condition_has_looked_for_is_no_break(tmp_path):
    lib = {"lib/__init__.py": "def f(a): ...\n"}
    app = """
        import inspect
        import lib
        def direct():
            if "zz" in inspect.signature(lib.f).parameters:
                lib.f(1, zz=2)
            lib.f(1, zz=2)                                  # !
        def by_name():
            names = inspect.getfullargspec(lib.f).args
            if "zz" not in names:
                return lib.f(1, zz=2)                       # !
            return lib.f(1, zz=2)
        def other(options):
            if "zz" in options:
                lib.f(1, zz=2)                              # !
        def listed():
            if "gone" in dir(lib):
                lib.gone
            lib.gone                                        # !
    """
    pair = Pair(tmp_path, lib, app)
    text = (tmp_path / "app-1.0" / "app" / "main.py").read_text()
    assert [line for line, _kind, _detail in pair.breaks] == marked(text)
    assert [line for line, _reason in pair.unresolved] == [6, 12]


def test_a_module_that_computes_which_names_it_serves_is_open(tmp_path):
    lib = {
        "lib/__init__.py": """
            def __getattr__(name):
                if name.startswith("make_"):
                    return name
                raise AttributeError(name)
        """,
        "lib/strict.py": """
            def __getattr__(name):
                if name == "one":
                    return name
                raise AttributeError(name.upper())
        """,
    }
    app = "import lib\nfrom lib import strict\nlib.make_it\nstrict.one\nstrict.two\n"
    assert Pair(tmp_path, lib, app).breaks == [(5, "missing-attribute", "two")]
