"""Events of a tuning in ``rank-<i>.jsonl``: for its owner alone, one a line, and none is worth a tuning."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_tune.errors import CandidateFailure, FailureKind
from dist_tune.files import opener
from dist_tune.output.events import EVENT, Met, RunBegun
from dist_tune.output.log import Logger
from dist_tune.output.story import Story
from dist_tune.output.terminal import Terminal

pytestmark = pytest.mark.once


def events_of(folder: Path, rank: int = 0) -> list[Any]:
    return [EVENT.validate_json(line) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines()]


def begun(folder: Path) -> Story:
    """A story with its beginning, which is not written before there is a site."""
    story = Story("f, call 1", 2, folder, 0, Terminal("f", is_shown=False))
    story.begin("f", Logger(lambda *_: None, 100), {})
    return story


def written(folder: Path, text: str = "text") -> list[str]:
    """Write one event, and what ends a tuning; returns the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        story = begun(folder)
        story.told("WARNING", text)
        story.broken("", {}, 0)
        story.close()
    return [str(each.message) for each in caught if each.category is UserWarning]


def test_a_tuning_without_a_site_leaves_no_file(tmp_path: Path):
    """Events wait for the first site, and are written with it: a call whose configs are known costs no file."""
    story = begun(tmp_path)
    story.met("manifest", 0.1)
    story.close()
    assert not list(tmp_path.iterdir())


def test_the_header_is_there_once_a_process(tmp_path: Path):
    """Two tunings of one process: one header, with the command and the versions, then their events in order."""
    for text in ("one", "two"):
        assert written(tmp_path, text) == []
    first, *others = events_of(tmp_path)
    assert isinstance(first, RunBegun)
    assert (first.pid, first.world_size, bool(first.command), first.versions["torch"]) == (os.getpid(), 2, True, torch.__version__)
    assert [each.text for each in others if each.kind == "message"] == ["one", "two"]
    assert {each.tuning for each in others} == {"f, call 1"}


def test_a_full_disk_costs_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The kernel's own full device: nothing is raised, the rest of the tuning writes no more, and the warning comes once."""
    full = lambda path, mode, **options: open("/dev/full", "r+b", buffering=0)  # noqa: E731, SIM115
    monkeypatch.setattr("dist_tune.output.log.open", full, raising=False)
    (text,) = [*written(tmp_path), *written(tmp_path)]
    assert os.strerror(errno.ENOSPC) in text
    assert "rank-0.jsonl" in text


def test_a_line_that_was_cut_off_ends_before_the_next(tmp_path: Path):
    """A process that was killed in the midst of a line: later events are lines of their own."""
    path = tmp_path / "rank-0.jsonl"
    with open(path, "wb", opener=opener()) as file:
        file.write(b'{"v": 1, "ki')
    written(tmp_path, "after")
    assert [EVENT.validate_json(line).kind for line in path.read_bytes().splitlines()[1:]] == ["run", "tuning", "phase", "message", "done"]


@pytest.mark.parametrize("text", ["a\nb\x1b[2J\u2028", "\udcff", "x" * 1_000_000])
def test_any_text_is_one_line(tmp_path: Path, text: str):
    """A newline in a name begins no line, and a lone surrogate costs no event."""
    written(tmp_path, text)
    lines = (tmp_path / "rank-0.jsonl").read_bytes().split(b"\n")
    assert lines[-1] == b""
    assert EVENT.validate_json(lines[-3]).kind == "message"


def test_an_event_that_cannot_be_is_left_out(tmp_path: Path):
    """A time that is no number, as of a clock that was lost: the other events are written, also with such words in a text."""
    story = begun(tmp_path)
    for topic, seconds in (("report", float("nan")), ("done", 1.0), ("NaN or Infinity", 1.0)):
        story.emit(Met, topic=topic, seconds=seconds)
    story.broken("", {}, 0)
    story.close()
    assert [each.topic for each in events_of(tmp_path) if each.kind == "meeting"] == ["done", "NaN or Infinity"]


def test_a_candidate_is_told_before_its_first_launch_and_once(tmp_path: Path):
    """On disk before the launch is made, as a hang would find it."""
    story = begun(tmp_path)
    story.site("k[64]", ("k", "[64]"), ["B=1", "B=2"])
    for replay, candidate in enumerate((1, 1, 0, 1)):
        story.starting({"k[64]": candidate}, replay)
        started = [(each.candidate, each.replay) for each in events_of(tmp_path) if each.kind == "started"]
        assert started == ([(1, 0)] if replay < 2 else [(1, 0), (0, 2)])
    story.close()


def test_a_journal_has_the_same_lines(tmp_path: Path):
    """Of sites and what was dropped; and what a restart alone reads."""
    journal: list[bytes] = []
    story = begun(tmp_path)
    story.open_journal(journal.append)
    story.site("k[64]", ("k", "[64]"), ["B=1", "B=2"], cache_key="0123")
    story.rename({"k[64]": "k[64]{code=1}"})
    story.under_way([("k[64]{code=1}", 1), ("unknown", 0)], is_alone=True)
    story.dropped({"k[64]{code=1}": {1: CandidateFailure(FailureKind.LAUNCH, "why")}})
    story.close()
    told: list[Any] = [EVENT.validate_json(line) for line in journal]
    assert [each.kind for each in told] == ["run", "site", "site", "under way", "dropped"]
    assert [(each.site, each.label, each.cache_key) for each in told[1:3]] == [(1, "k[64]", "0123"), (1, "k[64]{code=1}", "0123")]
    assert (told[3].candidates, told[3].is_alone) == ([(1, 1)], True)
    lines = (tmp_path / "rank-0.jsonl").read_bytes().splitlines(keepends=True)
    assert [line for line in journal[1:] if line not in lines] == [journal[3]]
