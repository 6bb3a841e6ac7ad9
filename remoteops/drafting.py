"""From one finding to its edits, entered in drafts of the files."""

from __future__ import annotations

import builtins
import hashlib
import symtable
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from remoteops import edits, recipes
from remoteops.edits.source import decode
from remoteops.errors import PatchError
from remoteops.hunks import Lines

__all__ = ["Fix", "Planner", "identity", "resolve"]

Finding = Mapping[str, Any]
Placed = tuple[tuple[str, Mapping[str, Any]], ...]  # (file, edit)


@dataclass(frozen=True)
class Fix:
    """``id``: a recipe's, or the kind of a mechanical edit. ``edits``: (file, edit). ``findings``: ids it resolves."""

    id: str
    title: str
    why: str
    reference: str
    findings: tuple[str, ...]
    edits: Placed


def identity(finding: Finding) -> str:
    """The id of a finding; made from what it says where the audit gives none."""
    known = finding.get("id")
    if known:
        return str(known)
    text = "\0".join(str(finding.get(key)) for key in ("kind", "file", "line", "symbol", "detail"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def resolve(pattern: str | None, finding: Finding, known: Iterable[str]) -> list[str]:
    """Files that an edit's ``file`` (a glob) means; the finding's own where it says none."""
    if pattern is None:
        return [finding["file"]]
    return [file for file in known if fnmatchcase(file, pattern)]


def undefined(source: bytes) -> set[str]:
    """Names that functions read and that nothing in the file binds: a NameError waiting. Empty where that is not sure
    (a star import, text that does not parse).
    """
    try:
        table = symtable.symtable(source.decode("utf-8-sig"), "planned", "exec")
    except (SyntaxError, ValueError):
        return set()
    if b"import *" in source:
        return set()
    known = {*dir(builtins), "__file__", "__path__"}
    known |= {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    found: set[str] = set()
    pending = [*table.get_children()]
    while pending:
        inner = pending.pop()
        pending += inner.get_children()
        found |= {s.get_name() for s in inner.get_symbols() if s.is_referenced() and s.is_global()}
    return found - known


class Planner:
    """Drafts of the files, grown fix by fix; a fix that does not fit leaves them as they were."""

    def __init__(self, sources: Mapping[str, bytes]) -> None:
        self.sources = sources
        self._parsed: dict[str, edits.Draft] = {}
        self._drafts: dict[str, edits.Draft] = {}
        # file -> (fix key, edit), one an edit of its draft
        self._edits: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}

    def fix(self, finding: Finding, recipe: recipes.Recipe | None, known: Mapping[str, recipes.Recipe]) -> Fix:
        """The fix of one finding, entered in the drafts. Raises PatchError with the reason when there is none."""
        if recipe is not None:
            if recipe.impossible:
                raise PatchError(recipe.impossible)
            placed = self._recipe([recipe, *(known[name] for name in recipe.needs)], finding)
            return Fix(recipe.id, recipe.title, recipe.why, recipe.reference, (identity(finding),), placed)
        edit = recipes.mechanical(finding)
        if edit is None:
            raise PatchError(f"no fix is known ({finding['detail']}); mend it by hand")
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
            for file in {file for file, _ in found}:
                before_it = decode(self.sources[file], file).text.encode()
                unknown = undefined(self._drafts[file].text()) - undefined(before_it)
                if unknown:
                    names = ", ".join(sorted(unknown))
                    raise PatchError(f"recipe {wanted[0].id} writes names that {file} has not: {names}")
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
        files = resolve(edit.get("file"), finding, self.sources)
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
                drafts[file] = self._drafts[file].copy() if file in self._drafts else self._fresh(file)
            useful |= drafts[file].apply(edit)
            entered.append((file, edit))
        if not useful and any(self._fresh(file).apply(edit) for file, edit in placed):
            return  # another finding's fix has done it in this plan
        if not useful:  # an edit that finds itself done in the audited text cannot be what this finding needs
            file, edit = placed[0]
            if edit["edit"] in ("drop-keyword", "rename-keyword"):
                told = f"the call passes no {edit['keyword']} by name (it may come through ** or a partial)"
                raise PatchError(f"{file}:{edit.get('line', '')}: {told}; take it out by hand where it is given")
            raise PatchError(f"the edit is in {file} already, and the finding is there all the same")
        for file, edit in entered:
            self._edits.setdefault(file, []).append((_key(file, edit), edit))
        self._drafts.update(drafts)

    def _fresh(self, file: str) -> edits.Draft:
        """A draft of the audited text; it is parsed once."""
        if file not in self._parsed:
            self._parsed[file] = edits.Draft(self.sources[file], file)
        return self._parsed[file].copy()

    def results(self, fixes: Sequence[Fix]) -> dict[str, tuple[bytes, list[tuple[Fix, Lines]]]]:
        """Every file that changes: its planned bytes, and the lines there that each fix wrote."""
        planned: dict[str, tuple[bytes, list[tuple[Fix, Lines]]]] = {}
        for file, draft in self._drafts.items():
            result = draft.result()
            if result.data == self.sources[file]:
                continue
            behind = {key: [fix for fix in fixes if (file, edit) in fix.edits] for key, edit in self._edits[file]}
            planned[file] = (
                result.data,
                [
                    (fix, span)
                    for (key, _), group in zip(self._edits[file], result.changed, strict=True)
                    for span in group
                    for fix in behind[key]
                ],
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
