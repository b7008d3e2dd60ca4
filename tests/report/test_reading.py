"""Event files: limits, and what is passed over."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_tune.report.reading import MAX_LINE_BYTES, EventFile, UnreadableEventsError, event_files
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
    path.write_bytes(content)
    assert first + kinds(file) == whole
    assert kinds(file) == []
    assert file.notes == []


def test_a_last_line_that_is_cut_off_is_passed_over_with_a_note(path: Path):
    """The events before it are there."""
    path.write_bytes(path.read_bytes()[:-40])
    file = EventFile(path)
    assert kinds(file)[-1] == "winner"
    assert file.notes == ["rank-0.jsonl: the last line is cut off and is passed over"]


def test_a_whole_last_line_needs_no_line_end(path: Path):
    """It is an event already."""
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    file = EventFile(path)
    assert kinds(file)[-1] == "done"
    assert file.notes == []


def test_a_damaged_line_is_passed_over_with_its_number(path: Path):
    """A process was killed in the middle of a line, and the next one wrote on."""
    content = path.read_bytes().splitlines(keepends=True)
    content[3:3] = [b'{"v":1,"at":17.0,"ra{"v":1}\n', b"\0\0\0\n"]
    path.write_bytes(b"".join(content))
    file = EventFile(path)
    assert len(kinds(file)) == len(content) - 2
    assert file.notes == ["rank-0.jsonl: 2 lines are no events and are passed over, the first is line 4"]


@pytest.mark.parametrize(
    "line", [b'{"v":2,"kind":"from the future"}\n', b'{"v":2,"kind":"message","at":1,"rank":0,"level":"W","text":""}\n']
)
def test_another_version_is_one_line(path: Path, line: bytes):
    """With both versions, whether or not the event is known."""
    path.write_bytes(line)
    with pytest.raises(UnreadableEventsError, match="line 1: written with events version 2, and this dist_tune reads version 1"):
        kinds(EventFile(path))


def test_a_file_without_any_event_is_one_line(path: Path):
    """Such as a log for people under the wrong name."""
    path.write_text("12:00:00 INFO rank=0 winner=3\n" * 3)
    with pytest.raises(UnreadableEventsError, match="holds no events of a tuning: line 1 is none"):
        kinds(EventFile(path))


def test_a_line_without_end_is_not_read_into_memory(path: Path):
    """More than 8 MiB of it are never asked for."""
    with open(path, "wb") as file:
        file.truncate(MAX_LINE_BYTES + 2)
    with pytest.raises(UnreadableEventsError, match="a line of more than 8 MiB"):
        kinds(EventFile(path))


def test_a_file_of_a_gigabyte_is_one_line(path: Path):
    """It names the size and the limit."""
    with open(path, "ab") as file:
        file.truncate(2**30)
    with pytest.raises(UnreadableEventsError, match="has 1024 MiB, and at most 256 MiB are read"):
        kinds(EventFile(path))


def test_of_several_runs_the_last_is_read(path: Path):
    """The job was started again, and its files are appended to."""
    path.write_bytes(path.read_bytes() * 2 + lines([header(0, at=BEGIN + 3600)]))
    file = EventFile(path)
    assert [event.at for event in file.read()] == [BEGIN + 3600]
    assert file.notes == ["rank-0.jsonl: 2 earlier runs of the job left out"]


def test_files_are_in_the_order_of_ranks(tmp_path: Path):
    """And others of the folder are not among them."""
    for name in ("rank-10.jsonl", "rank-2.jsonl", "rank-0.log", "rank-x.jsonl"):
        (tmp_path / name).touch()
    assert [each.name for each in event_files(tmp_path)] == ["rank-2.jsonl", "rank-10.jsonl"]
