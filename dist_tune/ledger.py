"""What this rank measured: samples by site, candidate and replay, and what it reports of them.

Pure: is told times in milliseconds. Samples are kept by replay, so that a replay in which some rank ran a stand-in can be
struck out on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from math import isfinite

from dist_tune.engine import Measured, Report
from dist_tune.timing import median, spread


class Ledger:
    """All timed launches of one tuning on this rank."""

    def __init__(self) -> None:
        self._samples: dict[str, dict[int, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
        self._closures: dict[int, float] = {}
        self._disturbed: set[int] = set()

    def add_launch(self, site: str, candidate: int, replay: int, ms: float) -> None:
        """One timed launch; a site may be launched several times in a replay."""
        self._samples[site][candidate].append((replay, ms))

    def add_replay(self, replay: int, ms: float) -> None:
        """One whole replay."""
        self._closures[replay] = ms

    def disturb(self, replay: int) -> None:
        """A stand-in ran in this replay on this rank."""
        self._disturbed.add(replay)

    def strike(self, replays: set[int]) -> None:
        """Forget what was measured in these replays."""
        for candidates in self._samples.values():
            for candidate, samples in candidates.items():
                candidates[candidate] = [sample for sample in samples if sample[0] not in replays]

    def report(self, failures: dict[str, dict[int, str]]) -> Report:
        """All that was measured so far, the failures this rank knows, and the replays in which it ran a stand-in."""
        measured: dict[str, dict[int, Measured]] = {}
        failures = {site: dict(each) for site, each in failures.items()}
        for site, candidates in self._samples.items():
            measured[site] = {}
            for candidate, samples in candidates.items():
                absurd = [ms for ms in self._times(samples) if not isfinite(ms)]
                if absurd:  # JSON has no such numbers, and no median or maximum should hide one
                    failures.setdefault(site, {}).setdefault(candidate, f"the clock gave {absurd[0]} ms")
                elif samples:
                    measured[site][candidate] = self._measured(samples)
        return Report(measured, failures, sorted(self._disturbed))

    def _times(self, samples: list[tuple[int, float]]) -> list[float]:
        return [ms for _, ms in samples] + [self._closures[replay] for replay, _ in samples]

    def _measured(self, samples: list[tuple[int, float]]) -> Measured:
        replays = {replay for replay, _ in samples}
        times = [ms for _, ms in samples]
        return Measured(median(times), spread(times), median([self._closures[replay] for replay in replays]), len(replays))
