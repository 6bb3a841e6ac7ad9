"""The rows of a run: chosen, tokenised, cut, and each one that is dropped named with its reason."""

from __future__ import annotations

import random
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence

from remoteops.agent.extraction.records import Record, Records, open_records
from remoteops.agent.extraction.tokens import Renderer, load_tokenizer, normalize, template_sha256
from remoteops.agent.protocol import AgentError

CONVERSATION_KEYS = ("messages", "conversations", "conversation")
USABLE = ("input_ids", *CONVERSATION_KEYS, "prompt", "text")  # one of them is what a row is made of
MAX_DROPPED = 0.05
NAMED = 1000  # dropped rows that are named one by one; all are counted


class Row(NamedTuple):
    """One sample. ``index`` is the row of the dataset; both lists have the same length, in tokens; the mask holds 0
    and 1."""

    index: int  # type: ignore[assignment]  # a tuple's own index() is not needed
    input_ids: List[int]
    loss_mask: List[int]


class Loaded:
    """Rows in ascending order of index, and what happened to the rest (``report``, JSON)."""

    def __init__(self, rows: List[Row], report: Dict[str, Any]) -> None:
        self.rows = rows
        self.report = report

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def load(
    job: Mapping[str, Any],
    tokenizer: Any = None,
    *,
    vocab_size: Optional[int] = None,
    progress: Optional[Callable[[int, int], None]] = None,
) -> Loaded:
    """Read ``job["dataset"]`` and make rows of at most ``job["max_length"]`` tokens.

    ``samples`` rows are taken in the order of a shuffle by ``seed`` until that many usable ones are found, so a larger
    ``samples`` keeps the rows of a smaller one; None takes all. ``max_dropped`` is the share of examined rows that
    may be dropped (default 0.05). The tokenizer is loaded only when the records are not token ids already.
    Raises AgentError(DatasetError | MissingModel | MissingPackage).
    """
    records = open_records(str(job["dataset"]))
    samples, limit = job.get("samples"), int(job["max_length"])
    order = list(range(records.count))
    if samples is not None and samples < records.count:
        random.Random(int(job.get("seed") or 0)).shuffle(order)
    maker = _Maker(job, tokenizer, limit, vocab_size)
    rows: List[Row] = []
    at = 0
    wanted = records.count if samples is None else min(int(samples), records.count)
    while len(rows) < wanted and at < len(order):
        chunk = order[at : at + max(wanted - len(rows), 1)]
        at += len(chunk)
        for index, record in records.pick(sorted(chunk)):
            row = maker.make(index, record)
            if row is not None:
                rows.append(row)
            if progress is not None and (maker.examined % 200 == 0):
                progress(maker.examined, wanted)
        if samples is not None and maker.dropped_count > max(20, wanted):
            break  # a dataset of the wrong kind: do not read a million rows to find ten
    rows.sort()
    report = maker.report(records, rows)
    allowed = float(job.get("max_dropped", MAX_DROPPED))
    if not rows or maker.dropped_count > allowed * maker.examined:
        raise AgentError(
            "DatasetError",
            "%d of %d rows had to be dropped (%.0f %% are allowed)"
            % (maker.dropped_count, maker.examined, 100 * allowed),
            tried="reading %s" % job["dataset"],
            hint=_reasons(maker.reasons) + ("; raise max_dropped if that is what you want" if rows else ""),
            dropped=maker.dropped[:50],
            reasons=maker.reasons,
        )
    return Loaded(rows, report)


