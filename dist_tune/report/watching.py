"""A running tuning, followed from its event files.

Knows the folder and this host's clock as its caller passes it; nothing of terminals.
"""

from __future__ import annotations

from pathlib import Path

from dist_tune.output import Started, printable
from dist_tune.report.facts import PHASES
from dist_tune.report.reading import EventFile, UnreadableEventsError, event_files
from dist_tune.report.story import RankStory, Story, TuningStory, shortened

LATE_S = 5.0
"""Without an event, after which a rank that is behind the others is named, and a candidate that has not come back."""
_MAX_SITES = 12
_MAX_RANKS = 8
"""Sites and ranks that are named."""


class Watcher:
    """The story so far of a folder whose files are being written; ranks may join at any time."""

    def __init__(self, folder: Path, *, may_come: bool = False) -> None:
        """``may_come``: the folder may not be there yet, because the first tuning makes it."""
        self.story = Story()
        self._folder, self._may_come = folder, may_come
        self._files: dict[Path, EventFile] = {}

    def poll(self) -> bool:
        """Take in what has been added; true if there was something. A damaged file costs its own rank alone: see ``damage``.

        Raises:
            UnreadableEventsError: no file can be used.
            OSError: the folder cannot be read.
        """
        is_new = False
        for path in self._paths():
            for event in self._files.setdefault(path, EventFile(path)).read():
                self.story.take(event)
                is_new = True
        self.story.leave_out_stale_ranks()
        files = self._files.values()
        if files and not self.story.tunings and all(each.is_unusable for each in files):
            raise UnreadableEventsError(_all_unusable(list(files)))
        return is_new

    def _paths(self) -> list[Path]:
        try:
            return event_files(self._folder)
        except FileNotFoundError:
            if self._may_come:
                return []
            raise

    @property
    def is_over(self) -> bool:
        """True if there were tunings, and none is under way."""
        return bool(self.story.tunings) and not _under_way(self.story)

    @property
    def notes(self) -> list[str]:
        """Sentences about what was passed over, apart from damage."""
        left_out = [
            f"{each.path.name}: {each.n_earlier_runs} earlier run{'s' * (each.n_earlier_runs > 1)} of the job left out"
            for each in self._files.values()
            if each.n_earlier_runs
        ]
        return left_out + self.story.notes

    @property
    def damage(self) -> dict[int, str]:
        """Rank -> a sentence about its damaged file and what is left out for it. Files of an earlier job with more ranks are none of it."""
        newest = max(self.story.runs.values(), key=lambda run: run.at, default=None)
        files = [each for each in self._files.values() if newest is None or each.rank < newest.world_size]
        return {each.rank: damage for each in files if (damage := each.damage)}


def _all_unusable(files: list[EventFile]) -> str:
    first, n_more = files[0].reason, len(files) - 1
    return first + f"; the file{'s' * (n_more > 1)} of {n_more} more rank{'s' * (n_more > 1)} cannot be used either" * bool(n_more)


def progress_lines(story: Story, now: float, late_s: float = LATE_S) -> list[str]:
    """The present state: tunings under way, or the last one that has ended. ``now``: seconds since 1970."""
    tunings = [each for each in story.tunings.values() if each.ranks]
    if not tunings:
        return ["no tuning has begun yet"]
    lines = [line for tuning in _under_way(story)[-4:] or tunings[-1:] for line in _of_tuning(tuning, now, late_s)]
    last = story.messages[-3:]
    lines += [f"rank {each.rank}, {each.level}: {shortened(text)}" for each, text in zip(last, story.for_people(last), strict=True)]
    return [printable(line) for line in lines]


def _under_way(story: Story) -> list[TuningStory]:
    return [each for each in story.tunings.values() if not all(rank.is_done for rank in each.ranks.values())]


