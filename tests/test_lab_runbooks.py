"""Every command of the runbooks is typed on the lab, in the order in which the page has it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.lab_fixtures import ROOT, fab, lab  # noqa: F401

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(3000), pytest.mark.usefixtures("lab")]

RUNBOOKS = sorted((ROOT / "docs" / "runbooks").glob("*.md"))
# What a page shows for a real host or a terminal is typed here for the lab and without one.
HERE = {
    "-H kimi": "",
    "--model KimiK25ForConditionalGeneration": "--model LlamaForCausalLM",
    "--to samples": "--to {tmp}/samples",
    "--html report.html": "--html {tmp}/report.html",
    "nvidia-smi -L": "true",
    "fab -H labs": "fab -H lab",
    "fab -H lab,lab-current": "fab -H lab,lab",
    "fab -H all": "fab -H lab",
}
# Exit codes other than 0, where the page's own text says so.
CODES = {"fab probe": {0, 1}, "fab extract --resume last": {0}, "fab matrix": {0}, "fab audit": {1}, "fab patch": {0}}
NEEDS_INDEX = ("fab matrix", "fab audit")


def commands(file: Path) -> list[str]:
    return [
        line.strip().split("  #")[0].strip() for line in re.findall(r"^ {4,}(fab .*)$", file.read_text(), flags=re.M)
    ]


def typed(line: str, tmp: Path) -> list[str]:
    for shown, here in HERE.items():
        line = line.replace(shown, here.format(tmp=tmp))
    words = shlex.split(line)[1:]
    task = next(word for word in words if not word.startswith("-") and word not in ("lab", "lab,lab"))
    if task in ("patch", "stop") and not {"--dry-run", "--status", "--revert"} & set(words):
        words.append("--yes")
    if task == "extract" and "--resume" not in words:
        if "--samples" in words:
            words[words.index("--samples") + 1] = "4"
        else:  # the whole dataset; what it computes, other tests compare with transformers
            words += ["--samples", "6"]
        words += ["--reference", "0"]
    return words


def prepared(file: Path, line: str, before: list[str]) -> None:
    """What the reader of a page has done before this line, and other lines of the page have not."""
    if not line.startswith("fab extract") and "--rehearse" not in line:
        return
    if file.stem in ("extraction", "new-host") and not any("extract" in one for one in before):
        assert fab("patch", "--yes").code == 0


@pytest.mark.parametrize("file", RUNBOOKS, ids=lambda file: file.stem)
def test_each_command_of_a_page_does_what_the_page_says(file: Path, tmp_path: Path) -> None:
    lines = commands(file)
    assert lines
    for number, line in enumerate(lines):
        environment = {}
        if "--purge" in line:
            environment = {"REMOTEOPS_CACHE": str(tmp_path / "cache")}  # never the one that took an hour to fill
        prepared(file, line, lines[:number])
        done = fab(*typed(line, tmp_path), timeout=1200, **environment)
        expected = next((codes for start, codes in CODES.items() if _task(line).startswith(start)), {0})
        if line.startswith(NEEDS_INDEX) and done.code != min(expected) and "TransferFailed" in done.err:
            pytest.skip("no package index can be reached")
        assert done.code in expected, f"{line}: {done.code}\n{done.out[-1500:]}\n{done.err[-1500:]}"


def _task(line: str) -> str:
    return re.sub(r" -H \S+", "", line)
