"""A run of tunings as plain values: what events or records say together. Pure: no files, no clocks.

``Story.take`` is the one mutator: it takes in the events of all ranks, in any order between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dist_tune.cache import TuningRecord
from dist_tune.output import AnyEvent, RunBegun, closure_name, events, site_names

MAX_SPANS = 100_000
"""Of one kind on one rank in one tuning; later ones are counted and not kept."""
_MIXED = "two jobs have written to this folder at once, and their events are mixed: set DIST_TUNE_LOG_DIR for each"


class Span(NamedTuple):
    """Something with a begin and an end, in seconds since 1970."""

    begin: float
    end: float
    name: str
    lane: int = 0
    """Of a compilation its worker."""


@dataclass(slots=True)
class RankStory:
    """One rank in one tuning."""

    rank: int
    begun_at: float = 0.0
    world_size: int = 0
    """Ranks of the tuning, as this one knows them."""
    last_at: float = 0.0
    """Time of its last event."""
    phases: list[tuple[str, float, int | None]] = field(default_factory=list)
    """Phase, its begin, and its replays at most."""
    compiles: list[Span] = field(default_factory=list)
    replays: list[Span] = field(default_factory=list)
    meetings: list[Span] = field(default_factory=list)
    started: list[events.Started] = field(default_factory=list)
    """Candidates launched for the first time in the replay that has yet to end; one of each site."""
    n_compiled: int = 0
    n_replays: int = 0
    n_meetings: int = 0
    n_lost_spans: int = 0
    labels: dict[int, str] = field(default_factory=dict)
    """Number of a site on this rank -> its label."""
    is_done: bool = False
    total_s: float = 0.0
    """Seconds of its phases, as it tells them at its end; 0 before."""
    error: str = ""

    @property
    def phase(self) -> str:
        """The phase that it is in; "begun" before the first, "done" or "failed" after the last."""
        if self.is_done:
            return "failed" if self.error else "done"
        return self.phases[-1][0] if self.phases else "begun"

    def phase_spans(self) -> list[Span]:
        """The phases so far; the last one ends with the last event, or with the tuning's seconds: records are written after them."""
        if not self.phases:  # their lines were passed over
            return []
        last_at = min(self.last_at, self.begun_at + self.total_s) if self.total_s else self.last_at
        ends = [begin for _, begin, _ in self.phases[1:]] + [last_at]
        return [Span(begin, max(begin, end), name) for (name, begin, _), end in zip(self.phases, ends, strict=True)]


@dataclass(slots=True)
class SiteStory:
    """One site of a tuning, or the site of a record."""

    number: int
    label: str
    kernel: str
    key: str
    configs: list[str]
    n_pruned: int = 0
    miss: str = ""
    rungs: list[events.Ranked] = field(default_factory=list)
    dropped: dict[int, events.Dropped] = field(default_factory=dict)
    won: events.Won | None = None
    record: TuningRecord | None = None
    """None until the site is settled."""
    unreadable: str = ""
    """The reason why the record that came with the winner cannot be read."""

    def config(self, index: int) -> str:
        """A candidate's config for people, without its hook, whose name says nothing of its speed."""
        words = self.configs[index].split(" ") if 0 <= index < len(self.configs) else [f"candidate {index}"]
        return " ".join(word for word in words if "pre_hook=" not in word)


