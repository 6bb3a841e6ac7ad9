"""Patch transactions on real files: all or nothing, told truly, and back to the byte."""

from __future__ import annotations

import json
import os
import py_compile
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remoteops.agent import patches, shadow
from remoteops.agent.protocol import AgentError
from tests.patch_fixtures import AFTER, BEFORE, Site, inode, quiet, sha


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.fixture
def fast_folder() -> Iterator[Path]:
    """Memory, where there is some: hundreds of fsyncs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_apply_then_revert_gives_the_original_bytes(site: Site) -> None:
    done = site.apply()
    assert done["state"] == "patched" and len(done["changed"]) == 2
    assert site.files() == {**BEFORE, **AFTER}
    assert site.status()["state"] == "patched"
    (record,) = site.revert()
    assert record["outcome"] == "reverted"
    assert site.files() == BEFORE and site.status() == {"state": "clean", "patches": [], "foreign": []}
    assert site.left_over() == []
    assert sorted(p.name for p in site.state.rglob("*") if p.is_file()) == ["lock", "state.json"]


def test_twice_is_once(site: Site) -> None:
    site.apply()
    inodes = {name: inode(site.root / name) for name in BEFORE}
    assert site.apply()["already"]
    assert {name: inode(site.root / name) for name in BEFORE} == inodes
    site.revert()
    assert site.revert() == []


def test_a_changed_patch_starts_from_the_original(site: Site) -> None:
    site.apply()
    again = site.apply({"pkg/b.py": b"OTHER = 'third'\r\n"})
    assert site.files() == {**BEFORE, "pkg/b.py": b"OTHER = 'third'\r\n"}
    assert [Path(p).name for p in again["restored"]] == ["a.py"]
    site.revert()
    assert site.files() == BEFORE


def test_a_file_that_changed_since_the_audit_stops_everything(site: Site) -> None:
    site.write("pkg/b.py", b"OTHER = 'mine'\n")
    with pytest.raises(AgentError) as caught:
        site.apply()
    assert caught.value.kind == "FileChanged" and "b.py" in caught.value.message
    assert site.files() == {**BEFORE, "pkg/b.py": b"OTHER = 'mine'\n"} and site.status()["state"] == "clean"


def test_a_file_that_changes_during_the_transaction_stops_everything(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    from remoteops.agent import journal

    keep = journal._keep_original

    def meddle(path: str, kept: str) -> None:
        keep(path, kept)
        if path.endswith("b.py"):
            site.root.joinpath("pkg/b.py").unlink()
            site.write("pkg/b.py", b"OTHER = 'theirs'\n")

    monkeypatch.setattr(journal, "_keep_original", meddle)
    with pytest.raises(AgentError) as caught:
        site.apply()
    assert caught.value.kind == "FileChanged"
    assert site.files() == {**BEFORE, "pkg/b.py": b"OTHER = 'theirs'\n"} and site.left_over() == []


def test_hardlinked_twins_and_symlink_targets_keep_their_bytes(site: Site, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    os.link(site.root / "pkg/a.py", cache / "a.py")
    (cache / "b.py").write_bytes(BEFORE["pkg/b.py"])
    (site.root / "pkg/b.py").unlink()
    (site.root / "pkg/b.py").symlink_to(cache / "b.py")
    site.apply()
    assert (cache / "a.py").read_bytes() == BEFORE["pkg/a.py"] and (cache / "b.py").read_bytes() == BEFORE["pkg/b.py"]
    site.revert()
    assert site.files() == BEFORE and (site.root / "pkg/b.py").is_symlink()


def test_mode_owner_attributes_and_time_are_kept(site: Site) -> None:
    path = site.root / "pkg/a.py"
    path.chmod(0o640)
    os.utime(path, ns=(1_600_000_000_000_000_000, 1_600_000_000_123_456_789))
    if os.getuid() == 0:
        os.chown(path, 1234, 2345)
    try:
        os.setxattr(path, "user.kept", b"yes")
        attributes = True
    except OSError:
        attributes = False
    before = path.stat()
    for step in (site.apply, site.revert):
        step()
        now = path.stat()
        assert (stat.S_IMODE(now.st_mode), now.st_uid, now.st_gid) == (0o640, before.st_uid, before.st_gid)
        assert not attributes or os.getxattr(path, "user.kept") == b"yes"
    assert path.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize(
    "mode", [py_compile.PycInvalidationMode.TIMESTAMP, py_compile.PycInvalidationMode.UNCHECKED_HASH]
)
@pytest.mark.parametrize("prefixed", [False, True])
def test_old_bytecode_never_runs_again(
    site: Site, tmp_path: Path, mode: py_compile.PycInvalidationMode, prefixed: bool
) -> None:
    env = {**os.environ, "PYTHONPATH": str(site.root)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    env.pop("PYTHONPYCACHEPREFIX", None)
    if prefixed:
        env["PYTHONPYCACHEPREFIX"] = str(tmp_path / "cache of bytecode")
        site.extra["env"] = {"PYTHONPYCACHEPREFIX": env["PYTHONPYCACHEPREFIX"]}

    def value() -> str:
        done = subprocess.run(
            [sys.executable, "-c", "import pkg.a; print(pkg.a.VALUE)"],
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    code = (
        f"import py_compile as c; c.compile({str(site.root / 'pkg/a.py')!r}, "
        f"invalidation_mode=c.PycInvalidationMode({mode.value}))"
    )
    while time.time() % 1 > 0.5:  # the edits below fall into one second
        time.sleep(0.05)
    site.write("pkg/a.py", BEFORE["pkg/a.py"])
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    assert value() == "1"
    site.apply({"pkg/a.py": b"VALUE = 2\n"})
    assert value() == "2"
    site.apply({"pkg/a.py": b"VALUE = 3\n"})
    assert value() == "3"
    site.revert()
    assert value() == "1"


def test_sigkill_at_a_hundred_random_steps_leaves_all_or_nothing(fast_folder: Path) -> None:
    program = Path(__file__).with_name("patch_killer.py")
    done = subprocess.run(
        [sys.executable, str(program), str(fast_folder / "w"), "102", str(os.getpid())],
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
    )
    report = json.loads(done.stdout)
    assert report["problems"] == []
    assert report["killed"] == 102 and min(report["steps"].values()) > 50


def test_a_full_disk_under_the_package_changes_nothing(small_disk: Path, tmp_path: Path) -> None:
    site = Site(small_disk)
    site.state = tmp_path / "state"
    (small_disk / "ballast").write_bytes(b"x" * 40_000)
    big = {"pkg/a.py": b"VALUE = 2\n", "pkg/b.py": b"#" * 60_000}
    with pytest.raises(AgentError) as caught:
        site.apply(big)
    assert caught.value.kind == "PatchError" and "space" in caught.value.hint
    assert site.files() == BEFORE and site.left_over() == [] and site.status()["state"] == "clean"
    (small_disk / "ballast").unlink()
    site.apply(AFTER)
    (small_disk / "ballast").write_bytes(b"x" * 45_000)
    filled = sum(path.stat().st_size for path in small_disk.rglob("*") if path.is_file())
    assert filled > 40_000
    try:
        site.revert()
    except AgentError as error:
        assert error.kind == "PatchError"
        assert site.status()["state"] == "patched" and site.files() == {**BEFORE, **AFTER}
    else:
        assert site.files() == BEFORE


def test_a_full_disk_under_the_state_changes_nothing(small_disk: Path, tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.state = small_disk / "state"
    (small_disk / "ballast").write_bytes(b"x" * 52_000)
    with pytest.raises(AgentError) as caught:
        site.apply({"pkg/a.py": b"VALUE = 2\n", "pkg/b.py": b"#" * 60_000})
    assert caught.value.kind == "PatchError" and "space" in caught.value.hint
    assert site.files() == BEFORE and site.left_over() == []
    (small_disk / "ballast").unlink()
    assert site.status()["state"] == "clean"
    site.apply()
    assert site.status()["state"] == "patched"


def test_read_only_site_packages_are_told_before_anything_is_touched(small_disk: Path, tmp_path: Path) -> None:
    site = Site(small_disk)
    site.state = tmp_path / "state"
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(AgentError) as caught:
        site.apply()
    assert caught.value.kind == "PatchError" and "nothing was changed" in caught.value.message
    assert caught.value.hint and site.files() == BEFORE and site.status()["state"] == "clean"


def apply_as_nobody(site: Site) -> Any:
    """What patch.apply answers a plain user: the result, or the error's fields."""
    code = (
        "import json, sys; from remoteops.agent import patches; from remoteops.agent.protocol import AgentError\n"
        "try: print(json.dumps(patches.apply(json.load(sys.stdin), lambda *a, **k: None)))\n"
        "except AgentError as e: print(json.dumps(e.fields()))\n"
    )
    python = next((p for p in ("/usr/bin/python3", "/usr/local/bin/python3") if Path(p).exists()), None)
    if python is None:
        pytest.skip("no interpreter that every user may run")
    with tempfile.TemporaryDirectory() as readable:
        os.chmod(readable, 0o755)
        package = Path(patches.__file__).parent
        subprocess.run(["cp", "-r", "--parents", "remoteops/agent", readable], cwd=package.parent.parent, check=True)
        subprocess.run(["chmod", "-R", "a+rX", readable], check=True)
        done = subprocess.run(
            [python, "-c", code],
            input=json.dumps(site.request(AFTER)),
            text=True,
            capture_output=True,
            user=65534,
            group=65534,
            extra_groups=[],
            env={"PYTHONPATH": readable, "PYTHONDONTWRITEBYTECODE": "1"},
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_root_owned_site_packages_are_told_to_a_plain_user() -> None:
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder))
        site.state.mkdir()
        os.chmod(folder, 0o755)
        os.chown(site.state, 65534, 65534)
        error = apply_as_nobody(site)
        assert error["kind"] == "PatchError" and "not writable" in error["message"] and "sudo_user" in error["hint"]
        assert site.files() == BEFORE


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_an_owner_outside_the_files_group_can_patch_and_no_other_group_gains_by_it() -> None:
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder))
        site.state.mkdir()
        os.chmod(folder, 0o755)
        for path in [Path(folder), *Path(folder).rglob("*")]:
            os.chown(path, 65534, 0)
        for name in BEFORE:
            os.chmod(site.root / name, 0o664)
        answer = apply_as_nobody(site)
        assert "kind" not in answer, answer
        for name, data in AFTER.items():
            assert (site.root / name).read_bytes() == data
            found = (site.root / name).stat()
            assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (65534, 65534, 0o644)


