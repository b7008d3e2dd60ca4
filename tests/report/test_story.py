"""What event files and records come to: files that are written, cut off, damaged or of several runs, and ranks that join."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_tune.output import events as kinds
from dist_tune.report import Story, UnreadableEventsError, Watcher, progress_lines, story_of_folder, story_of_records
from tests.report.stories import BEGIN, events, header, lines, record, write_story

pytestmark = pytest.mark.once


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
    assert [site.record for _, site in story.sites] == records
    assert sorted(tuning.ranks) == [0, 1, 2, 3]
    rank = tuning.ranks[2]
    assert [len(rank.of(kind)) for kind in (kinds.Replayed, kinds.Met, kinds.Compiled)] == [32, 4, 9]
    assert [phase.phase for phase in rank.of(kinds.PhaseBegun)] == ["discover", "compile", "race", "finals", "settle"]
    assert (rank.phase, tuning.end.first_ms, tuning.end.best_ms, story.notes) == ("done", 2.31, 1.62, [])


def test_what_is_missing_is_said(tmp_path: Path):
    """Ranks without files, a tuning that goes on, a rank that ended with an error."""
    of_one = told(0, 4)
    (tmp_path / "rank-0.jsonl").write_bytes(lines(of_one[:-1]))
    failed = of_one[-1].model_copy(update={"rank": 1, "error": "RankTimeoutError: rank 3 did not come"})
    (tmp_path / "rank-1.jsonl").write_bytes(lines([failed]))
    notes = "\n".join(story_of_folder(tmp_path).notes)
    assert "no events of 2 of 4 ranks (2, 3)" in notes
    assert "had not ended on 1 of 2 ranks" in notes
    assert "rank 1 ended with RankTimeoutError" in notes


def test_the_rank_that_came_to_the_end_tells_of_the_sites(tmp_path: Path):
    """The first one's file is damaged behind its second line."""
    write_story(tmp_path, 1, 6)
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(b"".join([*path.read_bytes().splitlines(keepends=True)[:2], b"no event\n"]))
    story = story_of_folder(tmp_path)
    assert [site.record for _, site in story.sites] == [record(0, 6)]
    assert story.damage == [f"{path}, line 3: no event: the rest of rank 0 is left out"]


def test_a_record_of_another_schema_is_a_note(path: Path):
    """Its site is there, without figures."""
    path.write_bytes(path.read_bytes().replace(b'"schema_version":3', b'"schema_version":2'))
    story = story_of_folder(path.parent)
    assert [site.record for _, site in story.sites] == [None]
    assert story.notes == ["site 0: its record cannot be read (written with schema 2, and this dist_tune reads schema 3)"]


def test_a_folder_without_events_is_one_line(tmp_path: Path):
    """So is one whose ranks have yet to begin a tuning."""
    with pytest.raises(UnreadableEventsError, match=r"there is no rank-<i>\.jsonl in"):
        story_of_folder(tmp_path)
    (tmp_path / "rank-0.jsonl").write_bytes(lines([header(0)]))
    with pytest.raises(UnreadableEventsError, match="tell of no tuning yet"):
        story_of_folder(tmp_path)


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
    ((_, site),) = story.sites
    assert (site.met.label, site.met.miss) == ("agreed", "other code")


def test_a_file_is_followed_while_it_is_written(path: Path):
    """Its parts come to the same as the whole, with a line cut in the middle; so does a file that is empty at first."""
    content, watcher = path.read_bytes(), Watcher(path.parent)
    path.write_bytes(b"")
    assert (watcher.poll(), watcher.damage) == (False, {0: f"{path}: the file is empty: rank 0 is left out"})
    path.write_bytes(content[: len(content) // 2])
    assert watcher.poll() is True
    assert "cut off: the rest of rank 0 is left out" in watcher.damage[0]
    path.write_bytes(content)
    assert (watcher.poll(), watcher.poll(), watcher.damage) == (True, False, {})
    assert watcher.story == story_of_folder(path.parent)


def test_ranks_that_join_are_followed(tmp_path: Path):
    """Other files of the folder are none of it."""
    (tmp_path / "rank-x.jsonl").touch()
    watcher, first = Watcher(tmp_path), told(0, 2)
    assert watcher.poll() is False
    (tmp_path / "rank-0.jsonl").write_bytes(lines(first[:6]))
    assert watcher.poll() is True
    assert "1 of 2 ranks" in progress_lines(watcher.story, first[5].at)[0]
    (tmp_path / "rank-0.jsonl").write_bytes(lines(first))
    (tmp_path / "rank-1.jsonl").write_bytes(lines(told(1, 2)))
    assert (watcher.poll(), watcher.poll()) == (True, False)
    assert progress_lines(watcher.story, BEGIN)[0].startswith("step: done, 2 ranks")


@pytest.mark.parametrize("damage", [(b'"at":17', b'"at":17e300'), (b'"seconds":0.0', b'"seconds":1e3000'), (b'"at":17', b'"at":-17')])
def test_a_time_that_no_clock_shows_is_damage(path: Path, damage: tuple[bytes, bytes]):
    """Dates and sums of it would fail."""
    content = path.read_bytes()
    assert damage[0] in content
    path.write_bytes(content.replace(*damage, 1))
    (path.parent / "rank-1.jsonl").write_bytes(lines(told(1, 2)))
    assert ": no event: " in story_of_folder(path.parent).damage[0]


def test_of_several_runs_the_last_is_read(path: Path):
    """The job is started again while it is watched, and its files are appended to; what is damaged in an earlier run costs nothing."""
    watcher = Watcher(path.parent)
    watcher.poll()
    content = path.read_bytes()
    again = [header(0, 1, BEGIN + 60), *told(name="step#2")[1:4]]
    path.write_bytes(content + b"no event\n" + content + lines(again))
    for watched in (watcher, Watcher(path.parent)):
        watched.poll()
        assert (list(watched.story.tunings), watched.damage) == (["step#2"], {})
        assert watched.notes == ["rank-0.jsonl: 2 earlier runs of the job left out"]
    path.write_bytes(lines(told()[:6]))  # begun anew
    watcher.poll()
    assert (list(watcher.story.tunings), watcher.notes) == (["step#1"], [])


def test_ranks_that_an_earlier_job_left_behind_are_not_waited_for(path: Path):
    """It had more ranks, and was killed; the present job has finished."""
    killed = [header(1, 2, BEGIN - 60), *told(1, 2, name="step#0")[1:6]]
    (path.parent / "rank-1.jsonl").write_bytes(lines(killed))
    watcher = Watcher(path.parent)
    assert not watcher.is_over
    watcher.poll()
    assert (watcher.is_over, list(watcher.story.tunings)) == (True, ["step#1"])
    assert watcher.notes == ["files of an earlier job with another number of ranks are left out: ranks 1"]
