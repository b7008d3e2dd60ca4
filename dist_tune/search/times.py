"""Times of candidates: one rank's samples by replay, its report of them, and the reduction to
numbers that all ranks share. Pure.

Samples are kept by replay, so that a replay in which some rank ran a stand-in can be struck out on
all ranks, and so that the time that other sites' candidates added to a replay can be subtracted.
Times are milliseconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import fmean

from dist_tune.errors import CandidateFailure, FailureKind, Failures
from dist_tune.search.plan import NOTHING, Account, Replay, Times
from dist_tune.search.statistics import median, spread, without_outliers

MAX_RANKS_LISTED = 16
"""Larger groups list only the slowest and the fastest rank of a candidate, so that messages do not
grow with the group.
"""

Nesting = dict[str, dict[str, list[int]]]
"""Site -> function around it -> candidates of the function that launch the site."""


@dataclass(frozen=True, slots=True)
class Report:
    """One rank's report of a batch of replays, or that of all ranks: equal on all of them."""

    times: dict[str, dict[int, Times]] = field(default_factory=dict)
    """Site -> candidates of the batch -> times since the beginning.

    A rank that does not own a site leaves it out: the neutral element.
    """
    failures: Failures = field(default_factory=dict)
    """Each is reported once.

    Of all ranks: of the first one on which the candidate failed, with the rank in the reason.
    """
    disturbed: list[int] = field(default_factory=list)
    """Replays in which another config stood in for one that failed, or a new site was compiled and
    loaded.
    """
    has_new_sites: bool = False
    """True if a rank met sites that it has not reported."""
    elapsed_s: float = 0.0
    """Seconds of the search, on the rank with the most."""
    batch_s: float = 0.0
    """Seconds of the batch, on the slowest rank."""
    lost: list[int] = field(default_factory=list)
    """Disturbed replays that are to be run again, because a kernel was not compiled before."""
    has_new_variants: bool = False
    """True if a launch on some rank asked for variants that are not compiled for all candidates in
    the race.
    """
    nesting: Nesting = field(default_factory=dict)
    equal: dict[str, dict[int, int]] = field(default_factory=dict)
    """Site -> compiled candidate -> the one of lower index with the same kernel.

    A rank without the site leaves it out.
    """
    n_variants: dict[str, int] = field(default_factory=dict)
    """Site -> variants of its kernel, where there are several; on the rank with the most."""
    unclear: list[str] = field(default_factory=list)
    """Sites with a candidate whose launches all hold gaps in which the device waited for the host,
    on some rank.
    """
    job: Account = NOTHING
    """Of a tuning online, what the job's calls have taken; on the rank with the most."""
    endless: str = ""
    """Why variants of a kernel have no end, of the first rank that has found so."""


def reduce_reports(reports: Mapping[int, Report]) -> Report:
    """Reduce the reports of all ranks: rank -> report.

    One function of all reports, so that all ranks can use one rank's result.
    """
    failures: Failures = {}
    by_site: dict[str, dict[int, dict[int, Times]]] = {}
    nesting: Nesting = {}
    for rank, report in reports.items():
        for site, candidates in report.failures.items():
            for candidate, (kind, reason) in candidates.items():
                failures.setdefault(site, {}).setdefault(
                    candidate, CandidateFailure(kind, f"rank {rank}: {reason}")
                )
        for site, functions in report.nesting.items():
            for function, launching in functions.items():
                seen = nesting.setdefault(site, {}).get(function, [])
                nesting[site][function] = sorted({*seen, *launching})
        for site, measured in report.times.items():
            by_site.setdefault(site, {})[rank] = measured
            for candidate, each in measured.items():
                if not (
                    isfinite(each.kernel_ms) and each.kernel_ms > 0 and isfinite(each.closure_ms)
                ):
                    failure = CandidateFailure(
                        FailureKind.CLOCK, f"rank {rank}: the clock gave {each.kernel_ms} ms"
                    )
                    failures.setdefault(site, {}).setdefault(candidate, failure)
    everyone = reports.values()
    compiled = {label for each in everyone for label in each.equal}
    return Report(
        # Measured by all who own the site, or not at all: a MAX over some ranks may hide the
        # slowest.
        {
            site: {
                i: _reduce({rank: each[i] for rank, each in ranks.items()})
                for i in sorted(set.intersection(*map(set, ranks.values())))
            }
            for site, ranks in by_site.items()
        },
        failures,
        disturbed=sorted({replay for each in everyone for replay in each.disturbed}),
        has_new_sites=any(each.has_new_sites for each in everyone),
        elapsed_s=max(each.elapsed_s for each in everyone),
        batch_s=max(each.batch_s for each in everyone),
        lost=sorted({replay for each in everyone for replay in each.lost}),
        has_new_variants=any(each.has_new_variants for each in everyone),
        nesting=nesting,
        equal={
            label: equal_on_all([each.equal[label] for each in everyone if label in each.equal])
            for label in compiled
        },
        n_variants={
            label: max(each.n_variants.get(label, 1) for each in everyone)
            for one in everyone
            for label in one.n_variants
        },
        unclear=sorted({site for each in everyone for site in each.unclear}),
        job=Account(*map(max, zip(*(each.job for each in everyone), strict=True))),
        endless=next((each.endless for each in everyone if each.endless), ""),
    )


