"""This rank's samples by site, candidate and replay, and its report of them. Pure; times are milliseconds.

Samples are kept by replay, so that a replay in which some rank ran a stand-in can be struck out on all ranks, and so that the time
that other sites' candidates added to a replay can be subtracted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite

from dist_tune.errors import CandidateFailure, FailureKind, Failures
from dist_tune.measure import median, spread, without_outliers
from dist_tune.search.plan import Replay
from dist_tune.search.times.reports import BatchReport, LocalTimes

Times = Mapping[str, Mapping[int, float]]
"""Site -> candidate -> milliseconds."""


class Samples:
    """All timed replays and launches of one tuning on this rank."""

    def __init__(self) -> None:
        self._runs: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        """Site -> candidate -> replays that time it."""
        self._launches: dict[str, dict[int, dict[int, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
        """Site -> candidate -> replay -> launches."""
        self._warm_ups_ms: dict[str, dict[int, list[tuple[bool, float]]]] = defaultdict(lambda: defaultdict(list))
        """Function -> candidate -> its untimed runs."""
        self._inner: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        """Function -> sites that are launched inside it -> candidates of the function that do so."""
        self._schedules: dict[int, Replay] = {}
        self._closures: dict[int, float] = {}
        self._disturbed: set[int] = set()
        self._lost: set[int] = set()

    def add_run(self, site: str, candidate: int, replay: int) -> None:
        """Note a replay in which a site ran the candidate that was to be timed."""
        self._runs[site][candidate].add(replay)

    def nest(self, function: str, candidate: int, site: str) -> None:
        """Note that launches of a site are a part of a function's, with this candidate of the function."""
        self._inner[function][site].add(candidate)

    @property
    def nesting(self) -> dict[str, dict[str, list[int]]]:
        """Site -> function around it -> candidates of the function that launch the site."""
        found: dict[str, dict[str, list[int]]] = {}
        for function, sites in self._inner.items():
            for site, candidates in sites.items():
                found.setdefault(site, {})[function] = sorted(candidates)
        return found

    def add_warm_up(self, site: str, candidate: int, ms: float, *, is_clean: bool = True) -> None:
        """Add an untimed run of a function's candidate: its time says how long such a run takes, not which is better.

        Not ``is_clean``: a kernel was compiled in it.
        """
        self._warm_ups_ms[site][candidate].append((not is_clean, ms))

    def add_launch(self, site: str, candidate: int, replay: int, ms: float) -> None:
        """Add one timed launch; a site may be launched several times in a replay."""
        self._launches[site][candidate][replay].append(ms)

    def why_discarded(self, replay: int) -> str:
        """Reason why the times of a replay do not count, as far as this rank is the cause; empty if they do."""
        if replay in self._lost:
            return "a kernel was compiled in it, or its clock jumped"
        return "another candidate stood in, or had to be released" if replay in self._disturbed else ""

    def add_replay(self, replay: int, ms: float, schedule: Replay) -> None:
        """Add the time of a whole replay, and its schedule."""
        self._closures[replay] = ms
        self._schedules[replay] = schedule

    def restart(self) -> None:
        """Forget the replays, because the next ones are timed under other conditions and one median cannot hold both."""
        self._runs.clear()

    def forget(self, site: str) -> None:
        """Forget all times of a site, because a function around it runs another config now; this rank still owns it."""
        self._runs.pop(site, None)
        if site in self._launches:
            self._launches[site].clear()

    def disturb(self, replay: int) -> None:
        """Note that a stand-in ran in this replay on this rank."""
        self._disturbed.add(replay)

    def lose(self, replay: int) -> None:
        """Note that a kernel was compiled in this replay on this rank, or was not there: the replay is to be run again."""
        self._lost.add(replay)
        self._disturbed.add(replay)

    def strike(self, replays: Iterable[int]) -> None:
        """Forget the samples of these replays."""
        for replay in replays:
            for site in self._runs:
                for candidate, timed in self._runs[site].items():
                    timed.discard(replay)
                    self._launches[site][candidate].pop(replay, None)

    def report(self, failures: Failures, batch: Sequence[Replay], reduced_ms: Times, has_new_sites: bool = False) -> BatchReport:
        """Report the times of the candidates of ``batch``, this rank's failures, and the replays that it disturbed.

        ``reduced_ms``: reduced times so far, from which follows the time that other sites' candidates added to a replay.
        """
        measured: dict[str, dict[int, LocalTimes]] = {}
        all_failures = {site: dict(each) for site, each in failures.items()}
        for site in self._launches:  # also those not met recently: this rank still owns them
            candidates = self._runs[site]
            asked = {replay[site].candidate for replay in batch if site in replay and replay[site].is_timed}
            measured[site] = {}
            for candidate in sorted(i for i in asked if candidates.get(i)):
                launches = [ms for each in self._launches[site][candidate].values() for ms in each]
                times = launches + [self._closures[replay] for replay in candidates[candidate] if replay in self._closures]
                absurd = [ms for ms in times if not (isfinite(ms) and ms > 0)]
                if absurd:  # JSON has no such numbers, and no median or maximum should hide one
                    failure = CandidateFailure(FailureKind.CLOCK, f"the clock gave {absurd[0]} ms")
                    all_failures.setdefault(site, {}).setdefault(candidate, failure)
                elif launches:
                    measured[site][candidate] = self._measured(site, candidate, reduced_ms)
        return BatchReport(measured, all_failures, sorted(self._disturbed), has_new_sites, lost=sorted(self._lost), nesting=self.nesting)

    def report_warm_ups(self, failures: Failures) -> BatchReport:
        """Report the shortest untimed run of each candidate so far: a first run compiles and allocates, a hiccup only adds.

        As one run where a kernel was compiled in each of them: such a time says nothing.
        """
        measured: dict[str, dict[int, LocalTimes]] = {}
        for site, runs in self._warm_ups_ms.items():
            for i, each in runs.items():
                has_compiled, ms = min(each)
                n_runs = 1 if has_compiled else len(each)
                measured.setdefault(site, {})[i] = LocalTimes(_to_ns(ms), _to_ns(ms), n_replays=n_runs, n_timed=n_runs)
        return BatchReport(measured, failures, nesting=self.nesting)

    def _measured(self, site: str, candidate: int, reduced_ms: Times) -> LocalTimes:
        launched = self._launches[site][candidate]
        by_replay = {replay: self._own_ms(site, replay, each, reduced_ms) for replay, each in launched.items() if each}
        launches = without_outliers([ms for each in by_replay.values() for ms in each])
        replays = sorted(self._runs[site][candidate] & self._closures.keys())  # others are under way
        closures = [self._closures[replay] - self._others_ms(site, replay, reduced_ms) for replay in replays]
        # Less its own launches, if they were timed in the same replay: their noise is not that of the rest.
        rests = [ms - sum(by_replay.get(replay, ())) for replay, ms in zip(replays, closures, strict=True)]
        return LocalTimes(
            kernel_ms=_to_ns(median(launches)),
            closure_ms=_to_ns(median(without_outliers(closures))),
            spread_ms=_to_ns(spread(launches)),
            rest_spread_ms=_to_ns(spread(without_outliers(rests))),
            n_replays=len(replays),
            n_launches=round(median([len(each) for each in by_replay.values()])),
            n_timed=len(by_replay),
        )

    def _own_ms(self, site: str, replay: int, launches_ms: list[float], reduced_ms: Times) -> list[float]:
        """Launches of one replay, less the time that sites inside them added: by this rank's times until there are reduced ones."""
        inner = self._inner.get(site)
        if not inner:
            return launches_ms
        known_ms = {each: reduced_ms.get(each) or self._launched_ms(each) for each in inner}
        added_ms = self._others_ms(site, replay, known_ms) / len(launches_ms)
        return [max(ms - added_ms, 0.01 * ms) for ms in launches_ms]  # times are positive

    def _launched_ms(self, site: str) -> dict[int, float]:
        """Candidate -> milliseconds of its launches in a replay on this rank."""
        launched = self._launches.get(site, {}).items()
        by_candidate = {candidate: [sum(each) for each in replays.values() if each] for candidate, replays in launched}
        return {candidate: median(each) for candidate, each in by_candidate.items() if each}

    def _others_ms(self, site: str, replay: int, known_ms: Times) -> float:
        """Milliseconds that other sites' candidates added to a replay, beyond the fastest known candidate of each site."""
        added_ms = 0.0
        for other, trial in self._schedules[replay].items():
            times_ms = known_ms.get(other, {})
            if other != site and trial.candidate in times_ms:
                added_ms += times_ms[trial.candidate] - min(times_ms.values())
        return added_ms


def _to_ns(ms: float) -> float:
    """Round to the resolution of the clocks, which keeps messages short."""
    return round(ms, 6)
