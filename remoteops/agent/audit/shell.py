"""The checks an engineer would do by hand, for each finding: sed, grep and inspect, as commands to read or to run.

A command is an argument list; the text form is quoted for a shell. Running needs no shell, so nothing in a file name
can become a command. Output is evidence: kept as it came, cut to a bound.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from typing import Any, Callable, Dict, List, Optional

MAX_OUTPUT = 4000  # characters kept of one command's output
TIMEOUT = 30.0  # seconds for one command
CONTEXT = 8  # lines shown of a definition

Check = Dict[str, Any]


def run_checks(request: Dict[str, Any], emit: Callable[..., None]) -> Dict[str, Any]:
    """The verb ``audit.shell``: {"document", "run", "venv"} -> {"checks": [...]}; event ``check`` for each run."""
    document = request["document"]
    done = checks(document, venv=request.get("venv"))
    if request.get("run"):
        for check in done:
            execute(check)
            emit("check", command=check["command"], exit=check["exit"])
    return {"checks": done}


def checks(document: Dict[str, Any], run: bool = False, venv: Optional[str] = None) -> List[Check]:
    """Commands for every finding of a document (and every site of ``sites_list``, when it is there), each one once.

    A check is {"finding": id or None, "purpose", "argv", "command", "imports": bool}; with ``run`` also "exit" (None
    when it did not end in time) and "output". Those that import the provider are made only when a ``venv`` is known.
    """
    found: List[Check] = []
    for finding in document.get("findings", []):
        found += _for_finding(finding, document, venv)
    for site in document.get("sites_list", []):
        found.append(_show_use(site, document))
    unique: Dict[str, Check] = {}
    for check in found:
        unique.setdefault(check["command"], check)
    for check in unique.values():
        if run:
            execute(check)
    return list(unique.values())


def execute(check: Check) -> Check:
    """Run one check; adds "exit" and "output" (stdout and stderr as they came)."""
    try:
        process = subprocess.Popen(
            check["argv"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        check["exit"], check["output"] = 127, str(error)
        return check
    try:
        data, _ = process.communicate(timeout=TIMEOUT * (6 if check.get("imports") else 1))
        check["exit"] = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        data, _ = process.communicate()
        check["exit"] = None
    text = data.decode("utf-8", "replace")
    check["output"] = (
        text if len(text) <= MAX_OUTPUT else text[:MAX_OUTPUT] + "\n... (%d characters more)" % (len(text) - MAX_OUTPUT)
    )
    return check


def one_line(finding: Dict[str, Any], provider_root: str) -> str:
    """The shortest command that shows a finding (its ``check`` key)."""
    place = _place(finding.get("now_at"))
    if place:
        return _command(["sed", "-n", "%d,%dp" % (place[1], place[1] + CONTEXT), os.path.join(provider_root, place[0])])
    return _command(_grep(_leaf(finding), provider_root))


def _for_finding(finding: Dict[str, Any], document: Dict[str, Any], venv: Optional[str]) -> List[Check]:
    root = str(document["provider"].get("path") or ".")
    package = str(document["provider"]["package"])
    found = [_show_use(finding, document)]
    place = _place(finding.get("now_at"))
    if place:
        found.append(
            _check(
                finding,
                "what the provider has now",
                ["sed", "-n", "%d,%dp" % (place[1], place[1] + CONTEXT), os.path.join(root, place[0])],
            )
        )
    if finding["kind"] in ("missing-symbol", "moved-symbol", "missing-attribute") or not place:
        found.append(
            _check(finding, "where the provider defines the name", _grep(_leaf(finding), os.path.join(root, package)))
        )
    elif finding["kind"] in ("unknown-kwarg", "missing-required") and place:
        word = re.split(r"\W", str(finding["detail"]))[0]
        found.append(
            _check(finding, "whether the parameter is there", ["grep", "-nw", word, os.path.join(root, place[0])])
        )
    if venv and re.fullmatch(r"[\w.]+", finding["symbol"] or "") and finding["confidence"] == "proved":
        found.append(
            _check(
                finding,
                "what the interpreter says",
                [os.path.join(venv, "bin", "python"), "-c", _inspect(finding["symbol"])],
                imports=True,
            )
        )
    return found


def _show_use(record: Dict[str, Any], document: Dict[str, Any]) -> Check:
    anchor = record.get("anchor") or {}
    last = max(int(anchor.get("end_line") or record["line"]), int(record["line"]))
    path = os.path.join(str(document["consumer"].get("path") or "."), record["file"])
    return _check(record, "how the consumer uses it", ["sed", "-n", "%d,%dp" % (record["line"], last), path])


def _check(record: Dict[str, Any], purpose: str, argv: List[str], imports: bool = False) -> Check:
    return {
        "finding": record.get("id"),
        "rule": record.get("rule"),
        "file": record["file"],
        "line": record["line"],
        "purpose": purpose,
        "argv": argv,
        "command": _command(argv),
        "imports": imports,
    }


def _grep(name: str, root: str) -> List[str]:
    definition = r"^[[:space:]]*(async def|def|class)[[:space:]]+%s\b|^[[:space:]]*%s[[:space:]]*[:=]" % (name, name)
    return ["grep", "-rnE", "--include=*.py", definition, root]


def _inspect(symbol: str) -> str:
    """A program that imports the longest importable prefix of a dotted name and prints what the rest is."""
    return (
        "import importlib, inspect\n"
        "parts = %r.split('.')\n"
        "for n in range(len(parts), 0, -1):\n"
        "    try:\n"
        "        found = importlib.import_module('.'.join(parts[:n]))\n"
        "        break\n"
        "    except ImportError:\n"
        "        continue\n"
        "for name in parts[n:]:\n"
        "    found = getattr(found, name)\n"
        "print(inspect.signature(found) if callable(found) else type(found))" % symbol
    )


def _leaf(finding: Dict[str, Any]) -> str:
    """The name to look for: an attribute for missing-attribute, else the last part of the symbol."""
    if finding["kind"] == "missing-attribute" and re.fullmatch(r"\w+", str(finding["detail"])):
        return str(finding["detail"])
    names = [name for name in re.findall(r"\w+", str(finding["symbol"]).split(" ")[0]) if name != "__init__"]
    return names[-1] if names else "."


def _place(now_at: Optional[str]) -> Optional[Any]:
    if not now_at:
        return None
    path, _, line = now_at.rpartition(":")
    return (path, int(line)) if path and line.isdigit() else None


def _command(argv: List[str]) -> str:
    return " ".join(shlex.quote(part) for part in argv)