def equal_on_all(ranks: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """Candidate -> the one of lower index that is equal to it on every rank.

    ``ranks``: the same of each rank.
    """
    first: dict[tuple[int, ...], int] = {}
    named = sorted({i for rank in ranks for pair in rank.items() for i in pair})
    return {
        i: k
        for i in named
        if (k := first.setdefault(tuple(rank.get(i, i) for rank in ranks), i)) != i
    }


def _reduce(by_rank: Mapping[int, Times]) -> Times:
    ms = {rank: each.kernel_ms for rank, each in by_rank.items()}
    slowest, fastest = max(ms, key=ms.__getitem__), min(ms, key=ms.__getitem__)
    last = max(by_rank.values(), key=lambda each: each.closure_ms)
    return by_rank[slowest]._replace(
        closure_ms=last.closure_ms,
        rest_spread_ms=last.rest_spread_ms,
        n_replays=min(each.n_replays for each in by_rank.values()),
        n_timed=min(each.n_timed for each in by_rank.values()),
        n_owners=len(by_rank),
        typical_ms=median(list(ms.values())),
        rank_latencies_ms={
            r: each
            for r, each in ms.items()
            if len(by_rank) <= MAX_RANKS_LISTED or r in (slowest, fastest)
        },
    )


Known = Mapping[str, Mapping[int, float]]
"""Site -> candidate -> milliseconds."""


class Samples:
    """All timed replays and launches of one tuning on this rank."""

    def __init__(self) -> None:
        self._runs: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        """Site -> candidate -> replays that time it."""
        self._launches: dict[str, dict[int, dict[int, list[float | None]]]] = defaultdict(
            lambda: defaultdict(lambda: defaultdict(list))
        )
        """Site -> candidate -> replay -> launches."""
        self._warm_ups: dict[str, dict[int, float]] = {}
        """Function -> candidate -> its shortest untimed run."""
        self._nesting: Nesting = {}
        self._closures: dict[int, tuple[float, Replay]] = {}
        """Replay -> its time and its schedule."""
        self._disturbed: set[int] = set()
        self._lost: set[int] = set()
        self._struck: set[int] = set()
        """Replays whose times count on no rank."""

    def add_run(self, site: str, candidate: int, replay: int) -> None:
        """Note a replay in which a site ran the candidate that was to be timed."""
        self._runs[site][candidate].add(replay)

    def nest(self, function: str, candidate: int, site: str) -> None:
        """Note that launches of a site are a part of a function's, with this candidate of the
        function.
        """
        launching = self._nesting.setdefault(site, {}).setdefault(function, [])
        if candidate not in launching:
            launching.append(candidate)

    def add_warm_up(self, site: str, candidate: int, ms: float) -> None:
        """Add an untimed run of a function's candidate: its time says how long such a run takes,
        not which is better.
        """
        runs = self._warm_ups.setdefault(site, {})
        runs[candidate] = min(ms, runs.get(candidate, ms))

    def add_launch(self, site: str, candidate: int, replay: int, ms: float | None) -> None:
        """Add one timed launch; a site may be launched several times in a replay.

        None: its time is not the kernel's.
        """
        self._launches[site][candidate][replay].append(ms)

    def why_discarded(self, replay: int) -> str:
        """Reason why the times of a replay do not count, as far as this rank is the cause; empty if
        they do.
        """
        if replay in self._lost:
            return "a kernel was compiled in it"
        return (
            "another candidate stood in, or had to be released" if replay in self._disturbed else ""
        )

    def add_replay(self, replay: int, ms: float, schedule: Replay) -> None:
        """Add the time of a whole replay, and its schedule."""
        self._closures[replay] = ms, schedule

    def restart(self) -> None:
        """Forget the replays, because the next ones are timed under other conditions and one median
        cannot hold both.
        """
        self._runs.clear()

    def forget(self, site: str) -> None:
        """Forget all times of a site, because a function around it runs another config now; this
        rank still owns it.
        """
        self._runs.pop(site, None)
        if site in self._launches:
            self._launches[site].clear()

    def disturb(self, replay: int) -> None:
        """Note that a stand-in ran in this replay on this rank."""
        self._disturbed.add(replay)

    def lose(self, replay: int) -> None:
        """Note that a kernel was compiled in this replay on this rank, or was not there: the replay
        is to be run again.
        """
        self._lost.add(replay)
        self._disturbed.add(replay)

    def strike(self, replays: Iterable[int]) -> bool:
        """Forget the samples of these replays; true if some of them counted until now."""
        new = set(replays) - self._struck
        self._struck |= new
        for replay in new:
            for site in self._runs:
                for candidate, timed in self._runs[site].items():
                    timed.discard(replay)
                    self._launches[site][candidate].pop(replay, None)
        return bool(new)

    def report(
        self,
        failures: Failures,
        batch: Sequence[Replay],
        reduced_ms: Known,
        has_new_sites: bool = False,
    ) -> Report:
        """Report the times of the candidates of ``batch``, this rank's failures, and the replays
        that it disturbed.

        ``reduced_ms``: reduced times so far, from which follows the time that other sites'
        candidates added to a replay.
        """
        times: dict[str, dict[int, Times]] = {}
        all_failures = {site: dict(each) for site, each in failures.items()}
        unclear = set[str]()
        fastest_ms = {
            site: min(reduced_m.values()) for site, reduced_m in reduced_ms.items() if reduced_m
        }
        beyond_ms: dict[int, dict[str, float]] = {}
        for site in self._launches:  # also those not met recently: this rank still owns them
            times[site] = {}
            for candidate in sorted(
                {each[site].candidate for each in batch if site in each and each[site].is_timed}
            ):
                # Others are under way.
                replays = sorted(self._runs[site][candidate] & self._closures.keys())
                launches = [
                    ms
                    for each in self._launches[site][candidate].values()
                    for ms in each
                    if ms is not None
                ]
                absurd = [
                    ms
                    for ms in (*launches, *(self._closures[k][0] for k in replays))
                    if not (isfinite(ms) and ms > 0)
                ]
                # JSON has no such numbers, and no median or maximum should hide one.
                if replays and absurd:
                    failure = CandidateFailure(FailureKind.CLOCK, f"the clock gave {absurd[0]} ms")
                    all_failures.setdefault(site, {}).setdefault(candidate, failure)
                elif replays and launches:
                    for k in replays:
                        if k not in beyond_ms:
                            beyond_ms[k] = self._beyond_ms(k, fastest_ms, reduced_ms)
                    others_ms = {
                        k: sum(beyond_ms[k].values()) - beyond_ms[k].get(site, 0.0) for k in replays
                    }
                    times[site][candidate] = self._measured(site, candidate, others_ms)
                elif replays and any(self._launches[site][candidate].values()):
                    unclear.add(site)
        return Report(
            times,
            all_failures,
            sorted(self._disturbed),
            has_new_sites,
            lost=sorted(self._lost),
            nesting=self._nesting,
            unclear=sorted(unclear),
        )

    def report_warm_ups(self, failures: Failures) -> Report:
        """Report the shortest untimed run of each candidate so far: a first run compiles and
        allocates, a hiccup only adds.
        """
        times = {
            site: {i: Times(_to_ns(ms), _to_ns(ms)) for i, ms in runs.items()}
            for site, runs in self._warm_ups.items()
        }
        return Report(times, failures, nesting=self._nesting)

    def _measured(self, site: str, candidate: int, others_ms: Mapping[int, float]) -> Times:
        """``others_ms``: replay -> what other sites' candidates added to it."""
        # A function's launches hold those inside, which run their winners meanwhile: turns see to
        # that.
        by_replay = {
            replay: each for replay, each in self._launches[site][candidate].items() if each
        }
        launches = without_outliers(
            [ms for each in by_replay.values() for ms in each if ms is not None]
        )
        closures = [self._closures[replay][0] - added_ms for replay, added_ms in others_ms.items()]
        # Less its own launches, if they were timed in the same replay: their noise is not that of
        # the rest.
        rests = [
            ms - _sum_ms(by_replay.get(replay, ()))
            for replay, ms in zip(others_ms, closures, strict=True)
        ]
        return Times(
            kernel_ms=_to_ns(median(launches)),
            closure_ms=_to_ns(median(without_outliers(closures))),
            spread_ms=_to_ns(spread(launches)),
            rest_spread_ms=_to_ns(spread(without_outliers(rests))),
            n_replays=len(others_ms),
            n_launches=round(median([len(each) for each in by_replay.values()])),
            n_timed=sum(any(ms is not None for ms in each) for each in by_replay.values()),
        )

    def _beyond_ms(
        self, replay: int, fastest_ms: Mapping[str, float], known_ms: Known
    ) -> dict[str, float]:
        """Milliseconds that each site's candidate added to a replay, beyond the site's fastest
        known one.
        """
        schedule = self._closures[replay][1]
        return {
            site: known_ms[site][trial.candidate] - least_ms
            for site, least_ms in fastest_ms.items()
            if (trial := schedule.get(site)) is not None and trial.candidate in known_ms[site]
        }


def _sum_ms(launches: Sequence[float | None]) -> float:
    """Milliseconds of launches, of which those without a time are like the others."""
    known = [ms for ms in launches if ms is not None]
    return fmean(known) * len(launches) if known else 0.0


def _to_ns(ms: float) -> float:
    """Round to the resolution of the clocks, which keeps messages short."""
    return round(ms, 6)
