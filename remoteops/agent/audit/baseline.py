"""Then and now: what changed in the provider since the release the consumer was written for.

Facts are taken of every symbol the consumer uses, in each tree by itself; comparing two sets of facts is pure, so the
baseline's sources need not be on the host. Differences that break by themselves are findings already; here are those
that may: a changed default of a parameter left unset, a changed return annotation, a new ``raise`` or ``assert``.
"""

from __future__ import annotations

import ast
from typing import Any, Dict, Iterable, List, Optional, Set

from remoteops.agent.audit import shell
from remoteops.agent.audit.shapes import Found, Provider

Facts = Dict[str, Any]
MAX_SIGNATURE = 4000  # characters of a signature in a finding
MAX_NAMED = 3  # new raises that a finding spells out
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def facts(provider: Provider, symbols: Iterable[str]) -> Dict[str, Optional[Facts]]:
    """For each symbol None (not there) or {"at", "signature", "parameters", "returns", "raises"}.

    ``parameters`` maps names to the source text of their defaults (None: required) and is None for what is not called.
    ``raises`` holds one text for each raise and assert in the callee and in what it calls on itself or beside itself.
    """
    return {symbol: _of(provider, symbol) for symbol in sorted(set(symbols))}


def compare(
    now: Dict[str, Optional[Facts]], was: Dict[str, Optional[Facts]], calls: List[Dict[str, Any]], covered: Set[Any]
) -> List[Dict[str, Any]]:
    """``risk`` findings of the calls, without the places that ``covered`` holds: (file, line, parameter or rule).

    A call is {"symbol", "file", "line", "given": [parameter names], "open": bool, …}; keys beyond these are kept in the
    finding (column, scope, anchor).
    """
    findings: List[Dict[str, Any]] = []
    told: Set[str] = set()
    for call in calls:
        new, old = now.get(call["symbol"]), was.get(call["symbol"])
        if not new or not old:
            continue
        findings += _defaults(call, new, old, covered)
        if (
            _annotation(old["returns"]) != _annotation(new["returns"])
            and old["returns"] is not None
            and new["returns"] is not None
            and call.get("result_used", True)
        ):
            findings.append(
                _risk(
                    "changed-return",
                    call,
                    call["symbol"],
                    "return annotation changed",
                    "first-batch",
                    "-> %s" % old["returns"],
                    "-> %s" % new["returns"],
                    new["at"],
                )
            )
        fresh = set(new["raises"]) - set(old["raises"]) - told
        if fresh:
            told |= fresh  # a raise that several calls can meet is told at the first
            named = sorted(fresh, key=lambda text: (text.startswith("assert"), text))
            text = "; ".join(named[:MAX_NAMED])
            if len(named) > MAX_NAMED:
                text += "; and %d more" % (len(named) - MAX_NAMED)
            detail = "%d new raise or assert on the way: %s" % (len(named), text)
            findings.append(_risk("new-raise", call, call["symbol"], detail, "first-batch", None, text, new["at"]))
    return [finding for finding in findings if (finding["file"], finding["line"], finding["rule"]) not in covered]


def annotate(findings: List[Dict[str, Any]], was: Dict[str, Optional[Facts]], label: str) -> None:
    """Fill ``was`` of findings that have none: the signature in the baseline, or that it was not there either."""
    for finding in findings:
        if finding.get("was") or finding["symbol"] not in was:
            continue
        old = was[finding["symbol"]]
        if old is None and finding.get("kind") in ("missing-attribute", "override-mismatch"):
            continue  # the class itself may be newer than the baseline, or one of many that can stand there
        finding["was"] = "%s (%s)" % (old["signature"], label) if old else "not in %s" % label


def complete(document: Dict[str, Any], package: str, path: str, version: str = "") -> None:
    """Compare a document that carries ``facts`` with the provider tree at ``path``; fills ``baseline`` and findings."""
    carried = document.get("facts")
    if not carried:
        return
    provider = Provider.open(package, path)
    version = version or provider.tree.version or ""
    symbols = [*carried["symbols"], *(finding["symbol"] for finding in document["findings"])]
    was = facts(provider, symbols)
    label = "%s %s" % (package, version) if version else "the baseline"
    annotate(document["findings"], was, label)
    covered = {
        (finding["file"], finding["line"], finding["symbol"].rpartition(".")[2]) for finding in document["findings"]
    }
    covered |= {(finding["file"], finding["line"], finding["detail"]) for finding in document["findings"]}
    risks = compare(carried["symbols"], was, carried["calls"], covered)
    for finding in risks:
        finding["check"] = shell.one_line(finding, str(document["provider"].get("path") or "."))
        finding["was"] = finding["was"] and "%s (%s)" % (finding["was"], label)
    document["findings"] += risks
    document["baseline"] = {"package": package, "version": version or None, "path": path}


def _of(provider: Provider, symbol: str) -> Optional[Facts]:
    found = provider.definition(symbol)
    if found is None:
        return None
    node = found.node
    parameters = provider.parameters(symbol) if isinstance(node, (ast.ClassDef, *_FUNCTIONS)) else None
    return {
        "at": "%s:%d" % (found.path, found.line),
        "signature": _signature(found, parameters, _owner(provider, symbol)),
        "parameters": parameters,
        "returns": ast.unparse(node.returns) if isinstance(node, _FUNCTIONS) and node.returns is not None else None,
        "raises": sorted(_raises(provider, symbol, node)),
    }


