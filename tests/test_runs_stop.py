"""Stopping a run: asked first, then the whole tree, whatever its processes call themselves; and what earlier engines
left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from remoteops.agent import gpus, leftovers, processes, runs, survival, tree
from remoteops.agent.protocol import AgentError
from tests.runs_fixtures import Place, place, until

__all__ = ["place"]

TREE = """
    import ctypes, os, signal, subprocess, sys, time
    def note(name):
        with open(os.environ["REMOTEOPS_RUN_DIR"] + "/pids", "a") as stream:
            stream.write(f"{os.getpid()} {name}\\n")
    def rename(name):
        ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)
    note("main")
    if os.fork() == 0:                      # an engine core: new session, new name, deaf to SIGTERM
        os.setsid(); rename("VLLM::EngineCor"); signal.signal(signal.SIGTERM, signal.SIG_IGN); note("core")
        for rank in range(2):
            if os.fork() == 0:              # workers: own process groups, no environment left
                os.setpgid(0, 0); rename(f"VLLM::Worker_{rank}"); signal.signal(signal.SIGTERM, signal.SIG_IGN)
                note("worker"); time.sleep(300)
        time.sleep(300)
    if os.fork() == 0:                      # a daemon: double fork, its parent gone
        os.setsid()
        if os.fork() == 0:
            note("daemon"); time.sleep(300)
        os._exit(0)
    code = ("import os, time; stream = open(os.environ['REMOTEOPS_RUN_DIR'] + '/pids', 'a'); "
            "print(os.getpid(), 'child', file=stream, flush=True); time.sleep(300)")
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    subprocess.Popen(["env", "-i", sys.executable, "-c", "import time; time.sleep(299)"], start_new_session=True)
    time.sleep(300)
