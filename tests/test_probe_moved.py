"""Names that moved together and are imported on one line are told one by one."""

from __future__ import annotations

from pathlib import Path

from remoteops.agent.audit import engine


def test_each_name_of_one_import_line_has_its_finding(tmp_path: Path) -> None:
    for file, text in {
        "engine/__init__.py": "",
        "engine/old.py": "",
        "engine/new.py": "def plan(): ...\ndef check(): ...\n",
        "user/__init__.py": "from engine.old import check, plan\n",
    }.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    request = {"consumer": "user", "provider": "engine", "consumer_path": str(tmp_path), "provider_path": str(tmp_path)}
    found = engine.audit(request)["findings"]
    assert sorted(f["symbol"] for f in found) == ["engine.old.check", "engine.old.plan"]
    assert {f["kind"] for f in found} == {"moved-symbol"}
