"""Event files: limits, and what is passed over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dist_tune.report.reading import MAX_LINE_BYTES, EventFile, event_files
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
    whole = kinds(EventFile(path))
    file = EventFile(path)
    path.write_bytes(content[: len(content) // 2])
    first = kinds(file)
    assert first
    assert "cut off, passed over" in file.damage
    path.write_bytes(content)
    assert first + kinds(file) == whole
    assert kinds(file) == []
    assert file.damage == ""


def test_a_last_line_that_is_cut_off_is_passed_over_with_its_number(path: Path):
    """The events before it are there."""
    n_lines = path.read_bytes().count(b"\n")
    path.write_bytes(path.read_bytes()[:-40])
    file = EventFile(path)
    assert kinds(file)[-1] == "winner"
    assert (file.damage, file.is_unusable) == (f"{path}, line {n_lines}: cut off, passed over", False)


def test_a_whole_last_line_needs_no_line_end(path: Path):
    """It is an event already."""
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    file = EventFile(path)
    assert kinds(file)[-1] == "done"
    assert file.damage == ""


def test_a_damaged_line_is_passed_over_with_its_number(path: Path):
    """A process was killed in the middle of a line, and the next one wrote on."""
    content = path.read_bytes().splitlines(keepends=True)
    content[3:3] = [b'{"v":1,"at":17.0,"ra{"v":1}\n', b"\0\0\0\n"]
    path.write_bytes(b"".join(content))
    file = EventFile(path)
    assert len(kinds(file)) == len(content) - 2
    assert file.damage == f"{path}, line 4: no event, passed over, and so is 1 more line"


@pytest.mark.parametrize(
    "line", [b'{"v":2,"kind":"from the future"}\n', b'{"v":2,"kind":"message","at":1,"rank":0,"level":"W","text":""}\n']
)
def test_another_version_is_one_line(path: Path, line: bytes):
    """With both versions, whether or not the event is known."""
    path.write_bytes(line)
    file = EventFile(path)
    assert kinds(file) == kinds(file) == []
    reason = f"{path}, line 1: written with events version 2, and this dist_tune reads version 1"
    assert (file.is_unusable, file.reason, file.damage) == (True, reason, f"{reason}: rank 0 is left out")


def test_a_file_without_any_event_is_one_line(path: Path):
    """Such as a log for people under the wrong name."""
    path.write_text("12:00:00 INFO rank=0 winner=3\n" * 3)
    file = EventFile(path)
    assert kinds(file) == []
    assert (file.is_unusable, file.reason) == (True, f"{path}, line 1: no event, nor is any other line")


@pytest.mark.parametrize("damage", [(b'"at":17', b'"at":17e300'), (b'"seconds":0.0', b'"seconds":1e3000'), (b'"at":17', b'"at":-17')])
def test_a_time_that_no_clock_shows_is_damage(path: Path, damage: tuple[bytes, bytes]):
    """Dates and sums of it would fail."""
    content = path.read_bytes()
    n_lines = content.count(b"\n")
    assert damage[0] in content
    path.write_bytes(content.replace(*damage, 1))
    file = EventFile(path)
    assert len(kinds(file)) == n_lines - 1
    assert "no event, passed over" in file.damage


def test_a_line_without_end_is_not_read_into_memory(path: Path):
    """More than 8 MiB of it are never asked for."""
    path.write_bytes(b"")
    os.truncate(path, MAX_LINE_BYTES + 2)
    file = EventFile(path)
    assert kinds(file) == []
    assert (file.is_unusable, file.reason) == (True, f"{path}, line 1: more than 8 MiB, and no event has as many")


def test_a_file_of_a_gigabyte_is_one_line(path: Path):
    """It names the size and the limit."""
    os.truncate(path, 2**30)
    file = EventFile(path)
    assert kinds(file) == []
    assert "rank-0.jsonl: 1024 MiB, and at most 256 MiB are read" in file.reason


def test_of_several_runs_the_last_is_read(path: Path):
    """The job was started again, and its files are appended to."""
    path.write_bytes(path.read_bytes() * 2 + lines([header(0, at=BEGIN + 3600)]))
    file = EventFile(path)
    assert [event.at for event in file.read()] == [BEGIN + 3600]
    assert (file.n_earlier_runs, file.damage) == (2, "")


def test_an_empty_file_may_yet_be_written(path: Path):
    """It is damage, and no reason to refuse what a tuning is about to write."""
    content = path.read_bytes()
    path.write_bytes(b"")
    file = EventFile(path)
    assert kinds(file) == []
    assert (file.is_unusable, file.damage) == (False, f"{path}: the file is empty: rank 0 is left out")
    path.write_bytes(content)
    assert kinds(file) == kinds(EventFile(path))
    assert file.damage == ""


def test_a_file_that_another_job_begins_anew_has_its_own_damage(path: Path):
    """Lines that were damaged before are gone."""
    content = path.read_bytes()
    path.write_bytes(content + b"no event\n" * 100)
    file = EventFile(path)
    assert kinds(file)
    assert file.damage.endswith(": no event, passed over, and so are 99 more lines")
    path.write_bytes(content)
    assert kinds(file)
    assert file.damage == ""


def test_files_are_in_the_order_of_ranks(tmp_path: Path):
    """And others of the folder are not among them."""
    for name in ("rank-10.jsonl", "rank-2.jsonl", "rank-0.log", "rank-x.jsonl"):
        (tmp_path / name).touch()
    assert [each.name for each in event_files(tmp_path)] == ["rank-2.jsonl", "rank-10.jsonl"]
