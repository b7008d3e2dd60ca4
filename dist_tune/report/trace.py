"""Trace events of a tuning, in the JSON format that Chrome's about:tracing and ui.perfetto.dev read. Pure.

One process for each rank; in it threads for phases, replays, meetings, and one for each compile worker. Times are microseconds since
the first event of the story, each rank's by the clock of its host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dist_tune.output import events
from dist_tune.report.story import RankStory, Story, TuningStory

_PHASES, _REPLAYS, _MEETINGS, _WORKERS = 1, 2, 3, 10
"""Numbers of threads; of workers the first one's."""
_NAMES = {_PHASES: "phases", _REPLAYS: "replays", _MEETINGS: "meetings"}


def trace_events(story: Story) -> Iterator[dict[str, Any]]:
    """All events of the story's ranks: names, then spans and marks in the order of time."""
    ranks = [(tuning, rank) for tuning in story.tunings.values() for rank in tuning.ranks.values()]
    found = [event for tuning, rank in ranks for event in _of_rank(tuning, rank)]
    zero = min([event["ts"] for event in found] + [rank.told[0].at for _, rank in ranks], default=0.0)
    for number in sorted({rank.rank for _, rank in ranks}):
        run = story.runs.get(number)
        yield _named("process_name", number, 0, f"rank {number}" + (f" ({run.host}, {run.device})" if run else ""))
        yield {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}
        for thread in sorted({*_NAMES, *(event["tid"] for event in found if event["pid"] == number)}):
            yield _named("thread_name", number, thread, _NAMES.get(thread, f"compile worker {thread - _WORKERS}"))
    for event in found:
        begin, end = event["ts"], event["ts"] + event.get("dur", 0.0)
        event["ts"] = round((begin - zero) * 1e6)
        if "dur" in event:
            event["dur"] = max(0, round((end - zero) * 1e6) - event["ts"])  # a clock of a host may be set back
    yield from sorted(found, key=lambda each: (each["ts"], -each.get("dur", 0)))  # an outer span before those within it


def _of_rank(tuning: TuningStory, rank: RankStory) -> Iterator[dict[str, Any]]:
    """Spans and marks, in seconds."""

    def span(thread: int, name: str, end: float, seconds: float) -> dict[str, Any]:
        return {"ph": "X", "name": name, "pid": rank.rank, "tid": thread, "ts": end - seconds, "dur": seconds}

    def mark(name: str, at: float) -> dict[str, Any]:
        return {"ph": "i", "s": "t", "name": name, "pid": rank.rank, "tid": _PHASES, "ts": at}

    total_s = rank.done.seconds.get("total", 0.0) if rank.done else 0.0
    # Records are written after the last phase, and the run's last event follows.
    last_at = min(rank.last_at, rank.told[0].at + total_s) if total_s else rank.last_at
    phases = rank.of(events.PhaseBegun)
    for phase, end in zip(phases, [*(each.at for each in phases[1:]), last_at], strict=False):
        yield span(_PHASES, phase.phase, end, end - phase.at) | {"args": {"closure": tuning.closure}}
    is_teller = rank is tuning.teller
    for event in rank.told:
        match event:
            case events.Replayed():
                ran = " ".join(f"{site}:{candidate}" for site, candidate in sorted(event.candidates.items())[:20])
                discarded = f" discarded: {event.discarded}" * bool(event.discarded)
                yield span(_REPLAYS, f"replay {event.replay} {ran}{discarded}".strip(), event.at, event.seconds)
            case events.Met():
                yield span(_MEETINGS, event.topic, event.at, event.seconds)
            case events.Compiled():
                name = f"site {event.site} candidate {event.candidate}" + " (cached)" * event.is_cached
                yield span(_WORKERS + event.worker, name, event.at, event.seconds)
            case events.Ranked() if is_teller:  # all ranks tell the same
                yield mark(f"rung: site {event.site}, {event.n_left} left", event.at)
            case events.Dropped() if is_teller:
                yield mark(f"dropped: site {event.site} candidate {event.candidate}", event.at)
            case events.Won() if is_teller:
                yield mark(f"winner: site {event.site} candidate {event.winner}", event.at)
            case events.TuningEnded() if event.error:
                yield mark(f"failed: {event.error[:300]}", rank.last_at)


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
