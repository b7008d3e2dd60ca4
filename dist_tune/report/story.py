"""Tunings as plain values: what the events of a job's last run say, or records. Pure: no files, no clocks.

``Story.take`` is the one mutator; events of one rank come in their order. Each rank tells of the sites by its own numbers, and one rank's
word counts: ranks agree on sites, candidates and winners. Times of day are seconds since 1970.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from pydantic import ValidationError

from dist_tune.cache import TuningRecord, step_times
from dist_tune.output import AnyEvent, RunBegun, closure_name, events, first_mistake, site_names

Kind = TypeVar("Kind", bound=events.Event)
_MIXED = "two jobs have written to this folder at once, and their events are mixed: set DIST_TUNE_LOG_DIR for each"
_NOT_ENDED = events.TuningEnded(at=0.0, rank=0)


@dataclass
class SiteStory:
    """One site as a rank tells of it, or the site of a record."""

    met: events.SiteMet
    rung: events.Ranked | None = None
    """The latest one."""
    n_dropped: int = 0
    won: events.Won | None = None
    unreadable: str = ""
    """The reason why ``record`` is None although the site is settled."""

    @cached_property
    def record(self) -> TuningRecord | None:
        """The record that came with the winner; to be asked for when all events are taken in."""
        try:
            return None if self.won is None else TuningRecord.model_validate(self.won.record)
        except ValidationError as error:
            self.unreadable = first_mistake(error)
            return None

    def config(self, index: int) -> str:
        """A candidate's config for people, without its hook, whose name says nothing of its speed."""
        words = self.met.configs[index].split(" ") if 0 <= index < len(self.met.configs) else [f"candidate {index}"]
        return " ".join(word for word in words if "pre_hook=" not in word)


@dataclass
class RankStory:
    """One rank in one tuning."""

    rank: int
    told: list[AnyEvent] = field(default_factory=list)
    sites: dict[int, SiteStory] = field(default_factory=dict)
    """By the number that this rank gives them."""
    started: list[events.Started] = field(default_factory=list)
    """Candidates launched for the first time in the replay that has yet to end; one of each site."""
    done: events.TuningEnded | None = None

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Its events of one kind, in order."""
        return [each for each in self.told if isinstance(each, kind)]

    @property
    def last_at(self) -> float:
        """Time of its last event."""
        return max((each.at for each in self.told), default=0.0)

    @property
    def phase(self) -> str:
        """The phase that it is in; "begun" before the first, "done" or "failed" after the last."""
        if self.done is not None:
            return "failed" if self.done.error else "done"
        phases = self.of(events.PhaseBegun)
        return phases[-1].phase if phases else "begun"

    def take(self, event: AnyEvent) -> None:
        """Take in one event."""
        self.told.append(event)
        match event:
            case events.SiteMet():  # a second one with the number has another label, or the reason of the miss
                self.sites.setdefault(event.site, SiteStory(event)).met = event
            case events.Ranked() if event.site in self.sites:
                self.sites[event.site].rung = event
            case events.Dropped() if event.site in self.sites:
                self.sites[event.site].n_dropped += 1
            case events.Won() if event.site in self.sites:
                self.sites[event.site].won = event
            case events.Started():
                self.started = [each for each in self.started if each.replay == event.replay] + [event]
            case events.PhaseBegun() | events.Replayed() | events.Met():  # told after the launches before them have come back
                self.started = []
            case events.TuningEnded():
                self.done, self.started = event, []


@dataclass
class TuningStory:
    """One tuning on all its ranks."""

    name: str
    closure: str = ""
    """The tuned function with its module."""
    world_size: int = 0
    """Ranks of the tuning, whether or not they have told anything."""
    ranks: dict[int, RankStory] = field(default_factory=dict)

    @property
    def teller(self) -> RankStory:
        """The rank whose word on sites and seconds counts: the first that has come to the end, else the first."""
        ranks = list(self.ranks.values())
        return next((rank for rank in ranks if rank.done and not rank.done.error), ranks[0])

    @property
    def sites(self) -> dict[int, SiteStory]:
        """By number."""
        return self.teller.sites

    @property
    def end(self) -> events.TuningEnded:
        """Seconds, replays, and the step before and after; without figures until it has ended."""
        return self.teller.done or _NOT_ENDED

    @property
    def title(self) -> str:
        """The closure's name without its module."""
        return closure_name(self.closure) or self.name

    @property
    def site_names(self) -> dict[int, str]:
        """Number -> kernel and key for people, no two alike."""
        sites = [each.met for each in self.sites.values()]
        names = site_names([(each.kernel, each.key) for each in sites], [f"{each.label} ({k})" for k, each in enumerate(sites, 1)])
        return dict(zip(self.sites, names, strict=True))

    @property
    def is_under_way(self) -> bool:
        """True until it has ended on all ranks that have told of it."""
        return not all(rank.done for rank in self.ranks.values())


