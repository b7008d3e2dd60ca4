"""The race at one site: rungs, finals and the winner. Pure; ``race`` advances all sites in the same replays."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Literal

from dist_tune.search.plan import Plan, Trial
from dist_tune.search.selection import RacingOptions, ReducedTimes, Selection, kept, select
from dist_tune.search.standings import Standings

MAX_OVERTIME = 3
"""A site gets at most this many times its nominal number of replays, when it is not met in all of them."""


class SiteRace:
    """The state of one site's race; changed by ``Race`` only."""

    def __init__(self, label: str, plan: Plan, options: RacingOptions, standings: Standings) -> None:
        self.standings = standings
        self.stage: Literal["exhaustive", "race", "finals", "done"] = "done"
        self.queue: list[Trial] = []
        self.selection: Selection | None = None
        self.is_alone = True
        """True if no other site has a choice to make, so that no other one changes a replay's time."""
        self.n_nominal = 0
        self._n_run = 0
        self._label = label
        self._plan = plan
        self._options = options
        self._rung = 0
        self._n_rounds = 0
        self._wanted: dict[int, int] = {}
        """Candidate -> timed replays that it needs by the end of the queue."""
        self._timed_in_finals: set[int] = set()
        self._leave_by_prior_times()
        alive = standings.alive()
        self._n_finalists = min(options.max_finalists, len(alive))
        if len(alive) > 1:
            self._begin(alive)

    def incumbent(self) -> int | None:
        """The winner, or the fastest so far."""
        if self.selection is not None and self.selection.winner not in self.standings.failures:
            return self.selection.winner
        return self.standings.fastest()

    def trial(self, k: int) -> Trial | None:
        """The site's part in the k-th replay of the batch."""
        if k < len(self.queue):
            return self.queue[k]
        incumbent = self.incumbent()
        return None if incumbent is None else Trial(incumbent, is_timed=False)

    def drop(self, failures: Mapping[int, str]) -> None:
        """Take candidates out that do not run on some rank."""
        self.standings.fail(failures)
        has_choice = len(self.standings.alive()) > 1
        self.queue = [trial for trial in self.queue if trial.candidate not in self.standings.failures] if has_choice else []

    def tell(self, n_replays: int, times: Mapping[int, ReducedTimes]) -> None:
        """Take in the reduced times after some replays of the queue."""
        self._n_run += min(n_replays, len(self.queue))
        self.queue = self.queue[n_replays:]
        self.standings.update(times)
        if self.stage == "finals":
            self._timed_in_finals |= times.keys()

    def advance(self, n_left: int) -> None:
        """At the end of the queue: ask again for missed trials, or go on to the next rung, or choose the winner."""
        if self.queue or self.stage == "done":
            return
        alive, times = self.standings.alive(), self.standings.times
        n_missed = {i: n - (times[i].n_replays if i in times else 0) for i, n in self._wanted.items() if i in alive}
        n_overtime = min(n_left, MAX_OVERTIME * self.n_nominal - self._n_run)
        if len(alive) < 2:
            self._choose()
        elif times and n_overtime > 0 and max(n_missed.values(), default=0) > 0:
            again = [Trial(i, is_timed=True) for k in range(max(n_missed.values())) for i in alive if k < n_missed.get(i, 0)]
            self.queue = again[:n_overtime]
        elif self.stage == "race":
            self._end_rung(alive, n_left)
        elif self.stage == "exhaustive":
            self._choose()
        elif self._n_rounds > 0:  # before the first round it waits for other sites to end their races
            self._end_round(n_left)

    def begin_round(self, n_replays: int) -> None:
        """Queue one round of finals: finalists in turn, in orders of their own, until the round is full."""
        if n_replays == 0:
            self._choose()
            return
        rounds = (self._shuffled(self.standings.alive(), f"final {self._n_rounds} {k}") for k in range(n_replays))
        self.queue = list(islice((trial for each in rounds for trial in each), n_replays))
        self._n_rounds += 1
        self._wanted = {}  # more repeats are optional here

    def round_length(self, n_left: int) -> int:
        """Replays of a round of finals. Fewer finalists run more often, so that finals do not grow with the number of sites."""
        n_replays = min(self._n_finalists * self._plan.n_repeat, self._n_allowed(n_left))
        return n_replays if n_replays >= 2 * len(self.standings.alive()) else 0  # the noise is known from repeats only

    def _begin(self, alive: Sequence[int]) -> None:
        plan, incumbent = self._plan, self.standings.prior_winner
        self.n_nominal = len(alive) * (plan.n_warmup + plan.n_repeat)
        if plan.search == "racing" and plan.n_repeat > 1:
            # Where there are few candidates, enough for a race and a round of finals.
            n_race = plan.n_warmup + len(alive) + (min(self._options.min_rungs, plan.n_repeat) - 1) * self._n_finalists
            self.n_nominal = max(self.n_nominal, n_race + self._n_finalists * plan.n_repeat)
        if plan.search == "exhaustive":
            self.stage = "exhaustive"
            self._wanted = dict.fromkeys(alive, plan.n_repeat)
            self.queue = [Trial(i, k >= plan.n_warmup) for i in alive for k in range(plan.n_warmup + plan.n_repeat)]
        else:
            self.stage = "race"
            self._wanted = dict.fromkeys(alive, 1)
            # The device and its allocator warm up once, not with every candidate.
            first = alive[0] if incumbent is None else incumbent
            self.queue = [Trial(first, is_timed=False)] * plan.n_warmup + self._shuffled(alive)
        if incumbent is not None:  # in front: where replays run out it has had its turn
            self.queue.sort(key=lambda trial: trial.candidate != incumbent)

    def _leave_by_prior_times(self) -> None:
        """Drop those that lost to the prior winner; without one, those that were hopeless beside others of the same tuning."""
        prior, winner = self.standings.prior_times, self.standings.prior_winner
        hopeful = kept(prior, len(prior), self._options.margin(0), "kernel", n_least=self._options.max_finalists)
        for i in prior.keys() - {*(hopeful if winner is None else [winner])}:
            self.standings.left[i] = "not raced: slower in an earlier tuning"

    def _end_rung(self, alive: list[int], n_left: int) -> None:
        standings, options, objective = self.standings, self._options, self._plan.objective
        n_finalists, margin = options.max_finalists, options.margin(self._rung)
        quota = options.quota(standings.n_candidates - len(standings.failures), self._rung)
        prior = [i for i in alive if i == standings.prior_winner]  # beaten in the finals or not at all
        # The best few always reach the finals: one hiccup of the leader's rivals shall not end the race.
        best = kept(standings.measured(alive), quota, margin, objective, n_least=n_finalists, by_typical=self._rung == 0)
        staying = self._leave(alive, [*prior, *best] or alive[:1])
        is_small = len(staying) < 2 or (len(staying) <= n_finalists and self._rung + 1 >= options.min_rungs)
        if not is_small and self._rung + 1 < self._plan.n_repeat and self._n_allowed(n_left) >= len(staying):
            self._rung += 1
            self._wanted = dict.fromkeys(staying, self._rung + 1)
            self.queue = self._shuffled(staying)
            return
        if len(staying) > n_finalists:
            best = kept(standings.measured(staying), n_finalists, margin, objective) or staying[:n_finalists]
            staying = self._leave(staying, [*prior, *best])
        self.stage = "finals"
        if len(staying) < 2 or self.round_length(n_left) == 0:
            self._choose()

    def _leave(self, racing: list[int], staying: list[int]) -> list[int]:
        for i in set(racing) - set(staying):
            is_measured = i in self.standings.times
            self.standings.left[i] = f"left the race after rung {self._rung}" if is_measured else "was not met in time to be measured"
        return self.standings.alive()

    def _end_round(self, n_left: int) -> None:
        selection = self._choose()
        for i in selection.worse:
            self.standings.left[i] = f"left the finals after round {self._n_rounds - 1}"
        is_over = selection.is_clear or len(self.standings.alive()) < 2 or self._n_rounds >= self._options.n_final_rounds
        if not is_over and self.round_length(n_left) > 0:
            self.stage, self.selection = "finals", None

    def _choose(self) -> Selection:
        self.stage = "done"
        alive, objective = self.standings.alive(), self._plan.objective
        if contenders := self.standings.measured(alive):
            near = kept(contenders, self._options.max_finalists, self._options.margins[-1], objective)
            # Closures of the race and of the finals are timed under different conditions and cannot be compared.
            is_mixed = bool(self._timed_in_finals) and not self._timed_in_finals >= set(near)
            times = {i: contenders[i] for i in near}
            self.selection = select(times, "kernel" if is_mixed else objective, self._options.tie, is_alone=self.is_alone)
        else:  # never met: the first that runs
            self.selection = Selection(next(iter(alive), 0), frozenset(), is_clear=True, closure_weight=0.0)
        return self.selection

    def _n_allowed(self, n_left: int) -> int:
        return max(0, n_left if self._plan.max_replays is not None else min(n_left, self.n_nominal - self._n_run))

    def _shuffled(self, candidates: Iterable[int], salt: str = "") -> list[Trial]:
        """Each candidate once, in an order that is the same on all ranks and differs between sites, so that their candidates mix."""
        order = list(candidates)
        random.Random(f"{self._label} {self._rung} {salt}").shuffle(order)
        return [Trial(i, is_timed=True) for i in order]
