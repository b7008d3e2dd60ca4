"""The search: which candidate each site runs in the next replays, and which one wins.

Pure. Knows neither Triton nor torch.distributed nor clocks nor disk: it is told what all ranks agree on and answers with
plain values, so that ranks which feed it the same numbers take the same decisions.

Racing: all candidates are timed once, the hopeless ones leave, and the rest run on in rungs until a few finalists are left;
these are then compared in replays that give every site one of its finalists. All sites advance in the same replays, and a
rung or a round of finals costs one meeting. Exhaustive search is the seed's table: each candidate gets ``n_warmup`` untimed
and ``n_repeat`` timed replays, and a site that is done runs its incumbent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dist_tune.errors import reasons
from dist_tune.search.plan import CandidateResult, Plan, PriorTimes, Replay, Trial
from dist_tune.search.reports import ReducedReport
from dist_tune.search.selection import RacingOptions, Selection
from dist_tune.search.site_race import MAX_OVERTIME, SiteRace


class Race:
    """All sites of one closure. Fed with the same calls on every rank, it answers the same on every rank."""

    def __init__(self, plan: Plan, policy: RacingOptions | None = None) -> None:
        self.n_replays = 0
        """Asked for so far."""
        self._plan = plan
        self._policy = policy or RacingOptions()
        self._sites: dict[str, SiteRace] = {}

    def add(self, site: str, n_candidates: int, failures: Mapping[int, str], known: PriorTimes | None = None) -> None:
        """Enter a site after the vote: ``failures`` says which candidates cannot run, and on which rank why.

        ``known``: what earlier tunings found of these candidates, among others.
        """
        self._sites[site] = SiteRace(site, self._plan, self._policy, n_candidates, failures, known or PriorTimes())
        n_open = sum(each.n_nominal > 0 for each in self._sites.values())
        for each in self._sites.values():
            each.is_alone = n_open < 2

    def __contains__(self, site: str) -> bool:
        """Whether the site was entered."""
        return site in self._sites

    @property
    def is_final(self) -> bool:
        """Whether no site is racing any more."""
        return not any(site.stage in ("race", "table") for site in self._sites.values())

    @property
    def bound(self) -> int:
        """Replays at most, if every site is met in every replay; ``MAX_OVERTIME`` times that otherwise."""
        nominal = max((site.n_nominal for site in self._sites.values() if site.stage != "done"), default=0)
        return nominal if self._plan.max_replays is None else self._plan.max_replays

    def drop(self, site: str, failures: Mapping[int, str]) -> None:
        """Take candidates out that turned out not to run on a rank."""
        self._sites[site].drop(failures)

    def warm_up(self, sites: Mapping[str, int]) -> list[Replay]:
        """Untimed and checked runs of each candidate of these sites, as many as is said."""
        orders = {name: [i for i in self._sites[name].alive() for _ in range(n_runs)] for name, n_runs in sites.items()}
        others = {name: Trial(best, is_timed=False) for name, site in self._sites.items() if (best := site.incumbent()) is not None}
        n_replays = max(map(len, orders.values()), default=0)
        return [
            others | {name: Trial(order[k], is_timed=False, is_checked=True) for name, order in orders.items() if k < len(order)}
            for k in range(n_replays)
        ]

    def batch(self) -> list[Replay]:
        """The next replays; none if all sites are settled. Nothing is decided within a batch, so it costs one meeting."""
        for site in self._sites.values():
            site.advance(self._n_left)
        if self.is_final:
            self._begin_round()
        lengths = [len(site.queue) for site in self._sites.values() if site.queue]
        # A rung lasts as long as its longest site; the seed's table goes on with the winner of the site that is through.
        n_replays = (max if self._plan.search == "racing" else min)(lengths, default=0)
        return [
            {name: trial for name, site in self._sites.items() if (trial := _trial(site, k)) is not None}
            for k in range(min(n_replays, self._n_left))
        ]

    def tell(self, n_replays: int, report: ReducedReport) -> None:
        """Take in what all ranks agree on after a batch. Times are totals and replace older ones."""
        self.n_replays += n_replays
        for name, site in self._sites.items():
            site.n_run += min(n_replays, len(site.queue))
            site.queue = site.queue[n_replays:]
            site.hear(report.times.get(name, {}))
            site.drop(reasons(report.failures.get(name, {})))

    def best(self, site: str) -> int | None:
        """The incumbent; the winner when ``batch`` is empty. None if no candidate is alive."""
        return self._sites[site].incumbent()

    def selection(self, site: str) -> Selection | None:
        """How the winner was chosen; None before that, or where there was no choice."""
        return self._sites[site].selection

    def results(self, site: str) -> Sequence[CandidateResult]:
        """What came of each candidate, in order of index."""
        state = self._sites[site]
        return [
            CandidateResult(state.found(i) if i not in state.failures else None, state.failures.get(i), state.left.get(i))
            for i in range(state.n_candidates)
        ]

    def kernel_times_ms(self) -> dict[str, dict[int, float]]:
        """Site -> candidate -> agreed time of its launches in a replay, so far."""
        return {name: {i: each.launches_ms for i, each in site.agreed.items()} for name, site in self._sites.items()}

    @property
    def _n_left(self) -> int:
        allowed = self._plan.max_replays
        return allowed - self.n_replays if allowed is not None else MAX_OVERTIME * sum(s.n_nominal for s in self._sites.values())

    def _begin_round(self) -> None:
        finals = [site for site in self._sites.values() if site.stage == "finals" and not site.queue]
        n_replays = max((site.round_length(self._n_left) for site in finals), default=0)
        for site in finals:
            site.begin_round(n_replays if site.round_length(self._n_left) else 0)


def _trial(site: SiteRace, k: int) -> Trial | None:
    if k < len(site.queue):
        return site.queue[k]
    incumbent = site.incumbent()
    return None if incumbent is None else Trial(incumbent, is_timed=False)