@dataclass
class Story:
    """All tunings of one run of a job, or those that records tell of."""

    runs: dict[int, RunBegun] = field(default_factory=dict)
    """By rank."""
    tunings: dict[str, TuningStory] = field(default_factory=dict)
    messages: list[events.Told] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    """A sentence about each damaged file."""
    notes: list[str] = field(default_factory=list)
    """Sentences about what else is missing in the story."""

    @property
    def sites(self) -> list[tuple[TuningStory, SiteStory]]:
        """All sites with their tunings, in the order in which they were met."""
        return [(tuning, site) for tuning in self.tunings.values() for site in tuning.sites.values()]

    @property
    def last_at(self) -> float:
        """Time of the newest event of a tuning."""
        return max((rank.last_at for tuning in self.tunings.values() for rank in tuning.ranks.values()), default=0.0)

    def name_of(self, tuning: TuningStory) -> str:
        """The tuning's title; with the number of the call, "step, call 4", where several tunings share the title."""
        alike = [each for each in self.tunings.values() if each.title == tuning.title]
        call = tuning.name.rpartition(", call ")[2]
        number = f"call {call}" if call.isdecimal() else f"tuning {alike.index(tuning) + 1}"
        return tuning.title if len(alike) < 2 else f"{tuning.title}, {number}"

    def take(self, event: AnyEvent) -> None:
        """Take in one event."""
        if isinstance(event, RunBegun):
            self.runs[event.rank] = event
        elif isinstance(event, events.Told):
            self.messages.append(event)
        else:
            tuning = self.tunings.setdefault(event.tuning, TuningStory(event.tuning))
            if isinstance(event, events.TuningBegun):
                tuning.closure, tuning.world_size = event.closure, event.world_size
                tuning.ranks.pop(event.rank, None)  # of another closure of the same name
            rank = tuning.ranks.setdefault(event.rank, RankStory(event.rank))
            if rank.done and isinstance(event, events.Won | events.TuningEnded) and _MIXED not in self.notes:
                self.notes.append(_MIXED)  # the event of the last run alone follows the end
            rank.take(event)


def story_of_records(records: Iterable[TuningRecord]) -> Story:
    """What records tell: sites that were tuned together are one tuning. There are no events, so nothing of ranks and time."""
    story, together = Story(), defaultdict[str, list[TuningRecord]](list)
    for record in records:
        # Sites of one tuning have these in common.
        together[f"{record.closure} {record.seconds!r} {record.n_replays} {record.environment!r}"].append(record)
    for name, group in together.items():
        rank, first = RankStory(0), group[0]
        for k, each in enumerate(group):
            label, configs = f"{each.kernel} {each.key}", [one.config for one in each.candidates]
            rank.take(events.SiteMet(at=0.0, rank=0, site=k, label=label, kernel=each.kernel, key=each.key, configs=configs))
            rank.sites[k].won = events.Won.model_construct(record=each, reason=each.reason, record_id="")
        first_ms, best_ms = step_times(group)
        seconds = {phase: seconds for phase, seconds in first.spent.model_dump().items() if seconds}
        # Unchecked, because figures of a record have other limits than those of an event.
        rank.done = events.TuningEnded.model_construct(seconds=seconds, n_replays=first.n_replays, first_ms=first_ms, best_ms=best_ms)
        story.tunings[name] = TuningStory(name, first.closure, ranks={0: rank})
    return story


def numbers(ranks: Collection[int]) -> str:
    """The first eight of them: "0, 1, 2, 3, 4, 5, 6, 7, ..."."""
    return ", ".join(map(str, sorted(ranks)[:8])) + ", ..." * (len(ranks) > 8)


def shortened(text: str, limit: int = 240) -> str:
    """A message of the log for a terminal, which has all of it in the log."""
    return text if len(text) <= limit else f"{text[:limit]}\N{HORIZONTAL ELLIPSIS}"
