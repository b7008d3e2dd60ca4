"""Events of a tuning: one JSON object per line in ``rank-<i>.jsonl``, and what the log says of some
of them to people.

What ``dist-tune report`` and ``diff`` read, other people's tools, and a restart.
docs/reference.md has the docstrings: ``python -m tests.event_lists`` writes them there.
A reader passes over a field that a later version adds.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from dist_tune.log.words import amount, printable

EVENTS_VERSION: Literal[1] = 1

Phase = Literal["discover", "compile", "race", "finals", "settle"]
"""As the fields of ``Seconds`` in a record."""
PHASES: tuple[Phase, ...] = get_args(Phase)

Moment = Annotated[float, Field(ge=0.0, le=253_402_214_400.0)]
"""Seconds since 1970, until the end of the year 9999.

A time outside comes from a damaged line, and arithmetic on it fails.
"""
Duration = Annotated[float, Field(ge=-1e10, le=1e10)]
"""Seconds; negative where a clock was set back."""
SiteNumber = int
"""Number of its site."""
ConfigIndex = int
"""Index of its config."""


class Event(BaseModel):
    """All kinds have these."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    v: Literal[1] = EVENTS_VERSION
    """Version of the schema.

    A later version may add fields and kinds; a field that changes its meaning raises the version.
    """
    at: Moment
    """Seconds since 1970, at the end of what has a duration."""
    rank: int
    """Rank that writes."""
    tuning: str = ""
    """Tuning, as "step, call 3": the same text on all ranks; empty in ``run``."""


class RunBegun(Event):
    """The first tuning of a process begins.

    A job that was started again has several in one file.
    """

    kind: Literal["run"] = "run"
    date: str
    """Local time with its offset, ISO 8601."""
    host: str
    """Machine."""
    pid: int
    """Process."""
    world_size: int
    """Ranks of the tuning."""
    command: list[str]
    """The process's command line."""
    device: str
    """Name of the GPU, or kind of the processor."""
    versions: dict[str, str]
    """Name to version: dist_tune, python, torch, triton, cuda (of other GPUs as "hip 6.4.2")."""


class TuningBegun(Event):
    """The tuning of a step or function begins on this rank."""

    kind: Literal["tuning"] = "tuning"
    closure: str
    """The decorated function, with its module."""
    world_size: int
    """Ranks that decide."""
    options: dict[str, str | int | float | bool | None] = {}
    """Options of the decorator, by name."""


class SiteMet(Event):
    """A site is tuned.

    A second event with its number replaces the first, because the reason of the miss is known
    later.
    """

    kind: Literal["site"] = "site"
    site: SiteNumber
    """Number on this rank, as in the log. Other ranks may number otherwise: compare ``label``."""
    label: str
    """Kernel and key, the same on all ranks; "#2" marks the second kernel of that name and key."""
    kernel: str
    """Name of the kernel or function."""
    key: str
    """Tuning key."""
    configs: list[str]
    """Configs of the candidates, by index."""
    n_pruned: int = 0
    """Configs that prune rules took out before."""
    miss: str = ""
    """Reason why no record could be used; empty until it is known."""
    cache_key: str = ""
    """Digest of its key in the cache, by which a restart finds it; empty without a cache."""


class PhaseBegun(Event):
    """A phase begins, and the one before has ended.

    A site that is met late brings a phase again.
    """

    kind: Literal["phase"] = "phase"
    phase: Phase
    """discover, compile, race, finals or settle (the apply phase)."""


class Ranked(Event):
    """Candidates of a site have left the race or the finals."""

    kind: Literal["rung"] = "rung"
    site: SiteNumber
    n_left: int
    """Candidates that go on."""
    best: ConfigIndex
    """Fastest candidate so far."""
    best_ms: float
    """Time of its launch on the slowest rank."""
    left: dict[ConfigIndex, str] = {}
    """Candidate to reason, of those that have left since the event before."""


class Dropped(Event):
    """A candidate cannot run, or may not win. Each rank writes it once."""

    kind: Literal["dropped"] = "dropped"
    site: SiteNumber
    candidate: ConfigIndex
    failure: str
    """compile, load, launch, wrong result, clock, stuck, machine or quarantined."""
    reason: str
    """For people; names the rank that found it, unless it is this one."""


class Met(Event):
    """An exchange between the ranks has ended."""

    kind: Literal["meeting"] = "meeting"
    topic: str
    """manifest, compiled, loaded, report, done, ..."""
    seconds: Duration
    """Duration, with the wait for the last rank."""


