"""Following runs over a real sshd: every byte once and in order, to the run's own end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remoteops import logs, runs
from remoteops.agent import processes
from remoteops.agent import runs as agent_runs
from remoteops.errors import Interrupted, RunNotFound, Unreachable
from remoteops.logs import Target, What
from remoteops.remote import open_agent
from tests import sshd
from tests.runs_fixtures import Place, Recorder, until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sshd.Sshd]:
    with sshd.running(tmp_path_factory.mktemp("sshd")) as found:
        yield found


@pytest.fixture
def place(server: sshd.Sshd, tmp_path: Path) -> Iterator[Place]:
    found = Place(tmp_path / "state")
    yield found
    found.clean()


def host(server: sshd.Sshd, place: Place, **changes: Any) -> Any:
    return server.host(state_dir=place.state_dir, **changes)


def drop_connections(server: sshd.Sshd) -> None:
    """Kill the processes that serve connections now, as a dying sshd session does."""
    server.signal_sessions(signal.SIGKILL)


def test_the_whole_way_launch_follow_end(server: sshd.Sshd, place: Place) -> None:
    there = host(server, place)
    with open_agent(there) as agent:
        run = runs.launch(
            there,
            {"argv": [sys.executable, "-u", "-c", "for n in range(1000): print(n)\nraise SystemExit(4)"]},
            agent=agent,
        )
    sink = Recorder()
    found = logs.follow([Target(there)], sink, What(lines=None))
    assert bytes(sink.data[0]).split() == [str(n).encode() for n in range(1000)]
    assert sink.ends[0]["exit_code"] == 4 and sink.ends[0]["run"] == run["run"]
    assert found.exit_code == 1 and found.statuses[0] is not None


def test_the_run_lives_on_after_the_connection_that_started_it_was_killed(server: sshd.Sshd, place: Place) -> None:
    there = host(server, place)
    run = runs.launch(
        there, {"argv": [sys.executable, "-u", "-c", "import time\nfor n in range(30): print(n); time.sleep(0.05)"]}
    )
    drop_connections(server)
    status = place.end()
    assert status["state"] == "done" and place.log(run).split()[-1] == b"29"


def test_bytes_arrive_as_they_were_written(server: sshd.Sshd, place: Place) -> None:
    code = """
        import os, time
        def put(data):
            os.write(1, data); time.sleep(0.15)
        put(b"10%\\r"); put(b"20%\\r"); put(b"30%\\n")
        put(b"\\xe2\\x82"); put(b"\\xac euro\\n")
        long = "ä€𝄞".encode() * 40000
        for at in range(0, len(long), 65537): os.write(1, long[at:at + 65537])
        put(b"\\n\\xff\\xfe not utf-8\\n"); put(b"no newline at the end")
    """
    run = place.start_python(code)
    sink = Recorder()
    logs.follow([Target(host(server, place), run["run"])], sink, What(lines=None))
    expected = (
        "10%\r20%\r30%\n€ euro\n".encode() + "ä€𝄞".encode() * 40000 + b"\n\xff\xfe not utf-8\nno newline at the end"
    )
    assert bytes(sink.data[0]) == expected == place.log(run)


def test_killed_sessions_cost_no_line_and_repeat_none(server: sshd.Sshd, place: Place) -> None:
    run = place.start_python("""
        import time
        for n in range(40000):
            print(n)
            if n % 1000 == 0: time.sleep(0.1)
    """)
    cuts = [5_000, 60_000, 120_000]

    def cut(_: int, data: bytes) -> None:
        if cuts and len(sink.data[0]) > cuts[0]:
            cuts.pop(0)
            drop_connections(server)

    sink = Recorder(cut)
    found = logs.follow([Target(host(server, place), run["run"])], sink, What(lines=None))
    assert bytes(sink.data[0]).split() == [str(n).encode() for n in range(40000)]
    assert (
        not cuts
        and sink.kinds().count("back") == 3
        and "byte" in next(text for _, kind, text in sink.notices if kind == "back")
    )
    assert found.exit_code == 0


def test_a_link_lost_before_the_first_line_forgets_nothing(server: sshd.Sshd, place: Place) -> None:
    run = place.start_python("""
        import os, time
        while not os.path.exists(os.environ["REMOTEOPS_RUN_DIR"] + "/go"): time.sleep(0.02)
        for n in range(100): print(n)
    """)
    sink = Recorder()

    def status(target: int, status: dict[str, Any]) -> None:
        if len(sink.statuses) == 0:
            threading.Timer(0.3, lambda: (drop_connections(server), Path(run["path"], "go").touch())).start()
        sink.statuses.append((target, status))

    sink.status = status  # type: ignore[method-assign]
    logs.follow([Target(host(server, place), run["run"])], sink, What(lines=5))
    assert bytes(sink.data[0]).split() == [str(n).encode() for n in range(100)]


def test_a_rotated_log_is_followed_through_over_the_link(server: sshd.Sshd, place: Place) -> None:
    run = place.start_python("""
        import time
        for n in range(300): print(n, flush=True); time.sleep(0.01)
    """)
    log = Path(run["path"], "log")
    done: list[str] = []

    def rotate(_: int, data: bytes) -> None:
        if not done and len(sink.data[0]) > 100:
            done.append("renamed")
            log.rename(log.with_name("log.1"))
        elif done == ["renamed"] and len(sink.data[0]) > 600 and log.exists() and log.stat().st_size > 50:
            done.append("copied")
            log.with_name("log.2").write_bytes(log.with_name("log.1").read_bytes())

    sink = Recorder(rotate)
    logs.follow([Target(host(server, place), run["run"])], sink, What(lines=None))
    assert bytes(sink.data[0]).split() == [str(n).encode() for n in range(300)]
    assert "rotated" in sink.kinds()


def test_a_truncated_log_is_said_to_be(server: sshd.Sshd, place: Place) -> None:
    run = place.start_python("""
        import time
        for n in range(100): print(n, flush=True); time.sleep(0.02)
    """)
    done: list[int] = []

    def cut(_: int, data: bytes) -> None:
        if not done and len(sink.data[0]) > 50:
            done.append(1)
            os.truncate(Path(run["path"], "log"), 0)

    sink = Recorder(cut)
    logs.follow([Target(host(server, place), run["run"])], sink, What(lines=None))
    numbers = [int(word) for word in bytes(sink.data[0]).split()]
    assert "truncated" in sink.kinds() and numbers[-1] == 99 and numbers == sorted(set(numbers)) and len(numbers) > 80


def test_a_deleted_run_ends_the_following_with_words(server: sshd.Sshd, place: Place) -> None:
    run = place.start("sh", "-c", "echo hello; sleep 60")
    sink = Recorder(lambda *_: subprocess.run(["rm", "-rf", run["path"]], check=True) and None)
    found = logs.follow([Target(host(server, place), run["run"])], sink)
    assert isinstance(found.errors[0], RunNotFound) and "deleted" in str(found.errors[0]) and found.exit_code == 1
    os.kill(run["pid"], signal.SIGKILL)


def test_two_follow_and_one_stops(server: sshd.Sshd, place: Place) -> None:
    run = place.start_python("""
        import time
        n = 0
        while True: print(n, flush=True); n += 1; time.sleep(0.01)
    """)
    there = host(server, place)
    sinks = [Recorder(), Recorder()]
    threads = [
        threading.Thread(target=logs.follow, args=([Target(there, run["run"])], sink, What(lines=None)))
        for sink in sinks
    ]
    for thread in threads:
        thread.start()
    until(lambda: all(len(sink.data.get(0, b"")) > 200 for sink in sinks))
    stopped = runs.stop(there, run["run"], grace=2)
    for thread in threads:
        thread.join(20)
    assert stopped["state"] == "stopped"
    assert [sink.ends[0]["state"] for sink in sinks] == ["stopped", "stopped"]
    assert bytes(sinks[0].data[0]) == bytes(sinks[1].data[0]) == place.log(run)


def test_several_runs_at_once_never_mix(server: sshd.Sshd, place: Place) -> None:
    code = "import sys, time\nfor n in range(200): print(sys.argv[1], n, flush=True); time.sleep(0.002)"
    started = [place.start(sys.executable, "-c", code, name, allow_second=True) for name in ("one", "two", "three")]
    sink = Recorder()
    logs.follow([Target(host(server, place), run["run"]) for run in started], sink, What(lines=None))
    for index, name in enumerate(("one", "two", "three")):
        assert bytes(sink.data[index]) == b"".join(b"%s %d\n" % (name.encode(), n) for n in range(200))


def test_one_unreachable_host_does_not_hold_up_the_others(server: sshd.Sshd, place: Place) -> None:
    run = place.start("echo", "fine")
    closed = sshd.free_port()
    sink = Recorder()
    found = logs.follow(
        [Target(host(server, place, name="gone", port=closed)), Target(host(server, place), run["run"])],
        sink,
        What(lines=None),
    )
    assert isinstance(sink.errors[0], Unreachable) and bytes(sink.data[1]) == b"fine\n" and found.exit_code == 3


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (What(lines=2, follow=False), b"98\n99\n"),
        (What(lines=None, follow=False, grep="^1.$"), b"".join(b"%d\n" % n for n in range(10, 20))),
        (What(lines=2, follow=False, grep="5"), b"85\n95\n"),
        (What(lines=0, follow=False), b""),
        (What(lines=1, follow=False, since_ago=3600), b"".join(b"%d\n" % n for n in range(100))),
    ],
)
def test_without_following_the_asked_for_part_comes_and_that_is_all(
    server: sshd.Sshd, place: Place, what: What, expected: bytes
) -> None:
    run = place.start_python("for n in range(100): print(n)\nimport time; time.sleep(60)")
    until(lambda: place.log(run).endswith(b"99\n"))
    sink = Recorder()
    found = logs.follow([Target(host(server, place))], sink, what)
    assert bytes(sink.data.get(0, b"")) == expected
    assert sink.ends[0]["state"] == "running" and found.exit_code == 0


@pytest.mark.slow
def test_since_shows_what_was_written_after_a_moment(server: sshd.Sshd, place: Place) -> None:
    run = place.start_python("""
        import time
        print("early", flush=True); time.sleep(4); print("late", flush=True); time.sleep(60)
    """)
    until(lambda: place.log(run).endswith(b"late\n"))
    sink = Recorder()
    logs.follow([Target(host(server, place))], sink, What(follow=False, since_ago=2.5))
    assert bytes(sink.data[0]) == b"late\n"


def test_interrupting_leaves_the_run_and_nothing_else_on_the_host(server: sshd.Sshd, place: Place) -> None:
    run = place.start("sleep", "60")
    there = host(server, place)
    wanted = ("name", "connect", "address", "port", "user", "identity_files", "known_hosts", "ssh_config", "cache_dir")
    fields = {name: getattr(there, name) for name in (*wanted, "state_dir")}
    program = textwrap.dedent(f"""
        import signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background inherit "ignore"
        from remoteops import logs
        from remoteops.errors import Interrupted
        from remoteops.inventory import Host
        from tests.runs_fixtures import Recorder
        there = Host(**{fields!r})
        sink = Recorder()
        sink.status = lambda *_: print("following", flush=True)
        try:
            logs.follow([logs.Target(there)], sink)
        except Interrupted as error:
            sys.exit(error.exit_code)
    """)
    following = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=Path(__file__).parents[1])
    assert following.stdout is not None and following.stdout.readline() == b"following\n"

    def verbs() -> list[int]:
        return [
            pid
            for pid in processes.scan()
            if "run.follow" in processes.command(pid) and str(server.home) in processes.command(pid)
        ]

    assert verbs()
    following.send_signal(signal.SIGINT)
    begun = time.monotonic()
    assert following.wait(10) == 130
    assert time.monotonic() - begun < 5
    following.stdout.close()
    until(lambda: not verbs(), seconds=5)
    assert processes.is_alive(run["identity"]) and place.status()["state"] == "running"


@pytest.mark.slow
def test_the_server_restarted_is_found_again(place: Place, tmp_path: Path) -> None:
    first = sshd.start(tmp_path / "sshd")
    run = place.start_python("""
        import time
        for n in range(150): print(n, flush=True); time.sleep(0.03)
    """)
    servers = [first]

    def restart(_: int, data: bytes) -> None:
        if len(servers) == 1 and len(sink.data[0]) > 50:
            first.stop()
            servers.append(sshd.start(tmp_path / "sshd", port=first.port))

    sink = Recorder(restart)
    try:
        found = logs.follow([Target(first.host(state_dir=place.state_dir), run["run"])], sink, What(lines=None))
    finally:
        servers[-1].stop()
    assert bytes(sink.data[0]).split() == [str(n).encode() for n in range(150)] and found.exit_code == 0
    assert sink.kinds()[:1] == ["lost"] and "back" in sink.kinds()


@pytest.mark.slow
def test_giving_up_after_the_patience_is_an_error_not_an_end(place: Place, tmp_path: Path) -> None:
    server = sshd.start(tmp_path / "sshd")
    place.start("sh", "-c", "echo one; sleep 60")
    sink = Recorder(lambda *_: server.stop())
    found = logs.follow([Target(server.host(state_dir=place.state_dir))], sink, What(patience=1.0))
    assert found.errors[0] is not None and found.exit_code == 3 and 0 not in sink.ends


def test_the_overview_asks_all_hosts_and_says_which_does_not_answer(server: sshd.Sshd, place: Place) -> None:
    run = place.start("sleep", "60")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        closed = silent.getsockname()[1]
    found = runs.overview([host(server, place, name="a"), host(server, place, name="b", port=closed)])
    assert found["hosts"][0]["runs"][0]["run"] == run["run"] and found["hosts"][0]["runs"][0]["state"] == "running"
    assert found["hosts"][1]["error"]["kind"] == "Unreachable"


def test_interrupted_is_what_a_caller_sees_on_ctrl_c(server: sshd.Sshd, place: Place) -> None:
    place.start("sh", "-c", "echo one; sleep 60")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        logs.follow([Target(host(server, place))], Recorder(interrupt))
    assert caught.value.exit_code == 130


def test_a_launch_whose_answer_was_lost_is_not_started_twice(server: sshd.Sshd, place: Place) -> None:
    request = place.request(argv=["sleep", "60"], token="abc")
    first = agent_runs.start(request, place._emit)
    again = agent_runs.start(request, place._emit)
    assert again["run"] == first["run"] and again["pid"] == first["pid"]
    assert agent_runs.list_runs(place.request(), place._emit)["total"] == 1


@pytest.mark.slow
def test_a_stop_goes_on_when_the_link_is_lost_and_its_end_is_still_told(server: sshd.Sshd, place: Place) -> None:
    run = place.start_python("""
        import signal, time
        def end(*_): time.sleep(3); raise SystemExit(0)
        signal.signal(signal.SIGTERM, end)
        print("ready", flush=True)
        while True: time.sleep(0.1)
    """)
    until(lambda: place.log(run))
    seen: list[str] = []

    def drop(event: dict[str, Any]) -> None:
        if not seen:
            drop_connections(server)
        seen.append(event["event"])

    assert runs.stop(host(server, place), None, grace=30, on_event=drop)["state"] == "stopped"
    assert len(seen) > 1
