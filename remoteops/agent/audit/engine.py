"""The audit of a pair: request in, remoteops.probe/1 document out. Standard library only; nothing is imported or
run.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import time
from typing import Any, Dict, List, Optional

from remoteops.agent.audit import cache, findings, layers, query
from remoteops.agent.audit.ducks import Ducks
from remoteops.agent.audit.index import Index
from remoteops.agent.audit.modules import Module
from remoteops.agent.audit.overrides import Overrides
from remoteops.agent.audit.packages import Tree, locate
from remoteops.agent.audit.record import Recorder
from remoteops.agent.audit.strings import Strings
from remoteops.agent.audit.subclasses import Subclasses
from remoteops.agent.protocol import AgentError

SCHEMA = "remoteops.probe/1"


def audit(request: Dict[str, Any]) -> Dict[str, Any]:
    """Audits ``request["consumer"]`` against ``request["provider"]``.

    Raises AgentError: UsageError for a request without names, MissingPackage and MissingVenv as ``packages.locate``
    does.
    """
    started = time.perf_counter()
    folder = request.get("cache_dir")
    code = cache.code_stamp() if folder else ""
    kept = cache.load(os.path.expanduser(folder), request, code) if folder and not request.get("refresh") else None
    if kept is not None:
        kept["seconds"] = round(time.perf_counter() - started, 3)
        kept["cached"] = True
        return kept
    # Trees are millions of small objects without cycles that matter: collecting them again and again costs a third.
    collecting = gc.isenabled()
    gc.disable()
    try:
        context = analyse(request)
        document = findings.document(context)
        layers.finish(document, context)
    finally:
        if collecting:
            gc.enable()
    document["seconds"] = round(time.perf_counter() - started, 3)
    if folder:
        cache.save(folder, request, code, document, watched(context))
    return document


def watched(context: query.Context) -> List[str]:
    """Every file and folder whose change may change the result."""
    found: List[str] = []
    for recorder in [context.recorder, context.moved.baseline]:
        for tree in recorder.index.trees.values() if recorder is not None else []:
            found += [tree.archive] if tree.archive else [*tree.files_seen, *tree.folders_seen]
            found.append(tree.path)
    return [path for path in dict.fromkeys(found) if path]


def analyse(request: Dict[str, Any]) -> query.Context:
    """The same, up to the context that contracts are evaluated on (sites found, findings not yet written)."""
    for key in ("consumer", "provider"):
        if not isinstance(request.get(key), str) or not request[key]:
            raise AgentError("UsageError", "the audit needs the name of a %s package" % key, tried="request[%r]" % key)
    venv = request.get("venv")
    consumer = locate(request["consumer"], request.get("consumer_path"), venv)
    provider = locate(request["provider"], request.get("provider_path"), venv)
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 6000))
    index = Index([provider, consumer])
    recorder = Recorder(index, provider.package)
    subclasses = Subclasses(index, recorder.classes, [provider.package, consumer.package], request.get("model"))
    recorder.descend = subclasses.below
    modules = concerned(index, consumer, provider.package)
    strings = Strings(recorder, subclasses)
    for recording in (False, True):
        recorder.recording = recording
        for module in modules:
            recorder.walk_module(module)
        if not recording:
            strings.find_hosts()
            recorder.calls_met = []
            forget(recorder, consumer)
    strings.judge()
    Ducks(recorder, subclasses).judge()
    baseline = earlier(provider.package, request.get("baseline_path"))
    Overrides(recorder, baseline).judge()
    return query.Context(request, index, recorder, consumer, provider, modules, baseline)


def earlier(package: str, path: Optional[str]) -> Optional[Recorder]:
    """An evaluator over the provider's baseline tree, for evidence of renames and of what was overridden."""
    if not path:
        return None
    return Recorder(Index([locate(package, path)]), package)


def concerned(index: Index, consumer: Tree, provider: str) -> List[Module]:
    """Modules of the consumer that name the provider, and those that import from them (so that objects are
    followed).
    """
    needle = provider.encode()
    texts = {name: index.data(consumer, path) for name, path in consumer.files()}
    found = {name for name, text in texts.items() if needle in text}
    frontier = set(found)
    for _ in range(2):
        stems = {name.rsplit(".", 1)[-1].encode() for name in frontier if "." in name}
        if not stems:
            break
        pattern = re.compile(
            rb"^[ \t]*(?:from|import)\b[^#\n]*\b(?:%s)\b" % b"|".join(sorted(re.escape(s) for s in stems)), re.M
        )
        frontier = {name for name, text in texts.items() if name not in found and pattern.search(text)}
        found |= frontier
    loaded = [index.module(name) for name in texts if name in found]
    return [m for m in loaded if m is not None]


def forget(recorder: Recorder, consumer: Tree) -> None:
    """Drops what was inferred about the consumer before all calls inside it were seen."""
    for info in recorder.index.infos():
        if info.module.tree is consumer:
            for fact in ("returned", "attributes", "scope"):
                info.facts.pop(fact, None)
    for module in recorder.index.loaded():
        if module.tree is consumer:
            module.values.clear()
    recorder.forget_scopes()


def unresolved_files(modules: List[Module]) -> List[Dict[str, Any]]:
    """Entries for files that could not be read whole."""
    found: List[Dict[str, Any]] = []
    for module in modules:
        if module.opaque:
            found.append({"file": module.file, "line": 1, "symbol": module.name, "reason": module.opaque})
        for line, message in module.source.errors:
            found.append({"file": module.file, "line": line, "symbol": module.name, "reason": message})
    return found
