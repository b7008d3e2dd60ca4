"""The outcome of the tuning of one site, the same on all ranks but for the seconds. Knows nothing of kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from dist_tune.cache import TuningRecord


@dataclass(frozen=True, slots=True)
class Outcome:
    """A winner, and the times of all candidates."""

    winner: str
    """Described."""
    times_ms: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """Candidate -> reduced time, and median absolute deviation (MAD) of the launches on the slowest rank."""
    seconds: float = 0.0
    """Of the tuning on one rank."""

    @staticmethod
    def of_record(record: TuningRecord) -> Outcome:
        """The outcome that a record holds."""
        measured = [each for each in record.candidates if each.latency_ms is not None and each.failure is None]
        times_ms = {each.index: (each.latency_ms or 0.0, each.spread_ms or 0.0) for each in measured}
        return Outcome(record.best.config, times_ms, record.seconds)

    def quantiles_ms(self, candidate: int) -> tuple[float, float, float]:
        """Median, and one MAD below and above it, which hold half of the launches between them; inf for a candidate without a time."""
        if candidate not in self.times_ms:
            return inf, inf, inf
        ms, spread_ms = self.times_ms[candidate]
        return ms, max(0.0, ms - spread_ms), ms + spread_ms
