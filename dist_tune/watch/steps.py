"""The steps of a tuning as its watchdog is told of them. Knows no ranks and no threads."""

from __future__ import annotations

from enum import Enum
from math import inf
from typing import NamedTuple

from dist_tune.search import Replay


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
