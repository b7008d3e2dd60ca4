"""Errors that end a tuning, as exceptions; and failures that drop a candidate, which end no tuning.

A leaf: knows nothing of dist_tune. Every message says what happened with the values, where (rank,
kernel, key, config) and what to do about it. A caller's mistake in the arguments is a
``ValueError`` or ``TypeError``, not one of these.
"""

from __future__ import annotations

import errno
import inspect
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import NamedTuple, TypeVar

_N_FRAMES = 8
T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


class FailureKind(StrEnum):
    """The step at which a candidate failed."""

    COMPILE = "compile"
    """It did not compile."""
    LOAD = "load"
    """Onto the device: shared memory, registers, threads."""
    LAUNCH = "launch"
    """It raised."""
    WRONG_RESULT = "wrong result"
    """It ran, and a check says no."""
    CLOCK = "clock"
    """Its time is no positive number."""
    STUCK = "stuck"
    """It did not return until the flags that it may wait for were released."""
    MACHINE = "machine"
    """At no step of its own: memory, disk, file descriptors or threads ran out.

    Counts against no config.
    """
    QUARANTINED = "quarantined"
    """The process ended twice while it ran."""


class CandidateFailure(NamedTuple):
    """Why a candidate cannot win. Travels as a JSON array."""

    kind: FailureKind
    """The step at which it failed."""
    reason: str
    """For people: nothing is decided by it.

    As agreed on, "rank r: reason" of the first rank on which it failed.
    """


Failures = dict[str, dict[int, CandidateFailure]]
"""Site -> candidate -> why it cannot win."""


def reasons(failures: Mapping[int, CandidateFailure]) -> dict[int, str]:
    """Candidate -> reason alone."""
    return {candidate: failure.reason for candidate, failure in failures.items()}


def parsed(parse: Callable[[], T]) -> T:
    """The syntax tree that ``parse`` makes; once more where Python 3.11 loses count, because a
    collection let another thread parse.
    """
    for _ in range(9):
        with suppress(SystemError):
            return parse()
    return parse()


def free_frames(error: E) -> E:
    """Free what the frames of an error's traceback hold, as a kernel's workspace, for an error that
    is kept.

    The traceback goes, and a note has its last lines: each of its frames holds the one that called
    it, up to the user's step.
    """
    if error.__traceback__ is not None:
        error.add_note("".join(traceback.format_tb(error.__traceback__, limit=-_N_FRAMES)))
    running, frame = set[int](), inspect.currentframe()
    while frame is not None:
        running.add(id(frame))
        frame = frame.f_back
    waiting, seen = list[BaseException]([error]), set[int]()
    while waiting:
        each = waiting.pop()
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None
        for other in (each.__cause__, each.__context__):
            began_in = (
                None
                if other is None or other.__traceback__ is None
                else other.__traceback__.tb_frame
            )
            # One that the step was handling when it made the launch is the user's.
            if other is not None and id(other) not in seen and id(began_in) not in running:
                waiting.append(other)
    return error


_MACHINE_ERRNO = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.EAGAIN,
    errno.ENOMEM,
)
_MACHINE_TEXT = re.compile(
    r"No space left on device|Disk quota exceeded|Too many open files|Resource temporarily"
    r" unavailable|Cannot allocate memory|"
    r"can't start new thread|can't allocate memory|No usable temporary directory"
)
"""Of errors that a compiler or an allocator passes on as text."""


def is_machine_failure(error: BaseException) -> bool:
    """True if the machine had no more of something that all processes share; a GPU's memory is the
    config's own matter.
    """
    if isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno in _MACHINE_ERRNO
    ):
        return True
    return isinstance(error, OSError | RuntimeError) and bool(_MACHINE_TEXT.search(str(error)))


def kind_of(error: BaseException, kind: FailureKind) -> FailureKind:
    """``kind``, but of a failure of the machine."""
    return FailureKind.MACHINE if is_machine_failure(error) else kind


class DistTuneError(RuntimeError):
    """A tuning could not be finished. Base of all errors of this package."""


class NoValidConfigError(DistTuneError):
    """No candidate of a site runs on all ranks."""


class MachineError(DistTuneError):
    """Half of a site's candidates, or all that were left, could not be tried: some rank's machine
    ran out of disk, memory or the like.
    """


class WrongResultError(DistTuneError, AssertionError):
    """A run returned a wrong result. The message says where, and by how much."""


class RankMismatchError(DistTuneError):
    """Ranks hold different things where these must be equal: steps, phases."""


class CacheMissError(DistTuneError):
    """``DIST_TUNE_MODE`` is ``require`` and no record fits.

    The message says which field of the key differs from the nearest one.
    """


class PeerFailedError(DistTuneError):
    """Another rank ended the tuning. The message names that rank and its exception, or says what
    each rank did last where a collective did not find all of them.

    Attributes:
        rank: global rank that failed first; -1 if that is not known.
        error: its exception as text, "Type: message".
    """

    def __init__(self, message: str, rank: int = -1, error: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.error = error


class StuckConfigError(PeerFailedError):
    """A config did not return on another rank, which has left with exit code 86.

    Named are rank, config and phase.
    """


class StoreGoneError(PeerFailedError):
    """The c10d store cannot be reached: the process that hosts it has exited or is stopped, or the
    link to it was cut.
    """


class JobEndedError(DistTuneError):
    """The program has come to its end while a step was tuned online."""


class AbsentRanksError(DistTuneError):
    """Ranks did not come in time: the timeout of their group, or the deadline.

    Attributes:
        ranks: global ranks that did not come.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class AloneError(DistTuneError):
    """Other ranks have passed the call that this rank would tune.

    Ends no call: it goes on with the configs it has.

    Attributes:
        ranks: global ranks that have passed it.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class StuckDeviceError(DistTuneError):
    """The GPU made no progress on queued replays before the deadline: a kernel spins, or waits for
    a signal that never comes.
    """


class CommunicatesError(DistTuneError):
    """A run that is to be tuned on one rank alone waits for other ranks."""


class CaptureError(DistTuneError):
    """A kernel has no config for its key while a CUDA graph is being captured, where nothing can be
    tuned.
    """


class NestedTuningError(DistTuneError):
    """A tuned step inside another one needs ranks that the outer one does not ask, or two threads
    tune at once.
    """


# Errors that a rank raises in place of a peer's: they say the same on every rank.
SHARED_ERRORS: dict[str, type[DistTuneError]] = {
    error.__name__: error
    for error in (
        MachineError,
        NoValidConfigError,
        RankMismatchError,
        CacheMissError,
        CaptureError,
        NestedTuningError,
        StuckDeviceError,
    )
}
