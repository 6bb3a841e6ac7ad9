"""Audits a package as it was before our patch, or as it would be after a planned one, without touching what is
installed.

The view is a folder of links to the installed files, with real files only where bytes differ.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from remoteops.agent import distinfo, patches
from remoteops.agent.patchstate import PARTLY, PATCHED, Request, describe, stores, told, who
from remoteops.agent.protocol import AgentError

Emit = Callable[..., None]

# What the audit is asked: exactly as ``fab probe`` asks, so that one finds the other's result in the cache.
ASKED = ("consumer", "provider", "consumer_path", "provider_path", "venv", "contracts", "model", "all", "baseline_path")
UNUSED = 3600  # seconds after which a view is of no use to anybody


def audit(request: Request, emit: Emit) -> Dict[str, Any]:
    """The audit that a plan starts from.

    ``request`` is that of verb ``audit`` and ``contents``: {file relative to the consumer's folder: base64}, the bytes
    that a plan would put there. Files that we patched are shown with their original bytes. Result: ``document`` (the
    audit's), ``root`` (the folder that holds the installed consumer), ``sources``: {file: base64} of the consumer's
    files that have sites, as audited; with ``package`` also ``state`` (what verb ``patch.status`` says).
    """
    from remoteops.agent.audit.verb import audit as look

    contents = {_inside(file): base64.b64decode(data) for file, data in (request.get("contents") or {}).items()}
    state = patches.status(request, emit) if request.get("package") else None
    root, originals = _patched(request)
    asked = {**{key: request.get(key) for key in ASKED}, "facts": True}
    asked.update({key: request[key] for key in ("state_dir", "cache_dir") if key in request})
    with contextlib.ExitStack() as stack:
        if originals or contents:
            root = root or request.get("root")
            if not root:
                raise AgentError(
                    "UsageError", "planned contents need the root that they belong to", tried="audit a plan"
                )
            shown = {**originals, **contents}
            folder = stack.enter_context(_view(str(root), request["consumer"], shown, request.get("cache_dir")))
            asked["consumer_path"] = folder
        document = look(asked, emit)
        document.pop("facts", None)
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
    return {"document": document, "root": root or folder, "sources": sources, "state": state}


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
def _view(root: str, package: str, shown: Dict[str, bytes], cache: Optional[str] = None) -> Iterator[str]:
    """The folder with the view, kept in ``cache`` so that the audit of the same text is found again.

    Without a cache that can be written to the folder is gone afterwards.
    """
    name = hashlib.sha256(repr((root, package, sorted(shown.items()))).encode("utf-8", "surrogatepass")).hexdigest()
    folder = os.path.join(os.path.expanduser(cache), "views", name[:24]) if cache else ""
    if folder and not _holds(folder, root, package, shown):
        try:
            os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)
            _trim(os.path.dirname(folder))
            made = tempfile.mkdtemp(prefix=".new-", dir=os.path.dirname(folder))
            try:
                _shadow(root, made, package, shown)
                shutil.rmtree(folder, ignore_errors=True)
                os.rename(made, folder)
            finally:
                shutil.rmtree(made, ignore_errors=True)
        except OSError:
            folder = ""
    if folder:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="remoteops-view-") as folder:
        _shadow(root, folder, package, shown)
        yield folder


def _holds(folder: str, root: str, package: str, shown: Dict[str, bytes]) -> bool:
    """Whether a view that was kept still shows what is installed and what is wanted."""
    try:
        for part in _real(package, shown):
            names = {n for n in os.listdir(os.path.join(root, part)) if os.path.join(part, n) not in shown}
            names |= {os.path.basename(rel) for rel in shown if os.path.dirname(rel) == part}
            if names != set(os.listdir(os.path.join(folder, part))):
                return False
        for rel, data in shown.items():
            with open(os.path.join(folder, rel), "rb") as stream:
                if stream.read() != data:
                    return False
        info = distinfo.find(root, package)
        return not info or os.path.realpath(os.path.join(folder, os.path.basename(info))) == os.path.realpath(info)
    except OSError:
        return False


def _trim(views: str) -> None:
    """Drop views that were made long ago (one in use is minutes old at most)."""
    for name in os.listdir(views):
        path = os.path.join(views, name)
        if os.lstat(path).st_mtime < time.time() - UNUSED:
            shutil.rmtree(path, ignore_errors=True)


def _real(package: str, shown: Dict[str, bytes]) -> List[str]:
    """The folders of a view that are folders and no links: the package, and the way to each file shown."""
    real = {package}
    for folder in [os.path.dirname(rel) for rel in shown]:
        while folder:
            real.add(folder)
            folder = os.path.dirname(folder)
    return sorted(real)


def _shadow(root: str, shadow: str, package: str, originals: Dict[str, bytes]) -> None:
    """Real folders along the way to each original, links for all the rest."""
    real = _real(package, originals)
    for folder in real:
        os.makedirs(os.path.join(shadow, folder), exist_ok=True)
        for name in os.listdir(os.path.join(root, folder)):
            rel = os.path.join(folder, name)
            if rel not in real and rel not in originals:
                os.symlink(os.path.join(root, rel), os.path.join(shadow, rel))
    for rel, data in originals.items():
        with open(os.path.join(shadow, rel), "wb") as stream:
            stream.write(data)
    info = distinfo.find(root, package)
    if info:
        os.symlink(info, os.path.join(shadow, os.path.basename(info)))
