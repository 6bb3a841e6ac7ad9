"""Chat templates and loss masks: what the model itself writes is trained on, whatever the tokenizer can do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from remoteops.agent.extraction import tokens
from remoteops.agent.protocol import AgentError
from tests.data_fixtures import in_venv

SPECIALS = ["<|im_start|>", "<|im_end|>"]


def chatml(messages: list[dict[str, Any]], prompt: bool) -> str:
    text = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)
    return text + ("<|im_start|>assistant\n" if prompt else "")


def thinking(messages: list[dict[str, Any]], prompt: bool) -> str:
    """Reasoning is dropped from the turns before the last question, and the prompt opens it."""
    last = max((number for number, one in enumerate(messages) if one["role"] == "user"), default=-1)
    text = ""
    for number, one in enumerate(messages):
        content = one["content"]
        if one["role"] == "assistant" and number < last:
            content = content.split("</think>")[-1].lstrip("\n")
        text += f"<|im_start|>{one['role']}\n{content}<|im_end|>\n"
    return text + ("<|im_start|>assistant\n<think>\n" if prompt else "")


class Template:
    """A tokenizer as far as Renderer needs one: a real template, characters as tokens, special tokens as one each."""

    all_special_tokens = SPECIALS

    def __init__(self, template: Callable[[list[dict[str, Any]], bool], str] | None, *, fast: bool) -> None:
        self.template, self.is_fast = template, fast
        self.chat_template = "there is one" if template else ""

    def get_added_vocab(self) -> dict[str, int]:
        return {name: 1000 + number for number, name in enumerate(SPECIALS)}

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **options: Any
    ) -> str:
        assert not tokenize
        assert self.template is not None
        return self.template(messages, add_generation_prompt)

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, return_offsets_mapping: bool = False
    ) -> dict[str, Any]:
        if return_offsets_mapping and not self.is_fast:
            raise NotImplementedError("no offsets in Python tokenizers")
        ids, offsets, at = [], [], 0
        while at < len(text):
            name = next((one for one in SPECIALS if text.startswith(one, at)), text[at])
            ids.append(self.get_added_vocab().get(name, ord(name[0])))
            offsets.append((at, at + len(name)))
            at += len(name)
        return {"input_ids": ids, "offset_mapping": offsets}


CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "assistant? hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "bye"},
]


@pytest.mark.parametrize("fast", [True, False])
def test_every_assistant_turn_is_trained_up_to_its_end_token_and_nothing_else(fast: bool) -> None:
    ids, mask = tokens.Renderer(Template(chatml, fast=fast)).chat(CHAT)
    assert len(ids) == len(mask)
    assert [(text, end) for text, end in spans(ids, mask)] == [("hello", True), ("bye", True)]


def spans(ids: list[int], mask: list[int]) -> list[tuple[str, bool]]:
    """(text, ends with the end-of-turn token) of each trained run."""
    found: list[tuple[str, bool]] = []
    run: list[int] = []
    for one, take in [*zip(ids, mask, strict=True), (0, 0)]:
        if take:
            run.append(one)
        elif run:
            found.append(("".join(chr(i) for i in run if i < 1000), run[-1] == 1001))
            run = []
    return found


@pytest.mark.parametrize("fast", [True, False])
def test_a_template_that_drops_reasoning_from_earlier_turns_is_masked_right(fast: bool) -> None:
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nlong\n</think>\nfirst"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "<think>\nmore\n</think>\nsecond"},
    ]
    ids, mask = tokens.Renderer(Template(thinking, fast=fast)).chat(chat)
    assert spans(ids, mask) == [("first", True), ("more\n</think>\nsecond", True)]


def test_a_conversation_that_begins_with_the_assistant_is_masked_from_its_text() -> None:
    ids, mask = tokens.Renderer(Template(chatml, fast=True)).chat(
        [{"role": "assistant", "content": "welcome"}, {"role": "user", "content": "x"}]
    )
    assert spans(ids, mask) == [("welcome", True)]


def test_boundaries_inside_a_token_fall_back_to_the_agreeing_prefix() -> None:
    def encode(text: str) -> list[int]:
        out, at = [], 0
        while at < len(text):
            step = 2 if text[at : at + 2] == "ab" else 1
            out.append(hash(text[at : at + step]) % 1000)
            at += step
        return out

    ids, mask = tokens.mask_by_pieces(encode, "xabyz", [(2, 4)])
    assert ids == encode("xabyz")
    assert len(mask) == len(ids) == 4
    assert mask[0] == 0
    assert mask[3] == 0


@pytest.mark.parametrize(
    ("turns", "told"),
    [
        ([{"role": "wizard", "content": "x"}], "unknown role 'wizard'"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "image_url"),
        ([{"role": "user"}], "no content"),
        ([], "no turns"),
        (["hi"], "no object"),
    ],
)
def test_turns_that_cannot_be_used_say_why(turns: list[Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        tokens.normalize(turns)


def test_the_usual_spellings_mean_the_same() -> None:
    assert tokens.normalize([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    assert (
        tokens.normalize([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}])[
            0
        ]["content"]
        == "ab"
    )


def test_conversations_without_a_chat_template_are_one_clear_error() -> None:
    with pytest.raises(AgentError, match="no chat template"):
        tokens.Renderer(Template(None, fast=True)).chat(CHAT)


REAL = """
import json, sys, pathlib, data_models
from remoteops.agent.extraction import dataset, tokens
folder = pathlib.Path(sys.argv[1])
chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "grüß dich 你好"},
        {"role": "assistant", "content": "<think>\\nhm\\n</think>\\neins"},
        {"role": "user", "content": "weiter"}, {"role": "assistant", "content": "<think>\\nja\\n</think>\\nzwei 🙂"}]
