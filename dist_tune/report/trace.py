"""Trace events of a tuning, in the JSON format that Chrome's about:tracing and ui.perfetto.dev read. Pure.

One process for each rank; in it threads for phases, replays, meetings, and one for each compile worker. Times are microseconds since
1970, each rank's by the clock of its host: viewers begin with the first event.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dist_tune.output import events
from dist_tune.report.story import RankStory, Story

_PHASES, _REPLAYS, _MEETINGS, _WORKERS = 1, 2, 3, 10
"""Numbers of threads; of workers the first one's."""
_NAMES = {_PHASES: "phases", _REPLAYS: "replays", _MEETINGS: "meetings"}


def trace_events(story: Story) -> Iterator[dict[str, Any]]:
    """Spans and marks of the story's ranks, then the names of their processes and threads."""
    threads = set[tuple[int, int]]()
    for tuning in story.tunings.values():
        for rank in tuning.ranks.values():
            for event in _of_rank(rank, is_teller=rank is tuning.teller):
                threads.add((rank.rank, event["tid"]))
                yield {"pid": rank.rank, **event}
    for number, thread in sorted(threads):
        run, name = story.runs.get(number), _NAMES.get(thread, f"compile worker {thread - _WORKERS}")
        yield {"ph": "M", "name": "thread_name", "pid": number, "tid": thread, "args": {"name": name}}
        name = f"rank {number}" + (f" ({run.host}, {run.device})" if run else "")
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}


def _of_rank(rank: RankStory, *, is_teller: bool) -> Iterator[dict[str, Any]]:
    def span(thread: int, name: str, end: float, seconds: float) -> dict[str, Any]:
        # A clock of a host may be set back.
        return {"ph": "X", "name": name, "tid": thread, "ts": (end - seconds) * 1e6, "dur": max(0.0, seconds) * 1e6}

    def mark(name: str, at: float) -> dict[str, Any]:
        return {"ph": "i", "s": "t", "name": name, "tid": _PHASES, "ts": at * 1e6}

    total_s = rank.done.seconds.get("total", 0.0) if rank.done else 0.0
    # Records are written after the last phase, and the run's last event follows.
    last_at = min(rank.last_at, rank.told[0].at + total_s) if total_s else rank.last_at
    phases = rank.of(events.PhaseBegun)
    for phase, end in zip(phases, [*(each.at for each in phases[1:]), last_at], strict=False):
        yield span(_PHASES, phase.phase, end, end - phase.at)
    for event in rank.told:
        match event:
            case events.Replayed():
                ran = " ".join(f"{site}:{candidate}" for site, candidate in sorted(event.candidates.items())[:20])
                yield span(_REPLAYS, f"replay {event.replay} {ran} {event.discarded}".strip(), event.at, event.seconds)
            case events.Met():
                yield span(_MEETINGS, event.topic, event.at, event.seconds)
            case events.Compiled():
                name = f"site {event.site} candidate {event.candidate}" + " (cached)" * event.is_cached
                yield span(_WORKERS + event.worker, name, event.at, event.seconds)
            case events.Ranked() if is_teller:  # all ranks tell the same
                yield mark(f"round: site {event.site}, {event.n_left} left", event.at)
            case events.Dropped() if is_teller:
                yield mark(f"dropped: site {event.site} candidate {event.candidate}", event.at)
            case events.Won() if is_teller:
                yield mark(f"winner: site {event.site} candidate {event.winner}", event.at)
            case events.TuningEnded() if event.error:
                yield mark(f"failed: {event.error[:300]}", rank.last_at)
