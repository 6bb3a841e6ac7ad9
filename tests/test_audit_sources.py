"""Where packages are found, and sources that cannot be read: precise messages, never a crash, never silence."""

from __future__ import annotations

import os
import zipfile

import pytest
from audit_fixtures import Pair, write

from remoteops.agent.audit import engine
from remoteops.agent.audit.packages import locate
from remoteops.agent.audit.syntax import Source, module_body
from remoteops.agent.protocol import AgentError


def venv(folder, files, config="home = /usr/bin\n"):
    write(folder, {"pyvenv.cfg": config})
    return write(folder / "lib" / "python3.11" / "site-packages", files)


def test_a_package_is_found_in_a_venv_with_the_version_of_whatever_distribution_provides_it(tmp_path):
    venv(
        tmp_path,
        {
            "lib/__init__.py": "",
            "other-1.0.dist-info/METADATA": "Name: other\nVersion: 1.0\n\n",
            "other-1.0.dist-info/RECORD": "other/__init__.py,,\n",
            "lib_cpu-2.5.dist-info/METADATA": "Name: lib-cpu\nVersion: 2.5\nRequires-Dist: torch==2.9\n\n",
            "lib_cpu-2.5.dist-info/RECORD": "lib/__init__.py,sha256=x,0\n",
        },
    )
    tree = locate("lib", venv=str(tmp_path))
    assert (tree.version, tree.distribution, tree.requires) == ("2.5", "lib-cpu", ["torch==2.9"])


@pytest.mark.parametrize("how", ["pth", "finder", "egg-link", "namespace", "module", "egg", "src"])
def test_every_way_to_install_is_read(tmp_path, how):
    source = tmp_path / "checkout"
    write(source, {"lib/__init__.py": "x = 1\n", "lib/sub/deep.py": "def f(): ...\n"})
    site = venv(tmp_path / "venv", {"empty.txt": ""})
    place: dict = {"venv": str(tmp_path / "venv")}
    wanted = "lib.sub.deep"
    if how == "pth":
        write(site, {"__editable__.lib-1.0.pth": f"{source}\n"})
    elif how == "finder":
        write(
            site,
            {
                "__editable___lib_1_0_finder.py": f"MAPPING: dict[str, str] = {{'lib': {str(source / 'lib')!r}}}\nNAMESPACES = {{}}\n"  # noqa: E501
            },
        )
    elif how == "egg-link":
        write(site, {"lib.egg-link": f"{source}\n.\n"})
    elif how == "namespace":
        write(site, {"lib/sub/deep.py": "def f(): ...\n"})
    elif how == "module":
        write(site, {"lib.py": "def f(): ...\n"})
        wanted = "lib"
    elif how == "egg":
        with zipfile.ZipFile(site / "lib-1.0-py3.11.egg", "w") as egg:
            egg.writestr("lib/__init__.py", "")
            egg.writestr("lib/sub/deep.py", "def f(): ...\n")
            egg.writestr("EGG-INFO/PKG-INFO", "Name: lib\nVersion: 1.0\n\n")
    else:
        (tmp_path / "project").mkdir()
        source.rename(tmp_path / "project" / "src")
        place = {"path": str(tmp_path / "project")}
    tree = locate("lib", **place)
    found = tree.find(wanted)
    assert found is not None and b"def f" in tree.read(found[1])
    assert wanted in [name for name, _ in tree.files()]


def test_what_is_not_there_is_named_with_the_places_searched(tmp_path):
    site = venv(tmp_path, {"other/__init__.py": ""})
    with pytest.raises(AgentError) as caught:
        locate("lib", venv=str(tmp_path))
    assert caught.value.kind == "MissingPackage" and str(site) in caught.value.tried
    with pytest.raises(AgentError) as caught:
        locate("lib", venv=str(tmp_path / "lib"))
    assert caught.value.kind == "MissingVenv"
    with pytest.raises(AgentError) as caught:
        locate("lib", path=str(tmp_path / "nowhere"))
    assert caught.value.kind == "MissingPackage"
    with pytest.raises(AgentError) as caught:
        engine.audit({"consumer": "", "provider": "lib"})
    assert caught.value.kind == "UsageError"


