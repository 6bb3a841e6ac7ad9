"""Names: imports, re-exports, lazy modules, guards; what is missing, what moved, what cannot be told."""

from __future__ import annotations

from audit_fixtures import Pair


def test_a_name_that_moved_is_found_in_its_new_place(tmp_path):
    pair = Pair(
        tmp_path, {"lib/old.py": "x = 1\n", "lib/new.py": "def work(a):\n    return a\n"}, "from lib.old import work\n"
    )
    assert pair.breaks == [(1, "moved-symbol", "now at lib.new")]
    finding = pair.document["findings"][0]
    assert finding["symbol"] == "lib.old.work" and finding["now_at"] == "lib/new.py:1" and finding["when"] == "import"
    assert finding["fix"] == {"edit": "rename-import", "name": "lib.old.work", "to": "lib.new.work"}


def test_a_name_that_is_nowhere_is_missing(tmp_path):
    pair = Pair(tmp_path, {"lib/old.py": "x = 1\n"}, "from lib.old import (\n    x,\n    work,\n)\nimport lib.gone\n")
    assert pair.breaks == [(3, "missing-symbol", "work"), (5, "missing-symbol", "gone")]


def test_re_exports_stars_and_all_are_followed(tmp_path):
    lib = {
        "lib/__init__.py": "from .a import *\nfrom .b import visible as shown\n",
        "lib/a.py": "__all__ = ['one']\n__all__ += ['two']\none = 1\ntwo = 2\nthree = 3\n",
        "lib/b.py": "from .c import *\n",
        "lib/c.py": "visible = 1\n_hidden = 2\n",
    }
    pair = Pair(
        tmp_path,
        lib,
        "from lib import one, two, shown\nfrom lib.b import visible\nfrom lib import three\nfrom lib.b import _hidden\n",  # noqa: E501
    )
    assert pair.breaks == [(3, "moved-symbol", "now at lib.a"), (4, "moved-symbol", "now at lib.c")]


def test_module_getattr_tables_are_read(tmp_path):
    lib = {
        "lib/__init__.py": """
            import importlib
            TABLE = {"Engine": ".engine:Engine", "helper": ".engine"}
            def __getattr__(name):
                if name in TABLE:
                    module, _, attr = TABLE[name].partition(":")
                    return getattr(importlib.import_module(module, __name__), attr or name)
                raise AttributeError(name)
        """,
        "lib/engine.py": "class Engine:\n    def __init__(self, size): ...\ndef helper(): ...\n",
    }
    pair = Pair(
        tmp_path, lib, "from lib import Engine, helper\nimport lib\nEngine(size=1)\nEngine(length=1)\nlib.Nothing\n"
    )
    assert (4, "unknown-kwarg", "length") in pair.breaks
    assert (5, "missing-attribute", "Nothing") in pair.breaks
    assert len(pair.breaks) == 3  # `size` is missing in line 4 as well


def test_a_lazy_module_that_mirrors_itself_for_type_checkers_has_what_it_names(tmp_path):
    names = [f"Name{n}" for n in range(12)]
    lib = {
        "lib/__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .m import "
        + ", ".join(names)
        + "\nelse:\n    import sys\n    sys.modules[__name__] = make(__name__)\n",
        "lib/m.py": "".join(f"class {n}: ...\n" for n in names),
    }
    pair = Pair(tmp_path, lib, "from lib import Name3\nfrom lib import Removed\n")
    assert pair.breaks == [(2, "missing-symbol", "Removed")]


def test_a_name_for_type_checkers_only_is_not_there_at_run_time(tmp_path):
    lib = {
        "lib/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .b import Thing\n",
        "lib/b.py": "class Thing: ...\n",
    }
    assert Pair(tmp_path, lib, "from lib.a import Thing\n").breaks == [(1, "moved-symbol", "now at lib.b")]


def test_a_fallback_that_works_is_no_break_and_one_that_does_not_is(tmp_path):
    lib = {"lib/new.py": "def f(): ...\n"}
    app = """
        try:
            from lib.old import f
        except ImportError:
            from lib.new import f
        f()
        try:
            from lib.old import g
        except ImportError:
            from lib.older import g
    """
    pair = Pair(tmp_path, lib, app)
    assert pair.breaks == [(10, "missing-symbol", "g")]


def test_a_handler_for_an_import_that_succeeds_is_not_looked_at(tmp_path):
    lib = {"lib/new.py": "def f(): ...\n"}
    assert Pair(
        tmp_path, lib, "try:\n    from lib.new import f\nexcept ImportError:\n    from lib.old import f\n"
    ).clean


def test_version_guards_are_decided_by_the_provider_that_is_there(tmp_path):
    lib = {"lib/__init__.py": "__version__ = '2.1.0'\n", "lib/m.py": "def f(new): ...\n"}
    app = """
        import lib
        from importlib.metadata import version
        from packaging.version import Version, parse
        from lib.m import f
        def modern(least):
            return parse(lib.__version__) >= parse(least)
        if Version(version("lib")) < Version("2.0rc1"):
            from lib.m import old
        if modern("2.0"):
            f(new=1)
        else:
            f(old=1)
    """
    assert Pair(tmp_path, lib, app).clean


def test_names_bound_by_global_in_a_function_are_there(tmp_path):
    lib = {"lib/m.py": "def _fill():\n    global table\n    table = {}\n_fill()\n"}
    assert Pair(tmp_path, lib, "from lib.m import table\n").clean


def test_what_a_build_makes_is_unresolved_not_missing(tmp_path):
    lib = {"lib/__init__.py": "from lib._native import run\n"}
    pair = Pair(tmp_path, lib, "from lib._native import run\n")
    assert not pair.breaks and len(pair.unresolved) == 1 and "built" in pair.unresolved[0][1]


def test_relative_and_local_imports_and_aliases(tmp_path):
    lib = {"lib/sub/__init__.py": "from . import inner as core\n", "lib/sub/inner.py": "def f(a): ...\n"}
    app = "import lib.sub as s\ndef g():\n    from lib.sub import core\n    core.f(1)\n    s.core.f(b=2)\n    s.inner.gone()\n"  # noqa: E501
    pair = Pair(tmp_path, lib, app)
    assert pair.breaks == [(5, "missing-required", "a"), (5, "unknown-kwarg", "b"), (6, "missing-attribute", "gone")]
