"""The search over all sites of a closure. Pure.

Racing: all candidates are timed once, the hopeless ones leave, and the rest run on in rungs until a few finalists are left.
Finals compare these in replays that give every site one of its finalists. All sites advance in the same replays, and a rung or a
round of finals costs one meeting. Exhaustive search: each candidate gets ``n_warmup`` untimed and ``n_repeat`` timed replays, and a
site that is done runs its incumbent. Sites inside one another take turns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf

from dist_tune.errors import reasons
from dist_tune.search.guided import Guide
from dist_tune.search.pace import Pace
from dist_tune.search.plan import CandidateResult, Plan, PriorTimes, Replay, Trial
from dist_tune.search.selection import RacingOptions, Selection
from dist_tune.search.site_race import SiteRace
from dist_tune.search.standings import Standings
from dist_tune.search.times import Report
from dist_tune.search.turns import Turns

_SHARE_SPENT = "not raced: the rest of the budget is for the function around it"


class Race:
    """All sites of one closure. Fed with the same calls on every rank, it answers the same on every rank."""

    def __init__(self, plan: Plan, options: RacingOptions | None = None) -> None:
        self.n_replays = 0
        """Replays so far."""
        self._plan = plan
        self._options = options or RacingOptions()
        self._sites: dict[str, SiteRace] = {}
        self._turns = Turns(self._sites)
        self._pace = Pace(plan)
        self._has_probed = False
        """True once sites that were missed have had another turn."""

    def add(
        self,
        site: str,
        n_candidates: int,
        failures: Mapping[int, str],
        prior: PriorTimes | None = None,
        equal: Mapping[int, int] | None = None,
        guide: Guide | None = None,
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
        """True if all sites whose turn it is have reached the finals."""
        return all(self._sites[name].stage in ("finals", "done") for name in self._turns.active)

    @property
    def bound(self) -> int:
        """Replays at most, if every site is met in every replay; ``MAX_OVERTIME`` times that otherwise."""
        n_nominal = [site.n_nominal for site in self._sites.values() if site.stage != "done"]
        return sum(n_nominal) if self._turns.is_inside else max(n_nominal, default=0)

    @property
    def n_queued(self) -> int:
        """Replays that are asked for; what follows depends on their times."""
        return max((len(self._sites[name].queue) for name in self._turns.active), default=0)

    @property
    def spare_s(self) -> float:
        """Seconds of replays beyond ``bound``, for kernels so short that the clock cannot tell them apart."""
        return self._options.spare_s if self._plan.n_repeat > 1 else 0.0

    @property
    def is_spent(self) -> bool:
        """True if the search has used up its budget."""
        return self._pace.is_spent

    def expect(self, run_s: float) -> None:
        """Take in the time of a run that may have compiled: replays may be as long, until one has been timed."""
        self._pace.expect(run_s)

    def n_next(self, replays: Sequence[Replay]) -> int:
        """Replays of a list to run before the next meeting: all if they are short, so many that a budget is kept otherwise."""
        return self._pace.n_next([self._known_ms(each) for each in replays[: n_trusted(replays, self._sites)]])

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
        before: Collection[str] | None = None
        while True:
            turn = () if self.is_spent else self._next_turn()
            barren = [name for name, site in self._sites.items() if site.is_barren]  # each replay may launch these
            asked = [name for name in self._sites if name in turn or name in barren]
            waves = {name: wave for name in asked if (wave := self._sites[name].wave())}
            if waves or self.is_spent or turn == before:
                return waves
            before = turn
            self._advance()  # a turn without trials ends here, and the next one may begin with a wave

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

    def tell_warm_up(self, n_replays: int, report: Report) -> None:
        """Take in the times of untimed runs so far, and who failed in them."""
        self._pace.spend(n_replays, report)
        self._turns.note(report.nesting)
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
        self._pace.begin()
        replays = self._batch()
        if not replays and not self._has_probed and not self.is_spent:
            self._has_probed = True
            for site in self._sites.values():
                site.try_again()
            replays = self._batch()
        return replays

    def _batch(self) -> list[Replay]:
        if self.is_spent:
            for site in self._sites.values():
                if not site.is_barren:
                    site.stop(self._why_spent)
        self._advance()
        replays = self._queued()
        if self._plan.search != "exhaustive" and (n_spare := self._n_spare(replays)) > 0:
            for name in set(self._turns.active) - self._held():
                del self._sites[name].queue[:n_spare]
            replays = self._queued()
        replays = replays[: self.n_next(replays)]
        for name in self._held():  # what the batch runs there is told of as well
            self._sites[name].queue[:0] = [trial for replay in replays if (trial := replay.get(name)) is not None]
        return replays

    def _advance(self) -> None:
        """Let the sites whose turn it is come to their next replays, and then the next ones, until some have replays to run."""
        before: Collection[str] | None = None
        while (turn := self._next_turn()) != before:
            before = turn
            is_over = self._turns.is_inside and self._pace.is_spent_but(self._turns.share_kept)
            for name in turn:
                self._sites[name].advance()
                if is_over and self._turns.waits_for(name):
                    self._sites[name].end(_SHARE_SPENT)
            if is_over:  # the turn of the functions, though sites that are in no function may have trials left
                continue
            if self.is_final:
                self._begin_round()
            if any(self._sites[name].queue for name in turn):
                return

    def _next_turn(self) -> Collection[str]:
        return self._turns.next(may_begin=not self.is_spent)

    def _held(self) -> set[str]:
        return held({name: site for name, site in self._sites.items() if name in self._turns.active})

    def _queued(self) -> list[Replay]:
        waiting = self._held()
        active = {name: site for name, site in self._sites.items() if name in self._turns.active}
        lengths = [len(site.queue) for name, site in active.items() if site.queue and name not in waiting]
        # A rung lasts as long as its longest site; an exhaustive search goes on with the winner of the site that is through.
        n_replays = (min if self._plan.search == "exhaustive" else max)(lengths, default=0)
        return [
            {
                name: trial
                for name, site in self._sites.items()
                if (trial := site.trial(k, is_held=name in waiting) if name in active else self._turns.trial(name)) is not None
            }
            for k in range(n_replays)
        ]

    def take_begun_anew(self) -> list[str]:
        """Sites that race anew since the last time: their samples so far are of an earlier race."""
        return self._turns.take_begun_anew()

    def tell(self, n_replays: int, report: Report) -> None:
        """Take in the reduced report of a batch. Times are totals and replace older ones."""
        self.n_replays += n_replays
        self._pace.spend(n_replays, report)
        n_spare = self._pace.n_in(self.spare_s, self.n_replays, report.batch_s)
        self._turns.note(report.nesting)
        for name, site in self._sites.items():
            site.repeats.n_spare = n_spare
            site.tell(n_replays if name in self._turns.active else 0, report.times.get(name, {}))
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

    def reason(self, site: str) -> str:
        """The reason of the choice of the winner in words, to be kept with it."""
        return self._sites[site].reason

    def results(self, site: str) -> Sequence[CandidateResult]:
        """The result of each candidate, by index."""
        return self._sites[site].standings.results()

    def kernel_times_ms(self) -> dict[str, dict[int, float]]:
        """Site -> candidate -> reduced time of its launches in a replay, so far."""
        return {name: {i: each.launches_ms for i, each in site.standings.times.items()} for name, site in self._sites.items()}

    @property
    def _why_spent(self) -> str:
        return f"not raced: the budget of {self._plan.budget_s:g} s was spent"

    def _n_spare(self, replays: Sequence[Replay]) -> int:
        """Untimed replays at the front of a race that are too many because they are long."""
        timed = (k for k, replay in enumerate(replays) if any(trial.is_timed for trial in replay.values()))
        return self._pace.n_spare(next(timed, 0), self._known_ms(replays[0]) if replays else ())

    def _known_ms(self, replay: Replay) -> list[float | None]:
        """Milliseconds of a replay with each of its candidates, as far as they are known."""
        return [self._sites[name].standings.known_ms(trial.candidate) for name, trial in replay.items()]

    def _begin_round(self) -> None:
        waiting = [each for name in self._turns.active if (each := self._sites[name]).stage == "finals" and not each.queue]
        if not waiting:
            return
        n_extra = max(site.repeats.n_extra for site in waiting)
        n_nominal, n_since = max(site.n_nominal for site in waiting), max(site.n_since for site in waiting)
        n_most = max(n_nominal + n_extra - n_since, n_extra // 2)  # a site whose race was short has no longer finals for it
        finals = [(site, site.round_length(n_most)) for site in waiting]
        n_replays = max(own for _, own in finals)
        for site, own in finals:
            site.begin_round(n_replays if own else 0)


def n_trusted(replays: Sequence[Replay], sites: Mapping[str, SiteRace]) -> int:
    """Replays before the first that runs a suspect; 1 if that is the first, because the next one needs a meeting before it."""
    is_doubtful = (any(trial.candidate in sites[name].standings.suspects for name, trial in each.items()) for each in replays)
    return max(1, next((k for k, each in enumerate(is_doubtful) if each), len(replays)))


def held(sites: Mapping[str, SiteRace]) -> set[str]:
    """Sites whose next trial is a suspect that has to wait: until no other site has trials left, and then for its turn."""
    queued = [name for name, site in sites.items() if site.queue]
    doubtful = [name for name in queued if sites[name].queue[0].candidate in sites[name].standings.suspects]
    return set(doubtful if len(doubtful) < len(queued) else doubtful[1:])
