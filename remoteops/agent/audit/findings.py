"""Judged sites to the findings and the document that the user gets."""

from __future__ import annotations

import ast
import hashlib
import re
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

from remoteops.agent.audit import sites as S
from remoteops.agent.audit.modules import last_name
from remoteops.agent.audit.moved import Moved
from remoteops.agent.audit.sites import Problem, Site

if TYPE_CHECKING:
    from remoteops.agent.audit.query import Context

KEYS = (
    "rule",
    "kind",
    "confidence",
    "symbol",
    "detail",
    "file",
    "line",
    "when",
    "error",
    "was",
    "now",
    "now_at",
    "check",
    "fix",
)
RULES = {
    "missing-symbol": "missing-symbol",
    "moved-symbol": "moved-symbol",
    "unknown-kwarg": "unknown-kwarg",
    "missing-required": "missing-required",
    "too-many-positional": "too-many-positional",
    "missing-attribute": "missing-attribute",
    "override-mismatch": "override-mismatch",
}
START = re.compile(
    r"(?:^|\.)(?:__init__|__new__|_?_?(?:init|setup|set_up|load|build|create|make|configure|start|from_)\w*)$"
)


def document(context: Context) -> Dict[str, Any]:
    """The remoteops.probe/1 document without ``seconds``."""
    found = [f for site in context.sites for f in of_site(site, context)]
    found += evaluated(context)
    unique: Dict[str, Dict[str, Any]] = {}
    for finding in found:
        place = "\0".join((finding["file"], str(finding["line"]), finding["kind"], finding["detail"] or ""))
        if (
            finding["kind"] == "moved-symbol"
        ):  # its detail is the new place: names that moved together stand on one line
            place += "\0" + finding["symbol"]
        old = unique.get(place)
        if old is None or (old["confidence"] == "risk" and finding["confidence"] != "risk"):
            unique[place] = finding
    findings = sorted(unique.values(), key=lambda f: (f["file"], f["line"], f["kind"], f["detail"]))
    live = [s for s in context.sites if s.status != S.DEAD]
    document: Dict[str, Any] = {
        "schema": "remoteops.probe/1",
        "host": None,
        "consumer": _tree(context.consumer),
        "provider": _tree(context.provider),
        "baseline": None,
        "sites": len(live),
        "ok": sum(s.status in (S.OK, S.GUARDED) for s in live),
        "unresolved": [_unresolved(s) for s in live if s.status == S.UNRESOLVED]
        + context.unresolved_files()
        + context.undecided,
        "findings": findings,
        "seconds": 0.0,
        "files": context.file_hashes(),
    }
    if context.request.get("all"):
        document["sites_list"] = [s.record() for s in context.sites]
    document.update(context.extra)
    return document


def evaluated(context: Context) -> List[Dict[str, Any]]:
    """Findings of the contracts in the request; those that stay undecided go to ``context.undecided``."""
    from remoteops.agent.audit import contracts
    from remoteops.agent.audit.shapes import Provider
    from remoteops.agent.audit.usage import Consumer, Module

    if not context.request.get("contracts"):
        return []
    provider = Provider(context.provider, context.index, context.recorder.classes)
    modules = {m.file: Module(m.file, m.source.text) for m in context.contract_modules()}
    calls = [(s.file, s.line, s.column, s.reached, s.symbol) for s in context.calls()]
    consumer = Consumer(modules, calls, finish=lambda finding: finish(finding, context))
    found, undecided = contracts.evaluate(
        context.request["contracts"], provider, consumer, context.request.get("model")
    )
    context.undecided.extend(undecided)
    return found


def finish(finding: Dict[str, Any], context: Context) -> Dict[str, Any]:
    """Completes a finding that another layer made: id, and every key of the schema."""
    for key in KEYS:
        finding.setdefault(key, None)
    finding.setdefault("scope", "")
    finding.setdefault("contract", None)
    finding["id"] = identity(
        finding["rule"], finding["file"], finding["scope"], finding["symbol"] or "", finding["detail"] or ""
    )
    return finding


def _tree(tree: Any) -> Dict[str, Any]:
    return {"package": tree.package, "version": tree.version, "path": tree.path, "distribution": tree.distribution}


def _unresolved(site: Site) -> Dict[str, Any]:
    return {
        "file": site.file,
        "line": site.line,
        "symbol": site.reached or site.symbol,
        "reason": site.reason or "could not be followed",
        "scope": site.scope,
    }


def identity(rule: str, file: str, scope: str, symbol: str, detail: str) -> str:
    """A stable name of a finding: the same after lines moved."""
    return hashlib.sha256("\0".join((rule, file, scope, symbol, detail)).encode("utf-8", "replace")).hexdigest()[:12]


def of_site(site: Site, context: Context) -> List[Dict[str, Any]]:
    """The findings of one site."""
    if site.status not in (S.BREAK, S.RISK):
        return []
    return [_finding(site, problem, context) for problem in site.problems]


