"""The whole path on real vLLM over real SSH, as README shows it: probe, patch, extract, verify, pull, revert."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab_fixtures import ROOT, fab, lab  # noqa: F401

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(3000), pytest.mark.usefixtures("lab")]


@pytest.fixture(scope="module")
def patched() -> None:
    done = fab("patch", "--yes")
    assert done.code == 0, done.err


@pytest.fixture(scope="module")
def extracted(patched: None) -> dict[str, object]:
    """One finished run of ten samples on the patched host."""
    done = fab("extract", "--samples", "10", "--json")
    assert done.code == 0, done.out + done.err
    return done.document


def test_probe_finds_the_eight_breaks_and_the_silent_one() -> None:
    done = fab("probe", "--json", "--baseline", "none")
    assert done.code == 1, done.err
    broken = [one for one in done.document["findings"] if one["confidence"] in ("proved", "contract")]
    assert len(broken) == 9
    kinds = sorted(one["kind"] for one in broken)
    assert kinds == ["behaviour"] * 4 + ["missing-attribute"] + ["missing-required"] * 2 + ["unknown-kwarg"] * 2
    assert [one["rule"] for one in broken if one["when"] == "silent"] == ["chunked-prefill-default"]
    for one in broken:
        assert one["file"].startswith("speculators/") and one["line"] > 0 and one["error"]


def test_an_unpatched_host_refuses_and_names_the_patch() -> None:
    done = fab("extract", "--samples", "2", "--json")
    assert done.code == 1
    assert done.document["kind"] == "AuditBroken"
    assert "fab patch" in done.document["hint"]
    assert len(done.document["data"]["findings"]) == 9


def test_patch_shows_asks_and_without_a_terminal_wants_a_yes() -> None:
    shown = fab("patch", "--dry-run")
    assert shown.code == 0
    assert "@@" in shown.out and "-            kv_cache_specs=" in shown.out
    refused = fab("patch")
    assert refused.code == 2
    assert "--yes" in refused.err
    assert fab("patch", "--status", "--json").document["state"] == "clean"


@pytest.mark.usefixtures("patched")
def test_a_patched_host_is_compatible_and_patching_again_changes_nothing() -> None:
    assert fab("probe", "--baseline", "none").code == 0
    again = fab("patch", "--yes", "--json")
    assert again.code == 0
    assert again.document["already"] is True
    assert fab("patch", "--status", "--json").document["state"] == "patched"


def test_ten_samples_agree_with_transformers(extracted: dict) -> None:  # type: ignore[type-arg]
    assert extracted["samples"] == 10
    assert extracted["state"] == "done"
    report = extracted["report"]
    assert report["ok"] is True
    worst = max(layer["max_relative_error"] for layer in report["reference"]["layers"].values())
    assert 0 < worst < 1e-5
    assert set(extracted["seconds"]) >= {"connect", "preflight", "audit", "start", "total"}


@pytest.mark.usefixtures("extracted")
def test_status_runs_logs_and_verify_tell_of_that_run(extracted: dict) -> None:  # type: ignore[type-arg]
    run = extracted["run"]
    status = fab("status", "--json")
    assert (status.code, status.document["run"], status.document["state"]) == (0, run, "done")
    assert run in fab("runs").out
    log = fab("tail-logs", run, "--lines", "all")
    assert log.code == 0
    assert "vLLM" in log.out or "INFO" in log.out
    assert fab("tail-logs", "no-such-run").code == 1
    assert fab("verify", run).code == 0
    assert fab("stop", run, "--yes").code == 0


def test_pull_brings_samples_whose_hashes_match(extracted: dict, tmp_path: Path) -> None:  # type: ignore[type-arg]
    done = fab("pull", str(extracted["run"]), "--samples", "3", "--to", str(tmp_path / "here"), "--json")
    assert done.code == 0
    files = [one for one in done.document["files"] if one["index"] is not None]
    assert len(files) == 3
    for one in files:
        assert hashlib.sha256((tmp_path / "here" / one["name"]).read_bytes()).hexdigest() == one["sha256"]
    again = fab("pull", str(extracted["run"]), "--samples", "3", "--to", str(tmp_path / "here"), "--json")
    assert again.document["fetched_bytes"] == 0


def test_a_second_run_is_refused_while_one_goes_on_and_stop_ends_it(patched: None) -> None:
    started = fab("extract", "--samples", "57", "--detach", "--json")
    assert started.code == 0, started.out
    run = started.document["run"]
    try:
        refused = fab("extract", "--samples", "2", "--json")
        assert (refused.code, refused.document["kind"]) == (1, "RunActive")
        assert run in refused.document["message"] + refused.document["hint"]
        assert fab("stop", run).code == 2  # no terminal: wants --yes
    finally:
        stopped = fab("stop", run, "--yes", "--grace", "20", "--json")
    assert stopped.code == 0
    assert stopped.document["state"] in ("stopped", "done")
    assert fab("status", run, "--json").document["state"] == stopped.document["state"]


def test_a_run_and_its_follower_survive_an_sshd_that_is_killed_twice(patched: None, tmp_path: Path) -> None:
    from remoteops.lab.place import Place

    started = fab("extract", "--samples", "5", "--reference", "0", "--detach", "--json")
    assert started.code == 0, started.out
    run = started.document["run"]
    _kill_sshd(Place("seed"))  # nobody is connected: the run is alone
    script = Path(sys.executable).with_name("fab")
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        argv = [str(script), "tail-logs", run, "--lines", "all"]
        follower = subprocess.Popen(argv, cwd=ROOT, stdout=out, stderr=err)
        try:
            deadline = time.monotonic() + 60
            while not (tmp_path / "out").stat().st_size and time.monotonic() < deadline:
                time.sleep(0.05)
            _kill_sshd(Place("seed"))  # under the follower
            assert fab("lab.up").code == 0
            assert follower.wait(timeout=600) == 0, (tmp_path / "err").read_text()
        finally:
            follower.kill()
            follower.wait()
    assert "lost" in (tmp_path / "err").read_text()
    assert (tmp_path / "out").read_text() == fab("tail-logs", run, "--lines", "all").out
    assert fab("status", run, "--json").document["state"] == "done"


def _kill_sshd(place) -> None:  # type: ignore[no-untyped-def]
    """The listening server and every session of it, as a crash or a reboot of the daemon would."""
    listener = int((place.server / "pid").read_text())
    children = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    table = [tuple(map(int, line.split())) for line in children.splitlines()]
    sessions = [pid for pid, parent in table if parent == listener]
    for pid in [listener, *sessions, *(pid for pid, parent in table if parent in sessions and _is_sshd(pid))]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _is_sshd(pid: int) -> bool:
    try:
        return b"sshd" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_a_wrong_model_path_is_told_before_anything_starts() -> None:
    done = fab("extract", "--samples", "2", "--model", "~/models/none", "--json")
    assert (done.code, done.document["kind"]) == (1, "MissingModel")
    assert "models/none" in done.document["message"]


def test_a_missing_venv_and_a_missing_package_are_told(tmp_path: Path) -> None:
    from remoteops.lab.place import Place

    home = Place("seed").home
    for name, kind in (("nowhere", "MissingVenv"), ("bare", "MissingPackage")):
        inventory = tmp_path / f"{name}.yaml"
        inventory.write_text(
            f"hosts:\n  lab:\n    connect: lab\n    venv: {home}/{name}\n"
            "    workload: {model: ~/models/llama, dataset: ~/data/conversations.jsonl}\n"
        )
        environment = {"REMOTEOPS_INVENTORY": str(inventory)}
        if name == "bare":
            made = fab("shell", f"{sys.executable} -m venv --without-pip {home}/bare", **environment)
            assert made.code == 0, made.err
        for task in (("extract", "--samples", "2"), ("probe",)):
            done = fab(*task, "--json", **environment)
            assert (done.code, done.document["kind"]) == (1, kind), task
            assert name in json.dumps(done.document)


def test_a_disk_that_is_too_small_is_told_with_both_figures(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    from remoteops.lab.place import Place

    small = Place("seed").home / "small"
    small.mkdir(exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        done = fab("extract", "--samples", "20", "--output", str(small / "out"), "--json")
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert (done.code, done.document["kind"]) == (1, "DiskTooSmall")
    assert "free" in done.document["message"]


def test_the_operator_reads_nothing_of_the_host_but_over_the_link(tmp_path: Path) -> None:
    """Every open(), listdir and scandir of the operator's process is watched; none may reach the host's files."""
    from remoteops.lab.place import Place

    place = Place("seed")
    script = tmp_path / "watched.py"
    script.write_text(WATCHED.format(root=str(ROOT), venv=str(place.venv), home=str(place.home)))
    for arguments in (
        ["probe", "--baseline", "none", "--json"],
        ["status"],
        ["runs"],
        ["doctor"],
        ["patch", "--dry-run"],
        ["verify"],
        ["pull", "--samples", "1", "--to", str(tmp_path / "pulled")],
        ["tail-logs", "--no-follow"],
    ):
        done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, cwd=ROOT)
        assert "TOUCHED" not in done.stderr, done.stderr[-2000:]
        assert "WATCHED" in done.stderr


WATCHED = """
import os, sys
sys.path.insert(0, {root!r})
forbidden = ({venv!r} + os.sep, {home!r} + os.sep)
seen = []

