"""What this rank measured: samples by site, candidate and replay, and what it reports of them.

Pure: is told times in milliseconds. Samples are kept by replay, so that a replay in which some rank ran a stand-in can be
struck out on all ranks, and so that what other sites did in a replay can be taken off its time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import isfinite

from dist_tune.plan import Replay
from dist_tune.tally import Measured, Report
from dist_tune.timing import median, spread, without_outliers

Times = Mapping[str, Mapping[int, float]]
"""Site -> candidate -> milliseconds."""


class Ledger:
    """All timed launches of one tuning on this rank."""

    def __init__(self) -> None:
        self._samples: dict[str, dict[int, dict[int, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
        """Site -> candidate -> replay -> launches."""
        self._schedules: dict[int, Replay] = {}
        self._closures: dict[int, float] = {}
        self._disturbed: set[int] = set()

    def add_launch(self, site: str, candidate: int, replay: int, ms: float) -> None:
        """One timed launch; a site may be launched several times in a replay."""
        self._samples[site][candidate][replay].append(ms)

    def add_replay(self, replay: int, ms: float, schedule: Replay) -> None:
        """One whole replay, and what each site ran in it."""
        self._closures[replay] = ms
        self._schedules[replay] = schedule

    def disturb(self, replay: int) -> None:
        """A stand-in ran in this replay on this rank."""
        self._disturbed.add(replay)

    def restart(self) -> None:
        """Forget all times: those to come are taken under other conditions, and one median of both would be of neither."""
        self._samples.clear()

    def strike(self, replays: Iterable[int]) -> None:
        """Forget what was measured in these replays."""
        for candidates in self._samples.values():
            for by_replay in candidates.values():
                for replay in replays:
                    by_replay.pop(replay, None)

    def report(
        self, failures: Mapping[str, Mapping[int, str]], batch: Iterable[Replay], agreed_ms: Times, has_new_sites: bool = False
    ) -> Report:
        """What was measured so far of the candidates of ``batch``, the failures this rank knows, the replays it disturbed.

        ``agreed_ms`` is what all ranks agree on so far: by that much, other sites' candidates are taken off a replay's time.
        """
        measured: dict[str, dict[int, Measured]] = {}
        all_failures = {site: dict(each) for site, each in failures.items()}
        batch = list(batch)
        for site, candidates in self._samples.items():
            asked = {replay[site].candidate for replay in batch if site in replay and replay[site].is_timed}
            measured[site] = {}
            for candidate in sorted(asked & candidates.keys()):
                by_replay = candidates[candidate]
                times = [ms for launches in by_replay.values() for ms in launches] + [self._closures[replay] for replay in by_replay]
                absurd = [ms for ms in times if not (isfinite(ms) and ms > 0)]
                if absurd:  # JSON has no such numbers, and no median or maximum should hide one
                    all_failures.setdefault(site, {}).setdefault(candidate, f"the clock gave {absurd[0]} ms")
                elif by_replay:
                    measured[site][candidate] = self._measured(site, by_replay, agreed_ms)
        return Report(measured, all_failures, sorted(self._disturbed), has_new_sites)

    def _measured(self, site: str, by_replay: Mapping[int, list[float]], agreed_ms: Times) -> Measured:
        launches = without_outliers([ms for each in by_replay.values() for ms in each])
        closures = {replay: self._closures[replay] - self._others_ms(site, replay, agreed_ms) for replay in by_replay}
        rests = [closures[replay] - sum(each) for replay, each in by_replay.items()]
        return Measured(
            kernel_ms=_to_ns(median(launches)),
            closure_ms=_to_ns(median(without_outliers(list(closures.values())))),
            spread_ms=_to_ns(spread(launches)),
            rest_spread_ms=_to_ns(spread(without_outliers(rests))),
            n_replays=len(by_replay),
            n_launches=round(median([len(each) for each in by_replay.values()])),
        )

    def _others_ms(self, site: str, replay: int, agreed_ms: Times) -> float:
        """What other sites' candidates added to a replay, by the agreed times: more or less than the fastest of theirs."""
        added_ms = 0.0
        for other, trial in self._schedules[replay].items():
            known_ms = agreed_ms.get(other, {})
            if other != site and trial.candidate in known_ms:
                added_ms += known_ms[trial.candidate] - min(known_ms.values())
        return added_ms


def _to_ns(ms: float) -> float:
    """No clock is finer, and messages are shorter."""
    return round(ms, 6)