def _of_tuning(tuning: TuningStory, now: float, late_s: float) -> list[str]:
    ranks = sorted(tuning.ranks.values(), key=lambda rank: rank.rank)
    leader = max(ranks, key=_position)
    begun_at, last_at = min(rank.begun_at for rank in ranks), max(rank.last_at for rank in ranks)
    n_done = sum(rank.is_done for rank in ranks)
    is_over = n_done == len(ranks)
    told = [leader.phase if is_over or not leader.is_done else f"ended on {n_done} of {len(ranks)} ranks"]
    bound = leader.phases[-1][2] if leader.phases else None
    if leader.phase == "compile":
        told.append(f"{sum(rank.n_compiled for rank in ranks)} compiled")
    elif not leader.is_done:
        told.append(f"replay {leader.n_replays}" + f" of at most {bound}" * bool(bound and leader.n_replays <= bound))
    told.append(
        f"{len(ranks)} rank{'s' * (len(ranks) != 1)}" if len(ranks) >= tuning.world_size else f"{len(ranks)} of {tuning.world_size} ranks"
    )
    told.append(f"{_lasting((last_at if is_over else now) - begun_at)}")
    lines = [f"{tuning.title}: {', '.join(told)}"]
    names = tuning.site_names
    for label, site in list(tuning.sites.items())[:_MAX_SITES]:
        last = site.rungs[-1] if site.rungs else None
        if site.won is not None:
            lines.append(f"  {names[label]}: winner {site.config(site.won.winner)}, {site.won.reason}")
        elif last is not None:
            best = f"best so far {last.best_ms:.4g} ms {site.config(last.best)}"
            lines.append(f"  {names[label]}: {last.n_left} of {len(site.configs)} left, {best}")
        else:
            lines.append(f"  {names[label]}: {len(site.configs)} candidates, {len(site.dropped)} dropped")
    if len(names) > _MAX_SITES:
        lines.append(f"  and {len(names) - _MAX_SITES} more sites")
    return lines + ([] if is_over else _late(tuning, leader, now, late_s))


def _late(tuning: TuningStory, leader: RankStory, now: float, late_s: float) -> list[str]:
    """Ranks that are behind, candidates that have not come back, and silence."""
    quiet = [rank for rank in sorted(tuning.ranks.values(), key=_position) if now - rank.last_at >= late_s and not rank.is_done]
    lines = []
    for rank in [each for each in quiet if _position(each) < _position(leader)][:_MAX_RANKS]:
        lines.append(
            f"  rank {rank.rank} is behind rank {leader.rank}: {_distance(rank, leader)}; last event {_lasting(now - rank.last_at)} ago"
        )
    for rank in quiet[:_MAX_RANKS]:
        for started in rank.started[:_MAX_SITES]:
            if now - started.at >= late_s:
                lines.append(
                    f"  rank {rank.rank} runs {_launch(tuning, rank, started)} for the first time since {_lasting(now - started.at)}"
                )
    if len(quiet) == len(tuning.ranks) and not lines:
        lines.append(f"  no rank has told anything for {_lasting(min(now - rank.last_at for rank in quiet))}")
    return lines


def _lasting(seconds: float) -> str:
    """A duration in the largest unit of which there are five: "43 s", "12 min", "266 d"."""
    unit, length_s = next((each for each in (("d", 86400), ("h", 3600), ("min", 60)) if seconds >= 5 * each[1]), ("s", 1))
    return f"{seconds / length_s:.0f} {unit}"


def _position(rank: RankStory) -> tuple[int, int, int]:
    """How far a rank has come."""
    phase = len(PHASES) if rank.is_done else PHASES.index(rank.phase) if rank.phase in PHASES else -1
    return phase, rank.n_replays, rank.n_meetings


def _distance(rank: RankStory, leader: RankStory) -> str:
    if rank.phase != leader.phase:
        return f"in {rank.phase} and not in {leader.phase}" if not leader.is_done else f"in {rank.phase}, and that one has ended"
    n_fewer = leader.n_replays - rank.n_replays
    return f"{n_fewer} replay{'s' * (n_fewer != 1)} fewer" if n_fewer else f"{leader.n_meetings - rank.n_meetings} meetings fewer"


def _launch(tuning: TuningStory, rank: RankStory, started: Started) -> str:
    label = rank.labels.get(started.site, f"site {started.site}")
    site = tuning.sites.get(label)
    if site is None:
        return f"candidate {started.candidate} of {label}"
    return f"candidate {started.candidate} ({site.config(started.candidate)}) of {tuning.site_names[label]}"
