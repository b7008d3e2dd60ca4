"""Differences between two sets of records: versions, machines, winners, times. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from dist_tune.log import closure_name
from dist_tune.records import TuningRecord, differences, words

LEAST_NOISE = 0.01
"""Of a time: two tunings of one kernel differ by as much, because of clock rates and temperature.
"""
_NAMES = {"name": "kernel", "source": "code"}
"""Fields of a ``CacheKey``, as people read them."""


def compare(before: Sequence[TuningRecord], after: Sequence[TuningRecord]) -> dict[str, Any]:
    """Records of one kernel and key are compared, those first that have most in common; two single
    ones of one kernel with any keys.

    A JSON document: ``pairs``, kernels and keys that are ``only_before`` or ``only_after``, and
    ``n_slower``, the number of winners that got slower by more than the noise. The verdict of a
    pair is "slower", "faster", "as fast" or "unknown"; times are milliseconds.
    """
    is_named = len(before) == len(after) == 1 and closure_name(before[0].kernel) == closure_name(
        after[0].kernel
    )
    pairs, only_before, left = [], [], list(after)
    for record in before:
        rivals = [each for each in left if is_named or _name(each) == _name(record)]
        if rivals:
            nearest = max(
                rivals, key=lambda other: (-len(_differences(record, other)), other.tuned_at)
            )
            left.remove(nearest)
            pairs.append(_pair(record, nearest))
        else:
            only_before.append(_name(record))
    n_slower = sum(pair["verdict"] == "slower" for pair in pairs)
    return {
        "pairs": pairs,
        "only_before": only_before,
        "only_after": [_name(each) for each in left],
        "n_slower": n_slower,
    }


def _name(record: TuningRecord) -> str:
    return f"{record.kernel} {record.key}"


def comparison_lines(found: dict[str, Any]) -> list[str]:
    """For people: two or more lines for each pair, then what only one side has, then a summary of
    the pairs if there are any.
    """
    lines = []
    for pair in found["pairs"]:
        times = words.times(pair["before_ms"], pair["after_ms"])
        lines += [
            f"{pair['name']}: {times}, {pair['verdict']}; noise {pair['noise_ms']:.2g} ms",
            *(f"  {each['name']}: {each['before']} -> {each['after']}" for each in pair["changes"]),
        ]
    lines += [f"only in the first: {each}" for each in found["only_before"]] + [
        f"only in the second: {each}" for each in found["only_after"]
    ]
    counts = ", ".join(
        f"{n} {verdict}"
        for verdict, n in Counter(pair["verdict"] for pair in found["pairs"]).items()
    )
    if counts:
        lines.append(f"{len(found['pairs'])} compared: {counts}")
    return lines


def _pair(before: TuningRecord, after: TuningRecord) -> dict[str, Any]:
    """``noise_ms``: the ``spread_ms`` of both winners added, and at least 1 % of the time
    before.
    """
    changes = [*_differences(before, after), ("winner", before.best.config, after.best.config)]
    changes.append(("outcome", words.fates(before), words.fates(after)))
    before_ms, after_ms = before.best.latency_ms, after.best.latency_ms
    noise_ms = max(
        (before.best.spread_ms or 0.0) + (after.best.spread_ms or 0.0),
        LEAST_NOISE * (before_ms or 0.0),
    )
    verdict = "unknown"
    if before_ms is not None and after_ms is not None:
        verdict = "slower" if after_ms > before_ms else "faster"
        if abs(after_ms - before_ms) <= noise_ms:
            verdict = "as fast"
    return {
        "name": _name(after),
        "kernel": after.kernel,
        "key": after.key,
        "changes": [{"name": name, "before": a, "after": b} for name, a, b in changes if a != b],
        "before_ms": before_ms,
        "after_ms": after_ms,
        "noise_ms": noise_ms,
        "verdict": verdict,
    }


def _differences(before: TuningRecord, after: TuningRecord) -> list[tuple[str, str, str]]:
    """Between their keys: name, before, after."""
    found = differences(before.cache_key, after.cache_key)
    if "candidates" in found:
        n_common = len(
            {candidate.config for candidate in before.candidates}
            & {candidate.config for candidate in after.candidates}
        )
        n_after = f"{len(after.candidates)}, {n_common} in common"
        found["candidates"] = len(before.candidates), n_after
    for name in ("device_count", "python"):  # no part of the key
        found[name] = getattr(before.environment, name), getattr(after.environment, name)
    return [
        (_NAMES.get(name, name.replace("_", " ")), str(a), str(b))
        for name, (a, b) in found.items()
        if a != b
    ]
