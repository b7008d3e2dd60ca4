"""Progress on the first rank's terminal: one live line, or a plain one every few seconds."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import sys
from typing import Any

import pytest

from dist_tune.output.terminal import LIVE_EVERY_S, Terminal


class _Screen(io.TextIOWrapper):
    """A terminal of few rows, or a file."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__(io.BytesIO(), "utf-8", write_through=True)
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal

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


class _Clock:
    """Seconds that pass when the test says so."""

    now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock()
    monkeypatch.setattr("dist_tune.output.terminal.time.monotonic", lambda: made.now)
    return made


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
    progress.expect(40, 2.0)
    progress.best_ms |= {"a": 0.1, "b": 0.0464}
    rows = []
    for n in range(1, 21):
        clock.now += 0.1
        progress.step(n)
        rows.append(shown.row)
    assert rows[2] == "step: racing 3 of at most 40, best 0.146 ms, 6 s left if all are needed"
    assert rows[-1].startswith("step: racing ")
    assert len(dict.fromkeys(rows)) - 1 <= 2.0 / LIVE_EVERY_S  # less the empty row before the first
    progress.end()
    assert shown.row == ""
    assert "\n" not in shown.text


def test_what_the_program_prints_stands_alone(clock: _Clock, monkeypatch: pytest.MonkeyPatch):
    """From Python, C or another rank: the live line is in the row below. A line of ours begins a row, also behind the program's bar."""
    shown = screen(monkeypatch)
    progress = Terminal("f", is_shown=True)

    def above() -> list[str]:
        clock.now += 1
        progress.step(1, 2)
        assert shown.row.startswith("f: first run 1 of 2")
        return [row for row in shown.rows[:-1] if row]

    assert above() == []
    shown.buffer.write(b"another rank's\n")
    assert above() == ["another rank's"]
    print("50 %", end="", file=shown)
    assert above() == ["another rank's", "50 %"]
    print(", 60 %", file=shown)
    assert above() == ["another rank's", "50 %, 60 %"]
    progress.show(["site 1"])
    print("\r 50 %|###", end="", file=shown)
    progress.show(["page"])
    assert shown.rows == (rows := ["another rank's", "50 %, 60 %", "site 1", " 50 %|###", "page"])
    assert above() == rows
    progress.end()
    assert shown.rows == rows


def test_a_long_name_stays_in_one_row(clock: _Clock, monkeypatch: pytest.MonkeyPatch):
    """A row that wraps could not be erased."""
    shown = screen(monkeypatch)
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("dist_tune.output.terminal.os.get_terminal_size", lambda descriptor: os.terminal_size((40, 24)))
    monkeypatch.setattr(shown, "fileno", lambda: 2, raising=False)
    progress = Terminal("f" * 100, is_shown=True)
    clock.now += 1
    progress.step(1, 2)
    assert 30 < len(shown.text.rpartition("\x1bD")[2].removesuffix("\x1b8")) < 40


@pytest.mark.parametrize("kind", ["file", "dumb", "own", "own later"])
def test_without_a_terminal_there_is_a_plain_line_every_five_seconds(clock: _Clock, monkeypatch: pytest.MonkeyPatch, kind: str):
    """No escapes, and none in a shorter tuning. So in a stream as rich's Live puts in place, also while the tuning runs: it keeps rows."""

    class _Own(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown: Any = screen(monkeypatch, is_terminal=kind != "file", term="dumb" if kind == "dumb" else "xterm")
    before = Terminal("m.f", is_shown=True)
    if "own" in kind:
        shown = _Own()
        monkeypatch.setattr(sys, "stderr", shown)
    progress = before if "later" in kind else Terminal("m.f", is_shown=True)
    progress.begin_phase("compile")
    for n in range(120):
        clock.now += 0.1
        progress.step(n, 120)
    progress.end()
    lines = (shown.getvalue() if "own" in kind else shown.text).splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"dist_tune: f: compiling \d+ of 120, \d+ s left", lines[0])


@pytest.mark.parametrize("columns", ["", "0", "60"])
def test_a_terminal_without_a_size_shows_all_lines(clock: _Clock, monkeypatch: pytest.MonkeyPatch, columns: str):
    """Of 0 columns, as a bare pty or one under ``script``: plain lines, and a live one where COLUMNS says a width."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", columns) if columns else monkeypatch.delenv("COLUMNS", raising=False)
    reader, writer = pty.openpty()
    with open(writer, "w") as stream, open(reader, "rb", buffering=0) as screen_of_pty:
        assert os.get_terminal_size(stream.fileno()).columns == 0
        monkeypatch.setattr(sys, "stderr", stream)
        progress = Terminal("m.f", is_shown=True)
        progress.begin_phase("race")
        clock.now += 6
        progress.step(3, 10)
        print("50 %", end="", file=stream, flush=True)
        progress.show(["page"])
        progress.end()
        shown = ""
        while "page\r\n" not in shown and select.select([screen_of_pty], [], [], 5)[0]:  # it comes in parts
            shown += screen_of_pty.read(10_000).decode()
    assert "f: racing 3 of 10, 14 s left" in shown
    assert ("\x1b" in shown) == (columns == "60")
    assert "50 %" in shown
    assert shown.count("page\r\n") == 1


def test_a_late_rank_is_the_live_line(clock: _Clock, monkeypatch: pytest.MonkeyPatch):
    """With the seconds so far, in place of the progress, which stands there again after it."""
    shown = screen(monkeypatch)
    progress = Terminal("m.f", is_shown=True)
    for seconds in (2, 3):
        clock.now += 1
        progress.late(f"rank 1 has not come to call 1 of f, {seconds} s")
        assert shown.row == f"rank 1 has not come to call 1 of f, {seconds} s"
    clock.now += 1
    progress.step(1, 2)
    assert shown.row.startswith("f: first run 1 of 2")
    progress.end()
    assert shown.row == ""


def test_a_late_rank_is_a_plain_line_every_ten_seconds(clock: _Clock, monkeypatch: pytest.MonkeyPatch):
    """At once, then every ten seconds, and at once again for another time: where no line can be erased, and on a rank without progress."""
    for is_shown in (True, False):
        shown = screen(monkeypatch, is_terminal=not is_shown)
        progress = Terminal("m.f", is_shown=is_shown)
        for seconds in range(1, 26):
            clock.now += 1
            progress.late(f"rank 1 is late, {seconds} s" if seconds != 23 else "")
        assert shown.text.splitlines() == [f"dist_tune: rank 1 is late, {seconds} s" for seconds in (1, 11, 21, 24)]


def test_a_wait_for_a_late_rank_is_not_told_as_work(clock: _Clock, monkeypatch: pytest.MonkeyPatch):
    """A phase that begins after it has no line of its own until it has taken five seconds."""
    shown = screen(monkeypatch, is_terminal=False)
    progress = Terminal("m.f", is_shown=True)
    for seconds in range(2, 10):
        clock.now += 1
        progress.late(f"rank 1 is late, {seconds} s")
    progress.begin_phase("compile")
    assert shown.text == "dist_tune: rank 1 is late, 2 s\n"
    clock.now += 5
    progress.step(1)
    assert shown.text.endswith("\ndist_tune: f: compiling, 13 s\n")


def test_other_ranks_show_nothing(clock: _Clock, monkeypatch: pytest.MonkeyPatch):
    shown = screen(monkeypatch)
    progress = Terminal("f", is_shown=False)
    clock.now += 60
    progress.step(1, 2)
    progress.show(["line"])
    progress.end()
    assert shown.text == ""


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
        progress.show(["line"])
    progress.end()
