"""File transactions with quilt-like state: read, apply, revert, status, prove. Knows files and hashes only."""

from __future__ import annotations

import base64
import os
import shutil
import stat
import subprocess
import sys
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from remoteops.agent import distinfo
from remoteops.agent.journal import MISSING, Change, Store, hash_of, sha256
from remoteops.agent.protocol import AgentError
from remoteops.agent.venvusers import users_of

Request = Dict[str, Any]
Emit = Callable[..., None]
SCHEMA = "remoteops.patch-state/1"
CLEAN, PATCHED, PARTLY, EDITED, REINSTALLED, ORPHANED = "clean", "patched", "partly patched", "edited since", "reinstalled since", "orphaned"


# -- where things are -----------------------------------------------------------------------------------------------


def _folder(request: Request) -> str:
    state_dir: str = request.get("state_dir") or "~/.local/state/remoteops"
    return os.path.join(os.path.abspath(os.path.expanduser(state_dir)), "patches")


def _prefixes(request: Request) -> List[str]:
    found = [request.get("env", {}).get("PYTHONPYCACHEPREFIX"), os.environ.get("PYTHONPYCACHEPREFIX"),
             *request.get("pycache_prefixes", ())]
    return sorted({os.path.abspath(os.path.expanduser(prefix)) for prefix in found if prefix})


def _store(request: Request, root: str, package: str) -> Store:
    key = sha256(os.fsencode(os.path.realpath(root)))[:12]
    return Store(os.path.join(_folder(request), "%s-%s" % (package, key)), _prefixes(request))


def _place(request: Request) -> Tuple[str, str]:
    """(root, package): the folder that holds the package, and its import name."""
    package = request.get("package") or ""
    root = request.get("root") or ""
    paths = [item["path"] for item in request.get("files", ())]
    if not root and paths:
        before, found, _ = paths[0].rpartition("/%s/" % package)
        root = before if found else os.path.dirname(paths[0])
    if not package or not root:
        raise AgentError("UsageError", "a patch names its package and its files", tried="read the request")
    root = os.path.abspath(os.path.expanduser(root))
    for path in paths:
        if not os.path.abspath(path).startswith(os.path.join(root, "")):
            raise AgentError("UsageError", "%s lies outside %s" % (path, root), tried="read the request")
    return root, package


def _stores(request: Request) -> List[Store]:
    """Every store of this state folder that the request means (all; or one package, one root, one venv)."""
    folder = _folder(request)
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    found = []
    for name in names:
        store = Store(os.path.join(folder, name), _prefixes(request))
        if not (os.path.exists(store.state_path) or os.path.exists(store.journal_path)):
            continue
        state = store.state()
        if request.get("package") and state and state.get("package") != request["package"]:
            continue
        if request.get("root") and state and os.path.realpath(state["root"]) != os.path.realpath(os.path.expanduser(request["root"])):
            continue
        if request.get("venv") and state and not _in_venv(state, os.path.expanduser(request["venv"])):
            continue
        found.append(store)
    return found


def _in_venv(state: Dict[str, Any], venv: str) -> bool:
    inside = os.path.join(os.path.realpath(venv), "")
    return bool(state.get("venv") and os.path.realpath(state["venv"]) == os.path.realpath(venv)) or os.path.realpath(
        state["root"]).startswith(inside)


# -- verbs ----------------------------------------------------------------------------------------------------------