def watch(event, arguments):
    if event in ("open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.mkdir", "subprocess.Popen"):
        for value in arguments[:2]:
            if isinstance(value, (str, bytes)) and os.path.realpath(os.fsdecode(value)).startswith(forbidden):
                seen.append((event, value))

sys.addaudithook(watch)
from remoteops.cli import main
try:
    main(sys.argv[1:])
finally:
    sys.stderr.write("WATCHED\\n")
    if seen:
        sys.stderr.write("TOUCHED %r\\n" % seen[:5])
"""


def test_revert_restores_every_byte(patched: None) -> None:
    before = fab("patch", "--status", "--json").document
    assert before["state"] == "patched"
    assert fab("patch", "--revert").code == 0
    assert fab("patch", "--status", "--json").document["state"] == "clean"
    record = fab("shell", RECORD_CHECK)
    assert record.code == 0, record.out + record.err


# The wheel's own RECORD says what each file of the package was when it was installed.
RECORD_CHECK = (
    'cd ~/../venv/lib/python3*/site-packages && python3 -c "import base64,csv,glob,hashlib,sys; '
    "rows=[r for r in csv.reader(open(glob.glob('speculators-*.dist-info/RECORD')[0])) if r[1]]; "
    "hash=lambda name: base64.urlsafe_b64encode(hashlib.sha256(open(name,'rb').read()).digest()).rstrip(b'='); "
    "bad=[r[0] for r in rows if 'sha256='+hash(r[0]).decode()!=r[1]]; "
    'print(bad); sys.exit(bool(bad) or len(rows)<10)"'
)
