"""An audit or a matrix as one self-contained HTML page: no script, no font and no style from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from remoteops import rules
from remoteops.console.findings import ORDER, WHEN, describe_fix

_STYLE = """
:root{color-scheme:light dark;--line:#8884;--bad:#c0392b;--risk:#b7791f;--good:#2f855a;--soft:#8882}
body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin-bottom:.2rem} h2{font-size:1.1rem;margin-top:2rem;border-bottom:1px solid var(--line)}
.bad{color:var(--bad)} .risk{color:var(--risk)} .good{color:var(--good)} .dim{opacity:.7}
article{border-left:4px solid var(--bad);padding:.4rem 1rem;margin:.8rem 0;background:var(--soft)}
article.risk{border-color:var(--risk);color:inherit} article h3{font-size:1rem;margin:0}
code,pre{font:13px/1.45 ui-monospace,monospace}
pre{overflow-x:auto;background:var(--soft);padding:.5rem;white-space:pre-wrap}
dl{display:grid;grid-template-columns:6rem 1fr;gap:.1rem .8rem;margin:.4rem 0}
dt{opacity:.7} dd{margin:0;overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%}
th,td{border-bottom:1px solid var(--line);text-align:left;padding:.25rem .6rem;vertical-align:top}
@media(max-width:40rem){dl{grid-template-columns:1fr}}
"""


def write(path: Path, document: Mapping[str, Any]) -> Path:
    """Write the page of an audit (or of several, ``{"hosts": [...]}``) or of a matrix. Returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(document), encoding="utf-8")
    return path


def page(document: Mapping[str, Any]) -> str:
    """The whole page. Everything that came from a host or a file is escaped."""
    if document["schema"].startswith("remoteops.matrix/"):
        title, body = "Compatibility matrix", _matrix(document)
    elif "hosts" in document:
        title, body = (
            "Compatibility of all hosts",
            "".join(f"<section>{_audit(one)}</section>" for one in document["hosts"]),
        )
    else:
        title, body = f"{_side(document['consumer'])} on {_side(document['provider'])}", _audit(document)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def _audit(document: Mapping[str, Any]) -> str:
    findings = list(document["findings"])
    broken = [finding for finding in findings if finding["confidence"] != "risk"]
    risks = [finding for finding in findings if finding["confidence"] == "risk"]
    host = f"{document['host']}: " if document.get("host") else ""
    verdict = f'<span class="bad">{len(broken)} breaks</span>' if broken else '<span class="good">no break found</span>'
    baseline = f", against {escape(_side(document['baseline']))}" if document.get("baseline") else ""
    parts = [
        f"<h1>{escape(host + _side(document['consumer']))} on {escape(_side(document['provider']))}: {verdict}</h1>",
        f'<p class="dim">{document["sites"]} sites audited, {document["ok"]} fine, '
        f"{len(document['unresolved'])} not decided{baseline}; {document['seconds']:.2f} s</p>",
        _sides(document),
    ]
    for when in ORDER:
        group = [finding for finding in broken if finding["when"] == when]
        if group:
            parts.append(f"<h2>{escape(WHEN[when])}</h2>" + "".join(map(_finding, group)))
    if risks:
        parts.append("<h2>Risks</h2>" + "".join(map(_finding, risks)))
    if document["unresolved"]:
        rows = (
            [f"{one.get('file', '')}:{one.get('line', '')}", one.get("symbol", ""), one.get("reason", "")]
            for one in document["unresolved"]
        )
        parts.append("<h2>Not decided</h2>" + _table(("place", "symbol", "why"), rows))
    if document.get("sites_list"):
        rows = (
            [
                str(one.get("state") or one.get("status") or ""),
                f"{one['file']}:{one['line']}",
                one.get("kind", ""),
                one.get("symbol", ""),
            ]
            for one in document["sites_list"]
        )
        parts.append("<h2>All sites</h2>" + _table(("state", "place", "kind", "symbol"), rows))
    if document.get("checks"):
        parts.append("<h2>By hand</h2>" + "".join(map(_check, document["checks"])))
    parts += [f'<p class="dim">{escape(note)}</p>' for note in document.get("notes", ())]
    return "".join(parts)


