"""When the trials of a race may run among the calls of a job, so that these take at most so much longer. Pure.

A trial spends what its candidate takes beyond the one in use, by times that all ranks agree on; each call of the job earns ``max_slowdown``
of a step. Every third call runs what is in use, timed: the step's time follows from these, and a clock that drifts is seen beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import ceil

from dist_tune.search.plan import Replay, Trial
from dist_tune.search.race import Race
from dist_tune.search.selection import RacingOptions

N_FIRST = 3
"""Calls that time what is in use, before anything else is tried."""
ONLINE = RacingOptions(insured_ms=1.0, max_asked=50, has_even_steps=False)
"""A candidate that looks hopeless has had its one call: a second one would cost the job more than a hiccup costs the search. A shape may
come in one of many calls."""
_MAX_BLIND = 20
"""Times that these are asked for again where no call meets a site."""
_EVERY = 2
"""Trials between two calls of what is in use."""
_MOST = 48
"""Trials of one batch, so that what they tell counts soon."""
_GUESS = 1.0
"""What a first trial is taken to spend, in times of what is in use, until three candidates have told more."""


class Pace:
    """The budget of one job. Fed with the same calls on every rank, it answers the same on every rank. Milliseconds; calls by number."""

    def __init__(self, max_slowdown: float) -> None:
        self.max_slowdown = max_slowdown
        self.step_ms = 0.0
        """A call of the job with what is in use; 0 before it is known."""
        self.spent_ms = 0.0
        self._began: int | None = None
        self._now = 0
        self._n_blind = 0
        self._n_measured: dict[tuple[str, int], int] = {}
        """(Site, candidate) -> calls that have timed it, as of the latest report."""
        self._warmed_up: set[tuple[str, int]] = set()
        self._met = 1.0
        """Share of the trials of the latest calls that were met there: where shapes take turns each call has some of the sites."""

    def plan(self, race: Race, batch: Sequence[Replay]) -> tuple[list[Replay], int]:
        """The next calls, and how many replays of a batch are among them."""
        if not self.step_ms and self._n_blind < _MAX_BLIND:
            self._n_blind += 1
            return [_in_use(race, batch)] * N_FIRST, 0
        left_ms, runs = max(self._earned_ms(self._now) - self.spent_ms, 0.0), list[Replay]()
        n_taken = 0
        for replay in batch[:_MOST]:
            left_ms -= self._expected_ms(race, replay)
            if n_taken and left_ms < 0:
                break
            if n_taken % _EVERY == 0:
                runs.append(_in_use(race, batch))
            runs.append(replay)
            n_taken += 1
        return runs, n_taken

    def due(self, race: Race, runs: Iterable[Replay]) -> int:
        """The first call at which the budget has room for these."""
        if self._began is None or not self.step_ms:
            return 0
        cost_ms = self.spent_ms + sum(self._expected_ms(race, each) for each in runs)
        return self._began + ceil(cost_ms / (self.max_slowdown * self.step_ms)) if cost_ms > 0 else 0

    def begin(self, call: int) -> None:
        """These calls begin, at the first of them: the budget counts from the first ever."""
        self._began = call if self._began is None else self._began

    def end(self, race: Race, runs: Sequence[Replay], last: int) -> None:
        """They are over, with this call as the last one, and the race knows their times."""
        self._now = last
        sites = [race[label] for label in dict.fromkeys(label for each in runs for label in each)]
        in_use = [each.times[each.best] for each in sites if each.best in each.times]
        if in_use:  # the mean: where shapes take turns, a long and rare step earns no more than its calls
            self.step_ms = sum(each.closure_ms * each.n_replays for each in in_use) / sum(each.n_replays for each in in_use)
        for label in {label for each in runs for label in each}:  # a function's configs run once before they race
            own_ms = next((each.launches_ms for i, each in race[label].warm_ups.items() if i == race[label].best), 0.0)
            for i, each in race[label].warm_ups.items():
                if (label, i) not in self._warmed_up:
                    self._warmed_up.add((label, i))
                    self.spent_ms += max(0.0, each.launches_ms - own_ms)
        n_asked = Counter((label, trial.candidate) for each in runs for label, trial in each.items() if trial.is_timed)
        n_met = 0
        for (label, i), n in n_asked.items():
            total = race[label].times[i].n_replays if i in race[label].times else 0
            known = self._n_measured.get((label, i), 0)
            n_new = min(n, total if total < known else total - known)  # fewer: under other conditions it is counted anew
            self._n_measured[label, i] = total
            self.spent_ms += n_new * self._cost_ms(race, label, i)
            n_met += n_new
        self._met = max(n_met / n_asked.total(), 0.1) if n_asked else 1.0

    @property
    def slowdown(self) -> float:
        """Share of the job's time since the first trial that the trials have taken."""
        earned_ms = self._earned_ms(self._now)
        return self.max_slowdown * self.spent_ms / earned_ms if earned_ms else 0.0

    def _earned_ms(self, call: int) -> float:
        return self.max_slowdown * self.step_ms * (call - self._began) if self._began is not None else 0.0

    def _expected_ms(self, race: Race, replay: Replay) -> float:
        """What a call is expected to take beyond what is in use."""
        return self._met * sum(self._cost_ms(race, label, trial.candidate) for label, trial in replay.items())

    def _cost_ms(self, race: Race, label: str, candidate: int) -> float:
        """What a trial takes beyond what is in use: as far as it is known, or as candidates of the site took so far."""
        site = race[label]
        best, known = site.best, {i: each.launches_ms for i, each in site.times.items()}
        if best not in known or candidate == best:
            return 0.0
        own_ms = known[best]
        beyond = sorted(max(0.0, ms / own_ms - 1.0) for i, ms in known.items() if i != best)
        guess = beyond[(3 * len(beyond)) // 4] if len(beyond) >= 3 else _GUESS
        return max(0.0, known[candidate] - own_ms) if candidate in known else guess * own_ms


def _in_use(race: Race, batch: Sequence[Replay]) -> Replay:
    """A call of the best candidates so far, timed."""
    labels = dict.fromkeys(label for replay in batch for label in replay)
    return {label: Trial(best, is_timed=True) for label in labels if (best := race[label].best) is not None}
