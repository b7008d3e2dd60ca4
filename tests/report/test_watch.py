"""A tuning that is under way."""

from __future__ import annotations

import pytest

from dist_tune.output.events import PhaseBegun
from dist_tune.report import Story, progress_lines
from tests.report.stories import BEGIN, FORGED, events, record

pytestmark = pytest.mark.once

N_ALL = len(list(events([record(0, 20)], 0, 2)))


def story_until(*n_events: int) -> Story:
    """Each rank has told this many events."""
    told = Story()
    for rank, n in enumerate(n_events):
        for event in list(events([record(0, 20)], rank, len(n_events)))[:n]:
            told.take(event)
    return told


def test_the_phase_the_replays_and_the_best_are_told():
    """In the race; after its first rung with the best so far."""
    told = story_until(N_ALL - 28, N_ALL - 28)
    first, second = progress_lines(told, told.last_at)
    assert first.startswith("step: race, replay ")
    assert " of at most 400, 2 ranks, " in first
    n_dropped = sum(each.failure is not None for each in record(0, 20).candidates)
    assert second == f"  gemm_0 [512, 2752]: 20 candidates, {n_dropped} dropped"
    told = story_until(N_ALL - 20, N_ALL - 20)
    assert "24 of 20 left, best so far" in progress_lines(told, told.last_at)[1]


def test_more_replays_than_the_bound_of_the_latest_phase_are_told_without_it():
    """A site that was missed races when all others are through: the bound is that of its race alone."""
    told = story_until(N_ALL - 28)
    told.take(PhaseBegun(at=told.last_at, rank=0, tuning="step#1", phase="race", bound=1))
    assert ", 1 rank, " in progress_lines(told, told.last_at)[0]
    assert "at most" not in progress_lines(told, told.last_at)[0]


def test_ranks_that_are_silent_are_named():
    """The one that fell silent first is the first; not before some seconds have passed."""
    told = story_until(N_ALL - 28, N_ALL - 40)
    assert len(progress_lines(told, told.last_at + 1.0)) == 2
    late = [each for each in progress_lines(told, told.last_at + 20.0) if "late" in each]
    assert late[0].startswith("  rank 1 is late: last event 20 s ago, in race, replay 13, first run of candidate 13 (BLOCK_M=32 ")
    assert late[1].startswith("  rank 0 is late: last event 20 s ago, in race, replay 19, first run of candidate 19 (BLOCK_M=128 ")
    assert [len(progress_lines(told, told.last_at + 20.0, late_s)) for late_s in (20.0, 60.0)] == [4, 2]


@pytest.mark.parametrize("kind", ["phase", "meeting", "replay"])
def test_a_launch_that_has_not_come_back_is_named(kind: str):
    """With its config and its site, which is what a hang looks like from outside; a replay's end, a meeting and a phase come after it."""
    of_rank = list(events([record(0, 20)], 0, 1))
    n = next(k for k, event in enumerate(of_rank) if event.kind == "started")
    told, started = story_until(n), of_rank[n]
    told.take(started)
    (line,) = [each for each in progress_lines(told, started.at + 12.0) if "late" in each]
    assert "first run of candidate 0 (BLOCK_M=16 " in line
    assert line.endswith(" of gemm_0 [512, 2752]")
    told.take(next(event for event in of_rank if event.kind == kind))
    assert "first run" not in progress_lines(told, started.at + 12.0)[-1]


def test_the_winners_of_a_tuning_that_has_ended_are_told():
    """And silence is no news then. Texts are printable."""
    told = story_until(10_000, 10_000)
    first, second = progress_lines(told, BEGIN + 1e6)
    assert first.startswith("step: done, 2 ranks, ")
    assert "winner BLOCK_M=" in second
    next(iter(told.tunings.values())).closure = f"{FORGED}\x1b[2J"
    assert "\x1b" not in "".join(progress_lines(told, BEGIN))
    assert progress_lines(Story(), 0.0) == ["no tuning has begun yet"]
