"""The candidates of one site: their times, their failures, and those that have left the race. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import inf

from dist_tune.search.plan import NOT_TRIED, CandidateResult, Objective, PriorTimes, Times
from dist_tune.search.selection import HOPELESS, RacingOptions, kept, one_sided

_BESIDE_ANOTHER = "slower beside another config of the function around it"
MIN_WARM_UP_MS = 100.0
"""Shortest warm-up by which a candidate may leave: below, what a first run does besides may decide, and a race costs little."""


class Standings:
    """Candidates by index; times are totals since the beginning of the tuning."""

    def __init__(
        self,
        n_candidates: int,
        failures: Mapping[int, str],
        prior: PriorTimes,
        equal: Mapping[int, int] | None = None,
        untried: Collection[int] = (),
    ) -> None:
        self.n_candidates = n_candidates
        self.untried = set(untried)
        """Neither compiled nor run so far, because a guided search has not come to them."""
        self.failures = dict(failures)
        self.equal = dict(equal or {})
        """Candidate -> the one with the same kernel, of lower index, that stands for it."""
        self.times: dict[int, Times] = {}
        self.left: dict[int, str] = {}
        """Candidate -> rung or round after which it left the race, or why it did not enter it."""
        self.warm_ups: dict[int, Times] = {}
        """Untimed runs of a function's candidates: the shortest on the slowest rank."""
        times = {self.equal[i]: each for i, each in prior.times.items() if i in self.equal} | dict(prior.times)
        self.prior_times = {i: each for i, each in times.items() if i in self._runnable()}
        winner = self.equal.get(prior.winner, prior.winner) if prior.winner is not None else None
        self.suspects = set(prior.suspects)
        """Candidates that may end the process: behind all others until they are timed."""
        self.prior_winner = winner if winner in self.prior_times and winner not in self.suspects else None

    def alive(self) -> list[int]:
        """Candidates that run everywhere and have not left the race; suspects last."""
        alive = [i for i in self._runnable() if i not in self.left]
        return sorted(alive, key=self.suspects.__contains__) if self.suspects else alive

    def in_turn(self) -> list[int]:
        """Candidates that are alive, an earlier winner first: where time runs out it has had its turn."""
        return sorted(self.alive(), key=lambda i: i != self.prior_winner)

    def measured(self, candidates: Iterable[int]) -> dict[int, Times]:
        """Those of the candidates that have times."""
        return {i: self.times[i] for i in candidates if i in self.times}

    def missed(self, why: str) -> list[int]:
        """Candidates without a time that left the race for this reason, or for none: their site was not met when it was their turn."""
        return [i for i in self._runnable() if i not in self.times and self.left.get(i, why) == why]

    def fastest(self) -> int | None:
        """By the kernel's time; if nothing was measured, an earlier tuning's choice, the best in its warm-up, or the first that runs."""
        runnable = self._runnable()
        if measured := self.measured(runnable):
            return min(measured, key=lambda i: (measured[i].kernel_ms, i))
        prior = [i for i in runnable if i in self.prior_times]
        if run := [i for i in runnable if i in self.warm_ups]:  # another one may not even run
            return min(run, key=lambda i: (i != self.prior_winner, self.warm_ups[i].kernel_ms, i))
        first = next(iter([*self.alive(), *runnable]), None)
        return min(prior, key=lambda i: (i != self.prior_winner, self.prior_times[i].kernel_ms, i), default=first)

    def why_alone(self, winner: int | None) -> str:
        """The reason of a choice that compared nothing, in words."""
        runnable = self._runnable()
        if self.n_candidates == 1:
            return "the only config"
        if len(runnable) < 2:
            return "only one that runs" + " of those tried" * bool(self.untried)
        if measured := self.measured(runnable):
            return "fastest in the race" if len(measured) > 1 else "only one that was measured"
        if winner in self.prior_times:
            return "fastest by earlier times"
        return next((self.left[i] for i in runnable if i in self.left), "nothing was measured: no replay met this site")

    def fail(self, failures: Mapping[int, str]) -> None:
        """Take candidates out that do not run on some rank, and their equals; the first reason stays."""
        self.failures = {**failures, **self.failures}
        for i, first in self.equal.items():
            if first in self.failures:
                self.failures.setdefault(i, f"the same kernel as candidate {first}: {self.failures[first]}")

    def recall(self, winner: int | None, options: RacingOptions, objective: Objective) -> bool:
        """Let the ``winner`` and the best few besides it race, also those that have left; False, and no change, if it would be alone."""
        measured = {i: each for i, each in self.times.items() if i not in self.failures}
        near = kept(measured, options.max_finalists, options.margin(0), objective, n_least=options.max_finalists)
        best = sorted([i for i in measured if i in near or i == winner], key=lambda i: (i != winner, measured[i].kernel_ms, i))
        best = best[: options.max_finalists]
        if len(best) < 2:
            return False
        slower = [i for i in self.alive() if i not in best]
        self.left = {i: why for i, why in self.left.items() if i not in best} | dict.fromkeys(slower, _BESIDE_ANOTHER)
        return True

    def begin_anew(self, winner: int | None) -> None:
        """Let the times so far, and the ``winner``, be those of an earlier tuning."""
        self.prior_winner = winner if winner in self.times else self.prior_winner
        self.prior_times |= self.times
        self.times = {}

    def split(self, equal: Mapping[int, int]) -> None:
        """Only these are equal on a rank that has come to the site late. The others do not race any more, and have no times."""
        for i, first in list(self.equal.items()):
            if equal.get(i, i) != equal.get(first, first):
                del self.equal[i]
                self.left[i] = f"not raced: the same kernel as candidate {first} on the ranks that came first"

    def update(self, times: Mapping[int, Times]) -> None:
        """Replace older times of these candidates."""
        self.times.update(times)
        # A rank that met the site late may be the slowest, so times without it do not count.
        n_owners = max((each.n_owners for each in self.times.values()), default=0)
        self.times = {i: each for i, each in self.times.items() if each.n_owners == n_owners}
        self.suspects -= self.times.keys()

    def known_ms(self, candidate: int) -> float | None:
        """Milliseconds of a replay with this candidate, as far as they are known."""
        times = self.times.get(candidate) or self.warm_ups.get(candidate)
        return None if times is None else max(times.closure_ms, times.launches_ms)

    def n_enough(self, enough_ms: float, n_repeat: int) -> int:
        """Samples of a candidate that last ``enough_ms``, by the best one's time; ``n_repeat`` if there is none."""
        best_ms = min((each.launches_ms for each in self.measured(self.alive()).values()), default=0.0)
        return int(enough_ms / best_ms) if best_ms > 0 else n_repeat

    def leave_by_warm_ups(self, budget: str) -> None:
        """Let those leave whose untimed runs were hopeless, and, for the reason ``budget`` if that is one, those without such runs."""
        alive = self.alive()
        known = {i: each for i, each in self.warm_ups.items() if i in alive}
        best_ms = min((each.launches_ms for each in known.values()), default=0.0)
        for i, each in known.items():
            # A single run may have compiled.
            if each.n_timed > 1 and each.launches_ms > max(HOPELESS * best_ms, MIN_WARM_UP_MS):
                self.left[i] = f"not raced: {each.launches_ms / best_ms:.1f} x slower in its warm-up"
        if budget:
            self.left.update(dict.fromkeys((i for i in alive if i not in known), budget))

    def leave_by_prior_times(self, options: RacingOptions) -> None:
        """Drop those that lost to the prior winner; without one, those that were hopeless beside others of the same tuning."""
        prior, winner = self.prior_times, self.prior_winner
        # One sample may be a hiccup: the best few have another try.
        n_least = options.max_finalists if any(each.n_replays < 2 for each in prior.values()) else 1
        hopeful = kept(prior, len(prior), options.margin(0), "kernel", n_least=n_least)
        for i in prior.keys() - {*(hopeful if winner is None else [winner])}:
            self.left[i] = "not raced: slower in an earlier tuning"

    def fail_one_sided(self) -> None:
        """Take candidates out that take one rank beyond all measure, while others show that this rank can do better."""
        measured = self.measured(self._runnable())
        reasons = {i: reason for i, each in measured.items() if (reason := one_sided(each))}
        best_ms = min((each.launches_ms for i, each in measured.items() if i not in reasons), default=inf)
        self.fail({i: reason for i, reason in reasons.items() if measured[i].launches_ms > HOPELESS * best_ms})

    def results(self) -> list[CandidateResult]:
        """The result of each candidate, with the time of an earlier tuning where there is no new one."""
        return [self._result(i) for i in range(self.n_candidates)]

    def _result(self, i: int) -> CandidateResult:
        first = self.equal.get(i, i)
        times = None if i in self.failures else self.times.get(first) or self.prior_times.get(first)
        left = self.left.get(i, NOT_TRIED if i in self.untried else None)
        return CandidateResult(times, self.failures.get(i), left, self.equal.get(i))

    @property
    def n_runnable(self) -> int:
        """Candidates that were tried and run everywhere so far, each kernel once."""
        return len(self._runnable())

    def _runnable(self) -> list[int]:
        return [i for i in range(self.n_candidates) if i not in self.failures and i not in self.equal and i not in self.untried]
