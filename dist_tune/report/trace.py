"""Trace events of a tuning, in the JSON format that Chrome's about:tracing and ui.perfetto.dev read. Pure.

One process for each rank; in it threads for phases, replays, meetings, and one for each compile worker. Times are microseconds since
the first event of the story, each rank's by the clock of its host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dist_tune.report.story import RankStory, Span, Story, TuningStory

_PHASES, _REPLAYS, _MEETINGS, _WORKERS = 1, 2, 3, 10
"""Numbers of threads; of workers the first one's."""


def trace_events(story: Story) -> Iterator[dict[str, Any]]:
    """All events of the story's ranks: names, then spans and marks in the order of time."""
    ranks = [(tuning, rank) for tuning in story.tunings.values() for rank in tuning.ranks.values()]
    begins = [rank.begun_at for _, rank in ranks] + [span.begin for _, rank in ranks for span in _all_spans(rank)]
    zero = min(begins, default=0.0)
    for number in sorted({rank.rank for _, rank in ranks}):
        run = story.runs.get(number)
        name = f"rank {number}" + (f" ({run.host}, {run.device})" if run else "")
        yield _named("process_name", number, 0, name)
        yield {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}
        for thread, label in ((_PHASES, "phases"), (_REPLAYS, "replays"), (_MEETINGS, "meetings")):
            yield _named("thread_name", number, thread, label)
        for lane in sorted({span.lane for _, rank in ranks if rank.rank == number for span in rank.compiles}):
            yield _named("thread_name", number, _WORKERS + lane, f"compile worker {lane}")
    found: list[dict[str, Any]] = []
    for tuning, rank in ranks:
        found += _of_rank(tuning, rank, zero)
    yield from sorted(found, key=lambda each: (each["ts"], -each.get("dur", 0)))  # an outer span before those within it


def _of_rank(tuning: TuningStory, rank: RankStory, zero: float) -> Iterator[dict[str, Any]]:
    for span in rank.phase_spans():
        yield _span(span, rank.rank, _PHASES, zero) | {"args": {"closure": tuning.closure}}
    for span in rank.replays:
        yield _span(span, rank.rank, _REPLAYS, zero)
    for span in rank.meetings:
        yield _span(span, rank.rank, _MEETINGS, zero)
    for span in rank.compiles:
        yield _span(span, rank.rank, _WORKERS + span.lane, zero)
    if rank.error:
        yield _mark(rank.last_at, rank.rank, f"failed: {rank.error[:300]}", zero)
    for site in tuning.sites.values():
        told = [(each.at, each.rank, f"rung: site {site.number}, {each.n_left} left") for each in site.rungs]
        told += [(each.at, each.rank, f"dropped: site {site.number} candidate {each.candidate}") for each in site.dropped.values()]
        told += [(site.won.at, site.won.rank, f"winner: site {site.number} candidate {site.won.winner}")] if site.won else []
        for at, number, name in told:
            if number == rank.rank:
                yield _mark(at, number, name, zero)


def _all_spans(rank: RankStory) -> list[Span]:
    return [*rank.phase_spans(), *rank.replays, *rank.meetings, *rank.compiles]


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _span(span: Span, process: int, thread: int, zero: float) -> dict[str, Any]:
    begin = _microseconds(span.begin, zero)
    duration = max(0, _microseconds(span.end, zero) - begin)  # a clock of a host may be set back
    return {"ph": "X", "name": span.name, "pid": process, "tid": thread, "ts": begin, "dur": duration}


def _mark(at: float, process: int, name: str, zero: float) -> dict[str, Any]:
    return {"ph": "i", "s": "t", "name": name, "pid": process, "tid": _PHASES, "ts": _microseconds(at, zero)}


def _microseconds(at: float, zero: float) -> int:
    return round((at - zero) * 1e6)
