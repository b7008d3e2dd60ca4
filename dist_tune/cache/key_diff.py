"""Why no record fits a key, and which one comes nearest. Pure: knows keys and records, not where they are kept."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from dist_tune.cache.records import SOFTWARE, CacheKey, Environment, TuningRecord

_MAX_VALUE = 120
"""Characters of a value that an explanation quotes."""
# In this order: quoted text, a number on its own, then words, so that digits within "bfloat16" or "cuda:0" are no numbers.
_TOKEN = re.compile(
    r"""(?P<text>'(?:[^'\\]|\\.)*+(?:'|\\?\Z)|"(?:[^"\\]|\\.)*+(?:"|\\?\Z))"""
    r"""|(?P<number>(?:[0-9]{1,300}(?:\.[0-9]{0,300})?|\.[0-9]{1,300})(?:[eE][+-]?[0-9]{1,3})?(?![\w.:]))"""
    r"""|(?P<word>[\w.:]+)|(?P<mark>.)""",
    re.DOTALL,
)


def differences(wanted: CacheKey, recorded: CacheKey) -> dict[str, tuple[object, object]]:
    """Field -> (wanted, recorded), for each field that differs; fields of the environment under their own names."""
    pairs: dict[str, tuple[object, object]] = {}
    for field in ("name", "source", "key", "candidates"):
        pairs[field] = getattr(wanted, field), getattr(recorded, field)
    for field in Environment.model_fields:
        pairs[field] = getattr(wanted.environment, field), getattr(recorded.environment, field)
    return {field: pair for field, pair in pairs.items() if pair[0] != pair[1]}


def nearest(wanted: CacheKey, records: Sequence[TuningRecord]) -> TuningRecord | None:
    """The record of this kernel or function that differs in the fewest fields, of equals the newest; None if it has none."""
    own = [record for record in records if record.kernel == wanted.name]
    return min(own, key=lambda record: (len(differences(wanted, record.cache_key)), -record.tuned_at.timestamp()), default=None)


def explain(wanted: CacheKey, records: Sequence[TuningRecord]) -> str:
    """Why none of the records is the one that is wanted, in a sentence or two for an error message."""
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
    """The record that is equal but for numbers in its tuning key, with the nearest ones; of equally near ones the newest.

    The distance is the sum over the numbers of ``|log2(a / b)|``. Digits within a word or a quoted text are no numbers:
    "float16" and "float32" are different keys, and so are -1 and 1, 1 and 1.0, and keys of different length. None if no record
    is equal but for numbers.
    """
    shape, sizes = _numbers(wanted.key)
    fitting = [each for each in records if differences(wanted, each.cache_key).keys() <= {"key"} and _numbers(each.key)[0] == shape]
    return min(fitting, key=lambda each: (_distance(sizes, _numbers(each.key)[1]), -each.tuned_at.timestamp()), default=None)


def _reason(name: str, field: str, wanted: object, recorded: object) -> str:
    if field == "source":
        return f"source: the code of {name}, or of something it calls, has changed"
    if field == "candidates":
        return "candidates: the list of configs to choose from is another"
    return f"{field}: {_short(str(wanted))} here, {_short(str(recorded))} in the record"


def _short(text: str) -> str:
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}..."


def _numbers(key: str) -> tuple[list[str], list[int | float]]:
    """The key with its numbers replaced by their kinds, and the numbers; signs belong to the key, as -1 is rarely a size."""
    shape, numbers = [], []
    for token in _TOKEN.finditer(key):
        text = token.group()
        if token.lastgroup != "number":
            shape.append(text)
            continue
        is_integer = text.isdecimal()
        number = int(text) if is_integer else float(text)
        shape.append("<integer>" if is_integer else "<real>")
        numbers.append(number)
    return shape, numbers


def _distance(sizes: Sequence[int | float], others: Sequence[int | float]) -> float:
    return sum(0.0 if a == b else _gap(a, b) for a, b in zip(sizes, others, strict=True))


def _gap(a: int | float, b: int | float) -> float:
    if not a or not b:
        # A factor of four more than to 1: nothing at all is another case than little.
        return 2 + math.log2(1 + max(a, b))
    # Not log2(a / b): the quotient of two numbers may be too large or too small to be one.
    return abs(math.log2(a) - math.log2(b))
