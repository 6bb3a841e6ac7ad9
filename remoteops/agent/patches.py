"""File transactions with quilt-like state: read, apply, revert, status, prove. Knows files and hashes only."""

from __future__ import annotations

import base64
import os
import stat
import time
from typing import Any, Callable, Dict, List, Optional

from remoteops.agent import distinfo
from remoteops.agent.audit import packages
from remoteops.agent.journal import MISSING, Change, Store, hash_of, sha256
from remoteops.agent.patchstate import (
    CLEAN,
    EDITED,
    ORPHANED,
    PARTLY,
    PATCHED,
    REINSTALLED,
    SCHEMA,
    Request,
    describe,
    permitted,
    place,
    store_of,
    stores,
    told,
    who,
)
from remoteops.agent.proof import prove
from remoteops.agent.protocol import AgentError

__all__ = ["apply", "prove", "read", "revert", "status"]

Emit = Callable[..., None]



def read(request: Request, emit: Emit) -> Dict[str, Any]:
    """``files``: absolute paths -> each file's bytes and hash, and for a patched one the original's ("pristine")."""
    states = [(store, store.state()) for store in stores({k: v for k, v in request.items() if k == "state_dir"})]
    files = []
    for path in request.get("files", ()):
        try:
            with open(path, "rb") as stream:
                data = stream.read()
                status = os.fstat(stream.fileno())
        except OSError as error:
            raise AgentError(
                "PatchError",
                "cannot read %s: %s" % (path, error.strerror),
                tried="read the file to patch",
                hint="check the venv in inventory.yaml",
            ) from error
        record = {
            "path": path,
            "sha256": sha256(data),
            "data": base64.b64encode(data).decode("ascii"),
            "mode": stat.S_IMODE(status.st_mode),
            "nlink": status.st_nlink,
            "pristine": None,
        }
        for store, state in states:
            known = state.get("files", {}).get(os.path.relpath(path, state.get("root") or "/"))
            if known and known["after"] == record["sha256"]:
                original = store.blob(known["before"])
                record["pristine"] = {"sha256": known["before"], "data": base64.b64encode(original).decode("ascii")}
        files.append(record)
    return {"files": files}


