"""The story as lines: all of it for a terminal or a mail, or the present state of a tuning that runs. Pure."""

from __future__ import annotations

from typing import Any

from dist_tune.output import amount, events, printable
from dist_tune.report import facts
from dist_tune.report.story import PHASES, RankStory, Story, TuningStory, shortened

_MAX_NAMED = 3
"""Parameters that a site's lines name."""
LATE_S = 5.0
"""Without an event, after which a rank that is behind the others is named, and a candidate that has not come back."""
_MAX_SITES = 12
_MAX_RANKS = 8
"""Sites and ranks that are named."""


def text(story: Story) -> str:
    """The head, then a few lines for each site."""
    told = facts.summary(story)
    lines = [f"Tuning of {told['title']}", *(f"  {name}: {value}" for name, value in told["facts"].items())]
    for tuning in story.tunings.values():
        if words := facts.stragglers(tuning):
            lines.append(f"  came last to meetings{f' of {story.name_of(tuning)}' * (len(story.tunings) > 1)}: {words}")
    lines += [f"  note: {note}" for note in told["notes"]]
    lines += [f"  {shortened(each)}" for each in facts.messages(story.messages, story, 20)]
    name = ""
    for row in told["sites"]:
        lines += ["", f"{row['tuning']}:"] * (row["tuning"] != name)
        name = row["tuning"]
        lines += ["", *_of_site(row)]
    return "".join(f"{printable(line)}\n" for line in lines)


def _of_site(row: dict[str, Any]) -> list[str]:
    times = [f"{row['ms']:.4g} ms"] if row["ms"] is not None else []
    reasons = "; ".join(dict.fromkeys(filter(None, (row["reason"], row["confidence"]))))
    most = [f"{name} ({100 * part:.0f} % of the variance)" for name, part in row["explained"].items() if part >= 0.005]
    lines = [
        f"{row['label']}  {', '.join(filter(None, [*times, row['gain_words']]))}".rstrip(),
        row["winner"] and f"  {row['winner']}",
        f"  {row['outcomes']}" + f"; {row['n_pruned']} more pruned before" * bool(row["n_pruned"]),
        f"  {'chosen: ' * bool(row['winner'])}{reasons}",
        row["slowest_rank"] and f"  slowest rank: {row['slowest_rank']}",
        most and f"  matters most: {', '.join(most[:_MAX_NAMED])}",
        row["record_id"] and f"  all of it: dist-tune show {row['record_id']}",
    ]
    return [line for line in lines if line]


def progress_lines(story: Story, now: float, late_s: float = LATE_S) -> list[str]:
    """The tunings under way, or the last one that has ended. ``now``: seconds since 1970."""
    tunings = [each for each in story.tunings.values() if each.ranks]
    if not tunings:
        return ["no tuning has begun yet"]
    shown = [each for each in tunings if each.is_under_way][-4:] or tunings[-1:]
    lines = [line for tuning in shown for line in _of_tuning(tuning, now, late_s)]
    lines += [shortened(each) for each in facts.messages(story.messages[-3:], story, 3)]
    return [printable(line) for line in lines]


def _of_tuning(tuning: TuningStory, now: float, late_s: float) -> list[str]:
    ranks, n_ranks = list(tuning.ranks.values()), tuning.world_size
    leader = max(ranks, key=_position)
    n_done = sum(rank.done is not None for rank in ranks)
    told = [leader.phase if leader.done is None or not tuning.is_under_way else f"ended on {n_done} of {len(ranks)} ranks"]
    if leader.phase == "compile":
        told.append(f"{sum(len(rank.compiles) for rank in ranks)} compiled")
    elif leader.done is None:
        n_replays, bound = len(leader.replays), leader.phases[-1].bound if leader.phases else None
        told.append(f"replay {n_replays}" + f" of at most {bound}" * bool(bound and n_replays <= bound))
    told.append(amount(len(ranks), "rank") if len(ranks) >= n_ranks else f"{len(ranks)} of {n_ranks} ranks")
    end = now if tuning.is_under_way else max(rank.last_at for rank in ranks)
    told.append(_lasting(end - min(rank.begun_at for rank in ranks)))
    lines = [f"{tuning.title}: {', '.join(told)}"]
    for label, name in list(tuning.site_names.items())[:_MAX_SITES]:
        site = tuning.sites[label]
        if site.won is not None:
            state = f"winner {site.config(site.won.winner)}, {site.won.reason}"
        elif site.rungs:
            rung = site.rungs[-1]
            state = f"{rung.n_left} of {len(site.met.configs)} left, best so far {rung.best_ms:.4g} ms {site.config(rung.best)}"
        else:
            state = f"{len(site.met.configs)} candidates, {len(site.dropped)} dropped"
        lines.append(f"  {name}: {state}")
    if len(tuning.sites) > _MAX_SITES:
        lines.append(f"  and {len(tuning.sites) - _MAX_SITES} more sites")
    return lines + (_late(tuning, leader, now, late_s) if tuning.is_under_way else [])


def _late(tuning: TuningStory, leader: RankStory, now: float, late_s: float) -> list[str]:
    """Ranks that are behind, candidates that have not come back, and silence."""
    quiet = sorted((rank for rank in tuning.ranks.values() if now - rank.last_at >= late_s and not rank.done), key=_position)
    lines = [
        f"  rank {rank.rank} is behind rank {leader.rank}: {_distance(rank, leader)}; last event {_lasting(now - rank.last_at)} ago"
        for rank in quiet
        if _position(rank) < _position(leader)
    ][:_MAX_RANKS]
    lines += [
        f"  rank {rank.rank} runs {_launch(tuning, rank, started)} for the first time since {_lasting(now - started.at)}"
        for rank in quiet[:_MAX_RANKS]
        for started in rank.started[:_MAX_SITES]
        if now - started.at >= late_s
    ]
    if len(quiet) == len(tuning.ranks) and not lines:
        lines.append(f"  no rank has told anything for {_lasting(min(now - rank.last_at for rank in quiet))}")
    return lines


def _lasting(seconds: float) -> str:
    """A duration in the largest unit of which there are five: "43 s", "12 min", "266 d"."""
    unit, length_s = next((each for each in (("d", 86400), ("h", 3600), ("min", 60)) if seconds >= 5 * each[1]), ("s", 1))
    return f"{seconds / length_s:.0f} {unit}"


def _position(rank: RankStory) -> tuple[int, int, int]:
    """How far a rank has come."""
    phase = len(PHASES) if rank.done else PHASES.index(rank.phase) if rank.phase in PHASES else -1
    return phase, len(rank.replays), len(rank.meetings)


def _distance(rank: RankStory, leader: RankStory) -> str:
    if rank.phase != leader.phase:
        return f"in {rank.phase}, and that one {'has ended' if leader.done else f'in {leader.phase}'}"
    n_fewer = len(leader.replays) - len(rank.replays)
    return f"{amount(n_fewer, 'replay')} fewer" if n_fewer else f"{amount(len(leader.meetings) - len(rank.meetings), 'meeting')} fewer"


def _launch(tuning: TuningStory, rank: RankStory, started: events.Started) -> str:
    label = rank.labels.get(started.site, f"site {started.site}")
    if label not in tuning.sites:
        return f"candidate {started.candidate} of {label}"
    return f"candidate {started.candidate} ({tuning.sites[label].config(started.candidate)}) of {tuning.site_names[label]}"