def _finding(finding: Mapping[str, Any]) -> str:
    rows = [
        ("symbol", f"<code>{escape(str(finding['symbol']))}</code>"),
        ("detail", escape(str(finding["detail"]))),
        ("was", _code(finding.get("was"))),
        ("now", _code(finding.get("now"))),
        ("at", _code(finding.get("now_at"))),
        ("error", _code(finding.get("error"))),
        ("fix", escape(describe_fix(finding))),
        ("check", _code(finding.get("check"))),
        ("page", f"<code>{escape(rules.page(finding['rule']))}</code>"),
    ]
    listed = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in rows if value)
    risk = " class=risk" if finding["confidence"] == "risk" else ""
    title = rules.all_rules().get(finding["rule"], finding["rule"])
    return (
        f"<article{risk}><h3>{escape(finding['rule'])} <code>{escape(finding['file'])}:{finding['line']}</code></h3>"
        f'<div class="dim">{escape(title)} ({escape(finding["confidence"])})</div><dl>{listed}</dl></article>'
    )


def _check(check: Mapping[str, Any]) -> str:
    output = f"\n{check['output']}" if "output" in check else ""
    status = f"\n(exit {check['exit']})" if check.get("exit") not in (None, 0) else ""
    return f'<div class="dim">{escape(check["purpose"])}</div><pre>$ {escape(check["command"] + output + status)}</pre>'


def _matrix(document: Mapping[str, Any]) -> str:
    consumers = list(dict.fromkeys(row["consumer"] for row in document["rows"]))
    providers = list(dict.fromkeys(row["provider"] for row in document["rows"]))
    cells = {(row["consumer"], row["provider"]): row for row in document["rows"]}
    head = "".join(f"<th>{escape(consumer)}</th>" for consumer in consumers)
    body = "".join(
        f"<tr><th>{escape(provider)}</th>" + "".join(_cell(cells.get((one, provider))) for one in consumers) + "</tr>"
        for provider in providers
    )
    lists = "".join(
        f"<p><b>{escape(name)}</b> works unpatched with: {escape(', '.join(found) or 'none of these')}</p>"
        for name, found in document["installable"].items()
    )
    return f"<h1>Compatibility matrix</h1><table><tr><th></th>{head}</tr>{body}</table>{lists}"


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "<td></td>"
    if row.get("error"):
        return f'<td class="dim">not audited: {escape(row["error"])}</td>'
    risks = f' <span class="risk">+{row["risks"]} risks</span>' if row["risks"] else ""
    if row["breaks"] == 0:
        return f'<td><span class="good">works</span>{risks}</td>'
    style, tail = ("risk", "all fixable") if row["fixable"] else ("bad", "no fix: " + ", ".join(row["unfixable"]))
    items = "".join(
        f"<li><code>{escape(str(one['rule']))}</code> "
        f"{escape(str(one['file']))}:{one['line']} {escape(str(one['detail']))}</li>"
        for one in row["findings"]
        if one["confidence"] != "risk"
    )
    summary = f'<span class="{style}">{row["breaks"]} breaks</span>, {escape(tail)}{risks}'
    return f"<td><details><summary>{summary}</summary><ul>{items}</ul></details></td>"


def _sides(document: Mapping[str, Any]) -> str:
    rows = (
        [name, _side(document[name]), document[name].get("path") or ""]
        for name in ("consumer", "provider", "baseline")
        if document.get(name)
    )
    return _table(("", "package", "sources"), rows)


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _code(text: Any) -> str:
    return f"<code>{escape(str(text))}</code>" if text else ""


def _side(side: Mapping[str, Any]) -> str:
    return f"{side['package']} {side['version']}" if side.get("version") else str(side["package"])
