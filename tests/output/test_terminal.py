"""Progress on the first rank's terminal: one live line, or a plain one every few seconds."""

from __future__ import annotations

import io
import re
import sys
from typing import Any

import pytest

from dist_tune.output.terminal import LIVE_EVERY_S, Terminal, console_of, milliseconds

pytestmark = pytest.mark.once


class _Screen(io.StringIO):
    """A terminal, or a file."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    @property
    def row(self) -> str:
        """The row of the cursor, as a terminal would show it."""
        return re.split(r"\x1b\[2K", self.getvalue().rpartition("\n")[2])[-1].rpartition("\r")[2]


class _Clock:
    """Seconds that pass when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("dist_tune.output.terminal.time.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    return _Clock(monkeypatch)


def screen(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool = True, term: str = "xterm", columns: int = 100) -> _Screen:
    made = _Screen(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", str(columns))
    return made


def test_the_live_line_says_phase_number_best_and_time_left(clock: _Clock, monkeypatch: pytest.MonkeyPatch):
    """Drawn at most four times a second, in place of the line before; gone at the end."""
    shown = screen(monkeypatch)
    progress = Terminal("kernels.ag_gemm.step", is_shown=True)
    progress.begin_phase("race")
    progress.expect(40)
    progress.best_ms = 0.1464
    rows = []
    for n in range(1, 21):
        clock.now += 0.1
        progress.step(n)
        rows.append(shown.row)
    assert rows[2] == "step: racing 3 of 40, best 0.146 ms, 4 s left"
    assert rows[-1].startswith("step: racing ")
    assert len(dict.fromkeys(rows)) - 1 <= 2.0 / LIVE_EVERY_S  # less the empty row before the first
    progress.end()
    assert shown.row == ""
    assert "\n" not in shown.getvalue()


def test_what_the_program_prints_stands_alone(clock: _Clock, monkeypatch: pytest.MonkeyPatch):
    """Its text takes the live line's place, also through a stream that was got before; the next step draws the line again below."""
    shown = screen(monkeypatch)
    progress = Terminal("f", is_shown=True)
    held = sys.stderr
    clock.now += 1
    progress.step(1, 2)
    print("the program's", file=held)
    assert shown.getvalue().endswith("\r\x1b[2Kthe program's\n")
    clock.now += 1
    progress.step(1, 2)
    progress.line("site 1")
    assert shown.getvalue().endswith("\r\x1b[2Kdist_tune: site 1\n")
    progress.end()
    assert "write" not in vars(shown)


def test_a_long_name_stays_in_one_row(clock: _Clock, monkeypatch: pytest.MonkeyPatch):
    """40 columns: a row that wraps could not be erased."""
    shown = screen(monkeypatch, columns=40)
    progress = Terminal("f" * 100, is_shown=True)
    clock.now += 1
    progress.step(1, 2)
    assert 30 < len(shown.row) < 40


@pytest.mark.parametrize("options", [{"is_terminal": False}, {"term": "dumb"}])
def test_without_a_terminal_there_is_a_plain_line_every_five_seconds(clock: _Clock, monkeypatch: pytest.MonkeyPatch, options: Any):
    """None in a tuning shorter than that, and no escapes."""
    shown = screen(monkeypatch, **options)
    progress = Terminal("m.f", is_shown=True)
    progress.begin_phase("compile")
    for n in range(120):
        clock.now += 0.1
        progress.step(n, 120)
    progress.end()
    lines = shown.getvalue().splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"dist_tune: f: compiling \d+ of 120, \d+ s left", lines[0])


def test_other_ranks_show_nothing(clock: _Clock, monkeypatch: pytest.MonkeyPatch):
    shown = screen(monkeypatch)
    progress = Terminal("f", is_shown=False)
    clock.now += 60
    progress.step(1, 2)
    progress.page(lambda console: console.print("page"), ["page"])
    progress.end()
    assert shown.getvalue() == ""


@pytest.mark.parametrize("stream", ["none", "closed", "raises"])
def test_a_terminal_that_is_gone_costs_nothing(clock: _Clock, monkeypatch: pytest.MonkeyPatch, stream: str):
    """Closed, absent, or on a full disk: no step raises."""

    class _Gone(_Screen):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    gone: Any = {"none": None, "closed": _Screen(is_terminal=True), "raises": _Gone(is_terminal=True)}[stream]
    if stream == "closed":
        gone.close()
    monkeypatch.setattr(sys, "stderr", gone)
    monkeypatch.setenv("TERM", "xterm")
    progress = Terminal("f", is_shown=True)
    for _ in range(3):
        clock.now += 10
        progress.step(1, 2)
        progress.line("line")
        progress.page(lambda console: console.print("page"), ["page"])
    progress.end()


def test_no_colour_with_no_color(monkeypatch: pytest.MonkeyPatch):
    shown = screen(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    console_of(shown, text := io.StringIO()).print("text", style="red")
    assert text.getvalue() == "text\n"


@pytest.mark.parametrize(("ms", "text"), [(0.1464, "0.146"), (9.9994, "9.999"), (12.34, "12.3"), (1234.4, "1234")])
def test_milliseconds_have_three_digits(ms: float, text: str):
    assert milliseconds(ms) == text
