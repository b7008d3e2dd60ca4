"""The search over all sites of a closure. Pure.

Racing: all candidates are timed once, the hopeless ones leave, and the rest run on in rungs until a few finalists are left.
Finals compare these in replays that give every site one of its finalists. All sites advance in the same replays, and a rung or a
round of finals costs one meeting. Exhaustive search: each candidate gets ``n_warmup`` untimed and ``n_repeat`` timed replays, and a
site that is done runs its incumbent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf, isfinite

from dist_tune.errors import reasons
from dist_tune.search.guide import Guide, LateGuide
from dist_tune.search.plan import CandidateResult, Plan, PriorTimes, Replay, Trial
from dist_tune.search.reports import ReducedReport
from dist_tune.search.selection import RacingOptions, Selection
from dist_tune.search.site_race import MAX_OVERTIME, SiteRace
from dist_tune.search.standings import Standings

LONG_S = 0.25
"""Replays from this length on are asked for in batches of about ``BATCH_S``."""
BATCH_S = 1.0
BUDGET_BATCH_S = 0.1
"""Length of batches where there is a budget: a candidate may be far slower than those before it, and a meeting takes some ms at most."""
WARM_UP_S = 1.0
"""Untimed replays before a race last about this long at most."""


class Race:
    """All sites of one closure. Fed with the same calls on every rank, it answers the same on every rank."""

    def __init__(self, plan: Plan, options: RacingOptions | None = None) -> None:
        self.n_replays = 0
        """Replays so far."""
        self._plan = plan
        self._options = options or RacingOptions()
        self._sites: dict[str, SiteRace] = {}
        self._elapsed_s = 0.0
        self._pace_s: float | None = None
        """Seconds of a replay in the batch before."""
        self._first_s = 0.0
        self._replays_s = 0.0
        """Seconds of all replays."""
        self._has_probed = False
        """True once sites that were missed have had another turn."""

    def add(
        self,
        site: str,
        n_candidates: int,
        failures: Mapping[int, str],
        prior: PriorTimes | None = None,
        equal: Mapping[int, int] | None = None,
        guide: Guide | LateGuide | None = None,
        untried: Collection[int] = (),
    ) -> None:
        """Enter a site after the vote. ``failures``: candidates that cannot run, with rank and reason.

        ``equal``: candidate -> the one of lower index with the same kernel, which races for both.
        ``guide``: asks for more candidates, ``untried`` so far; None if all race at once.
        """
        standings = Standings(n_candidates, failures, prior or PriorTimes(), equal, untried)
        self._sites[site] = SiteRace(site, self._plan, self._options, standings, guide)
        n_open = sum(each.n_nominal > 0 for each in self._sites.values())
        for each in self._sites.values():
            each.n_open = n_open

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

    @property
    def n_queued(self) -> int:
        """Replays that are asked for; what follows depends on their times."""
        return max((len(site.queue) for site in self._sites.values()), default=0)

    @property
    def spare_s(self) -> float:
        """Seconds of replays beyond ``bound``, for kernels so short that the clock cannot tell them apart."""
        return self._options.spare_s if self._plan.max_replays is None and self._plan.n_repeat > 1 else 0.0

    @property
    def is_spent(self) -> bool:
        """True if the search has used up its budget."""
        return self._plan.budget_s is not None and self._elapsed_s >= self._plan.budget_s

    def expect(self, run_s: float) -> None:
        """Take in the time of a run that may have compiled: replays may be as long, until one has been timed."""
        self._first_s = max(self._first_s, run_s)

    def n_next(self, replays: Sequence[Replay]) -> int:
        """Replays of a list to run before the next meeting: all if they are short, so many that a budget is kept otherwise."""
        replays = replays[: self._n_trusted(replays)]
        expected_s = [self._expected_s(each) for each in replays]
        budget_s = self._plan.budget_s
        if budget_s is None and sum(expected_s) < LONG_S * len(replays):
            return len(replays)
        allowed_s = BATCH_S if budget_s is None else min(BUDGET_BATCH_S, budget_s - self._elapsed_s)
        n_next = 0
        while n_next < len(replays) and (allowed_s := allowed_s - expected_s[n_next]) >= 0:
            n_next += 1
        return min(max(1, n_next), len(replays))

    def drop(self, site: str, failures: Mapping[int, str]) -> None:
        """Take candidates out that turned out not to run on a rank."""
        self._sites[site].drop(failures)

    def split(self, site: str, equal: Mapping[int, int]) -> None:
        """Let only these be equal, because a rank that came to the site late has found no others."""
        self._sites[site].standings.split(equal)

    def is_barren(self, site: str) -> bool:
        """True if nothing runs of what a guided search has tried, and it has yet to end."""
        return self._sites[site].is_barren

    def waves(self) -> dict[str, list[int]]:
        """Candidates that guided searches come to next: site -> candidates to compile, or to warm up for a function, and to ``join``."""
        if self.is_spent and not any(site.is_barren for site in self._sites.values()):
            return {}
        waves = {name: site.wave(self._n_left) for name, site in self._sites.items() if not self.is_spent or site.is_barren}
        return {name: wave for name, wave in waves.items() if wave}

    def join(self, waves: Mapping[str, Collection[int]]) -> None:
        """Let the candidates of waves race: site -> candidates."""
        for name, wave in waves.items():
            self._sites[name].join(wave)

    def warm_up(self, sites: Mapping[str, int], waves: Mapping[str, Collection[int]] | None = None) -> list[Replay]:
        """Untimed and checked runs of each candidate of these sites, or of these ``waves``: site -> runs of each."""
        wanted = {name: [i for i in self._sites[name].standings.in_turn() if waves is None or i in waves[name]] for name in sites}
        orders = {name: [i for i in wanted[name] for _ in range(n_runs)] for name, n_runs in sites.items()}
        others = {name: Trial(best, is_timed=False) for name, site in self._sites.items() if (best := site.incumbent()) is not None}
        return [
            others | {name: Trial(order[k], is_timed=False, is_checked=True) for name, order in orders.items() if k < len(order)}
            for k in range(max(map(len, orders.values()), default=0))
        ]

    def tell_warm_up(self, n_replays: int, report: ReducedReport) -> None:
        """Take in the times of untimed runs so far, and who failed in them."""
        self._spend(n_replays, report)
        for name, site in self._sites.items():
            site.standings.warm_ups.update(report.times.get(name, {}))
            site.drop(reasons(report.failures.get(name, {})))

    def is_enough(self, sites: Collection[str]) -> bool:
        """True if the budget is spent and each of these sites has a candidate that has had its warm-up."""
        return self.is_spent and all(set(s.standings.alive()) & s.standings.warm_ups.keys() for s in map(self._sites.__getitem__, sites))

    def end_warm_up(self, sites: Collection[str]) -> None:
        """Go on to the race of these sites, with the candidates whose warm-ups took no multiple of the best one's."""
        for name in sites:
            self._sites[name].end_warm_up(self._why_spent if self.is_spent else "")

    def batch(self) -> list[Replay]:
        """The next replays; none if all sites have a winner. Nothing is decided within a batch, so it costs one meeting."""
        replays = self._batch()
        if not replays and not self._has_probed and not self.is_spent and self._n_left > 0:
            self._has_probed = True
            for site in self._sites.values():
                site.try_again()
            replays = self._batch()
        return replays

    def _batch(self) -> list[Replay]:
        for site in self._sites.values():
            if self.is_spent and not site.is_barren:
                site.stop(self._why_spent)
            site.advance(self._n_left)
        if self.is_final:
            self._begin_round()
        replays = self._queued()
        if self._plan.search != "exhaustive" and (n_spare := self._n_spare(replays)) > 0:
            for name in self._sites.keys() - self._held():
                self._sites[name].shorten_warm_up(n_spare)
            replays = self._queued()
        replays = replays[: self.n_next(replays)]
        for name in self._held():  # what the batch runs there is told of as well
            self._sites[name].queue[:0] = [trial for replay in replays if (trial := replay.get(name)) is not None]
        return replays

    def _n_trusted(self, replays: Sequence[Replay]) -> int:
        """Replays before the first that runs a suspect; 1 if that is the first, because the next one needs a meeting before it."""
        is_doubtful = (any(trial.candidate in self._sites[name].standings.suspects for name, trial in each.items()) for each in replays)
        return max(1, next((k for k, each in enumerate(is_doubtful) if each), len(replays)))

    def _held(self) -> set[str]:
        """Sites whose next trial is a suspect that has to wait: until no other site has trials left, and then for its turn."""
        queued = [name for name, site in self._sites.items() if site.queue]
        doubtful = [name for name in queued if self._sites[name].queue[0].candidate in self._sites[name].standings.suspects]
        return set(doubtful if len(doubtful) < len(queued) else doubtful[1:])

    def _queued(self) -> list[Replay]:
        held = self._held()
        lengths = [len(site.queue) for name, site in self._sites.items() if site.queue and name not in held]
        # A rung lasts as long as its longest site; an exhaustive search goes on with the winner of the site that is through.
        n_replays = (min if self._plan.search == "exhaustive" else max)(lengths, default=0)
        return [
            {name: trial for name, site in self._sites.items() if (trial := site.trial(k, is_held=name in held)) is not None}
            for k in range(min(n_replays, self._n_left))
        ]

    def tell(self, n_replays: int, report: ReducedReport) -> None:
        """Take in the reduced report of a batch. Times are totals and replace older ones."""
        self.n_replays += n_replays
        self._spend(n_replays, report)
        self._replays_s += report.batch_s
        for name, site in self._sites.items():
            site.repeats.n_spare = int(self.spare_s * self.n_replays / self._replays_s) if self._replays_s > 0 else 0
            site.tell(n_replays, report.times.get(name, {}))
            site.drop(reasons(report.failures.get(name, {})))

    def alive(self, site: str) -> list[int]:
        """Candidates that are in the race."""
        return self._sites[site].standings.alive()

    def left(self, site: str) -> Mapping[int, str]:
        """Candidates that have left the race, or did not enter it, and why."""
        return self._sites[site].standings.left

    def kernel_ms(self, site: str, candidate: int) -> float:
        """Reduced time of a candidate's launch so far; inf without one."""
        times = self._sites[site].standings.times.get(candidate)
        return inf if times is None else times.kernel_ms

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
        if self._plan.max_replays is not None:
            return self._plan.max_replays - self.n_replays
        n_spare = max((site.repeats.n_spare for site in self._sites.values()), default=0)
        return MAX_OVERTIME * sum(site.n_nominal for site in self._sites.values()) + n_spare

    @property
    def _why_spent(self) -> str:
        return f"not raced: the budget of {self._plan.budget_s:g} s was spent"

    def _spend(self, n_replays: int, report: ReducedReport) -> None:
        if n_replays and report.batch_s > 0:
            self._pace_s = report.batch_s / n_replays
        self._elapsed_s = max(self._elapsed_s, report.elapsed_s)

    def _expected_s(self, replay: Replay) -> float:
        """Seconds of a replay by what is known of its candidates, or of the replays before; endless if they may be long."""
        known = {name: self._sites[name].standings.known_ms(trial.candidate) for name, trial in replay.items()}
        least_s = max((ms for ms in known.values() if ms is not None), default=0.0) / 1e3
        if None not in known.values():
            return least_s
        may_be_long = self._plan.budget_s is not None or self._first_s >= LONG_S
        return max(least_s, self._pace_s) if self._pace_s is not None else inf if may_be_long else least_s

    def _n_spare(self, replays: Sequence[Replay]) -> int:
        """Untimed replays at the front of a race that are too many because they are long."""
        timed = (k for k, replay in enumerate(replays) if any(trial.is_timed for trial in replay.values()))
        n_untimed = next(timed, 0)
        each_s = self._expected_s(replays[0]) if n_untimed else 0.0
        return max(0, n_untimed - int(WARM_UP_S / each_s)) if isfinite(each_s) and each_s > 0 else 0

    def _begin_round(self) -> None:
        waiting = [site for site in self._sites.values() if site.stage == "finals" and not site.queue]
        n_left = self._n_left
        if waiting and self._plan.max_replays is None:  # a site whose race was short has no longer finals for it
            n_extra = max(site.repeats.n_extra for site in waiting)
            n_nominal, n_since = max(site.n_nominal for site in waiting), max(site.n_since for site in waiting)
            n_left = min(n_left, max(n_nominal + n_extra - n_since, n_extra // 2))
        finals = [(site, site.round_length(n_left)) for site in waiting]
        n_replays = max((own for _, own in finals), default=0)
        for site, own in finals:
            site.begin_round(n_replays if own else 0)
