"""What people see of runs: logs, tables, the live view, in terminals and without one."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
import rich.console

from remoteops.console import Console, words
from remoteops.console import status as status_views
from remoteops.console.live import LiveView
from remoteops.console.logview import LogView, Neutral
from remoteops.errors import ConnectionLost
from remoteops.inventory import Host
from remoteops.logs import Target

STATUS: dict[str, Any] = {
    "run": "0003-1130-120000-ab12",
    "host": "kimi",
    "path": "/state/runs/0003-1130-120000-ab12",
    "state": "running",
    "label": "llama 8B",
    "phase": "extract",
    "samples": 120,
    "samples_total": 1000,
    "tokens": 245_760,
    "tokens_total": 2_048_000,
    "bytes": 8_000_000_000,
    "tokens_per_s": 41_234.5,
    "tokens_per_s_mean": 40_100.0,
    "eta_s": 43.7,
    "elapsed_s": 1100.0,
    "started": 1_796_000_000.0,
    "gpus": [
        {"index": n, "name": "H200", "memory_used": 80 << 30, "memory_total": 140 << 30, "utilization": 90 + n}
        for n in range(2)
    ],
    "disk": {"path": "/data", "free": 500 << 30, "total": 2 << 40},
    "last_error": None,
    "log_bytes": 1234,
    "survives": "setsid",
}


class Screen(Console):
    """A console whose output is kept; ``width`` makes it a terminal of that size."""

    def __init__(
        self, *, json: bool = False, width: int | None = None, color: bool = False, encoding: str = "utf-8"
    ) -> None:
        super().__init__(json)
        self.bytes = io.BytesIO()
        stream = io.TextIOWrapper(self.bytes, encoding=encoding, write_through=True)
        screen = rich.console.Console(
            file=stream,
            force_terminal=width is not None,
            width=width or 200,
            height=24,
            highlight=False,
            no_color=not color,
            color_system="truecolor" if color else None,
            legacy_windows=False,
        )
        self.__dict__["rich"] = self.__dict__["aside"] = screen  # cached properties of Console
        self.documents: list[dict[str, Any]] = []

    def document(self, value: dict[str, Any]) -> None:
        self.documents.append(json.loads(json.dumps(value)))

    def event(self, value: dict[str, Any]) -> None:
        self.document(value)

    @property
    def text(self) -> str:
        return self.bytes.getvalue().decode()


def targets(*names: str) -> list[Target]:
    return [Target(Host(name=name)) for name in names]


# -- logs -----------------------------------------------------------------------------------------------------------
HOSTILE = (
    b"ok \x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b]8;;http://x\x1b\\link \x1bc\x1b(B \xc2\x9b31m \x00\x07 bar\b\r50%\r"
    b"\xe2\x82\xac\n"
)


def test_terminal_control_is_taken_out_and_text_bars_and_characters_stay() -> None:
    assert Neutral().feed(HOSTILE) == "ok red  link  31m  bar\b\r50%\r€\n".encode()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_a_sequence_cut_in_two_is_taken_out_all_the_same(size: int) -> None:
    neutral = Neutral()
    got = b"".join(neutral.feed(HOSTILE[at : at + size]) for at in range(0, len(HOSTILE), size)) + neutral.close()
    assert b"\x1b" not in got and b"\x00" not in got and b"\xc2\x9b" not in got and got.endswith("\r50%\r€\n".encode())


def test_an_endless_sequence_is_not_waited_for() -> None:
    neutral = Neutral()
    got = neutral.feed(b"\x1b]" + b"x" * 100_000) + neutral.feed(b"y\n")
    assert got.endswith(b"y\n") and b"\x1b" not in got


def test_one_log_is_shown_as_it_is_and_raw_means_raw() -> None:
    for raw, expected in ((True, HOSTILE), (False, Neutral().feed(HOSTILE))):
        out = io.BytesIO()
        view = LogView(Screen(), targets("kimi"), raw=raw, out=out)
        view.log(0, HOSTILE)
        assert out.getvalue() == expected


def test_several_logs_carry_their_names_and_long_lines_stay_whole() -> None:
    out = io.BytesIO()
    view = LogView(Screen(), targets("a", "host-b"), out=out)
    long = b"x" * 300_000
    for piece in (b"one\ntw", b"o\n", long[:150_000]):
        view.log(0, piece)
    view.log(1, b"three\n")
    view.log(0, long[150_000:] + b"\nunfinished")
    view.ended(0, {**STATUS, "state": "done"})
    assert out.getvalue().split(b"\n") == [
        b"a      | one",
        b"a      | two",
        b"host-b | three",
        b"a      | " + long,
        b"a      | unfinished",
        b"",
    ]


def test_two_runs_of_one_host_are_told_apart() -> None:
    out = io.BytesIO()
    host = Host(name="a")
    view = LogView(Screen(), [Target(host, "0001"), Target(host, "0002")], out=out)
    view.log(1, b"x\n")
    assert out.getvalue() == b"a/0002 | x\n"


def test_json_lines_hold_every_line_and_the_end() -> None:
    screen = Screen(json=True)
    view = LogView(screen, targets("kimi"), out=io.BytesIO())
    view.status(0, STATUS)
    view.log(0, b"one\ntw")
    view.log(0, "€ \ntail".encode())
    view.notice(0, "lost", "link lost")
    view.ended(0, {**STATUS, "state": "failed"})
    assert [document.get("text") for document in screen.documents if document["event"] == "line"] == [
        "one",
        "tw€ ",
        "tail",
    ]
    assert screen.documents[-1]["status"]["state"] == "failed" and {
        document["run"] for document in screen.documents
    } == {STATUS["run"]}


def test_our_own_words_never_mix_with_the_log() -> None:
    screen, out = Screen(), io.BytesIO()
    view = LogView(screen, targets("kimi"), out=out)
    view.status(0, STATUS)
    view.log(0, b"line without end")
    view.notice(0, "lost", "the link was lost")
    view.failed(0, ConnectionLost("gone", host="kimi"))
    assert out.getvalue() == b"line without end\n" and "the link was lost" in screen.text and "gone" in screen.text


# -- the live view --------------------------------------------------------------------------------------------------
def drawn(width: int, *, encoding: str = "utf-8", height: int = 24) -> str:
    screen = Screen(width=width, encoding=encoding)
    screen.aside.height = height
    view = LiveView(screen, "kimi")
    for phase in ("connect", "audit", "patch"):
        view.phase(phase)
    view.status(0, STATUS)
    view.log(0, b"loading\rloading 50%\rloading 100%\nstep 1\nstep 2 of many\nhalf a li")
    return view.render().plain


def test_the_live_view_shows_phases_progress_speed_gpus_and_the_last_lines() -> None:
    text = drawn(120)
    for part in (
        "✓ connect",
        "✓ patch",
        "● extract",
        "○ verify",
        "12.0%",
        "246 k/2.05 M tokens",
        "41.2 k tok/s now",
        "44 s left",
        "GPU 0",
        "90%",
        "80.0 GiB / 140.0 GiB",
        "loading 100%",
        "step 2 of many",
        "half a li",
    ):
        assert part in text
    assert "loading 50%" not in text


@pytest.mark.parametrize("width", [200, 80, 59, 40, 20, 10])
def test_it_fits_any_window(width: int) -> None:
    for height in (24, 8, 3):
        lines = drawn(width, height=height).split("\n")
        assert all(len(line) < width for line in lines) and len(lines) < height
    assert "running" in drawn(max(width, 40))


def test_it_needs_no_unicode() -> None:
    assert drawn(100, encoding="ascii").isascii()


def test_no_color_means_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    console = rich.console.Console(file=stream, force_terminal=True, width=100, color_system="truecolor")
    view = LiveView(Screen(), "kimi")
    view.status(0, STATUS)
    console.print(view.render())
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", stream.getvalue()) and "running" in stream.getvalue()


def test_a_terminal_is_drawn_in_place_and_left_tidy() -> None:
    screen = Screen(width=80)
    with LiveView(screen, "kimi") as view:
        view.phase("connect")
        view.status(0, STATUS)
        view.ended(0, {**STATUS, "state": "done", "reason": "finished"})
    assert "finished" in screen.text and screen.text.count("\x1b[?25l") == screen.text.count("\x1b[?25h") == 1


def test_without_a_terminal_there_are_plain_lines_when_something_changes_and_every_ten_seconds() -> None:
    screen = Screen()
    now = [0.0]
    with LiveView(screen, "kimi", clock=lambda: now[0]) as view:
        view.phase("connect")
        for second in range(25):
            now[0] = float(second)
            view.status(0, {**STATUS, "tokens": 1000 * second})
        view.notice(0, "lost", "the link was lost")
        view.ended(0, {**STATUS, "state": "failed", "reason": "exit code 1"})
    lines = screen.text.splitlines()
    assert "\x1b" not in screen.text
    assert sum("tokens" in line and "running" in line for line in lines) == 3
    assert any("the link was lost" in line for line in lines) and "exit code 1" in lines[-1]


def test_a_failed_run_fails_the_phase_it_was_in() -> None:
    view = LiveView(Screen(width=120), "kimi")
    view.status(0, {**STATUS, "state": "loading"})
    view.ended(
        0, {**STATUS, "state": "lost", "reason": "killed", "last_error": {"message": "CUDA error", "log_offset": 77}}
    )
    text = view.render().plain
    assert "✗ load" in text and "killed" in text and "CUDA error (log byte 77)" in text


# -- tables ---------------------------------------------------------------------------------------------------------
def test_one_status_in_full_and_its_exit_code() -> None:
    screen = Screen()
    failed = {
        **STATUS,
        "state": "lost",
        "reason": "killed by SIGKILL from outside; out of memory",
        "evidence": ["kernel log: Killed process 7"],
        "last_error": {"message": "boom\x1b[31m", "log_offset": 5, "hint": "look"},
    }
    assert status_views.show(screen, STATUS) == 0 and status_views.show(screen, failed) == 1
    for part in (
        "running",
        "12.0%",
        "GPU 1 H200: 91 %",
        "500.0 GiB left",
        "Killed process 7",
        "log, byte 5",
        "do: look",
        "setsid",
    ):
        assert part in screen.text
    assert "\x1b" not in screen.text


def test_the_overview_names_unreachable_hosts_and_takes_the_worst_exit_code() -> None:
    document = {
        "hosts": [
            {"host": "kimi", "runs": [STATUS]},
            {"host": "idle", "runs": []},
            {"host": "gone", "runs": [], "error": {"exit_code": 3, "message": "refuses the connection"}},
        ]
    }
    screen = Screen()
    assert status_views.overview(screen, document) == 3
    assert "unreachable" in screen.text and "no runs" in screen.text and "41.2 k" in screen.text
    machine = Screen(json=True)
    assert status_views.overview(machine, document) == 3 and machine.documents == [document] and machine.text == ""


def test_stopping_says_whether_the_memory_is_free() -> None:
    screen = Screen()
    assert status_views.stopped(screen, {**STATUS, "state": "stopped", "gpu_released": True, "already": False}) == 0
    assert status_views.stopped(screen, {**STATUS, "state": "stopped", "gpu_released": False, "already": False}) == 1
    assert "GPU memory is free" in screen.text and "NOT free" in screen.text


@pytest.mark.parametrize("width", [160, 100, 70, 45])
def test_the_watched_table_fits_the_window(width: int) -> None:
    screen = Screen(width=width)
    with status_views.StatusTable(screen, targets("kimi", "other")) as view:
        view.status(0, STATUS)
        view.notice(1, "lost", "the link was lost")
    assert "kimi" in screen.text and "running" in screen.text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (999, "999"), (1234, "1.23 k"), (999_999, "1 M"), (2_048_000, "2.05 M"), (12.34, "12.3")],
)
def test_counts(value: float | None, text: str) -> None:
    assert words.count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0 s"),
        (59.4, "59 s"),
        (61, "1 min 01 s"),
        (3725, "1 h 02 min"),
        (90_000, "1 d 01 h"),
        (float("inf"), "-"),
    ],
)
def test_spans(value: float | None, text: str) -> None:
    assert words.span(value) == text


def test_a_bar_is_full_only_when_all_is_done() -> None:
    assert (
        words.bar(0.999, 10) == "█" * 9 + "░"
        and words.bar(1.0, 10) == "█" * 10
        and words.bar(None, 4, ascii_only=True) == "...."
    )
