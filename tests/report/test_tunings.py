"""What event files and records come to: files cut off, damaged, of several runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_tune.log import events as kinds
from dist_tune.report import Story, UnreadableEventsError, story_of_folder, story_of_records
from tests.report.stories import BEGIN, events, header, lines, record, write_story


def told(rank: int = 0, n_ranks: int = 1, name: str = "step#1") -> list[kinds.AnyEvent]:
    return list(events([record(0, 8)], rank, n_ranks, name=name))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(lines(told()))
    return path


def test_all_ranks_tell_of_the_same_sites(tmp_path: Path):
    """Each site once, with its record; each rank with its own replays, compilations and
    meetings.
    """
    records = write_story(tmp_path, n_sites=3, n_candidates=12)
    story = story_of_folder(tmp_path)
    (tuning,) = story.tunings.values()
    assert [site.record for _, _, site in story.sites] == records
    assert sorted(tuning.ranks) == [0, 1, 2, 3]
    rank = tuning.ranks[2]
    assert (rank.done and rank.done.best_ms, story.notes) == (1.62, [])


def test_what_is_missing_is_said(tmp_path: Path):
    """Ranks without files, a tuning that goes on, a rank that ended with an error, a record of
    another version; a folder without events.
    """
    with pytest.raises(UnreadableEventsError, match=r"no rank-<i>\.jsonl in .* tells of a tuning"):
        story_of_folder(tmp_path)
    (tmp_path / "rank-0.jsonl").write_bytes(lines([header(0)]))
    with pytest.raises(UnreadableEventsError, match="tells of a tuning"):
        story_of_folder(tmp_path)
    of_one = told(0, 4)
    (tmp_path / "rank-0.jsonl").write_bytes(
        lines(of_one[:-1]).replace(b'"schema_version":3', b'"schema_version":2')
    )
    failed = of_one[-1].model_copy(
        update={"rank": 1, "error": "RankTimeoutError: rank 3 did not come"}
    )
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
    left_out = (
        "line 3: no event of version 1, which this dist_tune reads: the rest of rank 0 is left out"
    )
    assert story.damage == {0: f"{path}, {left_out}"}


def test_records_of_one_tuning_are_one_tuning():
    """They share the closure, its seconds and its replays; another tuning is told apart."""
    story = story_of_records([record(0, 6), record(1, 6), record(2, 6, seconds=3.0)])
    assert [len(tuning.sites) for tuning in story.tunings.values()] == [2, 1]


def test_what_a_rank_says_later_of_a_site_counts():
    """Its number stays: the label that ranks agreed on takes the place of the first, and the reason
    of the miss is added.
    """
    story = Story()
    for event in told()[:4]:
        story.take(event)
    story.take(event.model_copy(update={"label": "agreed", "miss": "other code"}))
    ((_, _, site),) = story.sites
    assert (site.met.label, site.met.miss) == ("agreed", "other code")


def test_a_file_may_be_written_while_it_is_read(path: Path):
    """It is empty at first, and its last line may be cut."""
    content, empty = path.read_bytes(), path.with_name("rank-1.jsonl")
    empty.write_bytes(b"")
    path.write_bytes(content[: len(content) // 2].replace(b'"world_size":1', b'"world_size":2'))
    damage = story_of_folder(path.parent).damage
    assert damage[1] == f"{empty}: the file is empty: rank 1 is left out"
    assert "cut off: the rest of rank 0 is left out" in damage[0]


def test_of_several_runs_the_last_is_read(path: Path):
    """A job that is started again appends to its files; damage in an earlier run costs nothing."""
    content = path.read_bytes()
    again = [header(0, 1, BEGIN + 60), *told(name="step#2")[1:4]]
    path.write_bytes(content + b"no event\n" + content + lines(again))
    story = story_of_folder(path.parent)
    assert (list(story.tunings), story.damage) == (["step#2"], {})
    assert story.notes[0] == "rank-0.jsonl: 2 earlier runs of the job left out"


def test_ranks_that_an_earlier_job_left_behind_are_not_waited_for(path: Path):
    """It had more ranks, and was killed; the present job has finished.

    Other files of the folder are none of it.
    """
    (path.parent / "rank-x.jsonl").touch()
    killed = [header(1, 2, BEGIN - 60), *told(1, 2, name="step#0")[1:6]]
    (path.parent / "rank-1.jsonl").write_bytes(lines(killed))
    story = story_of_folder(path.parent)
    assert list(story.tunings) == ["step#1"]
    assert story.notes == [
        "files of an earlier job with another number of ranks are left out: ranks 1"
    ]
