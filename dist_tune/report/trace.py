"""Trace events of a tuning, in the JSON format that Chrome's about:tracing and ui.perfetto.dev read. Pure.

One process for each rank; in it threads for phases, replays, meetings, and one for each compile worker. Times are microseconds since
the first event of the story, each rank's by the clock of its host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from dist_tune.report.story import RankStory, Story, TuningStory

_THREADS = ("phases", "replays", "meetings")


class Span(NamedTuple):
    """Something with a begin and an end, in seconds since 1970; a mark has no end."""

    thread: str
    name: str
    begin: float
    end: float | None
    arguments: dict[str, str] | None = None


def trace_events(story: Story) -> Iterator[dict[str, Any]]:
    """All events of the story's ranks: names, then spans and marks in the order of time."""
    spans = [(rank.rank, span) for tuning in story.tunings.values() for rank in tuning.ranks.values() for span in _spans(tuning, rank)]
    zero = min([span.begin for _, span in spans] + [r.begun_at for t in story.tunings.values() for r in t.ranks.values()], default=0.0)
    numbers: dict[tuple[int, str], int] = {}
    for number in sorted({rank for tuning in story.tunings.values() for rank in tuning.ranks}):
        run = story.runs.get(number)
        workers = sorted({span.thread for rank, span in spans if rank == number} - {*_THREADS}, key=lambda name: (len(name), name))
        yield _named("process_name", number, 0, f"rank {number}" + (f" ({run.host}, {run.device})" if run else ""))
        yield {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}
        for k, thread in enumerate((*_THREADS, *workers), 1):
            numbers[number, thread] = k
            yield _named("thread_name", number, k, thread)
    found = []
    for rank, span in spans:
        event: dict[str, Any] = {"name": span.name, "pid": rank, "tid": numbers[rank, span.thread], "ts": round((span.begin - zero) * 1e6)}
        if span.end is None:
            event |= {"ph": "i", "s": "t"}
        else:  # a clock of a host may be set back
            event |= {"ph": "X", "dur": max(0, round((span.end - zero) * 1e6) - event["ts"])}
        found.append(event | ({"args": span.arguments} if span.arguments else {}))
    yield from sorted(found, key=lambda each: (each["ts"], -each.get("dur", 0)))  # an outer span before those within it


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _spans(tuning: TuningStory, rank: RankStory) -> Iterator[Span]:
    total_s = rank.done.seconds.get("total", 0.0) if rank.done else 0.0
    # Records are written after the last phase, and the run's last event follows.
    last_at = min(rank.last_at, rank.begun_at + total_s) if total_s else rank.last_at
    for phase, end in zip(rank.phases, [*(each.at for each in rank.phases[1:]), last_at], strict=False):
        yield Span("phases", phase.phase, phase.at, max(phase.at, end), {"closure": tuning.closure})
    for replay in rank.replays:
        ran = " ".join(f"{site}:{candidate}" for site, candidate in sorted(replay.candidates.items())[:20])
        name = f"replay {replay.replay} {ran}{f' discarded: {replay.discarded}' * bool(replay.discarded)}"
        yield Span("replays", name.strip(), replay.at - replay.seconds, replay.at)
    for met in rank.meetings:
        yield Span("meetings", met.topic, met.at - met.seconds, met.at)
    for each in rank.compiles:
        name = f"site {each.site} candidate {each.candidate}" + " (cached)" * each.is_cached
        yield Span(f"compile worker {each.worker}", name, each.at - each.seconds, each.at)
    yield from (Span("phases", name, at, None) for at, name in rank.marks)
    if rank.done and rank.done.error:
        yield Span("phases", f"failed: {rank.done.error[:300]}", rank.last_at, None)