BROKEN = {
    "a syntax error": b"def f(a:\n",
    "syntax of a newer Python": b"match_ = 1\ndef f[T](x: T) -> T: ...\nlambda: (yield) := 3\n",
    "bytes that are no UTF-8": b"x = '\xff\xfe'\ndef f(): ...\n",
    "null bytes": b"def f(): ...\n\0\0",
    "an unknown encoding": b"# -*- coding: klingon -*-\ndef f(): ...\n",
    "deep nesting": b"x = " + b"(" * 5000 + b")" * 5000 + b"\n",
    "an endless string": b'x = """' + b"a\n" * 20000,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_provider_file_is_unresolved(tmp_path, name):
    write(tmp_path / "lib-1.0", {"lib/__init__.py": ""})
    (tmp_path / "lib-1.0" / "lib" / "bad.py").write_bytes(BROKEN[name])
    pair = Pair(tmp_path, {"lib/good.py": "def f(a): ...\n"}, "from lib.bad import g\nfrom lib.good import f\nf()\n")
    assert pair.breaks == [(3, "missing-required", "a")]
    assert any(line == 1 and reason for line, reason in pair.unresolved), pair.document["unresolved"]


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_consumer_file_is_told_and_the_rest_audited(tmp_path, name):
    write(tmp_path / "app-1.0", {"app/__init__.py": ""})
    (tmp_path / "app-1.0" / "app" / "bad.py").write_bytes(BROKEN[name] + b"\nimport lib\n")
    pair = Pair(tmp_path, {"lib/m.py": "def f(a): ...\n"}, "from lib.m import f\nf()\n")
    assert (2, "missing-required", "a") in pair.breaks
    assert any(u["file"] == "app/bad.py" for u in pair.document["unresolved"])


def test_one_broken_function_leaves_the_others_known(tmp_path):
    lib = {
        "lib/m.py": "def ok(a): ...\nclass C:\n    def bad(self):\n        return (\n    def good(self, b): ...\ndef late(c): ...\n"  # noqa: E501
    }
    pair = Pair(tmp_path, lib, "from lib.m import ok, late\nok()\nlate()\n")
    assert [(line, detail) for line, _kind, detail in pair.breaks] == [(2, "a"), (3, "c")]


def test_other_encodings_line_ends_and_links_into_themselves(tmp_path):
    write(tmp_path / "lib-1.0", {"lib/__init__.py": ""})
    folder = tmp_path / "lib-1.0" / "lib"
    (folder / "latin.py").write_bytes("# coding: latin-1\r\ntext = 'é'\r\ndef f(a): ...\r\n".encode("latin-1"))
    (folder / "loop").symlink_to(folder, target_is_directory=True)
    (folder / "self.py").symlink_to(folder / "self.py")
    pair = Pair(tmp_path, {}, "from lib.latin import f\nf()\nfrom lib.nowhere import g\n")
    assert pair.breaks == [(2, "missing-required", "a"), (3, "missing-symbol", "g")]


@pytest.mark.parametrize("side", ["lib", "app"])
def test_a_named_pipe_among_the_sources_is_not_waited_for(tmp_path, side):
    folder = tmp_path / f"{side}-1.0" / side
    folder.mkdir(parents=True)
    os.mkfifo(folder / "pipe.py")
    (folder / "link.py").symlink_to(folder / "pipe.py")
    pair = Pair(tmp_path, {"lib/m.py": "def f(a): ...\n"}, "from lib.m import f\nf()\n")
    assert pair.breaks == [(2, "missing-required", "a")]


def test_a_consumer_without_any_use_has_no_sites(tmp_path):
    pair = Pair(tmp_path, {}, "print('nothing')\n")
    assert (pair.document["sites"], pair.document["findings"], pair.document["unresolved"]) == (0, [], [])


def test_splitting_a_file_keeps_every_definition_and_line(tmp_path):
    text = (
        '"""Doc\ndef not_this(): pass\n"""\nimport os\n@deco(\n    1,\n)\nclass A(B,\n        C):\n    """x\n    def nor_this(self): pass\n    """\n'  # noqa: E501
        "    x: int = 1\n    @property\n    def p(self):\n        return '''\nclass No: pass\n'''\n    async def q(self): ...\n"  # noqa: E501
        "if os:\n    def inner(): ...\nelse:\n    def inner(): ...\nY = [\n'a',\n'b']\ndef last(): return 1  # def no(): pass\n"  # noqa: E501
    )
    source = Source(text, "x.py")
    body = module_body(source)
    assert [u.name for u in body.units] == ["A", "last"] and not source.errors
    inner = body.units[0].body()
    assert [u.name for u in inner.units] == ["p", "q"] and inner.units[0].line == 15
    assert [type(s).__name__ for s in body.statements] == ["Expr", "Import", "If", "Assign"]
    assert inner.units[1].head().lineno == 19 and body.by_name["last"][0].node().lineno == 27