def read(request: Request, emit: Emit) -> Dict[str, Any]:
    """``files``: absolute paths -> each file's bytes and hash, and for a patched one the original's ("pristine")."""
    states = [(store, store.state()) for store in _stores({k: v for k, v in request.items() if k == "state_dir"})]
    files = []
    for path in request.get("files", ()):
        try:
            with open(path, "rb") as stream:
                data = stream.read()
                status = os.fstat(stream.fileno())
        except OSError as error:
            raise AgentError("PatchError", "cannot read %s: %s" % (path, error.strerror), tried="read the file to patch",
                             hint="check the venv in inventory.yaml") from error
        record = {"path": path, "sha256": sha256(data), "data": base64.b64encode(data).decode("ascii"),
                  "mode": stat.S_IMODE(status.st_mode), "nlink": status.st_nlink, "pristine": None}
        for store, state in states:
            known = state.get("files", {}).get(os.path.relpath(path, state.get("root") or "/"))
            if known and known["after"] == record["sha256"]:
                original = store.blob(known["before"])
                record["pristine"] = {"sha256": known["before"], "data": base64.b64encode(original).decode("ascii")}
        files.append(record)
    return {"files": files}


def pristine(request: Request, emit: Emit) -> Dict[str, Any]:
    """A folder that shows ``package`` as it was before our patch (links, and the originals), for auditing.

    ``path`` is null when the package is not patched or what is there is not our doing any more.
    """
    root, package = _place(request)
    store = _store(request, root, package)
    if not store.state() and not os.path.exists(store.journal_path):
        return {"path": None, "files": {}}
    with store.locked(_who(request)):
        store.recover()
        state = store.state()
        report = _report(store, state)
        files = state.get("files", {})
        if report["state"] not in (PATCHED, PARTLY) or not files:
            return {"path": None, "files": {}, "state": report["state"]}
        shadow = os.path.join(store.path, "pristine")
        shutil.rmtree(shadow, ignore_errors=True)
        _shadow(root, shadow, package, {rel: store.blob(known["before"]) for rel, known in files.items()})
    return {"path": shadow, "files": {rel: known["before"] for rel, known in files.items()}, "state": report["state"]}


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


def apply(request: Request, emit: Emit) -> Dict[str, Any]:
    """Put new bytes in place, all or none.

    ``files``: [{"path", "before" (hash of what was audited), "data" (base64)}], ``package``, ``venv``, ``meta`` (kept with
    the state), ``force`` (also when a process uses the venv). Files of an earlier patch that are not named go back to the
    original. Result: ``state``, ``changed`` (paths), ``restored`` (paths), ``already`` (nothing had to be done).
    """
    root, package = _place(request)
    store = _store(request, root, package)
    with store.locked(_who(request)):
        recovered = store.recover()
        old = store.state()
        known: Dict[str, Dict[str, Any]] = dict(old.get("files", {}))
        if known and _report(store, old)["state"] in (REINSTALLED, ORPHANED):
            known = {}  # what is there now is not what we patched: the old patch is history
        changes, files, contents = [], {}, []
        for item in request["files"]:
            path = os.path.abspath(item["path"])
            relative = os.path.relpath(path, root)
            data = base64.b64decode(item["data"])
            mine = known.pop(relative, None)
            current = hash_of(path)
            after = sha256(data)
            audited = item["before"]
            if current != audited and not (mine and current == mine["after"] and audited == mine["before"]):
                raise AgentError("FileChanged", "%s is not the file that was audited (%s)" % (
                    path, "it is gone" if current == MISSING else "another hash"), tried="compare hashes before patching",
                    hint="run fab patch again: it audits anew")
            original = mine["before"] if mine and current == mine["after"] else current
            if original == after:
                known[relative] = mine or {}
                continue
            contents.append(data)
            files[relative] = mine if mine and current == mine["after"] else _remember(path, original)
            files[relative] = dict(files[relative], after=after)
            if current == original:
                with open(path, "rb") as stream:
                    contents.append(stream.read())
            if current != after:
                changes.append(Change(path, current, after))
        restored = _undo(root, known, changes, request)
        if not changes:
            return {"state": PATCHED if files else CLEAN, "changed": [], "restored": [], "already": True, "recovered": recovered}
        _permitted(request, root, changes)
        for data in contents:
            store.keep(data)
        state = {"schema": SCHEMA, "root": root, "package": package, "venv": request.get("venv"),
                 "dist": distinfo.identity(root, package), "files": files, "applied_at": time.time(), "by": _who(request),
                 "meta": request.get("meta") or {}}
        store.commit(changes, state, "apply")
        return {"state": PATCHED if files else CLEAN, "changed": [c.path for c in changes if c.path not in restored],
                "restored": restored, "already": False, "recovered": recovered}


