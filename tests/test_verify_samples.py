"""What is written is whole, is what the trainers load, and what is wrong with it is found and named. Needs the lab's
torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data_fixtures import ids_dataset, in_venv, model_folder

pytestmark = pytest.mark.lab

PREPARE = """
import json, os, pathlib, sys, torch
from remoteops.agent import manifest, modelinfo
from remoteops.agent.extraction import check, dataset, formats, output, ptfile, samples
base = pathlib.Path(sys.argv[1])
shape = modelinfo.read(str(base / "model"))

def fill(fmt, out, dtype=torch.float32, layers=(2, 4, 5, 8), hidden=64):
    job = {"model": str(base / "model"), "dataset": str(base / "rows.jsonl"), "samples": None, "seed": 0,
    "max_length": 400,
           "layers": list(layers), "dtype": str(dtype).split(".")[1], "format": fmt, "out": str(out),
           "tensor_parallel": 1}
    loaded = dataset.load(job)
    found = output.prepare(job, loaded, shape)
    store = formats.Store(str(out), fmt, job["layers"], "fake", "file", hidden)
    torch.manual_seed(1)
    for row in loaded.rows:
        states = [torch.randn(len(row.input_ids), hidden).to(dtype) for _ in layers]
        store.write(row, states if row.index % 2 else torch.stack(states, 1))
    (base / "run").mkdir(exist_ok=True)
    made = output.finish(str(out), str(base / "run"), job, loaded, shape)
    return job, loaded, made
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    model_folder(tmp_path / "model")
    ids_dataset(tmp_path / "rows.jsonl", [3, 17, 40, 40, 25, 9])
    return tmp_path


FAULTS = (
    PREPARE
    + """
def spoil(name, change):
    data = torch.load(base / "out" / name, weights_only=True)
    change(data)
    torch.save(data, base / "out" / name)
    size = os.stat(base / "out" / name).st_size
    entry = next(e for e in manifest.read(str(base / "out")).entries.values() if e["file"] == name)
    manifest.append(str(base / "out"), {**entry, "bytes": size})

job, loaded, made = fill("speculators-v1", base / "out")
good = check.check(str(base / "out"))
assert good["ok"], good
assert good["lengths"] == {"count": 6, "min": 3, "median": 25, "mean": 22.3, "max": 40}
(base / "out" / "data_0.pt").unlink()
spoil("data_1.pt", lambda d: d["hidden_states"][2].__setitem__((slice(0, 3), 0), float("nan")))
spoil("data_2.pt", lambda d: d.__setitem__("input_ids", d["input_ids"] + 1))
spoil("data_3.pt", lambda d: d["hidden_states"].__setitem__(1, d["hidden_states"][1][:-5]))
spoil("data_4.pt", lambda d: d.__setitem__("hidden_states", [one.bfloat16() for one in d["hidden_states"]]))
spoil("data_5.pt", lambda d: d["loss_mask"].zero_())
report = check.check(str(base / "out"), reject=True)
todo, reasons = manifest.read(str(base / "out")).todo(loaded.rows)
assert [row.index for row in todo] == [0, 1, 2, 3, 4, 5]
assert reasons[1] == "rejected: slot 2 (layer id 5) has 3 values that are not finite", reasons
again = check.check(str(base / "out"))
assert again["problem_rows"] == [0, 1, 2, 3, 4, 5], again
fill("speculators-v1", base / "out")
spoil("data_1.pt", lambda d: d["hidden_states"][3].zero_())
spoil("data_2.pt", lambda d: d["hidden_states"][0][0].zero_())  # one token of zeros is none of our business
spoil("data_3.pt", lambda d: d["hidden_states"][1].__setitem__((-1, -1), float("-inf")))
spoil("data_4.pt", lambda d: d.__setitem__("hidden_states", {"a": 1}))
spoil("data_5.pt", lambda d: d.__setitem__("hidden_states", d["hidden_states"][:3]))
other = {one["index"]: one["problem"] for one in check.check(str(base / "out"))["problems"]}
assert other.pop(4).startswith("unreadable: "), other
assert other == {1: "slot 3 (layer id 8) is all zeros", 3: "slot 1 (layer id 4) has 1 values that are not finite",
                 5: "3 layers, 4 were asked for"}, other
assert "rejected before" in again["problems"][1]["problem"]
fill("speculators-v1", base / "out")
assert check.check(str(base / "out"))["ok"]
print("RESULT" + json.dumps(report))
"""
)


