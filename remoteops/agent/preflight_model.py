"""Preflight of what is asked for: model, layers, lengths, dataset."""

from __future__ import annotations

import os

from remoteops.agent import capabilities, estimate, modelinfo, venv
from remoteops.agent.extraction import dataset, layers
from remoteops.agent.protocol import AgentError
from remoteops.agent.rundir import read_json
from remoteops.agent.sheet import GIB, Sheet

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "tiktoken.model",
    "spiece.model",
)


def check_model(sheet: Sheet) -> None:
    if not sheet.job.get("model"):
        raise AgentError("UsageError", "no model is named", hint="set `model` in the host's workload")
    folder = modelinfo.find(str(sheet.job["model"]), sheet.env)
    sheet.shape = modelinfo.read(folder)
    text = "%s, %d layers x %d%s, %.1f GiB of weights" % (
        sheet.shape.architecture or sheet.shape.model_type,
        sheet.shape.num_layers,
        sheet.shape.hidden_size,
        " (in %s)" % sheet.shape.nested if sheet.shape.nested else "",
        sheet.shape.weight_bytes / GIB,
    )
    if sheet.shape.missing_weights:
        sheet.add(
            "model",
            False,
            "%s; %d shards named in the index are not there (%s)"
            % (text, len(sheet.shape.missing_weights), sheet.shape.missing_weights[0]),
            "all shards",
            "finish the download of %s" % folder,
            "MissingModel",
        )
    elif not sheet.shape.weight_bytes and sheet.job.get("load_format") != "dummy":
        sheet.add(
            "model",
            False,
            "%s has no weight files" % folder,
            "*.safetensors or *.bin",
            "finish the download",
            "MissingModel",
        )
    else:
        sheet.add("model", True, text, "a readable checkpoint", kind="MissingModel")
    if not any(os.path.isfile(os.path.join(folder, name)) for name in TOKENIZER_FILES):
        sheet.add(
            "tokenizer",
            False,
            "no tokenizer file in %s" % folder,
            "one of " + ", ".join(TOKENIZER_FILES),
            "download the tokenizer files too",
            "MissingModel",
        )


def check_remote_code(sheet: Sheet) -> None:
    if sheet.shape is None:
        return
    trusted = bool(sheet.job.get("trust_remote_code"))
    code = (read_json(os.path.join(sheet.shape.folder, "tokenizer_config.json")) or {}).get("auto_map") or {}
    if "AutoTokenizer" in code:
        sheet.add(
            "remote code",
            trusted,
            "the tokenizer is Python code of the model's own; trust_remote_code is %s" % str(trusted).lower(),
            "trust_remote_code: true",
            "read that code; if you trust it, set trust_remote_code in the host's workload",
        )
    elif sheet.shape.remote_code and not trusted:
        sheet.add(
            "remote code",
            None,
            "config.json names code of the model's own (vLLM may not need it)",
            "trust_remote_code where vLLM has no own class",
            "set it if the load fails for it",
        )


def check_architecture(sheet: Sheet) -> None:
    if sheet.venv is None or sheet.shape is None:
        return
    sheet.able = capabilities.look(sheet.venv.path("vllm"), sheet.venv.path("speculators"), sheet.shape.architecture)
    release = (sheet.venv.packages.get("vllm") or {}).get("version")
    sheet.add(
        "architecture",
        sheet.able.architecture,
        "vLLM %s %s %s"
        % (
            release,
            {True: "has", False: "has not", None: "may have"}[sheet.able.architecture],
            sheet.shape.architecture or "it",
        ),
        "the model's class in vLLM's registry",
        "this release of vLLM is too old (or too new) for the model",
    )


