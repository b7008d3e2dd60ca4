"""Events of a tuning: one JSON object per line in ``rank-<i>.jsonl``, and what the log says of some of them to people.

What ``dist-tune report``, ``watch`` and ``trace`` read, other people's tools, and a restart; docs/events.md describes each field. Times of
day are seconds since 1970 by the clock of the rank's host, durations are seconds, times of kernels and steps are milliseconds.
A field that a later version adds is passed over by an earlier reader; a field that changes its meaning raises ``EVENTS_VERSION``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from dist_tune.output.words import amount

EVENTS_VERSION = 1

Phase = Literal["discover", "compile", "race", "finals", "settle"]
"""As the fields of ``Seconds`` in a record."""
PHASES: tuple[Phase, ...] = get_args(Phase)

Moment = Annotated[float, Field(ge=0.0, le=253_402_214_400.0)]
"""Seconds since 1970, until the end of the year 9999. A time outside comes from a damaged line, and arithmetic on it fails."""
Duration = Annotated[float, Field(ge=-1e10, le=1e10)]
"""Seconds; negative where a clock was set back."""


class Event(BaseModel):
    """Fields of every event. ``tuning``: the same text on all ranks; empty for the run's header."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    v: int = EVENTS_VERSION
    at: Moment
    rank: int
    tuning: str = ""


class RunBegun(Event):
    """Header: the first tuning of a process begins. More than one in a file: the job was started again."""

    kind: Literal["run"] = "run"
    date: str
    host: str
    pid: int
    world_size: int
    command: list[str]
    device: str
    versions: dict[str, str]


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
    kernel: str
    key: str
    configs: list[str]
    n_pruned: int = 0
    miss: str = ""
    cache_key: str = ""
    """Digest of its key in the cache, by which a restart finds it; empty without a cache."""


class PhaseBegun(Event):
    """A phase begins; the one before has ended. ``bound``: most replays that it takes, where it is known."""

    kind: Literal["phase"] = "phase"
    phase: Phase
    bound: int | None = None


class Started(Event):
    """A candidate is about to be launched for the first time: a hang can be told from outside."""

    kind: Literal["started"] = "started"
    site: int
    candidate: int
    replay: int


class Compiled(Event):
    """A candidate was compiled, or loaded from Triton's cache, by this rank; ``at`` is the end."""

    kind: Literal["compiled"] = "compiled"
    site: int
    candidate: int
    seconds: Duration
    worker: int = 0
    is_cached: bool = False


class Replayed(Event):
    """A replay has ended on the host, ``at``. ``candidates``: of each site, by its number. ``discarded``: why it does not count."""

    kind: Literal["replay"] = "replay"
    replay: int
    seconds: Duration
    candidates: dict[int, int] = {}
    discarded: str = ""


class Ranked(Event):
    """A rung of a site's race: how many are left, the best so far, and why those left that this rung took out."""

    kind: Literal["rung"] = "rung"
    site: int
    n_left: int
    best: int
    best_ms: float
    left: dict[int, str] = {}


class Dropped(Event):
    """A candidate cannot run here, or may not win. ``failure``: as in ``FailureKind``."""

    kind: Literal["dropped"] = "dropped"
    site: int
    candidate: int
    failure: str
    reason: str


class Met(Event):
    """A meeting of the ranks has ended, ``at``; with the wait for the last rank."""

    kind: Literal["meeting"] = "meeting"
    topic: str
    seconds: Duration


class Won(Event):
    """A site is settled. ``record``: the ``TuningRecord`` as JSON; ``record_id``: as ``dist-tune show`` takes it."""

    kind: Literal["winner"] = "winner"
    site: int
    winner: int
    reason: str
    record_id: str = ""
    record: dict[str, Any]


class TuningEnded(Event):
    """A tuning has ended on this rank, or ``error`` has ended it. Of several sites the differences in ``first_ms`` are added up."""

    kind: Literal["done"] = "done"
    seconds: dict[str, Duration] = {}
    n_replays: int = 0
    first_ms: float | None = None
    best_ms: float | None = None
    error: str = ""


class Told(Event):
    """A line of the log, of level WARNING and above."""

    kind: Literal["message"] = "message"
    level: str
    text: str


class Agreed(Event):
    """Times of a site's candidates that all ranks have agreed on after a batch of replays: totals so far. A restart begins with them."""

    kind: Literal["agreed"] = "agreed"
    site: int
    times: dict[int, tuple[tuple[Annotated[float, Field(gt=0)], float, float], int]]
    """Candidate -> milliseconds of its launch on the slowest rank, of the step, and the launches' median absolute deviation; replays."""


class UnderWay(Event):
    """From here on these (site, candidate) are under way, and no others: if the process ends by itself, one of them is the cause."""

    kind: Literal["under way"] = "under way"
    candidates: list[tuple[int, int]]


class Died(Event):
    """Processes have ended, on some rank, while candidates of a site were under way: deaths by candidate, 0 once it is in quarantine."""

    kind: Literal["died"] = "died"
    site: int
    deaths: dict[int, int]


AnyEvent = Annotated[
    RunBegun | TuningBegun | SiteMet | PhaseBegun | Started | Compiled | Replayed | Ranked | Dropped | Met | Won | TuningEnded | Told
    | Agreed | UnderWay | Died,
    Field(discriminator="kind"),
]  # fmt: skip
EVENT: TypeAdapter[AnyEvent] = TypeAdapter(AnyEvent)
"""Reads one line: ``EVENT.validate_json(line)`` raises pydantic's ValidationError for what is no event of this version."""
OF_JOURNALS_ALONE = (Agreed, UnderWay, Died)
OF_JOURNALS = (*OF_JOURNALS_ALONE, SiteMet, Dropped)


def log_line(event: Mapping[str, Any]) -> tuple[int, str]:
    """Level and text of an event's line in the log, from its fields; no text of one that is for programs alone."""
    match event:
        case {"kind": "run"}:
            versions = ", ".join(f"{name} {version}" for name, version in event["versions"].items())
            where = f"rank {event['rank']} on {event['host']}, pid {event['pid']}, device {event['device']}"
            return logging.INFO, f"run of {event['date']}: {where}, {versions}, command: {' '.join(event['command'])}"
        case {"kind": "site", "miss": ""}:  # a miss is told with those of other sites
            pruned = f", prune rules took out {event['n_pruned']} more" if event["n_pruned"] else ""
            return logging.INFO, f"site {event['site']} = {event['label']}: {amount(len(event['configs']), 'config')}{pruned}"
        case {"kind": "meeting"}:
            return logging.DEBUG, f"meeting={event['topic']!r} seconds={event['seconds']:.4f}"
        case {"kind": "done", "error": str(error)}:  # one that has come to its end has a summary
            return logging.ERROR, f"{event['tuning']} ended by {error}"
    return logging.NOTSET, ""
