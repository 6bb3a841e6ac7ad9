"""Patches: audit -> plan -> show -> apply -> prove, or everything back as it was.

The plan follows from the audit of that very host, never from a version: a nightly called "0.16" may lack what release
0.16.0 has. Planning starts from the original files also on a host that is patched already, so that a plan that changed
(another provider was installed, a recipe got better) replaces the old patch instead of piling up on it.
"""

from __future__ import annotations

import base64
import contextlib
import fnmatch
import getpass
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from remoteops import probe, rules
from remoteops.door import using
from remoteops.errors import PatchError, UsageError

if TYPE_CHECKING:
    from remoteops import planning
    from remoteops.remote import Agent
    from remoteops.schema import Host

__all__ = ["Outcome", "Planned", "apply", "plan", "revert", "status"]

OnEvent = Callable[[dict[str, Any]], None]
EDITED = "edited since"


@dataclass(frozen=True)
class Planned:
    """A plan for one host. ``root``: the folder there that holds the consumer; ``state``: what ``fab patch
    --status`` says.

    ``done``: the host has exactly this patch already.
    """

    plan: planning.Plan
    root: str
    state: Mapping[str, Any]
    done: bool
    model: str | None = None  # the architecture class that it was made for

    def as_dict(self) -> dict[str, Any]:
        return {**self.plan.as_dict(), "root": self.root, "state": self.state["state"], "done": self.done}


@dataclass(frozen=True)
class Outcome:
    """What came of it. ``applied`` false: everything is as it was (or there was nothing to do: ``already``)."""

    applied: bool
    already: bool
    changed: tuple[str, ...]
    restored: tuple[str, ...]
    proof: Mapping[str, Any]
    remaining: tuple[planning.Remaining, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": "remoteops.patch/1",
            "applied": self.applied,
            "already": self.already,
            "changed": list(self.changed),
            "restored": list(self.restored),
            "proof": dict(self.proof),
            "remaining": [{"finding": dict(r.finding), "why": r.why} for r in self.remaining],
        }


def plan(host: Host, *, only: Sequence[str] = (), model: str | None = None, agent: Agent | None = None) -> Planned:
    """Audit the host's consumer (as it was before any patch of ours) and plan the edits. Writes nothing.

    ``only``: rules, kinds, recipes or finding ids; ``model``: the architecture class, where the audit should judge that
    one alone. Raises what the link and the audit raise, and UsageError for an ``only`` that can mean nothing.
    """
    _meant(only)
    threading.Thread(target=_warm, daemon=True).start()
    with using(host, agent) as asked:
        first = asked.call("patch.audit", _audit_request(host, model, package=host.workload.consumer))
        root, state = first["root"], first["state"]

        def preview(contents: Mapping[str, bytes]) -> dict[str, Any]:
            text = {file: base64.b64encode(data).decode() for file, data in contents.items()}
            answer = asked.call("patch.audit", _audit_request(host, model, contents=text, root=root))
            document: dict[str, Any] = answer["document"]
            return document

        from remoteops import planning

        sources = {file: base64.b64decode(data) for file, data in first["sources"].items()}
        found = planning.converge({**first["document"], "host": host.name}, sources, preview, only)
        return Planned(found, root, state, _done(found, state), model)


def _meant(only: Sequence[str]) -> None:
    """Raises UsageError for a name that is no rule, kind, recipe or finding id: it would silently select nothing."""
    import difflib
    import re

    from remoteops import recipes

    known = sorted({*rules.all_rules(), *rules.KINDS, *recipes.load()})
    for name in only:
        if not fnmatch.filter(known, name) and not re.fullmatch(r"[0-9a-f]{8,}", name):
            near = difflib.get_close_matches(name, known, 1)
            raise UsageError(
                f"--only {name}: there is no such rule, recipe or finding",
                tried="rules and recipes that this version knows",
                hint=f"did you mean '{near[0]}'?" if near else "fab probe names the rule of each finding",
            )


def _warm() -> None:
    """Load the parser while the host audits: it takes about as long. A fault shows where it is needed."""
    with contextlib.suppress(Exception):
        from remoteops import planning, recipes

        assert planning
        recipes.load()


def _done(found: planning.Plan, state: Mapping[str, Any]) -> bool:
    """Whether the host has exactly this patch."""
    known = {file["file"]: file for patch in state["patches"] for file in patch["files"]}
    in_force = bool(known) and all(file["state"] == "patched" for file in known.values())
    return in_force and {name: file["after"] for name, file in known.items()} == {f.file: f.after for f in found.files}


def apply(
    host: Host,
    planned: Planned,
    *,
    force: bool = False,
    prove: bool = True,
    agent: Agent | None = None,
    on_event: OnEvent | None = None,
) -> Outcome:
    """Write the plan, then prove it: audit again and import the patched modules in the host's venv.

    Raises PatchError when the proof fails (everything is back as it was then), when a running process uses the venv
    (unless ``force``), or when the host refuses; FileChanged when a file is not the one audited; PatchLocked.
    """
    tell = on_event or (lambda event: None)
    with using(host, agent) as asked:
        found = planned.plan
        # What was edited since is audited as it is, with the patch in it: an empty plan is no reason to take it out.
        edited = planned.state["state"] == EDITED
        if found.empty and (edited or not planned.state["patches"]):
            return Outcome(False, True, (), (), {}, found.remaining)
        files = [
            {"path": f"{planned.root}/{f.file}", "before": f.before, "data": base64.b64encode(f.planned).decode()}
            for f in found.files
        ]
        meta = {
            "fixes": [{"id": fix.id, "title": fix.title, "findings": list(fix.findings)} for fix in found.fixes],
            "provider": found.document.get("provider"),
            "diff": found.diff,
        }
        tell({"event": "phase", "phase": "apply"})
        done = asked.call(
            "patch.apply",
            _request(
                host,
                files=files,
                package=host.workload.consumer,
                root=planned.root,
                meta=meta,
                force=force,
                keep=edited,
            ),
        )
        if done["already"]:
            return Outcome(False, True, (), (), {}, found.remaining)
        try:
            proof = _prove(asked, host, planned, tell, imports=prove)
        except BaseException as error:
            _restore(asked, host, planned)
            if isinstance(error, _ImportFails):
                raise _blame(asked, host, planned, error) from None
            raise
        return Outcome(True, False, tuple(done["changed"]), tuple(done["restored"]), proof, found.remaining)


