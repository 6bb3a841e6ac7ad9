"""How results reach a person or a program. Only tasks use it; nothing below them prints.

With ``--json`` stdout carries one document (or JSON lines for streams) and nothing else; what a person may want to
see meanwhile goes to stderr. Text from a host is neutralised by ``plain`` before it is shown.
"""

from __future__ import annotations

import io
import json
import re
import sys
from functools import cached_property
from typing import TYPE_CHECKING, Any

from remoteops.errors import RemoteOpsError

if TYPE_CHECKING:
    from rich.console import Console as Rich

__all__ = ["Console", "plain"]

# C0 and C1 controls, and the marks that reverse the direction of text: all can make a terminal show what is not there.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """Text that is safe on a terminal: line feeds and tabs stay, every other control is shown as its code."""
    return _CONTROL.sub(
        lambda found: f"\\x{ord(found[0]):02x}" if ord(found[0]) < 256 else f"\\u{ord(found[0]):04x}", text
    )


def _pass_on() -> None:
    """Called while a BrokenPipeError is handled; the task's end deals with it."""
    raise


class Console:
    """Where a task's output goes. ``rich`` is for people, ``document`` and ``event`` are for programs."""

    def __init__(self, json: bool = False) -> None:
        self.json = json
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            # A sign that the locale lacks, or a file name that is no text, must not end a task halfway.
            sys.stdout.reconfigure(errors="backslashreplace")

    @cached_property
    def rich(self) -> Rich:
        """For results: stdout, or stderr where stdout belongs to JSON."""
        import rich.console

        made = rich.console.Console(stderr=self.json, highlight=False, soft_wrap=False)
        # rich's own answer to `| head` is exit code 1, which means "the answer is no" here.
        made.on_broken_pipe = _pass_on  # type: ignore[method-assign]
        return made

    @cached_property
    def aside(self) -> Rich:
        """For progress, questions and errors: always stderr."""
        import rich.console

        return rich.console.Console(stderr=True, highlight=False)

    def say(self, text: str, style: str = "") -> None:
        """A line of a result for people; markup in it is not interpreted. Silent with --json."""
        if not self.json:
            self.rich.print(plain(text), markup=False, style=style or None, soft_wrap=True)

    def note(self, text: str) -> None:
        """A line about what is being done, on stderr."""
        self.aside.print(plain(text), markup=False, style="dim", soft_wrap=True)

    def document(self, value: dict[str, Any]) -> None:
        """The one JSON document of a task."""
        text = json.dumps(value, indent=2, default=str, ensure_ascii=False)
        try:
            text.encode(sys.stdout.encoding or "utf-8")
        except UnicodeEncodeError:
            # A terminal in another encoding, or a file name that is not UTF-8: escapes mean the same to a reader.
            text = json.dumps(value, indent=2, default=str)
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def event(self, value: dict[str, Any]) -> None:
        """One JSON line of a stream."""
        sys.stdout.write(json.dumps(value, default=str, ensure_ascii=True) + "\n")
        sys.stdout.flush()

    def error(self, error: RemoteOpsError) -> None:
        """What went wrong and what to do: a document with --json, a few lines on stderr otherwise."""
        if self.json:
            self.document(error.as_dict())
            return
        first, *rest = plain(str(error)).split("\n")
        self.aside.print(f"{type(error).__name__}: ", end="", style="bold red", markup=False, soft_wrap=True)
        self.aside.print("\n".join([first, *rest]), markup=False, soft_wrap=True)

    def confirm(self, question: str, *, yes: bool = False) -> bool:
        """Ask on a terminal; without one only ``yes`` says yes. Anything but y or yes means no."""
        if yes:
            return True
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            return False
        self.aside.print(plain(question) + " [y/N] ", end="", markup=False)
        try:
            return input().strip().lower() in ("y", "yes")
        except EOFError:
            return False
