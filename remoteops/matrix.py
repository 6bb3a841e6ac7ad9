"""Which release can I install? Audits each consumer against each provider release, in parallel processes.

Trees and results are cached: a pair that was audited with the same contracts and the same engine is read back.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from remoteops import probe, recipes, rules, since, sources
from remoteops.cache import cache_dir, write_beside
from remoteops.errors import RemoteOpsError, UsageError

SCHEMA = "remoteops.matrix/1"
DOWNLOADS = 4
Event = Callable[[dict[str, Any]], None]


def matrix(
    consumers: Sequence[str],
    providers: Sequence[str],
    *,
    model: str | None = None,
    baseline: str | None = None,
    jobs: int | None = None,
    fresh: bool = False,
    cache: Path | None = None,
    on_event: Event | None = None,
) -> dict[str, Any]:
    """The document remoteops.matrix/1: one row a pair, consumers in the order given, releases oldest first.

    ``consumers`` and ``providers`` are specs: ``speculators==0.3.0,0.4.0.1``, ``vllm>=0.11``, a folder as ``name=DIR``.
    A row that could not be audited has ``error`` instead of counts. ``fresh`` ignores earlier results. Raises
    UsageError or MissingPackage when a spec names nothing at all.
    """
    started = time.monotonic()
    store = (cache or cache_dir()) / "matrix"
    say = on_event or (lambda event: None)
    left, right = _expand(consumers), _expand(providers)
    if not left or not right:
        raise UsageError("the matrix needs at least one consumer and one provider")
    trees = _fetch_all([*left, *right], cache, say)
    base = sources.fetch(baseline) if baseline else None
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    waiting: list[tuple[str, str, Path]] = []
    for one in left:
        for other in right:
            mine, theirs = trees[one], trees[other]
            if isinstance(mine, str) or isinstance(theirs, str):
                error = mine if isinstance(mine, str) else theirs
                rows[one, other] = {"consumer": _label(mine, one), "provider": _label(theirs, other), "error": error}
                continue
            place = store / f"{_key(mine, theirs, base, model)}.json"
            row = None if fresh else _read(place)
            if row is None:
                waiting.append((one, other, place))
            else:
                rows[one, other] = {**row, "cached": True}
    for one, other, row in _run(waiting, trees, base, model, jobs, say):
        rows[one, other] = row
    ordered = [rows[one, other] for one in left for other in right]
    return {
        "schema": SCHEMA,
        "rows": ordered,
        "installable": {
            _label(trees[one], one): [
                _label(trees[other], other) for other in right if rows[one, other].get("breaks") == 0
            ]
            for one in left
        },
        "ranges": since.ranges(ordered),
        "baseline": base.label if base else None,
        "model": model,
        "seconds": round(time.monotonic() - started, 3),
    }


def describe(event: dict[str, Any]) -> str:
    """An event in words, for a person who waits."""
    if event["event"] == "source":
        return f"{event['spec']}: {event.get('error') or 'from ' + Path(event['origin']).name}"
    breaks = "not audited" if event["breaks"] is None else f"{event['breaks']} breaks"
    return f"[{event['done']}/{event['total']}] {event['consumer']} on {event['provider']}: {breaks}"


def summarise(document: dict[str, Any], consumer: str, provider: str) -> dict[str, Any]:
    """A row: counts, and for each finding only what a table or a list of them needs."""
    broken = probe.breaks(document)
    known = recipes.load()

    def fixed(finding: dict[str, Any]) -> bool:
        recipe = recipes.recipe_for(finding, known)
        return not recipe.impossible if recipe is not None else recipes.mechanical(finding) is not None

    short = ("rule", "kind", "confidence", "symbol", "detail", "file", "line", "when")
    return {
        "consumer": consumer,
        "provider": provider,
        "breaks": len(broken),
        "proved": sum(finding["confidence"] == "proved" for finding in broken),
        "contract": sum(finding["confidence"] == "contract" for finding in broken),
        "risks": sum(finding["confidence"] == "risk" for finding in document["findings"]),
        "unresolved": len(document["unresolved"]),
        "sites": document["sites"],
        "fixable": bool(broken) and all(fixed(finding) for finding in broken),
        "unfixable": sorted({finding["rule"] for finding in broken if not fixed(finding)}),
        "findings": [
            {**{key: finding.get(key) for key in short}, "fix": bool(fixed(finding))}
            for finding in document["findings"]
        ],
        "seconds": document["seconds"],
    }


def _expand(specs: Sequence[str]) -> list[str]:
    found: list[str] = []
    for spec in specs:
        name, _ = probe.split_spec(spec)
        found += [spec] if name else sources.expand([spec])
    return list(dict.fromkeys(found))


def _fetch_all(specs: list[str], cache: Path | None, say: Event) -> dict[str, sources.Tree | str]:
    """A tree for each spec, or the text of the error that kept it away."""

    def get(spec: str) -> sources.Tree | str:
        name, place = probe.split_spec(spec)
        try:
            tree = sources.fetch(place, package=name, cache=cache)
        except RemoteOpsError as error:
            say({"event": "source", "spec": spec, "error": error.message})
            return error.message
        say({"event": "source", "spec": spec, "origin": tree.origin})
        return tree

    unique = list(dict.fromkeys(specs))
    with ThreadPoolExecutor(DOWNLOADS) as pool:
        return dict(zip(unique, pool.map(get, unique), strict=True))


def _run(
    waiting: list[tuple[str, str, Path]],
    trees: dict[str, Any],
    base: sources.Tree | None,
    model: str | None,
    jobs: int | None,
    say: Event,
) -> list[tuple[str, str, dict[str, Any]]]:
    done: list[tuple[str, str, dict[str, Any]]] = []
    workers = min(len(waiting), jobs or os.cpu_count() or 1)
    with contextlib.ExitStack() as stack:
        pool: Executor = _Here()
        if workers > 1:
            # spawn: the caller may hold SSH connections and threads, which a forked child must not inherit.
            pool = stack.enter_context(ProcessPoolExecutor(workers, mp_context=get_context("spawn")))
        futures: dict[Future[dict[str, Any]], tuple[str, str, Path]] = {}
        for one, other, place in waiting:
            futures[pool.submit(_audit, trees[one], trees[other], base, model)] = (one, other, place)
        for future in as_completed(futures):
            one, other, place = futures[future]
            try:
                row = future.result()
                write_beside(place, json.dumps(row))
            except RemoteOpsError as error:
                sides = {"consumer": _label(trees[one], one), "provider": _label(trees[other], other)}
                row = {**sides, "error": error.message}
            done.append((one, other, {**row, "cached": False}))
            count = {"done": len(done), "total": len(waiting), "breaks": row.get("breaks")}
            say({"event": "pair", "consumer": one, "provider": other, **count})
    return done


class _Here(Executor):
    """Runs each call at once: a single pair is audited sooner than a process starts."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except RemoteOpsError as error:
            future.set_exception(error)
        return future


