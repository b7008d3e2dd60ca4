"""The race at one site: rungs, finals and the winner. Pure; ``race`` advances all sites in the same replays."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from dist_tune.search.guided import Guide
from dist_tune.search.plan import Plan, Times, Trial
from dist_tune.search.repeats import Repeats
from dist_tune.search.selection import RacingOptions, Selection, choose, hopeless, kept
from dist_tune.search.standings import Standings

MAX_OVERTIME = 3
"""A site gets at most this many times its nominal number of replays, when it is not met in all of them."""
NOT_MET = "was not met in time to be measured"


class SiteRace:
    """The state of one site's race; changed by ``Race`` only."""

    def __init__(self, label: str, plan: Plan, options: RacingOptions, standings: Standings, guide: Guide | None = None) -> None:
        self.standings = standings
        self._guide = self._given_guide = guide  # of a site whose candidates are not all tried at once; None once enough were
        self.stage: Literal["exhaustive", "race", "finals", "done"] = "done"
        self.queue: list[Trial] = []
        self.selection: Selection | None = None
        self.n_open = 1
        """Sites that have a choice to make, this one included: the others change a replay's time, too."""
        self.n_nominal = 0
        self.n_since = 0
        """Replays since the site was entered, or raced anew: those of its turns, in which it may have waited for others."""
        self.is_probed = False
        """True once a site that was missed has had another turn."""
        self.repeats = Repeats()
        self._n_run = self._rung = self._n_rounds = 0
        self._n_last = 0  # replays that were asked for after the end of the budget
        self._label = label
        self._plan = plan
        self._options = options
        self._wanted: dict[int, int] = {}  # candidate -> timed replays that it needs by the end of the queue
        self._timed_in_finals: set[int] = set()
        self._probed: Trial | None = None  # of a site that was missed: shows if it is met now
        self._n_finalists = 0
        standings.leave_by_prior_times(options)
        self._begin()

    def incumbent(self) -> int | None:
        """The winner, or the fastest so far."""
        if self.selection is not None and self.selection.winner not in self.standings.failures:
            return self.selection.winner
        return self.standings.fastest()

    @property
    def reason(self) -> str:
        """The reason of the choice in words."""
        if self.selection is None:  # there was nothing to race
            return self.standings.why_alone(self.incumbent())
        chosen = self.selection.winner
        is_lost = chosen in self.standings.failures
        return f"fastest of the rest: candidate {chosen} was chosen, and failed afterwards" if is_lost else self.selection.reason

    def trial(self, k: int, *, is_held: bool = False) -> Trial | None:
        """The site's part in the k-th replay of the batch; of a site that is held, its incumbent."""
        if k < len(self.queue) and not is_held:
            return self.queue[k]
        incumbent = self.incumbent()
        return None if incumbent is None else Trial(incumbent, is_timed=False)

    @property
    def is_barren(self) -> bool:
        """True if nothing runs so far of what a guided search has tried."""
        return self._guide is not None and not self.standings.alive()

    def wave(self) -> list[int]:
        """The next candidates of a guided search, once those before them are timed: the caller compiles them. None if enough were tried."""
        if self._guide is None or self.stage != "race":
            return []
        self.advance()  # trials that were missed come first
        if self.queue:
            return []
        standings = self.standings
        times_ms = {i: each.launches_ms for i, each in {**standings.prior_times, **standings.times}.items() if i not in standings.failures}
        open_, n_tried = standings.untried - standings.left.keys(), standings.n_candidates - len(standings.untried)
        is_met = bool(standings.times) or self.is_barren
        wave = self._guide.wave(times_ms, standings.failures, open_, n_tried=n_tried, is_barren=self.is_barren) if is_met else []
        standings.untried -= set(wave)
        if not wave:
            self._guide = None
        return wave

    def join(self, wave: Iterable[int]) -> None:
        """Let those of a wave that run everywhere race beside the others."""
        queued = {trial.candidate for trial in self.queue}
        joining = [i for i in wave if i in self.standings.alive() and i not in queued]
        self._wanted.update(dict.fromkeys(joining, 1))
        best = self.standings.fastest()
        if best is not None and joining and not self.queue:  # the device has rested while they were compiled
            self.queue = [Trial(best, is_timed=False)] * self._plan.n_warmup
        self.queue += self._shuffled(joining, f"wave of {len(self._wanted)}")

    def end_warm_up(self, budget: str) -> None:
        """Choose those that race by what untimed runs of all candidates took. ``budget``: why those without one do not; empty: they do."""
        self.standings.leave_by_warm_ups(budget)
        if self._n_run == 0 and not self.standings.times:
            self._begin()

    def try_again(self) -> None:
        """Probe once if candidates were missed while others raced: other sites' choices may lead to this one, or never again."""
        standings, missed = self.standings, self.standings.missed(NOT_MET)
        if self.stage == "done" and missed and self.n_open > 1 and len({*missed, *standings.alive()}) > 1:
            standings.left = {i: why for i, why in standings.left.items() if i not in missed}
            self._probed = Trial(missed[0], is_timed=True)
            self.stage, self.queue, self.is_probed = "race", [self._probed], True

    def _end_probe(self, probed: Trial) -> None:
        """Race as from the beginning, with the candidates that are left, if the site was met."""
        self._probed, self.stage, standings = None, "done", self.standings
        if probed.candidate not in standings.times.keys() | standings.failures.keys():
            standings.left.update({i: NOT_MET for i in standings.alive() if i not in standings.times})
            return
        if len(standings.times) < 2:  # its guided search had ended before there was a time
            self._guide = self._given_guide
        self._begin_again()

    def begin_anew(self) -> bool:
        """Race once more, because a function around the site runs another config now; False if there is nothing to choose.

        In the middle of a race with all that are left, after it with the best few.
        """
        standings, winner = self.standings, self.incumbent()
        if self.stage == "done" and not standings.recall(winner, self._options, self._plan.objective):
            return False
        standings.begin_anew(winner)
        self._begin_again()
        return True

    def end(self, reason: str, best: int | None = None) -> None:
        """Choose by what is known, without another replay; those that were not measured, but for ``best``, have left for this reason."""
        if self.stage != "done":
            standings, self.queue, self._guide, self._probed = self.standings, [], None, None
            standings.left.update({i: reason for i in standings.alive() if i not in standings.times and i != best})
            self._choose()

    def _begin_again(self) -> None:
        self.selection, self.repeats, self._rung, self._n_run, self.n_since, self._n_rounds = None, Repeats(), 0, 0, 0, 0
        self._timed_in_finals.clear()
        self._begin()

    def stop(self, reason: str) -> None:
        """Choose by what is known; those that were not measured have left for this reason. What wins has run on all ranks before."""
        standings, best, self._probed = self.standings, self.incumbent(), None
        if self.stage == "done":
            return
        is_untried = best is not None and standings.known_ms(best) is None
        if best is not None and is_untried and self._n_last <= len(standings.failures):  # once, and again only for one that failed
            self._n_last += 1
            self.queue = [Trial(best, is_timed=True)]
            return
        self.end(reason, best)

    def drop(self, failures: Mapping[int, str]) -> None:
        """Take candidates out that do not run on some rank."""
        self.standings.fail(failures)
        alive = self.standings.alive()
        self.queue = [trial for trial in self.queue if trial.candidate not in self.standings.failures]
        if len(alive) < 2 and self._guide is None:
            # In a rung the last one may not have run yet, and be no better than those that failed.
            is_untried = self._n_run > 0 and any(self.standings.known_ms(i) is None for i in alive)
            self.queue = [trial for trial in self.queue if trial.is_timed][:1] if is_untried else []

    def tell(self, n_replays: int, times: Mapping[int, Times]) -> None:
        """Take in the reduced times after some replays of the queue."""
        self.n_since += n_replays
        self._n_run += min(n_replays, len(self.queue))
        self.queue = self.queue[n_replays:]
        self.standings.update(times)
        self.standings.fail_one_sided()
        self.drop({})
        if self.stage == "finals":
            self._timed_in_finals |= times.keys()

    def advance(self) -> None:
        """At the end of the queue: ask again for missed trials, or go on to the next rung, or choose the winner."""
        if self._probed is not None and not self.queue:
            self._end_probe(self._probed)
        if self.queue or self.stage == "done":
            return
        alive, times = self.standings.alive(), self.standings.times
        n_missed = {i: n - (times[i].n_replays if i in times else 0) for i, n in self._wanted.items() if i in alive}
        n_overtime = MAX_OVERTIME * self.n_nominal - self._n_run
        if len(alive) < 2 and self._guide is None:
            self._choose()
        elif times and n_overtime > 0 and max(n_missed.values(), default=0) > 0:
            again = [Trial(i, is_timed=True) for k in range(max(n_missed.values())) for i in alive if k < n_missed.get(i, 0)]
            self.queue = again[:n_overtime]
        elif self.stage == "race":
            if self._guide is None:
                self._end_rung(alive)
        elif self.stage == "exhaustive":
            self.end(NOT_MET, None if times else self.incumbent())
        elif self._n_rounds > 0:  # before the first round it waits for other sites to end their races
            self._end_round()

    def begin_round(self, n_replays: int) -> None:
        """Queue one round of finals: finalists in turn, in orders of their own, until the round is full."""
        if n_replays == 0:
            self._choose()
            return
        rounds = (self._shuffled(self.standings.alive(), f"final {self._n_rounds} {k}") for k in range(n_replays))
        self.queue = list(islice((trial for each in rounds for trial in each), n_replays))
        self._n_rounds += 1
        self._wanted = {}  # more repeats are optional here

    def round_length(self, n_most: int) -> int:
        """Replays of a round of finals. Fewer finalists run more often, so that finals do not grow with the number of sites."""
        n_each = min(self._plan.n_repeat, self.standings.n_enough(self._options.enough_ms, self._plan.n_repeat))
        n_replays = min(self._n_finalists * n_each, n_most, self._n_allowed)
        return n_replays if n_replays >= 2 * len(self.standings.alive()) else 0  # the noise is known from repeats only

    def _begin(self) -> None:
        plan, alive = self._plan, self.standings.alive()
        incumbent = self.standings.prior_winner if self.standings.prior_winner in alive else None
        n_racing = len(alive) if self._guide is None else max(len(alive), self._guide.n_planned)
        self._n_finalists = min(self._options.max_finalists, n_racing)
        self.stage, self.queue, self.n_nominal = "done", [], 0
        if n_racing < 2:
            return
        self.n_nominal = n_racing * (plan.n_warmup + plan.n_repeat)
        if plan.search != "exhaustive" and plan.n_repeat > 1:
            # Where there are few candidates, enough for a race and a round of finals.
            n_race = plan.n_warmup + n_racing + (min(self._options.min_rungs, plan.n_repeat) - 1) * self._n_finalists
            self.n_nominal = max(self.n_nominal, n_race + self._n_finalists * plan.n_repeat)
        if plan.search == "exhaustive":
            self.stage = "exhaustive"
            self._wanted = dict.fromkeys(alive, plan.n_repeat)
            self.queue = [Trial(i, k >= plan.n_warmup) for i in alive for k in range(plan.n_warmup + plan.n_repeat)]
        else:
            self.stage = "race"
            self._wanted = dict.fromkeys(alive, 1)
            # The device and its allocator warm up once, not with every candidate.
            fastest = self.standings.fastest()
            first = incumbent if incumbent is not None else fastest if fastest in alive else next(iter(alive), None)
            self.queue = [Trial(i, is_timed=False) for i in alive if i == first] * plan.n_warmup + self._shuffled(alive)
        if incumbent is not None:  # in front: where the budget runs out it has had its turn
            self.queue.sort(key=lambda trial: trial.candidate != incumbent)

    def _end_rung(self, alive: list[int]) -> None:
        options, n_finalists = self._options, self._options.max_finalists
        rung = end_of_rung(self.standings, self._plan, options, self.repeats, rung=self._rung, n_open=self.n_open)
        staying = self._leave(alive, rung.staying or alive[:1])
        n_rungs, n_plain, repeats = self._rung + 1, rung.n_plain, self.repeats
        is_few = n_plain <= n_finalists and n_rungs >= max(2, min(options.min_rungs, rung.n_enough))
        goes_on = not is_few and n_rungs < self._plan.n_repeat  # the plain race
        n_more = 1 if n_rungs < self._plan.n_repeat else n_rungs // 2  # half as many again, where repeats are all that is left to do
        n_replays = self._n_allowed if goes_on else min(repeats.n_left, self._n_allowed)
        n_more = min(n_more, n_replays // max(1, len(staying)))
        if len(staying) > 1 and n_more > 0:
            repeats.use(n_more * len(staying) - n_plain * goes_on)
            self._rung += n_more
            self._wanted = dict.fromkeys(staying, self._rung + 1)
            self.queue = [trial for k in range(n_more) for trial in self._shuffled(staying, f"{k}" if k else "")]
            return
        if len(staying) > n_finalists:
            best = kept(self.standings.measured(staying), n_finalists, rung.margin, self._plan.objective) or staying[:n_finalists]
            staying = self._leave(staying, [*rung.prior, *best])
        self.stage = "finals"
        if len(staying) < 2 or self.round_length(self._n_allowed) == 0:
            self._choose()

    def _leave(self, racing: list[int], staying: list[int]) -> list[int]:
        for i in set(racing) - set(staying):
            self.standings.left[i] = f"left the race after rung {self._rung}" if i in self.standings.times else NOT_MET
        return self.standings.alive()

    def _end_round(self) -> None:
        selection = self._choose()
        self.standings.left.update(dict.fromkeys(selection.worse, f"left the finals after round {self._n_rounds - 1}"))
        self.repeats.is_noisy |= (is_open := not selection.is_clear)
        may_go_on = len(self.standings.alive()) > 1 and self._n_rounds < self._options.n_final_rounds
        if is_open and may_go_on and self.round_length(self._n_allowed) > 0:
            self.stage, self.selection = "finals", None

    def _choose(self) -> Selection:
        self.stage = "done"
        if contenders := self.standings.measured(self.standings.alive()):
            in_finals, is_alone = self._timed_in_finals, self.n_open < 2
            self.selection = choose(contenders, self._options, self._plan.objective, in_finals, is_alone=is_alone)
        else:  # never met: the first that runs
            self.selection = Selection(self.standings.fastest() or 0, frozenset(), is_clear=True, closure_weight=0.0)
        if len(contenders) < 2:
            self.selection = replace(self.selection, reason=self.standings.why_alone(self.selection.winner))
        return self.selection

    @property
    def _n_allowed(self) -> int:
        return max(0, self.n_nominal + self.repeats.n_extra - self._n_run)

    def _shuffled(self, candidates: Iterable[int], salt: str = "") -> list[Trial]:
        """Each candidate once, in an order that is the same on all ranks and differs between sites, so that their candidates mix."""
        order = list(candidates)
        random.Random(f"{self._label} {self._rung} {salt}").shuffle(order)
        order.sort(key=self.standings.suspects.__contains__)
        return [Trial(i, is_timed=True) for i in order]


@dataclass(frozen=True, slots=True)
class EndOfRung:
    """Candidates that stay after a rung, and what they were judged by."""

    staying: list[int]
    """An earlier winner among them, unless that costs real time."""
    prior: list[int]
    """The earlier winner, if it stays for that."""
    n_plain: int
    """Those that would stay if the clock had no error."""
    margin: float
    """Share of the kernel's time by which a candidate may be slower."""
    n_enough: int
    """Samples of a candidate that are enough."""


def end_of_rung(standings: Standings, plan: Plan, options: RacingOptions, repeats: Repeats, *, rung: int, n_open: int) -> EndOfRung:
    """Judge the candidates that are alive by their times after rung ``rung``, counted from 0, at one of ``n_open`` sites."""
    alive, objective = standings.alive(), plan.objective
    is_long = (n_enough := standings.n_enough(options.enough_ms, plan.n_repeat)) < 2  # one sample says as much as many short ones
    margin, quota = options.margins[-1] if is_long else options.margin(rung), options.quota(standings.n_runnable, rung)
    is_first, measured = rung == 0, standings.measured(alive)
    no_more = hopeless(measured, standings.warm_ups, options, objective, is_first=is_first, is_alone=n_open < 2)
    # Beaten in the finals or not at all, unless that costs real time.
    prior = [i for i in alive if i == standings.prior_winner and not (i in no_more and measured[i].launches_ms > options.insured_ms)]
    # The best few of the others always reach the finals: one hiccup of the leader's rivals shall not end the race.
    n_least = 1 if is_long else options.max_finalists
    hopeful = {i: each for i, each in measured.items() if i not in no_more}
    plain = best = kept(hopeful, quota, margin, objective, n_least=n_least, by_typical=is_first)
    repeats.judge(measured, n_open, options)
    if repeats.is_noisy:
        near = kept(hopeful, quota, margin, objective, n_least=n_least, by_typical=is_first, error_ms=repeats.error_ms)
        best = near if len(near) - len(plain) <= repeats.n_left else plain
    return EndOfRung([*prior, *best], prior, len({*prior, *plain}), margin, n_enough)