@dataclass(slots=True)
class TuningStory:
    """One tuning with all its sites and ranks."""

    name: str
    closure: str = ""
    sites: dict[str, SiteStory] = field(default_factory=dict)
    """By label."""
    ranks: dict[int, RankStory] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase, on the lowest rank that has told them."""
    n_replays: int = 0
    first_ms: float | None = None
    best_ms: float | None = None

    @property
    def title(self) -> str:
        """The closure's name without its module."""
        return closure_name(self.closure) or self.name

    @property
    def site_names(self) -> dict[str, str]:
        """Label -> kernel and key for people, no two alike."""
        sites = list(self.sites.values())
        names = site_names([(each.kernel, each.key) for each in sites], [f"{each.label} ({k})" for k, each in enumerate(sites, 1)])
        return dict(zip(self.sites, names, strict=True))

    @property
    def world_size(self) -> int:
        """Ranks of the tuning, whether or not they have told anything."""
        return max((rank.world_size for rank in self.ranks.values()), default=0)


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
    def last_at(self) -> float:
        """Time of the newest event of a tuning in seconds since 1970."""
        return max((rank.last_at for tuning in self.tunings.values() for rank in tuning.ranks.values()), default=0.0)

    def name_of(self, tuning: TuningStory) -> str:
        """The tuning's title; with the number of the call, "step, call 4", where several tunings share the title."""
        alike = [each for each in self.tunings.values() if each.title == tuning.title]
        if len(alike) < 2:
            return tuning.title
        call = tuning.name.rpartition(", call ")[2]
        return f"{tuning.title}, {f'call {call}' if call.isdecimal() else f'tuning {alike.index(tuning) + 1}'}"

    def for_people(self, messages: Sequence[events.Told]) -> list[str]:
        """Their texts, with names of sites in place of labels."""
        names = {label: name for tuning in self.tunings.values() for label, name in tuning.site_names.items()}
        labels = sorted(names, key=len, reverse=True)  # one label may begin with another
        texts = []
        for each in messages:
            text = each.text
            for label in labels if "site=" in text else ():
                text = text.replace(f"site={label}", names[label])
            texts.append(text)
        return texts

    def take(self, event: AnyEvent) -> None:
        """Take in one event. Of a site that several ranks tell, the first word counts."""
        if isinstance(event, RunBegun):
            self._begin_run(event)
        elif isinstance(event, events.Told):
            if len(self.messages) < MAX_SPANS:
                self.messages.append(event)
        else:
            tuning = self.tunings.setdefault(event.tuning, TuningStory(event.tuning))
            rank = tuning.ranks.setdefault(event.rank, RankStory(event.rank, begun_at=event.at))
            rank.last_at = max(rank.last_at, event.at)
            # The event of the last run follows the end.
            if rank.is_done and isinstance(event, events.Won | events.TuningEnded) and _MIXED not in self.notes:
                self.notes.append(_MIXED)
            if isinstance(event, events.SiteMet | events.Ranked | events.Dropped | events.Won):
                _take_of_site(tuning, rank, event)
            elif isinstance(event, events.TuningBegun | events.TuningEnded):
                _take_of_tuning(tuning, rank, event)
            else:
                _take_of_rank(rank, event)

    def _begin_run(self, event: RunBegun) -> None:
        if event.rank in self.runs:  # the job was started again while it was watched
            for name, tuning in list(self.tunings.items()):
                tuning.ranks.pop(event.rank, None)
                if not tuning.ranks:
                    del self.tunings[name]
        self.runs[event.rank] = event

    def leave_out_stale_ranks(self) -> None:
        """Forget ranks whose files were left behind by a job with another number of ranks."""
        newest = max(self.runs.values(), key=lambda run: run.at, default=None)
        if newest is None:
            return
        stale = sorted(rank for rank, run in self.runs.items() if rank >= newest.world_size or run.world_size != newest.world_size)
        if not stale:
            return
        told = ", ".join(map(str, stale[:8])) + ", ..." * (len(stale) > 8)
        self.notes.append(f"files of an earlier job with another number of ranks are left out: ranks {told}")
        for rank in stale:
            del self.runs[rank]
            for tuning in self.tunings.values():
                tuning.ranks.pop(rank, None)
        self.tunings = {name: tuning for name, tuning in self.tunings.items() if tuning.ranks}


