"""Agents that were replaced long ago leave the host; what is in use, recent, or not ours stays."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
import sshd

from remoteops import archive
from remoteops.agent.tidy import UNUSED, tidy
from remoteops.remote import open_agent

LONG_AGO = time.time() - UNUSED - 86400


def put(folder: Path, name: str, when: float) -> Path:
    """An archive, or an unpacked twin, that was last used at ``when``."""
    path = folder / name
    if path.suffix == ".pyz" or path.suffix == ".part":
        path.write_bytes(b"zip")
    else:
        (path / "remoteops").mkdir(parents=True)
        (path / "__main__.py").write_text("pass")
        os.utime(path / "__main__.py", (when, when))
    os.utime(path, (when, when))
    return path


@pytest.fixture
def cache(tmp_path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    for kind in ("agent-" + "a" * 20, "agent-" + "b" * 20):
        put(folder, kind, LONG_AGO)
        put(folder, kind + ".pyz", LONG_AGO)
    return folder


def test_a_new_agent_sends_old_ones_away_and_leaves_all_else(tmp_path, cache):
    user = subprocess.Popen(["sleep", "60"], env={"PYTHONPATH": f"{cache}/agent-{'b' * 20}.pyz:/x"})
    try:
        put(cache, "agent-" + "c" * 20 + ".77", LONG_AGO)
        put(cache, ".agent-" + "d" * 20 + ".pyz.0123456789abcdef.part", LONG_AGO)
        recent = put(cache, "agent-" + "e" * 20 + ".pyz", time.time() - 86400)
        put(cache, "agent-" + "e" * 20, LONG_AGO)
        (cache / "audit").mkdir()
        (cache / "agent-notes.txt").write_text("the user's own")
        os.utime(cache / "agent-notes.txt", (LONG_AGO, LONG_AGO))
        with sshd.running(tmp_path / "s") as server, open_agent(server.host(cache_dir=str(cache))) as agent:
            agent.call("hello", {})
            agent.call("hello", {})
        mine = archive.build().name
        assert sorted(item.name for item in cache.iterdir()) == sorted(
            [mine, mine[:-4], "agent-" + "b" * 20, "agent-" + "b" * 20 + ".pyz", recent.name, recent.name[:-4], "audit",
             "agent-notes.txt"]
        )
    finally:
        user.kill()
        user.wait()


def test_nothing_goes_where_it_cannot_be_known_what_is_in_use(tmp_path, cache):
    before = sorted(cache.iterdir())
    (tmp_path / "proc").mkdir()
    for proc in ("proc", "missing"):
        assert tidy(str(cache), "agent-" + "0" * 20, proc=str(tmp_path / proc)) == []
    assert sorted(cache.iterdir()) == before
    assert len(tidy(str(cache), "agent-" + "a" * 20)) == 2 and sorted(cache.iterdir()) == before[:2]


def test_a_link_is_removed_and_not_what_it_leads_to(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    link = tmp_path / ("agent-" + "f" * 20)
    link.symlink_to(precious)
    os.utime(link, (LONG_AGO, LONG_AGO), follow_symlinks=False)
    tidy(str(tmp_path), "agent-" + "a" * 20, now=time.time() + 2 * UNUSED)
    assert not link.is_symlink() and (precious / "file").exists()