def test_every_fault_is_named_with_row_file_slot_and_count(base: Path) -> None:
    report = json.loads(in_venv(FAULTS, str(base)).split("RESULT")[1])
    assert report["ok"] is False
    assert report["problem_rows"] == [0, 1, 2, 3, 4, 5]
    told = {one["index"]: one for one in report["problems"]}
    assert told[0]["problem"] == "missing"
    assert told[1]["problem"] == "slot 2 (layer id 5) has 3 values that are not finite"
    assert (told[1]["file"], told[1]["slot"], told[1]["count"]) == ("data_1.pt", 2, 3)
    assert "other tokens" in told[2]["problem"]
    assert "slot 1 (layer id 4) has shape [35, 64], expected [40, 64]" in told[3]["problem"]
    assert "bfloat16, expected float32" in told[4]["problem"]
    assert told[5]["problem"] == "another loss mask than its row"


SWAPPED = (
    PREPARE
    + """
job, loaded, made = fill("safetensors", base / "out")
from safetensors.torch import load_file, save_file
two, three = (load_file(str(base / "out" / f"hs_{i}.safetensors")) for i in (2, 3))
path = base / "out" / "hs_3.safetensors"
save_file({"token_ids": three["token_ids"], "hidden_states": two["hidden_states"]}, str(path))
size = os.stat(path).st_size
manifest.append(str(base / "out"), {**manifest.read(str(base / "out")).entries[3], "bytes": size})
with open(base / "out" / "hs_1.safetensors", "r+b") as stream:
    stream.truncate(200)
# Alike where the fingerprint looks, and yet not the same.
near = load_file(str(base / "out" / "hs_2.safetensors"))
near["hidden_states"][1, 2, 3] += 1
save_file(near, str(base / "near.safetensors"))
assert samples._fingerprint(near["hidden_states"]) == samples._fingerprint(two["hidden_states"])
assert samples.same_states(str(path), str(base / "out" / "hs_2.safetensors"))
assert not samples.same_states(str(path), str(base / "near.safetensors"))
print("RESULT" + json.dumps(check.check(str(base / "out"))))
"""
)


def test_states_of_another_sample_and_a_cut_file_are_found(base: Path) -> None:
    report = json.loads(in_venv(SWAPPED, str(base)).split("RESULT")[1])
    told = {one["index"]: one["problem"] for one in reversed(report["problems"])}
    assert told[3] == "the same states as row 2, which has other tokens"
    assert "200 bytes" in told[1] or "unreadable" in told[1]
    assert set(told) == {1, 3}


BESIDE = (
    PREPARE
    + """
import shutil, time
from remoteops.agent.extraction import inspector
from remoteops.agent.extraction.reporting import Reporter
from remoteops.agent.rundir import RunDir

class Waiting(inspector.Inspector):
    def seen(self, count):
        until = time.time() + 60
        while len(inspector.read_notes(self.notes)) < count and time.time() < until:
            time.sleep(0.05)

out = base / "out"
job, loaded, made = fill("safetensors", out)
reporter = Reporter(RunDir(str(base / "run")))
with Waiting(str(out), reporter) as beside:
    beside.seen(6)
    (out / "hs_4.safetensors").write_bytes((out / "hs_4.safetensors").read_bytes()[:-4] + bytes(4))  # after it was read
beside.raise_if_hopeless()
read = []
inspect = samples.inspect
samples.inspect = lambda path, row, header: read.append(row.index) or inspect(path, row, header)
report = check.check(str(out), notes=beside.notes)
assert (report["ok"], report["checked"], read) == (True, 6, [4]), (report, read)
assert check.check(str(out))["ok"] and len(read) == 7

# All of the first samples are wrong: the run is asked to end, and resuming does them again.
inspector.HOPELESS = 6
shutil.rmtree(out)
nothing = torch.randn
torch.randn = lambda *shape: nothing(*shape) * float("nan")
output.prepare(job, loaded, shape)
with Waiting(str(out), reporter) as beside:
    fill("safetensors", out)
    beside.seen(6)
    until = time.time() + 60
    while not reporter.stopping and time.time() < until:
        time.sleep(0.05)
try:
    beside.raise_if_hopeless()
except Exception as error:
    print("RESULT" + json.dumps({"kind": error.kind, "message": error.message, "stopping": reporter.stopping,
        "todo": len(manifest.read(str(out)).todo(loaded.rows)[0]), "events": (base / "run/events.jsonl").read_text()}))

# The run that does them again finds the wrong files still there, which is no reason to end it as well.
inspector.HOPELESS = 5
torch.randn = nothing
last = loaded.rows[5]
store = formats.Store(str(out), "safetensors", job["layers"], "fake", "file", 64)
store.write(last, torch.randn(len(last.input_ids), 4, 64))
(base / "again").mkdir()
resumed = Reporter(RunDir(str(base / "again")))
with Waiting(str(out), resumed) as beside:
    until = time.time() + 60
    while 5 not in inspector.read_notes(beside.notes) and time.time() < until:
        time.sleep(0.05)
assert set(inspector.read_notes(beside.notes)) == {5} and not resumed.stopping
beside.raise_if_hopeless()
assert not (base / "again/events.jsonl").exists()
"""
)