(folder / "d.jsonl").write_text(json.dumps({"messages": chat}) + "\\n")
out = {}
for kind in ("chatml", "marked", "thinking", "slow"):
    data_models.tokenizer(kind, folder / kind)
    job = {"dataset": str(folder / "d.jsonl"), "model": str(folder / kind), "samples": None, "max_length": 500}
    job["trust_remote_code"] = kind == "slow"
    tokenizer = tokens.load_tokenizer(job["model"], kind == "slow")
    row = dataset.load(job, tokenizer).rows[0]
    assert tokenizer.is_fast == (kind != "slow")
    runs, run = [], []
    for one, take in [*zip(row.input_ids, row.loss_mask), (0, 0)]:
        if take: run.append(one)
        elif run: runs.append(tokenizer.decode(run)); run = []
    whole = tokenizer.apply_chat_template(chat, tokenize=False)
    assert row.input_ids == tokenizer(whole, add_special_tokens=False)["input_ids"], kind
    out[kind] = runs
try:
    tokens.load_tokenizer(str(folder / "slow"), False)
    out["refused"] = ""
except tokens.AgentError as error:
    out["refused"] = error.hint
print("RESULT" + json.dumps(out))
"""


@pytest.mark.lab
@pytest.mark.parametrize("profile", ["seed", "current"])
def test_real_tokenizers_fast_marked_and_slow_agree_on_what_is_trained(tmp_path: Path, profile: str) -> None:
    out = json.loads(in_venv(REAL, str(tmp_path), profile=profile).split("RESULT")[1])
    whole = ["<think>\nhm\n</think>\neins<|im_end|>", "<think>\nja\n</think>\nzwei 🙂<|im_end|>"]
    assert out["chatml"] == whole
    assert out["marked"] == whole
    assert out["thinking"] == ["eins<|im_end|>", "ja\n</think>\nzwei 🙂<|im_end|>"]
    assert [part.replace(" ", "") for part in out["slow"]] == [part.replace(" ", "") for part in out["thinking"]]
    assert "trust_remote_code: true" in out["refused"]
