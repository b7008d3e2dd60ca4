"""Differences between two sets of records: versions, machines, winners, times. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dist_tune.cache import TuningRecord, fates
from dist_tune.output import closure_name

LEAST_NOISE = 0.01
"""Of a time: two tunings of one kernel differ by as much, because of clock rates and temperature."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two records of one kernel and key. Times are milliseconds."""

    kernel: str
    key: str
    changes: tuple[tuple[str, str, str], ...]
    """Name, before, after."""
    before_ms: float | None
    after_ms: float | None
    noise_ms: float
    """The ``spread_ms`` of both winners added, and at least 1 % of the time before."""

    @property
    def verdict(self) -> str:
        """One of "slower", "faster", "as fast", "unknown"."""
        if self.before_ms is None or self.after_ms is None:
            return "unknown"
        if abs(self.after_ms - self.before_ms) <= self.noise_ms:
            return "as fast"
        return "slower" if self.after_ms > self.before_ms else "faster"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of ``compare``."""

    pairs: tuple[Pair, ...]
    only_before: tuple[str, ...]
    """Kernel and key."""
    only_after: tuple[str, ...]

    @property
    def n_slower(self) -> int:
        """Winners that got slower by more than the noise."""
        return sum(pair.verdict == "slower" for pair in self.pairs)

    @property
    def values(self) -> dict[str, Any]:
        """As a JSON document."""
        pairs = [asdict(pair) | {"verdict": pair.verdict} for pair in self.pairs]
        for pair in pairs:
            pair["changes"] = [dict(zip(("name", "before", "after"), change, strict=True)) for change in pair["changes"]]
        return {"pairs": pairs, "only_before": self.only_before, "only_after": self.only_after, "n_slower": self.n_slower}

    @property
    def lines(self) -> list[str]:
        """For people: two or more lines for each pair, then what only one side has, then a summary of the pairs if there are any."""
        lines = []
        for pair in self.pairs:
            lines.append(f"{pair.kernel} {pair.key}: {_times(pair)}")
            lines += [f"  {name}: {before} -> {after}" for name, before, after in pair.changes]
        lines += [f"only in the first: {each}" for each in self.only_before]
        lines += [f"only in the second: {each}" for each in self.only_after]
        verdicts = [pair.verdict for pair in self.pairs]
        counts = [f"{verdicts.count(each)} {each}" for each in ("slower", "faster", "as fast", "unknown") if each in verdicts]
        return [*lines, *([f"{len(self.pairs)} compared: {', '.join(counts)}"] if counts else [])]


def compare(before: Sequence[TuningRecord], after: Sequence[TuningRecord]) -> Comparison:
    """Records of one kernel and key are compared, those first that have most in common; two single ones of one kernel with any keys."""
    if len(before) == len(after) == 1 and closure_name(before[0].kernel) == closure_name(after[0].kernel):
        return Comparison((_pair(before[0], after[0]),), (), ())
    waiting: dict[tuple[str, str], list[TuningRecord]] = defaultdict(list)
    for record in after:
        waiting[record.kernel, record.key].append(record)
    pairs, only_before = [], []
    for record in before:
        rivals = waiting[record.kernel, record.key]
        if not rivals:
            only_before.append(f"{record.kernel} {record.key}")
            continue
        nearest = max(rivals, key=lambda other: (-len(_identity(record, other)), other.recency))
        rivals.remove(nearest)
        pairs.append(_pair(record, nearest))
    only_after = [f"{each.kernel} {each.key}" for each in after if any(each is left for left in waiting[each.kernel, each.key])]
    return Comparison(tuple(pairs), tuple(only_before), tuple(only_after))


def _pair(before: TuningRecord, after: TuningRecord) -> Pair:
    changes = _identity(before, after)
    if before.best.config != after.best.config:
        changes.append(("winner", before.best.config, after.best.config))
    if fates(before) != fates(after):
        changes.append(("outcome", fates(before).text, fates(after).text))
    before_ms, after_ms = before.best.latency_ms, after.best.latency_ms
    noise_ms = max((before.best.spread_ms or 0.0) + (after.best.spread_ms or 0.0), LEAST_NOISE * (before_ms or 0.0))
    return Pair(after.kernel, after.key, tuple(changes), before_ms, after_ms, noise_ms)


def _identity(before: TuningRecord, after: TuningRecord) -> list[tuple[str, str, str]]:
    """Differences between their keys."""
    a, b = before.cache_key, after.cache_key
    named = [("kernel", a.name, b.name), ("key", a.key, b.key), ("code", a.source, b.source)]
    if a.candidates != b.candidates:
        texts = {each.config for each in before.candidates} & {each.config for each in after.candidates}
        named.append(("candidates", f"{len(before.candidates)}", f"{len(after.candidates)}, {len(texts)} in common"))
    named += [(name.replace("_", " "), str(value), str(getattr(after.environment, name))) for name, value in before.environment]
    return [each for each in named if each[1] != each[2]]


def _times(pair: Pair) -> str:
    if pair.before_ms is None or pair.after_ms is None:
        return "a winner without a time"
    change = f" ({100 * (pair.after_ms / pair.before_ms - 1):+.1f} %)" if pair.before_ms else ""
    return f"{pair.before_ms:.4g} -> {pair.after_ms:.4g} ms{change}, {pair.verdict}; noise {pair.noise_ms:.2g} ms"
