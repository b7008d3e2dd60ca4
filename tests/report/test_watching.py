"""A tuning that is under way."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_tune.report import Story, Watcher, progress_lines
from tests.report.stories import BEGIN, FORGED, events, header, lines, record

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
    phase, at, _ = rank.phases[-1]
    rank.phases.append((phase, at, rank.n_replays - 1))
    assert f"replay {rank.n_replays}, 1 rank, " in progress_lines(told, last_at(told))[0]


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


def test_files_that_grow_and_ranks_that_join_are_followed(tmp_path: Path):
    """A poll takes in what is new."""
    watcher = Watcher(tmp_path)
    assert watcher.poll() is False
    told = [list(events([record(0, 8)], rank, 2)) for rank in range(2)]
    (tmp_path / "rank-0.jsonl").write_bytes(lines(told[0][:6]))
    assert watcher.poll() is True
    assert "1 of 2 ranks" in progress_lines(watcher.story, told[0][5].at)[0]
    (tmp_path / "rank-0.jsonl").write_bytes(lines(told[0]))
    (tmp_path / "rank-1.jsonl").write_bytes(lines(told[1]))
    assert watcher.poll() is True
    assert watcher.poll() is False
    assert progress_lines(watcher.story, BEGIN)[0].startswith("step: done, 2 ranks")


def test_a_job_that_is_started_again_is_a_new_story(tmp_path: Path):
    """While it is watched, and its files are appended to."""
    watcher = Watcher(tmp_path)
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(lines(events([record(0, 8)], 0, 1)))
    watcher.poll()
    again = [header(0, 1, BEGIN + 60), *list(events([record(0, 8)], 0, 1, name="step#2"))[1:4]]
    path.write_bytes(path.read_bytes() + lines(again))
    watcher.poll()
    assert list(watcher.story.tunings) == ["step#2"]


def test_ranks_that_an_earlier_job_left_behind_are_not_waited_for(tmp_path: Path):
    """It had more ranks, and was killed; the present job has finished."""
    (tmp_path / "rank-0.jsonl").write_bytes(lines(events([record(0, 8)], 0, 1)))
    killed = [header(1, 2, BEGIN - 60), *list(events([record(0, 8)], 1, 2, name="step#0"))[1:6]]
    (tmp_path / "rank-1.jsonl").write_bytes(lines(killed))
    watcher = Watcher(tmp_path)
    assert not watcher.is_over
    watcher.poll()
    watcher.poll()
    assert (watcher.is_over, list(watcher.story.tunings)) == (True, ["step#1"])
    assert watcher.notes == ["files of an earlier job with another number of ranks are left out: ranks 1"]


def test_texts_are_printable():
    told = story_until(6)
    next(iter(told.tunings.values())).closure = f"{FORGED}\x1b[2J"
    assert "\x1b" not in "".join(progress_lines(told, BEGIN))