def test_samples_are_read_back_beside_a_run_and_one_that_writes_nonsense_is_ended(base: Path) -> None:
    ended = json.loads(in_venv(BESIDE, str(base)).split("RESULT")[1])
    assert ended["kind"] == "VerifyFailed"
    assert "the first 6 samples are all wrong" in ended["message"]
    assert "not finite" in ended["message"]
    assert ended["stopping"] is True
    assert ended["todo"] == 6
    assert ended["events"].count("is wrong: slot 0") == 5


TRAINER_030 = (
    PREPARE
    + """
job, loaded, made = fill("speculators-v1", base / "out", torch.bfloat16)
from speculators.train.data import Eagle3SampleFileDataset, create_collate_fn, list_files
names = sorted(pathlib.Path(p).name for p in list_files(str(base / "out")))
assert names == [f"data_{i}.pt" for i in range(6)], names
data = Eagle3SampleFileDataset(max_len=64, datapath=str(base / "out"))
for position in range(len(data)):
    sample = data[position]
    index = int(pathlib.Path(data.data[position]).stem.split("_")[1])
    row = loaded.rows[index]
    stored = samples.read_sample(str(data.data[position]))["states"]
    assert sample["input_ids"].tolist() == row.input_ids[1:]
    assert sample["loss_mask"].tolist() == row.loss_mask[1:]
    assert torch.equal(sample["hidden_states"], torch.cat(stored[:-1], -1)[:-1].float())
    assert torch.equal(sample["verifier_last_hidden_states"], stored[-1][1:].float())
batch = create_collate_fn(64)([data[0], data[1]])
assert batch["hidden_states"].shape == (1, 64, 192)
lengths = json.load(open(base / "out" / "sample_lengths.json"))
assert lengths == {str(r.index): len(r.input_ids) for r in loaded.rows}
config = json.load(open(base / "out" / "data_config.json"))
assert config["hidden_states"]["layer_ids"] == [1, 3, 4, 7]
assert config["hidden_states"]["completed_layers_ids"] == [2, 4, 5, 8]
frequencies = torch.load(base / "run" / "token_freq.pt", weights_only=True)
assert sum(frequencies.values()) == sum(sum(r.loss_mask) for r in loaded.rows)
for path in (base / "out").rglob("*"):
    assert not path.name.endswith("pt") or path.name.startswith("data_"), path
"""
)


def test_the_trainer_of_speculators_03_loads_what_was_written(base: Path) -> None:
    in_venv(TRAINER_030, str(base))


TRAINER_NEW = (
    PREPARE
    + """
import random
rows = [json.loads(line) for line in open(base / "rows.jsonl")]
rows[1] = {"input_ids": []}
(base / "rows.jsonl").write_text("".join(json.dumps(r) + "\\n" for r in rows))
job0 = dataset.MAX_DROPPED
dataset.MAX_DROPPED = 0.5
job, loaded, made = fill("safetensors", base / "out", torch.bfloat16)
from speculators.train.data import ArrowDataset
data = ArrowDataset(max_len=64, datapath=made["dataset"], on_missing="raise", hidden_states_dtype=torch.bfloat16)
assert len(data) == 5
for position in range(5):
    sample = data[position]
    row = loaded.rows[position]
    stored = samples.read_sample(str(base / "out" / f"hs_{row.index}.safetensors"))["states"]
    assert sample["input_ids"].tolist() == row.input_ids
    assert sample["loss_mask"].tolist() == row.loss_mask
    assert torch.equal(sample["hidden_states"], stored[:, :-1].flatten(1))
    assert torch.equal(sample["verifier_last_hidden_states"], stored[:, -1])
assert data.approx_lengths == [len(r.input_ids) for r in loaded.rows]
from speculators.data_generation import offline
found = offline.get_existing_hidden_state_indices(base / "out")
assert found == [0, 2, 3, 4, 5], found
assert offline.find_corrupt_hidden_state_indices(base / "out", found) == {}
"""
)


