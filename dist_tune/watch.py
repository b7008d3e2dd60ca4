"""The thread that minds one tuning on this rank: it tells of late ranks, and frees or ends a
process in which a config never returns.

Is told of steps by the tuning's thread, and reads the clock. Lives from the first run, or of a
process that tunes alone from the first launch of a candidate, to the end of the tuning; none of it
runs in a steady call. A config that holds the interpreter lock stops this thread, too: a timer of
faulthandler ends the process then. What may itself wait for ever (a store, the user's functions, a
full pipe) runs on threads that are not waited for long.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum
from math import inf
from threading import Event, Lock, Thread, get_ident
from typing import TYPE_CHECKING, NamedTuple

import torch

from dist_tune.accelerator import api, device_type
from dist_tune.compiler import is_compiling, noted
from dist_tune.errors import CandidateFailure, FailureKind, StuckConfigError
from dist_tune.files import to_terminal, warn_once
from dist_tune.ranks import Asked, Ranks, run_in_thread, within
from dist_tune.search import Replay
from dist_tune.settings import Settings
from dist_tune.sites import Sites
from dist_tune.validation import spelled

if TYPE_CHECKING:
    from dist_tune.log import Story

EXIT_CODE = 86
"""Of a process that ends because a config does not return."""
_PATIENCE_S = 2.0
"""Seconds for a store, or a function of the user's."""
_TIMES_EXPECTED = 20
"""A replay may take so many times as long as the shortest one before, where that is longer than the
deadline.
"""
_RELEASE = 0.5
"""Part of the limit after which flags are released: before peers give up, whose collectives have
one deadline.
"""
# In deadlines:
_LEAVE = 0.5
"""From the message to the end of the process."""
_LEAVE_LATER = 0.9
"""The same for a rank outside of any launch: it may wait for a rank that is inside one, and be
freed when that one leaves.
"""
_HELD = 1.75
"""Time without a sign of the watching thread after which faulthandler ends the process."""
_EXCUSED = 10.0
"""Limit of compilations inside a launch, which do not count as its time."""
_FIRST_LOOK_S = 0.5
"""Most calls with a known config are over by then."""
_LOST_S = 1.0
"""Time in which this process did not run, from which on that is told."""

Releases = Sequence["torch.Tensor | Callable[[], object]"]
"""Flags that spinning kernels wait for, which are filled with ones, and functions, which are
called.
"""


def check_release(given: object) -> None:
    """Raise TypeError for what is no list of tensors and functions."""
    if not isinstance(given, list | tuple) or not all(
        isinstance(each, torch.Tensor) or callable(each) for each in given
    ):
        raise TypeError(
            "release must be a list of tensors, which are filled with ones, and functions, got"
            f" {spelled(given)}"
        )


def prepare_release(given: Releases) -> Callable[[], None] | None:
    """A function that writes all flags and calls all functions, on a stream beside the one that
    hangs; None if there are none.

    Made before anything hangs, because a kernel that spins may hold up allocations and new streams.
    """
    # From pinned memory the copy engine writes flags; a kernel that fills them might find no free
    # multiprocessor.
    tensors = [each for each in given if isinstance(each, torch.Tensor)]
    flags = [
        (
            tensor,
            torch.ones_like(tensor, device="cpu", pin_memory=tensor.device.type == device_type()),
        )
        for tensor in tensors
    ]
    device = next(
        (tensor.device for tensor in tensors if tensor.device.type == device_type()), None
    )
    stream = api.Stream(device) if given and api.is_initialized() else None

    def release() -> None:
        with api.stream(stream):
            for flag, ones in flags:
                flag.copy_(ones, non_blocking=True)
            for each in given:
                if not isinstance(each, torch.Tensor):
                    each()

    return release if given else None


class Kind(Enum):
    """Kind of a step, with its limit in deadlines."""

    UNLIMITED = inf
    """The user's first run, in which launches of candidates are limited; and meetings, where each
    answer of the store is.
    """
    REPLAY = 1.0
    WORK = 1.5
    """The tuner's, between replays."""
    USERS_WORK = 10.0
    """``reset``."""
    DEVICE = 1.25
    """A wait for the device, which gives up by itself after one deadline."""


