"""From an audit to a plan: which edits, in which files, and the diff with the finding behind each hunk. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from remoteops import recipes
from remoteops.drafting import Fix, Planner, identity
from remoteops.errors import PatchError, UsageError
from remoteops.hunks import Lines, carry, pieces

__all__ = ["FilePlan", "Fix", "Hunk", "Plan", "Remaining", "breaks", "converge", "identity", "plan_from"]

Finding = Mapping[str, Any]
Document = Mapping[str, Any]
ROUNDS = 4


@dataclass(frozen=True)
class Hunk:
    """One hunk of a unified diff, with the ids of the fixes and findings behind it."""

    text: str
    fixes: tuple[str, ...]
    findings: tuple[str, ...]


@dataclass(frozen=True)
class FilePlan:
    """``file`` as the findings name it. ``spans``: the lines of the planned text that each fix wrote."""

    file: str
    original: bytes
    planned: bytes
    spans: tuple[tuple[Fix, Lines], ...]

    @property
    def before(self) -> str:
        """sha256 of the bytes that were audited."""
        return hashlib.sha256(self.original).hexdigest()

    @property
    def after(self) -> str:
        """sha256 of the planned bytes."""
        return hashlib.sha256(self.planned).hexdigest()

    @property
    def hunks(self) -> tuple[Hunk, ...]:
        found = []
        for piece in pieces(self.original, self.planned):
            first, last = piece.new
            behind = [fix for fix, (start, end) in self.spans if start <= last + 1 and end >= first]
            found.append(
                Hunk(
                    piece.text,
                    tuple(dict.fromkeys(fix.id for fix in behind)),
                    tuple(dict.fromkeys(name for fix in behind for name in fix.findings)),
                )
            )
        return tuple(found)

    @property
    def diff(self) -> str:
        return f"--- a/{self.file}\n+++ b/{self.file}\n" + "".join(hunk.text for hunk in self.hunks)


@dataclass(frozen=True)
class Remaining:
    """A finding that the plan leaves, and why, in one line."""

    finding: Finding
    why: str


@dataclass(frozen=True)
class Plan:
    """What would be written. ``document``: the audit that it follows from; ``previews``: audits of the planned text.

    A fix can uncover a finding (a call of a function whose import failed before); the last preview has none left that a
    recipe could resolve.
    """

    document: Document
    files: tuple[FilePlan, ...]
    fixes: tuple[Fix, ...]
    remaining: tuple[Remaining, ...]
    previews: tuple[Document, ...] = field(default=())

    @property
    def empty(self) -> bool:
        return not self.files

    @property
    def diff(self) -> str:
        return "".join(file.diff for file in self.files)

    def finding(self, name: str) -> Finding:
        """The finding that an id in ``fixes`` or ``hunks`` names."""
        documents = (self.document, *self.previews)
        return next(f for document in documents for f in document["findings"] if identity(f) == name)

    def as_dict(self) -> dict[str, Any]:
        """The plan as a JSON document (schema remoteops.plan/1)."""
        return {
            "schema": "remoteops.plan/1",
            "consumer": self.document.get("consumer"),
            "provider": self.document.get("provider"),
            "files": [
                {
                    "file": f.file,
                    "before": f.before,
                    "after": f.after,
                    "diff": f.diff,
                    "hunks": [dataclasses.asdict(hunk) for hunk in f.hunks],
                }
                for f in self.files
            ],
            "fixes": [
                {
                    "id": x.id,
                    "title": x.title,
                    "why": x.why,
                    "reference": x.reference,
                    "findings": list(x.findings),
                    "edits": [{"file": file, **edit} for file, edit in x.edits],
                }
                for x in self.fixes
            ],
            "remaining": [{"finding": dict(r.finding), "why": r.why} for r in self.remaining],
            "breaks": sum(map(breaks, self.document["findings"])),
            "breaks_planned": sum(map(breaks, self.previews[-1]["findings"])) if self.previews else None,
        }


def breaks(finding: Finding) -> bool:
    """Whether a finding counts against the pair (proved or known by a contract), not merely as a risk."""
    return finding.get("confidence", "proved") in ("proved", "contract")


def converge(
    document: Document,
    sources: Mapping[str, bytes],
    audit: Callable[[Mapping[str, bytes]], Document],
    only: Sequence[str] = (),
    *,
    always: bool = False,
) -> Plan:
    """Plan, audit the planned text, and plan on until no fix uncovers another finding.

    ``sources``: every consumer file that has sites; ``audit``: planned files -> the audit of the consumer with them.
    Only an import that failed hides findings (whatever uses the name), so a plan that mends none is not audited before
    it is written, unless ``always``: the proof that follows the writing is that same audit.
    """
    plan = plan_from(document, sources, only)
    if not always and not any(f["kind"] in ("moved-symbol", "missing-symbol") for f in document["findings"]):
        return plan
    for _ in range(ROUNDS):
        if plan.empty:
            break
        preview = audit({file.file: file.planned for file in plan.files})
        known = {identity(f) for seen in (plan.document, *plan.previews) for f in seen["findings"]}
        fresh = [f for f in preview["findings"] if identity(f) not in known]
        files = plan.files
        plan = dataclasses.replace(plan, previews=(*plan.previews, preview))
        if fresh:
            plan = plan_from({**preview, "findings": fresh}, sources, only, base=plan)
        if plan.files == files:
            break
    return _honest(plan)


def _honest(plan: Plan) -> Plan:
    """A fix whose finding is there all the same in the last preview has not resolved it: that is told beforehand."""
    if not plan.previews:
        return plan
    there = {identity(f): f for f in plan.previews[-1]["findings"]}
    failed = [fix for fix in plan.fixes if any(name in there and breaks(there[name]) for name in fix.findings)]
    told = [
        Remaining(there[name], f"{fix.id} was tried, and the finding is there all the same")
        for fix in failed
        for name in fix.findings
        if name in there
    ]
    kept = tuple(
        dataclasses.replace(fix, findings=tuple(n for n in fix.findings if n not in there)) if fix in failed else fix
        for fix in plan.fixes
    )
    return dataclasses.replace(plan, fixes=kept, remaining=(*plan.remaining, *told))


def plan_from(
    document: Document, sources: Mapping[str, bytes], only: Sequence[str] = (), *, base: Plan | None = None
) -> Plan:
    """Plan the smallest edits that resolve the findings of an audit.

    ``document``: a remoteops.probe/1 document; ``sources``: file (as findings name it) -> its original bytes; ``only``:
    rule ids, kinds, recipe ids or finding ids to which the plan is limited; ``base``: the plan whose text was audited,
    when this one goes on from there. A finding that cannot be fixed is in ``remaining`` with the reason; nothing is
    raised for it.
    """
    started = {file.file: file for file in base.files} if base else {}
    planner = Planner({**sources, **{name: file.planned for name, file in started.items()}})
    known = recipes.load()
    fixes: list[Fix] = []
    remaining: list[Remaining] = []
    for finding in sorted(document["findings"], key=lambda f: (f["file"], f["line"], str(f.get("symbol")))):
        recipe = recipes.recipe_for(finding, known)
        if not _selected(finding, recipe, only):
            continue
        try:
            fix = planner.fix(finding, recipe, known)
        except (PatchError, UsageError) as error:
            remaining.append(Remaining(finding, error.message))
            continue
        same = next((i for i, old in enumerate(fixes) if old.id == fix.id and old.edits == fix.edits), None)
        if same is None:
            fixes.append(fix)
        else:
            fixes[same] = dataclasses.replace(fix, findings=(*fixes[same].findings, *fix.findings))
    results = planner.results(fixes)
    files = []
    for name in dict.fromkeys((*started, *results)):
        old = started.get(name)
        if name not in results:
            files.append(started[name])
            continue
        planned, spans = results[name]
        if old is not None:
            spans = [*carry(old.spans, old.planned, planned), *spans]
        files.append(FilePlan(name, old.original if old else sources[name], planned, tuple(spans)))
    if base is None:
        return Plan(document, tuple(files), tuple(fixes), tuple(remaining))
    return dataclasses.replace(
        base, files=tuple(files), fixes=(*base.fixes, *fixes), remaining=(*base.remaining, *remaining)
    )


def _selected(finding: Finding, recipe: recipes.Recipe | None, only: Sequence[str]) -> bool:
    if not only:
        return breaks(finding) or bool(recipe and recipe.risk)
    names = (finding.get("rule"), finding.get("kind"), identity(finding), finding.get("contract"), recipe and recipe.id)
    return any(fnmatchcase(str(name), wanted) for name in names if name for wanted in only)
