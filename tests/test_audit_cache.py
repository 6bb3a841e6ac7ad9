"""The cache gives the same document while nothing changed, and never an old or a damaged one."""

from __future__ import annotations

import os

import pytest
from audit_fixtures import Pair

LIB = {"lib/m.py": "def f(a): ...\n", "lib/other.py": "def unused(): ...\n"}
APP = "from lib.m import f\nf(b=1)\n"


def run(tmp_path, **request):
    return Pair(tmp_path, LIB, APP, cache_dir=str(tmp_path / "cache"), **request).document


def again(tmp_path, **request):
    from remoteops.agent.audit import engine

    return engine.audit(
        {
            "consumer": "app",
            "provider": "lib",
            "consumer_path": str(tmp_path / "app-1.0"),
            "provider_path": str(tmp_path / "lib-1.0"),
            "contracts": [],
            "all": True,
            "cache_dir": str(tmp_path / "cache"),
            **request,
        }
    )


def plain(document):
    return {k: v for k, v in document.items() if k not in ("seconds", "cached")}


def test_a_second_audit_of_the_same_files_is_taken_from_the_cache(tmp_path):
    first = run(tmp_path)
    second = again(tmp_path)
    assert second["cached"] and "cached" not in first and plain(second) == plain(first)
    assert "cached" not in again(tmp_path, model="Other") and "cached" not in again(tmp_path, refresh=True)


@pytest.mark.parametrize("change", ["consumer", "provider", "new file", "same size and time"])
def test_any_change_of_a_file_is_seen(tmp_path, change):
    run(tmp_path)
    path = tmp_path / ("app-1.0/app/main.py" if change == "consumer" else "lib-1.0/lib/m.py")
    if change == "new file":
        (tmp_path / "lib-1.0" / "lib" / "fresh.py").write_text("x = 1\n")
    else:
        before = path.stat()
        path.write_text("from lib.m import f\nf(a=1)\n" if change == "consumer" else "def f(b): ...\n")
        if change == "same size and time":
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    document = again(tmp_path)
    assert "cached" not in document
    assert bool(document["findings"]) is (change == "new file")


@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_a_damaged_cache_counts_as_none(tmp_path, damage):
    first = run(tmp_path)
    kept = next((tmp_path / "cache" / "audit").glob("*.z"))
    kept.write_bytes(kept.read_bytes()[:-5] if damage is None else damage)
    assert plain(again(tmp_path)) == plain(first)
    assert again(tmp_path)["cached"]


def test_a_folder_that_cannot_hold_a_cache_is_no_error(tmp_path):
    (tmp_path / "cache").write_text("a file")
    assert run(tmp_path)["findings"]