def _audit(
    consumer: sources.Tree, provider: sources.Tree, base: sources.Tree | None, model: str | None
) -> dict[str, Any]:
    document = probe.audit_trees(consumer, provider, base=base, model=model)
    return summarise(document, consumer.label, provider.label)


def _label(tree: sources.Tree | str, spec: str) -> str:
    return tree.label if isinstance(tree, sources.Tree) else spec


def _key(consumer: sources.Tree, provider: sources.Tree, base: sources.Tree | None, model: str | None) -> str:
    parts = [rules.fingerprint(), model or ""]
    parts += [_state(tree) for tree in (consumer, provider, base) if tree is not None]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _state(tree: sources.Tree) -> str:
    """What a tree is now: a cached one never changes, a folder is known by its files' names, sizes and times."""
    root = Path(tree.path)
    if (root / sources.RECORD).is_file():
        return f"{tree.path}|{tree.package}|{(root / sources.RECORD).stat().st_mtime_ns}"
    digest = hashlib.sha256()
    for path in sorted((root / tree.package).rglob("*.py")):
        stat = path.stat()
        digest.update(f"{path}|{stat.st_size}|{stat.st_mtime_ns}\n".encode())
    return f"{tree.path}|{tree.package}|{digest.hexdigest()}"


def _read(place: Path) -> dict[str, Any] | None:
    try:
        row: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return row
