"""Following a run's log, against ``ssh host tail -F`` on the same log, in the same run, over a real sshd on loopback.

    python bench/follow.py [--seconds 6] [--rounds 3] [--slow-seconds 20] [--size-gb 0]

Three situations: a writer of 200,000 lines a second, a writer of one line a second, a long log read from its
beginning. Peers take turns. Prints a table; the ratios are ours / tail. ``--size-gb 5`` also follows that much and
prints the growth of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PAUSE = 6.0
"""Seconds between a run's start and its first line: a peer is connected by then, and its CPU counts from there on."""
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from remoteops import runs  # noqa: E402
from tests import sshd  # noqa: E402

WRITER = """
import sys, time
rate, seconds, pause = float(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
time.sleep(pause)
pad = "x" * 84
if rate >= 1000:
    begin = time.monotonic(); n = 0
    out = sys.stdout.buffer
    while (now := time.monotonic() - begin) < seconds:
        due = int(now * rate)
        if due > n:
            stamp = time.time()
            out.write("".join("%09d %.6f %s\\n" % (i, stamp, pad) for i in range(n, due)).encode()); out.flush()
            n = due
        time.sleep(0.004)
else:
    for n in range(int(seconds * rate)):
        print("%09d %.6f %s" % (n, time.time(), pad), flush=True); time.sleep(1 / rate)
print("THE END %.6f" % time.time(), flush=True)
"""
# Reads a peer's stdout and judges it: how much had come when the writer stopped, how late each line was.
READER = """
import json, os, sys, time
got = 0; late = []; last = b""; first = None; seen = []
while True:
    data = os.read(0, 1 << 20)
    if not data: break
    now = time.time()
    if first is None: first = now
    got += len(data)
    seen.append((now, got))
    whole = (last + data)[-400:]
    for line in whole.split(b"\\n")[1 if len(last + data) > 400 else 0:-1][-1:]:
        parts = line.split()
        if len(parts) > 1 and parts[0].isdigit(): late.append(now - float(parts[1]))
    last = data[-400:]
    if b"THE END" in whole and whole.endswith(b"\\n"):
        stopped = float(whole.split(b"THE END")[1].split()[0]); break
in_time = max([n for t, n in seen if t <= stopped], default=0)
print(json.dumps({"bytes": got, "in_time": in_time, "late": late, "seconds": time.time() - (first or time.time()),
"ended": time.time()}))
"""
OURS = """
import json, os, resource, sys
sys.path.insert(0, sys.argv[1])
from remoteops.inventory import Host
from remoteops.console import Console
from remoteops.console.logview import LogView
from remoteops import logs
host = Host(**json.loads(sys.argv[2]))
target = logs.Target(host, sys.argv[3])
class View(LogView):
    def status(self, target, status):
        super().status(target, status)
        if not hasattr(self, "begun"): self.begun = resource.getrusage(resource.RUSAGE_SELF)
view = View(Console(), [target])
try:
    logs.follow([target], view, logs.What(lines=json.loads(sys.argv[4])))
except BrokenPipeError:
    pass
end = resource.getrusage(resource.RUSAGE_SELF)
with open(sys.argv[5], "w") as stream:
    json.dump({"cpu": end.ru_utime + end.ru_stime - view.begun.ru_utime - view.begun.ru_stime, "rss": end.ru_maxrss,
               "rss_begun": view.begun.ru_maxrss}, stream)
os._exit(0)
"""


def ssh(server: sshd.Sshd) -> list[str]:
    return [
        "ssh",
        "-F",
        os.devnull,
        "-p",
        str(server.port),
        "-i",
        str(server.user_key),
        "-o",
        f"UserKnownHostsFile={server.known_hosts}",
        "-o",
        "BatchMode=yes",
        f"{server.user}@{server.address}",
    ]


def cpu_of(pid: int) -> float:
    """CPU seconds of a living process' threads, to the nanosecond."""
    total = 0
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except OSError:
            continue
    return total / 1e9


