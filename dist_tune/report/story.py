"""A run of tunings as plain values: what events or records say together. Pure: no files, no clocks.

``Story.take`` is the one mutator: it takes in the events of all ranks, in any order between ranks. Times of day are seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from pydantic import ValidationError

from dist_tune.cache import TuningRecord, step_times
from dist_tune.output import AnyEvent, RunBegun, closure_name, events, first_mistake, site_names

PHASES = ("discover", "compile", "race", "finals", "settle")
_MIXED = "two jobs have written to this folder at once, and their events are mixed: set DIST_TUNE_LOG_DIR for each"


@dataclass(slots=True)
class RankStory:
    """One rank in one tuning: its events by kind, each in order."""

    rank: int
    begun_at: float = 0.0
    last_at: float = 0.0
    """Time of its last event."""
    world_size: int = 0
    """Ranks of the tuning, as this one knows them."""
    phases: list[events.PhaseBegun] = field(default_factory=list)
    compiles: list[events.Compiled] = field(default_factory=list)
    replays: list[events.Replayed] = field(default_factory=list)
    meetings: list[events.Met] = field(default_factory=list)
    started: list[events.Started] = field(default_factory=list)
    """Candidates launched for the first time in the replay that has yet to end; one of each site."""
    labels: dict[int, str] = field(default_factory=dict)
    """Number of a site on this rank -> its label."""
    done: events.TuningEnded | None = None

    @property
    def phase(self) -> str:
        """The phase that it is in; "begun" before the first, "done" or "failed" after the last."""
        if self.done is not None:
            return "failed" if self.done.error else "done"
        return self.phases[-1].phase if self.phases else "begun"


@dataclass(slots=True)
class SiteStory:
    """One site of a tuning, or the site of a record."""

    met: events.SiteMet
    rungs: list[events.Ranked] = field(default_factory=list)
    """Of the rank that told first."""
    dropped: dict[int, events.Dropped] = field(default_factory=dict)
    """By candidate."""
    won: events.Won | None = None
    record: TuningRecord | None = None
    """None until the site is settled."""
    unreadable: str = ""
    """The reason why the record that came with the winner cannot be read."""

    def config(self, index: int) -> str:
        """A candidate's config for people, without its hook, whose name says nothing of its speed."""
        words = self.met.configs[index].split(" ") if 0 <= index < len(self.met.configs) else [f"candidate {index}"]
        return " ".join(word for word in words if "pre_hook=" not in word)

    def take(self, event: events.Ranked | events.Dropped | events.Won) -> None:
        """Take in what a rank tells; the first word counts."""
        if isinstance(event, events.Dropped):
            self.dropped.setdefault(event.candidate, event)
        elif isinstance(event, events.Ranked):
            if not self.rungs or self.rungs[0].rank == event.rank:
                self.rungs.append(event)
        elif self.won is None:
            self.won = event
            try:
                self.record = TuningRecord.model_validate(event.record)
            except ValidationError as error:
                self.unreadable = first_mistake(error)


@dataclass(slots=True)
class TuningStory:
    """One tuning with all its sites and ranks."""

    name: str
    closure: str = ""
    sites: dict[str, SiteStory] = field(default_factory=dict)
    """By label."""
    ranks: dict[int, RankStory] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase, on the first rank that has told them."""
    n_replays: int = 0
    first_ms: float | None = None
    best_ms: float | None = None
    """The step with the first configs, and with the winners, on the slowest rank."""

    @property
    def title(self) -> str:
        """The closure's name without its module."""
        return closure_name(self.closure) or self.name

    @property
    def site_names(self) -> dict[str, str]:
        """Label -> kernel and key for people, no two alike."""
        sites = [each.met for each in self.sites.values()]
        names = site_names([(each.kernel, each.key) for each in sites], [f"{each.label} ({k})" for k, each in enumerate(sites, 1)])
        return dict(zip(self.sites, names, strict=True))

    @property
    def world_size(self) -> int:
        """Ranks of the tuning, whether or not they have told anything."""
        return max((rank.world_size for rank in self.ranks.values()), default=0)

    @property
    def is_under_way(self) -> bool:
        """True until it has ended on all ranks that have told of it."""
        return not all(rank.done for rank in self.ranks.values())