def test_two_operators_at_once(site: Site) -> None:
    site.apply()
    store = next((site.state / "patches").iterdir())
    code = (
        f"import sys; from remoteops.agent.journal import Store\nwith Store({str(store)!r}, []).locked('ada@desk'):\n"
        " print('held', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        for verb in (site.apply, site.revert):
            with pytest.raises(AgentError) as caught:
                verb()
            assert (
                caught.value.kind == "PatchLocked"
                and "ada@desk" in caught.value.message
                and str(other.pid) in caught.value.message
            )
        told = site.status()
        assert told["state"] == "patched" and "ada@desk" in told["patches"][0]["busy"]
        other.kill()  # a dead holder holds nothing
        other.wait()
    assert site.apply()["already"]


def test_a_job_in_the_venv_is_named_and_needs_force(site: Site, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    with subprocess.Popen(
        [str(venv / "bin" / "python"), "-c", "import time; print(1, flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE,
    ) as job:
        assert job.stdout is not None and job.stdout.readline()
        with pytest.raises(AgentError) as caught:
            site.apply(venv=str(venv))
        assert str(job.pid) in caught.value.message and "--force" in caught.value.hint
        assert site.files() == BEFORE
        assert site.apply(venv=str(venv), force=True)["state"] == "patched"
        with pytest.raises(AgentError):
            site.revert(venv=str(venv))
        job.kill()
    assert site.revert(venv=str(venv))[0]["outcome"] == "reverted"


def test_a_mapped_library_of_the_venv_counts_as_use(tmp_path: Path) -> None:
    from remoteops.agent.venvusers import users_of

    library = tmp_path / "venv" / "lib.so"
    library.parent.mkdir()
    library.write_bytes(b"\0" * 4096)
    code = (
        f"import mmap, time; f = open({str(library)!r}, 'rb'); "
        "m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ); print(1, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as job:
        assert job.stdout is not None and job.stdout.readline()
        assert [user["pid"] for user in users_of([str(tmp_path / "venv")])] == [job.pid]
        assert users_of([str(tmp_path / "elsewhere")]) == []
        job.kill()


def test_read_gives_bytes_and_the_original_of_a_patched_file(site: Site) -> None:
    site.apply()
    path = str(site.root / "pkg/a.py")
    (read,) = patches.read({"state_dir": str(site.state), "files": [path]}, quiet)["files"]
    assert read["sha256"] == sha(AFTER["pkg/a.py"]) and read["pristine"]["sha256"] == sha(BEFORE["pkg/a.py"])
    with pytest.raises(AgentError, match="cannot read"):
        patches.read({"state_dir": str(site.state), "files": [path + "x"]}, quiet)


def test_a_view_shows_the_package_before_the_patch_and_copies_nothing_else(site: Site) -> None:
    site.write("pkg/deep/inner/c.py", b"C = 1\n")
    site.write("pkg/deep/d.py", b"D = 1\n")
    assert shadow._patched(site.request(consumer="pkg")) == (None, {})
    site.apply()
    root, originals = shadow._patched(site.request(consumer="pkg"))
    assert root == str(site.root)
    with shadow._view(root, "pkg", {**originals, "pkg/deep/inner/c.py": b"C = 2\n"}) as folder:
        view = Path(folder)
        assert {name: (view / name).read_bytes() for name in BEFORE} == BEFORE
        assert (view / "pkg/deep/inner/c.py").read_bytes() == b"C = 2\n"
        assert (view / "pkg/deep/d.py").is_symlink() and (view / "pkg/deep/d.py").read_bytes() == b"D = 1\n"
    assert not view.exists() and site.files() == {**BEFORE, **AFTER}
    assert (site.root / "pkg/deep/inner/c.py").read_bytes() == b"C = 1\n"


@pytest.mark.parametrize("name", ["../x.py", "/etc/x.py", "pkg/../../x.py"])
def test_planned_contents_may_not_leave_the_package(site: Site, name: str) -> None:
    with pytest.raises(AgentError, match="outside"):
        shadow.audit(site.request(consumer="pkg", contents={name: ""}), quiet)


def test_the_last_apply_alone_can_be_undone(site: Site) -> None:
    site.apply()
    site.apply({"pkg/b.py": b"OTHER = 'third'\r\n"})
    (record,) = site.revert(undo=True)
    assert record["outcome"] == "undone" and site.files() == {**BEFORE, **AFTER} and site.status()["state"] == "patched"
    site.revert(undo=True)  # nothing before it: the original
    assert site.files() == BEFORE and site.status()["state"] == "clean"


def test_a_hand_edit_survives_an_apply_that_is_taken_back(site: Site) -> None:
    site.apply()
    edited = AFTER["pkg/a.py"] + b"# mine\n"
    site.write("pkg/a.py", edited)
    # The plan was made on what is there and leaves the edited file alone.
    site.apply({"pkg/b.py": b"OTHER = 'third'\r\n"}, audited={"pkg/b.py": AFTER["pkg/b.py"]}, keep=True)
    (record,) = site.revert(undo=True, force=True)
    assert record["outcome"] == "undone"
    assert site.files() == {**BEFORE, "pkg/a.py": edited, "pkg/b.py": AFTER["pkg/b.py"]}
    assert site.status()["state"] == "edited since"
    # And one that patches it with the edit, because it was forced to.
    site.apply({"pkg/a.py": b"VALUE = 3\n# mine\n"}, audited={"pkg/a.py": edited}, keep=True, force=True)
    site.revert(undo=True, force=True)
    assert site.files() == {**BEFORE, "pkg/a.py": edited, "pkg/b.py": AFTER["pkg/b.py"]}
    site.revert(force=True)
    assert site.files() == BEFORE


def test_a_request_may_not_reach_outside_its_root(site: Site, tmp_path: Path) -> None:
    outside = tmp_path / "outside.py"
    outside.write_bytes(b"x = 1\n")
    request = site.request({})
    request["files"] = [{"path": str(site.root / ".." / "outside.py"), "before": sha(b"x = 1\n"), "data": ""}]
    with pytest.raises(AgentError, match="outside"):
        patches.apply(request, quiet)
    assert outside.read_bytes() == b"x = 1\n"


def test_prove_imports_in_the_hosts_interpreter(site: Site) -> None:
    env = {"PYTHONPATH": str(site.root)}
    assert patches.prove({"modules": ["pkg.a"], "env": env}, quiet)["ok"]
    site.write("pkg/a.py", b"from pkg.b import NOTHING\n")
    told = patches.prove({"modules": ["pkg.b", "pkg.a"], "env": env}, quiet)
    assert not told["ok"] and "cannot import name 'NOTHING'" in told["error"][-1]
    assert not list(site.root.rglob("*.pyc"))
    with pytest.raises(AgentError) as caught:
        patches.prove({"venv": str(site.root / "no"), "modules": ["pkg"]}, quiet)
    assert caught.value.kind == "MissingVenv"
