"""States are taken at the asked depths and land in their own prompt's rows (real torch, in the lab's venv, no vLLM)."""

from __future__ import annotations

import pytest

from tests.data_fixtures import in_venv

PRELUDE = """
import random, sys, torch
from remoteops.agent.extraction.capture import Capture, decoder_layers
from remoteops.agent.extraction.slices import CaptureError, Chunk

H, N = 8, 4

class Layer(torch.nn.Module):
    def __init__(self, number, plain): super().__init__(); self.number, self.plain = number, plain
    def forward(self, positions, hidden_states, residual):
        if self.plain:  # a layer that keeps its residual inside
            return hidden_states + self.number
        total = hidden_states if residual is None else hidden_states + residual
        return torch.full_like(total, float(self.number)), total

class Inner(torch.nn.Module):
    def __init__(self, plain):
        super().__init__()
        self.layers, self.plain = torch.nn.ModuleList(Layer(i + 1, plain) for i in range(N)), plain
    def forward(self, hidden):
        residual = None
        for layer in self.layers:
            out = layer(None, hidden_states=hidden, residual=residual) if not self.plain else layer(None, hidden, None)
            hidden, residual = out if isinstance(out, tuple) else (out, None)
        return hidden

class Outer(torch.nn.Module):
    def __init__(self, plain): super().__init__(); self.model = Inner(plain)

def made(ids, layout, plain=False, memory=1 << 20):
    model = Outer(plain)
    capture = Capture(ids, layout=layout, hidden=H, dtype=torch.float32, device=torch.device("cpu"), max_tokens=64,
                      memory=memory, keeps=True)
    capture.install(model)
    return model.model, capture

def expected(start, depth):  # after k layers: the embedding and 1 + ... + k
    return start + depth * (depth + 1) / 2
"""

RANDOM_STEPS = (
    PRELUDE
    + """
for seed in range(15):
    draw = random.Random(seed)
    layout, plain = draw.choice(["SLH", "LSH"]), draw.random() < 0.3
    ids = sorted(draw.sample(range(N + 1), draw.randint(1, N + 1)))
    model, capture = made(ids, layout, plain, memory=draw.choice([1 << 12, 1 << 20]))
    prompts = {"r%d" % i: torch.rand(draw.randint(1, 40), H) for i in range(12)}
    at, done = {name: 0 for name in prompts}, {}
    while len(done) < len(prompts):
        open_ = [name for name in prompts if name not in done]
        for name in open_:
            if at[name] and draw.random() < 0.1: at[name] = 0  # preempted
        chosen = draw.sample(open_, min(len(open_), draw.randint(1, 4)))
        chunks, room = [], 64
        for name in chosen:
            count = min(room, draw.randint(1, len(prompts[name]) - at[name]))
            if count: chunks.append(Chunk(name, at[name], count, len(prompts[name]))); room -= count
        order = [chunk.request for chunk in chunks] + ["stranger"]
        draw.shuffle(order)
        placed = [chunk for name in order for chunk in chunks if chunk.request == name]
        batch = torch.cat([prompts[c.request][c.start:c.start + c.count] for c in placed])
        capture.begin(chunks)
        with torch.inference_mode():
            model(torch.cat([batch, torch.full((3, H), -1.0)]))  # padded, as some runners do
        for chunk in chunks: at[chunk.request] = chunk.start + chunk.count
        for request, states, size, ready, release in capture.end(chunks, order):
            kept = states.clone() if layout == "SLH" else torch.stack([one.clone() for one in states], 1)
            assert size == kept.numel() * 4 and ready is None
            done[request] = kept
            release()
    assert capture.ranges.free == capture.ranges.size
    for name, prompt in prompts.items():
        for slot, depth in enumerate(ids):
            assert torch.allclose(done[name][:, slot], expected(prompt, depth)), (seed, name, depth)
print("right")
"""
)

FAULTS = (
    PRELUDE
    + """
def raises(text, call):
    try: call()
    except CaptureError as error: assert text in str(error), str(error)
    else: raise AssertionError("nothing was raised for " + text)

model, capture = made([1, N], "SLH")
capture.begin([Chunk("a", 0, 2, 2)])
raises("without passing layers [1, 4]", lambda: capture.end([Chunk("a", 0, 2, 2)], ["a"]))
raises("the model has 4", lambda: made([N + 1], "SLH"))
raises("no decoder layers found in Linear", lambda: decoder_layers(torch.nn.Linear(1, 1)))
chunk = Chunk("b", 16, 4, 20)
capture.begin([chunk]); model(torch.zeros(4, H))
raises("rows 0..16 were never computed", lambda: capture.end([chunk], ["b"]))
model(torch.zeros(4, H))  # nothing is captured between steps (warm-up, profiling)
capture.remove()
capture.begin([chunk]); model(torch.zeros(4, H))
assert not capture._hits
print("right")
"""
)


LOST_WORKER = """
import multiprocessing, os, signal, time
from types import SimpleNamespace as NS
from remoteops.agent.extraction.generator import _WorkerGuard

context = multiprocessing.get_context("fork")
workers = [context.Process(target=time.sleep, args=(60,)) for _ in range(2)]
for worker in workers: worker.start()
guard = _WorkerGuard(NS(workers=[NS(proc=worker) for worker in workers]))
started = time.monotonic()
assert guard.gone() == []
os.kill(workers[1].pid, signal.SIGKILL)
workers[1].join()
workers[0].terminate()  # as the executor does with the rest
workers[0].join()
assert guard.gone() == ["worker 1 (pid %d, ended by SIGKILL)" % workers[1].pid], guard.gone()
guard.stop()
print("right")
"""


@pytest.mark.parametrize("code", [RANDOM_STEPS, FAULTS, LOST_WORKER], ids=["random-steps", "faults", "lost-worker"])
def test_capture(code: str) -> None:
    assert in_venv(code).strip().endswith("right")
