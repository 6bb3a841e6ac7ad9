"""The embedded host for tests marked ``lab``: `fab` as a user runs it, on the seed profile in the user's own cache.

The venv is built on first use (gigabytes) and used again later. Tests find it unpatched and leave it unpatched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.data_fixtures import end_servers

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


def fab(*arguments: str, program: str = "fab", cwd: Path = ROOT, timeout: float = 600, **environment: str) -> Done:
    """Run the console script in a process of its own."""
    script = Path(sys.executable).with_name(program)
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "COV"))}
    done = subprocess.run(
        [str(script), *arguments],
        cwd=cwd,
        env={**plain, "COLUMNS": "100", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert "Traceback (most recent call last)" not in done.stderr
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def lab() -> Iterator[None]:
    """The seed lab: up and unpatched, before and after."""
    end_servers()
    up = fab("lab.up", timeout=3000)
    assert up.code == 0, up.err
    assert fab("patch", "--revert", "--force").code == 0
    yield
    fab("patch", "--revert", "--force")
    fab("lab.down")
