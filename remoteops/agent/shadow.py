"""Audits a package as it was before our patch, or as it would be after a planned one, without touching what is
installed.

The view is a folder of links to the installed files, with real files only where bytes differ.
"""

from __future__ import annotations

import base64
import contextlib
import os
import tempfile
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

from remoteops.agent import distinfo
from remoteops.agent.patchstate import PARTLY, PATCHED, Request, describe, stores, told, who
from remoteops.agent.protocol import AgentError

Emit = Callable[..., None]


def audit(request: Request, emit: Emit) -> Dict[str, Any]:
    """The audit that a plan starts from.

    ``request`` is that of verb ``audit`` and ``contents``: {file relative to the consumer's folder: base64}, the bytes
    that a plan would put there. Files that we patched are shown with their original bytes. Result: ``document`` (the
    audit's), ``root`` (the folder that holds the installed consumer), ``sources``: {file: base64} of the consumer's
    files that have sites, as audited.
    """
    from remoteops.agent.audit.verb import audit as look

    contents = {_inside(file): base64.b64decode(data) for file, data in (request.get("contents") or {}).items()}
    root, originals = _patched(request)
    with contextlib.ExitStack() as stack:
        if originals or contents:
            root = root or request.get("root")
            if not root:
                raise AgentError(
                    "UsageError", "planned contents need the root that they belong to", tried="audit a plan"
                )
            shown = stack.enter_context(_view(str(root), request["consumer"], {**originals, **contents}))
            request = dict(request, consumer_path=shown)
        document = look(request, emit)
        folder = document["consumer"]["path"]
        sources = {}
        for file in document.get("files") or {}:
            try:
                with open(os.path.join(folder, file), "rb") as stream:
                    sources[file] = base64.b64encode(stream.read()).decode("ascii")
            except OSError as error:
                raise AgentError(
                    "PatchError",
                    "%s cannot be read as a file: %s" % (os.path.join(folder, file), error.strerror),
                    tried="read what was audited",
                    hint="a package inside an archive cannot be patched: install it unpacked",
                ) from error
    if root:
        document["consumer"]["path"] = root
    return {"document": document, "root": root or folder, "sources": sources}


def _inside(file: str) -> str:
    found = os.path.normpath(file)
    if os.path.isabs(found) or found.split(os.sep)[0] == os.pardir:
        raise AgentError("UsageError", "%s lies outside the package" % file, tried="audit a plan")
    return found


def _patched(request: Request) -> Tuple[Optional[str], Dict[str, bytes]]:
    """(root, original bytes by file) of the consumer's patch, where one is in force."""
    for store in stores(dict(request, package=request["consumer"])):
        with told("show the originals"), store.locked(who(request)):
            store.recover()
            state = store.state()
            if state.get("files") and describe(store, state)["state"] in (PATCHED, PARTLY):
                return state["root"], {rel: store.blob(known["before"]) for rel, known in state["files"].items()}
    return None, {}


@contextlib.contextmanager
def _view(root: str, package: str, shown: Dict[str, bytes]) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="remoteops-view-") as folder:
        _shadow(root, folder, package, shown)
        yield folder


def _shadow(root: str, shadow: str, package: str, originals: Dict[str, bytes]) -> None:
    """Real folders along the way to each original, links for all the rest."""
    real = {os.path.dirname(rel) for rel in originals}
    for folder in list(real):
        while folder:
            real.add(folder)
            folder = os.path.dirname(folder)
    for folder in sorted(real | {package}):
        os.makedirs(os.path.join(shadow, folder), exist_ok=True)
        for name in os.listdir(os.path.join(root, folder)) if folder else []:
            rel = os.path.join(folder, name)
            if rel not in real and rel not in originals:
                os.symlink(os.path.join(root, rel), os.path.join(shadow, rel))
    for rel, data in originals.items():
        with open(os.path.join(shadow, rel), "wb") as stream:
            stream.write(data)
    info = distinfo.find(root, package)
    if info:
        os.symlink(info, os.path.join(shadow, os.path.basename(info)))
