"""An agent for a use case: the one that its caller has open, or one of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from remoteops.remote import Agent

Given = TypeVar("Given")


@contextlib.contextmanager
def using(host: Any, agent: Given | None) -> Iterator[Given | Agent]:
    """``agent`` where there is one, and it stays open; else a fresh one, closed at the end. Raises LinkError."""
    if agent is not None:
        yield agent
        return
    from remoteops.remote import open_agent

    with open_agent(host) as opened:
        yield opened
