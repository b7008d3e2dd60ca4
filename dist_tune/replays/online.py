"""Runs of a step that are the user's own calls: each gives every site a candidate, is timed, and
counts. Nothing is undone or repeated.

A thread beside the step does what the tuner of a replayed step does between replays: it compiles,
talks to other ranks, reads times. The step's thread finds the schedule of a batch in memory, from
the call on that all ranks have agreed to begin it at; before and after it runs what is in use. Both
threads touch sites and samples in turn: the step's in the calls of a batch, the other one outside
of them. The step's thread notes when each call begins, and whether the other one was at work: what
the job pays follows from that (``Pace``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import ceil, inf
from statistics import median
from threading import Condition
from typing import Any, NamedTuple, TypeVar

from dist_tune.compiler import Compiler, noted
from dist_tune.errors import DistTuneError, JobEndedError
from dist_tune.launches import Slot, Timings, Tunable, interception
from dist_tune.measure import Clock, Span
from dist_tune.ranks import Calls, Ranks, Reduction
from dist_tune.replays.replayer import WARM_UP, Conditions, Replayer, StepTimes
from dist_tune.replays.trials import Trials
from dist_tune.replays.turns import Turn
from dist_tune.search import N_PLAIN, Account, Pace, Race, Replay
from dist_tune.sites import Site, Sites

R = TypeVar("R")
_LOOK_S = 0.02
"""Between two looks at calls that go on."""
_MOST_STOPPED_S = 1.0
"""Longest stop of compilations under way: a launch, or another rank, may wait for one of them."""
_MAX_APART = 500
"""Calls between the fastest rank and the slowest one: each batch begins after the one, and is over
after the other.
"""
_MAX_EMPTY = 3
"""Batches in a row of which no call has come here."""
_PATIENCE = 3.0
"""Deadlines that a call waits at most: a meeting is over sooner, so that no rank goes on without
word that another one has.
"""
_MARGIN = 4.0
"""Exchanges that fit between the agreement on a batch and its first call."""
_N_AFTER = 4 * N_PLAIN
"""Plain calls with the winners by which the step is timed at the end."""
_MOST_AFTER = 8 * _N_AFTER
"""Calls among which these must be."""


@dataclass(eq=False)
class Batch:
    """Calls that all ranks make alike, or none does."""

    first: int
    """Number of the first call."""
    calls: dict[int, Replay]
    """Number of a call -> its trials."""
    conditions: Conditions
    n_before: int
    """Runs before it."""
    best: dict[str, int] = field(default_factory=dict)
    """Site -> its best candidate so far, in use from the first call on."""
    is_in_force: bool | None = None
    """None until all ranks have said whether they have heard of it in time."""
    has_begun: bool = False
    wholes: list[tuple[int, Replay, Span]] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The number after the last one."""
        return max(self.calls, default=self.first - 1) + 1


class InUse(NamedTuple):
    """The config that launches of one kernel or function have at one key meanwhile."""

    slot: Slot
    config: Any
    fills: bool
    """True if the slot holds it between calls: a function's is empty, so that each of its calls
    comes here.
    """

    def fill(self) -> None:
        """Let ordinary launches use it."""
        if self.fills:
            self.slot.fill(self.config, Timings())


class _Begun(NamedTuple):
    """The beginning of a call, which lasts until the next one's by the device's clock.

    The host may be calls ahead of its device, and pay for them where it reads a loss: by its clock
    the one call that does would pay.
    """

    number: int
    at: Any
    """Event."""
    is_trial: bool
    n_work: int


@Reduction
def _latest(parts: Mapping[int, tuple[int, int, int]]) -> tuple[int, int, int, int]:
    """Number of the latest call on any rank, calls by which ranks are apart, the widest margin and
    the longest cycle.
    """
    calls, margins, cycles = zip(*parts.values(), strict=True)
    return max(calls), max(calls) - min(calls), max(margins), max(cycles)


@Reduction
def _all(parts: Mapping[int, bool]) -> bool:
    return all(parts.values())


@Reduction
def _step_times(parts: Mapping[int, tuple[float | None, float | None]]) -> StepTimes:
    before, after = (
        {rank: ms for rank, pair in parts.items() if (ms := pair[k]) is not None} for k in (0, 1)
    )
    return StepTimes(max(before.values(), default=None), max(after.values(), default=None), after)


def _ms(calls_s: Collection[float]) -> float | None:
    """A call of the step in milliseconds; None where there were too few."""
    return 1e3 * median(calls_s) if len(calls_s) >= N_PLAIN else None


