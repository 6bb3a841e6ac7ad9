"""From findings to a plan: which edits, in which files, and the diff with the finding behind each hunk. Pure."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from remoteops import edits, recipes
from remoteops.errors import PatchError, UsageError

__all__ = ["FilePlan", "Fix", "Hunk", "Plan", "Remaining", "breaks", "files_for", "identity", "plan_from"]

Finding = Mapping[str, Any]
Placed = tuple[tuple[str, Mapping[str, Any]], ...]  # (file, edit)


@dataclass(frozen=True)
class Fix:
    """``id``: a recipe's, or the kind of a mechanical edit. ``edits`` are (file, edit). ``findings``: ids it
    resolves.
    """

    id: str
    title: str
    why: str
    reference: str
    findings: tuple[str, ...]
    edits: tuple[tuple[str, Mapping[str, Any]], ...]


@dataclass(frozen=True)
class Hunk:
    """One hunk of a unified diff, with the ids of the fixes and findings behind it."""

    text: str
    fixes: tuple[str, ...]
    findings: tuple[str, ...]


@dataclass(frozen=True)
class FilePlan:
    """``file`` as the findings name it; hashes are sha256 of the bytes audited and of the bytes planned."""

    file: str
    original: bytes
    planned: bytes
    hunks: tuple[Hunk, ...]

    @property
    def before(self) -> str:
        return hashlib.sha256(self.original).hexdigest()

    @property
    def after(self) -> str:
        return hashlib.sha256(self.planned).hexdigest()

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
    """What would be written. ``document`` is the audit that it follows from."""

    document: Mapping[str, Any]
    files: tuple[FilePlan, ...]
    fixes: tuple[Fix, ...]
    remaining: tuple[Remaining, ...]

    @property
    def empty(self) -> bool:
        return not self.files

    @property
    def diff(self) -> str:
        return "".join(file.diff for file in self.files)

    def finding(self, name: str) -> Finding:
        """The finding that an id in ``fixes`` or ``hunks`` names."""
        return next(f for f in self.document["findings"] if identity(f) == name)

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
                    "hunks": [{"text": h.text, "fixes": list(h.fixes), "findings": list(h.findings)} for h in f.hunks],
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
        }


def breaks(finding: Finding) -> bool:
    """Whether a finding counts against the pair (proved or known by a contract), not merely as a risk."""
    return finding.get("confidence", "proved") in ("proved", "contract")


def identity(finding: Finding) -> str:
    known = finding.get("id")
    if known:
        return str(known)
    text = "\0".join(str(finding.get(key)) for key in ("kind", "file", "line", "symbol", "detail"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def files_for(document: Mapping[str, Any], only: Sequence[str] = ()) -> list[str]:
    """The files whose text a plan needs: those with findings, and those that recipes name besides."""
    known = list(document.get("files") or ())
    wanted: dict[str, None] = {}
    for finding in document["findings"]:
        recipe = recipes.recipe_for(finding, recipes.load())
        if not _selected(finding, recipe, only):
            continue
        wanted[finding["file"]] = None
        for variant in recipe.variants if recipe else ():
            for edit in variant:
                for file in _resolve(edit.get("file"), finding, known):
                    wanted[file] = None
    return list(wanted)


def plan_from(document: Mapping[str, Any], sources: Mapping[str, bytes], only: Sequence[str] = ()) -> Plan:
    """Plan the smallest edits that resolve the findings of an audit.

    ``document``: a remoteops.probe/1 document; ``sources``: file (as findings name it) -> the bytes that were audited;
    ``only``: rule ids, kinds, recipe ids or finding ids to which the plan is limited. A finding that cannot be fixed
    is in
    ``remaining`` with the reason; nothing is raised for it.
    """
    planner = _Planner(sources)
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
            fixes[same] = Fix(
                fix.id, fix.title, fix.why, fix.reference, (*fixes[same].findings, *fix.findings), fix.edits
            )
    return Plan(document, tuple(planner.files(fixes)), tuple(fixes), tuple(remaining))


def _selected(finding: Finding, recipe: recipes.Recipe | None, only: Sequence[str]) -> bool:
    if not breaks(finding) and not (recipe and recipe.risk) and not only:
        return False
    if not only:
        return True
    names = {
        str(finding.get("rule")),
        str(finding.get("kind")),
        identity(finding),
        str(finding.get("contract")),
        recipe.id if recipe else "",
    }
    return any(fnmatchcase(name, wanted) for name in names if name for wanted in only)


def _resolve(pattern: str | None, finding: Finding, known: Iterable[str]) -> list[str]:
    """Files that an edit's ``file`` (a glob) means; the finding's own where it says none."""
    if pattern is None:
        return [finding["file"]]
    return [file for file in known if fnmatchcase(file, pattern)]


class _Planner:
    """Drafts of the files, grown fix by fix; a fix that does not fit leaves them as they were."""

    def __init__(self, sources: Mapping[str, bytes]) -> None:
        self.sources = sources
        self._drafts: dict[str, edits.Draft] = {}
        self._edits: dict[
            str, list[tuple[str, Mapping[str, Any]]]
        ] = {}  # file -> (fix key, edit), one an edit of its draft

    def fix(self, finding: Finding, recipe: recipes.Recipe | None, known: Mapping[str, recipes.Recipe]) -> Fix:
        """The fix of one finding, entered in the drafts. Raises PatchError with the reason when there is none."""
        if recipe is not None:
            if recipe.impossible:
                raise PatchError(recipe.impossible)
            placed = self._recipe([recipe, *(known[name] for name in recipe.needs)], finding)
            return Fix(recipe.id, recipe.title, recipe.why, recipe.reference, (identity(finding),), placed)
        edit = recipes.mechanical(finding)
        if edit is None:
            raise PatchError(f"no fix is known for this {finding['kind']}: {finding['symbol']} ({finding['detail']})")
        pair = ((finding["file"], _placed(edit, finding)),)
        self._enter(pair)
        return Fix(
            str(edit["edit"]),
            _title(edit),
            str(finding.get("error") or ""),
            str(finding.get("now_at") or ""),
            (identity(finding),),
            pair,
        )

    def _recipe(self, wanted: Sequence[recipes.Recipe], finding: Finding) -> Placed:
        """The first variant of each recipe whose anchors are all there."""
        before = dict(self._drafts), {file: list(entered) for file, entered in self._edits.items()}
        found: list[tuple[str, Mapping[str, Any]]] = []
        try:
            for recipe in wanted:
                found += self._variant(recipe, finding)
        except PatchError:
            self._drafts, self._edits = before
            raise
        return tuple(found)

    def _variant(self, recipe: recipes.Recipe, finding: Finding) -> Placed:
        refusal = PatchError(f"recipe {recipe.id} has no edits")
        for variant in recipe.variants:
            try:
                placed = tuple((self._file(recipe, edit, finding), _placed(edit, finding)) for edit in variant)
                self._enter(placed)
                return placed
            except PatchError as error:
                refusal = error
        raise refusal

    def _file(self, recipe: recipes.Recipe, edit: Mapping[str, Any], finding: Finding) -> str:
        files = _resolve(edit.get("file"), finding, self.sources)
        if len(files) != 1:
            raise PatchError(f"recipe {recipe.id}: {edit.get('file')} names {len(files)} files here")
        return files[0]

    def _enter(self, placed: Placed) -> None:
        drafts: dict[str, edits.Draft] = {}
        useful = False
        entered: list[tuple[str, Mapping[str, Any]]] = []
        for file, edit in placed:
            if file not in self.sources:
                raise PatchError(f"{file} was not read")
            if any(edit == old for _, old in self._edits.get(file, ())):
                useful = True
                continue
            if file not in drafts:
                drafts[file] = (self._drafts.get(file) or edits.Draft(self.sources[file], file)).copy()
            useful |= drafts[file].apply(edit)
            entered.append((file, edit))
        if not useful:  # an edit that finds itself done cannot be what this finding needs
            raise PatchError(f"the edit is in {placed[0][0]} already, and the finding is there all the same")
        for file, edit in entered:
            self._edits.setdefault(file, []).append((_key(file, edit), edit))
        self._drafts.update(drafts)

    def files(self, fixes: Sequence[Fix]) -> list[FilePlan]:
        """Every file that changes."""
        planned = []
        for file, draft in self._drafts.items():
            result = draft.result()
            if result.data == self.sources[file]:
                continue
            behind = {key: [fix for fix in fixes if (file, edit) in fix.edits] for key, edit in self._edits[file]}
            spans = [
                (fix, span)
                for (key, _), group in zip(self._edits[file], result.changed, strict=True)
                for span in group
                for fix in behind[key]
            ]
            planned.append(
                FilePlan(file, self.sources[file], result.data, _hunks(self.sources[file], result.data, spans))
            )
        return planned


def _key(file: str, edit: Mapping[str, Any]) -> str:
    return f"{file} {sorted(edit.items(), key=str)}"


def _placed(edit: Mapping[str, Any], finding: Finding) -> Mapping[str, Any]:
    """The edit with the finding's position and scope, unless it names a scope or a file of its own."""
    placed = {key: value for key, value in edit.items() if key != "file"}
    if "file" in edit or "scope" in edit or edit["edit"] == "replace-function":
        return placed
    anchor = finding.get("anchor") or {}
    placed.setdefault("line", anchor.get("line") or finding["line"])
    for key in ("column", "end_line", "end_column"):
        if anchor.get(key) is not None:
            placed.setdefault(key, anchor[key])
    if finding.get("scope"):
        placed.setdefault("scope", finding["scope"])
    return placed


