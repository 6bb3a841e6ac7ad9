"""Reads back what was written and compares it with the rows it was made from; one pass, a few samples at a time."""

from __future__ import annotations

import collections
import concurrent.futures
import os
import time
from typing import Any, Callable, Deque, Dict, Iterator, List, Mapping, Optional, Tuple

from remoteops.agent import manifest
from remoteops.agent.extraction import hostkind, inspector, output, samples
from remoteops.agent.protocol import AgentError

NAMED = 200  # problems listed one by one; all are counted


class Report:
    """Collects problems: {"index","file","problem", …}."""

    def __init__(self) -> None:
        self.problems: List[Dict[str, Any]] = []
        self.count = 0
        self.rows: set[int] = set()

    def add(self, index: int, file: str, problem: str, **facts: Any) -> None:
        self.count += 1
        self.rows.add(index)
        if len(self.problems) < NAMED:
            self.problems.append({"index": index, "file": file, "problem": problem, **facts})


def check(
    out: str,
    emit: Optional[Callable[..., Any]] = None,
    *,
    reference: int = 0,
    job: Optional[Mapping[str, Any]] = None,
    device: Optional[str] = None,
    reject: bool = False,
    notes: Optional[str] = None,
) -> Dict[str, Any]:
    """Every row present, its tokens, shape, dtype, finite values, no two samples with the same states and other
    tokens; lengths.

    ``notes``: what an inspector saw while the run went on; a file that has not changed since is not read again.
    ``reject`` enters wrong rows in the manifest, so that a resume does them again.
    ``reference``: that many rows are recomputed with transformers and compared per layer (reference.py).
    ``emit(event, **fields)`` gets ``progress``. Returns {"ok", "rows", "checked", "problem_count", "problem_rows",
    "problems", "lengths", "bytes", "tokens", "reference"?}. Raises AgentError(OutputMismatch) for a folder without
    manifest or rows.
    """
    found = manifest.read(out)
    if found is None:
        raise AgentError("OutputMismatch", "no manifest in %s" % out, hint="is this the output folder of a run?")
    header, report = found.header, Report()
    began = time.monotonic()
    lengths: List[int] = []
    seen: Dict[bytes, List[Tuple[int, str]]] = {}
    total = size = checked = 0
    wanted = set()
    expected_rows = output.count_rows(out)
    for number, (row, name, finding) in enumerate(_inspected(out, found, report, notes), 1):
        wanted.add(row.index)
        if finding is not None and not finding.readable:
            report.add(row.index, name, finding.problems[0][0])
        elif finding is not None:
            checked += 1
            total += len(row.input_ids)
            size += finding.size
            lengths.append(len(row.input_ids))
            for problem, facts in finding.problems:
                report.add(row.index, name, problem, **facts)
            _compare_with_others(found, seen.setdefault(finding.fingerprint, []), row, name, report)
        if emit is not None and (number % 50 == 0 or number == expected_rows):
            emit("progress", samples=number, samples_total=expected_rows, tokens=total, bytes=size)
    for index in sorted(set(found.entries) - wanted):
        report.add(index, found.entries[index]["file"], "in the manifest, and no row asks for it")
    if reject:
        _reject(out, found, report)
    partial = [name for name in os.listdir(out) if name.endswith(manifest.PARTIAL)]
    result: Dict[str, Any] = {
        "schema": "remoteops.verify/1",
        "out": os.path.abspath(out),
        "ok": not report.count,
        "rows": expected_rows,
        "checked": checked,
        "tokens": total,
        "bytes": size,
        "problem_count": report.count,
        "problem_rows": sorted(report.rows),
        "problems": report.problems,
        "lengths": statistics(lengths),
        "unfinished": partial,
        "layers": header["layers"],
        "convention": header["convention"],
        "dtype": header["dtype"],
        "format": header["format"],
        "hidden_size": header["hidden_size"],
    }
    result["seconds"] = {"read": round(time.monotonic() - began, 3)}
    if reference:
        from remoteops.agent.extraction import reference as recompute

        compared = recompute.compare(
            out,
            header,
            reference,
            trust_remote_code=bool((job or {}).get("trust_remote_code")),
            device=device,
            emit=emit,
        )
        result["reference"] = compared
        result["seconds"]["reference"] = round(time.monotonic() - began - result["seconds"]["read"], 3)
        if compared.get("ok") is False:
            result["ok"] = False
    return result


