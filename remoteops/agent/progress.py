"""From a run's events to its status: phases, counters, rates, time left, the last error.

Rates are taken over a clock that no one can set back: ``now`` is seconds on any steady clock.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Deque, Dict, Optional, Tuple

STATE_OF_PHASE = {
    "queued": "queued",
    "starting": "starting",
    "start": "starting",
    "load": "loading",
    "loading": "loading",
    "extract": "running",
    "running": "running",
    "verify": "verifying",
    "verifying": "verifying",
    "close": "verifying",
}
COUNTERS = ("samples", "samples_total", "tokens", "tokens_total", "bytes")
WINDOW = 30.0
"""Seconds over which "now" is meant when a rate is given."""


class Progress:
    """Feed it events in order; ask it for ``fields()`` at any time. ``speaks``: the program is known to send events."""

    def __init__(self, started: float, *, speaks: bool) -> None:
        self.started = started
        # A program that tells nothing about itself runs from its first moment on.
        self.state = "starting" if speaks else "running"
        self.phase = ""
        self.phase_since = started
        self.counters: Dict[str, int] = {}
        self.error: Optional[Dict[str, Any]] = None
        self.notice = ""
        self.outcome: Optional[Dict[str, Any]] = None
        self.paused: Optional[Dict[str, Any]] = None
        self._points: Deque[Tuple[float, int]] = deque()
        self._first: Optional[Tuple[float, int]] = None
        self._reported = 0.0
        self._reported_at = started

    def feed(self, event: Dict[str, Any], now: float, *, log_offset: Optional[int] = None) -> None:
        """Take in one event that was seen at ``now``; ``log_offset`` is how long the log was then (bytes)."""
        kind = event.get("event")
        if kind == "phase":
            self.phase = str(event.get("phase") or "")
            self.phase_since = now
            self.state = STATE_OF_PHASE.get(self.phase, "running")
        elif kind == "progress":
            self._count(event, now)
        elif kind == "notice":
            self.notice = str(event.get("text") or "")
        elif kind == "failure":
            self.error = {
                "kind": event.get("kind") or "",
                "message": str(event.get("message") or ""),
                "hint": event.get("hint") or "",
                "log_offset": event.get("log_offset", log_offset),
            }
        elif kind == "outcome":
            self.outcome = {"state": event.get("state"), "summary": event.get("summary") or {}}
        elif kind == "paused":
            self.paused = {name: value for name, value in event.items() if name not in ("event", "t")}
        elif kind == "resumed":
            self.paused = None

    def _count(self, event: Dict[str, Any], now: float) -> None:
        for name in COUNTERS:
            value = event.get(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                self.counters[name] = int(value)
        rate = event.get("tokens_per_s")
        if isinstance(rate, (int, float)) and rate > 0:
            self._reported, self._reported_at = float(rate), now
        if "tokens" in event:
            tokens = self.counters.get("tokens", 0)
            if self._first is None or tokens < self._points[-1][1]:
                self._first = (now, tokens)
                self._points.clear()
            self._points.append((now, tokens))
            while len(self._points) > 2 and self._points[1][0] <= now - WINDOW:
                self._points.popleft()

    def rates(self, now: float) -> Tuple[float, float]:
        """(tokens a second over the last half minute, tokens a second since the first count)."""
        if not self._points or self._first is None:
            return 0.0, 0.0
        (then, before), (last, tokens) = self._points[0], self._points[-1]
        # A stalled engine sends nothing: the time since its last word counts, or a stall would look like speed.
        quiet = now - last
        span = (last - then) + (quiet if quiet > WINDOW / 3 else 0.0)
        recent = (tokens - before) / span if span > 0 and len(self._points) > 1 else 0.0
        if recent == 0.0 and len(self._points) == 1 and now - self._reported_at < WINDOW:
            recent = self._reported
        whole = last - self._first[0]
        mean = (tokens - self._first[1]) / whole if whole > 0 else recent
        return recent, mean

    def fields(self, now: float) -> Dict[str, Any]:
        """The part of status.json that comes from the engine's events."""
        recent, mean = self.rates(now)
        left = self.counters.get("tokens_total", 0) - self.counters.get("tokens", 0)
        pace = recent or mean
        return {
            "phase": self.phase,
            "phase_s": round(now - self.phase_since, 1),
            **{name: self.counters.get(name) for name in COUNTERS},
            "tokens_per_s": round(recent, 1),
            "tokens_per_s_mean": round(mean, 1),
            "eta_s": round(left / pace, 1)
            if pace > 0 and left > 0
            else (0.0 if self.counters.get("tokens_total") and left <= 0 else None),
            "last_error": self.error,
            "notice": self.notice,
            "paused": self.paused,
            "summary": (self.outcome or {}).get("summary"),
        }
