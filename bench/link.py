"""The link against OpenSSH's own clients, in one run on loopback: prints ratios, which other machines can compare.

    python bench/link.py [--size 500] [--rounds 9] [--only connect,verb,bulk,stdout,first,fleet]

Peers: a fresh ``ssh`` process, ``scp``, ``ssh host cat``, a bare paramiko channel, and asking hosts one after another.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "tests")]

import sshd  # noqa: E402

from remoteops import fleet  # noqa: E402
from remoteops.remote import open_agent  # noqa: E402
from remoteops.transport import connect  # noqa: E402


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def medians(rounds: int, *actions: Callable[[], object], before: Callable[[], object] = lambda: None) -> list[float]:
    """The median time of each action; they take turns, so that a busy machine slows all of them alike. ``before`` is
    called before each, and its time is not counted."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(rounds):
        for kept, action in zip(times, actions, strict=True):
            before()
            kept.append(seconds(action))
    return [statistics.median(kept) for kept in times]


def report(what: str, ratio: float, want: str, detail: str) -> None:
    print(f"{what:44} {ratio:6.2f}   wanted {want:9} {detail}", flush=True)


class Bench:
    def __init__(self, server: sshd.Sshd, folder: Path, rounds: int) -> None:
        self.server, self.folder, self.rounds = server, folder, rounds
        self.host = server.host()
        self.options = ["-F", "none", "-i", str(server.user_key), "-o", "IdentitiesOnly=yes", "-o",
                        f"UserKnownHostsFile={server.known_hosts}", "-o", "BatchMode=yes"]  # fmt: skip
        self.ssh = ["ssh", *self.options, "-p", str(server.port), f"{server.user}@{server.address}"]
        self.remote = f"{server.user}@{server.address}:"

    def run_ssh(self, *command: str) -> None:
        subprocess.run([*self.ssh, *command], check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def fresh_verb(self) -> None:
        with open_agent(self.host) as agent:
            agent.call("hello", {})

    def connect(self) -> None:
        self.fresh_verb()
        ours, theirs = medians(self.rounds, self.fresh_verb, lambda: self.run_ssh("python3", "-I", "-S", "-c", "pass"))
        report(
            "fresh connection + verb / ssh python3 -c pass",
            ours / theirs,
            "<= 0.6",
            f"{ours * 1e3:.0f} ms / {theirs * 1e3:.0f} ms",
        )

    def verb(self) -> None:
        with open_agent(self.host) as agent:
            agent.call("hello", {})

            def raw() -> None:
                channel = agent.link.transport.open_session()  # type: ignore[attr-defined]
                channel.exec_command("python3 -I -S -c pass")
                channel.recv_exit_status()
                channel.close()

            ours, theirs = medians(3 * self.rounds, lambda: agent.call("hello", {}), raw)
        report(
            "verb on a warm link / python3 by raw channel",
            ours / theirs,
            "<= 1.5",
            f"{ours * 1e3:.0f} ms / {theirs * 1e3:.0f} ms",
        )

    def first(self) -> None:
        times = []
        for number in range(3):
            host = self.server.host(cache_dir=str(self.folder / f"cache{number}"))
            with open_agent(host) as agent:
                with_upload = seconds(lambda: agent.call("hello", {}))
            with open_agent(host) as agent:
                times.append(with_upload - seconds(lambda: agent.call("hello", {})))
        report("first use: seconds more than the second", statistics.median(times), "< 0.3 s", "")

    def bulk(self, megabytes: int) -> None:
        source, back = self.folder / "source", self.folder / "back"
        with source.open("wb") as sink:
            for _ in range(megabytes):
                sink.write(os.urandom(1_000_000))
        scp = ["scp", "-q", *self.options, "-P", str(self.server.port)]
        there = str(self.folder / "there")

        def forget(path: Path) -> None:
            """Each file is a new one: freeing an old one waits for the disk, for both sides, and never as long."""
            path.unlink(missing_ok=True)

        with connect(self.host) as link:
            up, scp_up = medians(3, lambda: link.upload(source, there),
                                 lambda: subprocess.run([*scp, str(source), self.remote + there], check=True),
                                 before=lambda: forget(Path(there)))  # fmt: skip
            report(
                "upload rate / scp", scp_up / up, ">= 1.3", f"{megabytes / up:.0f} MB/s / {megabytes / scp_up:.0f} MB/s"
            )
            known = link.exec(["openssl", "dgst", "-sha256", "-r", there]).stdout.decode()[:64]
            down, checked, scp_down = medians(
                3,
                lambda: link.download(there, back),
                lambda: link.download(there, back, sha256=known),
                lambda: subprocess.run([*scp, self.remote + there, str(back)], check=True),
                before=lambda: forget(back),
            )
            rates = f"{megabytes / down:.0f} MB/s / {megabytes / scp_down:.0f} MB/s"
            report("download rate / scp", scp_down / down, ">= 1.3", rates)
            rates = f"{megabytes / checked:.0f} MB/s / {megabytes / scp_down:.0f} MB/s"
            report("download with a known checksum (pull) / scp", scp_down / checked, ">= 1.3", rates)

    def stdout(self, megabytes: int = 100) -> None:
        source = self.folder / "log"
        with source.open("wb") as sink:  # in pieces: this process's memory is measured below
            for _ in range(megabytes):
                sink.write(b"a line of a log that is as long as lines are\n" * (1_000_000 // 46))
        with connect(self.host) as link:
            ours, theirs = medians(5, lambda: link.exec(["cat", str(source)], on_stdout=lambda data: None),
                                   lambda: self.run_ssh("cat", str(source)))  # fmt: skip
        report(
            "rate of 100 MB of stdout / ssh cat",
            theirs / ours,
            ">= 1.0",
            f"{megabytes / ours:.0f} MB/s / {megabytes / theirs:.0f} MB/s",
        )
        print(
            f"{'':44} operator's memory at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB (wanted < 80)"  # noqa: E501
        )

    def fleet(self, count: int = 50) -> None:
        servers = [sshd.start(self.folder / f"s{number}", address=f"127.0.0.{number + 2}", user=self.server.user,
                              options=["MaxStartups 10:30:100"]) for number in range(count)]  # fmt: skip
        try:
            hosts = [server.host(name=f"gpu{number}") for number, server in enumerate(servers)]

            def ask(host: object) -> object:
                with open_agent(host) as agent:
                    return agent.call("hello", {})

            fleet.each(hosts, ask)  # ships the agent
            together: list[fleet.Outcome] = []
            ours = seconds(lambda: together.extend(fleet.each(hosts, ask)))
            serial = seconds(lambda: [ask(host) for host in hosts])
            answers = sum(outcome.error is None for outcome in together)
            report(
                f"{count} hosts at once / one after another",
                ours / serial,
                "<= 0.4",
                f"{answers} of {count}; {ours:.1f} s / {serial:.1f} s",
            )
        finally:
            for server in servers:
                server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=500, help="megabytes for the transfers")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="stdout,connect,verb,first,bulk,fleet")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="remoteops-bench-") as name, sshd.running(Path(name) / "sshd") as server:
        bench = Bench(server, Path(name), arguments.rounds)
        for part in arguments.only.split(","):
            bench.bulk(arguments.size) if part == "bulk" else getattr(bench, part)()
    assert threading.active_count() == 1, threading.enumerate()


if __name__ == "__main__":
    main()