def _title(edit: Mapping[str, Any]) -> str:
    told = {
        "drop-keyword": "drop {keyword}= from {call}()",
        "add-keyword": "pass {keyword}={value} to {call}()",
        "rename-keyword": "call {keyword}= of {call}() {to}=",
        "rename-import": "import {name} from where it is now: {to}",
        "rename-attribute": "use .{to} for .{attribute}",
    }.get(str(edit["edit"]), str(edit["edit"]))
    return told.format(**edit)


def _hunks(before: bytes, after: bytes, spans: Sequence[tuple[Fix, tuple[int, int]]]) -> tuple[Hunk, ...]:
    old, new = (data.decode("utf-8", "replace").splitlines(keepends=True) for data in (before, after))
    found = []
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(3):
        first, last = group[0], group[-1]
        lines = [f"@@ -{_range(first[1], last[2])} +{_range(first[3], last[4])} @@\n"]
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                lines += [" " + line for line in old[i1:i2]]
            else:
                lines += ["-" + line for line in old[i1:i2]] + ["+" + line for line in new[j1:j2]]
        text = "".join(
            line if line.endswith(("\n", "\r")) else line + "\n\\ No newline at end of file\n" for line in lines
        )
        behind = [fix for fix, (start, end) in spans if start <= last[4] + 1 and end >= first[3] + 1]
        found.append(
            Hunk(
                text,
                tuple(dict.fromkeys(fix.id for fix in behind)),
                tuple(dict.fromkeys(name for fix in behind for name in fix.findings)),
            )
        )
    return tuple(found)


def _range(start: int, stop: int) -> str:
    """A hunk header's range, as diff writes it."""
    length = stop - start
    return f"{start + 1}" if length == 1 else f"{start if length == 0 else start + 1},{length}"
