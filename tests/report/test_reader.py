"""Event files: limits, what is passed over, and files that are followed while they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_tune.report import Watcher, progress_lines
from dist_tune.report.reader import EventFile
from tests.report.stories import BEGIN, events, header, lines, record

pytestmark = pytest.mark.once


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(lines(events([record(0, 12)], 0)))
    return path


def kinds(file: EventFile) -> list[str]:
    return [event.kind for event in file.read()]


def test_a_file_is_read_on_from_where_the_reading_ended(path: Path):
    """A log that is being written: its halves come to the same as the whole, with a line cut in the middle."""
    content = path.read_bytes()
    whole = kinds(EventFile(path, 0))
    file = EventFile(path, 0)
    path.write_bytes(content[: len(content) // 2])
    first = kinds(file)
    assert first
    assert "cut off: the rest of rank 0 is left out" in file.damage
    path.write_bytes(content)
    assert first + kinds(file) == whole
    assert (kinds(file), file.damage) == ([], "")


def test_a_whole_last_line_needs_no_line_end(path: Path):
    """It is an event already."""
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    file = EventFile(path, 0)
    assert (kinds(file)[-1], file.damage) == ("done", "")


@pytest.mark.parametrize("damage", [(b'"at":17', b'"at":17e300'), (b'"seconds":0.0', b'"seconds":1e3000'), (b'"at":17', b'"at":-17')])
def test_a_time_that_no_clock_shows_is_damage(path: Path, damage: tuple[bytes, bytes]):
    """Dates and sums of it would fail."""
    content = path.read_bytes()
    assert damage[0] in content
    path.write_bytes(content.replace(*damage, 1))
    file = EventFile(path, 0)
    kinds(file)
    assert ": no event: " in file.damage


def test_of_several_runs_the_last_is_read(path: Path):
    """The job was started again, and its files are appended to: what is damaged in an earlier run costs nothing."""
    content = path.read_bytes()
    path.write_bytes(content + b"no event\n" + content + lines([header(0, at=BEGIN + 3600)]))
    file = EventFile(path, 0)
    assert [event.at for event in file.read()] == [BEGIN + 3600]
    assert (file.n_earlier_runs, file.damage) == (2, "")


def test_an_empty_file_may_yet_be_written(path: Path):
    """It is damage, and no reason to refuse what a tuning is about to write."""
    content = path.read_bytes()
    path.write_bytes(b"")
    file = EventFile(path, 0)
    assert kinds(file) == []
    assert (file.refusal, file.damage) == ("", f"{path}: the file is empty: rank 0 is left out")
    path.write_bytes(content)
    assert kinds(file) == kinds(EventFile(path, 0))
    assert file.damage == ""


def test_a_file_that_another_job_begins_anew_has_its_own_damage(path: Path):
    """Lines that were damaged before are gone."""
    content = path.read_bytes()
    path.write_bytes(content + b"no event\n" * 100)
    file = EventFile(path, 0)
    n_lines = len(kinds(file))
    assert file.damage.endswith(f", line {n_lines + 1}: no event: the rest of rank 0 is left out")
    path.write_bytes(content[: len(content) // 2])
    assert kinds(file)
    path.write_bytes(content)
    assert kinds(file)
    assert file.damage == ""


def test_files_that_grow_and_ranks_that_join_are_followed(tmp_path: Path):
    """A poll takes in what is new; other files of the folder are none of it."""
    (tmp_path / "rank-x.jsonl").touch()
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
    assert watcher.notes == ["rank-0.jsonl: 1 earlier run of the job left out"]


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