def test_the_trainer_of_the_newest_speculators_loads_what_was_written_with_rows_dropped(base: Path) -> None:
    in_venv(TRAINER_NEW, str(base), profile="current")


LAYOUT = (
    PREPARE
    + """
import zipfile
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    sample = {"input_ids": torch.arange(5), "hidden_states": [torch.randn(5, 3).to(dtype) for _ in range(2)]}
    sample["loss_mask"] = torch.ones(5, dtype=torch.long)
    path = base / "x.pt"
    path.write_bytes(b"".join(bytes(part) for part in ptfile.parts(sample)))
    assert zipfile.ZipFile(path).testzip() is None
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            at = info.header_offset
            extra = int.from_bytes(path.read_bytes()[at + 28:at + 30], "little")
            assert (at + 30 + len(info.filename) + extra) % 64 == 0, info
    for mmap in (True, False):
        back = torch.load(path, mmap=mmap, weights_only=True)
        assert list(back) == list(sample)
        assert torch.equal(back["input_ids"], sample["input_ids"])
        for mine, other in zip(back["hidden_states"], sample["hidden_states"]):
            assert torch.equal(mine, other) and mine.dtype == dtype and mine.is_contiguous()
store = formats.Store(str(base), "speculators-v1", [2, 8], "fake", "none", 3)
open(base / "manifest.jsonl", "w").close()
from remoteops.agent.extraction.dataset import Row
row = Row(4, [1, 2, 3], [0, 1, 1])
whole = torch.randn(100, 2, 3)
store.write(row, whole[10:13])
assert (base / "data_4.pt").stat().st_size < 4000
numbers = torch.zeros(3, 2, 3, dtype=torch.int64)
shapes = [torch.randn(2, 2, 3), torch.randn(3, 3, 3), torch.randn(3, 2, 4)]
for bad in (*shapes, numbers, [torch.randn(3, 3)], []):
    before = sorted(os.listdir(base))
    try:
        store.write(row, bad)
        raise SystemExit("accepted %r" % (getattr(bad, "shape", bad),))
    except ValueError:
        assert sorted(os.listdir(base)) == before
"""
)


@pytest.mark.parametrize("profile", ["seed", "current"])
def test_pt_files_are_torchs_own_layout_and_wrong_shapes_leave_nothing_behind(base: Path, profile: str) -> None:
    in_venv(LAYOUT, str(base), profile=profile)


FULL = (
    PREPARE
    + """
import errno
job, loaded, made = fill("safetensors", base / "out")
store = formats.Store(str(base / "out"), "safetensors", job["layers"], "fake", "none", 64)
real = os.writev
def full(fd, views):
    real(fd, [bytes(views[0])[:100]])
    raise OSError(errno.ENOSPC, "No space left on device")
os.writev = full
before = {n: (base / "out" / n).stat().st_mtime_ns for n in os.listdir(base / "out")}
try:
    store.write(loaded.rows[2], torch.randn(40, 4, 64))
    raise SystemExit("no error")
except OSError as error:
    assert error.errno == errno.ENOSPC
assert {n: (base / "out" / n).stat().st_mtime_ns for n in os.listdir(base / "out")} == before
short = []
os.writev = lambda fd, views: short.append(1) or os.write(fd, bytes(views[0])[:max(1, len(views[0]) // 2)])
store.write(loaded.rows[2], torch.ones(40, 4, 64))
assert len(short) > 10
assert samples.read_sample(str(base / "out" / "hs_2.safetensors"))["states"].eq(1).all()
"""
)


def test_a_full_disk_leaves_no_trace_and_short_writes_are_finished(base: Path) -> None:
    in_venv(FULL, str(base))


