"""What an audit carries for the layers after it: facts about the symbols in use, and a comparison with a baseline."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any, Dict, List

from remoteops.agent.audit import baseline
from remoteops.agent.audit.shapes import Provider
from remoteops.agent.audit.usage import arguments, callee

if TYPE_CHECKING:
    from remoteops.agent.audit.query import Context


def finish(document: Dict[str, Any], context: Context) -> None:
    """Add what the request asks for: ``facts``, and with ``baseline_path`` the comparison with that tree.

    ``facts`` is {"symbols": {symbol: facts}, "calls": [...]} (see ``baseline``): enough to compare with any number of
    releases elsewhere, without the sources of either side.
    """
    request = context.request
    document["consumer"]["requires"] = [line for line in context.consumer.requires if _names(line, context)]
    if not request.get("facts") and not request.get("baseline_path"):
        return
    provider = Provider(context.provider, context.index, context.recorder.classes)
    calls: List[Dict[str, Any]] = []
    for site in context.calls():
        if not isinstance(site.node, ast.Call):
            continue
        symbol = callee(site.reached)
        given, hidden = arguments(site.node, provider.parameters(symbol))
        calls.append(
            {
                "symbol": symbol,
                "file": site.file,
                "line": site.line,
                "column": site.column,
                "scope": site.scope,
                "anchor": {
                    "line": site.line,
                    "column": site.column,
                    "end_line": site.end_line,
                    "end_column": site.end_column,
                },
                "given": sorted(given),
                "open": bool(hidden),
                "result_used": getattr(site.statement, "value", None) is not site.node
                or not isinstance(site.statement, ast.Expr),
            }
        )
    symbols = {call["symbol"] for call in calls} | {finding["symbol"] for finding in document["findings"]}
    document["facts"] = {"symbols": baseline.facts(provider, symbols), "calls": calls}
    if request.get("baseline_path"):
        baseline.complete(document, context.provider.package, request["baseline_path"])
        if not request.get("facts"):
            del document["facts"]


def _names(line: str, context: Context) -> bool:
    """Whether a Requires-Dist line is about the provider."""
    named = re.match(r"\s*([A-Za-z0-9._-]+)", line)
    wanted = {_plain(context.provider.package), _plain(context.provider.distribution or "")}
    return named is not None and _plain(named.group(1)) in wanted - {""}


def _plain(name: str) -> str:
    return "".join(char for char in name.lower() if char.isalnum())