class Step(NamedTuple):
    """A step of the tuning's thread, or a launch in it."""

    doing: str
    kind: Kind
    since: float
    """Monotonic clock, in seconds."""
    candidates: Sequence[tuple[str, int]] = ()
    """Label and candidate of those that run in it."""


class Watchdog:
    """Watches one tuning, whose thread tells it of steps; each costs that thread some
    microseconds.
    """

    def __init__(
        self,
        ranks: Ranks,
        sites: Sites,
        settings: Settings,
        log: Story,
        release: Callable[[], None] | None,
    ) -> None:
        self.phase = "discovery"
        self.log = log
        self.first_run_s = 0.0
        """Seconds; 0 where there is none."""
        self._ranks = ranks
        self._sites = sites
        self._deadline_s = settings.deadline_s
        self._release = release
        self._step = Step("the first run", Kind.UNLIMITED, time.monotonic())
        self._launch: Step | None = None
        """The innermost launch of a candidate that is under way."""
        self._shortest_s = 0.0
        """Of the replays so far."""
        self._returned: set[tuple[str, int]] = set()
        """Candidates that have been through a batch of replays on this rank."""
        self._released: list[tuple[str, int, str]] = []
        """Candidates under way when the flags were released, and what they did."""
        self._watched = 0
        self._exit, self._over, self._lock = ExitStack(), Event(), Lock()
        self._is_armed = False
        self._thread: Thread | None = None

    def mind(self) -> None:
        """Let the thread tell of late ranks from here on; it watches the tuning's thread once
        ``watch`` was called there.
        """
        with self._lock:
            if self._thread is not None or self._over.is_set():
                return
            try:
                self._thread = run_in_thread(self._run, "watchdog")
            except RuntimeError as error:
                # No more threads: not the doing of the config whose launch this is.
                self._over.set()
                warn_once(f"dist_tune does not watch for configs that never return: {error}")

    def watch(self) -> None:
        """Watch the calling thread from here on."""
        self._watched = get_ident()

    def stop(self) -> None:
        """Watch no more. Neither the thread nor faulthandler's timer is left."""
        with self._lock:
            self._over.set()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(1.0)
        if self._is_armed:
            faulthandler.cancel_dump_traceback_later()
        self._exit.close()

    # -- told by the tuning's thread ---------------------------------------------------------------

    def at(self, doing: str, kind: Kind = Kind.WORK, schedule: Replay | None = None) -> None:
        """Begin a step."""
        self._step = Step(doing, kind, time.monotonic(), _candidates(schedule or {}))

    @contextmanager
    def launching(self, label: str, candidate: int, *, is_known: bool = False) -> Iterator[None]:
        """The launch of a candidate; a function's may hold others.

        ``is_known``: it has run before, and needs no watch of its own.
        """
        # A thread takes a millisecond to start, as much as the rest of a hit.
        if not self._is_armed and not is_known:
            self.watch()
            self.mind()
            self._arm()
        before, self._launch = (
            self._launch,
            Step("", Kind.REPLAY, time.monotonic(), [(label, candidate)]),
        )
        try:
            yield
        finally:
            self._launch = before
            self._take_released()

    def describe(self, doing: str, schedule: Replay) -> tuple[str, bool]:
        """A replay, for peers; and true if it is the first of some candidate on this rank."""
        mine = _candidates(schedule)
        new = [each for each in mine if each not in self._returned]
        return f"{doing} ({self.phase}): {self._names(new or mine)}", bool(new)

    def end_replay(self) -> bool:
        """The closure has returned; true if it had to be released."""
        took_s = time.monotonic() - self._step.since
        self._shortest_s = min(took_s, self._shortest_s or took_s)
        self._step = Step(
            "work between replays", Kind.WORK, time.monotonic(), self._step.candidates
        )  # which may wait for the device
        return self._take_released()

    def end_batch(self, batch: list[Replay]) -> bool:
        """The device is through all replays of a batch; true if it had to be released."""
        self.at("work between batches")
        self._returned.update(each for schedule in batch for each in _candidates(schedule))
        return self._take_released()

    def _take_released(self) -> bool:
        """Drop the candidates that went on only when flags were released; true if there were
        some.
        """
        stuck, self._released = self._released, []
        for label, i, reason in stuck:
            if (site := self._sites.met.get(label)) is not None and i not in site.failures:
                self._sites.fail(site, i, CandidateFailure(FailureKind.STUCK, reason))
        return bool(stuck)

    # -- the watching thread -----------------------------------------------------------------------

    def _run(self) -> None:
        tick_s = min(self._deadline_s / 20, 0.5)
        seen: object = None
        is_told, excused_s, pause_s = False, 0.0, _FIRST_LOOK_S
        while not self._over.is_set():
            # Of the pause alone: time in which this thread tells peers, and waits for that, excuses
            # nothing
            before = time.monotonic()
            self._pause(pause_s)
            late_at_s, pause_s = pause_s + 4 * tick_s, tick_s
            if not self._over.is_set():
                self._ranks.look(self.log.warning)
                self.log.late(self._ranks.activity.late)
            if not self._watched:
                continue
            self._arm()
            now = time.monotonic()
            subject, limit_s = self._subject()
            if subject is not seen:
                if is_told:
                    self._say("what did not end goes on")
                seen, is_told, excused_s = subject, False, 0.0
            # A compilation takes what it takes; and the process may have been stopped, or had no
            # processor.
            if now - before > late_at_s or (
                is_compiling(self._watched) and excused_s < _EXCUSED * self._deadline_s
            ):
                excused_s += now - before
            late_s = now - subject.since - excused_s
            tell_at_s = limit_s * (_RELEASE if self._release and isinstance(subject, Step) else 1.0)
            waits_s = (
                self._ranks.gather_s
                if self.phase == "discovery" and self._ranks.activity.absent
                else 0.0
            )
            if late_s >= tell_at_s and now - subject.since < waits_s:
                # A collective in it may wait for a rank that has yet to come to this call.
                excused_s, late_s = (now - subject.since, 0.0)
            if not is_told and late_s >= tell_at_s:
                is_told = True
                self._tell(subject, late_s)
            elif late_s >= limit_s + self._deadline_s * (
                _LEAVE_LATER if isinstance(subject, Step) and subject.doing else _LEAVE
            ):
                self._leave(subject, late_s)

    def _pause(self, seconds: float) -> None:
        """Wait for the next look, and tell of a time in which this process did not run."""
        before = time.monotonic()
        self._over.wait(seconds)
        if (lost_s := time.monotonic() - before - seconds) > _LOST_S and not self._ranks.is_alone:
            self.log.warning(
                f"rank {self._ranks.rank} did not run for {lost_s:.1f} s: stopped, swapped out, or"
                " Python's lock held"
            )

    def _arm(self) -> None:
        """Let faulthandler end the process if this is not called again in time; tunings in other
        threads share its timer.
        """
        with self._lock:
            if self._over.is_set():
                return
            if not self._is_armed:
                self._is_armed = True
                self._exit.enter_context(noted(lambda kernel: None))
            with suppress(RuntimeError):  # no more threads
                faulthandler.dump_traceback_later(
                    _HELD * self._deadline_s, exit=True, file=self.log
                )

    def _subject(self) -> tuple[Step | Asked, float]:
        """What the tuning's thread is in, an object of its own, and its limit in seconds."""
        step, asked = self._launch or self._step, self._ranks.asked
        if asked is not None:
            return asked, self._deadline_s
        if step.kind is Kind.REPLAY:
            return step, max(
                self._deadline_s, _TIMES_EXPECTED * self._shortest_s or 2 * self.first_run_s
            )
        return step, step.kind.value * self._deadline_s

    def _under_way(self, step: Step) -> list[tuple[str, int]]:
        """Candidates that may be what hangs."""
        mine = list(step.candidates)
        if not mine and step.kind is Kind.REPLAY:  # of winners
            sites = self._sites.met.values()
            mine = [
                (site.label, i)
                for site in sites
                for i, config in enumerate(site.configs)
                if config is site.winner
            ]
        return [each for each in mine if each not in self._returned] or mine

    def _text(self, subject: Step | Asked, late_s: float) -> str:
        where = f"{self._step.doing} ({self.phase})"
        if isinstance(subject, Asked):
            return f"the c10d store has not answered for {late_s:.1f} s ({subject.call} in {where})"
        names = self._names(self._under_way(subject))
        if not subject.doing:
            return f"{names} has not returned for {late_s:.1f} s, in {where}"
        told = f"{where} has not ended for {late_s:.1f} s"
        return f"{told}, with {names}" if names else told

    def _names(self, candidates: Sequence[tuple[str, int]]) -> str:
        texts = {
            label: self._sites.met[label].texts
            for label, _ in candidates
            if label in self._sites.met
        }
        named = [
            (i, texts[label][i] if label in texts else "?", label) for label, i in candidates[:3]
        ]
        told = [f'candidate {i} "{text}" of {label}' for i, text, label in named]
        return ", ".join(told) + (f" and {len(candidates) - 3} more" if len(candidates) > 3 else "")

    # -- what it says and does ---------------------------------------------------------------------

    def _tell(self, subject: Step | Asked, late_s: float) -> None:
        """Write what is late to the log and to the terminal, with the stacks of all threads, and
        release it if the user says how.
        """
        signs: dict[int, str] = {}
        self._within(lambda: signs.update(self._ranks.last_signs()))
        then = (
            "release= is called"
            if self._release
            else f"the process ends with exit code {EXIT_CODE} if it does not go on"
        )
        peers = "".join(f"rank {rank} last seen at: {sign}. " for rank, sign in signs.items())
        self._say(
            f"{self._text(subject, late_s)}; {then}. {peers}Stacks of all threads"
            f" are in {self.log.path}"
        )
        with suppress(OSError, ValueError, RuntimeError):
            faulthandler.dump_traceback(self.log, all_threads=True)
        if self._release and isinstance(subject, Step) and (under_way := self._under_way(subject)):
            what = "a replay with it did not end" if subject.doing else "it did not return"
            reason = f"{what} until release= was called, after {late_s:.1f} s ({self.phase})"
            self._released = [(*each, reason) for each in under_way]
            if error := self._within(self._release):
                self._say(f"release= failed: {type(error).__name__}: {error}")

    def _leave(self, subject: Step | Asked, late_s: float) -> None:
        """End the process, after word to the peers. Does not return."""
        what, advice = (
            self._text(subject, late_s),
            "Leave out the config that hangs, or name what it waits for in release=",
        )
        if isinstance(subject, Asked):
            advice = "Look at the network to the host of the store, which is rank 0's or torchrun's"
        told = (
            f"{what}; nothing in the process can end that, and it has left with exit code"
            f" {EXIT_CODE}. The stacks of its threads are in {self.log.path}. {advice}."
            " DIST_TUNE_DEADLINE_S sets the deadline"
        )
        error, causes = (
            StuckConfigError(f"rank {self._ranks.rank}: {told}", self._ranks.rank, what),
            list[str](),
        )
        self._within(lambda: causes.append(self._ranks.end_from_outside(error)))
        self._say(
            f"{told}. The tuning had been ended before: {causes[0]}"
            if causes and causes[0]
            else told
        )
        self._within(lambda: sys.stdout.flush())
        os._exit(EXIT_CODE)

    def _say(self, text: str) -> None:
        text = f"rank {self._ranks.rank}: {text}"
        self.log.error(text)
        self._within(lambda: to_terminal(f"dist_tune: {text}\n"))

    def _within(self, call: Callable[[], object]) -> Exception | None:
        """Call on another thread, and go on after ``_PATIENCE_S`` in any case; its error."""
        try:
            within(min(_PATIENCE_S, self._deadline_s / 4), call)
        except TimeoutError:  # it is still at it
            return None
        except Exception as error:  # noqa: BLE001  # of a store that is gone, or of the user's function: this rank leaves all the same
            return error
        return None


def _candidates(schedule: Replay) -> list[tuple[str, int]]:
    return [(label, trial.candidate) for label, trial in schedule.items()]
