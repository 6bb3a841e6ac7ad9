"""Conversations to token ids and a loss mask, with the model's own tokenizer and chat template.

The mask is 1 on what the model itself would have written: from behind the generation prompt to the end-of-turn token
of every assistant turn. Spans are found in the rendered text (the render of the turns before, with the generation
prompt, is a prefix of the whole), so any template works; a template with {% generation %} marks says them itself.
Spans become tokens by offsets, or, for tokenizers written in Python that have none (Kimi's), by tokenising the pieces
between the boundaries.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from remoteops.agent import modelinfo
from remoteops.agent.protocol import AgentError
from remoteops.agent.rundir import read_json

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
Span = Tuple[int, int]


def load_tokenizer(model: str, trust_remote_code: bool = False) -> Any:
    """The model's tokenizer. Raises AgentError(MissingModel) when it has none, or when it is code and that is not
    allowed."""
    if not trust_remote_code and _is_code(model):
        # Asked first: the library would wait for somebody to type "yes".
        raise AgentError(
            "MissingModel",
            "the tokenizer of %s is Python code of the model's own" % model,
            tried="auto_map in tokenizer_config.json",
            hint="if you trust it, set `trust_remote_code: true` in the workload of inventory.yaml",
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(os.path.expanduser(model), trust_remote_code=trust_remote_code)
    except Exception as error:  # noqa: BLE001 - the loader raises what it likes; the user gets its words
        text = " ".join(str(error).split())[:400]
        if "trust_remote_code" in text and not trust_remote_code:
            raise AgentError(
                "MissingModel",
                "the tokenizer of %s is Python code of the model's own" % model,
                tried=text,
                hint="if you trust it, set `trust_remote_code: true` in the workload of inventory.yaml",
            ) from None
        raise AgentError(
            "MissingModel",
            "the tokenizer of %s cannot be loaded: %s" % (model, text),
            tried="transformers.AutoTokenizer.from_pretrained",
            hint="the model folder needs its tokenizer files",
        ) from None


def _is_code(model: str) -> bool:
    try:
        folder = modelinfo.find(model)
    except AgentError:
        return False
    config = read_json(os.path.join(folder, "tokenizer_config.json")) or {}
    return "AutoTokenizer" in (config.get("auto_map") or {})


def template_sha256(tokenizer: Any) -> Optional[str]:
    """Hash of the chat template; None when there is none."""
    template = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(repr(template).encode()).hexdigest() if template else None


def normalize(turns: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """Turns as role and content, whichever of the usual spellings they came in (from/value, human/gpt, …).

    Raises ValueError naming what cannot be used: an unknown role, content that is no text, no turn at all.
    """
    messages = []
    for position, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise ValueError("turn %d is no object" % position)
        role = str(turn.get("role") or turn.get("from") or "")
        if role.lower() not in ROLES:
            raise ValueError("turn %d has the unknown role %r" % (position, role))
        content = turn.get("content", turn.get("value"))
        if isinstance(content, (list, tuple)):
            kinds = {str(part.get("type")) for part in content if isinstance(part, Mapping)} - {"text"}
            if kinds or not all(isinstance(part, Mapping) for part in content):
                raise ValueError(
                    "turn %d holds %s; only text can be extracted"
                    % (position, ", ".join(sorted(kinds)) or "no text parts")
                )
            content = "".join(str(part.get("text") or "") for part in content)
        rest = {
            key: value
            for key, value in turn.items()
            if key not in ("role", "from", "content", "value") and value is not None
        }
        if content is None and not rest.get("tool_calls"):
            raise ValueError("turn %d has no content" % position)
        messages.append({"role": ROLES[role.lower()], "content": "" if content is None else str(content), **rest})
    if not messages:
        raise ValueError("no turns")
    return messages


class Renderer:
    """One tokenizer with its template; ``chat`` and ``plain`` give (token ids, loss mask)."""

    def __init__(self, tokenizer: Any, template_arguments: Optional[Mapping[str, Any]] = None) -> None:
        self.tokenizer = tokenizer
        self.arguments = dict(template_arguments or {})
        self.offsets = bool(getattr(tokenizer, "is_fast", False))
        template = getattr(tokenizer, "chat_template", None)
        text = (
            template
            if isinstance(template, str)
            else str((template or {}).get("default", ""))
            if isinstance(template, dict)
            else ""
        )
        self.marked = self.offsets and "generation" in text and "endgeneration" in text
        # Longest first, so that <|im_end|> is not cut at a shorter token that it begins with.
        self.specials = sorted((str(one) for one in _specials(tokenizer)), key=len, reverse=True)

    def plain(self, text: str) -> Tuple[List[int], List[int]]:
        """Bare text: the tokenizer's own special tokens are added, every token counts."""
        ids = list(self.tokenizer(text)["input_ids"])
        return ids, [1] * len(ids)

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> Tuple[List[int], List[int]]:
        """Raises ValueError when the template refuses the turns or the assistant's text cannot be found in its
        render."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise AgentError(
                "DatasetError",
                "the model's tokenizer has no chat template, and the dataset holds conversations",
                hint="use a chat model, or give `text` or `input_ids`",
            )
        if self.marked:
            marked = self._by_marks(messages, tools)
            if marked is not None:
                return marked
        full = self._render(messages, tools, False)
        spans = self._spans(messages, tools, full)
        return self._align(full, spans)

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Any, prompt: bool) -> str:
        options = dict(self.arguments)
        if tools:
            options["tools"] = tools
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=prompt, **options
                )
            )
        except Exception as error:  # noqa: BLE001
            raise ValueError("the chat template refuses it: %s" % " ".join(str(error).split())[:200]) from None

    def _by_marks(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> Optional[Tuple[List[int], List[int]]]:
        options = dict(self.arguments)
        if tools:
            options["tools"] = tools
        try:
            answer = self.tokenizer.apply_chat_template(
                list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **options
            )
            ids, mask = list(answer["input_ids"]), [int(one) for one in answer["assistant_masks"]]
        except Exception:  # noqa: BLE001
            return None
        return (ids, mask) if len(ids) == len(mask) and any(mask) else None

    def _spans(self, messages: Sequence[Mapping[str, Any]], tools: Any, full: str) -> List[Span]:
        spans: List[Span] = []
        floor = 0
        for position, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            start = self._start(messages, tools, full, position, floor)
            end = self._end(messages, tools, full, position, start)
            if end > start:
                spans.append((start, end))
                floor = end
        return spans

    def _start(self, messages: Sequence[Mapping[str, Any]], tools: Any, full: str, position: int, floor: int) -> int:
        if position == 0:  # many templates refuse to render no turns at all
            content = str(messages[0]["content"]).strip()
            found = full.find(content) if content else -1
            if found < 0:
                raise ValueError("the first assistant turn is not in the rendered text")
            return found
        prompt = self._render(messages[:position], tools, True)
        # A prompt that opens a block the history drops (an empty <think>) shares only its header with the whole.
        common = _agreeing(prompt, full)
        if common < floor:
            raise ValueError("the chat template changes earlier turns; no prefix of turn %d is left" % position)
        return common

    def _end(self, messages: Sequence[Mapping[str, Any]], tools: Any, full: str, position: int, start: int) -> int:
        last = position == len(messages) - 1
        after = full if last else self._render(messages[: position + 1], tools, False)
        if full.startswith(after):
            end = len(after)
        else:  # the history's rendering of this turn differs from its rendering as the last one
            content = _answer(str(messages[position]["content"]))
            found = full.find(content, start) if content else start
            if found < 0:
                raise ValueError("the text of assistant turn %d is not in the rendered text" % position)
            end = found + len(content)
            for special in self.specials:
                if special and full.startswith(special, end):
                    end += len(special)
                    break
        # What follows the end-of-turn token (ChatML's newline) is the template's, not the model's.
        trimmed = full[start:end].rstrip()
        return start + len(trimmed) if any(trimmed.endswith(one) for one in self.specials if one) else end

    def _align(self, full: str, spans: Sequence[Span]) -> Tuple[List[int], List[int]]:
        if self.offsets:
            encoded = self.tokenizer(full, add_special_tokens=False, return_offsets_mapping=True)
            return list(encoded["input_ids"]), mask_by_offsets(encoded["offset_mapping"], spans)
        return mask_by_pieces(self._ids, full, spans)

    def _ids(self, text: str) -> List[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def mask_by_offsets(offsets: Sequence[Span], spans: Sequence[Span]) -> List[int]:
    """1 for each token that overlaps a span; both in characters, ascending."""
    mask, at = [], 0
    for begin, end in offsets:
        while at < len(spans) and spans[at][1] <= begin:
            at += 1
        mask.append(int(at < len(spans) and end > begin and begin < spans[at][1] and end > spans[at][0]))
    return mask


def mask_by_pieces(encode: Any, full: str, spans: Sequence[Span]) -> Tuple[List[int], List[int]]:
    """Ids and mask without offsets: the pieces between the boundaries are tokenised by themselves.

    Special tokens stand at the boundaries in every usual template, so that the pieces give the same ids as the whole;
    where they do not, a boundary is where the tokens of the text before it stop to agree with the whole's.
    """
    whole = encode(full)
    cuts = [0, *(edge for span in spans for edge in span), len(full)]
    pieces = [encode(full[begin:end]) for begin, end in zip(cuts, cuts[1:])]  # noqa: RUF007
    if [one for piece in pieces for one in piece] == whole:
        mask: List[int] = []
        for number, piece in enumerate(pieces):
            mask += [number % 2] * len(piece)
        return whole, mask
    mask = [0] * len(whole)
    for begin, end in spans:
        for at in range(_agreeing(encode(full[:begin]), whole), _agreeing(encode(full[:end]), whole)):
            mask[at] = 1
    return whole, mask


def _agreeing(left: Sequence[Any], right: Sequence[Any]) -> int:
    count = 0
    for one, other in zip(left, right):
        if one != other:
            break
        count += 1
    return count


def _answer(content: str) -> str:
    """The part of an assistant's text that history keeps: without its reasoning block."""
    return content.rsplit("</think>", 1)[-1].strip()


def _specials(tokenizer: Any) -> List[str]:
    found = set(getattr(tokenizer, "all_special_tokens", None) or [])
    try:
        found.update(tokenizer.get_added_vocab())
    except Exception:  # noqa: BLE001
        pass
    return [str(one) for one in found]
