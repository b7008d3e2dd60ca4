"""The search at one site: whose turn it is, who leaves, who wins.

Pure, and a part of engine.py, which says what racing and exhaustive search are and advances all sites in the same replays.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Literal

from dist_tune.search.plan import Plan, PriorTimes, Trial
from dist_tune.search.selection import RacingOptions, ReducedTimes, Selection, judge, kept

MAX_OVERTIME = 3
"""A site gets at most this many times its nominal number of replays, when it is not met in all of them."""


class SiteRace:
    """The state of one site's search; changed by ``Race`` only."""

    def __init__(
        self, label: str, plan: Plan, policy: RacingOptions, n_candidates: int, failures: Mapping[int, str], known: PriorTimes
    ) -> None:
        self.plan = plan
        self.failures = dict(failures)
        self.agreed: dict[int, ReducedTimes] = {}
        self.left: dict[int, str] = {}
        self.selection: Selection | None = None
        self.queue: list[Trial] = []
        self.stage: Literal["table", "race", "finals", "done"] = "done"
        self.n_candidates = n_candidates
        self._label = label
        self._policy = policy
        self._rung = 0
        self._n_rounds = 0
        self._wanted: dict[int, int] = {}
        """Candidate -> timed replays it shall have at the end of the queue."""
        self.known = {i: each for i, each in known.agreed.items() if i not in self.failures}
        """What an earlier tuning agreed on."""
        self._incumbent = known.winner if known.winner in self.known else None
        """Its winner, which the new ones have to beat."""
        self._leave_known()
        alive = self.alive()
        self.is_alone = True
        """Whether no other site has a choice to make, so that a replay's time is nobody else's doing."""
        self._n_finalists = min(policy.max_finalists, len(alive))
        self._finals_heard: set[int] = set()
        self.n_run = self.n_nominal = 0
        if len(alive) < 2:  # no choice to make
            return
        self.n_nominal = len(alive) * (plan.n_warmup + plan.n_repeat)
        if plan.search == "racing" and plan.n_repeat > 1:
            # Where there are few candidates, enough for a race and a round of finals.
            n_race = plan.n_warmup + len(alive) + (min(policy.min_rungs, plan.n_repeat) - 1) * self._n_finalists
            self.n_nominal = max(self.n_nominal, n_race + self._n_finalists * plan.n_repeat)
        if plan.search == "exhaustive":
            self.stage = "table"
            self._wanted = dict.fromkeys(alive, plan.n_repeat)
            self.queue = [Trial(i, k >= plan.n_warmup) for i in alive for k in range(plan.n_warmup + plan.n_repeat)]
        else:
            self.stage = "race"
            self._wanted = dict.fromkeys(alive, 1)
            # The device and its allocator warm up once, not with every candidate.
            first = alive[0] if self._incumbent is None else self._incumbent
            self.queue = [Trial(first, is_timed=False)] * plan.n_warmup + self._shuffled(alive)
        if self._incumbent is not None:  # in front: where replays run out it has had its turn
            self.queue.sort(key=lambda trial: trial.candidate != self._incumbent)

    def alive(self) -> list[int]:
        """Candidates that run everywhere and have not left the race."""
        return [i for i in range(self.n_candidates) if i not in self.failures and i not in self.left]

    def incumbent(self) -> int | None:
        """The winner, or the fastest so far; where nothing was measured, what an earlier tuning would choose, or the first that runs."""
        if self.selection is not None and self.selection.winner not in self.failures:
            return self.selection.winner
        runnable = [i for i in range(self.n_candidates) if i not in self.failures]
        measured = [(self.agreed[i].kernel_ms, i) for i in runnable if i in self.agreed]
        return min(measured)[1] if measured else self._unmeasured(runnable)

    def found(self, candidate: int) -> ReducedTimes | None:
        """Its times in this tuning, or else in an earlier one."""
        return self.agreed.get(candidate) or self.known.get(candidate)

    def drop(self, failures: Mapping[int, str]) -> None:
        """Take candidates out that do not run on some rank."""
        self.failures = {**failures, **self.failures}  # the first reason stays
        self.queue = [trial for trial in self.queue if trial.candidate not in self.failures] if len(self.alive()) > 1 else []

    def hear(self, agreed: Mapping[int, ReducedTimes]) -> None:
        """Take in agreed times: totals that replace older ones."""
        self.agreed.update(agreed)
        if self.stage == "finals":
            self._finals_heard |= agreed.keys()
        # A rank that came to the site late may be the slowest: what was agreed without it does not count.
        n_owners = max((each.n_owners for each in self.agreed.values()), default=0)
        self.agreed = {i: each for i, each in self.agreed.items() if each.n_owners == n_owners}

    def advance(self, n_left: int) -> None:
        """At the end of the queue: ask again for what was not met, or go on to the next rung, or to a decision."""
        if self.queue or self.stage == "done":
            return
        alive = self.alive()
        if len(alive) < 2:
            self._decide()
            return
        short = {i: n - self._n_timed(i) for i, n in self._wanted.items() if i in alive and self._n_timed(i) < n}
        n_overtime = min(n_left, MAX_OVERTIME * self.n_nominal - self.n_run)
        if short and self.agreed and n_overtime > 0:
            again = [Trial(i, is_timed=True) for k in range(max(short.values())) for i in alive if k < short.get(i, 0)]
            self.queue = again[:n_overtime]
            return
        if self.stage == "race":
            self._end_rung(n_left)
        elif self.stage == "table":
            self._decide()
        elif self._n_rounds > 0:  # before the first round it waits for other sites to end their races
            self._end_round(n_left)

    def begin_round(self, n_replays: int) -> None:
        """Queue one round of finals: finalists in turn, in orders of their own, until the round is full."""
        if n_replays == 0:
            self._decide()
            return
        rounds = (self._shuffled(self.alive(), f"final {self._n_rounds} {k}") for k in range(n_replays))
        self.queue = list(islice((trial for each in rounds for trial in each), n_replays))
        self._n_rounds += 1
        self._wanted = {}  # more repeats are welcome here, not owed

    def round_length(self, n_left: int) -> int:
        """Replays of a round of finals. The same whoever is left: those who are run the more often.

        So finals do not grow with the number of sites, of which one or the other would always ask for more.
        """
        n_replays = min(self._n_finalists * self.plan.n_repeat, self._n_allowed(n_left))
        return n_replays if n_replays >= 2 * len(self.alive()) else 0  # without repeats nobody knows the noise

    def _leave_known(self) -> None:
        """Let those go that have lost to the champion; without one, those that were hopeless beside others of the same tuning."""
        hopeful = kept(self.known, len(self.known), self._policy.margin(0), "kernel", n_least=self._policy.max_finalists)
        for i in self.known.keys() - {*(hopeful if self._incumbent is None else [self._incumbent])}:
            self.left[i] = "not raced: slower in an earlier tuning"

    def _unmeasured(self, candidates: Sequence[int]) -> int | None:
        """What an earlier tuning would choose of these; the first, where there was none."""
        known = [i for i in candidates if i in self.known]
        best = min(known, key=lambda i: (i != self._incumbent, self.known[i].kernel_ms, i), default=None)
        return best if best is not None else next(iter(candidates), None)

    def _end_rung(self, n_left: int) -> None:
        alive = self.alive()
        measured = {i: self.agreed[i] for i in alive if i in self.agreed}
        margin, quota = self._policy.margin(self._rung), self._policy.quota(self.n_candidates - len(self.failures), self._rung)
        incumbent = [i for i in alive if i == self._incumbent]  # beaten in the finals or not at all
        n_finalists = self._policy.max_finalists
        # The best few always come as far as the finals: one hiccup of the leader's rivals shall not end the race.
        best = kept(measured, quota, margin, self.plan.objective, n_least=n_finalists, by_typical=self._rung == 0)
        self._leave(alive, [*incumbent, *best] or alive[:1])
        staying = self.alive()
        n_allowed = self._n_allowed(n_left)
        is_down = len(staying) < 2 or (len(staying) <= n_finalists and self._rung + 1 >= self._policy.min_rungs)
        if is_down or self._rung + 1 >= self.plan.n_repeat or n_allowed < len(staying):
            if len(staying) > n_finalists:
                racing = {i: self.agreed[i] for i in staying if i in self.agreed}
                best = kept(racing, n_finalists, margin, self.plan.objective) or staying[:n_finalists]
                self._leave(staying, [*incumbent, *best])
            self.stage = "finals"
            if len(self.alive()) < 2 or self.round_length(n_left) == 0:
                self._decide()
            return
        self._rung += 1
        self._wanted = dict.fromkeys(staying, self._rung + 1)
        self.queue = self._shuffled(staying)

    def _leave(self, racing: list[int], staying: list[int]) -> None:
        for i in set(racing) - set(staying):
            self.left[i] = f"left the race after rung {self._rung}" if i in self.agreed else "was not met in time to be measured"

    def _end_round(self, n_left: int) -> None:
        selection = self._decide()
        for i in selection.worse:
            self.left[i] = f"left the finals after round {self._n_rounds - 1}"
        is_over = selection.is_clear or len(self.alive()) < 2 or self._n_rounds >= self._policy.n_final_rounds
        if not is_over and self.round_length(n_left) > 0:
            self.stage, self.selection = "finals", None

    def _decide(self) -> Selection:
        self.stage = "done"
        contenders = {i: self.agreed[i] for i in self.alive() if i in self.agreed}
        if not contenders:  # never met: the first that runs
            self.selection = Selection(next(iter(self.alive()), 0), frozenset(), is_clear=True, closure_weight=0.0)
            return self.selection
        near = kept(contenders, self._policy.max_finalists, self._policy.margins[-1], self.plan.objective)
        # Closures of the race and of the finals are timed under different conditions and cannot be compared.
        is_mixed = bool(self._finals_heard) and not self._finals_heard >= set(near)
        objective = "kernel" if is_mixed else self.plan.objective
        self.selection = judge({i: contenders[i] for i in near}, objective, self._policy.tie, is_alone=self.is_alone)
        return self.selection

    def _n_timed(self, candidate: int) -> int:
        return self.agreed[candidate].n_replays if candidate in self.agreed else 0

    def _n_allowed(self, n_left: int) -> int:
        return max(0, min(n_left, self.n_nominal - self.n_run if self.plan.max_replays is None else n_left))

    def _shuffled(self, candidates: Iterable[int], salt: str = "") -> list[Trial]:
        """Each once, in an order that is the same on all ranks and another one at each site: so sites' candidates mix."""
        order = list(candidates)
        random.Random(f"{self._label} {self._rung} {salt}").shuffle(order)
        return [Trial(i, is_timed=True) for i in order]
