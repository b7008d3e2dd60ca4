"""What tuning online costs a job, by the clock of its calls, and when the next trials may run.

Pure.

A call lasts from its start to the next one's, so that loaders, logging and gaps of the host are in
it, as for the user. Calls with trials, and those beside which something is compiled or decided, are
compared with plain calls. Some calls of each cycle are plain by their number, on all ranks alike:
there is always something to compare with, and a job that drifts is no cost. What our calls take
more must stay below ``max_slowdown`` of the job's time.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from math import ceil, log2

from dist_tune.search.plan import Account, Replay, Trial
from dist_tune.search.race import Race
from dist_tune.search.selection import RacingOptions
from dist_tune.search.site_race import SiteRace

N_FIRST = 3
"""Calls that time what is in use, before anything else is tried."""
ONLINE = RacingOptions(
    insured_ms=1.0, max_asked=50, first_quota=2, step_errors=4.0, goes_on=True, has_even_steps=False
)
"""A candidate that looks hopeless has had its one call: a second one would cost the job more than a
hiccup costs the
search. A shape may come in one of many calls. Calls vary for reasons of the job's own: one sample
says less.
"""
N_PLAIN = 4
"""Plain calls before anything else is done; a quarter of a cycle at least."""
_STRIDE = 2_654_435_769
"""2**32 over the golden ratio: multiples of it are spread evenly, and repeat with no period."""
_CYCLE_S = 0.25
"""Least length of a cycle: its plain quarter must be longer than a thread takes to see that it has
begun.
"""
_N_RECENT = 32
"""Plain calls by which others are judged: the last ones."""
_USUAL = 1.25
"""Times their median from which a call is no usual one.

