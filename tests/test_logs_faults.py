"""Links that die silently, or a hundred times: no line is lost, none comes twice, and the loss is told."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from remoteops import logs, runs
from remoteops.logs import Target, What
from tests import sshd
from tests.runs_fixtures import Place, Recorder, place, until

__all__ = ["place"]

NUMBERS = """
    import time
    for n in range({count}):
        print(n, flush=True); time.sleep({pause})
"""
QUICK = {"connect": 3, "banner": 3, "auth": 5, "channel": 3, "silence": 3}
"""Seconds; a user's default for silence is 15. The tests ask that the loss is told at all, bench/follow.py how soon."""


def whole(sink: Recorder, count: int) -> bool:
    return bytes(sink.data[0]).split() == [str(n).encode() for n in range(count)]


@pytest.mark.slow
def test_a_frozen_server_is_told_and_followed_on_when_it_thaws(place: Place, tmp_path: Path) -> None:
    """SIGSTOP: the kernel goes on acknowledging, only the silence shows it."""
    run = place.start_python(NUMBERS.format(count=300, pause=0.03))
    with sshd.running(tmp_path / "sshd") as server:
        frozen: list[bool] = []

        def freeze(_: int, data: bytes) -> None:
            if not frozen and len(sink.data[0]) > 100:
                frozen.append(True)
                os.kill(server.process.pid, signal.SIGSTOP)
                server.signal_sessions(signal.SIGSTOP)

        def thaw() -> None:
            if "lost" in sink.kinds() and frozen == [True]:
                frozen.append(False)
                os.kill(server.process.pid, signal.SIGCONT)
                server.signal_sessions(signal.SIGCONT)

        sink = Recorder(freeze)
        sink.on_idle = thaw
        found = logs.follow(
            [Target(server.host(state_dir=place.state_dir, timeouts=QUICK), run["run"])], sink, What(lines=None)
        )
    assert frozen == [True, False] and whole(sink, 300) and found.exit_code == 0


@dataclass
class Namespace:
    """A host behind a wire that can be cut without a word."""

    name: str
    server: sshd.Sshd

    def run(self, *argv: str) -> None:
        subprocess.run(["ip", "netns", "exec", self.name, *argv], check=True, capture_output=True)

    def cut(self) -> None:
        for chain in ("INPUT", "OUTPUT"):
            self.run("iptables", "-A", chain, "-j", "DROP")

    def heal(self) -> None:
        self.run("iptables", "-F")


@pytest.fixture
def namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    if os.getuid() != 0 or not shutil.which("ip") or not shutil.which("iptables"):
        pytest.skip("network namespaces need root, ip and iptables")
    number = os.getpid() % 200
    name, near, far = f"rops{os.getpid()}", f"ropsa{number}", f"ropsb{number}"
    address = f"10.213.{number}"

    def ip(*argv: str) -> int:
        return subprocess.run(["ip", *argv], capture_output=True, check=False).returncode

    if ip("netns", "add", name):
        pytest.skip("no network namespaces here")
    try:
        steps = [
            ("link", "add", near, "type", "veth", "peer", "name", far, "netns", name),
            ("addr", "add", f"{address}.1/24", "dev", near),
            ("link", "set", near, "up"),
            ("-n", name, "addr", "add", f"{address}.2/24", "dev", far),
            ("-n", name, "link", "set", far, "up"),
            ("-n", name, "link", "set", "lo", "up"),
        ]
        if any(ip(*step) for step in steps):
            pytest.skip("no veth pairs here")
        # The server itself must live in the namespace: sshd is started through `ip netns exec`, which runs it in its
        # own place.
        wrapper = tmp_path / "sshd-in-namespace"
        wrapper.write_text(f'#!/bin/sh\nexec ip netns exec {name} {sshd.SSHD} "$@"\n')
        wrapper.chmod(0o755)
        monkeypatch.setattr(sshd, "SSHD", str(wrapper))
        server = sshd.start(tmp_path / "sshd", address=f"{address}.2", port=2222)
        try:
            yield Namespace(name, server)
        finally:
            server.stop()
    finally:
        ip("netns", "del", name)
        ip("link", "del", near)


@pytest.mark.netns
@pytest.mark.slow
def test_packets_swallowed_both_ways_are_told_and_nothing_is_missing_afterwards(
    place: Place, namespace: Namespace
) -> None:
    run = place.start_python(NUMBERS.format(count=600, pause=0.03))
    state = ["whole"]

    def cut(_: int, data: bytes) -> None:
        if state == ["whole"] and len(sink.data[0]) > 200:
            state.append("cut")
            namespace.cut()

    def heal() -> None:
        # The second "lost" is a failed attempt to connect: the wire is still cut then.
        if state[-1] == "cut" and sink.kinds().count("lost") >= 2:
            state.append("healed")
            namespace.heal()

    sink = Recorder(cut)
    sink.on_idle = heal
    there = namespace.server.host(state_dir=place.state_dir, timeouts=QUICK)
    found = logs.follow([Target(there, run["run"])], sink, What(lines=None))
    assert state == ["whole", "cut", "healed"] and whole(sink, 600) and found.exit_code == 0