class Won(Event):
    """A site has its winner."""

    kind: Literal["winner"] = "winner"
    site: SiteNumber
    winner: ConfigIndex
    reason: str
    """Why it was chosen, as ``TuningRecord.reason``."""
    record_id: str = ""
    """Id for ``dist-tune show``; empty where no record is kept."""
    record: dict[str, Any]
    """The ``TuningRecord``: all candidates with their times, failures and reasons."""


class TuningEnded(Event):
    """A tuning has ended on this rank."""

    kind: Literal["done"] = "done"
    seconds: dict[str, Duration] = {}
    """By phase, as ``Seconds`` of a record."""
    n_replays: int = 0
    """Replays, with the first and the last run."""
    first_ms: float | None = None
    """The step with the first configs; null if it was not timed.

    Of several sites the differences that their first configs make are
    added up, in the step's time, or in the kernel's if the first config has left in the race.
    """
    best_ms: float | None = None
    """The step with the winners; null if it was not timed."""
    error: str = ""
    """Error that ended the tuning; empty if it came to its end."""
    is_cut_off: bool = False
    """True if the program ended first: ``error`` says how far the tuning had come."""


class Told(Event):
    """A line of the log, of level WARNING or above.

    The error that ends a tuning is in ``done`` alone.
    """

    kind: Literal["message"] = "message"
    level: str
    """WARNING or ERROR."""
    text: str
    """The line, with the labels of sites."""


class Agreed(Event):
    """Times that all ranks have agreed on after a batch of replays: totals so far.

    A restart begins with them.
    """

    kind: Literal["agreed"] = "agreed"
    site: SiteNumber
    times: dict[ConfigIndex, tuple[tuple[Annotated[float, Field(gt=0)], float, float], int]]
    """Candidate to ``[[kernel, step, spread of the kernel], replays]``, in milliseconds on the
    slowest rank; the spread is the median
    absolute deviation.
    """


class UnderWay(Event):
    """From here on these candidates run, and no others: if the process ends by itself, one of them
    is the cause.
    """

    kind: Literal["under way"] = "under way"
    candidates: list[tuple[SiteNumber, ConfigIndex]]
    """Pairs of site and candidate."""


class Died(Event):
    """Processes have ended, on some rank, while candidates of a site were under way."""

    kind: Literal["died"] = "died"
    site: SiteNumber
    deaths: dict[ConfigIndex, int]
    """Candidate to deaths in all attempts, on the rank with the most; 0 once it is in quarantine.
    """


AnyEvent = Annotated[
    RunBegun
    | TuningBegun
    | SiteMet
    | PhaseBegun
    | Ranked
    | Dropped
    | Met
    | Won
    | TuningEnded
    | Told
    | Agreed
    | UnderWay
    | Died,
    Field(discriminator="kind"),
]
EVENT: TypeAdapter[AnyEvent] = TypeAdapter(AnyEvent)
"""Reads one line: ``EVENT.validate_json(line)`` raises pydantic's ValidationError for what is no
event of this version.
"""
OF_JOURNALS_ALONE = (Agreed, UnderWay, Died)
OF_JOURNALS = (*OF_JOURNALS_ALONE, SiteMet, Dropped)


def log_line(event: Mapping[str, Any]) -> tuple[int, str]:
    """Level and text of an event's line in the log, from its fields; no text of one that is for
    programs alone.
    """
    match event:
        case {"kind": "run"}:
            others = ", ".join(
                f"{name} {version}"
                for name, version in event["versions"].items()
                if name != "dist_tune"
            )
            where = (
                f"rank {event['rank']} of {event['world_size']} on {event['host']}, pid"
                f" {event['pid']}, {event['device']}"
            )
            ours = f"dist_tune {event['versions'].get('dist_tune', '')}"
            lines = (
                f"{ours}: {where}",
                f"  {event['date']}, {others}",
                f"  {' '.join(event['command'])}",
            )
            return logging.INFO, "\n".join(map(printable, lines))
        case {"kind": "site", "miss": ""}:  # a miss is told with those of other sites
            pruned = f", prune rules took out {event['n_pruned']} more" if event["n_pruned"] else ""
            return (
                logging.DEBUG,
                (
                    f"site {event['site']} = {event['label']}:"
                    f" {amount(len(event['configs']), 'config')}{pruned}"
                ),
            )
        case {"kind": "meeting"}:
            return logging.DEBUG, f"meeting={event['topic']!r} seconds={event['seconds']:.4f}"
        case {"kind": "done", "is_cut_off": True}:  # a line says so
            return logging.NOTSET, ""
        case {"kind": "done", "error": str(error)}:  # one that has come to its end has a summary
            return logging.ERROR, f"{event['tuning']} ended by {error}"
    return logging.NOTSET, ""
