"""Views of an audit and a matrix: what a person reads, and what hostile text cannot do."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import rich.console

from remoteops import probe
from remoteops.console import findings, html


def finding(**more: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "id": "x", "rule": "unknown-kwarg", "kind": "unknown-kwarg", "confidence": "proved", "symbol": "engine.plan",
        "detail": "specs",
        "file": "user/a.py", "line": 2, "when": "start-up", "error": "TypeError", "was": "plan(specs)", "now": "plan()",
        "now_at": "engine/__init__.py:10", "check": "sed", "fix": {"edit": "drop-keyword", "keyword": "specs"},
    }  # fmt: skip
    return {**base, **more}


def document(*found: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "schema": "remoteops.probe/1", "host": "kimi", "consumer": {"package": "user", "version": "1", "path": "/u"},
        "provider": {"package": "engine", "version": "2", "path": "/e"}, "baseline": None, "sites": 7, "ok": 5,
        "unresolved": [], "findings": list(found), "seconds": 0.5, **more,
    }  # fmt: skip


class Screen:
    def __init__(self, width: int = 100, terminal: bool = False) -> None:
        self.file = io.StringIO()
        self.rich = rich.console.Console(file=self.file, width=width, force_terminal=terminal, color_system=None)

    @property
    def text(self) -> str:
        return self.file.getvalue()


def shown(value: dict[str, Any], **more: Any) -> str:
    screen = Screen()
    findings.show(screen, value, **more)
    return screen.text


def test_the_verdict_comes_first_and_counts_only_what_breaks() -> None:
    text = shown(document(finding(), finding(confidence="risk", rule="changed-default", fix=None)))
    assert text.splitlines()[0] == "kimi: user 1 on engine 2: 1 break, 1 with a known fix"
    assert "At start-up" in text
    assert "docs/rules/unknown-kwarg.md" in text
    assert text.index("unknown-kwarg") < text.index("Changed since") < text.index("changed-default")
    assert text.splitlines()[-1] == "kimi: 1 break, 1 with a known fix; fab -H kimi patch shows the edits and asks"


LONG = "Scheduler.__init__(self_config: Config, groups: dict[str, tuple[int, ...]], block_size: int, log: bool = False)"


@pytest.mark.parametrize(
    ("detail", "shown"),
    [
        ("block_size", "Scheduler.__init__(…, block_size: int, …)"),
        ("self_config", "Scheduler.__init__(self_config: Config, …)"),
        ("log", "Scheduler.__init__(…, log: bool = False)"),
        ("gone", "Scheduler.__init__(self_config, groups, block_size, log)"),
    ],
)
def test_a_long_signature_keeps_the_parameter_in_question(detail: str, shown: str) -> None:
    assert findings.elide(LONG, detail) == shown
    assert findings.elide(LONG + " (engine 1.0)", detail) == shown + " (engine 1.0)"
    assert findings.elide("short(a, b)", detail) == "short(a, b)"


def test_every_finding_shows_the_command_that_shows_it() -> None:
    text = shown(document(finding(check="sed -n '3p' engine/a.py")))
    assert "check  sed -n '3p' engine/a.py" in text
    assert text.splitlines()[4] == "✗ user/a.py:2"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_command_stays_one_line_and_text_wraps_only_on_a_terminal(terminal: bool) -> None:
    path = "/data/" + "long-name/" * 9 + "request.py"
    command, error = f"sed -n '60,+25p' {path}", "words that explain " * 9 + path
    screen = Screen(80, terminal)
    findings.show(screen, document(finding(check=command, error=error)))
    lines = screen.text.splitlines()
    assert f"    check  {command}" in lines
    assert any(line.endswith(path) for line in lines if command not in line), "the path in the text is whole as well"
    assert (f"    error  {error}" in lines) is not terminal
    if terminal:
        assert all(len(line) <= 80 for line in lines if path not in line)
        (at,) = [i for i, line in enumerate(lines) if line.startswith("    error  words")]
        assert lines[at + 1].startswith(" " * 11) and "explain" in lines[at + 1]


def test_what_a_baseline_changed_is_told_in_a_line_each_unless_all_is_asked_for() -> None:
    changed = [finding(confidence="risk", rule="new-raise", line=n, fix=None) for n in range(20)]
    value = document(*changed, finding(confidence="risk", rule="eagle3-gate", line=99))
    short, everything = shown(value), shown(value, everything=True)
    assert short.index("? user/a.py:99") < short.index("not known to matter (20)")
    assert "  a.py:3  new-raise  engine.plan" in short and "… 12 more with --all" in short
    assert all(f"? user/a.py:{n}\n" in everything for n in range(20))


def test_nothing_broken_says_so() -> None:
    assert "no break found" in shown(document())


def test_undecided_places_are_listed_and_cut_without_all() -> None:
    opened = [{"file": "user/a.py", "line": n, "symbol": "engine.x", "reason": "unknown base"} for n in range(20)]
    assert "12 more with --all" in shown(document(unresolved=opened))
    assert "user/a.py:19" in shown(document(unresolved=opened), everything=True)


@pytest.mark.parametrize(
    ("found", "status"),
    [([], 0), (["risk"], 0), (["proved"], 1), (["contract", "risk"], 1)],
)
def test_exit_status_is_1_only_for_what_breaks(found: list[str], status: int) -> None:
    assert probe.exit_code(document(*[finding(confidence=one) for one in found])) == status


def test_text_of_a_host_cannot_steer_the_terminal() -> None:
    text = shown(document(finding(detail="a\x1b[2Jb[red]c", symbol="engine.\x07x", error="\r\x1b]0;t\x07")))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\\x1b[2Jb[red]c" in text


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_is_self_contained_and_escapes_what_it_shows(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>"
    checks = [{"command": hostile, "purpose": hostile, "output": hostile, "exit": 1}]
    path = html.write(
        tmp_path / "deep" / "page.html",
        document(finding(detail=hostile, symbol=hostile, error=hostile), checks=checks, notes=[hostile]),
    )
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    assert "script" not in page.tags
    assert page.links == []
    assert not re.search(r"url\(|@import|https?://", path.read_text(encoding="utf-8"))
    assert "1 breaks" in path.read_text(encoding="utf-8")


def row(**more: Any) -> dict[str, Any]:
    base = {
        "consumer": "user==1",
        "provider": "engine==2",
        "breaks": 0,
        "risks": 0,
        "fixable": False,
        "unfixable": [],
        "findings": [],
        "cached": False,
    }
    return {**base, **more}


def test_a_matrix_says_what_works_what_is_fixable_and_what_was_not_audited(tmp_path: Path) -> None:
    rows = [
        row(),
        row(provider="engine==3", breaks=2, fixable=True, risks=1, findings=[finding()]),
        row(provider="engine==4", breaks=1, unfixable=["moved-symbol"]),
        {"consumer": "user==1", "provider": "engine==5", "error": "no such release\nmore"},
    ]
    value = {"schema": "remoteops.matrix/1", "rows": rows, "installable": {"user==1": ["engine==2"]}, "seconds": 1.0}
    screen = Screen()
    findings.show_matrix(screen, value)
    lines = {line.split()[0]: line for line in screen.text.splitlines() if line.strip().startswith("engine")}
    assert "works" in lines["engine==2"]
    assert "2 breaks, all fixable +1?" in lines["engine==3"]
    assert "no fix: moved-symbol" in lines["engine==4"]
    assert "not audited: no such release" in lines["engine==5"]
    assert "user==1 works patched with: engine==3" in screen.text
    assert "not audited" in html.page(value)
