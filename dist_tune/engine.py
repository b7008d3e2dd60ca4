"""The search: which candidate each site runs in the next replays, and which one wins.

Pure. Knows neither Triton nor torch.distributed nor clocks nor disk: it is told what all ranks report and answers with
plain values, so that ranks which feed it the same reports take the same decisions. The schedule is the seed's table:
every candidate of a site gets ``n_warmup`` untimed and ``n_repeat`` timed replays, all sites advance in one replay, and a
site that is done runs its incumbent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

MAX_OVERTIME = 3
"""A site gets at most this many times its nominal number of replays, when it is not met in all of them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much a candidate is measured."""

    n_warmup: int = 3
    """Untimed replays of a candidate."""
    n_repeat: int = 5
    """Timed replays of a candidate; their median is its latency on a rank."""

    def __post_init__(self) -> None:
        for name, value, least in (("n_warmup", self.n_warmup, 0), ("n_repeat", self.n_repeat, 1)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {value!r}")
            if value < least:
                raise ValueError(f"need {name} >= {least}, got {value}")


@dataclass(frozen=True, slots=True)
class Trial:
    """What one site does in one replay."""

    candidate: int
    is_timed: bool


Replay = Mapping[str, Trial]
"""One replay: site -> trial. A site that is not in it is met for the first time."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one rank measured of one candidate, over all its timed and undisturbed replays so far. Milliseconds."""

    kernel_ms: float
    """Median of the launches."""
    spread_ms: float
    """Median distance of the launches from their median."""
    closure_ms: float
    """Median of the whole replays in which it ran."""
    n_replays: int


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank says of a batch of replays."""

    measured: dict[str, dict[int, Measured]] = field(default_factory=dict)
    """Site -> candidate -> times. A rank that does not own a site leaves it out: the neutral element."""
    failures: dict[str, dict[int, str]] = field(default_factory=dict)
    """Site -> candidate -> why it cannot run here."""
    disturbed: list[int] = field(default_factory=list)
    """Replays of the batch in which another config stood in for one that failed."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What is agreed on a candidate. Equal on all ranks."""

    latency_ms: float | None
    """MAX over ranks of the ranks' medians; None if it was not measured everywhere."""
    closure_ms: float | None
    """The same for the whole replay."""
    spread_ms: float | None
    rank_latencies_ms: dict[int, float]
    """The ranks' medians, to name stragglers."""
    failure: str | None
    """"rank r: reason" of the first rank on which it failed."""


def _is_time(ms: float) -> bool:
    return isfinite(ms) and ms > 0


class _Site:
    """The state of one site's search; changed by ``Search`` only."""

    def __init__(self, plan: Plan, n_candidates: int, failures: Mapping[int, str]) -> None:
        self.plan = plan
        self.n_candidates = n_candidates
        self.failures = dict(failures)
        self.measured: dict[int, dict[int, Measured]] = {}
        self.n_run = 0
        self.queue: list[Trial] = []
        alive = self.alive()
        if len(alive) > 1:
            self.queue = [Trial(i, k >= plan.n_warmup) for i in alive for k in range(plan.n_warmup + plan.n_repeat)]
        self.n_allowed = MAX_OVERTIME * len(self.queue)

    def drop(self, failures: Mapping[int, str]) -> None:
        self.failures = {**failures, **self.failures}  # the first reason stays
        self.queue = [trial for trial in self.queue if trial.candidate not in self.failures] if len(self.alive()) > 1 else []

    def alive(self) -> list[int]:
        return [i for i in range(self.n_candidates) if i not in self.failures]

    def standing(self, candidate: int) -> Standing:
        on = {rank: times[candidate] for rank, times in self.measured.items() if candidate in times}
        failure = self.failures.get(candidate)
        if failure is not None or not on or len(on) < sum(bool(times) for times in self.measured.values()):
            return Standing(None, None, None, {rank: m.kernel_ms for rank, m in on.items()}, failure)
        slowest = max(on.values(), key=lambda m: m.kernel_ms)
        closure_ms = max(m.closure_ms for m in on.values())
        return Standing(slowest.kernel_ms, closure_ms, slowest.spread_ms, {rank: m.kernel_ms for rank, m in on.items()}, None)

    def best(self) -> int | None:
        """Least agreed time, then lowest index; the first that runs, where nothing was measured."""
        alive = self.alive()
        times = {i: self.standing(i).latency_ms for i in alive}
        measured = [(ms, i) for i, ms in times.items() if ms is not None]
        return min(measured)[1] if measured else (alive[0] if alive else None)

    def shortfall(self, candidate: int) -> int:
        """Timed replays still missing on the rank that has the fewest."""
        owners = [times for times in self.measured.values() if times]
        return self.plan.n_repeat - min((times[candidate].n_replays if candidate in times else 0 for times in owners), default=0)

    def take(self, n_replays: int) -> None:
        """These replays have been run."""
        self.n_run += min(n_replays, len(self.queue))
        self.queue = self.queue[n_replays:]

    def refill(self) -> None:
        """At the end of the queue: ask again for what the site did not meet in enough replays."""
        alive = self.alive()
        if not self.queue and len(alive) > 1 and any(self.measured.values()):
            short = {candidate: self.shortfall(candidate) for candidate in alive}
            again = [Trial(i, is_timed=True) for k in range(max(short.values())) for i in alive if k < short[i]]
            self.queue = again[: max(0, self.n_allowed - self.n_run)]


