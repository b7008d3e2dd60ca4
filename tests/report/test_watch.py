"""A tuning that is under way."""

from __future__ import annotations

import pytest

from dist_tune.report import Story, progress_lines
from tests.report.stories import BEGIN, FORGED, events, record

pytestmark = pytest.mark.once


def story_until(*n_events: int) -> Story:
    """Each rank has told this many events."""
    told = Story()
    for rank, n in enumerate(n_events):
        for event in list(events([record(0, 20)], rank, len(n_events)))[:n]:
            told.take(event)
    return told


def last_at(told: Story) -> float:
    return max(rank.last_at for tuning in told.tunings.values() for rank in tuning.ranks.values())


def test_the_phase_the_replays_and_the_best_are_told():
    """In the race; after its first rung with the best so far."""
    n_all = len(list(events([record(0, 20)], 0, 2)))
    told = story_until(n_all - 28, n_all - 28)
    first, second = progress_lines(told, last_at(told))
    assert first.startswith("step: race, replay ")
    assert " of at most 400, 2 ranks, " in first
    n_dropped = sum(each.failure is not None for each in record(0, 20).candidates)
    assert second == f"  gemm_0 [512, 2752]: 20 candidates, {n_dropped} dropped"
    told = story_until(n_all - 20, n_all - 20)
    assert "24 of 20 left, best so far" in progress_lines(told, last_at(told))[1]


def test_more_replays_than_the_bound_of_the_latest_phase_are_told_without_it():
    """A site that was missed races when all others are through: the bound is that of its race alone."""
    n_all = len(list(events([record(0, 20)], 0, 1)))
    told = story_until(n_all - 28)
    (tuning,) = told.tunings.values()
    (rank,) = tuning.ranks.values()
    n_replays = len(rank.replays)
    rank.phases.append(rank.phases[-1].model_copy(update={"bound": n_replays - 1}))
    assert f"replay {n_replays}, 1 rank, " in progress_lines(told, last_at(told))[0]


def test_a_rank_that_is_behind_is_named():
    """With its distance; not before it has been silent for some seconds."""
    n_all = len(list(events([record(0, 20)], 0, 2)))
    told = story_until(n_all - 28, n_all - 40)
    assert len(progress_lines(told, last_at(told) + 1.0)) == 2
    (line,) = [each for each in progress_lines(told, last_at(told) + 20.0) if "behind" in each]
    assert "rank 1 is behind rank 0: 6 replays fewer; last event 20 s ago" in line


def test_a_candidate_that_has_not_come_back_is_named():
    """Its config, its site, and the seconds since its launch; it is what a hang looks like from outside."""
    told_events = list(events([record(0, 20)], 1, 2))
    n = max(k for k, event in enumerate(told_events) if event.kind == "started") + 1
    told = story_until(n, n)
    started = told_events[n - 1]
    assert started.kind == "started"
    told.take(started.model_copy(update={"candidate": 7}))
    launched = [each for each in progress_lines(told, started.at + 12.0) if "for the first time" in each]
    assert len(launched) == 3, "of two sites in one replay each may hang"
    assert "rank 1 runs candidate 19 (BLOCK_M=" in launched[1]
    assert launched[1].endswith("of gemm_0 [512, 2752] for the first time since 12 s")


def test_silence_of_all_ranks_is_told():
    n_all = len(list(events([record(0, 20)], 0, 2)))
    told = story_until(n_all - 15, n_all - 15)
    assert progress_lines(told, last_at(told) + 60.0)[-1] == "  no rank has told anything for 60 s"


def test_the_winners_of_a_tuning_that_has_ended_are_told():
    """And silence is no news then."""
    told = story_until(10_000, 10_000)
    first, second = progress_lines(told, BEGIN + 1e6)
    assert first.startswith("step: done, 2 ranks, ")
    assert "winner BLOCK_M=" in second
    assert progress_lines(Story(), 0.0) == ["no tuning has begun yet"]


def test_texts_are_printable():
    told = story_until(6)
    next(iter(told.tunings.values())).closure = f"{FORGED}\x1b[2J"
    assert "\x1b" not in "".join(progress_lines(told, BEGIN))