def _take_of_site(tuning: TuningStory, rank: RankStory, event: events.SiteMet | events.Ranked | events.Dropped | events.Won) -> None:
    if isinstance(event, events.SiteMet):
        _meet(tuning, rank, event)
        return
    site = tuning.sites.get(rank.labels.get(event.site, ""))
    if site is None:  # told by a line that was passed over
        return
    if isinstance(event, events.Dropped):
        site.dropped.setdefault(event.candidate, event)
    elif isinstance(event, events.Won):
        site.won = site.won or event
    elif len(site.rungs) < MAX_SPANS and (not site.rungs or site.rungs[0].rank == event.rank):
        site.rungs.append(event)


def _meet(tuning: TuningStory, rank: RankStory, event: events.SiteMet) -> None:
    """Take in a site, or what a later event of the same number says of it: another label, or the reason of the miss."""
    before = rank.labels.get(event.site)
    rank.labels[event.site] = event.label
    if before not in (None, event.label) and not any(before in each.labels.values() for each in tuning.ranks.values()):
        tuning.sites.pop(str(before), None)
    known = tuning.sites.get(event.label)
    if known is None:
        tuning.sites[event.label] = SiteStory(
            event.site, event.label, event.kernel, event.key, event.configs, n_pruned=event.n_pruned, miss=event.miss
        )
    else:
        known.miss = known.miss or event.miss


def _take_of_tuning(tuning: TuningStory, rank: RankStory, event: events.TuningBegun | events.TuningEnded) -> None:
    if isinstance(event, events.TuningBegun):
        tuning.closure, rank.world_size = event.closure, event.world_size
        rank.is_done = False  # another closure of the same name
        return
    rank.is_done, rank.error, rank.started = True, event.error, []
    rank.total_s = event.seconds.get("total", 0.0)
    tuning.seconds = tuning.seconds or event.seconds
    tuning.n_replays = max(tuning.n_replays, event.n_replays)
    tuning.first_ms = _larger(tuning.first_ms, event.first_ms)  # the slowest rank is the time of the step
    tuning.best_ms = _larger(tuning.best_ms, event.best_ms)


def _take_of_rank(rank: RankStory, event: events.PhaseBegun | events.Started | events.Compiled | events.Replayed | events.Met) -> None:
    if isinstance(event, events.PhaseBegun):
        rank.phases.append((event.phase, event.at, event.bound))
        rank.started = []
    elif isinstance(event, events.Started):
        rank.started = [each for each in rank.started if each.replay == event.replay] + [event]
    elif isinstance(event, events.Compiled):
        rank.n_compiled += 1
        name = f"site {event.site} candidate {event.candidate}" + " (cached)" * event.is_cached
        _keep(rank, rank.compiles, Span(event.at - event.seconds, event.at, name, event.worker))
    elif isinstance(event, events.Replayed):
        rank.n_replays += 1
        rank.started = [each for each in rank.started if each.replay > event.replay]
        ran = " ".join(f"{site}:{candidate}" for site, candidate in sorted(event.candidates.items())[:20])
        discarded = f" discarded: {event.discarded}" if event.discarded else ""
        _keep(rank, rank.replays, Span(event.at - event.seconds, event.at, f"replay {event.replay} {ran}{discarded}".strip()))
    else:
        rank.n_meetings += 1
        rank.started = []  # ranks meet between replays only, so its launch has come back
        _keep(rank, rank.meetings, Span(event.at - event.seconds, event.at, event.topic))


def _keep(rank: RankStory, spans: list[Span], span: Span) -> None:
    if len(spans) < MAX_SPANS:
        spans.append(span)
    else:
        rank.n_lost_spans += 1


def _larger(a: float | None, b: float | None) -> float | None:
    return max((each for each in (a, b) if each is not None), default=None)


def shortened(text: str, limit: int = 240) -> str:
    """A message of the log for a terminal, which has all of it in the log."""
    return text if len(text) <= limit else f"{text[:limit]}\N{HORIZONTAL ELLIPSIS}"
