"""What a search is asked for, what it asks for, and what it is told: plain values between the engine and its callers.

Knows nothing of how candidates are chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from dist_tune.search.selection import Objective, ReducedTimes

SearchName = Literal["racing", "exhaustive"]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured, and what counts."""

    n_warmup: int = 3
    """Untimed replays before a race; of each candidate in an exhaustive search."""
    n_repeat: int = 5
    """Timed replays of a candidate in an exhaustive search and of a finalist in a round of finals; rungs of a race at most."""
    search: SearchName = "racing"
    objective: Objective = "closure"
    """Whether the whole closure's time decides, or the kernel's alone."""
    max_replays: int | None = None
    """Replays of the search at most; None: those of an exhaustive search, or of a race and one round of finals."""
    is_cold: bool = False
    """Whether the L2 cache is flushed before replays of the finals, too; it is before those of the race."""

    def __post_init__(self) -> None:
        bounds = (("n_warmup", self.n_warmup, 0), ("n_repeat", self.n_repeat, 1), ("max_replays", self.max_replays, 1))
        for name, value, least in bounds:
            if name == "max_replays" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {value!r}")
            if value < least:
                raise ValueError(f"need {name} >= {least}, got {value}")
        for name, text, known in (("search", self.search, SearchName), ("objective", self.objective, Objective)):
            if text not in get_args(known):
                raise ValueError(f"{name} must be one of {get_args(known)}, got {text!r}")


@dataclass(frozen=True, slots=True)
class Trial:
    """What one site does in one replay."""

    candidate: int
    is_timed: bool
    is_checked: bool = False
    """Whether what it returns is compared with what it should, where that is known."""


Replay = Mapping[str, Trial]
"""One replay: site -> trial. A site that is not in it is met for the first time."""


@dataclass(frozen=True, slots=True)
class PriorTimes:
    """What earlier tunings of a site found, with other lists of candidates in the same environment. Equal on all ranks."""

    agreed: dict[int, ReducedTimes] = field(default_factory=dict)
    """Of those that are candidates now as well."""
    winner: int | None = None
    """Of the latest one; None if it is no candidate now."""


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """What came of a candidate. Equal on all ranks."""

    agreed: ReducedTimes | None
    """None if it was not measured on all ranks."""
    failure: str | None
    """"rank r: reason" of the first rank on which it failed."""
    left: str | None
    """When it left the race; None for finalists and failures."""
