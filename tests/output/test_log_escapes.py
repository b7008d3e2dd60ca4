"""Lines of the log hold names, keys and error texts of any origin; each event stays one line that a terminal can show."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_tune.output.log import tuning_log
from dist_tune.output.words import printable
from dist_tune.settings import Settings
from tests.log_lines import lines_of

pytestmark = pytest.mark.once

FORGED = "f\n12:00:00.000 INFO    winner=7\x1b[2J\r\x07\u202e\x00"
"""A name with what reads as a second event, and with escape sequences."""


def written(folder: Path, text: str) -> bytes:
    """The file of a tuning that logged this text as progress."""
    with tuning_log(Settings().model_copy(update={"log_dir": folder}), 0, True) as log:
        log.bind(progress=True).info(text)
    return (folder / "rank-0.log").read_bytes()


def test_a_name_begins_no_line_and_moves_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """In the file and on the terminal: one line each, with the characters escaped."""
    line = written(tmp_path, FORGED).decode().splitlines(keepends=True)[-1]
    escaped = r"f\n12:00:00.000 INFO    winner=7\x1b[2J\r\x07\u202e\x00"
    assert line[13:] == f"INFO    {escaped}\n"
    assert capsys.readouterr().err == f"dist_tune: {escaped}\n"


def test_what_utf_8_cannot_hold_costs_no_log(tmp_path: Path):
    """A lone surrogate, as in a file name that is no text: the line is written, and those after it."""
    assert written(tmp_path, "\udcff").endswith(b"\\udcff\n")
    written(tmp_path, "after")
    assert len(lines_of(tmp_path / "rank-0.log")) == 2


@given(st.text())
def test_any_text_is_one_printable_line(text: str):
    """Text that was printable stays as it is."""
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)
    assert not text.isprintable() or printable(text) == text
