"""Tunings as plain values: what the events of a job's last run say, or records.

Pure: no files, no clocks.

``take`` is the one mutator; events of one rank come in their order. Each rank tells of the sites by
its own numbers, and one rank's word counts: ranks agree on sites, candidates and winners. Times of
day are seconds since 1970.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import UTC
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from dist_tune.log import AnyEvent, RunBegun, closure_name, events, first_mistake, site_names
from dist_tune.records import TuningRecord, account

_MIXED = (
    "two jobs have written to this folder at once, and their events are mixed: set"
    " DIST_TUNE_LOG_DIR for each"
)


@dataclass
class SiteStory:
    """One site as a rank tells of it, or the site of a record."""

    met: events.SiteMet
    rung: events.Ranked | None = None
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
        """A candidate's config for people."""
        return (
            self.met.configs[index] if 0 <= index < len(self.met.configs) else f"candidate {index}"
        )


@dataclass
class RankStory:
    """One rank in one tuning."""

    rank: int
    sites: dict[int, SiteStory] = field(default_factory=dict)
    """By the number that this rank gives them."""
    done: events.TuningEnded | None = None

    def take(self, event: AnyEvent) -> None:
        """Take in one event."""
        match event:
            # A second one with the number has another label, or the reason of the miss
            case events.SiteMet():
                self.sites.setdefault(event.site, SiteStory(event)).met = event
            case events.Ranked() if event.site in self.sites:
                self.sites[event.site].rung = event
            case events.Dropped() if event.site in self.sites:
                self.sites[event.site].n_dropped += 1
            case events.Won() if event.site in self.sites:
                self.sites[event.site].won = event
            case events.TuningEnded():
                self.done = event


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
        """The rank whose word on sites and seconds counts: the first that has come to the end, else
        the first.
        """
        ranks = list(self.ranks.values())
        return next((rank for rank in ranks if rank.done and not rank.done.error), ranks[0])

    @property
    def sites(self) -> dict[str, SiteStory]:
        """By kernel and key for people, no two alike."""
        sites = self.teller.sites.values()
        otherwise = [f"{each.met.label} ({k})" for k, each in enumerate(sites, 1)]
        return dict(
            zip(
                site_names([(each.met.kernel, each.met.key) for each in sites], otherwise),
                sites,
                strict=True,
            )
        )

    @property
    def title(self) -> str:
        """The closure's name without its module."""
        return closure_name(self.closure) or self.name


@dataclass
class Story:
    """All tunings of one run of a job, or those that records tell of."""

    runs: dict[int, RunBegun] = field(default_factory=dict)
    """By rank."""
    tunings: dict[str, TuningStory] = field(default_factory=dict)
    messages: list[events.Told] = field(default_factory=list)
    damage: dict[int, str] = field(default_factory=dict)
    """Rank -> a sentence about its damaged file, and what is left out for it."""
    notes: list[str] = field(default_factory=list)
    """Sentences about what else is missing in the story."""

    @property
    def sites(self) -> list[tuple[TuningStory, str, SiteStory]]:
        """All sites with their tunings and names, in the order in which they were met."""
        return [
            (tuning, name, site)
            for tuning in self.tunings.values()
            for name, site in tuning.sites.items()
        ]

    def name_of(self, tuning: TuningStory) -> str:
        """The tuning's title; with the number of the call, "step, call 4", where several tunings
        share the title.
        """
        is_alone = sum(each.title == tuning.title for each in self.tunings.values()) == 1
        return tuning.title if is_alone else f"{tuning.title}, {tuning.name.rpartition(', ')[2]}"

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
            if (
                rank.done
                and isinstance(event, events.Won | events.TuningEnded)
                and _MIXED not in self.notes
            ):
                self.notes.append(_MIXED)  # the event of the last run alone follows the end
            rank.take(event)


def story_of_records(records: Iterable[TuningRecord]) -> Story:
    """What records tell: sites that were tuned together are one tuning.

    There are no events, so nothing of ranks and time.
    """
    story, together = Story(), defaultdict[str, list[TuningRecord]](list)
    for record in records:
        # Sites of one tuning have these in common.
        together[
            f"{record.closure} {record.seconds!r} {record.n_replays} {record.environment!r}"
        ].append(record)
    for number, group in enumerate(together.values(), 1):
        first, of = group[0], dict[str, Any](at=0.0, rank=0, tuning=f"tuning {number}")
        versions = first.environment.model_dump(
            include={"python", "torch", "triton", "cuda"}, exclude_none=True
        )
        date = f"{first.tuned_at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
        header = dict[str, Any](
            date=date,
            device=first.environment.device,
            world_size=first.environment.world_size,
            versions=versions,
        )
        story.runs[len(story.runs)] = RunBegun(**of, **header, host="", pid=0, command=[])
        story.take(events.TuningBegun(closure=first.closure, world_size=1, **of))
        for k, each in enumerate(group):
            label, configs = f"{each.kernel} {each.key}", [one.config for one in each.candidates]
            story.take(
                events.SiteMet(
                    site=k, label=label, kernel=each.kernel, key=each.key, configs=configs, **of
                )
            )
            story.take(
                events.Won.model_construct(
                    site=k, record=each, reason=each.reason, record_id="", **of
                )
            )
        first_ms, best_ms = account.step_times(group)
        # Unchecked, because figures of a record have other limits than those of an event.
        of |= {
            "seconds": first.spent.model_dump(),
            "n_replays": first.n_replays,
            "first_ms": first_ms,
            "best_ms": best_ms,
            "error": "",
        }
        story.take(events.TuningEnded.model_construct(**of))
    return story


def numbers(ranks: Collection[int]) -> str:
    """The first eight of them: "0, 1, 2, 3, 4, 5, 6, 7, ..."."""
    first = ", ".join(map(str, sorted(ranks)[:8]))
    return f"{first}, ..." if len(ranks) > 8 else first