What is beyond is counted over all plain calls: a checkpoint
every hundred calls makes no call near it cheap or dear.
"""
_MAX_BLIND = 20
"""Times that the config in use is timed again where no call meets a site."""
_EVERY = 2
"""Trials between two calls of what is in use."""
_MOST = 48
"""Trials of one batch, so that what they tell counts soon."""
_GUESS = 1.0
"""What a first trial is taken to spend, in times of what is in use, until three candidates have
told more.
"""
_PLANNED = 0.9
"""Part of the budget that trials are planned for: some take more than foreseen."""
_SCALES = 0.1, 3.0
"""Bounds of a trial's cost by the calls' clock over that by the device's: a step that waits for its
host hides most.
"""


class Pace:
    """The budget of one job.

    Each rank adds its calls; what depends on ``agreed`` is the same on all ranks.
    """

    def __init__(self, max_slowdown: float) -> None:
        self.max_slowdown = max_slowdown
        self.n_cycle = 4 * N_PLAIN
        """Calls of a cycle, of which the first quarter is plain. The same on all ranks."""
        self.agreed = Account()
        """The most of any rank, as of the latest report."""
        self.before_s = deque[float](maxlen=_N_RECENT)
        """Plain calls before the first trial."""
        self.has_begun = False
        """True once something may be at work on any rank; before it each call is plain, unless this
        rank knows better.
        """
        self._has_tried = self._is_based = self._is_stale = False
        self._n_blind = 0
        self._job_s = 0.0
        self._recent: deque[float] = deque(maxlen=_N_RECENT)
        self._usual_s = 0.0
        self._n_plain, self._unusual_s = 0, 0.0
        self._open: dict[bool, tuple[int, float]] = {False: (0, 0.0), True: (0, 0.0)}
        """Whether they have trials -> our calls since the last plain ones: how many, and their
        seconds.
        """
        self._n_closed: dict[bool, int] = {False: 0, True: 0}
        self._closed_s: dict[bool, float] = {False: 0.0, True: 0.0}
        self._foreseen_ms = 0.0
        """What trials were to take by the device's clock."""
        self._known_ms: dict[str, tuple[float, dict[int, float]]] = {}
        """What trials of each site cost by the latest times."""

    # -- the calls' clock, on this rank ------------------------------------------------------------

    def is_quiet(self, call: int) -> bool:
        """True of a call that is to be plain: a quarter of each cycle, at another place in each.

        What a job does every so many calls, as an optimizer's step does, falls into plain calls as
        often as into others.
        """
        cycle, place = divmod(call, self.n_cycle)
        begin = cycle * _STRIDE % 2**32 * self.n_cycle >> 32
        return (place - begin) % self.n_cycle < self.n_cycle // 4

    def begin(self) -> None:
        """Something may be at work from here on: it is compared with the plain calls so far, but
        for the first ones.
        """
        self.has_begun = True
        for calls in (self._recent, self.before_s):
            for _ in range(min(N_PLAIN, len(calls) - 1)):
                calls.popleft()

    def add(
        self, call: int, seconds: float, *, is_trial: bool = False, is_ours: bool = False
    ) -> None:
        """Take in a call that is over.

        ``is_ours``: something of the tuning was at work beside it.
        """
        self._job_s += seconds
        if is_trial or is_ours:
            n, sum_s = self._open[is_trial]
            self._open[is_trial] = n + 1, sum_s + seconds
            self._has_tried |= is_trial
        elif not self.has_begun or (self.is_quiet(call) and self.is_quiet(call - 1)):
            # Other ranks see its start later.
            if self._is_stale:
                self._recent.clear()
                if not self._has_tried:
                    self.before_s.clear()
                self._is_stale = False
            self._recent.append(seconds)
            middle_s = statistics.median(self._recent)
            self._usual_s = statistics.fmean(
                [min(each, _USUAL * middle_s) for each in self._recent]
            )
            self._n_plain += 1
            if self._n_plain > 4 * N_PLAIN:  # the first calls of a job are slow by themselves
                self._unusual_s += max(0.0, seconds - _USUAL * middle_s)
            if not self._has_tried:
                self.before_s.append(seconds)
            self._close_cycle()

    def renew(self) -> None:
        """Other configs are in use from here on: plain calls of before are no measure of later
        ones.
        """
        self._is_stale = True

    def _close_cycle(self) -> None:
        """After plain calls: what those before them took more."""
        for is_trial, (n, sum_s) in self._open.items():
            self._n_closed[is_trial] += n
            self._closed_s[is_trial] += sum_s - n * self._usual_s
            self._open[is_trial] = 0, 0.0

    def _spent_s(self, is_trial: bool) -> float:
        n, sum_s = self._open[is_trial]
        unusual_s = self._unusual_s / max(1, self._n_plain - 4 * N_PLAIN)
        return (
            self._closed_s[is_trial]
            + sum_s
            - n * self._usual_s
            - (self._n_closed[is_trial] + n) * unusual_s
        )

    @property
    def account(self) -> Account:
        """Of this rank."""
        trials_s = self._spent_s(is_trial=True)
        return Account(
            self._job_s, trials_s + self._spent_s(is_trial=False), trials_s, self._usual_s
        )

    @property
    def slowdown(self) -> float:
        """Share of the job's time that the tuning has taken, on the slowest rank."""
        most = [each.spent_s / each.job_s for each in (self.account, self.agreed) if each.job_s]
        return max([0.0, *most])

    def may_work(self, call: int) -> bool:
        """True if something of the tuning may be at work beside this call."""
        spent_s = self.account.spent_s
        return (
            bool(self._recent)
            and not self.is_quiet(call)
            and spent_s <= self.max_slowdown * self._job_s
        )

    @property
    def wanted_cycle(self) -> int:
        """Calls of a cycle, by what a call takes here."""
        n_calls = _CYCLE_S / self._usual_s if self._usual_s else 1.0
        return max(4 * N_PLAIN, 1 << ceil(log2(max(1.0, n_calls))))

    # -- trials: the same on all ranks -------------------------------------------------------------

    def plan(self, race: Race, batch: Sequence[Replay]) -> tuple[list[Replay], int]:
        """The next calls, and how many replays of a batch are among them."""
        self._known_ms.clear()
        if not self._is_based and self._n_blind < _MAX_BLIND:
            self._n_blind += 1
            return [_in_use(race, batch)] * N_FIRST, 0
        left_ms, runs = self._left_ms, list[Replay]()
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

    def n_wait(self, race: Race, runs: Sequence[Replay]) -> int:
        """Calls until the budget has room for these."""
        lacking_ms = sum(self._expected_ms(race, run) for run in runs) - self._left_ms
        earned_ms = _PLANNED * self.max_slowdown * self.agreed.call_s * 1e3
        return ceil(lacking_ms / earned_ms) if lacking_ms > 0 and earned_ms else 0

    def schedule(self, first: int, runs: Sequence[Replay]) -> dict[int, Replay]:
        """Number of a call -> its trials, from the ``first`` call on and without the plain ones."""
        calls, call = dict[int, Replay](), first
        for run in runs:
            while self.is_quiet(call):
                call += 1
            calls[call] = run
            call += 1
        return calls

    def end(self, race: Race, runs: Sequence[Replay]) -> None:
        """They are over, and the race knows their times."""
        self._known_ms.clear()
        self._is_based |= any(
            race[label].best in race[label].times for run in runs for label in run
        )
        self._foreseen_ms += sum(self._by_device_ms(race, run) for run in runs)

    @property
    def _left_ms(self) -> float:
        return (
            max(0.0, _PLANNED * self.max_slowdown * self.agreed.job_s - self.agreed.spent_s) * 1e3
        )

    def _expected_ms(self, race: Race, replay: Replay) -> float:
        """What a call is expected to take beyond what is in use, by the calls' clock."""
        least, most = _SCALES
        scale = self.agreed.trials_s * 1e3 / self._foreseen_ms if self._foreseen_ms else 1.0
        return self._by_device_ms(race, replay) * min(max(scale, least), most)

    def _by_device_ms(self, race: Race, replay: Replay) -> float:
        """The same by the device's clock, if the call meets all sites."""
        return sum(self._cost_ms(race, label, trial.candidate) for label, trial in replay.items())

    def _cost_ms(self, race: Race, label: str, candidate: int) -> float:
        """What a trial takes beyond what is in use: as far as it is known, or as candidates of the
        site took so far.
        """
        if label not in self._known_ms:
            self._known_ms[label] = _costs(race[label])
        guess_ms, known_ms = self._known_ms[label]
        return known_ms.get(candidate, guess_ms)


def _costs(site: SiteRace) -> tuple[float, dict[int, float]]:
    """What a trial of a candidate that is not known takes beyond what is in use, and of those that
    are; milliseconds.
    """
    best, known = site.best, {i: measured.launches_ms for i, measured in site.times.items()}
    if best is None or best not in known:
        return 0.0, {}
    own_ms = known[best]
    beyond_ms = {i: max(0.0, ms - own_ms) for i, ms in known.items()}
    others = sorted(ms for i, ms in beyond_ms.items() if i != best)
    guess_ms = others[(3 * len(others)) // 4] if len(others) >= 3 else _GUESS * own_ms
    return guess_ms, {**beyond_ms, best: 0.0}


def _in_use(race: Race, batch: Sequence[Replay]) -> Replay:
    """A call of the best candidates so far, timed."""
    labels = dict.fromkeys(label for replay in batch for label in replay)
    return {
        label: Trial(best, is_timed=True)
        for label in labels
        if (best := race[label].best) is not None
    }
