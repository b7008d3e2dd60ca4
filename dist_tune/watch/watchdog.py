"""The thread that minds one tuning on this rank: it tells of late ranks and of a config that never returns, and may end the process.

Is told of steps by the tuning's thread, and reads the clock. Lives from the first run, or of a process that tunes alone from the first
launch of a candidate, to the end of the tuning. A config that holds the interpreter lock stops this thread, too: a timer of faulthandler
ends the process then.
"""

from __future__ import annotations

import faulthandler
import time
from contextlib import ExitStack, suppress
from enum import Enum
from math import inf
from threading import Event, Lock, Thread, get_ident
from typing import TYPE_CHECKING, NamedTuple

from dist_tune.compiler import is_compiling, noted
from dist_tune.distributed import Asked, Ranks
from dist_tune.errors import CandidateFailure, FailureKind
from dist_tune.files import warn_once
from dist_tune.search import Replay
from dist_tune.settings import Settings
from dist_tune.sites import Sites
from dist_tune.watch.words import EXIT_CODE, LastWords, Release

if TYPE_CHECKING:
    from dist_tune.output import Logger

_TIMES_EXPECTED = 20
"""A replay may take so many times as long as the shortest one before, where that is longer than the deadline."""
_RELEASE = 0.5
"""Part of the limit after which flags are released: before peers give up, whose collectives have one deadline."""
# In deadlines:
_LEAVE = 0.5
"""From the message to the end of the process."""
_LEAVE_LATER = 0.9
"""The same for a rank outside of any launch: it may wait for a rank that is inside one, and be freed when that one leaves."""
_HELD = 1.75
"""Time without a sign of the watching thread after which faulthandler ends the process."""
_EXCUSED = 10.0
"""Limit of compilations inside a launch, which do not count as its time."""
_FIRST_LOOK_S = 0.5
"""Most calls with a known config are over by then."""
_LOST_S = 1.0
"""Time in which this process did not run, from which on that is told."""
_OF_CONFIGS = "Leave the config that hangs out, or name what it waits for in release="
_OF_STORES = "Look at the network to the host of the store, which is rank 0's or torchrun's"


class Kind(Enum):
    """Kind of a step, with its limit in deadlines."""

    UNLIMITED = inf
    """The user's first run, in which launches of candidates are limited; and meetings, where each answer of the store is."""
    REPLAY = 1.0
    WORK = 1.5
    """The tuner's, between replays."""
    USERS_WORK = 10.0
    """``reset``."""
    DEVICE = 1.25
    """A wait for the device, which gives up by itself after one deadline."""


class Step(NamedTuple):
    """A step of the tuning's thread."""

    doing: str
    kind: Kind
    since: float
    """Monotonic clock, in seconds."""
    schedule: Replay


class Launch(NamedTuple):
    """A candidate whose launch is under way."""

    label: str
    candidate: int
    since: float


class Launching:
    """A launch is under way within this block. A class, because a generator would cost three times as much in each launch."""

    __slots__ = ("_before", "_own", "_watchdog")

    def __init__(self, watchdog: Watchdog, own: Launch) -> None:
        self._watchdog = watchdog
        self._own = own

    def __enter__(self) -> None:
        self._before, self._watchdog.launch = self._watchdog.launch, self._own

    def __exit__(self, *error: object) -> None:
        self._watchdog.launch = self._before
        self._watchdog.take_released()


