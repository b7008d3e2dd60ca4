"""The command watch: the present state of a folder of events, once or until there is nothing more to wait for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from tests.report.stories import BEGIN, events, lines, record, write_story
from tests.report_commands import refusal, run

pytestmark = pytest.mark.once


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    write_story(tmp_path / "logs", 2, 24)
    return tmp_path / "logs"


def test_watch_once_prints_the_present_state(logs: Path):
    """As lines, and with --json as a document."""
    assert run("watch", logs, "--once").stdout.startswith("step: done, 4 ranks, ")
    assert json.loads(run("watch", logs, "--once", "--json").stdout)["lines"][0].startswith("step: done")


class Waits:
    """Stands for ``time.sleep``: each wait does the next thing, and one too many is Ctrl-C."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], object]) -> None:
        self._steps = iter(steps)
        self.n_asked = 0
        monkeypatch.setattr("dist_tune.cli.report.time.sleep", self)

    def __call__(self, _seconds: float) -> None:
        self.n_asked += 1
        step = next(self._steps, None)
        if step is None:
            raise KeyboardInterrupt
        step()


def nothing() -> None:
    """No news."""


def plain(done: Result) -> str:
    """Its output without what moves a terminal's cursor."""
    return re.sub("\x1b\\[[^A-Za-z]*[A-Za-z]", "", done.stdout)


def heads(done: Result) -> list[str]:
    """What the output says of tunings, without their sites."""
    return [line.split(",")[0] for line in done.stdout.splitlines() if not line.startswith(" ")]


def test_watch_follows_until_all_have_finished(logs: Path, monkeypatch: pytest.MonkeyPatch):
    """Where stdout is no terminal: lines whenever there is something new. A job's next tuning is waited for as long as there is news."""
    file = logs / "rank-0.jsonl"
    steps = [list(events([record(0, 8)], 0, 1, name=f"step#{k}"))[1:] for k in (2, 3)]
    news = [steps[0][:4], steps[0][4:], steps[1][:4], steps[1][4:]]
    file.write_bytes(file.read_bytes() + lines(news[0]))
    appended = [lambda part=part: file.write_bytes(file.read_bytes() + lines(part)) for part in news[1:]]
    waits = Waits(monkeypatch, *appended, nothing, nothing)
    done = run("watch", logs)
    assert heads(done) == ["step: discover", "step: done", "step: discover", "step: done", "all 3 tunings have finished"]
    assert waits.n_asked == 4


@pytest.mark.parametrize("is_terminal", [False, True])
def test_watch_of_finished_tunings_ends(logs: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool):
    """At once, with the winners, the age, and the command that tells more."""
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "400")
    waits = Waits(monkeypatch)
    done = run("watch", logs)
    assert re.search("winner BLOCK_M=", done.stdout)
    last = plain(done).splitlines()[-1]
    assert re.fullmatch(r"the tuning has finished, \d+ d ago: dist-tune report .*/logs tells more", last)
    assert waits.n_asked == 0


@pytest.mark.parametrize("is_terminal", [False, True])
def test_watch_of_a_folder_without_events_says_what_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool):
    """Once, with the folder and the way out; then it follows the tuning that begins."""
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "400")
    told = list(events([record(0, 8)], 0, 1))
    file = tmp_path / "rank-0.jsonl"
    Waits(monkeypatch, nothing, nothing, lambda: file.write_bytes(lines(told[:6])), nothing, lambda: file.write_bytes(lines(told[:7])))
    done = run("watch", tmp_path)
    waiting = f"no tuning has written events in {tmp_path} yet: waiting for one, until Ctrl-C"
    assert waiting in done.stdout
    if not is_terminal:
        assert heads(done) == [waiting.partition(",")[0], "step: compile", "step: compile"]


def test_watch_of_a_dumb_terminal_tells_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It can redraw nothing, so it gets what a file gets."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    told = list(events([record(0, 8)], 0, 1))
    Waits(monkeypatch, lambda: (tmp_path / "rank-0.jsonl").write_bytes(lines(told[:6])))
    assert [line.split()[0] for line in heads(run("watch", tmp_path))] == ["no", "step:"]


def test_watch_fits_a_terminal_of_40_columns(logs: Path, monkeypatch: pytest.MonkeyPatch):
    """Lines are broken, and no word is lost."""
    wide = run("watch", logs).stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    *shown, command = plain(run("watch", logs)).splitlines()
    assert max(map(len, shown)) <= 40
    *picture, last = wide.splitlines()
    assert "".join("".join(shown).split()).replace("".join("".join(picture).split()), "", 2) == "", "the picture, drawn again at the end"
    assert command == last, "a command is not broken: it is copied"


def test_watch_may_be_started_before_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The log folder of this directory is made by the first tuning; a folder that is named and is not there is a mistake."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DIST_TUNE_LOG_DIR", raising=False)
    Waits(monkeypatch, nothing, lambda: write_story(tmp_path / ".autotune_logs", 1, 8), nothing)
    waiting, state, *_ = run("watch").stdout.splitlines()
    assert waiting == f"no tuning has written events in {tmp_path}/.autotune_logs yet: waiting for one, until Ctrl-C"
    assert state.startswith("step: done")
    assert refusal("watch", "elsewhere") == "dist-tune: elsewhere: No such file or directory"


def test_a_silence_is_told_where_nothing_is_redrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A rank that hangs writes nothing more: its silence is the news, told once however long it lasts."""
    (tmp_path / "rank-0.jsonl").write_bytes(lines(list(events([record(0, 8)], 0, 1))[:6]))
    passed_s = iter((0.0, 2.0, 7.0, 400.0, 900.0))
    monkeypatch.setattr("dist_tune.cli.report.time.time", lambda: BEGIN + 1.0 + next(passed_s))
    Waits(monkeypatch, nothing, nothing, nothing, nothing)
    shown = run("watch", tmp_path).stdout.splitlines()
    assert [line.partition(",")[0] for line in shown if "late" in line] == ["  rank 0 is late: last event 7 s ago"]
    assert sum(line.startswith("step: ") for line in shown) == 2
