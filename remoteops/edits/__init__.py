"""Planned edits of a source file: pure text in, text out; formatting, comments and line ends stay.

    edit(data, [{"edit": "drop-keyword", "call": "Request", "keyword": "eos_token_id", "line": 234}], name="a.py")

Every edit is a dict: ``edit`` names its kind, the rest are that kind's arguments (documented at its function) and the
anchor (``scope``, ``line``, ``column``; positions are those of the file before any edit). An edit that is done already
changes nothing; one whose anchor is missing or ambiguous raises AnchorNotFound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remoteops.edits.draft import KINDS, Draft, Edited

__all__ = ["KINDS", "Draft", "Edited", "edit"]


def edit(data: bytes, edits: Sequence[Mapping[str, Any]], name: str = "<text>") -> Edited:
    """Apply edits in order.

    Raises AnchorNotFound (an anchor is missing or ambiguous), PatchError (the file cannot be decoded or parsed, or an
    edit would leave something that does not parse) or UsageError (the edit itself makes no sense). Nothing is written.
    """
    draft = Draft(data, name)
    for request in edits:
        draft.apply(request)
    return draft.result()