def _remember(path: str, digest: str) -> Dict[str, Any]:
    status = os.stat(path)
    return {"before": digest, "mtime_ns": status.st_mtime_ns, "mode": stat.S_IMODE(status.st_mode),
            "link": os.readlink(path) if os.path.islink(path) else None}


def _undo(root: str, known: Dict[str, Dict[str, Any]], changes: List[Change], request: Request) -> List[str]:
    """Add the changes that bring files back to the original; returns their paths."""
    restored = []
    for relative, record in sorted(known.items()):
        path = os.path.join(root, relative)
        current = hash_of(path)
        if not record or current == record["before"]:
            continue
        if current != record["after"] and not request.get("force"):
            raise AgentError("FileChanged", "%s was edited after it was patched" % path, tried="bring back the original",
                             hint="--force brings it back all the same; your edit is lost then")
        link = record.get("link")
        if link is not None and hash_of(os.path.join(os.path.dirname(path), link)) != record["before"]:
            link = None
        changes.append(Change(path, current, record["before"], record.get("mtime_ns"), link))
        restored.append(path)
    return restored


def revert(request: Request, emit: Emit) -> Dict[str, Any]:
    """Bring back the original bytes of what the request means: ``package`` and ``root``, or all patches of ``venv``.

    After a reinstall or an upgrade there is nothing to bring back: the state is forgotten ("forgotten").
    """
    results = []
    for store in _stores(request):
        with store.locked(_who(request)):
            store.recover()
            state = store.state()
            if not state.get("files"):
                continue
            root, package = state["root"], state["package"]
            report = _report(store, state)
            changes: List[Change] = []
            if report["state"] in (REINSTALLED, ORPHANED):
                outcome = "forgotten"
            else:
                _undo(root, state["files"], changes, request)
                outcome = "reverted" if changes else "forgotten"
            if changes:
                _permitted(request, root, changes)
            cleared = {"schema": SCHEMA, "root": root, "package": package, "venv": state.get("venv"), "files": {},
                       "reverted_at": time.time(), "by": _who(request), "meta": {}}
            store.commit(changes, cleared, "revert")
            results.append({"root": root, "package": package, "outcome": outcome, "was": report["state"],
                            "changed": [change.path for change in changes]})
    return {"reverted": results}


def status(request: Request, emit: Emit) -> Dict[str, Any]:
    """What is patched, told from the files themselves. ``state`` is the worst of ``patches`` (clean when there is none)."""
    patches = []
    for store in _stores(request):
        recovered: Optional[str] = None
        busy = None
        try:
            with store.locked(_who(request)):
                recovered = store.recover()
        except AgentError as error:
            if error.kind != "PatchLocked":
                raise
            busy = error.message
        state = store.state()
        if not state.get("files") and not recovered and not busy:
            continue
        patches.append(dict(_report(store, state), recovered=recovered, busy=busy))
    order = (ORPHANED, EDITED, PARTLY, REINSTALLED, PATCHED)
    overall = next((name for name in order if any(p["state"] == name for p in patches)), CLEAN)
    return {"state": overall, "patches": patches}


