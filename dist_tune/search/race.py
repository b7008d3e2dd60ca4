"""The search over all sites of a closure. Pure.

Racing: all candidates are timed once, the hopeless ones leave, and the rest run on in rungs until a few finalists are left.
Finals compare these in replays that give every site one of its finalists. All sites advance in the same replays, and a rung or a
round of finals costs one meeting. Exhaustive search: each candidate gets ``n_warmup`` untimed and ``n_repeat`` timed replays, and a
site that is done runs its incumbent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dist_tune.errors import reasons
from dist_tune.search.plan import CandidateResult, Plan, PriorTimes, Replay, Trial
from dist_tune.search.reports import ReducedReport
from dist_tune.search.selection import RacingOptions, Selection
from dist_tune.search.site_race import MAX_OVERTIME, SiteRace
from dist_tune.search.standings import Standings


class Race:
    """All sites of one closure. Fed with the same calls on every rank, it answers the same on every rank."""

    def __init__(self, plan: Plan, options: RacingOptions | None = None) -> None:
        self.n_replays = 0
        """Replays so far."""
        self._plan = plan
        self._options = options or RacingOptions()
        self._sites: dict[str, SiteRace] = {}

    def add(self, site: str, n_candidates: int, failures: Mapping[int, str], prior: PriorTimes | None = None) -> None:
        """Enter a site after the vote. ``failures``: candidates that cannot run, with rank and reason."""
        standings = Standings(n_candidates, failures, prior or PriorTimes())
        self._sites[site] = SiteRace(site, self._plan, self._options, standings)
        n_open = sum(each.n_nominal > 0 for each in self._sites.values())
        for each in self._sites.values():
            each.is_alone = n_open < 2

    def __contains__(self, site: str) -> bool:
        """True if the site was entered."""
        return site in self._sites

    @property
    def is_final(self) -> bool:
        """True if all sites have reached the finals."""
        return all(site.stage in ("finals", "done") for site in self._sites.values())

    @property
    def bound(self) -> int:
        """Replays at most, if every site is met in every replay; ``MAX_OVERTIME`` times that otherwise."""
        if self._plan.max_replays is not None:
            return self._plan.max_replays
        return max((site.n_nominal for site in self._sites.values() if site.stage != "done"), default=0)

    def drop(self, site: str, failures: Mapping[int, str]) -> None:
        """Take candidates out that turned out not to run on a rank."""
        self._sites[site].drop(failures)

    def warm_up(self, sites: Mapping[str, int]) -> list[Replay]:
        """Untimed and checked runs of each candidate of these sites: site -> runs of each."""
        orders = {name: [i for i in self._sites[name].standings.alive() for _ in range(n_runs)] for name, n_runs in sites.items()}
        others = {name: Trial(best, is_timed=False) for name, site in self._sites.items() if (best := site.incumbent()) is not None}
        return [
            others | {name: Trial(order[k], is_timed=False, is_checked=True) for name, order in orders.items() if k < len(order)}
            for k in range(max(map(len, orders.values()), default=0))
        ]

    def batch(self) -> list[Replay]:
        """The next replays; none if all sites have a winner. Nothing is decided within a batch, so it costs one meeting."""
        for site in self._sites.values():
            site.advance(self._n_left)
        if self.is_final:
            self._begin_round()
        lengths = [len(site.queue) for site in self._sites.values() if site.queue]
        # A rung lasts as long as its longest site; an exhaustive search goes on with the winner of the site that is through.
        n_replays = (max if self._plan.search == "racing" else min)(lengths, default=0)
        return [
            {name: trial for name, site in self._sites.items() if (trial := site.trial(k)) is not None}
            for k in range(min(n_replays, self._n_left))
        ]

    def tell(self, n_replays: int, report: ReducedReport) -> None:
        """Take in the reduced report of a batch. Times are totals and replace older ones."""
        self.n_replays += n_replays
        for name, site in self._sites.items():
            site.tell(n_replays, report.times.get(name, {}))
            site.drop(reasons(report.failures.get(name, {})))

    def best(self, site: str) -> int | None:
        """The incumbent; the winner when ``batch`` is empty. None if no candidate is alive."""
        return self._sites[site].incumbent()

    def selection(self, site: str) -> Selection | None:
        """The choice of the winner; None before it, or if there was nothing to choose."""
        return self._sites[site].selection

    def results(self, site: str) -> Sequence[CandidateResult]:
        """The result of each candidate, by index."""
        return self._sites[site].standings.results()

    def kernel_times_ms(self) -> dict[str, dict[int, float]]:
        """Site -> candidate -> reduced time of its launches in a replay, so far."""
        return {name: {i: each.launches_ms for i, each in site.standings.times.items()} for name, site in self._sites.items()}

    @property
    def _n_left(self) -> int:
        allowed = self._plan.max_replays
        return allowed - self.n_replays if allowed is not None else MAX_OVERTIME * sum(s.n_nominal for s in self._sites.values())

    def _begin_round(self) -> None:
        finals = [(site, site.round_length(self._n_left)) for site in self._sites.values() if site.stage == "finals" and not site.queue]
        n_replays = max((own for _, own in finals), default=0)
        for site, own in finals:
            site.begin_round(n_replays if own else 0)