class _Maker:
    """Makes rows of records and keeps the books."""

    def __init__(self, job: Mapping[str, Any], tokenizer: Any, limit: int, vocab_size: Optional[int]) -> None:
        self.job, self.limit, self.vocab_size = job, limit, vocab_size
        self.renderer = Renderer(tokenizer, job.get("chat_template_kwargs")) if tokenizer is not None else None
        self.examined = self.truncated = self.truncated_tokens = self.dropped_count = 0
        self.dropped: List[Dict[str, Any]] = []
        self.reasons: Dict[str, int] = {}
        self.used: Dict[str, int] = {}

    def make(self, index: int, record: Record) -> Optional[Row]:
        self.examined += 1
        try:
            if isinstance(record, ValueError):
                raise record
            ids, mask = self._tokens(record)
            if not ids:
                raise ValueError("no tokens")
            if len(mask) != len(ids):
                raise ValueError("loss_mask has %d entries for %d tokens" % (len(mask), len(ids)))
            top = self.vocab_size
            if min(ids) < 0 or (top and max(ids) >= top):
                raise ValueError(
                    "token id %d is outside the vocabulary of %s" % (min(ids) if min(ids) < 0 else max(ids), top)
                )
            before = any(mask)
            if len(ids) > self.limit:
                self.truncated += 1
                self.truncated_tokens += len(ids) - self.limit
                ids, mask = ids[: self.limit], mask[: self.limit]
            if not any(mask):
                raise ValueError("no assistant token left after truncation" if before else "no assistant token")
        except ValueError as error:
            self._drop(index, str(error))
            return None
        return Row(index, ids, mask)

    def _tokens(self, record: Mapping[str, Any]) -> tuple[List[int], List[int]]:
        if record.get("input_ids") is not None:
            self._use("input_ids")
            ids = _ints(record["input_ids"], "input_ids")
            given = record.get("loss_mask")
            return ids, [1] * len(ids) if given is None else _mask(given)
        for key in CONVERSATION_KEYS:
            turns = record.get(key)
            if turns is not None:
                self._use(key)
                if not isinstance(turns, (list, tuple)):
                    raise ValueError("%s is no list of turns" % key)
                return self._renderer().chat(normalize(turns), record.get("tools") or None)
        prompt, answer = (
            record.get("prompt"),
            next(
                (record[key] for key in ("completion", "response", "answer", "output") if record.get(key) is not None),
                None,
            ),
        )
        if prompt is not None and answer is not None:
            self._use("prompt")
            turns = [*_turns(prompt, "user"), *_turns(answer, "assistant")]
            return self._renderer().chat(normalize(turns), record.get("tools") or None)
        if isinstance(record.get("text"), str):
            self._use("text")
            return self._renderer().plain(record["text"])
        raise ValueError(
            "no messages, conversations, prompt and completion, text or input_ids; it has "
            + (", ".join(sorted(map(str, record))[:8]) or "no keys")
        )

    def _renderer(self) -> Renderer:
        if self.renderer is None:
            tokenizer = load_tokenizer(
                str(self.job.get("tokenizer") or self.job["model"]), bool(self.job.get("trust_remote_code"))
            )
            self.renderer = Renderer(tokenizer, self.job.get("chat_template_kwargs"))
        return self.renderer

    def _use(self, key: str) -> None:
        self.used[key] = self.used.get(key, 0) + 1

    def _drop(self, index: int, reason: str) -> None:
        self.dropped_count += 1
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        if len(self.dropped) < NAMED:
            self.dropped.append({"index": index, "reason": reason})

    def report(self, records: Records, rows: Sequence[Row]) -> Dict[str, Any]:
        return {
            "dataset": records.path,
            "dataset_sha256": records.sha256(),
            "rows_total": records.count,
            "examined": self.examined,
            "selected": len(rows),
            "tokens": sum(len(row.input_ids) for row in rows),
            "trained_tokens": sum(sum(row.loss_mask) for row in rows),
            "longest": max((len(row.input_ids) for row in rows), default=0),
            "truncated": self.truncated,
            "truncated_tokens": self.truncated_tokens,
            "dropped_count": self.dropped_count,
            "dropped": self.dropped,
            "reasons": self.reasons,
            "columns": self.used,
            "chat_template_sha256": template_sha256(self.renderer.tokenizer)
            if self.renderer is not None and set(self.used) - {"input_ids", "text"}
            else None,
        }


def _ints(values: Any, name: str) -> List[int]:
    kinds = set(map(type, values)) if isinstance(values, (list, tuple)) else {type(None)}
    if not kinds <= {int, bool}:
        raise ValueError("%s is no list of whole numbers" % name)
    return [int(one) for one in values] if bool in kinds else list(values)


def _mask(values: Any) -> List[int]:
    mask = _ints(values, "loss_mask")
    return mask if set(mask) <= {0, 1} else [int(bool(one)) for one in mask]


def _turns(value: Any, role: str) -> List[Dict[str, Any]]:
    return list(value) if isinstance(value, (list, tuple)) else [{"role": role, "content": str(value)}]


def _reasons(reasons: Mapping[str, int]) -> str:
    top = sorted(reasons.items(), key=lambda pair: -pair[1])[:3]
    return "; ".join("%d x %s" % (count, reason) for reason, count in top) or "the dataset has no usable row"