ADOPT = (
    PREPARE
    + """
from safetensors.torch import save_file
job, loaded, made = fill("safetensors", base / "out")
store = formats.Store(str(base / "out"), "safetensors", job["layers"], "connector", "none", 64)
row = loaded.rows[4]
def offer(**tensors):
    path = str(base / "offered.safetensors")
    right = {"token_ids": torch.tensor(row.input_ids), "hidden_states": torch.full((25, 4, 64), 2.0)}
    save_file({**right, **tensors}, path)
    os.chmod(path, 0o600)
    return path
entry = store.adopt(row, offer())
assert entry["engine"] == "connector" and not os.path.exists(base / "offered.safetensors")
assert (base / "out" / "hs_4.safetensors").stat().st_mode & 0o777 == 0o644
for bad in ({"token_ids": torch.tensor(row.input_ids) + 1}, {"hidden_states": torch.zeros(24, 4, 64)},
{"hidden_states": torch.zeros(25, 3, 64)}, {"hidden_states": torch.zeros(25, 4, 64, dtype=torch.int32)}):
    try:
        store.adopt(row, offer(**bad))
        raise SystemExit("adopted %s" % bad.keys())
    except ValueError:
        pass
path = offer()
with open(path, "r+b") as stream:
    stream.truncate(1000)
try:
    store.adopt(row, path)
    raise SystemExit("adopted a cut file")
except ValueError:
    pass
assert samples.read_sample(str(base / "out" / "hs_4.safetensors"))["states"].eq(2).all()
"""
)


def test_a_connectors_file_is_taken_only_when_it_is_that_sample(base: Path) -> None:
    in_venv(ADOPT, str(base))


@pytest.mark.parametrize("fmt", ["speculators-v1", "safetensors"])
def test_a_writer_killed_at_twenty_random_moments_ends_as_if_undisturbed(tmp_path: Path, fmt: str) -> None:
    model_folder(tmp_path / "model")
    ids_dataset(tmp_path / "rows.jsonl", [20 + 13 * i for i in range(24)])
    code = "import sys, json, data_killer\nprint('RESULT' + json.dumps(data_killer.main(sys.argv[1], sys.argv[2], 20)))"
    found: dict[str, Any] = json.loads(in_venv(code, str(tmp_path), fmt).split("RESULT")[1])
    assert found["killed"] >= 10
    assert found["bad"] == []
    assert found["counts"] == sorted(found["counts"]), "a killed run lost samples that were done"
    assert found["ok"], found["problems"]
    assert found["same"]
    assert found["left"] == []


REFERENCE = (
    PREPARE
    + """
import data_models
from remoteops.agent.extraction import reference
data_models.tokenizer("chatml", base / "model")
data_models.weights(base / "model")
shape = modelinfo.read(str(base / "model"))
out = {}
for name, shift in (("right", 0), ("one off", 1)):
    job = {"model": str(base / "model"), "dataset": str(base / "rows.jsonl"), "samples": None, "seed": 0,
    "max_length": 400,
           "layers": [2, 4, 5, 8], "dtype": "float32", "format": "safetensors", "out": str(base / name)}
    loaded = dataset.load(job)
    output.prepare(job, loaded, shape)
    store = formats.Store(job["out"], "safetensors", job["layers"], "fake", "none", 64)
    model = reference._load(str(base / "model"), "float32", False, None)
    for row in loaded.rows:
        truth = reference.capture(model, row.input_ids, [one - shift for one in job["layers"]])
        store.write(row, [truth[one - shift] for one in job["layers"]])
    out[name] = check.check(job["out"], reference=2)
whole = model(torch.tensor([loaded.rows[2].input_ids]), output_hidden_states=True).hidden_states
mine = reference.capture(model, loaded.rows[2].input_ids, [0, 3, 8])
assert torch.equal(mine[0], whole[0][0]) and torch.equal(mine[3], whole[3][0])
assert torch.allclose(model.model.norm(mine[8]), whole[8][0], atol=1e-5)
(base / "model" / "model.safetensors").write_bytes(b"another model")
out["other model"] = check.check(str(base / "right"), reference=1)
print("RESULT" + json.dumps(out))
"""
)


@pytest.mark.parametrize("profile", ["seed", "current"])
def test_recomputing_proves_the_values_and_the_layer_convention(base: Path, profile: str) -> None:
    out = json.loads(in_venv(REFERENCE, str(base), profile=profile).split("RESULT")[1])
    assert out["right"]["ok"]
    assert out["right"]["reference"]["max_relative_error"] < 1e-6
    assert out["right"]["reference"]["rows"] == [0, 3]
    assert out["one off"]["ok"] is False
    assert {int(name): one["nearest"] for name, one in out["one off"]["reference"]["layers"].items()} == {
        2: 1,
        4: 3,
        5: 4,
        8: 7,
    }
    assert out["other model"]["reference"]["ok"] is None
    assert "not the one" in out["other model"]["reference"]["reason"]
    assert out["other model"]["ok"] is True
