"""The race at one site: times and failures of its candidates, rungs, finals and the winner.

Pure; ``race`` advances all sites together.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Literal

from dist_tune.search.guided import Guide
from dist_tune.search.plan import NOT_TRIED, CandidateResult, Plan, PriorTimes, Times, Trial
from dist_tune.search.selection import (
    RacingOptions,
    Selection,
    clock_error_ms,
    hopeless,
    kept,
    select,
)

WARM_UP_MS = 1000.0
"""Untimed replays before a race last about this long at most, where that is known."""
NOT_MET = "was not met in time to be measured"
_BESIDE_ANOTHER = "slower beside another config of the function around it"


def _joined(earlier: Times, now: Times) -> Times:
    """Kernel times of two attempts at one race; the step's are those of now."""
    n_earlier, n_now = earlier.n_replays, now.n_replays
    kernel_ms, spread_ms = (
        (n_earlier * one + n_now * other) / (n_earlier + n_now)
        for one, other in ((earlier.kernel_ms, now.kernel_ms), (earlier.spread_ms, now.spread_ms))
    )
    n_timed = earlier.n_timed + now.n_timed
    return now._replace(
        kernel_ms=kernel_ms, spread_ms=spread_ms, n_replays=n_earlier + n_now, n_timed=n_timed
    )


