"""Source trees: from folders, wheels, sdists and what pip is set up to find; nothing is built, nothing is run."""

from __future__ import annotations

import http.server
import io
import re
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from remoteops import archives, pip_settings, sources
from remoteops.errors import MissingPackage, TransferFailed, UsageError

METADATA = """Metadata-Version: 2.1
Name: {name}
Version: {version}
Requires-Dist: engine==0.11.0; extra == 'gen'
Provides-Extra: gen
"""


def wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inner, data in files.items():
            archive.writestr(inner, data)
        archive.writestr(f"{name}-{version}.dist-info/METADATA", METADATA.format(name=name, version=version))
    return path


def sdist(folder: Path, name: str, version: str, files: dict[str, bytes]) -> Path:
    path = folder / f"{name}-{version}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for inner, data in {**files, "PKG-INFO": METADATA.format(name=name, version=version).encode()}.items():
            info = tarfile.TarInfo(f"{name}-{version}/{inner}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only place where pip is set up to look."""
    folder = tmp_path / "links"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def test_a_wheel_gives_sources_marks_of_compiled_modules_and_metadata(links: Path) -> None:
    wheel(
        links,
        "engine",
        "1.2",
        {"engine/__init__.py": b"A = 1\n", "engine/fast.cpython-311.so": b"\x7fELF" * 99, "engine/data.bin": b"x"},
    )
    tree = sources.fetch("engine==1.2")
    root = Path(tree.path)
    assert (tree.package, tree.version, tree.label) == ("engine", "1.2", "engine==1.2")
    assert sorted(path.name for path in (root / "engine").iterdir()) == ["__init__.py", "fast.cpython-311.so"]
    assert (root / "engine" / "fast.cpython-311.so").stat().st_size == 0
    assert tree.requires == ("engine==0.11.0; extra == 'gen'",)


def test_an_sdist_is_read_and_never_built(links: Path) -> None:
    files = {
        "setup.py": b"raise SystemExit('built')\n",
        "src/engine/__init__.py": b"B = 2\n",
        "tests/__init__.py": b"",
        "src/engine/_fast.pyx": b"cdef x",
    }
    sdist(links, "engine", "2.0", files)
    tree = sources.fetch("engine==2.0")
    assert (Path(tree.path) / "engine" / "__init__.py").read_text() == "B = 2\n"
    assert (Path(tree.path) / "engine" / "_fast.so").exists()
    assert not (Path(tree.path) / "setup.py").exists()
    assert not (Path(tree.path) / "tests").exists()


def test_a_second_fetch_needs_no_download(links: Path) -> None:
    path = wheel(links, "engine", "1.2", {"engine/__init__.py": b""})
    first = sources.fetch("engine==1.2")
    path.unlink()
    assert sources.fetch("engine==1.2") == first


def test_the_import_name_may_differ_from_the_distribution(links: Path) -> None:
    wheel(links, "engine_cpu", "3.0", {"engine/__init__.py": b"", "engine_extra/__init__.py": b""})
    assert sources.fetch("engine-cpu==3.0", package="engine").package == "engine"
    assert sources.fetch("engine-cpu==3.0").package == "engine"


def test_a_range_gives_the_newest_release_and_releases_lists_finals_only(links: Path) -> None:
    for version in ("0.9", "0.10", "0.11", "0.12rc1"):
        wheel(links, "engine", version, {"engine/__init__.py": b""})
    assert sources.fetch("engine<0.11").version == "0.10"
    assert sources.releases("engine>=0.10") == ["0.10", "0.11"]
    assert sources.expand(["engine>=0.10", "engine==0.9,0.11", "engine==0.9"]) == [
        "engine==0.10",
        "engine==0.11",
        "engine==0.9",
    ]


def test_what_pip_cannot_find_is_said_with_where_it_was_looked_for(links: Path) -> None:
    with pytest.raises(MissingPackage, match="nothing matches engine==9"):
        sources.fetch("engine==9")


def test_a_member_outside_the_archive_is_refused(links: Path, tmp_path: Path) -> None:
    wheel(links, "engine", "6.6", {"engine/__init__.py": b"", "engine/../../evil.py": b"boom"})
    with pytest.raises(TransferFailed, match="outside its folder"):
        sources.fetch("engine==6.6")
    assert not list(tmp_path.rglob("evil.py"))


def test_a_broken_archive_is_named_and_leaves_nothing_behind(links: Path, tmp_path: Path) -> None:
    (links / "engine-7-py3-none-any.whl").write_bytes(b"no zip")
    with pytest.raises(TransferFailed, match="no archive gave Python sources") as caught:
        sources.fetch("engine==7")
    assert "engine-7-py3-none-any.whl" in caught.value.tried
    assert not list((tmp_path / "cache").rglob("engine*"))


@pytest.mark.parametrize(("spec", "error"), [("no such thing!", UsageError), ("/no/such/folder", UsageError)])
def test_a_spec_that_is_nothing_is_a_usage_error(links: Path, spec: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        sources.fetch(spec)


def test_a_folder_is_used_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").touch()
    (tmp_path / "PKG-INFO").write_text(METADATA.format(name="engine", version="4.4"))
    tree = sources.fetch(str(tmp_path))
    assert (tree.package, tree.version, tree.path) == ("engine", "4.4", str(tmp_path))
    with pytest.raises(MissingPackage, match="no package other"):
        sources.local_tree(tmp_path, "other")


@pytest.mark.parametrize(
    ("requires", "expected"),
    [
        (["engine==0.11.0; extra == 'gen'", "numpy"], "engine==0.11.0"),
        (["engine>=1", "engine==0.9; extra == 'old'"], "engine>=1"),
        (["Engine_X<=0.16,>=0.12; extra == 'gen'"], "Engine_X<=0.16,>=0.12"),
        (["engine"], None),
        (["not a requirement ==="], None),
    ],
)
def test_the_pin_is_read_from_the_consumers_own_metadata(requires: list[str], expected: str | None) -> None:
    assert sources.pin(requires, ("engine", "engine-x")) == expected


class _Ranges(http.server.BaseHTTPRequestHandler):
    payload = b""
    sent = 0

    def do_GET(self) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        body = self.payload
        if wanted and self.path == "/ranges":
            first, last = int(wanted[1]), int(wanted[2])
            body = self.payload[first : last + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(self.payload)}")
        else:
            self.send_response(200)
        type(self).sent += len(body)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    serving = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Ranges)
    thread = threading.Thread(target=serving.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{serving.server_address[1]}"
    serving.shutdown()
    serving.server_close()
    thread.join()


def test_of_a_big_wheel_only_the_sources_travel(server: str, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("engine/__init__.py", b"A = 1\n")
        archive.writestr("engine/huge.so", bytes(8 * archives.BLOCK))
        archive.writestr("engine/last.py", b"B = 2\n")
    _Ranges.payload, _Ranges.sent = buffer.getvalue(), 0
    with pip_settings.finder(pip_settings.PipSettings(no_index=True)).session as session:
        remote = archives.remote_file(session, server + "/ranges")
        assert remote is not None
        assert archives.unpack_wheel(remote, tmp_path) == ["engine"]
        assert archives.remote_file(session, server + "/whole") is None
    assert (tmp_path / "engine" / "last.py").read_text() == "B = 2\n"
    assert remote.fetched < 3 * archives.BLOCK < len(_Ranges.payload)


def test_pip_settings_read_the_strongest_section_and_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = "global.index-url='http://one/simple'\ndownload.index-url='http://two/simple'\n"
    shown += "global.find-links='/a /b'\nglobal.timeout='3'\n"
    assert pip_settings.parse(shown) == {"index-url": "http://two/simple", "find-links": "/a /b"}
    monkeypatch.setenv("PIP_INDEX_URL", "http://three/simple")
    monkeypatch.setenv("PIP_NO_INDEX", "true")
    settings = pip_settings.read()
    assert (settings.index_url, settings.no_index) == ("http://three/simple", True)
