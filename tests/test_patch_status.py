"""What the status says, from the files themselves: also after pip, an editor or an upgrade had their way."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from remoteops.agent.protocol import AgentError
from tests.patch_fixtures import AFTER, BEFORE, Site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    found = Site(tmp_path)
    found.install()
    return found


def test_patched_says_that_record_differs(site: Site) -> None:
    assert site.status()["state"] == "clean"
    site.apply()
    (told,) = site.status()["patches"]
    assert told["state"] == "patched" and told["record_differs"] == ["pkg/a.py", "pkg/b.py"]
    site.revert()
    assert site.status()["state"] == "clean"


def test_partly_patched(site: Site) -> None:
    site.apply()
    site.write("pkg/a.py", BEFORE["pkg/a.py"])
    (told,) = site.status()["patches"]
    assert told["state"] == "partly patched" and {f["file"]: f["state"] for f in told["files"]} == {
        "pkg/a.py": "original",
        "pkg/b.py": "patched",
    }
    assert site.apply()["state"] == "patched"
    assert site.files() == {**BEFORE, **AFTER}


def test_edited_since_needs_force(site: Site) -> None:
    site.apply()
    site.write("pkg/a.py", b"VALUE = 99\n")
    assert site.status()["state"] == "edited since"
    with pytest.raises(AgentError, match="edited after"):
        site.revert()
    with pytest.raises(AgentError, match="edited after"):
        site.apply({"pkg/a.py": b"VALUE = 5\n"}, audited={"pkg/a.py": b"VALUE = 99\n"})
    assert site.files()["pkg/a.py"] == b"VALUE = 99\n"
    assert site.revert(force=True)[0]["outcome"] == "reverted"
    assert site.files() == BEFORE


def test_the_same_version_installed_again_is_reinstalled_since(site: Site) -> None:
    site.apply()
    site.install()
    assert site.status()["state"] == "reinstalled since"
    (record,) = site.revert()
    assert record["outcome"] == "forgotten" and site.files() == BEFORE and site.status()["state"] == "clean"


def test_after_an_upgrade_revert_only_forgets(site: Site) -> None:
    site.apply()
    newer = {**BEFORE, "pkg/a.py": b"VALUE = 'from 2.0'\n"}
    site.install("2.0", newer)
    (told,) = site.status()["patches"]
    assert told["state"] == "reinstalled since" and (told["patched_version"], told["version"]) == ("1.0", "2.0")
    assert site.revert()[0]["outcome"] == "forgotten"
    assert site.files() == newer


def test_a_new_patch_after_an_upgrade_starts_from_the_new_files(site: Site) -> None:
    site.apply()
    newer = {**BEFORE, "pkg/a.py": b"VALUE = 'from 2.0'\n"}
    site.install("2.0", newer)
    done = site.apply({"pkg/a.py": b"VALUE = 'patched 2.0'\n"}, audited=newer)
    assert done["restored"] == [] and site.status()["state"] == "patched"
    site.revert()
    assert site.files() == newer


def test_an_upgrade_that_drops_the_file(site: Site) -> None:
    site.apply({"pkg/a.py": b"VALUE = 2\n"})
    (site.root / "pkg/a.py").unlink()
    site.install("2.0", {name: data for name, data in BEFORE.items() if name != "pkg/a.py"})
    assert site.status()["state"] == "reinstalled since"
    assert site.revert()[0]["outcome"] == "forgotten"


def test_a_package_that_is_gone_leaves_orphaned_state(site: Site) -> None:
    site.apply()
    shutil.rmtree(site.root)
    assert site.status()["state"] == "orphaned"
    assert site.revert()[0]["outcome"] == "forgotten"
    assert site.status()["state"] == "clean"


def test_a_venv_sees_its_own_patches_only(tmp_path: Path) -> None:
    one, two = Site(tmp_path / "one"), Site(tmp_path / "two")
    two.state = one.state
    one.apply()
    two.apply()
    base = {"state_dir": str(one.state)}
    from remoteops.agent import patches

    assert len(patches.status(base, lambda *a, **k: None)["patches"]) == 2
    told = patches.status({**base, "venv": str(tmp_path / "two")}, lambda *a, **k: None)["patches"]
    assert [Path(p["root"]) for p in told] == [two.root]
    patches.revert({**base, "venv": str(tmp_path / "two")}, lambda *a, **k: None)
    assert one.status()["state"] == "patched" and two.files() == BEFORE


def test_a_damaged_backup_is_told_and_nothing_is_written(site: Site) -> None:
    site.apply()
    for blob in site.state.glob("patches/*/blobs/*"):
        blob.write_bytes(b"damaged")
    with pytest.raises(AgentError, match="damaged"):
        site.revert()
    assert site.files() == {**BEFORE, **AFTER} and site.left_over() == []


def test_files_edited_by_hand_are_named_though_no_patch_of_ours_is_there(site: Site) -> None:
    site.write("pkg/a.py", b"VALUE = 'by hand'\n")
    told = site.status()
    assert told["state"] == "clean" and told["foreign"] == ["pkg/a.py"]
    site.write("pkg/a.py", BEFORE["pkg/a.py"])
    site.apply()
    assert site.status()["foreign"] == []
