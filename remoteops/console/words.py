"""Numbers as people read them: tokens, rates, times, sizes, bars."""

from __future__ import annotations

import math
from typing import Any

from remoteops import advice

STATE_STYLE = {
    "queued": "dim",
    "starting": "cyan",
    "loading": "cyan",
    "running": "green",
    "verifying": "cyan",
    "done": "bold green",
    "failed": "bold red",
    "stopped": "yellow",
    "lost": "bold red",
}


QUIET = 20.0
"""Seconds of a silent log from which on the silence itself is told."""


def count(value: float | None) -> str:
    """1234567 -> "1.23 M"; None -> "-"."""
    if value is None:
        return "-"
    for scale, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= scale * 0.9995:
            return f"{value / scale:.3g}{unit}" if value < scale * 999.5 else f"{value / scale:.0f}{unit}"
    return f"{value:.0f}" if value == int(value) or value >= 100 else f"{value:.1f}"


def size(value: float | None) -> str:
    """Bytes in binary units: 99_999_999 -> "95.4 MiB"."""
    if value is None:
        return "-"
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.2f} TiB"


def span(seconds: float | None) -> str:
    """Seconds as the two largest units: 3725 -> "1 h 02 min"."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def fit(text: str, encoding: str) -> str:
    """``text`` with what this encoding cannot show replaced, so that printing it never fails."""
    if text.isascii() or encoding.lower().startswith("utf"):
        return text
    return text.replace("·", "|").encode(encoding, "replace").decode(encoding)


def bar(part: float | None, width: int, *, ascii_only: bool = False) -> str:
    """A bar of ``width`` cells filled for the share ``part`` (0..1)."""
    if width <= 0:
        return ""
    share = 0.0 if part is None or not math.isfinite(part) else min(1.0, max(0.0, part))
    full, empty = ("#", ".") if ascii_only else ("█", "░")
    # Full only when done: 99.9 % must not look finished.
    filled = width if share >= 1 else min(width - 1, int(share * width + 0.5))
    return full * filled + empty * (width - filled)


def share(status: dict[str, Any]) -> float | None:
    """How much of the work is done (0..1), by tokens, else by samples; None when nobody knows."""
    for name in ("tokens", "samples"):
        total, done = status.get(f"{name}_total"), status.get(name)
        if total and done is not None:
            return float(done) / float(total)
    return None


def gpu_memory(status: dict[str, Any]) -> tuple[float, float] | None:
    """(bytes used, bytes there) of all GPUs of a run; None when nobody knows."""
    gpus = status.get("gpus") or []
    pairs = [(gpu.get("memory_used"), gpu.get("memory_total")) for gpu in gpus]
    if not pairs or any(used is None or not total for used, total in pairs):
        return None
    return float(sum(used for used, _ in pairs)), float(sum(total for _, total in pairs))


def activity(status: dict[str, Any], *, grown: float | None = None, over: float = 0.0) -> str:
    """What goes on while there are no counts yet: for how long, the GPUs' memory (``grown`` bytes in the last ``over``
    seconds), and what the log said last. "" once there is progress, or nothing to tell."""
    if status.get("state") not in ("starting", "loading", "verifying"):
        return ""
    parts = [f"{status['state']} for {span(status.get('phase_s'))}"] if status.get("phase_s") is not None else []
    memory = gpu_memory(status)
    if memory is not None:
        text = f"GPU memory {size(memory[0])} of {size(memory[1])}"
        if grown is not None and over > 0:
            text += f" ({'+' if grown >= 0 else '-'}{size(abs(grown))} in {span(over)})"
        parts.append(text)
    last = status.get("log_last") or {}
    if last.get("text"):
        quiet = last.get("quiet_s") or 0
        parts.append(f"{f'quiet for {span(quiet)}, before that' if quiet >= QUIET else 'log'}: {last['text']}")
        known = advice.stall(str(last["text"]), float(quiet))
        if known:
            parts.append(f"known: {known}")
    return " · ".join(parts)


def one_line(status: dict[str, Any]) -> str:
    """A run's status in one plain line."""
    doing = activity(status)
    parts = [str(status.get("run", "?")), doing or str(status.get("state", "?"))]
    done = share(status)
    if done is not None:
        parts.append(f"{done:.1%}")
    if status.get("tokens") is not None:
        total = status.get("tokens_total")
        parts.append(f"{count(status['tokens'])}{' / ' + count(total) if total else ''} tokens")
    if status.get("samples") is not None:
        total = status.get("samples_total")
        parts.append(f"{status['samples']}{f'/{total}' if total else ''} samples")
    if status.get("tokens_per_s"):
        parts.append(f"{count(status['tokens_per_s'])} tok/s")
    if status.get("eta_s"):
        parts.append(f"{span(status['eta_s'])} left")
    if status.get("reason"):
        parts.append(str(status["reason"]))
    elif status.get("elapsed_s") is not None and not doing:
        parts.append(f"{span(status['elapsed_s'])} so far")
    return " · ".join(parts)
