"""JSON without the package ``json`` where that can be had.

Importing ``json`` means importing ``re``, ``enum`` and ``functools``, which doubles the time in which a verb starts.
What does its work, the C module ``_json``, needs none of them. It is no public interface, so it is tried out first;
where it is missing or behaves otherwise, ``json`` is used.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Tuple


def dumps(value: Any) -> str:
    """Compact ASCII; what JSON does not know becomes its ``str``. Raises ValueError for circles, TypeError for keys."""
    return _dumps(value)


def loads(text: str) -> Any:
    """Raises ValueError (json.JSONDecodeError) for what is no JSON."""
    return _loads(text)


def _slow() -> Tuple[Callable[[Any], str], Callable[[str], Any]]:
    import json

    return lambda value: json.dumps(value, separators=(",", ":"), default=str), json.loads


class _Context:
    """What the scanner reads its settings from."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float  # NaN, Infinity and -Infinity are what float() reads too
    memo: Any = {}


def _quick() -> Tuple[Callable[[Any], str], Callable[[str], Any]]:
    import _json  # type: ignore[import-not-found, unused-ignore]

    scan = _json.make_scanner(_Context)  # type: ignore[arg-type]
    text_of = _json.encode_basestring_ascii

    def quick_dumps(value: Any) -> str:
        encode = _json.make_encoder({}, str, text_of, None, ":", ",", False, False, True)
        return "".join(encode(value, 0))

    def quick_loads(text: str) -> Any:
        stripped = text.strip(" \t\r\n")
        try:
            value, end = scan(stripped, 0)
        except Exception:  # noqa: BLE001 - StopIteration, or SystemError where json.decoder is not imported
            end = -1
        if end != len(stripped):
            return _slow()[1](text)  # which says what is wrong with it
        return value

    sample = {"a": [1, -2.5, 'x\n\u20ac\ud800"', None, True, {}], "b": ""}
    if quick_loads(quick_dumps(sample)) != sample or quick_dumps(b"x") != "\"b'x'\"":
        raise ValueError
    return quick_dumps, quick_loads


try:
    _dumps, _loads = _quick()
except Exception:  # noqa: BLE001 - whatever is odd about it, json is there
    _dumps, _loads = _slow()
