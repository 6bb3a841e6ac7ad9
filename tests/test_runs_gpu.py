"""Runs on a machine with real GPUs (skipped elsewhere): the driver's numbers, memory seen free, leftovers."""

from __future__ import annotations

import os
import shutil
import signal
import sys

import pytest

from remoteops.agent import gpus, leftovers, processes
from remoteops.agent.protocol import AgentError
from tests.runs_fixtures import Place, place, until

__all__ = ["place"]

pytestmark = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no NVIDIA GPU here")
GIB = 1 << 30
HOLD = """
    import ctypes, os, signal, sys, time
    if os.fork() == 0:
        os.setsid(); ctypes.CDLL(None).prctl(15, b"VLLM::EngineCor", 0, 0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        import torch
        held = torch.empty(8 << 30, dtype=torch.uint8, device="cuda").fill_(1); torch.cuda.synchronize()
        print("holding", os.getpid(), flush=True)
        while True: held.mul_(1); torch.cuda.synchronize()
    time.sleep(600)
"""


def holder(place: Place, run: dict[str, object]) -> int:
    words = until(lambda: place.log(run).split(b"holding ")[1:], seconds=120)
    return int(words[0].split()[0])


def test_the_library_and_the_tool_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    library = gpus.Gpus()
    assert library.cheap and library.devices()
    monkeypatch.setattr(gpus, "_LIBRARIES", ())
    tool = gpus.Gpus()
    assert not tool.cheap
    for mine, theirs in zip(library.devices(), tool.devices(), strict=True):
        assert (mine["index"], mine["name"], mine["uuid"]) == (theirs["index"], theirs["name"], theirs["uuid"])
        assert (
            abs(mine["memory_total"] - theirs["memory_total"]) < GIB
            and abs(mine["memory_used"] - theirs["memory_used"]) < GIB
        )


def test_stopped_is_said_when_the_engines_memory_is_really_free(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    look = gpus.Gpus()
    before = look.devices()[0]["memory_used"]
    run = place.start_python(HOLD)
    pid = holder(place, run)
    held = {row["pid"]: row["memory"] for row in look.processes()}
    assert held.get(pid, 0) > 8 * GIB, held
    monkeypatch.setattr(gpus, "_LIBRARIES", ())
    assert {row["pid"]: row["memory"] for row in gpus.Gpus().processes()}.get(pid, 0) > 8 * GIB
    monkeypatch.undo()
    seen = until(
        lambda: [gpu for gpu in place.status()["gpus"] if gpu["memory_used"] > 8 * GIB and gpu["utilization"]],
        seconds=60,
    )
    assert seen[0]["memory_total"] > 8 * GIB
    status = place.stop(grace=1)
    assert status["state"] == "stopped" and status["gpu_released"] is True
    assert look.devices()[0]["memory_used"] < before + GIB and processes.read(pid) is None


def test_a_launch_refuses_while_a_dead_runs_engine_holds_memory(place: Place) -> None:
    run = place.start_python(HOLD)
    pid = holder(place, run)
    identities = place.identities(run)
    for name in ("keeper", "supervisor", "child"):
        os.kill(identities[name]["pid"], signal.SIGKILL)
    place.dir(run).event("outcome", state="failed")
    until(lambda: place.status()["state"] == "failed")
    with pytest.raises(AgentError) as caught:
        place.start(sys.executable, "-c", "pass")
    row = next(row for row in caught.value.data["leftovers"] if row["pid"] == pid)
    assert row["sort"] == "ours" and row["memory"] > 8 * GIB and "GiB of GPU memory" in caught.value.message
    done = leftovers.end(place.request(grace=1))
    assert [row["pid"] for row in done["ended"]] == [pid] and done["gpu_released"] is True and done["left"] == []
