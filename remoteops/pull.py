"""The use case of ``fab pull``: samples of a run, copied here whole, checked, and never anywhere but into the folder
that was named."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from remoteops import runs
from remoteops.agent import manifest
from remoteops.agent.protocol import AgentError
from remoteops.door import using
from remoteops.errors import DiskTooSmall, OutputMismatch, TransferFailed, UsageError
from remoteops.inventory import Host
from remoteops.remote import Agent
from remoteops.ssh.transfer import safe_join

OnEvent = Callable[[dict[str, Any]], None]
_SAMPLE = re.compile(r"(?:data_([0-9]{1,12})\.pt|hs_([0-9]{1,12})\.safetensors)\Z")
_BESIDE = ("data_config.json", "sample_lengths.json", "rows.jsonl")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


def pull(
    host: Host,
    run: str | None = None,
    *,
    to: Path,
    samples: int | None = None,
    rows: Sequence[int] | None = None,
    out: str | None = None,
    agent: Agent | None = None,
    on_event: OnEvent | None = None,
) -> dict[str, Any]:
    """Copy samples of a run (none named: the newest) into the folder ``to``.

    ``samples``: how many (None: all); ``rows``: these indices instead; ``out``: a folder on the host instead of a
    run. What lies there already with the right hash is kept, so a broken pull goes on where it stopped. Returns
    {"schema","host","run","to","files":[{"name","index","tokens","bytes","sha256","state": fetched|present}],
    "left_out","bytes","fetched_bytes","seconds"}. Raises UsageError, RunNotFound, OutputMismatch (``to`` holds
    another run's samples), DiskTooSmall (here), TransferFailed, LinkError.
    """
    if samples is not None and samples < 1:
        raise UsageError(
            "samples must be at least 1",
            host=host.name,
            tried=f"--samples {samples}",
            hint="leave it out for all of them",
        )
    tell = on_event or (lambda event: None)
    began = time.monotonic()
    to = Path(to).expanduser()
    if to.exists() and not to.is_dir():
        raise UsageError(f"{to} is no folder", tried="--to", hint="name a folder; it is made if it is not there")
    with using(host, agent) as door:
        listed = door.call(
            "pull.list",
            {
                **runs.base(host),
                "run": run,
                "out": out,
                "samples": samples,
                "rows": list(rows) if rows is not None else None,
            },
            on_event=tell,
        )
        wanted = [_checked(host, record) for record in _list(listed.get("files"))]
        header = _header(host, listed)
        to.mkdir(parents=True, exist_ok=True)
        _same_run(host, to, header)
        _room(host, to, wanted)
        files = []
        total = sum(one["bytes"] for one in wanted)
        done = fetched = 0
        for record in wanted:
            target = safe_join(to, record["name"])
            there = (
                target.is_file() and target.stat().st_size == record["bytes"] and _sha256(target) == record["sha256"]
            )
            if not there:
                door.link.download(
                    f"{listed['out']}/{record['name']}",
                    target,
                    sha256=record["sha256"],
                    progress=_progress(tell, record["name"], done, total),
                )
                fetched += record["bytes"]
            done += record["bytes"]
            files.append({**record, "state": "present" if there else "fetched"})
            tell({"event": "file", **files[-1], "done": done, "bytes_total": total})
        _write_manifest(to, header, listed, {one["index"]: one for one in wanted if one["index"] is not None})
    return {
        "schema": "remoteops.pull/1",
        "host": host.name,
        "run": listed.get("run"),
        "out": listed["out"],
        "to": str(to),
        "files": files,
        "left_out": _list(listed.get("left_out")),
        "samples": sum(one["index"] is not None for one in files),
        "samples_total": listed.get("samples_total"),
        "bytes": total,
        "fetched_bytes": fetched,
        "seconds": round(time.monotonic() - began, 3),
    }


def _progress(tell: OnEvent, name: str, done: int, total: int) -> Callable[[int, int], None]:
    return lambda have, size: tell({"event": "progress", "file": name, "bytes": done + have, "bytes_total": total})


def _checked(host: Host, record: Any) -> dict[str, Any]:
    """One file as the host announced it, if it is one we asked for. The host chooses which samples, never where they
    go or what they are called."""
    name = record.get("name") if isinstance(record, Mapping) else None
    size, digest = (record.get("bytes"), record.get("sha256")) if isinstance(record, Mapping) else (None, None)
    match = _SAMPLE.match(name) if isinstance(name, str) else None
    if (
        not isinstance(name, str)
        or (match is None and name not in _BESIDE)
        or not isinstance(size, int)
        or size < 0
        or not isinstance(digest, str)
        or not _SHA256.match(digest)
    ):
        raise TransferFailed(
            f"the host announced a file that is no sample: {str(name)[:200]!r}",
            host=host.name,
            tried="pull.list",
            hint="do not trust this host's answers",
        )
    index = int(match[1] or match[2]) if match else None
    tokens = record.get("tokens")
    return {
        "name": name,
        "index": index,
        "tokens": tokens if isinstance(tokens, int) else None,
        "bytes": size,
        "sha256": digest,
    }


def _header(host: Host, listed: Mapping[str, Any]) -> dict[str, Any]:
    header = listed.get("header")
    if (
        not isinstance(header, dict)
        or header.get("schema") != manifest.SCHEMA
        or not isinstance(listed.get("out"), str)
    ):
        raise TransferFailed(
            "the host's manifest has no header",
            host=host.name,
            tried="pull.list",
            hint="is that the output folder of a run?",
        )
    return header


def _same_run(host: Host, to: Path, header: Mapping[str, Any]) -> None:
    try:
        found = manifest.read(str(to))
    except AgentError as error:
        raise OutputMismatch(error.message, host=host.name, tried=f"--to {to}", hint=error.hint) from None
    changes = manifest.changed(found.header, header) if found is not None else []
    if changes:
        raise OutputMismatch(
            f"{to} holds samples of something else: " + "; ".join(one["text"] for one in changes),
            host=host.name,
            tried=f"--to {to}",
            hint="name another folder",
            changes=changes,
        )


def _room(host: Host, to: Path, wanted: Sequence[Mapping[str, Any]]) -> None:
    need = sum(one["bytes"] for one in wanted if not (to / one["name"]).is_file())
    free = shutil.disk_usage(to).free
    if need > free:
        raise DiskTooSmall(
            f"{need / 2**30:.1f} GiB are to be pulled and {free / 2**30:.1f} GiB are free at {to}",
            tried="this machine's disk, before pulling anything",
            hint="fewer --samples, or another --to",
        )


def _write_manifest(
    to: Path, header: Mapping[str, Any], listed: Mapping[str, Any], wanted: Mapping[int, Mapping[str, Any]]
) -> None:
    """The lines of what lies here now: those pulled before and those pulled now."""
    before = manifest.read(str(to))
    lines = dict(before.entries) if before is not None else {}
    for line in _list(listed.get("manifest")):
        index = line.get("index") if isinstance(line, Mapping) else None
        if isinstance(index, int) and index in wanted:
            lines[index] = {
                **line,
                "file": wanted[index]["name"],
                "bytes": wanted[index]["bytes"],
                "sha256": wanted[index]["sha256"],
            }
    target = to / manifest.NAME
    temporary = to / f".{manifest.NAME}.{os.getpid()}{manifest.PARTIAL}"
    with temporary.open("w", encoding="ascii") as stream:
        for record in (header, *(lines[index] for index in sorted(lines))):
            stream.write(json.dumps(record, separators=(",", ":")) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(target)


def _sha256(path: Path) -> str:
    import hashlib

    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