def _reject(out: str, found: manifest.Output, report: Report) -> None:
    """Enter the wrong rows in the manifest, so that a resume does them again; a folder that cannot be written stays
    as it is."""
    reasons = {one["index"]: one for one in reversed(report.problems)}
    for index in sorted(report.rows & set(found.entries)):
        if found.entries[index].get("rejected"):
            continue
        name = manifest.file_name(found.header["format"], index)
        try:
            manifest.reject(out, index, name, str(reasons.get(index, {}).get("problem", "wrong")))
        except OSError:
            return


def _inspected(
    out: str, found: manifest.Output, report: Report, notes: Optional[str]
) -> Iterator[Tuple[Any, str, Optional[samples.Finding]]]:
    """Every row in order with its file's name and what was seen of it (None: nothing to read; ``report`` says why).

    A few samples are read at once: nearly all of that is kernels and page faults, without the GIL.
    """
    import torch

    noted = inspector.read_notes(notes)
    before, workers = torch.get_num_threads(), hostkind.writer_threads()
    waiting: Deque[Tuple[Any, str, Any]] = collections.deque()
    # Threads that each ask for a pool of their own only wait for one another.
    with concurrent.futures.ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for row in output.read_rows(out):
            name = manifest.file_name(found.header["format"], row.index)
            path = os.path.join(out, name)
            finding: Any = None
            if _listed(found.entries.get(row.index), path, name, row.index, report):
                finding = inspector.still_so(noted.pop(row.index, None), path)
                finding = finding or pool.submit(samples.inspect, path, row, found.header)
            waiting.append((row, name, finding))
            if len(waiting) > 2 * workers:
                yield _result(waiting.popleft())
        while waiting:
            yield _result(waiting.popleft())
    torch.set_num_threads(before)


def _result(waiting: Tuple[Any, str, Any]) -> Tuple[Any, str, Optional[samples.Finding]]:
    row, name, finding = waiting
    return row, name, finding.result() if isinstance(finding, concurrent.futures.Future) else finding


def _listed(entry: Optional[Mapping[str, Any]], path: str, name: str, index: int, report: Report) -> bool:
    """Whether there is a file to read; what the manifest says of it that is not so goes into the report."""
    try:
        size = os.stat(path).st_size
    except OSError:
        report.add(index, name, "missing" if entry else "missing, and not in the manifest")
        return False
    if entry is None:
        report.add(index, name, "not in the manifest")
    elif entry.get("rejected"):
        report.add(index, name, "rejected before: %s" % entry["rejected"])
        return False
    elif size != entry.get("bytes"):
        report.add(index, name, "%d bytes, the manifest says %s" % (size, entry.get("bytes")))
    return True


def _compare_with_others(
    found: manifest.Output, alike: List[Tuple[int, str]], row: Any, name: str, report: Report
) -> None:
    """Report a sample whose states are those of another row with other tokens. ``alike``: (row, hash of its tokens)
    of samples with the same fingerprint, which this adds to."""
    tokens = manifest.tokens_sha256(row.input_ids)
    for index, other_tokens in alike:
        if other_tokens == tokens:
            return
        other = manifest.file_name(found.header["format"], index)
        if samples.same_states(os.path.join(found.path, name), os.path.join(found.path, other)):
            report.add(row.index, name, "the same states as row %d, which has other tokens" % index, other=index)
            return
    alike.append((row.index, tokens))


def statistics(lengths: List[int]) -> Dict[str, Any]:
    """Tokens a sample: {"count","min","median","mean","max"}."""
    if not lengths:
        return {"count": 0}
    ordered = sorted(lengths)
    return {
        "count": len(ordered),
        "min": ordered[0],
        "median": ordered[len(ordered) // 2],
        "mean": round(sum(ordered) / len(ordered), 1),
        "max": ordered[-1],
    }
