"""What must hold before a model is loaded; every check in seconds, from files and counters, nothing heavy is imported.

A check is {"name", "ok", "found", "need", "hint", "kind"}: ok True, False, or None when it could not be told (never True for something
that was not looked at). ``kind`` names the error class a failed check stands for.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any, Callable, Dict, List, Mapping, Optional

from remoteops.agent import capabilities, disk, estimate, gpus, manifest, modelinfo, venv
from remoteops.agent.extraction import layers, records
from remoteops.agent.protocol import AgentError
from remoteops.agent.rundir import TERMINAL, all_runs, read_json, runs_root

NEEDED = {
    "connector": ("vllm", "torch", "transformers", "safetensors"),
    "generator": ("vllm", "speculators", "torch", "transformers"),
}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "tiktoken.model",
    "spiece.model",
)
HASH_UP_TO = (
    4 << 30
)  # bytes of dataset that are hashed to compare it with a folder's manifest; more would take longer than a preflight may
GIB = float(1 << 30)


def preflight(request: Dict[str, Any], emit: Callable[..., None]) -> Dict[str, Any]:
    """Request: "job", "venv", "env" {str: str}, "state_dir". Result: {"checks", "ok" (no check is False), "shape", "layers", "dtype",
    "capabilities", "estimate", "versions", "python"}; what could not be learned is missing or None."""
    return Preflight(request).run()


class Preflight:
    """One pass over the checks; later ones use what earlier ones found, and say None where that is missing."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.request = request
        self.job: Dict[str, Any] = dict(request.get("job") or {})
        self.env = {**os.environ, **{key: str(value) for key, value in (request.get("env") or {}).items()}}
        self.checks: List[Dict[str, Any]] = []
        self.venv: Optional[venv.Venv] = None
        self.shape: Optional[modelinfo.Shape] = None
        self.layers: Optional[List[int]] = None
        self.able: Optional[capabilities.Capabilities] = None
        self.size: Optional[Dict[str, Any]] = None
        self.done_rows = 0

    def run(self) -> Dict[str, Any]:
        for step in (
            self._interpreter,
            self._packages,
            self._model,
            self._remote_code,
            self._architecture,
            self._layers,
            self._length,
            self._dataset,
            self._template,
            self._output,
            self._disk,
            self._gpus,
            self._memory,
            self._other_runs,
        ):
            try:
                step()
            except AgentError as error:
                self._add(
                    step.__name__[1:].replace("_", " "), False, error.message, error.tried, error.hint, error.kind
                )
            except OSError as error:
                self._add(step.__name__[1:].replace("_", " "), None, "could not look: %s" % error, "", "")
        return {
            "schema": "remoteops.preflight/1",
            "ok": all(one["ok"] is not False for one in self.checks),
            "checks": self.checks,
            "shape": self.shape._asdict() if self.shape else None,
            "layers": self.layers,
            "dtype": self._dtype(),
            "estimate": self.size,
            "capabilities": capabilities.as_dict(self.able) if self.able else None,
            "python": self.venv.python if self.venv else None,
            "versions": {name: one.get("version") for name, one in self.venv.packages.items()} if self.venv else {},
        }

    def _add(
        self, name: str, ok: Optional[bool], found: str, need: str, hint: str = "", kind: str = "PreflightFailed"
    ) -> None:
        self.checks.append(
            {"name": name, "ok": ok, "found": found, "need": need, "hint": hint if ok is not True else "", "kind": kind}
        )

    def _dtype(self) -> Optional[str]:
        return modelinfo.stored_dtype(str(self.job.get("dtype") or "auto"), self.shape) if self.shape else None

    def _interpreter(self) -> None:
        self.venv = venv.describe(self.request.get("venv"))
        self._add(
            "interpreter",
            True,
            "%s (Python %s)" % (self.venv.python, self.venv.version),
            "a venv with vLLM",
            kind="MissingVenv",
        )

    def _packages(self) -> None:
        if self.venv is None:
            self._add("packages", None, "no interpreter to ask", "vllm, torch, …")
            return
        engine = str(self.job.get("engine") or "auto").replace("-stock", "")
        needed = NEEDED.get(engine, NEEDED["connector"])
        missing = [name for name in needed if name not in self.venv.packages]
        found = ", ".join(
            "%s %s" % (one.get("distribution") or name, one.get("version") or "?")
            for name, one in sorted(self.venv.packages.items())
        )
        self._add(
            "packages",
            not missing,
            found or "none of them",
            ", ".join(needed),
            "install %s in %s" % (", ".join(missing), self.request.get("venv")),
            "MissingPackage",
        )

    def _model(self) -> None:
        if not self.job.get("model"):
            raise AgentError("UsageError", "no model is named", hint="set `model` in the host's workload")
        folder = modelinfo.find(str(self.job["model"]), self.env)
        self.shape = modelinfo.read(folder)
        text = "%s, %d layers x %d%s, %.1f GiB of weights" % (
            self.shape.architecture or self.shape.model_type,
            self.shape.num_layers,
            self.shape.hidden_size,
            " (in %s)" % self.shape.nested if self.shape.nested else "",
            self.shape.weight_bytes / GIB,
        )
        if self.shape.missing_weights:
            self._add(
                "model",
                False,
                "%s; %d shards named in the index are not there (%s)"
                % (text, len(self.shape.missing_weights), self.shape.missing_weights[0]),
                "all shards",
                "finish the download of %s" % folder,
                "MissingModel",
            )
        elif not self.shape.weight_bytes and self.job.get("load_format") != "dummy":
            self._add(
                "model",
                False,
                "%s has no weight files" % folder,
                "*.safetensors or *.bin",
                "finish the download",
                "MissingModel",
            )
        else:
            self._add("model", True, text, "a readable checkpoint", kind="MissingModel")
        if not any(os.path.isfile(os.path.join(folder, name)) for name in TOKENIZER_FILES):
            self._add(
                "tokenizer",
                False,
                "no tokenizer file in %s" % folder,
                "one of " + ", ".join(TOKENIZER_FILES),
                "download the tokenizer files too",
                "MissingModel",
            )

    def _remote_code(self) -> None:
        if self.shape is None:
            return
        trusted = bool(self.job.get("trust_remote_code"))
        code = (read_json(os.path.join(self.shape.folder, "tokenizer_config.json")) or {}).get("auto_map") or {}
        if "AutoTokenizer" in code:
            self._add(
                "remote code",
                trusted,
                "the tokenizer is Python code of the model's own; trust_remote_code is %s" % str(trusted).lower(),
                "trust_remote_code: true",
                "read that code; if you trust it, set trust_remote_code in the host's workload",
            )
        elif self.shape.remote_code and not trusted:
            self._add(
                "remote code",
                None,
                "config.json names code of the model's own (vLLM may not need it)",
                "trust_remote_code where vLLM has no own class",
                "set it if the load fails for it",
            )

    def _architecture(self) -> None:
        if self.venv is None or self.shape is None:
            return
        self.able = capabilities.look(self.venv.path("vllm"), self.venv.path("speculators"), self.shape.architecture)
        release = (self.venv.packages.get("vllm") or {}).get("version")
        self._add(
            "architecture",
            self.able.architecture,
            "vLLM %s %s %s"
            % (
                release,
                {True: "has", False: "has not", None: "may have"}[self.able.architecture],
                self.shape.architecture or "it",
            ),
            "the model's class in vLLM's registry",
            "this release of vLLM is too old (or too new) for the model",
        )

    def _layers(self) -> None:
        if self.shape is None:
            self._add("layers", None, "no model config to check against", "ids within 0..N")
            return
        self.layers = layers.resolve(self.job.get("layers"), self.shape.num_layers)
        concerns = layers.concerns(self.layers, self.shape.num_layers)
        asked = self.job.get("layers")
        moved = asked in (None, "default") and self.layers[:3] != [
            2,
            self.shape.num_layers // 2,
            self.shape.num_layers - 3,
        ]
        text = "%s of 0..%d, counted as completed layers%s" % (
            self.layers,
            self.shape.num_layers,
            "; the default ids collide on so few layers and were moved" if moved else "",
        )
        self._add(
            "layers",
            None if concerns else True,
            "; ".join([text, *concerns]),
            "ids within 0..%d" % self.shape.num_layers,
            "fine when your trainer wants it so",
        )

    def _length(self) -> None:
        wanted = int(self.job.get("max_length") or 0)
        if wanted < 1:
            raise AgentError(
                "UsageError", "max_length must be at least 1", hint="set max_length in the workload, or --max-length"
            )
        own = (self.job.get("engine_args") or {}).get("max_model_len")
        limits = {"engine_args.max_model_len": int(own)} if own else {}
        if self.shape is not None and self.shape.max_length:
            limits["the model"] = self.shape.max_length
        if not limits:
            self._add(
                "length",
                None,
                "max_length %d; the model's config names no limit" % wanted,
                "max_length <= max_model_len - 1",
            )
            return
        name, limit = min(limits.items(), key=lambda pair: pair[1])
        self._add(
            "length",
            wanted <= limit - 1,
            "max_length %d; %s takes %d" % (wanted, name, limit),
            "max_length <= %d (one position is kept for the step after the prompt)" % (limit - 1),
            "--max-length %d" % (limit - 1),
        )

    def _dataset(self) -> None:
        if not self.job.get("dataset"):
            raise AgentError(
                "UsageError", "no dataset is named", hint="set `dataset` in the host's workload, or --dataset"
            )
        found = estimate.dataset(
            str(self.job["dataset"]),
            int(self.job.get("max_length") or 2048),
            self.venv.python if self.venv else None,
            venv.import_path(),
        )
        wanted = self.job.get("samples")
        rows = min(int(wanted), found["rows"]) if wanted else found["rows"]
        self.size = {**found, "wanted": rows, "tokens": int(rows * found["tokens_a_row"])}
        short = bool(wanted) and found["exact_rows"] and found["rows"] < int(wanted)
        text = "%s%d rows, about %d tokens each" % (
            "" if found["exact_rows"] else "about ",
            found["rows"],
            found["tokens_a_row"],
        )
        self._add(
            "dataset",
            None if short else True,
            text + ("; fewer than the %d samples asked for" % wanted if short else ""),
            "a readable dataset",
            "all rows are taken",
            "DatasetError",
        )

    def _template(self) -> None:
        columns = set((self.size or {}).get("columns") or ())
        if (
            self.shape is None
            or not columns & {"messages", "conversations", "conversation", "prompt"}
            or "input_ids" in columns
        ):
            return
        config = read_json(os.path.join(self.shape.folder, "tokenizer_config.json")) or {}
        there = bool(config.get("chat_template")) or any(
            os.path.exists(os.path.join(self.shape.folder, name))
            for name in ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
        )
        self._add(
            "chat template",
            True if there else None if "auto_map" in config else False,
            "the tokenizer has %s chat template" % ("a" if there else "no"),
            "one, for a dataset of conversations",
            "use a chat model, or rows with `text` or `input_ids`",
            "DatasetError",
        )

    def _output(self) -> None:
        out = self._out()
        found = manifest.read(out) if os.path.isdir(out) else None
        if found is not None:
            now = self._identity()
            changes = [one for one in manifest.changed(found.header, {**found.header, **now})]
            self.done_rows = len(found.entries)
            if changes:
                self._add(
                    "output folder",
                    False,
                    "%s was written for something else: %s" % (out, "; ".join(one["text"] for one in changes)),
                    "the same model, dataset, layers and dtype",
                    "choose another output folder, or ask for what was asked before",
                    "OutputMismatch",
                )
                return
        probe = disk.existing(out)
        try:
            with tempfile.NamedTemporaryFile(dir=probe, prefix=".remoteops-", suffix=manifest.PARTIAL):
                pass
        except OSError as error:
            self._add(
                "output folder",
                False,
                "%s cannot be written: %s" % (probe, error.strerror),
                "a folder this user may write",
                "check owner and mode, or set `output`",
            )
            return
        same = disk.device(out) == disk.device(os.path.join(out, ".staging"))
        self._add(
            "output folder",
            same,
            "%s%s" % (out, "; %d samples are there and will be kept" % self.done_rows if self.done_rows else ""),
            "writable, and one file system with its temporary files",
            "use a folder whose subfolders lie on the same file system",
        )

    def _identity(self) -> Dict[str, Any]:
        """What can be told now of what the run's header will say."""
        now: Dict[str, Any] = {
            "format": self.job.get("format"),
            "max_length": self.job.get("max_length"),
            "model": self.job.get("model"),
            "dataset": self.job.get("dataset"),
        }
        if self.layers:
            now["layers"] = self.layers
        if self.shape:
            now.update(dtype=self._dtype(), model_fingerprint=modelinfo.fingerprint(self.shape.folder))
        try:
            files = records.files_of(str(self.job.get("dataset")))
            if sum(os.path.getsize(name) for name in files) <= HASH_UP_TO:
                now["dataset_sha256"] = records.Records("", files, 0, lambda wanted: iter(())).sha256()
        except AgentError:
            pass
        return now

    def _out(self) -> str:
        named = self.job.get("out")
        return (
            os.path.abspath(os.path.expanduser(str(named)))
            if named
            else os.path.join(runs_root(dict(self.request)), "NEW", "out")
        )

    def _disk(self) -> None:
        out = self._out()
        have = disk.space(out)
        found = "%.1f GiB free at %s (%s)" % (have["free"] / GIB, have["path"], have["source"])
        if self.shape is None or self.size is None or self.layers is None:
            self._add("disk", None, found, "unknown: the model or the dataset could not be read", kind="DiskTooSmall")
            return
        rows = max(0, self.size["wanted"] - self.done_rows)
        each = estimate.sample_bytes(
            self.size["tokens_a_row"], len(self.layers), self.shape.hidden_size, self._dtype() or "float32"
        )
        most = estimate.sample_bytes(
            min(float(self.job["max_length"]), self.size["tokens_a_row"] * 4),
            len(self.layers),
            self.shape.hidden_size,
            self._dtype() or "float32",
        )
        reserve = int(self.job.get("disk_reserve") or disk.RESERVE)
        need = rows * each + reserve
        self.size.update(
            bytes=rows * each,
            bytes_a_token=len(self.layers) * self.shape.hidden_size * modelinfo.DTYPE_BYTES.get(self._dtype() or "", 4),
        )
        text = "about %.1f GiB (%d rows x %d tokens x %d layers x %d x %s) and %.1f GiB kept free" % (
            rows * each / GIB,
            rows,
            self.size["tokens_a_row"],
            len(self.layers),
            self.shape.hidden_size,
            self._dtype(),
            reserve / GIB,
        )
        enough = need <= have["free"]
        tight = enough and rows * most + reserve > have["free"]
        self._add(
            "disk",
            False if not enough else None if tight else True,
            found + ("; long rows could need more, the run then pauses" if tight else ""),
            text,
            "free space, fewer --samples, a shorter --max-length, or `output` on a larger disk",
            "DiskTooSmall",
        )
        if have["files"] is not None and have["files"] < rows + 100:
            self._add(
                "inodes",
                False,
                "%d files can still be made" % have["files"],
                "%d" % (rows + 100),
                "use another file system",
                "DiskTooSmall",
            )

    def _gpus(self) -> None:
        wanted = int(self.job.get("tensor_parallel") or 1)
        if self.venv is not None and self.venv.cpu_only:
            self._add("gpus", True, "vLLM here is built for CPUs", "none")
            return
        cards = gpus.Gpus()
        found = cards.devices() if cards.present else []
        if not found:
            other = os.path.exists("/dev/kfd") or os.path.exists("/dev/accel")
            self._add(
                "gpus",
                None if other else False,
                "an accelerator whose state cannot be read here" if other else "no GPU",
                "%d" % wanted,
                "is the driver loaded? nvidia-smi shows the same",
                "GpuBusy",
            )
            return
        visible = gpus.visible(self.env.get("CUDA_VISIBLE_DEVICES"), found)
        usable = [one for one in found if one["index"] in visible][:wanted]
        share = float(self.job.get("gpu_memory_utilization") or 0.9)
        busy = [one for one in usable if one["memory_total"] - one["memory_used"] < share * one["memory_total"]]
        text = "%d visible (%s)" % (len(visible), usable[0]["name"] if usable else "none")
        if len(usable) < wanted:
            self._add(
                "gpus",
                False,
                text,
                "%d for tensor_parallel" % wanted,
                "lower tensor_parallel, or check CUDA_VISIBLE_DEVICES",
                "GpuBusy",
            )
        elif busy:
            holders = [
                "pid %s on GPU %s" % (one["pid"], one["gpu"])
                for one in cards.processes()
                if one["gpu"] in [card["index"] for card in busy]
            ]
            self._add(
                "gpus",
                False,
                "%s; GPU %s: %.1f of %.1f GiB are taken (%s)"
                % (
                    text,
                    busy[0]["index"],
                    busy[0]["memory_used"] / GIB,
                    busy[0]["memory_total"] / GIB,
                    ", ".join(holders[:4]) or "by whom is not shown",
                ),
                "%d %% of each free" % (100 * share),
                "fab stop --leftovers ends what earlier engines left; or lower gpu_memory_utilization",
                "GpuBusy",
            )
        else:
            self._add("gpus", True, text + ", free", "%d" % wanted)
        weights = self.shape.weight_bytes / wanted if self.shape else 0
        if usable and weights > share * usable[0]["memory_total"]:
            self._add(
                "gpu memory",
                False,
                "%.0f GiB a GPU" % (usable[0]["memory_total"] / GIB),
                "%.0f GiB of weights on each of %d" % (weights / GIB, wanted),
                "more GPUs (tensor_parallel), or a quantised checkpoint",
                "GpuBusy",
            )

    def _memory(self) -> None:
        if self.venv is None or not self.venv.cpu_only or self.shape is None:
            return
        free = available_memory()
        need = int(self.shape.weight_bytes * 1.2) + (2 << 30)
        self._add(
            "memory",
            None if free is None else free >= need,
            "unknown" if free is None else "%.1f GiB available" % (free / GIB),
            "%.1f GiB" % (need / GIB),
            "a smaller model, or more memory",
        )

    def _other_runs(self) -> None:
        from remoteops.agent.liveness import current_status

        going = [
            run.id for run in all_runs(runs_root(dict(self.request))) if current_status(run)["state"] not in TERMINAL
        ]
        self._add(
            "other runs",
            not going,
            ", ".join(going) or "none",
            "none on this host",
            "follow it (fab tail-logs), stop it (fab stop), or --force",
            "RunActive",
        )


def available_memory() -> Optional[int]:
    """Bytes that can be had without swapping; None where the kernel does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as stream:
            for line in stream:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None
