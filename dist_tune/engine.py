"""The search: which candidate each site runs in the next replays, and which one wins.

Pure. Knows neither Triton nor torch.distributed nor clocks nor disk: it is told what all ranks agree on and answers with
plain values, so that ranks which feed it the same numbers take the same decisions.

Racing: all candidates are timed once, the hopeless ones leave, and the rest run on in rungs until a few finalists are left;
these are then compared in replays that give every site one of its finalists. All sites advance in the same replays, and a
rung or a round of finals costs one meeting. Exhaustive search is the seed's table: each candidate gets ``n_warmup`` untimed
and ``n_repeat`` timed replays, and a site that is done runs its incumbent.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Literal

from dist_tune.choice import Agreed, Policy, Verdict, judge, kept
from dist_tune.plan import Plan, Replay, Standing, Tally, Trial

MAX_OVERTIME = 3
"""A site gets at most this many times its nominal number of replays, when it is not met in all of them."""


class _Site:
    """The state of one site's search; changed by ``Search`` only."""

    def __init__(self, label: str, plan: Plan, policy: Policy, n_candidates: int, failures: Mapping[int, str]) -> None:
        self.plan = plan
        self.failures = dict(failures)
        self.agreed: dict[int, Agreed] = {}
        self.left: dict[int, str] = {}
        self.verdict: Verdict | None = None
        self.queue: list[Trial] = []
        self.stage: Literal["table", "race", "finals", "done"] = "done"
        self.n_candidates = n_candidates
        self._label = label
        self._policy = policy
        self._rung = 0
        self._n_rounds = 0
        self._wanted: dict[int, int] = {}
        """Candidate -> timed replays it shall have at the end of the queue."""
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
            self.queue = [Trial(alive[0], is_timed=False)] * plan.n_warmup + self._shuffled(alive)

    def alive(self) -> list[int]:
        """Candidates that run everywhere and have not left the race."""
        return [i for i in range(self.n_candidates) if i not in self.failures and i not in self.left]

    def incumbent(self) -> int | None:
        """The winner, or the fastest so far; the first that runs, where nothing was measured."""
        if self.verdict is not None and self.verdict.winner not in self.failures:
            return self.verdict.winner
        runnable = [i for i in range(self.n_candidates) if i not in self.failures]
        measured = [(self.agreed[i].kernel_ms, i) for i in runnable if i in self.agreed]
        return min(measured)[1] if measured else next(iter(runnable), None)

    def drop(self, failures: Mapping[int, str]) -> None:
        """Take candidates out that do not run on some rank."""
        self.failures = {**failures, **self.failures}  # the first reason stays
        self.queue = [trial for trial in self.queue if trial.candidate not in self.failures] if len(self.alive()) > 1 else []

    def hear(self, agreed: Mapping[int, Agreed]) -> None:
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

    def _end_rung(self, n_left: int) -> None:
        alive = self.alive()
        measured = {i: self.agreed[i] for i in alive if i in self.agreed}
        margin, quota = self._policy.margin(self._rung), self._policy.quota(self.n_candidates - len(self.failures), self._rung)
        n_finalists = self._policy.max_finalists
        # The best few always come as far as the finals: one hiccup of the leader's rivals shall not end the race.
        self._leave(alive, kept(measured, quota, margin, self.plan.objective, n_least=n_finalists, by_typical=self._rung == 0) or alive[:1])
        staying = self.alive()
        n_allowed = self._n_allowed(n_left)
        is_down = len(staying) < 2 or (len(staying) <= n_finalists and self._rung + 1 >= self._policy.min_rungs)
        if is_down or self._rung + 1 >= self.plan.n_repeat or n_allowed < len(staying):
            if len(staying) > n_finalists:
                racing = {i: self.agreed[i] for i in staying if i in self.agreed}
                self._leave(staying, kept(racing, n_finalists, margin, self.plan.objective) or staying[:n_finalists])
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
        verdict = self._decide()
        for i in verdict.worse:
            self.left[i] = f"left the finals after round {self._n_rounds - 1}"
        is_over = verdict.is_clear or len(self.alive()) < 2 or self._n_rounds >= self._policy.n_final_rounds
        if not is_over and self.round_length(n_left) > 0:
            self.stage, self.verdict = "finals", None

    def _decide(self) -> Verdict:
        self.stage = "done"
        contenders = {i: self.agreed[i] for i in self.alive() if i in self.agreed}
        if not contenders:  # never met: the first that runs
            self.verdict = Verdict(next(iter(self.alive()), 0), frozenset(), is_clear=True, closure_weight=0.0)
            return self.verdict
        near = kept(contenders, self._policy.max_finalists, self._policy.margins[-1], self.plan.objective)
        # Closures of the race and of the finals are timed under different conditions and cannot be compared.
        is_mixed = bool(self._finals_heard) and not self._finals_heard >= set(near)
        objective = "kernel" if is_mixed else self.plan.objective
        self.verdict = judge({i: contenders[i] for i in near}, objective, self._policy.tie, is_alone=self.is_alone)
        return self.verdict

    def _n_timed(self, candidate: int) -> int:
        return self.agreed[candidate].n_replays if candidate in self.agreed else 0

    def _n_allowed(self, n_left: int) -> int:
        return max(0, min(n_left, self.n_nominal - self.n_run if self.plan.max_replays is None else n_left))

    def _shuffled(self, candidates: Iterable[int], salt: str = "") -> list[Trial]:
        """Each once, in an order that is the same on all ranks and another one at each site: so sites' candidates mix."""
        order = list(candidates)
        random.Random(f"{self._label} {self._rung} {salt}").shuffle(order)
        return [Trial(i, is_timed=True) for i in order]


class Search:
    """All sites of one closure. Fed with the same calls on every rank, it answers the same on every rank."""

    def __init__(self, plan: Plan, policy: Policy | None = None) -> None:
        self.n_replays = 0
        """Asked for so far."""
        self._plan = plan
        self._policy = policy or Policy()
        self._sites: dict[str, _Site] = {}

    def add(self, site: str, n_candidates: int, failures: Mapping[int, str]) -> None:
        """Enter a site after the vote: ``failures`` says which candidates cannot run, and on which rank why."""
        self._sites[site] = _Site(site, self._plan, self._policy, n_candidates, failures)
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

    def tell(self, n_replays: int, tally: Tally) -> None:
        """Take in what all ranks agree on after a batch. Times are totals and replace older ones."""
        self.n_replays += n_replays
        for name, site in self._sites.items():
            site.n_run += min(n_replays, len(site.queue))
            site.queue = site.queue[n_replays:]
            site.hear(tally.agreed.get(name, {}))
            site.drop(tally.failures.get(name, {}))

    def best(self, site: str) -> int | None:
        """The incumbent; the winner when ``batch`` is empty. None if no candidate is alive."""
        return self._sites[site].incumbent()

    def verdict(self, site: str) -> Verdict | None:
        """How the winner was chosen; None before that, or where there was no choice."""
        return self._sites[site].verdict

    def standings(self, site: str) -> Sequence[Standing]:
        """What came of each candidate, in order of index."""
        state = self._sites[site]
        return [
            Standing(state.agreed.get(i) if i not in state.failures else None, state.failures.get(i), state.left.get(i))
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


def _trial(site: _Site, k: int) -> Trial | None:
    if k < len(site.queue):
        return site.queue[k]
    incumbent = site.incumbent()
    return None if incumbent is None else Trial(incumbent, is_timed=False)