def measure(command: list[str], report: Path | None, connecting: float = 0.0, settle: float = 0.0) -> dict[str, Any]:
    """Run a peer with its stdout into the reader; its CPU is what the kernel says of it (ssh) or what it says itself
    from the first byte on (ours)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    peer = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    reader = subprocess.Popen([sys.executable, "-c", READER], stdin=peer.stdout, stdout=subprocess.PIPE)
    assert peer.stdout is not None
    peer.stdout.close()
    settled = None
    if settle:
        time.sleep(settle)  # connected by now, and not a line has come yet
        settled = cpu_of(peer.pid)
    said, _ = reader.communicate()
    spent = cpu_of(peer.pid)
    middle = resource.getrusage(resource.RUSAGE_CHILDREN)
    if report is None:
        peer.terminate()
    peer.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    result: dict[str, Any] = json.loads(said)
    if report is None:
        result["cpu"] = after.ru_utime + after.ru_stime - middle.ru_utime - middle.ru_stime
        # What the connection cost is not what following costs; ours counts from the first answer on as well.
        result["cpu"] = max(0.0, result["cpu"] - connecting)
    else:
        result.update(json.loads(report.read_text()))
    if settled is not None and spent > settled:
        result["cpu"] = spent - settled
    result["all_cpu"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return result


class Bench:
    """One server, one place for runs."""

    def __init__(self, server: sshd.Sshd, scratch: Path) -> None:
        self.server, self.scratch = server, scratch
        self.host = server.host()
        self.fields = {
            name: getattr(self.host, name)
            for name in (
                "name",
                "connect",
                "address",
                "port",
                "user",
                "identity_files",
                "known_hosts",
                "ssh_config",
                "cache_dir",
                "state_dir",
            )
        }
        runs.list(self.host)  # ships the agent
        self.connects = self.connecting()

    def launch(self, rate: float, seconds: float, pause: float) -> dict[str, Any]:
        return runs.launch(
            self.host,
            {"argv": [sys.executable, "-c", WRITER, str(rate), str(seconds), str(pause)], "cwd": "/"},
            force=True,
            allow_second=True,
        )

    def connecting(self) -> float:
        """Median CPU seconds of a whole ``ssh host true``."""
        costs = []
        for _ in range(5):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([*ssh(self.server), "true"], check=True, stdin=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            costs.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return statistics.median(costs)

    def follow(self, who: str, run: dict[str, Any], lines: int | None, settle: float = 0.0) -> dict[str, Any]:
        if who == "tail":
            start = "+1" if lines is None else str(lines)
            return measure([*ssh(self.server), f"tail -n {start} -F {run['path']}/log"], None, self.connects, settle)
        report = self.scratch / "report.json"
        return measure(
            [
                sys.executable,
                "-c",
                OURS,
                str(ROOT),
                json.dumps(self.fields),
                run["run"],
                json.dumps(lines),
                str(report),
            ],
            report,
            settle=settle,
        )

    def live(self, who: str, rate: float, seconds: float) -> dict[str, Any]:
        pause = PAUSE
        run = self.launch(rate, seconds, pause)
        result = self.follow(who, run, None, PAUSE - 1)
        runs.stop(self.host, run["run"], grace=1)
        Path(run["path"], "log").unlink(missing_ok=True)
        return result


def row(name: str, ours: list[float], tail: list[float], unit: str, target: str) -> str:
    mine, theirs = statistics.median(ours), statistics.median(tail)
    ratio = mine / theirs if theirs else float("nan")
    return f"| {name} | {mine:.3f} {unit} | {theirs:.3f} {unit} | {ratio:.2f} | {target} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slow-seconds", type=float, default=20)
    parser.add_argument("--catch-up-mb", type=int, default=300)
    parser.add_argument("--size-gb", type=float, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sshd.running(Path(folder) / "sshd") as server:
        bench = Bench(server, Path(folder))
        print("| what | ours | ssh tail -F | ratio | target |\n|---|---|---|---|---|")
        fast: dict[str, list[dict[str, Any]]] = {"ours": [], "tail": []}
        for _ in range(given.rounds):
            for who in fast:
                fast[who].append(bench.live(who, 200_000, given.seconds))
        print(
            row(
                "200 k lines/s: received when the writer stopped",
                [r["in_time"] / 1e6 / given.seconds for r in fast["ours"]],
                [r["in_time"] / 1e6 / given.seconds for r in fast["tail"]],
                "MB/s",
                ">= 1.0",
            )
        )
        print(
            row(
                "200 k lines/s: operator CPU",
                [r["cpu"] for r in fast["ours"]],
                [r["cpu"] for r in fast["tail"]],
                "s",
                "<= 2",
            )
        )
        print(
            row(
                "200 k lines/s: median delay",
                [statistics.median(r["late"]) for r in fast["ours"]],
                [statistics.median(r["late"]) for r in fast["tail"]],
                "s",
                "",
            )
        )
        print(
            row(
                "bytes received in all",
                [r["bytes"] / 1e6 for r in fast["ours"]],
                [r["bytes"] / 1e6 for r in fast["tail"]],
                "MB",
                "1.0",
            )
        )
        slow = {who: bench.live(who, 1, given.slow_seconds) for who in ("ours", "tail")}
        delay = {who: statistics.median(result["late"]) for who, result in slow.items()}
        print(
            row(
                "1 line/s: median delay",
                [delay["ours"]],
                [delay["tail"]],
                "s",
                f"difference {delay['ours'] - delay['tail']:+.3f} s, at most +0.1",
            )
        )
        print(row("1 line/s: operator CPU", [slow["ours"]["cpu"]], [slow["tail"]["cpu"]], "s", "<= 2"))
        catch: dict[str, list[dict[str, Any]]] = {"ours": [], "tail": []}
        run = bench.launch(1, 1, 0)
        time.sleep(2)
        with Path(run["path"], "log").open("wb") as stream:
            line = b"".join(b"%09d %.6f %s\n" % (n, time.time(), b"x" * 84) for n in range(10_000))
            for _ in range(given.catch_up_mb * 1_000_000 // len(line)):
                stream.write(line)
            stream.write(b"THE END 0\n")
        for _ in range(given.rounds):
            for who in catch:
                catch[who].append(bench.follow(who, run, None))
        print(
            row(
                f"{given.catch_up_mb} MB from the beginning",
                [r["bytes"] / 1e6 / r["seconds"] for r in catch["ours"]],
                [r["bytes"] / 1e6 / r["seconds"] for r in catch["tail"]],
                "MB/s",
                ">= 1.0",
            )
        )
        print(
            row(
                f"{given.catch_up_mb} MB from the beginning: operator CPU",
                [r["cpu"] for r in catch["ours"]],
                [r["cpu"] for r in catch["tail"]],
                "s",
                "<= 2",
            )
        )
        if given.size_gb:
            os.truncate(Path(run["path"], "log"), 0)
            with Path(run["path"], "log").open("wb") as stream:
                for _ in range(int(given.size_gb * 1e9) // len(line)):
                    stream.write(line)
                stream.write(b"THE END 0\n")
            result = bench.follow("ours", run, None)
            print(
                f"| {given.size_gb} GB: memory at the beginning and at most | "
                f"{result['rss_begun'] / 1024:.0f} MiB, {result['rss'] / 1024:.0f} MiB | | | flat |"
            )


if __name__ == "__main__":
    main()
