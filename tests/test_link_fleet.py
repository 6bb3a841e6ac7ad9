"""Many hosts at once: every host has its answer, nobody waits for a dead one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import sshd

from remoteops import fleet
from remoteops.console import Console
from remoteops.errors import RemoteOpsError, Unreachable
from remoteops.inventory import Host
from remoteops.remote import open_agent
from remoteops.transport import connect

pytestmark = pytest.mark.timeout(120)


def here(name: str, **fields) -> Host:
    return Host(name=name, connect="local", **fields)


def many(server: sshd.Sshd, count: int, **fields) -> list[Host]:
    """Hosts on 127.0.0.1 … 127.0.0.15 that one sshd serves (it listens on sixteen addresses at most)."""
    kind, key = (server.folder / "host_key.pub").read_text().split()[:2]
    server.known_hosts.write_text(f"[127.0.0.*]:{server.port} {kind} {key}\n")
    return [server.host(name=f"gpu{number}", address=f"127.0.0.{number % 15 + 1}", **fields) for number in range(count)]


def echo(host: Host) -> str:
    with connect(host) as link:
        return link.exec(["echo", host.name]).stdout.decode().strip()


def test_fifty_hosts_behind_one_sshd_that_drops_logins_all_answer(tmp_path):
    """OpenSSH's default MaxStartups drops a third of the logins once ten are under way."""
    addresses = [f"ListenAddress 127.0.0.{number}" for number in range(2, 16)]
    with sshd.running(tmp_path / "s", options=["MaxStartups 10:30:100", *addresses]) as server:
        hosts = many(server, 50)
        outcomes = fleet.each(hosts, echo)
        assert [outcome.error for outcome in outcomes if outcome.error] == []
        assert [outcome.value for outcome in outcomes] == [host.name for host in hosts]


def test_a_frozen_and_a_dead_host_delay_nobody(server, nothing_left):
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        hosts = [
            server.host(name="frozen", port=frozen.getsockname()[1], timeouts={"banner": 3}),
            server.host(name="dead", port=sshd.free_port()),
            *[server.host(name=f"gpu{number}") for number in range(6)],
        ]
        order: list[str] = []
        outcomes = fleet.each(hosts, echo, on_outcome=lambda outcome: order.append(outcome.name))
    assert order[-1] == "frozen" and len(order) == 8
    assert [type(outcome.error).__name__ for outcome in outcomes[:2]] == ["LinkTimeout", "Unreachable"]
    assert [outcome.value for outcome in outcomes[2:]] == [f"gpu{number}" for number in range(6)]


def test_the_same_host_twice_has_two_outcomes():
    host = here("a")
    outcomes = fleet.each([host, host, here("b")], lambda item: id(object()) and item.name)
    assert [outcome.value for outcome in outcomes] == ["a", "a", "b"]


def test_no_more_than_the_cap_run_at_once():
    running, most, lock = 0, 0, threading.Lock()

    def busy(host: Host) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1

    assert len(fleet.each([here(str(number)) for number in range(20)], busy, cap=3)) == 20
    assert most == 3


def test_a_defect_at_one_host_leaves_the_others_alone():
    def odd(host: Host) -> int:
        return 1 // (0 if host.name == "b" else 1)

    outcomes = fleet.each([here("a"), here("b"), here("c")], odd)
    assert [outcome.value for outcome in outcomes] == [1, None, 1]
    assert isinstance(outcomes[1].error, RemoteOpsError) and "ZeroDivisionError" in str(outcomes[1].error)
    assert fleet.each([], odd) == []


def outcomes_for_show() -> list[fleet.Outcome]:
    return [
        fleet.Outcome(here("a"), {"n": 1}, None, 0.1),
        fleet.Outcome(here("b"), None, Unreachable("no answer", host="b"), 0.1),
        fleet.Outcome(here("a"), {"n": 2}, None, 0.1),
    ]


def view(console: Console, value: dict) -> int:
    if console.json:
        console.document(value)
    else:
        console.say(f"n is {value['n']}")
    return 1 if value["n"] == 2 else 0


def test_the_summary_names_the_failing_hosts_and_the_exit_code_is_the_worst(capsys):
    assert fleet.show(Console(), outcomes_for_show(), view) == 3
    shown = capsys.readouterr()
    assert "n is 1" in shown.out and "1 of 3 hosts fine; not: b, a" in shown.out and "no answer" in shown.err


def test_json_is_one_document_with_every_outcome(capsys):
    assert fleet.show(Console(json=True), outcomes_for_show(), view) == 3
    document = json.loads(capsys.readouterr().out)
    assert [entry["host"] for entry in document["hosts"]] == ["a", "b", "a"]
    assert [entry["exit_code"] for entry in document["hosts"]] == [0, 3, 1]
    assert document["hosts"][1]["error"]["kind"] == "Unreachable" and document["hosts"][2]["result"] == {"n": 2}


def test_a_line_for_the_shell_runs_there_and_its_status_comes_back(server, capsys):
    done = fleet.shell(server.host(), "echo out; echo err >&2; exit 4")
    assert fleet.show_shell(Console(), done) == 4
    shown = capsys.readouterr()
    assert shown.out == "out\n" and "err" in shown.err


def test_many_hosts_are_asked_by_verbs_too(server):
    def hello(host: Host) -> str:
        with open_agent(host) as agent:
            return str(agent.call("hello", {})["user"])

    hosts = [server.host(name=f"gpu{number}") for number in range(5)]
    assert [outcome.value for outcome in fleet.each(hosts, hello)] == [server.user] * 5


INTERRUPTED = """
import sys
import sshd
from pathlib import Path
from remoteops import fleet
from remoteops.transport import connect
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background inherits "ignore"
def sleep(host):
    with connect(host) as link:
        print("started\\n", end="", flush=True)  # in one piece: three threads write
        link.exec(["sleep", "60"])
with sshd.running(Path(sys.argv[1])) as server:
    try:
        fleet.each([server.host(name=str(n)) for n in range(3)], sleep)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def test_ctrl_c_ends_all_of_them_at_once(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path / "s")], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert [child.stdout.readline() for _ in range(3)] == ["started\n"] * 3
    child.send_signal(signal.SIGINT)
    assert child.stdout.readline() == "interrupted\n"
    assert child.wait(20) == 0
    child.stdout.close()
