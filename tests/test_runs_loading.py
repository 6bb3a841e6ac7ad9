"""While a model loads there are no counts: the view tells how long, what the log said, and that memory grows."""

from __future__ import annotations

import pytest

from remoteops.agent.lastwords import KEEP, LONGEST, LastWords
from remoteops.console import words
from remoteops.console.live import LiveView
from tests.test_runs_views import STATUS, Screen

LOADING = {
    "run": "0003-1130-120000-ab12",
    "state": "loading",
    "phase": "load",
    "phase_s": 192.0,
    "elapsed_s": 200.0,
    "gpus": [{"index": 0, "memory_used": 40 << 30, "memory_total": 140 << 30, "utilization": 0}],
    "log_last": {"text": "Loading safetensors checkpoint shards: 35%", "quiet_s": 1.2},
}


@pytest.mark.parametrize(
    ("fed", "text"),
    [
        ([b"one\ntwo\n"], "two"),
        ([b"one\nhalf a ", b"line"], "half a line"),
        ([b"shards: 10%\rshards: 35%"], "shards: 35%"),
        ([b"shards: 35%\r", b"\n\n  \n"], "shards: 35%"),
        ([b"\x1b[36m(Worker pid=3)\x1b[0;0m ready\x1b]0;title\x07\n"], "(Worker pid=3) ready"),
        ([b"\xff\xc3", b"\xa4 umlaut"], "\ufffd\xe4 umlaut"),
        ([b"x" * (3 * KEEP)], "x" * LONGEST),
        ([b"\n"], ""),
    ],
)
def test_the_last_words_are_what_a_terminal_would_show_last(fed: list[bytes], text: str) -> None:
    last = LastWords()
    assert last.fields(5.0) == {"text": None, "quiet_s": None}
    for data in fed:
        last.feed(data, 7.0)
    assert last.fields(9.5) == {"text": text, "quiet_s": 2.5}


def test_a_load_is_told_with_its_time_its_memory_and_its_log() -> None:
    told = words.activity(LOADING, grown=3 << 30, over=10.0)
    assert told == (
        "loading for 3 min 12 s · GPU memory 40.0 GiB of 140.0 GiB (+3.0 GiB in 10 s) · "
        "log: Loading safetensors checkpoint shards: 35%"
    )
    silent = {**LOADING, "gpus": [], "log_last": {"text": "Starting", "quiet_s": 75.0}}
    assert words.activity(silent) == "loading for 3 min 12 s · quiet for 1 min 15 s, before that: Starting"
    assert words.activity(STATUS) == ""  # running: there are counts
    assert words.activity({"state": "loading"}) == ""  # an agent of before tells none of it
    assert "log: Loading safetensors" in words.one_line(LOADING)


@pytest.mark.parametrize(
    ("line", "cure"),
    [
        ("(Worker pid=14) WARNING [symm_mem.py:106] SymmMemCommunicator: not supported.", "disable_custom_all_reduce"),
        ("autotuner.py:615 - flashinfer.jit: [Autotuner]: Autotuning process starts ...", "enable_flashinfer_autotune"),
        ("world_size=2 rank=1 local_rank=1 distributed_init_method=tcp://10.0.0.4:9", "VLLM_HOST_IP: 127.0.0.1"),
    ],
)
def test_a_start_that_stands_still_where_others_did_is_told_with_the_cure(line: str, cure: str) -> None:
    still = {**LOADING, "log_last": {"text": line, "quiet_s": 61.0}}
    assert cure in words.activity(still)
    assert cure not in words.activity({**still, "log_last": {"text": line, "quiet_s": 5.0}})  # it may just be next
    assert "known:" not in words.activity({**still, "log_last": {"text": "Loading shards: 3%", "quiet_s": 900.0}})


def test_the_live_view_shows_it_and_the_growth_it_saw() -> None:
    now = [0.0]
    view = LiveView(Screen(width=200), "kimi", clock=lambda: now[0])
    for second in range(31):
        now[0] = float(second)
        gpu = {**LOADING["gpus"][0], "memory_used": second << 30}  # type: ignore[index]
        view.status(0, {**LOADING, "gpus": [gpu]})
    assert "GPU memory 30.0 GiB of 140.0 GiB (+10.0 GiB in 10 s)" in view.render().plain
    view.status(0, STATUS)
    assert "loading for" not in view.render().plain


def test_without_a_terminal_a_load_gives_a_line_every_ten_seconds() -> None:
    screen = Screen()
    now = [0.0]
    with LiveView(screen, "kimi", clock=lambda: now[0]) as view:
        for second in range(31):
            now[0] = float(second)
            view.status(0, {**LOADING, "phase_s": float(second), "log_last": {"text": f"shard {second}", "quiet_s": 0}})
    lines = [line for line in screen.text.splitlines() if "log: shard" in line]
    assert [line.rsplit(" ", 1)[1] for line in lines if "shard" in line][:4] == ["0", "10", "20", "30"]