def _owner(provider: Provider, symbol: str) -> str:
    """The class name before a method's, with its dot."""
    head = symbol.rpartition(".")[0]
    return head.rpartition(".")[2] + "." if provider.class_info(head) is not None else ""


def _signature(found: Found, parameters: Optional[Dict[str, Optional[str]]], owner: str) -> str:
    node = found.node
    if isinstance(node, _FUNCTIONS):
        returns = " -> %s" % ast.unparse(node.returns) if node.returns is not None else ""
        inside = ast.unparse(node.args)
        for receiver in ("self", "cls"):
            if inside == receiver or inside.startswith(receiver + ", "):
                inside = inside[len(receiver) + 2 :]
        text = "%s%s(%s)%s" % (owner, node.name, inside, returns)
    elif isinstance(node, ast.ClassDef):
        inside = ", ".join(
            name if default is None else "%s=%s" % (name, default) for name, default in (parameters or {}).items()
        )
        text = "%s(%s)" % (node.name, inside)
    else:
        text = (found.text.strip().splitlines() or [""])[0]
    return text if len(text) <= MAX_SIGNATURE else text[:MAX_SIGNATURE] + " …"


def _annotation(text: Optional[str]) -> Any:
    """An annotation's meaning as far as spelling goes: Optional[X], Union[X, None] and X | None are one."""
    if text is None:
        return None
    try:
        return _meaning(ast.parse(text, mode="eval").body)
    except SyntaxError:
        return text


def _meaning(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _annotation(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _members([node.left, node.right])
    if isinstance(node, ast.Subscript):
        name = ast.unparse(node.value).rpartition(".")[2]
        inside = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name == "Union":
            return _members(inside)
        if name == "Optional":
            return _members([*inside, ast.Constant(None)])
        return (name.lower(), tuple(_meaning(one) for one in inside))
    return ast.unparse(node).rpartition(".")[2].lower()


def _members(nodes: List[ast.expr]) -> Any:
    found: Set[Any] = set()
    for node in nodes:
        meaning = _meaning(node)
        found |= meaning if isinstance(meaning, frozenset) else {meaning}
    return frozenset(found)


def _raises(provider: Provider, symbol: str, node: Optional[ast.AST]) -> Set[str]:
    """Raises and asserts of a callable and, one step down, of the methods and functions beside it that it calls."""
    if isinstance(node, ast.ClassDef):
        bodies = [
            one
            for one in node.body
            if isinstance(one, _FUNCTIONS) and one.name in ("__init__", "__new__", "__post_init__")
        ]
        owner = symbol
    elif isinstance(node, _FUNCTIONS):
        bodies, owner = [node], symbol.rpartition(".")[0]
    else:
        return set()
    texts: Set[str] = set()
    for body in bodies:
        texts |= _own_raises(body)
        for name in sorted(_called(body)):
            below = provider.definition("%s.%s" % (owner, name))
            if below is not None and isinstance(below.node, _FUNCTIONS) and below.node is not body:
                texts |= _own_raises(below.node)
    return texts


def _own_raises(function: ast.AST) -> Set[str]:
    texts = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Raise) and node.exc is not None:
            texts.add("raise " + ast.unparse(node.exc)[:160])
        elif isinstance(node, ast.Assert):
            texts.add("assert " + ast.unparse(node.test)[:160])
    return texts


def _called(function: ast.AST) -> Set[str]:
    """Names that a body calls on ``self`` or ``cls``, or plainly."""
    names = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            if (
                isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id in ("self", "cls")
            ):
                names.add(node.func.attr)
            elif isinstance(node.func, ast.Name):
                names.add(node.func.id)
    return names


def _defaults(call: Dict[str, Any], new: Facts, old: Facts, covered: Set[Any]) -> List[Dict[str, Any]]:
    found = []
    for name, default in (new["parameters"] or {}).items():
        before = (old["parameters"] or {}).get(name)
        unset = name not in call["given"] and not call.get("open")
        if (
            unset
            and default is not None
            and before is not None
            and _spelling(default) != _spelling(before)
            and (call["file"], call["line"], name) not in covered
        ):
            found.append(
                _risk(
                    "changed-default",
                    call,
                    "%s.%s" % (call["symbol"], name),
                    name,
                    "silent",
                    "%s = %s" % (name, before),
                    "%s = %s" % (name, default),
                    new["at"],
                )
            )
    return found


def _spelling(text: str) -> str:
    """A default's meaning as far as spelling goes: ``Field(default=0.9, gt=0)`` and ``0.9`` are one value."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        return text.strip()
    if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
        name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        if name in ("Field", "field"):
            values = [
                keyword.value for keyword in node.keywords if keyword.arg in ("default", "default_factory")
            ] or node.args[:1]
            if values:
                return ast.dump(values[0])
    return ast.dump(node)


def _risk(
    rule: str,
    call: Dict[str, Any],
    symbol: str,
    detail: str,
    when: str,
    was: Optional[str],
    now: Optional[str],
    now_at: str,
) -> Dict[str, Any]:
    place = {key: call.get(key) for key in ("file", "line", "column", "scope", "anchor")}
    return {
        **place,
        "id": "%s:%s:%s:%s" % (rule, call["file"], call["line"], symbol),
        "rule": rule,
        "kind": "behaviour",
        "confidence": "risk",
        "symbol": symbol,
        "detail": detail,
        "when": when,
        "error": "",
        "was": was,
        "now": now,
        "now_at": now_at,
        "check": "",
        "fix": None,
        "contract": None,
    }