"""


def _pids(place: Place, run: dict[str, object], count: int) -> dict[int, str]:
    path = Path(str(run["path"])) / "pids"

    def read() -> dict[int, str]:
        rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return {int(pid): name for pid, name in rows} if len(rows) >= count else {}

    found: dict[int, str] = until(read)
    return found


def _alive(pids: object) -> list[int]:
    return [pid for pid in pids if (found := processes.read(pid)) is not None and found.alive]  # type: ignore[attr-defined]


def test_every_process_of_the_tree_is_found_and_gone_when_stopped_is_said(place: Place) -> None:
    run = place.start_python(TREE)
    pids = _pids(place, run, 6)
    found = tree.members(run["run"], place.identities(run))
    assert set(pids) <= set(found)
    bare = [pid for pid in found if "time.sleep(299)" in processes.command(pid)]
    assert len(bare) == 1 and processes.environment(bare[0]).get(processes.MARKER) is None
    status = place.stop(grace=1)
    assert status["state"] == "stopped" and "stopped by" in status["reason"]
    assert _alive([*pids, *bare]) == []


def test_daemons_are_still_found_after_keeper_and_parent_are_gone(place: Place) -> None:
    run = place.start_python(TREE)
    pids = _pids(place, run, 6)
    identities = place.identities(run)
    for name in ("keeper", "supervisor", "child"):
        os.kill(identities[name]["pid"], signal.SIGKILL)
    until(lambda: not _alive([identities[name]["pid"] for name in ("keeper", "supervisor", "child")]))
    assert place.status()["state"] == "running"
    assert place.stop(grace=0.5)["state"] == "stopped"
    assert _alive(pids) == []


def test_a_program_that_ends_when_asked_is_not_killed_and_has_time(place: Place) -> None:
    run = place.start_python("""
        import signal, sys, time
        def end(*_):
            print("flushing", flush=True); time.sleep(1); print("flushed", flush=True); sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        print("ready", flush=True)
        while True: time.sleep(0.1)
    """)
    until(lambda: b"ready" in place.log(run))
    status = place.stop(grace=30)
    assert (status["state"], status["exit_code"]) == ("stopped", 0)
    assert place.log(run) == b"ready\nflushing\nflushed\n"
    assert not [event for event in place.dir(run).read_events() if event["event"] == "killed"]


def test_what_a_finished_program_leaves_running_is_ended(place: Place) -> None:
    run = place.start_python("""
        import os, time
        if os.fork() == 0:
            os.setsid(); time.sleep(300)
    """)
    assert place.end()["state"] == "done"
    assert tree.members(run["run"], place.identities(run)) == {}
    assert any("left behind" in event.get("text", "") for event in place.dir(run).read_events())


def test_two_operators_may_stop_at_once_and_a_third_later(place: Place) -> None:
    place.start("sleep", "60")
    found: list[dict[str, object]] = []
    threads = [
        threading.Thread(target=lambda who=who: found.append(place.stop(grace=1, by=who))) for who in ("ann", "bob")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [status["state"] for status in found] == ["stopped", "stopped"]
    assert found[0]["reason"] == found[1]["reason"]
    assert place.stop(grace=1)["already"] is True


def test_a_host_that_shuts_down_stops_the_run_and_says_so(place: Place) -> None:
    run = place.start("sleep", "60")
    os.kill(place.identities(run)["keeper"]["pid"], signal.SIGTERM)
    status = place.end()
    assert status["state"] == "stopped" and "shutdown" in status["reason"]


def test_an_unknown_run_is_named_with_those_that_exist(place: Place) -> None:
    with pytest.raises(AgentError) as caught:
        place.stop("0042")
    assert caught.value.kind == "RunNotFound"
    run = place.start("true")
    with pytest.raises(AgentError) as caught:
        place.status("nonsense")
    assert run["run"] in caught.value.hint
    assert (
        place.status("1")["run"]
        == place.status(run["run"][:9])["run"]
        == place.status(run["path"])["run"]
        == run["run"]
    )


def _leave_something(place: Place) -> tuple[dict[str, object], int]:
    """A run whose keeper, supervisor and child were killed, and whose worker lives."""
    run = place.start_python("""
        import ctypes, os, time
        if os.fork() == 0:
            os.setsid(); ctypes.CDLL(None).prctl(15, b"VLLM::EngineCor", 0, 0, 0)
            open(os.environ["REMOTEOPS_RUN_DIR"] + "/pids", "w").write(f"{os.getpid()} worker\\n"); time.sleep(300)
        time.sleep(300)
    """)
    worker = next(iter(_pids(place, run, 1)))
    return run, worker


def test_a_launch_refuses_over_leftovers_names_them_and_can_be_forced(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, worker = _leave_something(place)
    place.dir(run).event("outcome", state="done")
    identities = place.identities(run)
    for name in ("keeper", "supervisor", "child"):
        os.kill(identities[name]["pid"], signal.SIGKILL)
    until(lambda: not _alive([identities[name]["pid"] for name in ("keeper", "supervisor", "child")]))
    assert place.status()["state"] == "done"
    monkeypatch.setattr(runs, "SETTLE", 0.3)
    with pytest.raises(AgentError) as caught:
        place.start("true")
    assert caught.value.kind == "GpuBusy" and str(worker) in caught.value.message
    row = caught.value.data["leftovers"][0]
    assert (row["pid"], row["sort"], row["run"]) == (worker, "ours", run["run"]) and row["user"] and row["command"]
    forced = place.start("true", force=True)
    assert place.end(forced["run"])["state"] == "done"
    done = leftovers.end(place.request(grace=1))
    assert [row["pid"] for row in done["ended"]] == [worker] and done["left"] == []
    assert _alive([worker]) == []
    assert place.end(place.start("true")["run"])["state"] == "done"


def test_processes_of_a_run_whose_directory_was_deleted_are_leftovers(place: Place) -> None:
    run, worker = _leave_something(place)
    identities = place.identities(run)
    subprocess.run(["rm", "-rf", str(run["path"])], check=True)
    found = {row["pid"]: row["sort"] for row in leftovers.find(place.request())}
    assert found.get(worker) == "ours" and found.get(identities["child"]["pid"]) == "ours"
    done = leftovers.end(place.request(grace=1))
    assert done["left"] == [] and _alive([worker, identities["child"]["pid"]]) == []
    until(lambda: not _alive([identities["keeper"]["pid"], identities["supervisor"]["pid"]]), seconds=90)


def _fake_smi(folder: Path, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvidia-smi that answers as the real one does; NVML is hidden."""
    folder.mkdir(exist_ok=True)
    tool = folder / "nvidia-smi"
    tool.write_text(
        textwrap.dedent(f"""\
        #!/bin/sh
        case "$1" in
        --query-gpu=*)
            echo "0, NVIDIA H200, GPU-aaaa, $(cat {folder}/used), 143771, 37"
            echo "1, NVIDIA H200, GPU-bbbb, 4, 143771, 0";;
        --query-compute-apps=*) cat {folder}/apps;;
        esac
        """)
    )
    tool.chmod(0o755)
    (folder / "used").write_text("4")
    (folder / "apps").write_text(rows)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(gpus, "_LIBRARIES", ())


