"""Where patch state lies on the host, and what it says about the files as they are now."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Dict, Iterator, List, Tuple

from remoteops.agent import distinfo
from remoteops.agent.journal import MISSING, Change, Store, hash_of, refused, sha256
from remoteops.agent.protocol import AgentError
from remoteops.agent.venvusers import users_of

Request = Dict[str, Any]
SCHEMA = "remoteops.patch-state/1"
CLEAN, PATCHED, PARTLY, EDITED = "clean", "patched", "partly patched", "edited since"
REINSTALLED, ORPHANED = "reinstalled since", "orphaned"


def _folder(request: Request) -> str:
    state_dir: str = request.get("state_dir") or "~/.local/state/remoteops"
    return os.path.join(os.path.abspath(os.path.expanduser(state_dir)), "patches")


def prefixes(request: Request) -> List[str]:
    found = [
        request.get("env", {}).get("PYTHONPYCACHEPREFIX"),
        os.environ.get("PYTHONPYCACHEPREFIX"),
        *request.get("pycache_prefixes", ()),
    ]
    return sorted({os.path.abspath(os.path.expanduser(prefix)) for prefix in found if prefix})


def store_of(request: Request, root: str, package: str) -> Store:
    key = sha256(os.fsencode(os.path.realpath(root)))[:12]
    return Store(os.path.join(_folder(request), "%s-%s" % (package, key)), prefixes(request))


def place(request: Request) -> Tuple[str, str]:
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


def stores(request: Request) -> List[Store]:
    """Every store of this state folder that the request means (all; or one package, one root, one venv)."""
    folder = _folder(request)
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    found = []
    for name in names:
        store = Store(os.path.join(folder, name), prefixes(request))
        if not (os.path.exists(store.state_path) or os.path.exists(store.journal_path)):
            continue
        state = store.state()
        if request.get("package") and state and state.get("package") != request["package"]:
            continue
        if (
            request.get("root")
            and state
            and os.path.realpath(state["root"]) != os.path.realpath(os.path.expanduser(request["root"]))
        ):
            continue
        if request.get("venv") and state and not _in_venv(state, os.path.expanduser(request["venv"])):
            continue
        found.append(store)
    return found


def _in_venv(state: Dict[str, Any], venv: str) -> bool:
    inside = os.path.join(os.path.realpath(venv), "")
    return bool(state.get("venv") and os.path.realpath(state["venv"]) == os.path.realpath(venv)) or os.path.realpath(
        state["root"]
    ).startswith(inside)


@contextlib.contextmanager
def told(operation: str) -> Iterator[None]:
    """What the system refuses outside a transaction is told like what it refuses inside."""
    try:
        yield
    except OSError as error:
        raise refused(error, operation) from error


def describe(store: Store, state: Dict[str, Any]) -> Dict[str, Any]:
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
        files.append(
            {
                "file": relative,
                "state": what,
                "after": record["after"],
                "record": "none" if entry is None else "matches" if entry == current else "differs",
            }
        )
        seen.add(what)
    identity = distinfo.identity(root, package)
    # inode and time of RECORD also change when a venv is copied; what it says changes with another release only
    then = state.get("dist") or {}
    installed = bool(then) and any((identity or {}).get(key) != then.get(key) for key in ("name", "version", "record"))
    if not known:
        verdict = CLEAN
    elif not os.path.isdir(os.path.join(root, package)):
        verdict = ORPHANED
    elif seen == {PATCHED}:
        verdict = PATCHED
    elif PATCHED not in seen and (installed or "reinstalled" in seen or seen == {"original"}):
        verdict = REINSTALLED
    elif seen == {MISSING}:
        verdict = ORPHANED
    elif seen <= {PATCHED, "original"}:
        verdict = PARTLY
    else:
        verdict = EDITED
    return {
        "root": root,
        "package": package,
        "state": verdict,
        "files": files,
        "applied_at": state.get("applied_at"),
        "by": state.get("by"),
        "meta": state.get("meta", {}),
        "version": (identity or {}).get("version"),
        "patched_version": (state.get("dist") or {}).get("version"),
        "record_differs": [f["file"] for f in files if f["record"] == "differs"],
    }


def permitted(request: Request, root: str, changes: List[Change]) -> None:
    """Refuse early what the system would refuse halfway, and what would pull code from under a running job."""
    for folder in sorted({os.path.dirname(change.path) for change in changes}):
        if not os.access(folder, os.W_OK):
            raise AgentError(
                "PatchError",
                "%s is not writable for this user; nothing was changed" % folder,
                tried="patch files there",
                hint="name its owner as user or sudo_user in inventory.yaml, or use a venv of your own",
            )
    if request.get("force"):
        return
    users = users_of([request.get("venv") or "", *([root] if not request.get("venv") else [])])
    if users:
        told = "; ".join("pid %d: %s" % (user["pid"], user["command"]) for user in users[:3])
        raise AgentError(
            "PatchError",
            "%d running process%s the venv: %s" % (len(users), " uses" if len(users) == 1 else "es use", told),
            tried="look for jobs that a patch would disturb",
            hint="wait or stop them (fab stop), or use --force",
            users=users,
        )


def who(request: Request) -> str:
    return str(
        request.get("operator")
        or os.environ.get("SSH_CLIENT", "").split(" ")[0]
        or os.environ.get("USER")
        or "uid %d" % os.getuid()
    )
