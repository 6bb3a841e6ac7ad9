"""Starting, knowing and ending runs, with real processes."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from remoteops.agent import evidence, lookout, processes, runs, tree
from remoteops.agent.protocol import AgentError
from remoteops.agent.rundir import read_json, write_json
from tests.runs_fixtures import Place, place, until

__all__ = ["place"]


def test_a_started_run_is_alive_in_its_own_session_and_outlives_its_starter(place: Place, tmp_path: Path) -> None:
    request = json.dumps(place.request(argv=["sleep", "60"]))
    root = str(Path(runs.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-m", "remoteops.agent", "run.start"],
        input=request.encode(),
        capture_output=True,
        check=True,
        timeout=60,
        cwd=root,
    )
    data = json.loads(done.stdout.splitlines()[-1])["data"]
    child = processes.read(data["pid"])
    assert child is not None and child.alive and child.session == child.pid
    assert processes.is_alive(data["identity"]) and data["survives"]
    keeper = place.identities(data)["keeper"]
    assert processes.read(keeper["pid"]).session == keeper["pid"]
    for number in (0, 1, 2):
        assert os.readlink(f"/proc/{child.pid}/fd/{number}").split(":")[0] in ("/dev/null", "pipe")
    assert place.status()["state"] == "running"


def test_a_program_that_cannot_be_executed_is_no_run(place: Place) -> None:
    with pytest.raises(AgentError, match="no-such-program") as caught:
        place.start("/no-such-program")
    assert caught.value.kind == "HostStateError"
    assert runs.list_runs(place.request(), place._emit)["runs"] == []


@pytest.mark.parametrize(
    ("code", "state", "exit_code"), [("raise SystemExit(0)", "done", 0), ("raise SystemExit(3)", "failed", 3)]
)
def test_the_exit_code_is_the_outcome_of_a_silent_program(place: Place, code: str, state: str, exit_code: int) -> None:
    place.start_python(code)
    status = place.end()
    assert (status["state"], status["exit_code"]) == (state, exit_code)


def test_an_extraction_that_never_says_how_it_went_has_failed(place: Place) -> None:
    place.start_python("pass", expect_outcome=True)
    status = place.end()
    assert status["state"] == "failed" and "never said" in status["reason"]


def test_events_of_the_engine_become_the_status(place: Place) -> None:
    run = place.start_python(
        """
        import json, os, time
        def event(**fields):
            with open(os.environ["REMOTEOPS_RUN_DIR"] + "/events.jsonl", "a") as stream:
                stream.write(json.dumps({"t": time.time(), **fields}) + "\\n")
        event(event="phase", phase="load"); time.sleep(1.5)
        event(event="phase", phase="extract")
        for n in range(5):
            event(event="progress", samples=n, samples_total=10, tokens=n * 1000, tokens_total=10000, bytes=n);
            time.sleep(0.4)
        time.sleep(1.5)
        event(event="phase", phase="verify"); time.sleep(1.5)
        event(event="outcome", state="done", summary={"rows": 10})
    """,
        expect_outcome=True,
    )
    seen: list[str] = []
    best: dict[str, object] = {}

    def over() -> bool:
        status = place.status()
        if status["state"] not in seen:
            seen.append(status["state"])
        if status["tokens"] == 4000:
            best.update(status)
        return status["state"] == "done"

    until(over)
    assert [state for state in seen if state != "starting"] == ["loading", "running", "verifying", "done"]
    assert best["samples_total"] == 10 and 1000 < best["tokens_per_s_mean"] < 4000 and 0.5 < best["eta_s"] < 60  # type: ignore[operator]
    assert place.status()["summary"] == {"rows": 10}
    assert stat.S_IMODE(os.stat(run["path"]).st_mode) == 0o700


def test_an_engine_killed_from_outside_is_lost_and_a_crash_is_a_failure(place: Place) -> None:
    run = place.start("sleep", "60")
    os.kill(run["pid"], signal.SIGKILL)
    status = place.end()
    assert (status["state"], status["signal"]) == ("lost", "SIGKILL") and "outside" in status["reason"]
    place.start_python("import os; os.abort()")
    status = place.end()
    assert (status["state"], status["signal"]) == ("failed", "SIGABRT")


def test_a_killed_supervisor_is_replaced_and_nothing_is_missing(place: Place) -> None:
    run = place.start_python("""
        import time
        for n in range(60):
            print(n, flush=True); time.sleep(0.05)
        raise SystemExit(7)
    """)
    first = place.identities(run)["supervisor"]
    os.kill(first["pid"], signal.SIGKILL)
    until(lambda: place.identities(run)["supervisor"] != first)
    assert place.status()["state"] == "running"
    status = place.end()
    assert (status["state"], status["exit_code"]) == ("failed", 7)
    assert place.log(run).split() == [str(n).encode() for n in range(60)]


def test_without_keeper_and_supervisor_the_engine_is_still_seen_and_stopped(place: Place) -> None:
    run = place.start("sleep", "60")
    identities = place.identities(run)
    os.kill(identities["keeper"]["pid"], signal.SIGKILL)
    os.kill(identities["supervisor"]["pid"], signal.SIGKILL)
    until(lambda: not processes.is_alive(identities["supervisor"]) and not processes.is_alive(identities["keeper"]))
    status = place.status()
    assert status["state"] == "running" and status["supervised"] is False
    assert place.stop(grace=1)["state"] == "stopped"
    assert not processes.is_alive(identities["child"])
    assert place.status()["state"] == "stopped"


def test_when_all_of_a_run_is_killed_it_is_lost_and_stays_lost(place: Place) -> None:
    run = place.start("sleep", "60")
    identities = place.identities(run)
    for name in ("keeper", "supervisor", "child"):
        os.kill(identities[name]["pid"], signal.SIGKILL)
    until(lambda: not any(processes.is_alive(identities[name]) for name in ("keeper", "supervisor", "child")))
    status = place.status()
    assert status["state"] == "lost" and "no outcome" in status["reason"]
    assert (read_json(place.dir(run).status) or {})["state"] == "lost"


def test_a_keeper_killed_before_its_child_ends_leaves_no_exit_code_but_the_engines_word(place: Place) -> None:
    run = place.start_python(
        """
        import json, os, time
        time.sleep(1)
        with open(os.environ["REMOTEOPS_RUN_DIR"] + "/events.jsonl", "a") as stream:
            stream.write(json.dumps({"event": "outcome", "state": "done"}) + "\\n")
    """,
        expect_outcome=True,
    )
    os.kill(place.identities(run)["keeper"]["pid"], signal.SIGKILL)
    status = place.end()
    assert (status["state"], status["exit_code"]) == ("done", None)


def test_a_reboot_is_told_from_the_boot_id(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = place.start("sleep", "60")
    other = tmp_path / "boot_id"
    other.write_text("00000000-0000-0000-0000-000000000000\n")
    monkeypatch.setenv(processes.BOOT_ID_SEAM, str(other))
    status = runs.status(place.request(run=run["run"]), place._emit)
    assert status["state"] == "lost" and "rebooted" in status["reason"] and "00000000" in status["evidence"][0]
    monkeypatch.delenv(processes.BOOT_ID_SEAM)


def test_a_reused_pid_is_never_taken_for_the_run(place: Place) -> None:
    run = place.start("sleep", "60")
    identities = place.identities(run)
    place.clean()
    stranger = subprocess.Popen(["sleep", "30"])
    try:
        record = {
            **identities,
            "child": {**identities["child"], "pid": stranger.pid},
            "keeper": {**identities["keeper"], "pid": stranger.pid},
            "supervisor": {**identities["supervisor"], "pid": stranger.pid},
        }
        write_json(place.dir(run).supervisor, record)
        assert place.status()["state"] == "lost"
        assert tree.members(run["run"], record) == {}
        place.stop(grace=0)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_clock_set_back_changes_neither_the_order_nor_the_rate(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    first = place.start("true")
    place.end(first["run"])
    monkeypatch.setattr(time, "time", lambda: 1_000_000_000.0)
    second = place.start("true")
    monkeypatch.undo()
    place.end(second["run"])
    listed = runs.list_runs(place.request(), place._emit)["runs"]
    assert [status["run"] for status in listed] == [second["run"], first["run"]]
    assert place.status()["run"] == second["run"] and place.status()["elapsed_s"] >= 0


def test_a_second_run_is_refused_until_the_first_is_over_or_it_is_wanted(place: Place) -> None:
    first = place.start("sleep", "60")
    with pytest.raises(AgentError) as caught:
        place.start("sleep", "60")
    assert caught.value.kind == "RunActive" and first["run"] in caught.value.message
    second = place.start("sleep", "60", allow_second=True)
    assert second["run"] != first["run"]
    for run in (first, second):
        assert place.stop(run["run"], grace=1)["state"] == "stopped"


def test_the_disk_filling_up_hurts_neither_the_child_nor_the_truth(place: Place, tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "small"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True, check=False
    ).returncode:
        pytest.skip("no mounting here")
    small = Place(disk / "state")
    try:
        run = small.start_python("""
            import time
            for n in range(60):
                print("x" * 65536, n, flush=True); time.sleep(0.01)
            time.sleep(1.5)
            raise SystemExit(5)
        """)
        until(lambda: small.status().get("problem"))
        status = small.end()
        assert (status["state"], status["exit_code"]) == ("failed", 5)
        assert len(small.log(run)) > 1_000_000
    finally:
        small.clean()
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.slow
def test_what_could_not_be_written_is_written_later_and_the_gap_is_named(place: Place, tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "small"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True, check=False
    ).returncode:
        pytest.skip("no mounting here")
    small = Place(disk / "state")
    try:
        ballast = disk / "ballast"
        run = small.start_python("""
            import sys, time
            sys.stdin = open("/dev/null")
            time.sleep(1)
            for n in range(40):
                print("y" * 65536, n, flush=True)
            time.sleep(3)
            print("the last line", flush=True)
        """)
        ballast.write_bytes(b"b" * 2_500_000)
        until(lambda: small.status().get("problem"))
        ballast.unlink()
        assert small.end()["state"] == "done"
        log = small.log(run)
        assert b"bytes of the log are missing here: the disk was full" in log and log.endswith(b"the last line\n")
    finally:
        small.clean()
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_log_renamed_or_deleted_under_the_writer_is_opened_anew(place: Place) -> None:
    run = place.start_python("""
        import time
        for n in range(80):
            print(n, flush=True); time.sleep(0.02)
    """)
    log = Path(place.dir(run).log)
    until(lambda: log.exists() and log.stat().st_size > 20)
    log.rename(log.with_name("log.1"))
    until(lambda: log.exists() and log.stat().st_size > 20)
    middle = log.read_bytes()
    log.unlink()
    place.end()
    last = log.read_bytes()
    numbers = [int(word) for word in (log.with_name("log.1").read_bytes() + middle + last).split()]
    assert numbers[0] == 0 and numbers[-1] == 79 and numbers == sorted(set(numbers))


def test_a_killed_worker_is_on_record_and_the_engines_word_is_the_outcome(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = place.start_python(
        """
        import json, os, time
        worker = os.fork()
        if worker == 0:
            time.sleep(60)
        def event(**fields):
            with open(os.environ["REMOTEOPS_RUN_DIR"] + "/events.jsonl", "a") as stream:
                stream.write(json.dumps(fields) + "\\n")
        print(worker, flush=True)
        os.waitpid(worker, 0)
        event(event="failure", kind="EngineDead", message="EngineCore died: worker 0 is gone", hint="see the log")
        event(event="outcome", state="failed")
        raise SystemExit(1)
    """,
        expect_outcome=True,
    )
    worker = int(until(lambda: place.log(run).split()[:1])[0])
    os.kill(worker, signal.SIGKILL)
    status = place.end()
    assert (status["state"], status["exit_code"]) == ("failed", 1) and "worker 0 is gone" in status["reason"]
    assert status["last_error"]["hint"] == "see the log" and status["last_error"]["log_offset"] == len(place.log(run))


def test_processes_that_vanish_are_recorded_with_proof_when_memory_ran_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, dict[str, object]]] = []
    around = lookout.Lookout(lambda name, **fields: told.append((name, fields)), seen=[], oom={"host": 0})
    monkeypatch.setattr(lookout, "LOOK_EVERY", dict.fromkeys(lookout.LOOK_EVERY, 0.0))
    worker = processes.Process(4242, 1, 1, 1, 99, "S", "VLLM::Worker_3")
    assert around.look(str(tmp_path), None, lambda: {4242: worker}) is True
    assert around.look(str(tmp_path), None, lambda: {4242: worker}) is False
    monkeypatch.setattr(evidence, "kernel_log", lambda: ["Out of memory: Killed process 4242 (VLLM::Worker_3)"])
    assert around.look(str(tmp_path), None, dict) is True
    gone = [fields for name, fields in told if name == "processes_gone"]
    notices = [str(fields["text"]) for name, fields in told if name == "notice"]
    assert gone[0]["pids"] == [4242] and "VLLM::Worker_3" in notices[-1] and "out of memory" in notices[-1]
    assert around.found["disk"]["free"] > 0


def test_out_of_memory_is_proved_by_what_the_kernel_says(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "[ 12.3] Memory cgroup out of memory: Killed process 77 (python3) total-vm:1kB"
    monkeypatch.setattr(evidence, "kernel_log", lambda: [line, "Killed process 78 (other)"])
    monkeypatch.setattr(evidence, "oom_counters", lambda pid=None: {"host": 5, "group": 2})
    assert evidence.out_of_memory({"host": 5, "group": 1}, [77]) == [
        "kernel log: " + line,
        "the out-of-memory killer struck 1 time(s) in the run's control group since the start",
    ]
    assert evidence.out_of_memory({"host": 5, "group": 2}, [1]) == []


KILLED, CRASHED, CODE_0, CODE_3 = signal.SIGKILL, signal.SIGSEGV, 0, 3 << 8


@pytest.mark.parametrize(
    ("outcome", "status", "stopping", "speaks", "state", "words"),
    [
        ("done", CODE_0, None, True, "done", "finished"),
        ("done", CRASHED, None, True, "done", "SIGSEGV"),
        ("failed", CODE_3, None, True, "failed", "reported failure"),
        ("failed", CODE_3, "stopped by ann", True, "stopped", "ann"),
        ("stopped", CODE_0, "stopped by ann", True, "stopped", "ann"),
        ("done", CODE_0, "stopped by ann", True, "done", "finished"),
        (None, KILLED, "stopped by ann", True, "stopped", "ann"),
        (None, KILLED, None, True, "lost", "SIGKILL"),
        (None, CRASHED, None, True, "failed", "crashed"),
        (None, None, None, True, "lost", "no outcome"),
        (None, CODE_0, None, False, "done", "finished"),
        (None, CODE_0, None, True, "failed", "never said"),
        (None, CODE_3, None, False, "failed", "exit code 3"),
        (None, 137 << 8, None, False, "failed", "SIGKILL"),
    ],
)
def test_every_way_to_end_has_its_name(
    outcome: str | None, status: int | None, stopping: str | None, speaks: bool, state: str, words: str
) -> None:
    said = {"state": outcome} if outcome else None
    found, reason = evidence.conclude(said, None, status, stopping=stopping, expect_outcome=speaks)
    assert found == state and words in reason