class OnlineRuns(Replayer):
    """The runs of one online tuning. A ``Listener`` of calls that run what is in use."""

    launching = None
    is_watching = False

    def __init__(
        self,
        ranks: Ranks,
        trials: Trials,
        clock: Clock,
        deadline_s: float,
        sites: Sites,
        race: Race,
        pace: Pace,
        calls: Calls,
    ) -> None:
        super().__init__(ranks, trials, clock, None, deadline_s, sites=sites, start=lambda: None)
        self.members, self.buckets = trials.members, trials.buckets
        self.ended_at: int | None = None
        """The first call after the tuning, with its winners."""
        self.n_waits = 0
        """Calls that have waited for word of their batch."""
        self.pace, self.began_at = pace, calls.n_calls + 1
        self._race, self._calls, self._deadline_s = race, calls, deadline_s
        self._known: dict[tuple[int, str], InUse] = {}
        """(Identity of the decorated object, key) -> what is in use there."""
        self._by_name: dict[str, str] = {}
        """Name and key -> that config, described: for kernels that are made anew in each call."""
        self._batch: Batch | None = None
        self._is_trying = self._is_over = False
        self._changed = Condition()
        """Of the fields above, between the two threads."""
        self._begun = deque[_Begun]()
        """The latest calls, until the device has come to the next one; the other thread takes them
        out.
        """
        self._after_s: list[float] = []
        self._n_work = 1
        """Beginnings and ends of its work so far: odd while it is at work."""
        self._awaited = inf
        """Number of the call whose end the other thread waits for."""
        self._margin, self._n_wait = (0 if ranks.is_alone else 2), 0
        self._latest_runs: list[Replay] = []
        self._n_empty = 0
        self._began_s = time.monotonic()
        trials.in_use = self.config_of
        sites.fills_at_once = False

    # -- what is in use: the step's thread ---------------------------------------------------------

    def use(self, site: Site, index: int) -> None:
        """Use a candidate of a site from now on."""
        self._by_name[site.kernel + site.key] = site.texts[index]
        for owner, slot in site.slots.items():
            self._known[owner, site.key] = InUse(slot, site.configs[index], fills=not site.is_whole)

    def _use_at(self, launch: Tunable, config: Any) -> InUse:
        self._by_name[launch.name + launch.key_text] = launch.describe(config)
        known = self._known[id(launch.owner), launch.key_text] = InUse(
            launch.slot, config, fills=not launch.is_whole
        )
        return known

    def config_of(self, launch: Tunable) -> Any:
        """The config in use for a launch; of one that is new the nearest one, or the first."""
        if (known := self._known.get((id(launch.owner), launch.key_text))) is not None:
            return known.config
        configs, texts, _ = launch.candidates()
        text = self._by_name.get(launch.name + launch.key_text)
        if text in texts:
            return configs[texts.index(text)]
        near = launch.slot.nearest()
        return self._use_at(
            launch, near if any(config is near for config in configs) else configs[0]
        ).config

    def missed(self, launch: Tunable) -> Any:
        """A launch without a config, in a call that times nothing: with the one in use; of a new
        one with the first that runs.
        """
        config = self.config_of(launch)
        try:
            value = launch.run_known(config)
        except Exception as error:
            if launch.is_whole or (id(launch.owner), launch.key_text) not in self._known:
                raise
            return self._run_other(launch, config, error)
        if (known := self._known.get((id(launch.owner), launch.key_text))) is not None:
            known.fill()
        return value

    def _run_other(self, launch: Tunable, config: Any, error: Exception) -> Any:
        configs, *_ = launch.candidates()
        for each in configs:
            # Of one that cannot run either; the first error is the one to tell.
            with suppress(Exception):
                if each is not config:
                    value = launch.run(each, None, is_trial=False)
                    self._use_at(launch, each).fill()
                    return value
        raise error

    # -- a call: the step's thread -----------------------------------------------------------------

    def goes_on(self) -> bool:
        """True unless the call to come is an ordinary one again.

        Waits for word of a batch that would begin with it.
        """
        number = self._calls.n_calls + 1
        with self._changed:
            batch = self._batch
            if batch is not None and number >= batch.first and batch.is_in_force is None:
                self.n_waits += 1
                self._changed.wait_for(
                    lambda: batch.is_in_force is not None or self._is_over,
                    _PATIENCE * self._deadline_s,
                )
                batch.is_in_force = bool(batch.is_in_force)
            if (
                batch is not None
                and batch.is_in_force
                and number >= batch.first
                and not batch.calls
            ):
                return self._goes_on_after(number)
            if not self._is_over or (
                batch is not None and batch.is_in_force and number < batch.end
            ):
                return True  # after an error, too, all ranks come to the end of a batch alike
            for each in self._known.values():
                each._replace(fills=True).fill()
            return False

    def _goes_on_after(self, number: int) -> bool:
        """The winners come into use, and some calls with them are timed; what was met too late to
        be tuned is a miss again then.
        """
        if self.ended_at is None:
            self.ended_at = number
            for site in self._sites.met.values():
                if site.winner is not None:
                    self.use(site, site.configs.index(site.winner))
                    if not site.is_whole:  # its calls come here as long as its slot is empty
                        site.fill()
            self._changed.notify_all()
        if (
            len(self._after_s) < _N_AFTER
            and number <= self.ended_at + _MOST_AFTER
            and not self._is_over
        ):
            return True
        for site in self._sites.met.values():
            if site.is_whole and site.winner is not None:
                site.fill()
        entered = self._entered()
        for key, each in self._known.items():
            if key not in entered:
                each.slot.clear()
        return False

    def _entered(self) -> dict[tuple[int, str], str]:
        """(Identity of a decorated object, key) -> site, of all that were met in a call that
        times.
        """
        return {
            (owner, site.key): label
            for label, site in self._sites.met.items()
            for owner in site.slots
        }

    def call(self, function: Callable[[], R]) -> R:
        """One call of the user's."""
        number, batch, at = self._calls.n_calls + 1, self._batch, self._clock.event()
        at.record()
        with self._changed:  # beside a trial of another thread with what is in use
            schedule = batch.calls.get(number) if batch is not None and batch.is_in_force else None
            is_trial = schedule is not None and not self._is_trying
            self._is_trying |= is_trial
            self._begun.append(_Begun(number, at, is_trial, self._n_work))
        try:
            if is_trial:
                assert batch is not None
                assert schedule is not None
                return self._trial(function, batch, schedule)
            interception.push(self)
            try:
                return function()
            finally:
                interception.pop()
        finally:
            with self._changed:
                self._calls.n_calls += 1
                self._is_trying &= not is_trial
                if number >= self._awaited:
                    self._awaited = inf
                    self._changed.notify_all()

    def _trial(self, function: Callable[[], R], batch: Batch, schedule: Replay) -> R:
        trials, number = self.trials, batch.n_before + [*batch.calls].index(self._calls.n_calls + 1)
        if not batch.has_begun:
            batch.has_begun = True
            self._follow_race(batch.best)
        whole, n_met = self._clock.span(), len(self._sites.met)
        self._journal.begin(number, schedule)
        trials.begin_replay(number, schedule, times_launches=batch.conditions.times_launches)
        turns = trials.turns(schedule)
        places, heard = list[tuple[Slot, Any]](), list[InUse]()
        interception.push(trials)
        patch = interception.triton_patch()
        patch.turns.update({id(turn.config): turn for turn in turns.values()})
        try:
            self._place(schedule, turns, places, heard)
            with noted(trials.on_compilation):
                whole.begin()
                value = function()
                whole.end()
            # A site that was not met, as where shapes take turns, has added nothing to the step's
            # time.
            trials.end_turns(turns)
            met = {label: trial for label, trial in schedule.items() if label in trials.launched}
            batch.wholes.append((number, met, whole))
            return value
        finally:
            interception.pop()
            for turn in turns.values():
                patch.turns.pop(id(turn.config), None)
            self._journal.end(number, schedule)
            for slot, config in places:
                slot.put(config)
            if len(self._sites.met) > n_met:
                self._follow_sites()
                heard = [*self._known.values()]
            for each in heard:
                each.fill()

    def _place(
        self,
        schedule: Replay,
        turns: Mapping[str, Turn],
        places: list[tuple[Slot, Any]],
        heard: list[InUse],
    ) -> None:
        """Let launches find the turns of a call, in ``places`` with what is in use there, or come
        here, where it was ``heard``.
        """
        entered = self._entered()
        for key, each in list(self._known.items()):
            label = entered.get(key)
            turn = turns.get(label) if label is not None else None
            if turn is not None and each.slot.put(turn.config):
                places.append((each.slot, each.config))
            elif label is None or label in schedule:
                each.slot.clear()
                heard.append(each)

    def _follow_sites(self) -> None:
        """Use the stand-in of sites that were met for the first time."""
        for site in self._sites.met.values():
            # Else it may be made anew in each call.
            is_new = site.kernel + site.key not in self._by_name
            if is_new and site.stand_in is not None and site.winner is None:
                self.use(site, site.stand_in)

    def _follow_race(self, best: Mapping[str, int]) -> None:
        """Use the best candidates so far, at the first call of a batch: the same on all ranks."""
        for label, index in best.items():
            site = self._sites.met.get(label)
            if (
                site is not None
                and site.winner is None
                and index not in site.failures
                and index != site.stand_in
            ):
                site.stand_in = index
                self.pace.renew()
                self.use(site, index)
                for owner in site.slots:
                    self._known[owner, site.key].fill()

    # -- batches: the thread beside the step -------------------------------------------------------

    def paced(self, race: Race, batch: list[Replay]) -> tuple[list[Replay], int]:
        """The next calls of a batch that the budget has room for, with calls of what is in use
        between them.
        """
        if self._latest_runs:
            self.pace.end(race, self._latest_runs)
        runs, n_taken = self.pace.plan(race, batch)
        self._n_wait, self._latest_runs = self.pace.n_wait(race, runs), runs
        return runs, n_taken

    @property
    def n_calls(self) -> int:
        """Calls so far."""
        return self._calls.n_calls + 1 - self.began_at

    def account(self) -> Account:
        """What the job's calls have taken here."""
        self._take_durations()
        return self.pace.account

    def agree_on(self, account: Account) -> None:
        """The same on the rank with the most."""
        self.pace.agreed = account

    def look_for_obstacles(self, closure: Callable[[], Any], batch: list[Replay]) -> str:
        """What keeps calls from being captured."""
        return "its replays are calls that count"

    def breathe(self, compiler: Compiler) -> None:
        """Between two looks at compilations: let the job's calls be plain for a while, where it is
        time. Raises ``JobEndedError``.
        """
        if self._is_over:
            raise JobEndedError("the program ends")
        if self._may_work():
            return
        until = time.monotonic() + _MOST_STOPPED_S
        with compiler.held() as go_on:

            def is_over() -> bool:
                if time.monotonic() > until:
                    go_on()
                return True

            self._wait_for(is_over, "room in the budget")

    def run_batch(
        self,
        closure: Callable[[], Any],
        batch: list[Replay],
        conditions: Conditions,
        note: Callable[[], object] = lambda: None,
    ) -> None:
        """Let calls of the user's run a batch, and add their times to the samples when the device
        is through; ``note`` is not called.

        Raises:
            JobEndedError: the program ends.
            DistTuneError: another rank ended the tuning.
        """
        agreed = self._agree(batch, conditions)
        began = time.monotonic()
        self._awaited = agreed.end - 1
        self._wait_for(
            lambda: self._calls.n_calls >= agreed.end - 1 and not self._is_trying,
            f"calls {agreed.first} to {agreed.end - 1}",
        )
        self._wait_for(lambda: all(span.is_done() for _, _, span in agreed.wholes), "the device")
        self._n_empty = 0 if agreed.wholes else self._n_empty + 1
        if self._n_empty >= _MAX_EMPTY:
            raise DistTuneError(
                "its calls do not come to this tuning: decorate the step once, and not in each call"
            )
        self.batch_s = time.monotonic() - began
        self.n_replays = agreed.n_before + len(batch)
        for number, schedule, whole in agreed.wholes:
            self.trials.samples.add_replay(number, whole.ms(), schedule)
        self._journal.end_batch()
        self.trials.read_spans()
        self._sites.story.flush()

    def again(self, closure: Callable[[], Any]) -> None:
        """Some plain calls: what follows is compared with them.

        The first calls of a job are slow by themselves, so there are more.
        """
        if not self.pace.has_begun:
            self._wait_for(lambda: len(self.pace.before_s) >= 2 * N_PLAIN, "plain calls")
            self.pace.begin()

    def last_run(self, closure: Callable[[], Any]) -> None:
        """Bring the winners into use with one call on all ranks."""
        self._n_wait = 0
        self._agree([], WARM_UP)
        self._wait_for(
            lambda: self.ended_at is not None, "the call from which on the winners are used"
        )
        self._take_durations()
        n, n_timed = (self.ended_at or 0) - self.began_at, self.n_replays - 1
        waited = f", {self.n_waits} calls waited" if self.n_waits else ""
        told = (
            f"took {self.pace.slowdown:.1%} of the job's time (at most"
            f" {self.pace.max_slowdown:.0%})"
        )
        self._sites.story.info(
            f"tuned in {n} calls, {n_timed} of them with other configs or timed, which"
            f" {told}{waited}",
            shown=True,
        )

    def step_times(self) -> StepTimes:
        """The step of plain calls before the first trial, and of calls with the winners;
        collective, unless the program ends.
        """
        after_s = self._after_s

        with suppress(JobEndedError):
            self._wait_for(
                lambda: (
                    len(after_s) >= _N_AFTER
                    or self._calls.n_calls > (self.ended_at or 0) + _MOST_AFTER
                ),
                "calls with the winners",
                always=True,
            )
        mine = _ms(self.pace.before_s), _ms(after_s)
        with suppress(DistTuneError):  # the program ends on some rank
            if not self._is_over:
                return self._ranks.reduce("step", mine, _step_times)
        return StepTimes(*mine, {})

    def give_up(self) -> None:
        """No batch begins any more, and what waits for calls ends: after an error, or with the
        program. What is in use stays so.
        """
        with self._changed:
            self._is_over = self._ranks.is_ending = True
            self._changed.notify_all()

    def _agree(self, runs: list[Replay], conditions: Conditions) -> Batch:
        """Agree with the other ranks on the first call of a batch, in time for all of them."""
        best = {
            label: site_best
            for label in self._sites.met
            if label in self._race and (site_best := self._race[label].best) is not None
        }
        while True:
            began = time.monotonic()
            part = self._calls.n_calls + 1, self._margin, self.pace.wanted_cycle
            with self.idle():
                latest, n_apart, margin, self.pace.n_cycle = self._ranks.reduce(
                    "calls", part, _latest
                )
            if n_apart > _MAX_APART:
                raise DistTuneError(
                    f"ranks are {n_apart} calls apart: nothing in the step holds them together, so"
                    " they share no trials"
                )
            first = latest + 1 + max(margin, self._n_wait)
            batch = Batch(first, self.pace.schedule(first, runs), conditions, self.n_replays, best)
            with self._changed:
                is_in_time = self._calls.n_calls + 1 < batch.first and not self._is_over
                self._batch = batch
            is_in_force = False
            try:
                with self.idle():
                    is_in_force = self._ranks.reduce("in force", is_in_time, _all)
            finally:
                with self._changed:  # a call that has waited too long has gone on without it
                    batch.is_in_force = (
                        is_in_force if batch.is_in_force is None else batch.is_in_force
                    )
                    self._changed.notify_all()
            if self._is_over:
                raise JobEndedError("the program ends")
            self._margin = self._wanted_margin(time.monotonic() - began, is_late=not is_in_force)
            if is_in_force and not batch.is_in_force:
                raise DistTuneError(
                    "a call has waited too long for word of its batch, and has run what is in use"
                    " where other ranks may not"
                )
            if is_in_force:
                return batch

    def _wanted_margin(self, exchange_s: float, *, is_late: bool) -> int:
        """Calls that this rank makes in some exchanges as long as the last one."""
        if self._ranks.is_alone:
            return 0
        call_s = (time.monotonic() - self._began_s) / max(
            1, self._calls.n_calls + 1 - self.began_at
        )
        return min(
            100_000, max(2, ceil(_MARGIN * exchange_s / call_s), 2 * self._margin if is_late else 0)
        )

    def _take_durations(self) -> None:
        while len(self._begun) > 1 and self._begun[1].at.query():
            begun, after = self._begun.popleft(), self._begun[0]
            try:
                seconds = begun.at.elapsed_time(after.at) / 1e3
            except RuntimeError:  # of a program that changes its device between calls
                continue
            is_ours = begun.n_work != after.n_work or after.n_work % 2 == 1
            if self.ended_at is None or begun.number < self.ended_at:
                self.pace.add(begun.number, seconds, is_trial=begun.is_trial, is_ours=is_ours)
            elif not is_ours and len(self._after_s) < _N_AFTER:
                self._after_s.append(seconds)

    def _may_work(self) -> bool:
        self._take_durations()
        return self.pace.may_work(self._calls.n_calls + 1)

    def _wait_for(self, is_done: Callable[[], bool], what: str, *, always: bool = False) -> None:
        """Wait without work, until something is done and the budget lets this thread work again;
        ``always``: it does.
        """
        with self.idle():
            while True:
                with self._changed:
                    is_over = self._is_over
                    self._take_durations()
                    if is_done() and (
                        always or is_over or self.ended_at is not None or self._may_work()
                    ):
                        return
                    if is_over:
                        raise JobEndedError("the program ends")
                    self._changed.wait(_LOOK_S)
                self._ranks.beat(f"waiting for {what}", may_last=True)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """This thread is not at work meanwhile."""
        self._n_work += 1
        try:
            yield
        finally:
            self._n_work += 1
