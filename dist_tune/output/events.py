"""Events of a tuning: one JSON object per line in ``rank-<i>.jsonl``, beside the log that people read.

What ``dist-tune report``, ``watch`` and ``trace`` read, and other people's tools; the fields are described in docs/events.md. Times of
day are seconds since 1970 by the clock of the rank's host, durations are seconds, times of kernels and steps are milliseconds.
A field that a later version adds is passed over by an earlier reader; a field that changes its meaning raises ``EVENTS_VERSION``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

EVENTS_VERSION = 1

Phase = Literal["discover", "compile", "race", "finals", "settle"]
"""As the fields of ``Seconds`` in a record."""

Moment = Annotated[float, Field(ge=0.0, le=253_402_214_400.0)]
"""Seconds since 1970, until the end of the year 9999. A time outside comes from a damaged line, and arithmetic on it fails."""
Duration = Annotated[float, Field(ge=-1e10, le=1e10)]
"""Seconds; negative where a clock was set back."""


class Event(BaseModel):
    """Fields of every event."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    v: int = EVENTS_VERSION
    at: Moment
    """Seconds since 1970."""
    rank: int
    tuning: str = ""
    """The tuning that it belongs to, the same text on all ranks; empty for the run's header."""


class RunBegun(Event):
    """Header: the first tuning of a process begins. More than one in a file: the job was started again."""

    kind: Literal["run"] = "run"
    date: str
    """Local time with its offset, ISO 8601."""
    host: str
    pid: int
    world_size: int
    command: list[str]
    device: str
    versions: dict[str, str]
    """dist_tune, python, torch, triton, cuda."""


class TuningBegun(Event):
    """A closure's or function's tuning begins on this rank."""

    kind: Literal["tuning"] = "tuning"
    closure: str
    world_size: int
    options: dict[str, str | int | float | bool | None] = {}


class SiteMet(Event):
    """A site is tuned. ``site`` is its short number, which other events and the lines of the log name.

    A second one with the same number in a tuning replaces the first: with the reason of the miss, or another label.
    """

    kind: Literal["site"] = "site"
    site: int
    label: str
    """Kernel and key, as in the log."""
    kernel: str
    key: str
    configs: list[str]
    """The candidates' configs by index."""
    n_pruned: int = 0
    """Configs that prune rules took out before."""
    miss: str = ""
    """Reason why no record of the cache could be used."""
    cache_key: str = ""
    """Digest of its key in the cache, by which a restart finds it; empty without a cache."""


class PhaseBegun(Event):
    """A phase begins; the one before has ended."""

    kind: Literal["phase"] = "phase"
    phase: Phase
    bound: int | None = None
    """Most replays that it takes, where it is known."""


class Started(Event):
    """A candidate is about to be launched for the first time: a hang can be told from outside."""

    kind: Literal["started"] = "started"
    site: int
    candidate: int
    replay: int


class Compiled(Event):
    """A candidate was compiled, or loaded from Triton's cache, by this rank."""

    kind: Literal["compiled"] = "compiled"
    site: int
    candidate: int
    seconds: Duration
    """``at`` is its end."""
    worker: int = 0
    """Thread that did it, counted from 0."""
    is_cached: bool = False


class Replayed(Event):
    """A replay has ended."""

    kind: Literal["replay"] = "replay"
    replay: int
    seconds: Duration
    """On the host; ``at`` is its end."""
    candidates: dict[int, int] = {}
    """Site -> the candidate whose turn it was; the first and the last run have none."""
    discarded: str = ""
    """Reason why it does not count."""


class Ranked(Event):
    """A rung of a site's race: who is left, and the best so far."""

    kind: Literal["rung"] = "rung"
    site: int
    n_left: int
    best: int
    best_ms: float
    left: dict[int, str] = {}
    """Candidate -> reason, of those that this rung took out."""


class Dropped(Event):
    """A candidate cannot run here, or may not win."""

    kind: Literal["dropped"] = "dropped"
    site: int
    candidate: int
    failure: str
    """Kind of the failure, as in ``FailureKind``."""
    reason: str


class Met(Event):
    """A meeting of the ranks has ended."""

    kind: Literal["meeting"] = "meeting"
    topic: str
    seconds: Duration
    """With the wait for the last rank; ``at`` is its end."""


class Won(Event):
    """A site is settled."""

    kind: Literal["winner"] = "winner"
    site: int
    winner: int
    reason: str
    """Reason of the choice in words: "fastest step", "tied within noise, faster kernel", "only one that runs"."""
    record_id: str = ""
    """As ``dist-tune show`` takes it."""
    record: dict[str, Any]
    """The ``TuningRecord`` as JSON: all candidates with their times."""


class TuningEnded(Event):
    """A tuning has ended on this rank."""

    kind: Literal["done"] = "done"
    seconds: dict[str, Duration] = {}
    """By phase, as ``Seconds`` in a record."""
    n_replays: int = 0
    first_ms: float | None = None
    """The step with the first configs; None where it was not timed. Of several sites the differences are added up.

    Of a first config that left in the race it is that of its kernel.
    """
    best_ms: float | None = None
    """The step with the winners."""
    error: str = ""
    """What ended it early."""


class Told(Event):
    """A line of the log, of level WARNING and above."""

    kind: Literal["message"] = "message"
    level: str
    text: str


AnyEvent = Annotated[
    RunBegun | TuningBegun | SiteMet | PhaseBegun | Started | Compiled | Replayed | Ranked | Dropped | Met | Won | TuningEnded | Told,
    Field(discriminator="kind"),
]
EVENT: TypeAdapter[AnyEvent] = TypeAdapter(AnyEvent)
"""Reads one line: ``EVENT.validate_json(line)`` raises pydantic's ValidationError for what is no event of this version."""


class Agreed(Event):
    """Times of a site's candidates that all ranks have agreed on after a batch of replays: totals so far. A restart begins with them."""

    kind: Literal["agreed"] = "agreed"
    site: int
    times: dict[int, tuple[tuple[Annotated[float, Field(gt=0)], float, float], int]]
    """Candidate -> milliseconds of its launch on the slowest rank, of the step, and the launches' median absolute deviation; replays."""


class UnderWay(Event):
    """From here on these candidates are under way, and no others: if the process ends by itself, one of them is the cause."""

    kind: Literal["under way"] = "under way"
    candidates: list[tuple[int, int]]
    """Site and candidate."""
    is_alone: bool = False
    """True if all that runs beside it is known to run."""


class Died(Event):
    """Processes have ended, on some rank, while these candidates were under way."""

    kind: Literal["died"] = "died"
    site: int
    deaths: dict[int, int]
    """Candidate -> deaths of all attempts; 0 once it is in quarantine."""


OF_JOURNALS_ALONE = (Agreed, UnderWay, Died)
OF_JOURNALS = (*OF_JOURNALS_ALONE, SiteMet, Dropped)
JOURNAL_EVENT: TypeAdapter[RunBegun | SiteMet | Dropped | Agreed | UnderWay | Died] = TypeAdapter(
    Annotated[RunBegun | SiteMet | Dropped | Agreed | UnderWay | Died, Field(discriminator="kind")]
)
"""Reads one line of a journal, from which a restart goes on."""