@dataclass(slots=True)
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
    def world_size(self) -> int | None:
        """Ranks of the job, by the header that was written last."""
        newest = max(self.runs.values(), key=lambda run: run.at, default=None)
        return newest.world_size if newest else None

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
            if event.rank in self.runs:  # the job was started again while it was watched
                self._forget(event.rank)
            self.runs[event.rank] = event
            return
        if isinstance(event, events.Told):
            self.messages.append(event)
            return
        tuning = self.tunings.setdefault(event.tuning, TuningStory(event.tuning))
        rank = tuning.ranks.setdefault(event.rank, RankStory(event.rank, begun_at=event.at))
        rank.last_at = max(rank.last_at, event.at)
        if rank.done and isinstance(event, events.Won | events.TuningEnded) and _MIXED not in self.notes:
            self.notes.append(_MIXED)  # the event of the last run alone follows the end
        if isinstance(event, events.Ranked | events.Dropped | events.Won):
            site = tuning.sites.get(rank.labels.get(event.site, ""))
            if site is not None:  # else told by a line that was passed over
                site.take(event)
            return
        match event:
            case events.TuningBegun():
                tuning.closure, rank.world_size = event.closure, event.world_size
                rank.done = None  # another closure of the same name
            case events.SiteMet():
                _meet(tuning, rank, event)
            case events.PhaseBegun():
                rank.phases.append(event)
                rank.started = []
            case events.Started():
                rank.started = [each for each in rank.started if each.replay == event.replay] + [event]
            case events.Compiled():
                rank.compiles.append(event)
            case events.Replayed():
                rank.replays.append(event)
                rank.started = [each for each in rank.started if each.replay > event.replay]
            case events.Met():
                rank.meetings.append(event)
                rank.started = []  # ranks meet between replays only, so its launch has come back
            case events.TuningEnded():
                rank.done, rank.started = event, []
                tuning.seconds = tuning.seconds or event.seconds
                tuning.n_replays = max(tuning.n_replays, event.n_replays)
                tuning.first_ms = max(filter(None, (tuning.first_ms, event.first_ms)), default=None)
                tuning.best_ms = max(filter(None, (tuning.best_ms, event.best_ms)), default=None)

    def leave_out_stale_ranks(self) -> None:
        """Forget ranks whose files were left behind by a job with another number of ranks."""
        n_ranks = self.world_size or 0
        stale = [rank for rank, run in self.runs.items() if rank >= n_ranks or run.world_size != n_ranks]
        for rank in stale:
            self._forget(rank)
        if stale:
            self.notes.append(f"files of an earlier job with another number of ranks are left out: ranks {numbers(stale)}")

    def _forget(self, rank: int) -> None:
        del self.runs[rank]
        self.messages = [each for each in self.messages if each.rank != rank]
        for tuning in self.tunings.values():
            tuning.ranks.pop(rank, None)
        self.tunings = {name: tuning for name, tuning in self.tunings.items() if tuning.ranks}


def _meet(tuning: TuningStory, rank: RankStory, event: events.SiteMet) -> None:
    """Take in a site, or what a later event of the same number says of it: another label, or the reason of the miss."""
    before, rank.labels[event.site] = rank.labels.get(event.site, event.label), event.label
    if before != event.label and not any(before in each.labels.values() for each in tuning.ranks.values()):
        tuning.sites.pop(before, None)
    site = tuning.sites.setdefault(event.label, SiteStory(event))
    site.met = site.met if site.met.miss else site.met.model_copy(update={"miss": event.miss})


def story_of_records(records: Iterable[TuningRecord]) -> Story:
    """What records tell: sites that were tuned together are one tuning. There are no events, so nothing of ranks and time."""
    story = Story()
    for k, record in enumerate(records):
        # Sites of one tuning have these in common.
        name = f"{record.closure} {record.seconds!r} {record.n_replays} {record.environment!r}"
        tuning = story.tunings.setdefault(name, TuningStory(name, record.closure, n_replays=record.n_replays))
        tuning.seconds = {phase: seconds for phase, seconds in record.spent.model_dump().items() if seconds}
        label, configs = f"{record.kernel} {record.key}", [each.config for each in record.candidates]
        met = events.SiteMet(at=0.0, rank=0, site=k, label=label, kernel=record.kernel, key=record.key, configs=configs)
        tuning.sites[f"{label} #{k}"] = SiteStory(met, record=record)  # two records of one key may differ in their candidates
    for tuning in story.tunings.values():
        tuning.first_ms, tuning.best_ms = step_times([site.record for site in tuning.sites.values() if site.record])
    return story


def numbers(ranks: Collection[int]) -> str:
    """The first eight of them: "0, 1, 2, 3, 4, 5, 6, 7, ..."."""
    return ", ".join(map(str, sorted(ranks)[:8])) + ", ..." * (len(ranks) > 8)


def shortened(text: str, limit: int = 240) -> str:
    """A message of the log for a terminal, which has all of it in the log."""
    return text if len(text) <= limit else f"{text[:limit]}\N{HORIZONTAL ELLIPSIS}"
