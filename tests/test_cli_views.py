"""Hosts, the doctor and the lab as a person sees them: in a narrow window, in a wide one, and through a pipe."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rich.console

from remoteops import errors, lab
from remoteops.console import Console, tables
from remoteops.lab.place import Place

LONG = "/data/" + "very-long-folder-name/" * 5 + "venv"
HOSTS = {
    "file": "inventory.yaml",
    "groups": {"labs": ["lab"]},
    "hosts": [
        {"name": "lab", "default": True, "target": "embedded, profile seed", "jump": "", "keys": [], "venv": "built",
         "python": None, "groups": ["labs"], "notices": []},
        {"name": "gpu", "default": False, "target": "me@gpu8.example.net:2222", "jump": "me@bastion.example.net:22",
         "keys": ["/home/me/.ssh/id_ed25519"], "venv": LONG, "python": None, "groups": [],
         "notices": ["ForwardX11 has no effect here"]},
    ],
}  # fmt: skip
DOCTOR = {
    "host": "gpu",
    "exit_code": 1,
    "layers": [
        {"layer": "link", "state": "ok", "found": "me@gpu8.example.net:2222", "hint": ""},
        {"layer": "packages", "state": "ok", "found": "vllm 0.17.1", "hint": ""},
        {"layer": "packages", "state": "failed", "found": f"{LONG}: torch is not installed (needed: torch)",
         "hint": f"{LONG}/bin/pip install torch", "of": "workload"},
        {"layer": "disk", "state": "skipped", "found": "", "hint": ""},
    ],
}  # fmt: skip


def shown(view: Any, document: Any, *, width: int | None) -> tuple[int, list[str]]:
    """(exit code, lines) on a terminal of that width; through a pipe when there is none."""
    console, text = Console(), io.StringIO()
    screen = rich.console.Console(file=text, width=width, force_terminal=width is not None, color_system=None)
    console.__dict__["rich"] = screen
    return view(console, document), text.getvalue().splitlines()


@pytest.mark.parametrize("view", [tables.hosts, tables.doctor])
def test_a_path_or_command_is_never_cut(view: Any) -> None:
    document = HOSTS if view is tables.hosts else DOCTOR
    for width in (60, 80, 120, 200, None):
        _, lines = shown(view, document, width=width)
        assert any(LONG in line for line in lines), width
        assert all(len(line) <= (width or 10_000) for line in lines if LONG not in line), width
        assert all(line == line.rstrip() for line in lines), width


def test_through_a_pipe_a_host_is_one_line_without_gaps() -> None:
    _, lines = shown(tables.hosts, HOSTS, width=None)
    (line,) = [line for line in lines if line.startswith("  gpu ")]
    assert "me@bastion.example.net:22" in line and LONG in line
    assert [part.strip() for part in lines[1].split("  ") if part.strip()][2] == "-", "an empty cell is a dash"


def test_in_a_narrow_window_a_host_is_a_block_without_empty_lines() -> None:
    _, lines = shown(tables.hosts, HOSTS, width=80)
    block = lines[lines.index("* lab") : lines.index("  gpu")]
    assert block[1:] == [
        "    target   embedded, profile seed",
        "    keys     agent, default keys",
        "    venv     built",
        "    python   looked for",
        "    groups   labs",
    ]
    assert "gpu: ForwardX11 has no effect here" in lines


def test_the_doctor_says_what_to_do_beside_what_is_wrong_and_ends_with_the_verdict() -> None:
    code, lines = shown(tables.doctor, DOCTOR, width=None)
    at = next(i for i, line in enumerate(lines) if line.startswith("FAILED     packages"))
    assert lines[at + 1].strip() == f"-> {LONG}/bin/pip install torch"
    assert lines[at + 2].split() == ["-", "disk", "not", "looked", "at"]
    assert (code, lines[-1]) == (1, "gpu: not ready: packages")
    fine = {**DOCTOR, "exit_code": 0, "layers": [{**DOCTOR["layers"][0], "state": "warning"}]}  # type: ignore[index]
    _, lines = shown(tables.doctor, fine, width=None)
    assert lines[-1] == "gpu: in order but for 1 warning; fab -H gpu probe says whether the libraries fit"


def test_a_locale_without_our_signs_does_not_end_a_task(tmp_path: Path) -> None:
    program = (
        "from remoteops.console import Console, findings\n"
        "from tests.test_probe_views import document, finding\n"
        "findings.show(Console(), document(finding(detail='\\u2026 \\udcff'))); Console().say('\\u2717 end')"
    )
    environment = {"PYTHONIOENCODING": "latin-1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": "."}
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment, cwd=root)
    assert done.returncode == 0, done.stderr.decode()
    assert b"x user/a.py:2\n" in done.stdout and done.stdout.endswith(b"\\u2717 end\n")


@pytest.mark.parametrize(
    ("stopped", "purge", "purged", "words"),
    [
        (True, False, False, "server stopped"),
        (False, False, False, "no server was running"),
        (True, True, True, "server stopped, /lab removed"),
        (False, True, True, "no server was running, /lab removed"),
        (False, True, False, "no server was running, nothing was on disk"),
    ],
)
def test_lab_down_says_what_it_did(stopped: bool, purge: bool, purged: bool, words: str) -> None:
    item = {"profile": "seed", "stopped": stopped, "purged": purged, "root": "/lab"}
    assert shown(tables.lab_down, {"purge": purge, "labs": [item]}, width=80)[1] == [f"seed: {words}"]


def test_purge_is_refused_while_a_process_uses_the_labs_venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    found = lab.down("seed", purge=True, report=said.append)
    assert found["labs"][0]["purged"] is False and not said, "nothing was there, and nothing else is claimed"
    place = Place("seed")
    assert tmp_path in place.root.parents
    place.python.parent.mkdir(parents=True)
    place.python.symlink_to(sys.executable)
    sleeper = subprocess.Popen([str(place.python), "-S", "-c", "print(flush=True); input()"], stdin=-1, stdout=-1)
    try:
        assert sleeper.stdout is not None
        sleeper.stdout.readline()
        with pytest.raises(errors.UsageError, match=rf"is in use: pid {sleeper.pid},"):
            lab.down("seed", purge=True, report=said.append)
        assert place.root.exists()
    finally:
        sleeper.communicate(b"\n")
    assert lab.down("seed", purge=True, report=said.append)["labs"][0]["purged"] and not place.root.exists()