class SiteRace:
    """Candidates by index.

    Changed through ``Race``, with numbers that are equal on all ranks; times are totals since the
    beginning.
    """

    def __init__(
        self,
        label: str,
        rules: tuple[Plan, RacingOptions],
        n_candidates: int,
        failures: Mapping[int, str],
        prior: PriorTimes,
        equal: Mapping[int, int],
        guide: Guide | None,
    ) -> None:
        self.n_candidates = n_candidates
        self.untried = guide.untried if guide is not None else set[int]()
        """Neither compiled nor run so far, because a guided search has not come to them."""
        self.equal = dict(equal)
        """Candidate -> the one with the same kernel, of lower index, that stands for it."""
        self.failures: dict[int, str] = {}
        self.times: dict[int, Times] = {}
        self.left: dict[int, str] = {}
        """Candidate -> rung or round after which it left the race, or why it did not enter it."""
        self.warm_ups: dict[int, Times] = {}
        """Untimed runs of a function's candidates: the shortest on the slowest rank."""
        self.suspects = set(prior.suspects)
        """Candidates that may end the process: behind all others until they are timed."""
        self.stage: Literal["exhaustive", "race", "finals", "done"] = "done"
        self.queue: list[Trial] = []
        self.selection: Selection | None = None
        """The choice of the winner; None before it, or if there was nothing to choose."""
        self.n_open = 1
        """Sites that have a choice to make, this one included: the others change a replay's time,
        too.
        """
        self.n_racing = 0
        """Candidates that race from the beginning; 0 if there is nothing to choose."""
        self.n_spare = 0
        """Replays beyond a plain race that there is time for, if the clock cannot tell candidates
        apart.
        """
        self.is_unclear = False
        """True if launches of some candidate were timed in vain."""
        self._label, (self._plan, self._options) = label, rules
        self._guide = guide  # None once enough were tried
        self._has_run = False
        self._rung = self._n_rounds = 0
        self._n_last = 0  # replays that were asked for after the end of the budget
        self._n_repeats = 0  # replays that a plain race would not have had
        # Candidate -> timed replays that it needs by the end of the queue.
        self._wanted: dict[int, int] = {}
        self._n_asked = 0  # times that this was not enough
        self._timed_in_finals: set[int] = set()
        self.drop(failures)
        times = {
            self.equal.get(i, i): measured for i, measured in prior.times.items()
        } | prior.times
        self.prior_times = {i: measured for i, measured in times.items() if i in self._runnable()}
        attempt = prior.attempt if self._options.goes_on else {}
        self._attempt = {i: each for i, each in attempt.items() if i in self._runnable()}
        """Times of the attempt before, which count as this race's own."""
        self.times.update(self._attempt)
        winner = self.equal.get(prior.winner, prior.winner) if prior.winner is not None else None
        self.prior_winner = (
            winner if winner in self.prior_times and winner not in self.suspects else None
        )
        self._leave_by_prior_times()
        self._begin()

    # -- what is known -----------------------------------------------------------------------------

    def alive(self) -> list[int]:
        """Candidates that run everywhere and have not left the race; suspects last."""
        return sorted(
            (i for i in self._runnable() if i not in self.left), key=self.suspects.__contains__
        )

    @property
    def best(self) -> int | None:
        """The winner, or the fastest so far by its times, its warm-up or an earlier tuning, or the
        first that runs; None without any.
        """
        if self.selection is not None and self.selection.winner not in self.failures:
            return self.selection.winner
        runnable = self._runnable()
        for known in (self.times, self.warm_ups, self.prior_times):
            if found := [i for i in runnable if i in known]:
                return min(
                    found,
                    key=lambda i: (
                        known is not self.times and i != self.prior_winner,
                        known[i].kernel_ms,
                        i,
                    ),
                )
        return next(iter([*self.alive(), *runnable]), None)

    @property
    def reason(self) -> str:
        """The reason of the choice in words, to be kept with it."""
        if self.selection is None:  # there was nothing to race
            return self._why_alone(self.best)
        chosen = self.selection.winner
        is_lost = chosen in self.failures
        return (
            f"fastest of the rest: candidate {chosen} was chosen, and failed afterwards"
            if is_lost
            else self.selection.reason
        )

    def results(self) -> list[CandidateResult]:
        """The result of each candidate, with the time of an earlier tuning where there is no new
        one.
        """
        known = self.prior_times | self.times
        results = []
        for i in range(self.n_candidates):
            times = None if i in self.failures else known.get(self.equal.get(i, i))
            left = self.left.get(i, NOT_TRIED if i in self.untried else None)
            results.append(CandidateResult(times, self.failures.get(i), left, self.equal.get(i)))
        return results

    def known_ms(self, candidate: int) -> float | None:
        """Milliseconds of a replay with this candidate, as far as they are known."""
        times = self.times.get(candidate) or self.warm_ups.get(candidate)
        return None if times is None else max(times.closure_ms, times.launches_ms)

    @property
    def is_barren(self) -> bool:
        """True if nothing runs so far of what a guided search has tried, and it goes on."""
        return self._guide is not None and not self.alive()

    @property
    def n_left(self) -> int:
        """Replays that are still to come at most, if the site is met in each, and the clock tells
        its candidates apart.
        """
        plan, options, n_queued = self._plan, self._options, len(self.queue)
        if self.stage in ("done", "exhaustive"):
            return n_queued
        n_finals = (options.n_final_rounds - self._n_rounds) * options.max_finalists * plan.n_repeat
        if self.stage == "finals":
            return n_queued + n_finals
        n_untried = max(0, self.n_racing - len(self._wanted)) if self._guide is not None else 0
        n_rungs = sum(
            1 + options.quota(self.n_racing, rung) for rung in range(self._rung, plan.n_repeat - 1)
        )
        return n_queued + n_untried + n_rungs + n_finals

    def _runnable(self) -> list[int]:
        return [
            i
            for i in range(self.n_candidates)
            if i not in self.failures and i not in self.equal and i not in self.untried
        ]

    def _measured(self, candidates: Iterable[int]) -> dict[int, Times]:
        return {i: self.times[i] for i in candidates if i in self.times}

    def _why_alone(self, winner: int | None) -> str:
        """The reason of a choice that compared nothing, in words."""
        runnable = self._runnable()
        if self.n_candidates == 1:
            return "the only config"
        if len(runnable) < 2:
            return "only one that runs of those tried" if self.untried else "only one that runs"
        if measured := self._measured(runnable):
            return "fastest in the race" if len(measured) > 1 else "only one that was measured"
        if winner in self.prior_times:
            return "fastest by earlier times"
        if self.is_unclear:
            return "nothing was measured: the device waited for the host in each of its launches"
        return next(
            (self.left[i] for i in runnable if i in self.left),
            "nothing was measured: no replay met this site",
        )

    # -- what is told ------------------------------------------------------------------------------

    def drop(self, failures: Mapping[int, str]) -> None:
        """Take candidates out that do not run on some rank, and their equals; the first reason
        stays.

        Their trials stay in the queue until ``advance``: those of a batch that is under way are
        counted off by ``tell``.
        """
        self.failures = {**failures, **self.failures}
        for i, first in self.equal.items():
            if first in self.failures:
                self.failures.setdefault(
                    i, f"the same kernel as candidate {first}: {self.failures[first]}"
                )

    def tell(self, n_replays: int, times: Mapping[int, Times]) -> None:
        """Take in the reduced times after some replays of the queue; they replace older ones."""
        self._has_run |= n_replays > 0 and bool(self.queue)
        self.queue = self.queue[n_replays:]
        if times:
            n_launches = max(measured.n_launches for measured in times.values())
            # Which has not kept how many launches a call makes.
            for i, each in self._attempt.items():
                earlier = each._replace(n_launches=n_launches)
                self.times[i] = (
                    _joined(earlier, times[i])
                    if i in times
                    else self.times[i]._replace(n_launches=n_launches)
                )
        self.times.update({i: measured for i, measured in times.items() if i not in self._attempt})
        # A rank that met the site late may be the slowest, so times without it do not count.
        n_owners = max(
            (measured.n_owners for i, measured in self.times.items() if i not in self._attempt),
            default=0,
        )
        self.times = {
            i: measured
            for i, measured in self.times.items()
            if i in self._attempt or measured.n_owners == n_owners
        }
        self.suspects -= self.times.keys()
        if self.stage == "finals":
            self._timed_in_finals |= times.keys()

    def end_warm_up(self, budget: str) -> None:
        """Go on to the race, all untimed runs done.

        ``budget``: the reason why candidates without one do not race; empty: they do.
        """
        if budget:
            self.left.update(
                dict.fromkeys((i for i in self.alive() if i not in self.warm_ups), budget)
            )
        if not self._has_run:
            self._begin()

    # -- a guided search ---------------------------------------------------------------------------

    def wave(self) -> list[int]:
        """The next candidates of a guided search, once those before them are timed: the caller
        compiles them. None if enough were tried.
        """
        if self._guide is None or self.stage != "race":
            return []
        self.advance()  # trials that were missed come first
        if self.queue:
            return []
        times_ms = {
            i: each.launches_ms
            for i, each in {**self.prior_times, **self.times}.items()
            if i not in self.failures
        }
        wave = self._guide.wave(times_ms, self.failures) if self.times or self.is_barren else []
        if not wave:
            self._guide = None
        return wave

    def join(self, wave: Iterable[int]) -> None:
        """Let those of a wave that run everywhere race beside the others."""
        queued = {trial.candidate for trial in self.queue}
        joining = [i for i in wave if i in self.alive() and i not in queued]
        self._wanted.update(dict.fromkeys(joining, 1))
        # The device has rested while they were compiled.
        if (best := self.best) is not None and joining and not self.queue:
            self.queue = self._warm_up(best)
        self.queue += self._shuffled(joining, f"wave of {len(self._wanted)}")

    # -- the race ----------------------------------------------------------------------------------

    def begin_anew(self) -> bool:
        """Race once more, because a function around the site runs another config now; False if
        there is nothing to choose.

        In the middle of a race with all that are left, after it with the best few.
        """
        winner, n_most = self.best, self._options.max_finalists
        if self.stage == "done":
            measured = {i: each for i, each in self.times.items() if i not in self.failures}
            near = kept(
                measured, n_most, self._options.margin(0), self._plan.objective, n_least=n_most
            )
            near.sort(key=lambda i: (measured[i].kernel_ms, i))
            best = [i for i in dict.fromkeys([winner, *near]) if i in measured][:n_most]
            if len(best) < 2:
                return False
            slower = [i for i in self.alive() if i not in best]
            self.left = {i: why for i, why in self.left.items() if i not in best} | dict.fromkeys(
                slower, _BESIDE_ANOTHER
            )
        self.prior_winner = winner if winner in self.times else self.prior_winner
        self.prior_times |= self.times
        self.times, self.selection, self._has_run = {}, None, False
        self._attempt.clear()
        self._rung = self._n_rounds = self._n_repeats = 0
        self._timed_in_finals.clear()
        self._begin()
        return True

    def stop(self, reason: str) -> None:
        """Choose by what is known; those that were not measured have left for this reason.

        What wins has run on all ranks before.
        """
        if self.stage == "done":
            return
        best = self.best
        is_untried = best is not None and self.known_ms(best) is None
        # Once, and again only for one that failed.
        if best is not None and is_untried and self._n_last <= len(self.failures):
            self._n_last += 1
            self.queue = [Trial(best, is_timed=True)]
        else:
            self.end(reason, best)

    def end(self, reason: str, best: int | None = None) -> None:
        """Choose by what is known, without another replay; those that were not measured, but for
        ``best``, have left for this reason.
        """
        if self.stage != "done":
            self.queue, self._guide = [], None
            self.left.update({i: reason for i in self.alive() if i not in self.times and i != best})
            self._choose()

    def advance(self) -> None:
        """At the end of the queue: ask again for missed trials, or go on to the next rung, or
        choose the winner.
        """
        alive, times = self.alive(), self.times
        self.queue = [trial for trial in self.queue if trial.candidate not in self.failures]
        if len(alive) < 2 and self._guide is None:
            # The last one, of a rung or after the budget, may not have run yet, and be no better
            # than those that failed.
            is_untried = (self._has_run or self._n_last > 0) and any(
                self.known_ms(each.candidate) is None for each in self.queue
            )
            self.queue = [trial for trial in self.queue if trial.is_timed][:1] if is_untried else []
        if self.queue or self.stage == "done":
            return
        n_missed = {
            i: n - (times[i].n_replays if i in times else 0)
            for i, n in self._wanted.items()
            if i in alive
        }
        if len(alive) < 2 and self._guide is None:
            self._choose()
        elif (
            times
            and self._n_asked < self._options.max_asked
            and max(n_missed.values(), default=0) > 0
        ):
            self._n_asked += 1
            self.queue = [
                Trial(i, is_timed=True)
                for k in range(max(n_missed.values()))
                for i in alive
                if k < n_missed.get(i, 0)
            ]
        elif self.stage == "race":
            if self._guide is None:
                self._end_rung(alive)
        elif self.stage == "exhaustive":
            self.end(NOT_MET, None if times else self.best)
        elif self._n_rounds > 0:
            # Before the first round it waits for other sites to end their races.
            self._end_round()

    def begin_round(self, n_replays: int) -> None:
        """Queue one round of finals: finalists in turn, in orders of their own, until the round is
        full.
        """
        if n_replays == 0:
            self._choose()
            return
        rounds = (
            self._shuffled(self.alive(), f"final {self._n_rounds} {k}") for k in range(n_replays)
        )
        self.queue = list(islice((trial for each in rounds for trial in each), n_replays))
        self._n_rounds += 1
        self._wanted = {}  # more repeats are optional here

    def round_length(self) -> int:
        """Replays of a round of finals.

        Fewer finalists run more often, so that finals do not grow with the number of sites.
        """
        n_replays = min(self._options.max_finalists, self.n_racing) * min(
            self._plan.n_repeat, self._n_enough()
        )
        # The noise is known from repeats only.
        return n_replays if n_replays >= 2 * len(self.alive()) else 0

    def _leave_by_prior_times(self) -> None:
        """Drop those that lost to the prior winner; without one, those that were hopeless beside
        others of the same tuning.
        """
        prior, winner = self.prior_times, self.prior_winner
        # One sample may be a hiccup: the best few have another try.
        n_least = (
            self._options.max_finalists if any(each.n_replays < 2 for each in prior.values()) else 1
        )
        hopeful = kept(prior, len(prior), self._options.margin(0), "kernel", n_least=n_least)
        for i in prior.keys() - {*(hopeful if winner is None else [winner])}:
            self.left[i] = "not raced: slower in an earlier tuning"

    def _begin(self) -> None:
        plan, alive = self._plan, self.alive()
        known = self.prior_winner if self.prior_winner in alive else None
        n_racing = len(alive) if self._guide is None else max(len(alive), self._guide.n_planned)
        self.stage, self.queue, self.n_racing = "done", [], n_racing if n_racing > 1 else 0
        if n_racing < 2:
            return
        if plan.search == "exhaustive":
            self.stage = "exhaustive"
            self._want(alive, plan.n_repeat)
            self.queue = [
                Trial(i, k >= plan.n_warmup)
                for i in alive
                for k in range(plan.n_warmup + plan.n_repeat)
            ]
        else:
            self.stage = "race"
            self._want(alive, 1)
            # The device and its allocator warm up once, not with every candidate.
            first = next((i for i in (known, self.best, *alive) if i in alive), None)
            self.queue = self._warm_up(first) + self._shuffled(self._lacking(alive))
        if known is not None:  # in front: where the budget runs out it has had its turn
            self.queue.sort(key=lambda trial: trial.candidate != known)

    def _end_rung(self, alive: list[int]) -> None:
        plan, options, n_finalists, n_rungs = (
            self._plan,
            self._options,
            self._options.max_finalists,
            self._rung + 1,
        )
        measured, is_first, n_enough = self._measured(alive), self._rung == 0, self._n_enough()
        is_long = n_enough < 2  # one sample says as much as many short ones
        margin = options.margins[-1] if is_long else options.margin(self._rung)
        no_more = hopeless(
            measured,
            self.warm_ups,
            options,
            plan.objective,
            is_first=is_first,
            is_alone=self.n_open < 2,
        )
        # Beaten in the finals or not at all, unless that costs real time.
        prior = [
            i
            for i in alive
            if i == self.prior_winner
            and not (i in no_more and measured[i].launches_ms > options.insured_ms)
        ]
        hopeful = {i: each for i, each in measured.items() if i not in no_more}
        # The best few of the others always reach the finals: one hiccup of the leader's rivals
        # shall not end the race.
        n_least = 1 if is_long else n_finalists
        quota = options.quota(len(self._runnable()), self._rung)
        best_of = partial(
            kept, hopeful, quota, margin, plan.objective, n_least=n_least, by_typical=is_first
        )
        plain = best = best_of()
        error_ms = clock_error_ms(measured, options, self.n_open)
        n_left = max(0, self.n_spare - self._n_repeats) if error_ms else 0
        if n_left > 0 and len(near := best_of(error_ms=error_ms)) - len(plain) <= n_left:
            best = near
        n_plain = len({*prior, *plain})
        staying = self._leave(alive, [*prior, *best] or alive[:1])
        is_few = n_plain <= n_finalists and n_rungs >= max(2, min(options.min_rungs, n_enough))
        goes_on = not is_few and n_rungs < plan.n_repeat  # the plain race
        # Half as many again, where repeats are all that is left to do.
        n_more = 1 if goes_on else min(max(1, n_rungs // 2), n_left // max(1, len(staying)))
        if len(staying) > 1 and n_more > 0:
            self._n_repeats += n_more * len(staying)
            if goes_on:
                self._n_repeats -= n_plain
            self._rung += n_more
            self._want(staying, self._rung + 1)
            turns = [
                (self._lacking(staying, n_more - 1 - k), f"{k}" if k else "") for k in range(n_more)
            ]
            self.queue = [
                trial for lacking, salt in turns for trial in self._shuffled(lacking, salt)
            ]
            if not self.queue:  # the attempt before has come further
                self.advance()
            return
        if len(staying) > n_finalists:
            best = (
                kept(self._measured(staying), n_finalists, margin, plan.objective)
                or staying[:n_finalists]
            )
            staying = self._leave(staying, [*prior, *best])
        self.stage = "finals"
        if len(staying) < 2 or self.round_length() == 0:
            self._choose()

    def _leave(self, racing: list[int], staying: list[int]) -> list[int]:
        for i in set(racing) - set(staying):
            self.left[i] = (
                f"left the race after round {self._rung + 1}" if i in self.times else NOT_MET
            )
        return self.alive()

    def _end_round(self) -> None:
        selection = self._choose()
        self.left.update(
            dict.fromkeys(selection.worse, f"left the finals after round {self._n_rounds}")
        )
        may_go_on = len(self.alive()) > 1 and self._n_rounds < self._options.n_final_rounds
        if not selection.is_clear and may_go_on and self.round_length() > 0:
            self.stage, self.selection = "finals", None

    def _choose(self) -> Selection:
        self.stage = "done"
        options, objective, in_finals = self._options, self._plan.objective, self._timed_in_finals
        if contenders := self._measured(self.alive()):
            times = {
                i: contenders[i]
                for i in kept(contenders, options.max_finalists, options.margins[-1], objective)
            }
            # Finals are timed unlike the race: where only some of the best few had them, the
            # kernels alone are compared.
            is_mixed = bool(in_finals) and not times.keys() <= in_finals
            # Ties below the clock's error would add up over many short kernels.
            is_long = (
                options.tie * min(measured.launches_ms for measured in times.values())
                > options.clock_ms
            )
            tie, is_alone = options.tie if is_long else 0.0, self.n_open < 2
            self.selection = select(
                times,
                "kernel" if is_mixed else objective,
                tie,
                is_alone=is_alone,
                step_errors=options.step_errors,
            )
        else:  # never met: the first that runs
            self.selection = Selection(
                self.best or 0, frozenset(), is_clear=True, closure_weight=0.0
            )
        if len(contenders) < 2:
            self.selection = replace(self.selection, reason=self._why_alone(self.selection.winner))
        return self.selection

    def _lacking(self, candidates: Iterable[int], n_later: int = 0) -> list[int]:
        """Those that need another trial, beside some later ones: all, but for what an attempt
        before has timed.
        """
        known = {
            i: self.times[i].n_replays if i in self._attempt and i in self.times else 0
            for i in candidates
        }
        return [
            i
            for i in candidates
            if i not in self._attempt or known[i] + n_later < self._wanted.get(i, 1)
        ]

    def _want(self, candidates: Iterable[int], n_timed: int) -> None:
        self._wanted, self._n_asked = dict.fromkeys(candidates, n_timed), 0

    def _warm_up(self, candidate: int | None) -> list[Trial]:
        if candidate is None:
            return []
        n_runs, ms = self._plan.n_warmup, self.known_ms(candidate)
        return [Trial(candidate, is_timed=False)] * (
            n_runs if not ms else min(n_runs, int(WARM_UP_MS / ms))
        )

    def _n_enough(self) -> int:
        """Samples of a candidate that are long enough together, by the best one's time; all if
        there is none.
        """
        best_ms = min(
            (each.launches_ms for each in self._measured(self.alive()).values()), default=0.0
        )
        return int(self._options.enough_ms / best_ms) if best_ms > 0 else self._plan.n_repeat

    def _shuffled(self, candidates: Iterable[int], salt: str = "") -> list[Trial]:
        """Each candidate once, in an order that is the same on all ranks and differs between sites,
        so that their candidates mix.
        """
        order = list(candidates)
        random.Random(f"{self._label} {self._rung} {salt}").shuffle(order)
        order.sort(key=self.suspects.__contains__)
        return [Trial(i, is_timed=True) for i in order]
