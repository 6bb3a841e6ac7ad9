"""Small packages written for a test: a provider and a consumer as text, audited as on a host."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from remoteops.agent.audit import engine


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return folder


class Pair:
    """A consumer ``app`` and a provider ``lib`` in a folder."""

    def __init__(self, folder: Path, lib: dict[str, str], app: dict[str, str] | str, **request: Any) -> None:
        app = {"app/__init__.py": "", "app/main.py": app} if isinstance(app, str) else app
        lib = {"lib/__init__.py": "", **lib}
        write(folder / "lib-1.0", lib)
        write(folder / "app-1.0", app)
        self.document = engine.audit(
            {
                "consumer": "app",
                "provider": "lib",
                "consumer_path": str(folder / "app-1.0"),
                "provider_path": str(folder / "lib-1.0"),
                "contracts": [],
                "all": True,
                **request,
            }
        )

    @property
    def breaks(self) -> list[tuple[int, str, str]]:
        return self._of("proved")

    @property
    def risks(self) -> list[tuple[int, str, str]]:
        return self._of("risk")

    def _of(self, confidence: str) -> list[tuple[int, str, str]]:
        return [(f["line"], f["kind"], f["detail"]) for f in self.document["findings"] if f["confidence"] == confidence]

    @property
    def unresolved(self) -> list[tuple[int, str]]:
        return [(u["line"], u["reason"]) for u in self.document["unresolved"]]

    @property
    def clean(self) -> bool:
        return (
            not self.document["findings"]
            and not self.document["unresolved"]
            and self.document["ok"] == self.document["sites"] > 0
        )
