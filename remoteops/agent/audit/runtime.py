"""The second opinion: the host's own interpreter imports provider and consumer and shows its signatures.

A child process does the importing, so that a crash, a print or a hang of theirs stays there. What it sees is compared
with what the sources said; a difference is a finding of its own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from typing import Any, Callable, Dict, List, Optional

from remoteops.agent.audit.packages import locate
from remoteops.agent.audit.shapes import Provider
from remoteops.agent.audit.syntax import decode
from remoteops.agent.protocol import AgentError

TIMEOUT = 300.0  # seconds; importing a large library on a cold disk takes a minute
Parameters = Dict[str, Optional[str]]

# Runs in the host's venv. The answer goes to a file: what the libraries print must not mix with it.
_CHILD = r"""
import importlib, inspect, json, sys, traceback
request, answer = json.load(sys.stdin), {"modules": {}, "symbols": {}, "python": sys.version.split()[0]}
def seen(error):
    last = traceback.extract_tb(error.__traceback__)
    at = "%s:%d" % (last[-1].filename, last[-1].lineno) if last else ""
    return {"error": type(error).__name__, "message": str(error)[:500], "at": at}
for name in request["modules"]:
    try:
        importlib.import_module(name)
        answer["modules"][name] = None
    except BaseException as error:
        answer["modules"][name] = seen(error)
for symbol in request["symbols"]:
    parts, found, at = symbol.split("."), None, 0
    for at in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:at]))
            break
        except ModuleNotFoundError as error:
            if error.name and not ".".join(parts[:at]).startswith(error.name):
                answer["symbols"][symbol] = seen(error); break
        except BaseException as error:
            answer["symbols"][symbol] = seen(error); break
    if symbol in answer["symbols"]:
        continue
    if found is None:
        answer["symbols"][symbol] = {"error": "ModuleNotFoundError", "message": parts[0]}
        continue
    try:
        for name in parts[at:]:
            found = getattr(found, name)
    except AttributeError as error:
        answer["symbols"][symbol] = {"missing": True, "message": str(error)}
        continue
    record = {"type": type(found).__name__}
    if callable(found):
        try:
            signature = inspect.signature(found)
            record["signature"] = str(signature)[:2000]
            plain = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
            record["parameters"] = {p.name: None if p.default is p.empty else repr(p.default)[:200] for p in plain}
            record["open"] = any(p.kind == p.VAR_KEYWORD for p in signature.parameters.values())
        except (ValueError, TypeError) as error:
            record["unsigned"] = str(error)
    answer["symbols"][symbol] = record
with open(request["answer"], "w") as file:
    json.dump(answer, file)