class Watchdog:
    """Watches one tuning, whose thread tells it of steps; each costs that thread some microseconds."""

    def __init__(self, ranks: Ranks, sites: Sites, settings: Settings, log: Logger, release: Release) -> None:
        self.phase = "discovery"
        self.log = log
        self.first_run_s = 0.0
        """Seconds; 0 where there is none."""
        self._ranks = ranks
        self._sites = sites
        self._deadline_s = settings.deadline_s
        self._release = release
        self._words = LastWords(ranks, settings, log)
        self._step = Step("the first run", Kind.UNLIMITED, time.monotonic(), {})
        self.launch: Launch | None = None
        """The innermost launch of a candidate that is under way."""
        self._shortest_s = 0.0
        """Of the replays so far."""
        self._returned: set[tuple[str, int]] = set()
        """Candidates that have been through a batch of replays on this rank."""
        self._released: list[tuple[str, int, str, float]] = []
        """Candidates under way when the flags were released, what they did, and for how many seconds."""
        self._watched = 0
        self._exit, self._over, self._lock = ExitStack(), Event(), Lock()
        self._is_armed = False
        self._thread: Thread | None = None

    def mind(self) -> None:
        """Let the thread tell of late ranks from here on; it watches the tuning's thread once ``watch`` was called there."""
        with self._lock:
            if self._thread is not None or self._over.is_set():
                return
            self._thread = Thread(target=self._run, name="dist_tune watchdog", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # no more threads: not the doing of the config whose launch this is
                self._thread = None
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

    # -- told by the tuning's thread -----------------------------------------------------------------------------

    def note(self, doing: str, kind: Kind = Kind.WORK, schedule: Replay | None = None) -> None:
        """Begin a step."""
        self._step = Step(doing, kind, time.monotonic(), schedule or {})

    def launching(self, label: str, candidate: int, *, is_known: bool = False) -> Launching:
        """The launch of a candidate; a function's may hold others. ``is_known``: it has run before, and needs no watch of its own."""
        if not self._is_armed and not is_known:  # a thread takes a millisecond to start, as much as the rest of a hit
            self.watch()
            self.mind()
            self._arm()
        return Launching(self, Launch(label, candidate, time.monotonic()))

    def describe(self, doing: str, schedule: Replay) -> tuple[str, bool]:
        """A replay, for peers; and true if it is the first of some candidate on this rank."""
        mine = [(label, trial.candidate) for label, trial in schedule.items()]
        new = [each for each in mine if each not in self._returned]
        return f"{doing} ({self.phase}): {self._names(new or mine)}", bool(new)

    def end_replay(self) -> bool:
        """The closure has returned; true if it had to be released."""
        took_s = time.monotonic() - self._step.since
        self._shortest_s = min(took_s, self._shortest_s or took_s)
        self.note("work between replays", Kind.WORK, self._step.schedule)  # which may wait for the device
        return self.take_released()

    def end_batch(self, batch: list[Replay]) -> bool:
        """The device is through all replays of a batch; true if it had to be released."""
        self.note("work between batches")
        for schedule in batch:
            self._returned.update((label, trial.candidate) for label, trial in schedule.items())
        return self.take_released()

    def take_released(self) -> bool:
        """Drop the candidates that went on only when flags were released; true if there were some."""
        if not self._released:
            return False
        stuck, self._released = self._released, []
        for label, i, what, after_s in stuck:
            if (site := self._sites.met.get(label)) is not None and i not in site.failures:
                reason = f"{what} until release= was called, after {after_s:.1f} s ({self.phase})"
                self._sites.fail(site, i, CandidateFailure(FailureKind.STUCK, reason))
        return True

    # -- the watching thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        tick_s = min(self._deadline_s / 20, 0.5)
        seen: object = None
        is_told, excused_s, pause_s = False, 0.0, _FIRST_LOOK_S
        while not self._over.is_set():
            before = time.monotonic()  # of the pause alone: time in which this thread tells peers, and waits for that, excuses nothing
            self._pause(pause_s)
            late_at_s, pause_s = pause_s + 4 * tick_s, tick_s
            if not self._over.is_set():
                self._ranks.look(self.log.warning)
            if not self._watched:
                continue
            self._arm()
            now = time.monotonic()
            subject, since, limit_s = self._subject()
            if subject is not seen:
                if is_told:
                    self._words.go_on()
                seen, is_told, excused_s = subject, False, 0.0
            # A compilation takes what it takes; and the process may have been stopped, or had no processor.
            if now - before > late_at_s or (is_compiling(self._watched) and excused_s < _EXCUSED * self._deadline_s):
                excused_s += now - before
            late_s = now - since - excused_s
            tell_at_s = limit_s * (_RELEASE if self._release and not isinstance(subject, Asked) else 1.0)
            if late_s >= tell_at_s and self.phase == "discovery" and self._ranks.activity.absent and now - since < self._ranks.gather_s:
                excused_s, late_s = now - since, 0.0  # a collective in it may wait for a rank that has yet to come to this call
            if not is_told and late_s >= tell_at_s:
                is_told = True
                self._tell(subject, late_s)
            elif late_s >= limit_s + self._deadline_s * (_LEAVE_LATER if isinstance(subject, Step) else _LEAVE):
                self._words.leave(self._text(subject, late_s), _OF_STORES if isinstance(subject, Asked) else _OF_CONFIGS)

    def _pause(self, seconds: float) -> None:
        """Wait for the next look, and tell of a time in which this process did not run."""
        before, doing = time.monotonic(), self._ranks.activity.doing
        self._over.wait(seconds)
        if (lost_s := time.monotonic() - before - seconds) > _LOST_S and not self._ranks.is_alone:
            now = self._ranks.activity.doing
            doing = now if now.since <= time.monotonic() - lost_s else doing  # begun while this thread waited
            text = f"did not run for {lost_s:.1f} s in {doing.text}: stopped, swapped out, or Python's lock held"
            self.log.warning(f"rank {self._ranks.rank} {text}")

    def _arm(self) -> None:
        """Let faulthandler end the process if this is not called again in time; tunings in other threads share its timer."""
        with self._lock:
            if self._over.is_set():
                return
            if not self._is_armed:
                self._is_armed = True
                self._exit.enter_context(noted(lambda kernel: None))
                self._exit.enter_context(self._words.opened())
            with suppress(RuntimeError):  # no more threads
                faulthandler.dump_traceback_later(_HELD * self._deadline_s, exit=True, file=self._words.file)

    def _subject(self) -> tuple[object, float, float]:
        """What the tuning's thread is in: an object of its own, since when, and its limit in seconds."""
        step, launch, asked, deadline_s = self._step, self.launch, self._ranks.asked, self._deadline_s
        if asked is not None:
            return asked, asked.since, deadline_s
        if launch is not None or step.kind is Kind.REPLAY:
            subject = launch or step
            return subject, subject.since, max(deadline_s, _TIMES_EXPECTED * self._shortest_s or 2 * self.first_run_s)
        return step, step.since, step.kind.value * deadline_s

    def _tell(self, subject: object, late_s: float) -> None:
        """Write what is late to the log and to the terminal, with the stacks of all threads, and release it if the user says how."""
        leaves = f"the process ends with exit code {EXIT_CODE} if it does not go on"
        self._words.tell(self._text(subject, late_s), "release= is called" if self._release else leaves)
        if self._release and (under_way := self._under_way(subject)):
            what = "it did not return" if isinstance(subject, Launch) else "a replay with it did not end"
            self._released = [(*each, what, late_s) for each in under_way]
            self._words.release(self._release)

    def _under_way(self, subject: object) -> list[tuple[str, int]]:
        """Candidates that may be what hangs."""
        if isinstance(subject, Launch):
            return [(subject.label, subject.candidate)]
        mine = [(label, trial.candidate) for label, trial in self._step.schedule.items()]
        if not mine and self._step.kind is Kind.REPLAY:  # of winners
            sites = self._sites.met.values()
            mine = [(site.label, i) for site in sites for i, config in enumerate(site.configs) if config is site.winner]
        return [each for each in mine if each not in self._returned] or mine

    def _text(self, subject: object, late_s: float) -> str:
        where = f"in {self._step.doing} ({self.phase})"
        if isinstance(subject, Asked):
            return f"the c10d store has not answered for {late_s:.1f} s ({subject.call} {where})"
        names = self._names(self._under_way(subject))
        if isinstance(subject, Launch):
            return f"{names} has not returned for {late_s:.1f} s, {where}"
        return f"{self._step.doing} ({self.phase}) has not ended for {late_s:.1f} s{names and f', with {names}'}"

    def _names(self, candidates: list[tuple[str, int]]) -> str:
        texts = {label: self._sites.met[label].texts for label, _ in candidates if label in self._sites.met}
        told = [f'candidate {i} "{texts[label][i] if label in texts else "?"}" of {label}' for label, i in candidates[:3]]
        return ", ".join(told) + (f" and {len(candidates) - 3} more" if len(candidates) > 3 else "")
