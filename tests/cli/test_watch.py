"""The command watch: the present state of a folder of events, once or until there is nothing more to wait for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.report.stories import events, lines, record, write_story
from tests.report_commands import run

pytestmark = pytest.mark.once


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    write_story(tmp_path / "logs", 2, 24)
    return tmp_path / "logs"


def test_watch_once_prints_the_present_state(logs: Path):
    """As lines, and with --json as a document."""
    assert run("watch", logs, "--once").stdout.startswith("step: done, 4 ranks, ")
    assert json.loads(run("watch", logs, "--once", "--json").stdout)["lines"][0].startswith("step: done")


def test_watch_follows_until_it_is_interrupted(logs: Path, monkeypatch: pytest.MonkeyPatch):
    """Where stdout is no terminal: lines whenever there is something new."""
    told = list(events([record(0, 8)], 0, 1, name="step#2"))[1:]
    file = logs / "rank-0.jsonl"
    waits = iter([lambda: file.write_bytes(file.read_bytes() + lines(told[:4])), lambda: None])

    def sleep(_seconds: float) -> None:
        step = next(waits, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    monkeypatch.setattr("dist_tune.cli.report.time.sleep", sleep)
    shown = run("watch", logs).stdout.splitlines()
    assert [line.split(",")[0] for line in shown if not line.startswith(" ")] == ["step: done", "step: discover"]


def test_watch_fits_a_terminal_of_40_columns(logs: Path, monkeypatch: pytest.MonkeyPatch):
    """Lines are broken, and no word is lost."""

    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    wide = run("watch", logs, "--once").stdout
    monkeypatch.setattr("dist_tune.cli.report.time.sleep", interrupt)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    shown = re.sub("\x1b\\[[^A-Za-z]*[A-Za-z]", "", run("watch", logs).stdout)
    assert max(map(len, shown.splitlines())) <= 40
    assert "".join(shown.split()).replace("".join(wide.split()), "", 2) == "", "the picture, drawn again at the end"
