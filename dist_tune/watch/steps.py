"""The steps of a tuning, and the launches of candidates in them, as its watchdog is told of them. Knows no ranks and no threads."""

from __future__ import annotations

from enum import Enum
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from dist_tune.search import Replay

if TYPE_CHECKING:
    from dist_tune.watch.watchdog import Watchdog


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