"""


def compare(request: Dict[str, Any], emit: Callable[..., None]) -> Dict[str, Any]:
    """The verb ``audit.runtime``: {"venv", "consumer", "provider", "symbols"} -> {"findings", "symbols", "modules", …}.

    Raises AgentError(MissingVenv) without an interpreter, AgentError(CommandFailed) when the child does not answer.
    """
    provider = Provider.open(request["provider"], request.get("provider_path"), request.get("venv"))
    consumer_modules = importing_modules(request)
    symbols = list(request.get("symbols") or [])
    emit("phase", phase="runtime", symbols=len(symbols), modules=len(consumer_modules))
    answer = ask(_python(request.get("venv")), consumer_modules, symbols)
    static = {symbol: provider.parameters(symbol) for symbol in symbols}
    known = {symbol: provider.exists(symbol)[0] for symbol in symbols}
    findings = differences(static, known, answer)
    return {
        "findings": findings,
        "python": answer["python"],
        "modules": answer["modules"],
        "symbols": answer["symbols"],
        "agreed": len(set(symbols) - {finding["symbol"] for finding in findings}),
    }


def importing_modules(request: Dict[str, Any]) -> List[str]:
    """Modules of the consumer whose text imports the provider (tests and setup files left out)."""
    tree = locate(request["consumer"], request.get("consumer_path"), request.get("venv"))
    statement = re.compile(r"^[ \t]*(?:from|import)[ \t]+%s\b" % re.escape(request["provider"]), re.M)
    found = []
    for name, path in tree.files():
        if statement.search(decode(tree.read(path))[0]) and not re.search(r"(^|\.)(tests?|conftest|setup)(\.|$)", name):
            found.append(name)
    return sorted(found)


def ask(python: str, modules: List[str], symbols: List[str], timeout: float = TIMEOUT) -> Dict[str, Any]:
    """What the interpreter says about modules (importable?) and symbols (signatures)."""
    with tempfile.TemporaryDirectory(prefix="remoteops-") as folder:
        path = os.path.join(folder, "answer.json")
        program = json.dumps({"modules": modules, "symbols": symbols, "answer": path}).encode()
        process = subprocess.Popen(
            [python, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=folder,
            start_new_session=True,
        )
        try:
            _, errors = process.communicate(program, timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise AgentError(
                "CommandFailed",
                "the imports did not end within %d s" % timeout,
                tried=python,
                hint="run the audit without --runtime",
            ) from None
        try:
            with open(path, encoding="utf-8") as file:
                answer: Dict[str, Any] = json.load(file)
            return answer
        except (OSError, ValueError):
            tail = errors.decode("utf-8", "replace")[-800:]
            raise AgentError(
                "CommandFailed",
                "the interpreter ended (status %s) before it answered" % process.returncode,
                tried=python,
                hint=tail or "import the provider by hand to see why",
            ) from None


def differences(
    static: Dict[str, Optional[Parameters]], known: Dict[str, Optional[bool]], answer: Dict[str, Any]
) -> List[Dict[str, Any]]:
    """Findings: modules that do not import, symbols that only one side has, parameters that differ."""
    findings: List[Dict[str, Any]] = []
    for module, problem in sorted(answer["modules"].items()):
        if problem:
            text = "%s: %s" % (problem["error"], problem["message"])
            findings.append(
                _finding(
                    "missing-symbol",
                    module,
                    "the module does not import: " + text,
                    text,
                    "import",
                    "proved",
                    None,
                    problem.get("at") or None,
                    file=module.replace(".", "/") + ".py",
                )
            )
    for symbol, record in sorted(answer["symbols"].items()):
        if record.get("missing"):
            if known.get(symbol):
                findings.append(
                    _finding(
                        "missing-attribute",
                        symbol,
                        "in the sources, not in the running interpreter",
                        "AttributeError: " + record["message"],
                        "start-up",
                        "risk",
                        "defined in the sources",
                        None,
                    )
                )
        elif "error" in record:
            findings.append(
                _finding(
                    "missing-symbol",
                    symbol,
                    "cannot be imported: %s" % record["error"],
                    "%s: %s" % (record["error"], record["message"]),
                    "import",
                    "risk",
                    None,
                    record.get("at") or None,
                )
            )
        elif known.get(symbol) is False:
            findings.append(
                _finding(
                    "missing-symbol",
                    symbol,
                    "in the running interpreter, not in the sources (made at run time)",
                    "",
                    "start-up",
                    "risk",
                    "not in the sources",
                    None,
                )
            )
        elif "parameters" in record and static.get(symbol) is not None:
            findings += _parameters(symbol, static[symbol] or {}, record)
    return findings


def _parameters(symbol: str, static: Parameters, record: Dict[str, Any]) -> List[Dict[str, Any]]:
    seen: Parameters = record["parameters"]
    only_source = [name for name in static if name not in seen and not record.get("open")]
    only_running = [name for name in seen if name not in static and name not in ("self", "cls")]
    flipped = [name for name in static if name in seen and (static[name] is None) != (seen[name] is None)]
    parts = [
        ("only in the sources: %s", only_source),
        ("only in the running interpreter: %s", only_running),
        ("required on one side only: %s", flipped),
    ]
    told = "; ".join(text % ", ".join(names) for text, names in parts if names)
    if not told:
        return []
    return [
        _finding(
            "behaviour",
            symbol,
            "signature differs; " + told,
            "",
            "start-up",
            "risk",
            "(%s)" % ", ".join(static),
            None,
            now=record.get("signature"),
        )
    ]


def _finding(
    kind: str,
    symbol: str,
    detail: str,
    error: str,
    when: str,
    confidence: str,
    was: Optional[str],
    now_at: Optional[str],
    now: Optional[str] = None,
    file: str = "",
) -> Dict[str, Any]:
    return {
        "id": "runtime-" + symbol,
        "rule": "runtime-difference",
        "kind": kind,
        "confidence": confidence,
        "symbol": symbol,
        "detail": detail,
        "file": file,
        "line": 1,
        "column": 0,
        "scope": "",
        "anchor": {"line": 1, "column": 0, "end_line": 1, "end_column": 0},
        "when": when,
        "error": error,
        "was": was,
        "now": now,
        "now_at": now_at,
        "check": "",
        "fix": None,
        "contract": None,
    }


def _python(venv: Optional[str]) -> str:
    for name in ("python", "python3"):
        path = os.path.join(os.path.expanduser(venv or ""), "bin", name)
        if venv and os.path.exists(path):
            return path
    raise AgentError(
        "MissingVenv",
        "no interpreter to ask",
        tried=os.path.join(venv or "(no venv)", "bin", "python"),
        hint="set venv for this host in inventory.yaml, or leave out --runtime",
    )