def apply(request: Request, emit: Emit) -> Dict[str, Any]:
    """Put new bytes in place, all or none.

    ``files``: [{"path", "before" (hash of what was audited), "data" (base64)}], ``package``, ``venv``, ``meta`` (kept
    with the state), ``force`` (also when a process uses the venv). Files of an earlier patch that are not named go
    back to the original, but with ``keep`` (the plan was made on what is there, not on the originals) they stay as they
    are. Result: ``state``, ``changed`` (paths), ``restored`` (paths), ``already`` (nothing had to be done).
    """
    root, package = place(request)
    store = store_of(request, root, package)
    with told("apply"), store.locked(who(request)):
        recovered = store.recover()
        old = store.state()
        known: Dict[str, Dict[str, Any]] = dict(old.get("files", {}))
        if known and describe(store, old)["state"] in (REINSTALLED, ORPHANED):
            known = {}  # what is there now is not what we patched: the old patch is history
        in_force = bool(known)
        changes: List[Change] = []
        files: Dict[str, Dict[str, Any]] = {}
        contents: List[bytes] = []
        for item in request["files"]:
            path = os.path.abspath(item["path"])
            relative = os.path.relpath(path, root)
            data = base64.b64decode(item["data"])
            mine = known.pop(relative, None)
            current = hash_of(path)
            after = sha256(data)
            audited = item["before"]
            original = current
            if mine and current == mine["after"]:
                original = mine["before"]
            if audited not in (current, original):
                raise AgentError(
                    "FileChanged",
                    "%s is not the file that was audited (%s)"
                    % (path, "it is gone" if current == MISSING else "another hash"),
                    tried="compare hashes before patching",
                    hint="run fab patch again: it audits anew",
                )
            if mine and current not in (mine["after"], mine["before"]):
                if not request.get("force"):
                    hint = "--force patches it with your edit; --revert then gives the original"
                    raise _edited(path, "patch it again", hint)
                original = mine["before"]
            if original == after:
                known[relative] = mine or {}
                continue
            contents.append(data)
            files[relative] = mine if mine and original == mine["before"] else _remember(path, original)
            files[relative] = dict(files[relative], after=after)
            if current == original:
                with open(path, "rb") as stream:
                    contents.append(stream.read())
            if current != after:
                changes.append(Change(path, current, after))
        if request.get("keep"):
            files.update({relative: record for relative, record in known.items() if record})
            known = {}
        restored = _undo(root, known, changes, request)
        if not changes:
            return {
                "state": PATCHED if files else CLEAN,
                "changed": [],
                "restored": [],
                "already": True,
                "recovered": recovered,
            }
        permitted(request, root, changes)
        for change in changes:
            if change.before != MISSING:
                with open(change.path, "rb") as stream:
                    contents.append(stream.read())
        for data in contents:
            store.keep(data)
        state = {
            "schema": SCHEMA,
            "root": root,
            "package": package,
            "venv": request.get("venv"),
            "dist": distinfo.identity(root, package),
            "files": files,
            "applied_at": time.time(),
            "by": who(request),
            "meta": request.get("meta") or {},
            "replaced": {os.path.relpath(c.path, root): [c.before, c.after] for c in changes},
            "previous": {key: value for key, value in old.items() if key not in ("previous", "replaced")}
            if in_force
            else None,
        }
        store.commit(changes, state, "apply")
        store.prune(_digests(state))
        return {
            "state": PATCHED if files else CLEAN,
            "changed": [c.path for c in changes if c.path not in restored],
            "restored": restored,
            "already": False,
            "recovered": recovered,
        }


def _edited(path: str, tried: str, hint: str) -> AgentError:
    return AgentError("FileChanged", "%s was edited after it was patched" % path, tried=tried, hint=hint)


def _remember(path: str, digest: str) -> Dict[str, Any]:
    status = os.stat(path)
    return {
        "before": digest,
        "mtime_ns": status.st_mtime_ns,
        "mode": stat.S_IMODE(status.st_mode),
        "link": os.readlink(path) if os.path.islink(path) else None,
    }


def _undo(root: str, known: Dict[str, Dict[str, Any]], changes: List[Change], request: Request) -> List[str]:
    """Add the changes that bring files back to the original; returns their paths."""
    restored = []
    for relative, record in sorted(known.items()):
        path = os.path.join(root, relative)
        current = hash_of(path)
        if not record or current == record["before"]:
            continue
        if current != record["after"] and not request.get("force"):
            raise _edited(path, "bring back the original", "save your edit elsewhere, then --force; the edit is lost")
        link = record.get("link")
        if link is not None and hash_of(os.path.join(os.path.dirname(path), link)) != record["before"]:
            link = None
        changes.append(Change(path, current, record["before"], record.get("mtime_ns"), link))
        restored.append(path)
    return restored


def revert(request: Request, emit: Emit) -> Dict[str, Any]:
    """Bring back the original bytes of what the request means: ``package`` and ``root``, or all patches of ``venv``.

    After a reinstall or an upgrade there is nothing to bring back: the state is forgotten ("forgotten"). ``undo`` takes
    back the last apply alone: what was in force before it is in force again.
    """
    results = []
    for store in stores(request):
        with told("revert"), store.locked(who(request)):
            store.recover()
            state = store.state()
            if request.get("undo") and state.get("previous"):
                results.append(_step_back(store, state))
                continue
            if not state.get("files"):
                continue
            root, package = state["root"], state["package"]
            report = describe(store, state)
            changes: List[Change] = []
            if report["state"] in (REINSTALLED, ORPHANED):
                outcome = "forgotten"
            else:
                _undo(root, state["files"], changes, request)
                outcome = "reverted" if changes else "forgotten"
            if changes:
                permitted(request, root, changes)
            cleared = {
                "schema": SCHEMA,
                "root": root,
                "package": package,
                "venv": state.get("venv"),
                "files": {},
                "reverted_at": time.time(),
                "by": who(request),
                "meta": {},
            }
            store.commit(changes, cleared, "revert")
            store.prune(())
            results.append(
                {
                    "root": root,
                    "package": package,
                    "outcome": outcome,
                    "was": report["state"],
                    "changed": [change.path for change in changes],
                }
            )
    return {"reverted": results}


