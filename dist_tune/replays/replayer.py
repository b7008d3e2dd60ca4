"""Runs the closure: one replay, or a batch of timed ones with the host ahead of the device.

Knows the order of things around a replay: reset, alignment, listening, undoing. Nothing in here
talks to other ranks while the closure runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from dist_tune.compiler import Compiler, noted, reason_of
from dist_tune.errors import DistTuneError, StuckDeviceError, free_frames
from dist_tune.launches import Tunable, interception
from dist_tune.measure import (
    Clock,
    Lead,
    RngState,
    Span,
    captured,
    graph_pool,
    obstacle_in,
    wait_for_device,
)
from dist_tune.ranks import Ranks
from dist_tune.replays.first_run import FirstRun
from dist_tune.replays.trials import Trials
from dist_tune.search import Account, Race, Replay
from dist_tune.sites import Sites, is_fatal, mark_progress
from dist_tune.watch import Kind, Watchdog

_POLL_S = 1e-4
_N_AHEAD = 4
"""Replays at most that the host queues before the device is through with an earlier one: how long a
rest is follows from their times.
"""


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions under which the replays of a batch follow one another."""

    phase: str
    """Phase of the tuning, for messages."""
    is_cold: bool
    """True: the L2 cache is flushed before each."""
    times_launches: bool
    """True: launches are timed beside the whole replay: two events around each, which delay what
    they time by some microseconds.
    """
    is_timed: bool = True
    """True: the clock is read.

    If not, the device is not kept busy before: a check inside a run would wait for that, and the
    next
    replay be given even longer.
    """


class StepTimes(NamedTuple):
    """The step of a tuning online, by its calls; milliseconds, None where it was not measured."""

    before_ms: float | None
    """On the slowest rank, before the first trial."""
    after_ms: float | None
    """On the slowest rank, with the winners."""
    ranks_ms: Mapping[int, float]
    """Rank -> with the winners."""


WARM_UP = Conditions("warm-up", is_cold=False, times_launches=False, is_timed=False)
RACE = Conditions("race", is_cold=True, times_launches=True)


