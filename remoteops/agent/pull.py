"""Says which files of a run belong together, with their sizes and hashes; the bytes travel over the link's own
transfer."""

from __future__ import annotations

import hashlib
import os
from typing import Any, Callable, Dict, List, Optional

from remoteops.agent import manifest
from remoteops.agent.protocol import AgentError
from remoteops.agent.rundir import find
from remoteops.agent.verify import output_of

ROWS = "rows.jsonl"
BESIDE = ("data_config.json", "sample_lengths.json", ROWS)


def list_files(request: Dict[str, Any], emit: Callable[..., None]) -> Dict[str, Any]:
    """Request: "run" (none: the newest) or "out", "samples" (how many; None: all), "rows" (their indices; wins over
    samples).

    Result: {"run","out","header","samples_total","manifest": [lines of the chosen samples],
    "files": [{"name" (in the folder), "path" (on the host), "bytes", "sha256", "index"?, "tokens"?}]}. Only samples
    whose file is what the manifest says are listed; others are in "left_out" with the reason. Raises RunNotFound,
    OutputMismatch.
    """
    run = None if request.get("out") else find(request)
    out = os.path.abspath(os.path.expanduser(str(request["out"]))) if run is None else output_of(run)
    found = manifest.read(out) if os.path.isdir(out) else None
    if found is None:
        raise AgentError(
            "OutputMismatch",
            "there is nothing to pull in %s: no manifest" % out,
            tried=manifest.NAME,
            hint="has the run written samples yet? fab status",
        )
    chosen = sorted(found.entries)
    wanted: Optional[List[int]] = [int(one) for one in request["rows"]] if request.get("rows") is not None else None
    if wanted is not None:
        unknown = sorted(set(wanted) - set(chosen))
        if unknown:
            raise AgentError(
                "UsageError",
                "rows %s are not among the samples" % unknown[:10],
                hint="samples there: %d, rows %s…" % (len(chosen), chosen[:5]),
            )
        chosen = sorted(set(wanted))
    files: List[Dict[str, Any]] = []
    lines: List[Dict[str, Any]] = []
    left_out: List[Dict[str, Any]] = []
    limit = len(chosen) if request.get("samples") is None or wanted is not None else int(request["samples"])
    for index in chosen:
        if len(lines) >= limit:
            break
        entry = found.entries[index]
        try:
            manifest.check_file(out, entry)
        except manifest.Identified as error:
            left_out.append({"index": index, "reason": str(error)})
            continue
        record = _file(out, os.path.basename(str(entry["file"])))
        files.append({**record, "index": index, "tokens": entry.get("tokens")})
        lines.append({**entry, "sha256": record["sha256"]})
        emit("progress", samples=len(lines), samples_total=limit, bytes=sum(one["bytes"] for one in files))
    for name in BESIDE:
        if name == ROWS and len(lines) < len(found.entries):
            continue  # it tells of every row of the run, and can be large
        if os.path.isfile(os.path.join(out, name)):
            files.append(_file(out, name))
    return {
        "run": run.id if run else None,
        "out": out,
        "header": found.header,
        "samples_total": len(found.entries),
        "manifest": lines,
        "files": files,
        "left_out": left_out,
    }


def _file(out: str, name: str) -> Dict[str, Any]:
    path = os.path.join(out, name)
    digest = hashlib.sha256()
    size = 0
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
            size += len(block)
    return {"name": name, "path": path, "bytes": size, "sha256": digest.hexdigest()}
