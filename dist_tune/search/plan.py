"""Plain values between the race and its callers: the plan, scheduled replays, times and results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple, get_args

from dist_tune.validation import check_number, spelled

Objective = Literal["closure", "kernel", "graph"]
SearchName = Literal["racing", "exhaustive", "guided", "online"]
NOT_TRIED = "not tried: the search did not come to it"
"""The reason why a candidate was neither compiled nor timed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers of replays, and the time to be minimized."""

    n_warmup: int = 3
    """Untimed replays before a race; of each candidate in an exhaustive search."""
    n_repeat: int = 5
    """Timed replays of a candidate in an exhaustive search and of a finalist in a round of finals;
    rungs of a race at most.
    """
    search: SearchName | None = "racing"
    """None: guided where a site has many candidates for the compile threads that there are, racing
    elsewhere.
    """
    objective: Objective = "closure"
    """Decide by the time of the whole closure, of the kernel alone, or of the closure as a CUDA
    graph in the finals.
    """
    budget_s: float | None = None
    """Seconds after which the search ends with what it knows; None: no such bound."""
    is_cold: bool = False
    """True if the L2 cache is flushed before replays of the finals, too; it is before those of the
    race.
    """
    n_tried: int | None = None
    """Configs of a function that a guided search tries; None: as many as it needs."""
    in_waves: bool = False
    """True if all configs of a function race in waves, in their order; else all at once."""

    def __post_init__(self) -> None:
        check_number("n_warmup", self.n_warmup, 0)
        check_number("n_repeat", self.n_repeat, 1)
        if self.budget_s is not None:
            check_number("budget_s", self.budget_s, 1e-3, (int, float))
        for name, text, known in (
            ("search", self.search, SearchName),
            ("objective", self.objective, Objective),
        ):
            if text not in get_args(known) and not (name == "search" and text is None):
                raise ValueError(f"{name} must be one of {get_args(known)}, got {spelled(text)}")
        if self.objective == "graph" and self.search in ("exhaustive", "online"):
            raise ValueError(
                'objective="graph" compares finalists by captured replays of the step:'
                f" search={self.search!r} has none"
            )

    def __str__(self) -> str:
        """The options as a user writes them, for messages; the same on all ranks if the plan is."""
        given = {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) is not None and value is not False
        }
        return ", ".join(f"{name}={value!r}" for name, value in given.items())


@dataclass(frozen=True, slots=True)
class Trial:
    """The part of one site in one replay."""

    candidate: int
    is_timed: bool
    is_checked: bool = False
    """True if the result is compared with the reference, if there is one."""


Replay = Mapping[str, Trial]
"""One replay: site -> trial. A site that is not in it is met for the first time."""


class Times(NamedTuple):
    """Times of one candidate: one rank's medians over its undisturbed replays, or their MAX over
    ranks. Milliseconds. A JSON array.
    """

    kernel_ms: float
    """One launch."""
    closure_ms: float
    """One replay, less the time that other sites' candidates added to it."""
    spread_ms: float = 0.0
    """Median absolute deviation (MAD) of the launches, on the slowest rank."""
    rest_spread_ms: float = 0.0
    """MAD of the closure less this site's launches."""
    n_replays: int = 1
    """Replays of the whole closure that count, on the rank with the fewest."""
    n_launches: int = 1
    """Launches a replay."""
    n_timed: int = 1
    """Replays in which launches were timed, on the rank with the fewest."""
    n_owners: int = 1
    """Ranks that measured it."""
    typical_ms: float | None = None
    """One launch on the middle rank; None if it is not known."""
    rank_latencies_ms: dict[int, float] = {}  # noqa: RUF012  # a tuple's default is shared, and never written to
    """Global rank -> its median launch, of all ranks or of the slowest and the fastest."""

    @property
    def launches_ms(self) -> float:
        """All launches of a replay."""
        return self.kernel_ms * self.n_launches


class Account(NamedTuple):
    """What calls have taken, on one rank, or on the rank with the most; seconds."""

    job_s: float = 0.0
    """All calls since the tuning began."""
    spent_s: float = 0.0
    """Of it, beyond what plain calls would have taken."""
    trials_s: float = 0.0
    """Of that, in calls with trials."""
    call_s: float = 0.0
    """A plain call; 0 before there was one."""


NOTHING = Account()


@dataclass(frozen=True, slots=True)
class PriorTimes:
    """Results of a site's earlier tunings with other candidate lists in the same environment.

    Equal on all ranks.
    """

    times: dict[int, Times] = field(default_factory=dict)
    """Only of configs that are candidates now."""
    winner: int | None = None
    """Of the latest tuning; None if it is no candidate now."""
    near: int | None = None
    """The candidate that the first rank uses for the nearest other key."""
    suspects: list[int] = field(default_factory=list)
    """Candidates under way on some rank when its process died: they run last, and alone."""
    attempt: dict[int, Times] = field(default_factory=dict)
    """Those of them that an attempt at this very tuning has measured, which its program has ended.
    """


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """The result of one candidate. Equal on all ranks."""

    times: Times | None
    """None if it was not measured on all ranks."""
    failure: str | None
    """"rank r: reason" of the first rank on which it failed."""
    left: str | None
    """The rung or round after which it left, or why it was not tried; None for finalists and
    failures.
    """
    equal_to: int | None = None
    """The candidate with the same kernel that raced for both; the times are that one's."""