def check_layers(sheet: Sheet) -> None:
    if sheet.shape is None:
        sheet.add("layers", None, "no model config to check against", "ids within 0..N")
        return
    sheet.layers = layers.resolve(sheet.job.get("layers"), sheet.shape.num_layers)
    concerns = layers.concerns(sheet.layers, sheet.shape.num_layers)
    asked = sheet.job.get("layers")
    moved = asked in (None, "default") and sheet.layers[:3] != [
        2,
        sheet.shape.num_layers // 2,
        sheet.shape.num_layers - 3,
    ]
    text = "%s of 0..%d, counted as completed layers%s" % (
        sheet.layers,
        sheet.shape.num_layers,
        "; the default ids collide on so few layers and were moved" if moved else "",
    )
    sheet.add(
        "layers",
        None if concerns else True,
        "; ".join([text, *concerns]),
        "ids within 0..%d" % sheet.shape.num_layers,
        "fine when your trainer wants it so",
    )


def check_length(sheet: Sheet) -> None:
    wanted = int(sheet.job.get("max_length") or 0)
    if wanted < 1:
        raise AgentError(
            "UsageError", "max_length must be at least 1", hint="set max_length in the workload, or --max-length"
        )
    own = (sheet.job.get("engine_args") or {}).get("max_model_len")
    limits = {"engine_args.max_model_len": int(own)} if own else {}
    if sheet.shape is not None and sheet.shape.max_length:
        limits["the model"] = sheet.shape.max_length
    if not limits:
        sheet.add(
            "length",
            None,
            "max_length %d; the model's config names no limit" % wanted,
            "max_length <= max_model_len - 1",
        )
        return
    name, limit = min(limits.items(), key=lambda pair: pair[1])
    sheet.add(
        "length",
        wanted <= limit - 1,
        "max_length %d; %s takes %d" % (wanted, name, limit),
        "max_length <= %d (one position is kept for the step after the prompt)" % (limit - 1),
        "--max-length %d" % (limit - 1),
    )


def check_dataset(sheet: Sheet) -> None:
    if not sheet.job.get("dataset"):
        raise AgentError("UsageError", "no dataset is named", hint="set `dataset` in the host's workload, or --dataset")
    if str(sheet.job["dataset"]).startswith("local:"):
        sheet.add("dataset", None, "a file of the operator's machine", "it is uploaded before a run", "DatasetError")
        return
    found = estimate.dataset(
        str(sheet.job["dataset"]),
        int(sheet.job.get("max_length") or 2048),
        sheet.venv.python if sheet.venv else None,
        venv.import_path(),
    )
    wanted = int(sheet.job.get("samples") or 0)
    rows = min(wanted, found["rows"]) if wanted else found["rows"]
    sheet.size = {**found, "wanted": rows, "tokens": int(rows * found["tokens_a_row"])}
    columns = set(map(str, found["columns"]))
    if columns and not columns & set(dataset.USABLE):
        sheet.add(
            "dataset",
            False,
            "its records have %s" % ", ".join(sorted(columns)[:8]),
            "one of " + ", ".join(dataset.USABLE),
            "rename a column, or name another dataset",
            "DatasetError",
        )
        return
    short = bool(wanted) and found["exact_rows"] and found["rows"] < wanted
    text = "%s%d rows, about %d tokens each" % (
        "" if found["exact_rows"] else "about ",
        found["rows"],
        found["tokens_a_row"],
    )
    sheet.add(
        "dataset",
        None if short else True,
        text + ("; fewer than the %d samples asked for" % wanted if short else ""),
        "a readable dataset",
        "all rows are taken",
        "DatasetError",
    )


def check_template(sheet: Sheet) -> None:
    columns = set((sheet.size or {}).get("columns") or ())
    if (
        sheet.shape is None
        or not columns & {"messages", "conversations", "conversation", "prompt"}
        or "input_ids" in columns
    ):
        return
    config = read_json(os.path.join(sheet.shape.folder, "tokenizer_config.json")) or {}
    there = bool(config.get("chat_template")) or any(
        os.path.exists(os.path.join(sheet.shape.folder, name))
        for name in ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    )
    sheet.add(
        "chat template",
        True if there else None if "auto_map" in config else False,
        "the tokenizer has %s chat template" % ("a" if there else "no"),
        "one, for a dataset of conversations",
        "use a chat model, or rows with `text` or `input_ids`",
        "DatasetError",
    )
