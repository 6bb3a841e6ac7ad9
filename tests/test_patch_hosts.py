"""`fab -H a,b patch`: each host has its turn, whatever becomes of the others, and --json stays one document."""

from __future__ import annotations

import json
from typing import Any

import pytest

from remoteops import dialogs, patch, remote
from remoteops.command import Session
from remoteops.errors import Unreachable
from remoteops.planning import Plan
from remoteops.schema import Host, Workload


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Three hosts: the second cannot be reached, the others have nothing to patch."""

    class Door:
        def __init__(self, host: Host) -> None:
            self.host = host

        def __enter__(self) -> Door:
            if self.host.name == "b":
                raise Unreachable("no route", host="b")
            return self

        def __exit__(self, *_: object) -> None:
            pass

    hosts = [Host(name=name, connect="local", workload=Workload(), groups=()) for name in "abc"]
    empty = Plan({"findings": [], "consumer": {}, "provider": {}}, (), (), ())
    monkeypatch.setattr(remote, "open_agent", Door)
    planned = patch.Planned(empty, "/", {"state": "clean", "patches": []}, False)
    monkeypatch.setattr(patch, "plan", lambda host, **_: planned)
    monkeypatch.setattr(Session, "hosts", hosts)
    return Session


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_host_that_fails_does_not_keep_the_others_from_their_turn(
    session: Any, capsys: pytest.CaptureFixture[str], dry_run: bool
) -> None:
    options: dict[str, Any] = {"only": (), "model": None, "yes": True, "dry_run": dry_run, "force": False}
    assert dialogs.patching(session(["a", "b", "c"], False), **options) == 3
    told = capsys.readouterr()
    assert told.out.splitlines()[-1] == "2 of 3 hosts fine; not: b" and "Unreachable: b: no route" in told.err
    assert [line[3] for line in told.out.splitlines() if line.startswith("──")] == ["a", "b", "c"]

    assert dialogs.patching(session(["a", "b", "c"], True), **options) == 3
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["exit_code"], document["failing"]) == ("remoteops.fleet/1", 3, ["b"])
    assert [one["exit_code"] for one in document["hosts"]] == [0, 3, 0]
    assert document["hosts"][1]["error"]["kind"] == "Unreachable"
    assert document["hosts"][2]["result"]["host"] == "c"