def _report(store: Store, state: Dict[str, Any]) -> Dict[str, Any]:
    """Where a patch stands: its own state and each file's."""
    root, package, known = state.get("root", ""), state.get("package", ""), state.get("files", {})
    recorded = distinfo.recorded(root, package, list(known)) if known else {}
    files, seen = [], set()
    for relative, record in sorted(known.items()):
        current = hash_of(os.path.join(root, relative))
        what = {record["after"]: PATCHED, record["before"]: "original", MISSING: MISSING}.get(current, EDITED)
        if what == EDITED and recorded[relative] == current:
            what = "reinstalled"
        entry = recorded[relative]
        files.append({"file": relative, "state": what, "after": record["after"], "record": "none" if entry is None else "matches" if entry == current else "differs"})
        seen.add(what)
    identity = distinfo.identity(root, package)
    installed = state.get("dist") is not None and identity != state.get("dist")
    if not known:
        verdict = CLEAN
    elif not os.path.isdir(os.path.join(root, package)) or seen == {MISSING}:
        verdict = ORPHANED
    elif "reinstalled" in seen or (installed and PATCHED not in seen and EDITED not in seen):
        verdict = REINSTALLED
    elif EDITED in seen:
        verdict = EDITED
    elif seen == {PATCHED}:
        verdict = PATCHED
    elif seen == {"original"}:
        verdict = EDITED if not installed else REINSTALLED
    else:
        verdict = PARTLY
    return {"root": root, "package": package, "state": verdict, "files": files, "applied_at": state.get("applied_at"),
            "by": state.get("by"), "meta": state.get("meta", {}), "version": (identity or {}).get("version"),
            "patched_version": (state.get("dist") or {}).get("version"),
            "record_differs": [f["file"] for f in files if f["record"] == "differs"]}


def _permitted(request: Request, root: str, changes: List[Change]) -> None:
    """Refuse early what the system would refuse halfway, and what would pull code from under a running job."""
    for folder in sorted({os.path.dirname(change.path) for change in changes}):
        if not os.access(folder, os.W_OK):
            raise AgentError("PatchError", "%s is not writable for this user; nothing was changed" % folder, tried="patch files there",
                             hint="name its owner as user or sudo_user in inventory.yaml, or use a venv of your own")
    if request.get("force"):
        return
    users = users_of([request.get("venv") or "", *([root] if not request.get("venv") else [])])
    if users:
        told = "; ".join("pid %d: %s" % (user["pid"], user["command"]) for user in users[:3])
        raise AgentError("PatchError", "%d running process%s the venv: %s" % (len(users), " uses" if len(users) == 1 else "es use", told),
                         tried="look for jobs that a patch would disturb", hint="wait or stop them (fab stop), or use --force", users=users)


def _who(request: Request) -> str:
    return str(request.get("operator") or os.environ.get("SSH_CLIENT", "").split(" ")[0] or os.environ.get("USER") or "uid %d" % os.getuid())


def prove(request: Request, emit: Emit) -> Dict[str, Any]:
    """Import ``modules`` in the venv's own interpreter, in a child. ``ok``, and on failure ``error`` (the last lines)."""
    venv = os.path.expanduser(request.get("venv") or "")
    python = os.path.join(venv, "bin", "python") if venv else sys.executable
    modules = list(request.get("modules") or ([request["module"]] if request.get("module") else []))
    if venv and not os.path.exists(python):
        raise AgentError("MissingVenv", "no interpreter at %s" % python, tried="import the patched modules", hint="set venv in inventory.yaml")
    env = dict(os.environ, PYTHONDONTWRITEBYTECODE="1", **{k: str(v) for k, v in (request.get("env") or {}).items()})
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    started = time.monotonic()
    try:
        done = subprocess.run([python, "-c", code, *modules], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, timeout=request.get("timeout", 300), cwd=os.path.expanduser("~"))
        tail = done.stderr.decode("utf-8", "replace").strip().splitlines()
        ok, error = done.returncode == 0, tail[-12:]
    except subprocess.TimeoutExpired:
        ok, error = False, ["no answer within %s s" % request.get("timeout", 300)]
    return {"ok": ok, "modules": modules, "error": [] if ok else error, "seconds": round(time.monotonic() - started, 3)}