@pytest.mark.netns
@pytest.mark.slow
def test_a_run_started_over_a_wire_that_is_then_cut_goes_on(place: Place, namespace: Namespace) -> None:
    there = namespace.server.host(state_dir=place.state_dir, timeouts=QUICK)
    run = runs.launch(
        there, {"argv": [sys.executable, "-u", "-c", "import time\nfor n in range(60): print(n); time.sleep(0.05)"]}
    )
    namespace.cut()
    assert place.end(run["run"])["state"] == "done"
    assert place.log(run).split()[-1] == b"59"
    namespace.heal()


CUTS = int(os.environ.get("REMOTEOPS_TEST_CUTS", "25"))  # 100 make a million lines, and half a minute


@pytest.mark.slow
def test_lost_connections_and_many_lines_once_each_in_order(place: Place, tmp_path: Path) -> None:
    # The program writes ten thousand lines for each permit, and each lost connection is one.
    lines = CUTS * 10_000
    run = place.start_python(f"""
        import os, sys, time
        permits = os.environ["REMOTEOPS_RUN_DIR"] + "/permits"
        for start in range(0, {lines}, 1000):
            sys.stdout.write("".join("%d\\n" % n for n in range(start, start + 1000)))
            sys.stdout.flush()
            time.sleep(0.005)
            while not os.path.exists(permits) or os.path.getsize(permits) * 10_000 <= start:
                time.sleep(0.01)
    """)
    permits = Path(run["path"], "permits")
    permits.write_bytes(b"+")
    with sshd.running(tmp_path / "sshd") as server:
        there = server.host(state_dir=place.state_dir)
        over = threading.Event()
        cuts = 0

        def cutter() -> None:
            nonlocal cuts
            chance = random.Random(1)
            while not over.is_set() and cuts < CUTS:
                back = sink.kinds().count("back")
                time.sleep(chance.uniform(0.0, 0.06))
                server.signal_sessions(signal.SIGKILL)
                cuts += 1
                with permits.open("ab") as stream:
                    stream.write(b"+")
                end = time.monotonic() + 20
                while not over.is_set() and sink.kinds().count("back") <= back and time.monotonic() < end:
                    time.sleep(0.01)

        thread = threading.Thread(target=cutter)
        begun: list[bool] = []

        def first(_: int, data: bytes) -> None:
            if not begun:
                begun.append(True)
                thread.start()

        sink = Recorder(first)
        found = logs.follow([Target(there, run["run"])], sink, What(lines=None))
        over.set()
        thread.join()
    assert bytes(sink.data[0]) == b"".join(b"%d\n" % n for n in range(lines))
    assert found.exit_code == 0 and cuts == CUTS and sink.kinds().count("back") >= CUTS * 0.95 - 1


FOLLOWER = """
import json, sys
from remoteops import logs
from remoteops.console import Console
from remoteops.console.logview import LogView
from remoteops.inventory import Host
targets = [logs.Target(Host(**json.loads(sys.argv[1])))]
sys.exit(logs.follow(targets, LogView(Console(), targets), logs.What(lines=None)).exit_code)
"""


@pytest.mark.slow
def test_a_laptop_that_slept_goes_on_where_it_was(place: Place, tmp_path: Path) -> None:
    place.start_python(NUMBERS.format(count=200, pause=0.05))
    with sshd.running(tmp_path / "sshd") as server:
        there = server.host(state_dir=place.state_dir, timeouts=QUICK)
        plain = {"name", "connect", "address", "port", "user", "identity_files", "known_hosts"}
        fields = there.model_dump(include=plain)
        fields.update(ssh_config=os.devnull, cache_dir=there.cache_dir, state_dir=there.state_dir, timeouts=QUICK)
        root = Path(__file__).parents[1]
        out = tmp_path / "out"
        with out.open("wb") as stream:
            asleep = subprocess.Popen(
                [sys.executable, "-c", FOLLOWER, json.dumps(fields)], stdout=stream, stderr=subprocess.PIPE, cwd=root
            )
        until(lambda: out.stat().st_size > 50)
        asleep.send_signal(signal.SIGSTOP)
        time.sleep(2)
        server.signal_sessions(signal.SIGKILL)  # meanwhile the other end has given up
        time.sleep(2)
        asleep.send_signal(signal.SIGCONT)
        _, said = asleep.communicate(timeout=60)
    assert asleep.returncode == 0 and b"trying again" in said and b"going on at byte" in said
    assert out.read_bytes().split() == [str(n).encode() for n in range(200)]
