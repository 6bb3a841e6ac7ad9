"""The manifest: what is done, what must be done again, what may not be mixed."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from remoteops.agent import manifest
from remoteops.agent.extraction.dataset import Row
from remoteops.agent.protocol import AgentError

HEADER: dict[str, Any] = {
    "model": "/models/a",
    "model_fingerprint": "f1",
    "dataset": "/data/a.jsonl",
    "dataset_sha256": "d1",
    "layers": [2, 4, 5, 8],
    "dtype": "float32",
    "format": "safetensors",
    "max_length": 64,
    "chat_template_sha256": None,
}


def write_sample(out: Path, row: Row, *, hidden: int = 2, layers: int = 4) -> dict[str, Any]:
    """A whole safetensors file and its line, made by hand."""
    states = len(row.input_ids) * layers * hidden * 4
    first = len(row.input_ids) * 8
    tensors = {
        "token_ids": {"dtype": "I64", "shape": [len(row.input_ids)], "data_offsets": [0, first]},
        "hidden_states": {
            "dtype": "F32",
            "shape": [len(row.input_ids), layers, hidden],
            "data_offsets": [first, first + states],
        },
    }
    head = json.dumps(tensors).encode()
    data = (
        len(head).to_bytes(8, "little")
        + head
        + b"".join(i.to_bytes(8, "little") for i in row.input_ids)
        + os.urandom(states)
    )
    name = manifest.file_name("safetensors", row.index)
    (out / name).write_bytes(data)
    entry = {
        "index": row.index,
        "file": name,
        "tokens": len(row.input_ids),
        "tokens_sha256": manifest.tokens_sha256(row.input_ids),
        "bytes": len(data),
    }
    manifest.append(str(out), entry)
    return entry


def rows(count: int) -> list[Row]:
    return [Row(index, [index, index + 1, index + 2], [0, 1, 1]) for index in range(count)]


def opened(out: Path, **changes: Any) -> manifest.Output:
    return manifest.open_output(str(out), {**HEADER, **changes})


def test_a_fresh_folder_is_made_and_everything_is_to_do(tmp_path: Path) -> None:
    output = opened(tmp_path / "deep" / "out")
    todo, reasons = output.todo(rows(3))
    assert [row.index for row in todo] == [0, 1, 2]
    assert reasons == {}
    assert output.header["schema"] == manifest.SCHEMA


def test_only_missing_or_invalid_rows_are_done_again_and_each_says_why(tmp_path: Path) -> None:
    opened(tmp_path)
    all_rows = rows(7)
    for row in all_rows[:6]:
        write_sample(tmp_path, row)
    (tmp_path / "hs_1.safetensors").unlink()
    os.truncate(tmp_path / "hs_2.safetensors", 40)
    broken = bytearray((tmp_path / "hs_3.safetensors").read_bytes())
    broken[8:12] = b"xxxx"
    (tmp_path / "hs_3.safetensors").write_bytes(bytes(broken))
    (tmp_path / "hs_6.safetensors").write_bytes(b"somebody else's")
    all_rows[4] = Row(4, [9, 9, 9], [0, 1, 1])
    todo, reasons = opened(tmp_path).todo(all_rows)
    assert [row.index for row in todo] == [1, 2, 3, 4, 6]
    assert "missing" in reasons[1]
    assert "40 bytes" in reasons[2]
    assert "no safetensors file" in reasons[3]
    assert "other tokens" in reasons[4]
    assert "without a manifest line" in reasons[6]


def test_a_truncated_pt_file_is_seen(tmp_path: Path) -> None:
    import zipfile

    opened(tmp_path, format="speculators-v1")
    with zipfile.ZipFile(tmp_path / "data_0.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 5000)
    row = rows(1)[0]
    size = (tmp_path / "data_0.pt").stat().st_size
    line = {"index": 0, "file": "data_0.pt", "tokens_sha256": manifest.tokens_sha256(row.input_ids), "bytes": size}
    manifest.append(str(tmp_path), line)
    assert opened(tmp_path, format="speculators-v1").todo([row])[0] == []
    data = (tmp_path / "data_0.pt").read_bytes()
    (tmp_path / "data_0.pt").write_bytes(data[: size - 22] + b"\0" * 22)
    assert opened(tmp_path, format="speculators-v1").todo([row])[1] == {0: "no whole .pt file"}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "/models/b", "model_fingerprint": "f2"}, "the model changed (/models/a -> /models/b)"),
        ({"model_fingerprint": "f2"}, "same name /models/a, other content"),
        ({"dataset_sha256": "d2"}, "the dataset changed"),
        ({"layers": [2, 4, 6, 8]}, "the layer ids changed"),
        ({"dtype": "bfloat16"}, "the dtype changed (float32 -> bfloat16)"),
        ({"max_length": 128}, "the maximum length changed"),
        ({"chat_template_sha256": "t"}, "the chat template changed"),
    ],
)
def test_a_resume_into_something_else_is_refused_and_names_it(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    opened(tmp_path)
    write_sample(tmp_path, rows(1)[0])
    before = (tmp_path / "manifest.jsonl").read_bytes()
    with pytest.raises(AgentError) as caught:
        opened(tmp_path, **change)
    assert caught.value.kind == "OutputMismatch"
    assert named in caught.value.message
    assert (tmp_path / "manifest.jsonl").read_bytes() == before


def test_samples_that_no_manifest_names_are_not_adopted(tmp_path: Path) -> None:
    (tmp_path / "data_0.pt").write_bytes(b"x")
    with pytest.raises(AgentError, match="no manifest names"):
        opened(tmp_path)


def test_a_torn_last_line_costs_one_sample_and_not_the_next_one(tmp_path: Path) -> None:
    opened(tmp_path)
    all_rows = rows(3)
    for row in all_rows[:2]:
        write_sample(tmp_path, row)
    path = tmp_path / "manifest.jsonl"
    os.truncate(path, path.stat().st_size - 9)
    output = opened(tmp_path)
    assert [row.index for row in output.todo(all_rows)[0]] == [1, 2]
    write_sample(tmp_path, all_rows[1])
    write_sample(tmp_path, all_rows[2])
    assert opened(tmp_path).todo(all_rows)[0] == []


def test_a_header_cut_by_a_crash_never_stands_under_the_manifests_name(tmp_path: Path) -> None:
    opened(tmp_path)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(manifest.PARTIAL)]
    assert json.loads((tmp_path / "manifest.jsonl").read_bytes().splitlines()[0])["format"] == "safetensors"


def test_partial_files_of_a_killed_run_are_swept_and_never_end_like_samples(tmp_path: Path) -> None:
    opened(tmp_path)
    (tmp_path / ".data_7.pt.123.0.part").write_bytes(b"half")
    assert not any(name.endswith(("pt", ".safetensors")) for name in os.listdir(tmp_path))
    opened(tmp_path)
    assert ".data_7.pt.123.0.part" not in os.listdir(tmp_path)


def _append_many(out: str, start: int) -> None:
    for index in range(start, start + 300):
        manifest.append(out, {"index": index, "file": f"hs_{index}.safetensors", "pad": "x" * 500})


def test_lines_of_several_processes_never_mix(tmp_path: Path) -> None:
    opened(tmp_path)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_append_many, args=(str(tmp_path), 1000 * number)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    found = manifest.read(str(tmp_path))
    assert found is not None
    assert len(found.entries) == 900


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    code = "import sys,time;from remoteops.agent import manifest as m;m.lock(sys.argv[1]);"
    code += "print('held',flush=True);time.sleep(60)"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=env)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(AgentError, match="another run is writing") as caught:
            manifest.lock(str(tmp_path))
        assert caught.value.kind == "RunActive"
    finally:
        holder.kill()
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()
    manifest.lock(str(tmp_path))
