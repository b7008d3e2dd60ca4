"""What event files and records come to: files that are written, cut off, damaged or of several runs, and ranks that join or fall silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_tune.output import events as kinds
from dist_tune.report import Story, UnreadableEventsError, Watcher, progress_lines, story_of_folder, story_of_records
from tests.report.stories import BEGIN, FORGED, events, header, lines, record, write_story


def told(rank: int = 0, n_ranks: int = 1, name: str = "step#1") -> list[kinds.AnyEvent]:
    return list(events([record(0, 8)], rank, n_ranks, name=name))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(lines(told()))
    return path


def test_all_ranks_tell_of_the_same_sites(tmp_path: Path):
    """Each site once, with its record; each rank with its own replays, compilations and meetings."""
    records = write_story(tmp_path, n_sites=3, n_candidates=12)
    story = story_of_folder(tmp_path)
    (tuning,) = story.tunings.values()
    assert [site.record for _, _, site in story.sites] == records
    assert sorted(tuning.ranks) == [0, 1, 2, 3]
    rank = tuning.ranks[2]
    assert [len(rank.of(kind)) for kind in (kinds.Replayed, kinds.Met, kinds.Compiled)] == [32, 4, 9]
    assert (rank.phase, rank.done and rank.done.best_ms, story.notes) == ("done", 1.62, [])


def test_what_is_missing_is_said(tmp_path: Path):
    """Ranks without files, a tuning that goes on, a rank that ended with an error, a record of another version; a folder without events."""
    with pytest.raises(UnreadableEventsError, match=r"no rank-<i>\.jsonl in .* tells of a tuning"):
        story_of_folder(tmp_path)
    (tmp_path / "rank-0.jsonl").write_bytes(lines([header(0)]))
    with pytest.raises(UnreadableEventsError, match="tells of a tuning"):
        story_of_folder(tmp_path)
    of_one = told(0, 4)
    (tmp_path / "rank-0.jsonl").write_bytes(lines(of_one[:-1]).replace(b'"schema_version":3', b'"schema_version":2'))
    failed = of_one[-1].model_copy(update={"rank": 1, "error": "RankTimeoutError: rank 3 did not come"})
    (tmp_path / "rank-1.jsonl").write_bytes(lines([failed]))
    assert story_of_folder(tmp_path).notes == [
        "site 0: its record cannot be read (schema_version: Input should be 3)",
        "step: no events of 2 of 4 ranks (2, 3), which may log to other folders",
        "step: the tuning had not ended on 1 of 2 ranks",
        "step: rank 1 ended with RankTimeoutError: rank 3 did not come",
    ]


def test_the_rank_that_came_to_the_end_tells_of_the_sites(tmp_path: Path):
    """The first one's file is damaged behind its second line."""
    write_story(tmp_path, 1, 6)
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(b"".join([*path.read_bytes().splitlines(keepends=True)[:2], b"no event\n"]))
    story = story_of_folder(tmp_path)
    assert [site.record for _, _, site in story.sites] == [record(0, 6)]
    left_out = "line 3: no event of version 1, which this dist_tune reads: the rest of rank 0 is left out"
    assert story.damage == {0: f"{path}, {left_out}"}


def test_records_of_one_tuning_are_one_tuning():
    """They share the closure, its seconds and its replays; another tuning is told apart."""
    story = story_of_records([record(0, 6), record(1, 6), record(2, 6, seconds=3.0)])
    assert [len(tuning.sites) for tuning in story.tunings.values()] == [2, 1]


def test_what_a_rank_says_later_of_a_site_counts():
    """Its number stays: the label that ranks agreed on takes the place of the first, and the reason of the miss is added."""
    story = Story()
    for event in told()[:4]:
        story.take(event)
    story.take(event.model_copy(update={"label": "agreed", "miss": "other code"}))
    ((_, _, site),) = story.sites
    assert (site.met.label, site.met.miss) == ("agreed", "other code")


