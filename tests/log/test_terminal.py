"""Progress on the first rank's terminal: one live line, or a plain one every few seconds."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dist_tune.log.terminal import LIVE_EVERY_S, Terminal


class _Screen(io.TextIOWrapper):
    """A terminal of few rows, or a file; or it refuses what is written."""

    def __init__(self, *, is_terminal: bool = True, is_full: bool = False) -> None:
        super().__init__(io.BytesIO(), "utf-8", write_through=True)
        self.is_terminal, self.is_full = is_terminal, is_full

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        if self.is_full:
            raise BrokenPipeError
        return super().write(text)

    @property
    def text(self) -> str:
        return str(self.buffer.getvalue().decode())  # type: ignore[attr-defined]

    @property
    def rows(self) -> list[str]:
        """Rows as a terminal would show them, without the empty ones at the end."""
        rows, at, saved = [""], (0, 0), (0, 0)
        for each in re.findall(r"\x1b\[J|\x1b.|.", self.text, re.DOTALL):
            row, column = at
            if each in ("\n", "\x1bD"):
                at = row + 1, 0 if each == "\n" else column
                rows += [""] * (row + 2 - len(rows))
            elif each == "\x1b[J":
                rows[row:] = [rows[row][:column]]
            elif each == "\r":
                at = row, 0
            elif each == "\x1bM":
                at = row - 1, column
            elif each in ("\x1b7", "\x1b8"):
                saved, at = (at, at) if each == "\x1b7" else (saved, saved)
            else:
                if column == int(os.environ["COLUMNS"]):  # it wraps
                    row, column = row + 1, 0
                    rows += [""] * (row + 1 - len(rows))
                rows[row] = f"{rows[row][:column].ljust(column)}{each}{rows[row][column + 1 :]}"
                at = row, column + 1
        return "\n".join(each.rstrip() for each in rows).rstrip("\n").split("\n")

    @property
    def row(self) -> str:
        """The last row, without spaces before."""
        return self.rows[-1].lstrip()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds that pass when the test says so; the terminal understands escapes and has 100
    columns.
    """
    made = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: made.now)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return made


def shown_on(
    screen: Any, monkeypatch: pytest.MonkeyPatch, name: str = "m.f", *, is_shown: bool = True
) -> tuple[Any, Terminal]:
    """This stream in place of stderr, and the progress of a tuning on it."""
    monkeypatch.setattr(sys, "stderr", screen)
    return screen, Terminal(name, is_shown=is_shown)


def test_the_live_line_says_phase_number_best_and_time_left(
    clock: Any, monkeypatch: pytest.MonkeyPatch
):
    """Drawn at most four times a second, in place of the line before; gone at the end."""
    screen, progress = shown_on(_Screen(), monkeypatch, "kernels.ag_gemm.step")
    progress.begin_phase("race")
    progress.expect(40, 2.0)
    progress.best_ms |= {"a": 0.1, "b": 0.0464}
    rows = []
    for n in range(1, 21):
        clock.now += 0.1
        progress.step(n)
        rows.append(screen.row)
    assert rows[2] == "step: racing 3 of at most 40, best 0.146 ms, 6 s left if all are needed"
    assert len(dict.fromkeys(rows)) - 1 <= 2.0 / LIVE_EVERY_S  # less the empty row before the first
    progress.end()
    assert (screen.row, "\n" in screen.text) == ("", False)


def test_what_the_program_prints_stands_alone(clock: Any, monkeypatch: pytest.MonkeyPatch):
    """From Python, C or another rank: the live line is in the row below.

    A line of ours begins a row, also behind the program's bar.
    """
    screen, progress = shown_on(_Screen(), monkeypatch)

    def above() -> list[str]:
        clock.now += 1
        progress.step(1, 2)
        assert screen.row.startswith("f: first run 1 of 2")
        return [row for row in screen.rows[:-1] if row]

    assert above() == []
    screen.buffer.write(b"another rank's\n")
    assert above() == ["another rank's"]
    print("50 %", end="", file=screen)
    assert above() == ["another rank's", "50 %"]
    print(", 60 %", file=screen)
    assert above() == ["another rank's", "50 %, 60 %"]
    progress.show(["site 1"])
    print("\r 50 %|###", end="", file=screen)
    progress.show(["page"])
    rows = ["another rank's", "50 %, 60 %", "site 1", " 50 %|###", "page"]
    assert (screen.rows, above()) == (rows, rows)
    progress.end()
    assert screen.rows == rows