def _restore(asked: Agent, host: Host, planned: Planned) -> None:
    asked.call("patch.revert", _request(host, package=host.workload.consumer, root=planned.root, force=True, undo=True))


def _prove(asked: Agent, host: Host, planned: Planned, tell: OnEvent, *, imports: bool) -> dict[str, Any]:
    """Audit what is installed now and import it. Raises PatchError naming what is still broken."""
    from remoteops import planning

    tell({"event": "phase", "phase": "audit"})
    again = asked.call("audit", _audit_request(host, planned.model))
    shown = (planned.plan.previews or (planned.plan.document,))[-1]
    expected = {planning.identity(f) for f in shown["findings"]}
    claimed = {name for fix in planned.plan.fixes for name in fix.findings}
    broken = [f for f in again["findings"] if planning.breaks(f)]
    left = [f for f in broken if planning.identity(f) in claimed or planning.identity(f) not in expected]
    if left:
        told = "; ".join(f"{f['file']}:{f['line']} {f['kind']} {f['symbol']} ({f['detail']})" for f in left[:3])
        raise PatchError(
            f"the patch did not resolve what it claims, so it was taken back: {told}",
            host=host.name,
            tried="audit again after patching",
            hint="this is a defect of a recipe: please report it",
            findings=left,
        )
    proof: dict[str, Any] = {
        "audit": {"breaks": len(broken), "sites": again.get("sites"), "seconds": again.get("seconds")}
    }
    modules = [file.file[:-3].replace("/", ".").removesuffix(".__init__") for file in planned.plan.files]
    if imports and modules:
        tell({"event": "phase", "phase": "import"})
        found = asked.call("patch.prove", _request(host, modules=modules, root=planned.root))
        if not found["ok"]:
            raise _ImportFails(
                "the patched modules do not import, so the patch was taken back: " + _last(found["error"]),
                host=host.name,
                tried="import " + ", ".join(modules),
                hint="this is a defect of a recipe: please report it",
                error=found["error"],
                modules=modules,
            )
        proof["import"] = {"modules": modules, "seconds": found["seconds"]}
    return proof


class _ImportFails(PatchError):
    """The proof by import failed; ``data["error"]``: the last lines of what the interpreter said."""


def _blame(asked: Agent, host: Host, planned: Planned, error: _ImportFails) -> PatchError:
    """The same import once more, now without the patch: it tells whose fault it is."""
    lines, modules = error.data["error"], error.data["modules"]
    found = asked.call("patch.prove", _request(host, modules=modules, root=planned.root))
    if found["ok"] or _last(found["error"]) != _last(lines):
        return PatchError(error.message, host=host.name, tried=error.tried, hint=error.hint, error=lines)
    place = next((line.strip() for line in reversed(lines) if line.lstrip().startswith("File ")), "")
    return PatchError(
        f"{host.workload.consumer} does not import in this venv, with the patch or without: {_last(lines)}; "
        "the patch was taken back",
        host=host.name,
        tried=error.tried,
        hint=(place + ": " if place else "") + "mend the venv (a package that is missing or too new), then again",
        error=lines,
    )


def _last(lines: Sequence[str]) -> str:
    return lines[-1] if lines else "the interpreter said nothing"


def revert(host: Host, *, force: bool = False, agent: Agent | None = None) -> dict[str, Any]:
    """Bring back the original bytes; after a reinstall only forget. Result: ``reverted`` (a record a package)."""
    with using(host, agent) as asked:
        done = asked.call("patch.revert", _request(host, package=host.workload.consumer, force=force))
        return {"schema": "remoteops.patch-revert/1", "host": host.name, **done}


def status(host: Host, *, agent: Agent | None = None) -> dict[str, Any]:
    """clean, patched, partly patched, edited since, reinstalled since or orphaned; and each file's own state.

    ``foreign``: files that differ from what pip recorded and that no patch of ours accounts for.
    """
    with using(host, agent) as asked:
        told = asked.call("patch.status", _request(host, package=host.workload.consumer))
        return {"schema": "remoteops.patch-status/1", "host": host.name, **told}


def _audit_request(host: Host, model: str | None, **fields: Any) -> dict[str, Any]:
    return {**probe.audit_request(host, model=model), **({**_request(host), **fields} if fields else {})}


def _request(host: Host, **fields: Any) -> dict[str, Any]:
    return {
        "state_dir": host.state_dir,
        "cache_dir": host.cache_dir,
        "venv": host.venv,
        "env": {**host.env, **host.workload.env},
        "operator": f"{getpass.getuser()}@{socket.gethostname()}",
        **fields,
    }