def test_somebody_elses_process_on_the_gpu_is_named_and_never_ended(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        _fake_smi(tmp_path / "bin", f"GPU-aaaa, {stranger.pid}, 81000\n", monkeypatch)
        monkeypatch.setattr(runs, "SETTLE", 0.3)
        with pytest.raises(AgentError) as caught:
            place.start("true")
        row = caught.value.data["leftovers"][0]
        assert (row["pid"], row["sort"], row["memory"], row["gpus"]) == (stranger.pid, "foreign", 81000 << 20, [0])
        assert "79.1 GiB" in caught.value.message and "sleep 60" in caught.value.message
        left = leftovers.end(place.request(grace=0.2))["left"]
        assert [row["pid"] for row in left] == [stranger.pid] and stranger.poll() is None
        run = place.start("true", env={"CUDA_VISIBLE_DEVICES": "1"})
        assert place.end(run["run"])["state"] == "done"
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="the supervisor would see the real GPUs")
def test_stopped_is_said_only_when_the_gpu_memory_is_free(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bin"
    _fake_smi(folder, "", monkeypatch)
    # The supervisor lives in another process, which must not see this machine's NVML either.
    run = place.start("sleep", "60")
    (folder / "used").write_text("80000")
    free_at: list[float] = []

    def free() -> None:
        time.sleep(3)
        free_at.append(time.monotonic())
        (folder / "used").write_text("5")

    thread = threading.Thread(target=free)
    thread.start()
    status = place.stop(run["run"], grace=1)
    said = time.monotonic()
    thread.join()
    assert status["state"] == "stopped" and status["gpu_released"] is True and said > free_at[0]
    assert status["gpus"][0]["memory_total"] == 143771 << 20


@pytest.mark.parametrize(
    ("setting", "expected"), [(None, [0, 1]), ("1", [1]), ("GPU-bb", [1]), ("1,0", [1, 0]), ("-1", [])]
)
def test_visible_devices(setting: str | None, expected: list[int]) -> None:
    assert gpus.visible(setting, [{"index": 0, "uuid": "GPU-aaaa"}, {"index": 1, "uuid": "GPU-bbbb"}]) == expected


# -- outliving the logout -------------------------------------------------------------------------------------------
def _host(root: Path, *, kills: bool = False, linger: str = "") -> None:
    (root / "run/systemd/system").mkdir(parents=True)
    (root / "etc/systemd").mkdir(parents=True)
    (root / "etc/systemd/logind.conf").write_text(
        "[Login]\n#KillUserProcesses=yes\n" + ("KillUserProcesses=yes\n" if kills else "")
    )
    (root / "var/lib/systemd/linger").mkdir(parents=True)
    if linger:
        (root / "var/lib/systemd/linger" / linger).touch()


def _fake_systemd_run(folder: Path, monkeypatch: pytest.MonkeyPatch, *, works: bool = True) -> None:
    folder.mkdir()
    tool = folder / "systemd-run"
    tool.write_text(
        "#!/bin/sh\n"
        + (
            'while [ "${1#-}" != "$1" ]; do [ "$1" = --unit ] && shift; shift; done\nexec "$@"\n'
            if works
            else 'echo "Failed to connect to bus" >&2; exit 1\n'
        )
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_the_way_of_surviving_is_the_best_the_host_offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pwd

    name = pwd.getpwuid(65534).pw_name
    _host(tmp_path / "kills", kills=True)
    _host(tmp_path / "lingers", kills=True, linger=name)
    _host(tmp_path / "plain")
    assert survival.choose("u", root=str(tmp_path / "nothing"), uid=65534)[0:2] == ("setsid", [])
    _fake_systemd_run(tmp_path / "bin", monkeypatch)
    way = survival.choose("u", root=str(tmp_path / "kills"), uid=65534)
    assert way.name == "setsid" and "enable-linger" in way.warning
    way = survival.choose("u", root=str(tmp_path / "lingers"), uid=65534)
    assert way.name == "systemd-run --user --scope" and way.env["XDG_RUNTIME_DIR"] and not way.warning
    way = survival.choose("u", root=str(tmp_path / "plain"), uid=65534)
    assert (way.name, way.warning) == ("setsid", "")
    assert survival.choose("u", root=str(tmp_path / "kills"), uid=0).name == "systemd-run --scope"


def test_a_service_manager_that_does_not_answer_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _host(tmp_path / "host")
    _fake_systemd_run(tmp_path / "bin", monkeypatch, works=False)
    assert survival.choose("u", root=str(tmp_path / "host"), uid=0).name == "setsid"


def test_a_run_started_through_a_scope_is_a_run_like_any_other(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _host(tmp_path / "host")
    _fake_systemd_run(tmp_path / "bin", monkeypatch)
    choose = survival.choose
    monkeypatch.setattr(survival, "choose", lambda unit: choose(unit, root=str(tmp_path / "host"), uid=0))
    run = place.start(sys.executable, "-c", "print('hello')")
    assert run["survives"] == "systemd-run --scope"
    assert place.end()["state"] == "done" and place.log(run) == b"hello\n"