def test_a_long_name_stays_in_one_row(clock: Any, monkeypatch: pytest.MonkeyPatch):
    """A row that wraps could not be erased."""
    monkeypatch.setenv("COLUMNS", "40")
    screen, progress = shown_on(_Screen(), monkeypatch, "f" * 100)
    clock.now += 1
    progress.step(1, 2)
    assert 30 < len(screen.row) < 40


class _Own(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", ["file", "dumb", "own", "own later"])
def test_without_a_terminal_there_is_a_plain_line_every_five_seconds(
    clock: Any, monkeypatch: pytest.MonkeyPatch, kind: str
):
    """No escapes, and none in a shorter tuning.

    So in a stream as rich's Live puts in place, also while the tuning runs: it keeps rows.
    """
    if kind == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    screen, progress = shown_on(
        _Own() if kind == "own" else _Screen(is_terminal=kind != "file"), monkeypatch
    )
    if kind == "own later":
        monkeypatch.setattr(sys, "stderr", screen := _Own())
    progress.begin_phase("compile")
    for n in range(120):
        clock.now += 0.1
        progress.step(n, 120)
    progress.end()
    lines = (screen.getvalue() if "own" in kind else screen.text).splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"dist_tune: f: compiling \d+ of 120, \d+ s left", lines[0])


@pytest.mark.parametrize("columns", ["", "0", "60"])
def test_a_terminal_without_a_size_shows_all_lines(
    clock: Any, monkeypatch: pytest.MonkeyPatch, columns: str
):
    """Of 0 columns, as a bare pty or one under ``script``: plain lines, and a live one where
    COLUMNS says a width.
    """
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: os.terminal_size((0, 0)))
    monkeypatch.setattr(_Screen, "fileno", lambda self: 2)
    screen, progress = shown_on(_Screen(), monkeypatch)
    progress.begin_phase("race")
    clock.now += 6
    progress.step(3, 10)
    progress.show(["page"])
    progress.end()
    assert ("f: racing 3 of 10, 14 s left" in screen.text, "page\n" in screen.text) == (True, True)
    assert ("\x1b" in screen.text) == (columns == "60")


def test_a_late_rank_is_the_live_line(clock: Any, monkeypatch: pytest.MonkeyPatch):
    """With the seconds so far, in place of the progress, which stands there again after it."""
    screen, progress = shown_on(_Screen(), monkeypatch)
    for told in ("rank 1 is late, 2 s", "rank 1 is late, 3 s", ""):
        clock.now += 1
        progress.late(told) if told else progress.step(1, 2)
        assert screen.row.startswith(told or "f: first run 1 of 2")


@pytest.mark.parametrize("is_shown", [True, False])
def test_a_late_rank_is_a_plain_line_every_ten_seconds(
    clock: Any, monkeypatch: pytest.MonkeyPatch, is_shown: bool
):
    """At once, then every ten seconds, and at once again for another time: where no line can be
    erased, and on a rank without progress.

    The wait is not told as work: a phase that begins after it has no line of its own until it has
    taken five seconds.
    """
    screen, progress = shown_on(_Screen(is_terminal=not is_shown), monkeypatch, is_shown=is_shown)
    for seconds in range(1, 26):
        clock.now += 1
        progress.late(f"rank 1 is late, {seconds} s" if seconds != 23 else "")
    progress.begin_phase("compile")
    late = [f"dist_tune: rank 1 is late, {seconds} s" for seconds in (1, 11, 21, 24)]
    assert screen.text.splitlines() == late
    clock.now += 5
    progress.step(1)
    progress.show(["line"])
    assert screen.text.splitlines() == late + ["dist_tune: f: compiling, 30 s", "line"] * is_shown


@pytest.mark.parametrize("screen", [None, _Screen(is_full=True), "closed"])
def test_a_terminal_that_is_gone_costs_nothing(
    clock: Any, monkeypatch: pytest.MonkeyPatch, screen: Any
):
    """Closed, absent, or on a full disk: no step raises."""
    if screen == "closed":
        screen = _Screen()
        screen.close()
    _, progress = shown_on(screen, monkeypatch)
    for _ in range(3):
        clock.now += 10
        progress.step(1, 2)
        progress.show(["line"])
    progress.end()
