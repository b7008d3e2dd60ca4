"""Differences between the key that is wanted and those of records, and the nearest record. Pure; knows nothing of files."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from dist_tune.cache.records import SOFTWARE, CacheKey, TuningRecord

_MAX_VALUE = 120
"""Characters of a value that an explanation quotes."""
# Quoted text first, then numbers, then words, so that digits within "bfloat16" or "cuda:0" are no numbers.
_TOKEN = re.compile(
    r"""(?P<text>'(?:[^'\\]|\\.)*+(?:'|\\?\Z)|"(?:[^"\\]|\\.)*+(?:"|\\?\Z))"""
    r"""|(?P<number>(?:[0-9]{1,300}(?:\.[0-9]{0,300})?|\.[0-9]{1,300})(?:[eE][+-]?[0-9]{1,3})?(?![\w.:]))"""
    r"""|(?P<word>[\w.:]+)|(?P<mark>.)""",
    re.DOTALL,
)


def differences(wanted: CacheKey, recorded: CacheKey) -> dict[str, tuple[object, object]]:
    """Field -> (wanted, recorded), for each field that differs."""
    return {field: (value, other) for (field, value), (_, other) in zip(wanted, recorded, strict=True) if value != other}


def nearest(wanted: CacheKey, records: Sequence[TuningRecord]) -> TuningRecord | None:
    """The record of this kernel or function that differs in the fewest fields, of equals the newest; None if it has none."""
    own = [record for record in records if record.kernel == wanted.name]
    return max(own, key=lambda record: (-len(differences(wanted, record.cache_key)), record.recency), default=None)


def explain(wanted: CacheKey, records: Sequence[TuningRecord]) -> str:
    """The reason why none of the records has this key, in one or two sentences for an error message."""
    record = nearest(wanted, records)
    name = _short(wanted.name)
    if record is None:
        return f"There is no record of {name}."
    differing = differences(wanted, record.cache_key)
    when = f"{record.tuned_at:%Y-%m-%d %H:%M %Z}"
    if not differing:
        return f"There is a record of {name} that fits (tuned {when})."
    reasons = "; ".join(_reason(name, field, *pair) for field, pair in differing.items())
    remedy = " DIST_TUNE_VERSION_CHECK=0 accepts it." if differing.keys() <= set(SOFTWARE) else ""
    return f"The nearest record of {name} (tuned {when}) differs in {reasons}.{remedy}"


def nearest_shape(wanted: CacheKey, records: Sequence[TuningRecord]) -> TuningRecord | None:
    """The record whose key differs only in numbers of the tuning key, by the least distance; of equals the same text, then the newest.

    The distance is the sum over the numbers of ``|log2(a / b)|``. Digits within a word or a quoted text are no numbers: "float16"
    and "float32" are different keys, and so are -1 and 1, 1 and 1.0, and keys of different length. None if there is no such record.
    """
    shape, sizes = _numbers(wanted.key)
    fitting = [each for each in records if differences(wanted, each.cache_key).keys() <= {"key"} and _numbers(each.key)[0] == shape]
    return max(fitting, key=lambda each: (-_distance(sizes, _numbers(each.key)[1]), each.key == wanted.key, each.recency), default=None)


def nearest_key(wanted: str, known: Sequence[str]) -> str:
    """The key that differs only in its numbers, by the least distance; empty if there is none."""
    shape, sizes = _numbers(wanted)
    fitting = [(numbers, key) for key in known for form, numbers in [_numbers(key)] if form == shape]
    return min(fitting, key=lambda each: (_distance(sizes, each[0]), each[1]), default=((), ""))[1]


def _reason(name: str, field: str, wanted: object, recorded: object) -> str:
    if field == "source":
        return f"source: the code of {name}, or of something it calls, has changed"
    if field == "candidates":
        return "candidates: the list of configs to choose from is another"
    return f"{field}: {_short(str(wanted))} here, {_short(str(recorded))} in the record"


def _short(text: str) -> str:
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}..."


def _numbers(key: str) -> tuple[list[str], list[int | float]]:
    """The key with its numbers replaced by their kinds, and the numbers. Signs stay in the key, because -1 is rarely a size."""
    tokens = [(token.group(), token.lastgroup == "number") for token in _TOKEN.finditer(key)]
    numbers = [int(text) if text.isdecimal() else float(text) for text, is_number in tokens if is_number]
    return [("<integer>" if text.isdecimal() else "<real>") if is_number else text for text, is_number in tokens], numbers


def _distance(sizes: Sequence[int | float], others: Sequence[int | float]) -> float:
    return sum(_gap(a, b) for a, b in zip(sizes, others, strict=True))


def _gap(a: int | float, b: int | float) -> float:
    if a == b:
        return 0.0
    if not a or not b:
        return 2 + math.log2(1 + max(a, b))  # a factor of four more than to 1, because an empty dimension is a special case
    return abs(math.log2(a) - math.log2(b))  # not log2(a / b), which may overflow or underflow