def _step_back(store: Store, state: Dict[str, Any]) -> Dict[str, Any]:
    """From a patch to the one before it: exactly what the last apply changed goes back, to what was there before it,
    which may have been edited by hand."""
    root, previous = state["root"], state["previous"]
    changes = []
    for relative, (before, after) in sorted(_replaced(state).items()):
        then, now = previous["files"].get(relative), state["files"].get(relative)
        path = os.path.join(root, relative)
        current = hash_of(path)
        if current == before or before == MISSING:
            continue
        if current != after:
            raise _edited(path, "go back to the patch before", "fab patch --status says what is there")
        changes.append(Change(path, current, before, None if then else (now or {}).get("mtime_ns")))
    store.commit(changes, previous, "undo")
    store.prune(_digests(previous))
    changed = [change.path for change in changes]
    return {"root": root, "package": state["package"], "outcome": "undone", "was": PATCHED, "changed": changed}


def _replaced(state: Dict[str, Any]) -> Dict[str, List[str]]:
    """{file: [hash before the last apply, hash behind it]} of what it changed."""
    if state.get("replaced") is not None:
        return dict(state["replaced"])
    found = {}  # of a version that did not note it
    for relative in {*state["files"], *state["previous"]["files"]}:
        now, then = state["files"].get(relative), state["previous"]["files"].get(relative)
        was, is_now = then["after"] if then else now["before"], now["after"] if now else then["before"]
        if was != is_now:
            found[relative] = [was, is_now]
    return found


def _digests(state: Dict[str, Any]) -> List[str]:
    """The blobs that a state needs."""
    records = [*state["files"].values(), *((state.get("previous") or {}).get("files") or {}).values()]
    edited = [before for before, _ in (state.get("replaced") or {}).values()]
    return [*(record[key] for record in records for key in ("before", "after")), *edited]


def status(request: Request, emit: Emit) -> Dict[str, Any]:
    """What is patched, told from the files themselves.

    ``state``: the worst of ``patches`` (clean when there is none). ``foreign``: files of ``package`` that differ from
    RECORD and are no doing of this state folder: edited by hand, or patched by somebody else.
    """
    patches = []
    for store in stores(request):
        recovered: Optional[str] = None
        busy = None
        try:
            with told("status"), store.locked(who(request)):
                recovered = store.recover()
        except AgentError as error:
            if error.kind != "PatchLocked":
                raise
            busy = error.message
        state = store.state()
        if not state.get("files") and not recovered and not busy:
            continue
        patches.append(dict(describe(store, state), recovered=recovered, busy=busy))
    order = (ORPHANED, EDITED, PARTLY, REINSTALLED, PATCHED)
    overall = next((name for name in order if any(p["state"] == name for p in patches)), CLEAN)
    ours = {file["file"] for patch in patches for file in patch["files"]}
    return {"state": overall, "patches": patches, "foreign": [file for file in _foreign(request) if file not in ours]}


def _foreign(request: Request) -> List[str]:
    if not request.get("package") or not (request.get("venv") or request.get("root")):
        return []
    if request.get("root"):
        return distinfo.foreign(request["root"], request["package"])
    try:
        folders = packages.site_folders(os.path.abspath(os.path.expanduser(request["venv"])))
    except AgentError:
        return []
    return sorted(file for folder in folders for file in distinfo.foreign(folder, request["package"]))