def test_a_file_is_followed_while_it_is_written(path: Path):
    """Its parts come to the same as the whole, with a line cut in the middle; so does a file that is empty at first."""
    content, watcher = path.read_bytes(), Watcher(path.parent)
    path.write_bytes(b"")
    assert (watcher.poll(), watcher.story.damage) == (False, {0: f"{path}: the file is empty: rank 0 is left out"})
    path.write_bytes(content[: len(content) // 2])
    assert watcher.poll() is True
    assert "cut off: the rest of rank 0 is left out" in watcher.story.damage[0]
    path.write_bytes(content)
    assert (watcher.poll(), watcher.poll(), watcher.story.damage) == (True, False, {})
    assert watcher.story == story_of_folder(path.parent)


def test_of_several_runs_the_last_is_read(path: Path):
    """The job is started again while it is watched, and its files are appended to; what is damaged in an earlier run costs nothing."""
    watcher = Watcher(path.parent)
    watcher.poll()
    content = path.read_bytes()
    again = [header(0, 1, BEGIN + 60), *told(name="step#2")[1:4]]
    path.write_bytes(content + b"no event\n" + content + lines(again))
    for watched in (watcher, Watcher(path.parent)):
        watched.poll()
        assert (list(watched.story.tunings), watched.story.damage) == (["step#2"], {})
        assert watched.story.notes == ["rank-0.jsonl: 2 earlier runs of the job left out"]
    path.write_bytes(lines(told()[:6]))  # begun anew
    watcher.poll()
    assert (list(watcher.story.tunings), watcher.story.notes) == (["step#1"], [])


def test_ranks_that_an_earlier_job_left_behind_are_not_waited_for(path: Path):
    """It had more ranks, and was killed; the present job has finished. Other files of the folder are none of it."""
    (path.parent / "rank-x.jsonl").touch()
    killed = [header(1, 2, BEGIN - 60), *told(1, 2, name="step#0")[1:6]]
    (path.parent / "rank-1.jsonl").write_bytes(lines(killed))
    story = story_of_folder(path.parent)
    assert list(story.tunings) == ["step#1"]
    assert story.notes == ["files of an earlier job with another number of ranks are left out: ranks 1"]


# -- a tuning that is under way ----------------------------------------------------------------------------------------

N_ALL = len(list(events([record(0, 20)], 0, 2)))


def story_until(*n_events: int) -> tuple[Story, float]:
    """Each rank has told this many events; and the time of the last one."""
    story, last_at = Story(), 0.0
    for rank, n in enumerate(n_events):
        for event in list(events([record(0, 20)], rank, len(n_events)))[:n]:
            story.take(event)
            last_at = max(last_at, event.at)
    return story, last_at


def test_the_phase_the_replays_and_the_best_are_told():
    """In the race; after its first rung with the best so far. Of a site that is met late the bound is that of its own race alone."""
    story, last_at = story_until(N_ALL - 28, N_ALL - 28)
    first, second = progress_lines(story, last_at)
    assert first.startswith("step: race, replay ")
    assert " of at most 400, 2 ranks, " in first
    n_dropped = sum(each.failure is not None for each in record(0, 20).candidates)
    assert second == f"  gemm_0 [512, 2752]: 20 candidates, {n_dropped} dropped"
    story.take(kinds.PhaseBegun(at=last_at, rank=0, tuning="step#1", phase="race", bound=1))
    assert "at most" not in progress_lines(story, last_at)[0]
    assert "24 of 20 left, best so far" in progress_lines(*story_until(N_ALL - 20, N_ALL - 20))[1]


def test_ranks_that_are_silent_are_named():
    """The one that fell silent first is the first; not before some seconds have passed."""
    story, last_at = story_until(N_ALL - 28, N_ALL - 40)
    late = [each for each in progress_lines(story, last_at + 20.0) if "late" in each]
    assert late[0].startswith("  rank 1 is late: last event 20 s ago, in race, replay 13, first run of candidate 13 (BLOCK_M=32 ")
    assert late[1].startswith("  rank 0 is late: last event 20 s ago, in race, replay 19, first run of candidate 19 (BLOCK_M=128 ")
    assert [len(progress_lines(story, last_at + s, late_s)) for s, late_s in ((1.0, 5.0), (20.0, 20.0), (20.0, 60.0))] == [2, 4, 2]


@pytest.mark.parametrize("kind", ["phase", "meeting", "replay"])
def test_a_launch_that_has_not_come_back_is_named(kind: str):
    """With its config and its site, which is what a hang looks like from outside; a replay's end, a meeting and a phase come after it."""
    of_rank = list(events([record(0, 20)], 0, 1))
    n = next(k for k, event in enumerate(of_rank) if event.kind == "started")
    (story, _), started = story_until(n), of_rank[n]
    story.take(started)
    (line,) = [each for each in progress_lines(story, started.at + 12.0) if "late" in each]
    assert "first run of candidate 0 (BLOCK_M=16 " in line
    assert line.endswith(" of gemm_0 [512, 2752]")
    story.take(next(event for event in of_rank if event.kind == kind))
    assert "first run" not in progress_lines(story, started.at + 12.0)[-1]


def test_the_winners_of_a_tuning_that_has_ended_are_told():
    """And silence is no news then. Texts are printable."""
    story, _ = story_until(10_000, 10_000)
    first, second = progress_lines(story, BEGIN + 1e6)
    assert first.startswith("step: done, 2 ranks, ")
    assert "winner BLOCK_M=" in second
    next(iter(story.tunings.values())).closure = f"{FORGED}\x1b[2J"
    assert "\x1b" not in "".join(progress_lines(story, BEGIN))