class Replayer:
    """The replays of one tuning."""

    def __init__(
        self,
        ranks: Ranks,
        trials: Trials,
        clock: Clock,
        reset: Callable[[], object] | None,
        stuck_after_s: float,
        *,
        sites: Sites,
        start: Callable[[], None],
    ) -> None:
        """``start``: called before replays."""
        self.watchdog: Watchdog = trials.watchdog
        self.n_replays = 0
        """Runs of the closure so far, one that the caller has made among them."""
        self.n_run_again = 0
        """Replays that did not count and were run again, because a kernel was not compiled before.

        The same on all ranks.
        """
        self.run_s = 0.0
        """Host seconds of the latest run of the closure."""
        self.batch_s = 0.0
        """Seconds of the latest batch, until the device was through; without those in which the
        store answered.
        """
        self._talked_s = 0.0
        self.trials = trials
        self._ranks = ranks
        self._sites = sites
        self._journal = sites.journal
        self._clock = clock
        self._reset = reset
        self._start = start
        self._before = RngState()
        self.first_run = FirstRun()
        """Says whether others may follow."""
        self._stuck_after_s = stuck_after_s
        self._lead = Lead()
        self._shortest_ms = 0.0
        self.graphs: dict[frozenset[tuple[str, int]], Callable[[], None]] = {}
        """Site and candidate of each -> the replay of the graph of a run with them, which takes the
        closure's place.
        """
        self.in_graphs = False
        """True if the finals so far were replays of graphs."""
        self._phase = "", 0
        """The latest phase, and its first replay."""

    def begin(self, first_run: FirstRun, *, is_made: bool) -> None:
        """Go on from the first run of a call, which the caller has made since this object was, or
        ``run_first`` will.
        """
        self.first_run = first_run
        self.n_replays += is_made

    def undo(self) -> None:
        """Put back what the last run changed under ``restore_value``, because it was not the one
        that counts.

        What the first run changed stays until it is known whether that one counts.
        """
        undo = self.trials.take_undo()
        if self.n_replays == 1:
            self.first_run.take(undo)
        else:
            undo.put_back()

    def run_first(self, closure: Callable[[], Any]) -> None:
        """Make the first run; its value is held until it is known whether it counts."""
        self.trials.changed = self.first_run.changed
        with self.first_run.watched():
            held = [self.run(closure, {})]
        self.trials.changed = None
        self.first_run.end(held, self.trials.failed)

    def why_not(self, *, is_asking: bool) -> str:
        """Why it may not, as found on this rank; ``is_asking``: this rank would replay it."""
        if is_asking and self.n_replays > 0:
            self.first_run.prepare()
        return self.first_run.why_not

    def again(self, closure: Callable[[], Any]) -> None:
        """Run the closure once more outside of the race: the first time is the first run, the
        second the probe.
        """
        self._start()
        if self.n_replays == 0:
            self.run_first(closure)
            return
        self.undo()
        self.restart()
        if not self.first_run.is_probed:
            self.first_run.probe(lambda: self.run(closure, {}), self._before)
        else:
            self.run(closure, {})
        self.undo()

    def refuse_first(self) -> Any:
        """The first run counts; its value."""
        self.trials.take_undo()
        return self.first_run.refuse()

    def last_run(self, closure: Callable[[], Any]) -> Any:
        """The value of the call: of one more run, as its caller would make it."""
        self.watchdog.phase = "last run"
        self.restart()
        self.trials.inputs.forget()
        self._before.restore()
        value = self.run(closure, {})
        self.trials.take_undo()
        if names := self.first_run.finish():
            self._sites.story.warning(
                f"some config has changed {names}, which the first one leaves as it is", shown=True
            )
        return value

    def give_up(self) -> None:
        """Leave what the first run left, after an error."""
        self.undo()
        self.trials.inputs.put_back()
        self.first_run.go_back()

    def paced(self, race: Race, batch: list[Replay]) -> tuple[list[Replay], int]:
        """The runs to make next, and how many replays of the ``batch`` are among them: all."""
        return batch, len(batch)

    @property
    def n_calls(self) -> int:
        """Calls of the job since it is tuned online; 0 where replays are the tuner's."""
        return 0

    def account(self) -> Account:
        """What calls of a job have taken here: nothing, where replays are the tuner's."""
        return Account()

    def agree_on(self, account: Account) -> None:
        """What they have taken on the rank with the most."""

    def idle(self) -> AbstractContextManager[None]:
        """Around a wait in which nothing is at work beside the calls of a job."""
        return nullcontext()

    def breathe(self, compiler: Compiler) -> None:
        """Between two looks at compilations: they may go on."""

    def step_times(self) -> StepTimes | None:
        """The step before and after the tuning, by calls of the job; None where replays tell."""
        return None

    def keep(self, launch: Tunable) -> None:
        """Copy the arguments of the checked function that all replays call, if the user has no
        ``reset``.
        """
        if self._reset is None and launch.checker() is not None:
            wait_for_device()  # what is under way may be writing to them
            self.trials.inputs.keep(launch.function, *launch.arguments)

    def restart(self, *, compares: bool = True) -> None:
        """Call the user's ``reset``, or put back the arguments of a checked function: before each
        replay but the first.

        ``compares``: the kept arguments with what the last replay changed, and none before; that
        waits for the device.

        Raises:
            DistTuneError: it has changed an argument that is too large to be kept, or may not.
        """
        if self.n_replays == 0:
            return
        if self._reset is not None:
            self.watchdog.at("reset", Kind.USERS_WORK)
            self._ranks.activity.at("reset", may_last=True)
            self._reset()
            self.watchdog.at("work between replays")
        else:
            self.first_run.begin_replay()
            self.trials.inputs.restart(compares=compares)

    def look_for_obstacles(self, closure: Callable[[], Any], batch: list[Replay]) -> str:
        """Make one run as it is; why none can be captured, empty if nothing says so.

        Before any capture, which would end at such a place on this rank, while others wait behind
        it for ever: in a capture NCCL registers the buffers of a collective with all ranks of a
        host where these share multicast memory.
        """
        found = list[str]()
        self.run_batch(lambda: found.append(obstacle_in(closure)), batch[:1], WARM_UP)
        self.trials.samples.restart()
        return found[0]

    def capture(self, closure: Callable[[], Any], batch: list[Replay]) -> str:
        """Capture a run of each schedule; why that cannot be done here, empty if it was.

        The device does nothing of it.
        """
        self.trials.is_captured = True
        try:
            with self._ranks.capturing():
                pool = graph_pool()
                for key, schedule in {_key(each): each for each in batch}.items():
                    self._beat("capturing the step")
                    self.restart()
                    number = self.n_replays
                    with noted(self.trials.on_compilation):
                        graph = captured(partial(self.run, closure, schedule), pool)
                    self.graphs[key] = partial(
                        self.trials.repeat, graph, {*self.trials.launched}, self.trials.take_undo()
                    )
                    if why := self.trials.samples.why_discarded(number):
                        return why
        except Exception as error:  # the reason to compare replays as they are, on all ranks
            if is_fatal(error) or isinstance(error, DistTuneError):
                raise
            free_frames(error)
            return reason_of(error)
        finally:
            self.trials.take_undo()
            self.trials.is_captured = False
        return ""

    def run(
        self,
        closure: Callable[[], Any],
        schedule: Replay,
        whole: Span | None = None,
        *,
        times_launches: bool = False,
    ) -> Any:
        """One replay; ``whole`` times it."""
        self.trials.begin_replay(self.n_replays, schedule, times_launches=times_launches)
        self.n_replays += 1
        doing = f"replay {self.n_replays - 1}{self._sites.told(schedule)}"
        mark_progress()
        self.watchdog.at(f"replay {self.n_replays - 1}", Kind.REPLAY, schedule)
        interception.push(self.trials)
        began = time.perf_counter()
        try:
            if whole is not None:
                whole.begin()
            self._ranks.activity.run(doing)
            value = closure()
            if whole is not None:
                whole.end()
            return value
        finally:
            self.run_s = time.perf_counter() - began
            interception.pop()
            if self.watchdog.end_replay():
                self.trials.samples.disturb(self.n_replays - 1)

    def run_batch(
        self,
        closure: Callable[[], Any],
        batch: list[Replay],
        conditions: Conditions,
        note: Callable[[], object] = lambda: None,
    ) -> None:
        """Replay a batch, and add the times to the samples when the device is through.

        ``note``: called after the times of a replay.

        Raises:
            StuckDeviceError: the device stands still.
            DistTuneError: another rank ended the tuning.
        """
        wholes: list[tuple[int, Replay, Span]] = []
        n_done = 0
        batch_began, self._talked_s = time.monotonic(), 0.0
        self.watchdog.phase = conditions.phase
        story, n_before = self._sites.story, self._n_in_phase(conditions)
        if not conditions.is_timed:
            story.terminal.step(n_before, n_before + len(batch))
        for k, schedule in enumerate(batch):
            self._await_device(wholes[:-_N_AHEAD], n_done, n_before, len(batch))
            doing, is_new = self.watchdog.describe(
                f"replay {k} of a batch of {len(batch)}", schedule
            )
            self._beat(doing, is_new=is_new)
            self.restart(compares=k == 0 or not conditions.is_timed)
            while n_done < len(wholes) and wholes[n_done][2].is_done():
                ms = self._end_replay(*wholes[n_done], conditions)
                note()
                self._shortest_ms = min(ms, self._shortest_ms or ms)
                n_done += 1
            self._journal.begin(self.n_replays, schedule)
            story.terminal.step(n_before + k)
            self.trials.prepare(schedule)
            if conditions.is_timed:
                lead_ms = self._lead.ms(self._shortest_ms, max(0, len(wholes) - n_done - 1))
                self._clock.prepare(lead_ms, is_cold=conditions.is_cold)
            self._ranks.align()
            whole = self._clock.span()
            wholes.append((self.n_replays, schedule, whole))
            with noted(self.trials.on_compilation):
                self.run(
                    self.graphs.get(_key(schedule), closure),
                    schedule,
                    whole,
                    times_launches=conditions.times_launches,
                )
            if conditions.is_timed:
                self._lead.add(self.run_s * 1e3, is_ahead=not whole.has_begun())
            self.undo()
        self._await_device(wholes, n_done, n_before, len(batch))
        if self.watchdog.end_batch(batch):
            for number, _, _ in wholes:  # what waited for a release ran at no speed of its own
                self.trials.samples.disturb(number)
        self.batch_s = time.monotonic() - batch_began - self._talked_s
        for number, schedule, span in wholes[n_done:]:
            self._end_replay(number, schedule, span, conditions)
        self._journal.end_batch()
        self.trials.read_spans()
        story.flush()

    def _beat(self, doing: str, *, is_new: bool = False) -> None:
        began = time.monotonic()
        self._ranks.beat(doing, is_new=is_new)
        # No time of a replay: with a slow store there would be a meeting for each.
        self._talked_s += time.monotonic() - began

    def _n_in_phase(self, conditions: Conditions) -> int:
        """Replays of the phase before this batch."""
        if conditions.phase != self._phase[0]:
            self._phase = conditions.phase, self.n_replays
        return self.n_replays - self._phase[1]

    def _end_replay(
        self, number: int, schedule: Replay, whole: Span, conditions: Conditions
    ) -> float:
        """Add the times of a replay that the device is through with to the samples; its
        milliseconds.
        """
        ms = whole.ms()
        self.trials.samples.add_replay(number, ms, schedule)
        if conditions.is_timed:
            self.trials.read_spans(number)
        self._journal.end(number, schedule)
        return ms

    def _await_device(
        self, replays: list[tuple[int, Replay, Span]], n_done: int, n_before: int, n_all: int
    ) -> None:
        """Wait until the device has done these replays of a batch of ``n_all``, and leave if
        another rank ends the tuning meanwhile.
        """
        since, n_noted = time.monotonic(), -1
        while n_done < len(replays):
            number, schedule, span = replays[n_done]
            if span.is_done():
                n_done, since = n_done + 1, time.monotonic()
                continue
            if n_noted != n_done:
                n_noted = n_done
                self.watchdog.at(f"the device's replay {number}", Kind.DEVICE, schedule)
            self._beat(f"waiting for the device, {n_done} of {n_all} replays done")
            self._sites.story.terminal.step(n_before + n_done)
            if time.monotonic() - since > self._stuck_after_s:
                raise StuckDeviceError(
                    f"rank {self._ranks.rank}: the device has not finished replay {n_done} of"
                    f" {n_all} within {self._stuck_after_s:g} s. A kernel spins or waits for a"
                    " signal that does not come; restart the process."
                )
            time.sleep(_POLL_S)


def _key(schedule: Replay) -> frozenset[tuple[str, int]]:
    return frozenset(_candidates(schedule).items())


def _candidates(schedule: Replay) -> dict[str, int]:
    return {label: trial.candidate for label, trial in schedule.items()}
