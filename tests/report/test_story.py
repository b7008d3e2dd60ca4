"""What the events of all ranks come to."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_tune.report import Story, UnreadableEventsError, story_of_folder, story_of_records, trace_events
from tests.report.stories import BEGIN, events, header, lines, record, write_story

pytestmark = pytest.mark.once


def test_all_ranks_tell_of_the_same_sites(tmp_path: Path):
    """Each site once, with its record; each rank with its own replays, compilations and meetings."""
    records = write_story(tmp_path, n_sites=3, n_candidates=12)
    story = story_of_folder(tmp_path)
    (tuning,) = story.tunings.values()
    assert [site.record for site in tuning.sites.values()] == records
    assert sorted(tuning.ranks) == [0, 1, 2, 3]
    rank = tuning.ranks[2]
    assert (rank.phase, len(rank.replays), len(rank.meetings), len(rank.compiles)) == ("done", 32, 4, 9)
    assert [phase.phase for phase in rank.phases] == ["discover", "compile", "race", "finals", "settle"]
    assert (tuning.first_ms, tuning.best_ms, story.notes) == (2.31, 1.62, [])


def test_sites_are_matched_by_label_and_not_by_number():
    """Two ranks that meet two sites in another order tell of two sites."""
    story, records = Story(), [record(0, 6), record(1, 6)]
    for rank, order in ((0, records), (1, records[::-1])):
        for event in events(order, rank, 2):
            story.take(event)
    (tuning,) = story.tunings.values()
    assert {site.met.kernel: site.won and site.won.record["kernel"] for site in tuning.sites.values()} == {
        each.kernel: each.kernel for each in records
    }


def test_files_of_an_earlier_job_with_more_ranks_are_left_out(tmp_path: Path):
    """The newest header says how many ranks there are."""
    write_story(tmp_path, 1, 6, n_ranks=4)
    for rank in range(2):
        (tmp_path / f"rank-{rank}.jsonl").write_bytes(
            lines([header(rank, 2, BEGIN + 60), *(each for each in events([record(0, 6)], rank, 2) if each.kind != "run")])
        )
    story = story_of_folder(tmp_path)
    assert sorted(story.runs) == [0, 1]
    assert story.notes == ["files of an earlier job with another number of ranks are left out: ranks 2, 3"]


def test_what_is_missing_is_said(tmp_path: Path):
    """Ranks without files, a tuning that goes on, a rank that ended with an error."""
    told = list(events([record(0, 6)], 0))
    (tmp_path / "rank-0.jsonl").write_bytes(lines(told[:-1]))
    failed = told[-1].model_copy(update={"rank": 1, "error": "RankTimeoutError: rank 3 did not come"})
    (tmp_path / "rank-1.jsonl").write_bytes(lines([failed]))
    notes = "\n".join(story_of_folder(tmp_path).notes)
    assert "no events of 2 of 4 ranks (2, 3)" in notes
    assert "had not ended on 1 of 2 ranks" in notes
    assert "rank 1 ended with RankTimeoutError" in notes


def test_a_record_of_another_schema_is_a_note(tmp_path: Path):
    """Its site is there, without figures."""
    told = [
        each.model_copy(update={"record": each.record | {"schema_version": 2}}) if each.kind == "winner" else each
        for each in events([record(0, 6)], 0, 1)
    ]
    (tmp_path / "rank-0.jsonl").write_bytes(lines(told))
    story = story_of_folder(tmp_path)
    assert story.sites[0][1].record is None
    assert story.notes == [
        "site 0: its record cannot be read (schema_version: Value error, written with schema 2, and this dist_tune reads schema 3)"
    ]


def test_a_rank_whose_phases_were_passed_over_has_none(tmp_path: Path):
    """Its other events are there, in the page and in the trace."""
    (tmp_path / "rank-0.jsonl").write_bytes(lines([each for each in events([record(0, 6)], 0, 1) if each.kind != "phase"]))
    story = story_of_folder(tmp_path)
    (tuning,) = story.tunings.values()
    assert tuning.ranks[0].replays
    assert list(trace_events(story))


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
    for event in list(events([record(0, 6)], 0, 1))[:4]:
        story.take(event)
    assert event.kind == "site"
    story.take(event.model_copy(update={"label": "agreed", "miss": "other code"}))
    ((_, site),) = story.sites
    assert (site.met.label, site.met.miss) == ("agreed", "other code")


@pytest.mark.parametrize("kind", ["phase", "meeting", "replay"])
def test_a_launch_has_come_back_once_something_else_is_told(kind: str):
    """A replay's end, a meeting and a phase all come after it."""
    story = Story()
    told = list(events([record(0, 6)], 0, 1))
    started = next(event for event in told if event.kind == "started")
    story.take(started)
    (tuning,) = story.tunings.values()
    assert tuning.ranks[0].started == [started]
    story.take(next(event for event in told if event.kind == kind))
    assert tuning.ranks[0].started == []