class Search:
    """All sites of one closure. Fed with the same calls on every rank, it answers the same on every rank."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._sites: dict[str, _Site] = {}

    def add(self, site: str, n_candidates: int, failures: Mapping[int, str]) -> None:
        """Enter a site after the vote: ``failures`` says which candidates cannot run, and on which rank why."""
        self._sites[site] = _Site(self._plan, n_candidates, failures)

    def __contains__(self, site: str) -> bool:
        """Whether the site was entered."""
        return site in self._sites

    def drop(self, site: str, failures: Mapping[int, str]) -> None:
        """Take candidates out that turned out not to run on a rank."""
        self._sites[site].drop(failures)

    def batch(self) -> list[Replay]:
        """The next replays, up to where the first unfinished site is through; none if all sites are settled.

        Nothing is decided within a batch, so it costs one meeting.
        """
        open_sites = [site for site in self._sites.values() if site.queue]
        n_replays = min((len(site.queue) for site in open_sites), default=0)
        return [
            {name: trial for name, site in self._sites.items() if (trial := self._trial(site, k)) is not None} for k in range(n_replays)
        ]

    def tell(self, n_replays: int, reports: Mapping[int, Report]) -> None:
        """Take in what all ranks say of the last batch: rank -> report. Measured times are totals and replace older ones."""
        for site in self._sites.values():
            site.take(n_replays)
        for rank, report in reports.items():
            for name in self._sites.keys() & report.failures.keys():
                self.drop(name, {candidate: f"rank {rank}: {reason}" for candidate, reason in report.failures[name].items()})
            for name in self._sites.keys() & report.measured.keys():
                times = self._sites[name].measured[rank] = report.measured[name]
                absurd = {
                    i: m.kernel_ms for i, m in times.items() if not all(isfinite(ms) and ms > 0 for ms in (m.kernel_ms, m.closure_ms))
                }
                self.drop(name, {candidate: f"rank {rank}: the clock gave {ms} ms" for candidate, ms in absurd.items()})
        for site in self._sites.values():
            site.refill()

    def best(self, site: str) -> int | None:
        """The incumbent; the winner when ``batch`` is empty. None if no candidate is alive."""
        return self._sites[site].best()

    def standings(self, site: str) -> Sequence[Standing]:
        """What is agreed on each candidate, in order of index."""
        return [self._sites[site].standing(i) for i in range(self._sites[site].n_candidates)]

    def _trial(self, site: _Site, k: int) -> Trial | None:
        if k < len(site.queue):
            return site.queue[k]
        best = site.best()
        return None if best is None else Trial(best, is_timed=False)