def _finding(site: Site, problem: Problem, context: Context) -> Dict[str, Any]:
    kind, now, now_at, fix = problem.kind, problem.now, problem.now_at, None
    if kind in ("missing-symbol", "missing-attribute"):
        kind, now, now_at, fix = _place(site, problem, context)
    elif kind == "unknown-kwarg":
        fix = {"edit": "drop-keyword", "call": _called(site), "keyword": problem.detail}
        renamed = context.moved.renamed_parameter(site, problem.detail)
        if renamed:
            now = "%s; %s" % (renamed["why"], now)
            fix = {"edit": "rename-keyword", "call": _called(site), "keyword": problem.detail, "to": renamed["new"]}
    detail = problem.detail
    if kind == "moved-symbol":
        detail = "now at %s" % now[len("now ") :].rpartition(".")[0]
    elif kind == "missing-attribute" and fix is not None:
        detail = "%s: renamed to %s" % (problem.detail, fix["to"])
    confidence = "proved" if problem.sure and site.status == S.BREAK else "risk"
    return make(
        site,
        rule=RULES.get(kind, kind),
        kind=kind,
        confidence=confidence,
        symbol=site.reached or site.symbol,
        detail=detail,
        error=("%s: %s" % (problem.error, problem.message)) if problem.message else problem.error,
        when=when(site, context),
        was=problem.was or None,
        now=now or None,
        now_at=now_at or None,
        check=check(site, kind, problem, context),
        fix=fix,
        note=site.reason or None,
        classes=problem.extra.get("classes"),
    )


def _called(site: Site) -> str:
    """The last name of what a call calls, as it is written."""
    node = site.node.func if isinstance(site.node, ast.Call) else site.node
    return last_name(node)


def _place(site: Site, problem: Problem, context: Context) -> Tuple[str, str, str, Optional[Dict[str, Any]]]:
    """For a name that is not there: its new place or new name, if the sources show one."""
    moved: Moved = context.moved
    module_level = site.kind == "import" or (site.receiver is not None and hasattr(site.receiver, "module"))
    if module_level:
        place = moved.symbol(site.reached)
        if place is not None:
            edit = (
                {"edit": "rename-import", "name": site.reached, "to": place["symbol"]}
                if site.kind == "import" and not isinstance(site.node, ast.Call)
                else None
            )
            return "moved-symbol", "now %s" % place["symbol"], place["at"], edit
        return problem.kind, problem.now, problem.now_at, None
    renamed = moved.attribute(site, problem.detail)
    if renamed is not None and not (site.kind == "attribute" and isinstance(site.node, ast.Call)):
        told = "renamed to %s (%s)" % (renamed["new"], renamed["why"])
        return (
            problem.kind,
            "%s; %s" % (told, problem.now) if problem.now else told,
            renamed["at"],
            {"edit": "rename-attribute", "attribute": problem.detail, "to": renamed["new"]},
        )
    return problem.kind, problem.now, problem.now_at, None


def when(site: Site, context: Context) -> str:
    """import, start-up or first-batch: when control gets there."""
    if site.function is None:
        return "import"
    return "start-up" if START.search(site.scope) or site.scope in context.reached_at_start else "first-batch"


def check(site: Site, kind: str, problem: Problem, context: Context) -> str:
    """The shell command by which an engineer sees the same by hand."""
    at = problem.now_at.rsplit(":", 1)[0]
    root = context.provider.path
    name = (site.symbol or site.reached).rsplit(".", 1)[-1]
    if kind in ("missing-symbol", "moved-symbol"):
        return "grep -rnE '^(class|def|async def) %s\\b|^%s *[:=]|import .*\\b%s\\b' %s/%s" % (
            problem.detail,
            problem.detail,
            problem.detail,
            root,
            context.provider.package,
        )
    if at:
        line = problem.now_at.rsplit(":", 1)[-1]
        if kind == "missing-attribute":
            return "grep -n '%s' %s/%s" % (problem.detail, root, at)
        return "sed -n '%s,+25p' %s/%s" % (line, root, at)
    return "grep -rn '%s' %s/%s" % (problem.detail or name, root, context.provider.package)


def make(
    site: Site,
    *,
    rule: str,
    kind: str,
    confidence: str,
    detail: str,
    error: str,
    when: str,
    symbol: Optional[str] = None,
    was: Optional[str] = None,
    now: Optional[str] = None,
    now_at: Optional[str] = None,
    check: Optional[str] = None,
    fix: Optional[Dict[str, Any]] = None,
    contract: Optional[str] = None,
    note: Optional[str] = None,
    classes: Optional[List[str]] = None,
) -> Dict[str, Any]:
    """A finding with all its keys."""
    symbol = symbol or site.reached or site.symbol
    finding: Dict[str, Any] = {
        "rule": rule,
        "kind": kind,
        "confidence": confidence,
        "symbol": symbol,
        "detail": detail,
        "file": site.file,
        "line": site.line,
        "when": when,
        "error": error,
        "was": was,
        "now": now,
        "now_at": now_at,
        "check": check,
        "fix": fix,
        "id": identity(rule, site.file, site.scope, symbol, detail),
        "column": site.column,
        "scope": site.scope,
        "contract": contract,
        "anchor": {"line": site.line, "column": site.column, "end_line": site.end_line, "end_column": site.end_column},
    }
    if note:
        finding["note"] = note
    if classes:
        finding["classes"] = classes
    return finding
