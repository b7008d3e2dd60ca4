"""The terminal of the rank that shows progress: lines that stay, and one live line, or a plain one
every few seconds.

Drawn by the tuning's own thread between replays, because a thread that draws would disturb what is
timed. The live line stands in the row below the cursor, which stays where the program left it: what
the program, its threads, its C code and other ranks print needs no catching, and no stream of
theirs is touched. Knows nothing of tunings.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from typing import Any

from dist_tune.files import to_terminal
from dist_tune.log.formatting import closure_name, milliseconds, printable

LIVE_EVERY_S = 0.25
PLAIN_EVERY_S, LATE_EVERY_S = 5.0, 10.0
_RIGHT = 100
"""Column at which the live line ends, at most."""
_CLEAR = "\x1b[J"
"""Erases from the cursor on: the live line, which is below it, or in its row if the program has
ended a line since.
"""
_BELOW = "\x1bD\x1bM\x1b7\x1b[J\r\x1bD{}\x1b8"
"""Draws in the row below: make room by a scroll, save the cursor, erase, draw, back to the cursor.
"""
_WORDS = {
    "discover": "first run",
    "compile": "compiling",
    "race": "racing",
    "finals": "finals",
    "apply": "last run",
}


class Terminal:
    """Progress of one tuning on stderr; shows nothing on other ranks, and where the user wants
    none.
    """

    def __init__(self, name: str, *, is_shown: bool) -> None:
        """``name``: the tuning's, in each line of progress."""
        self._name = closure_name(name)
        self.best_ms: dict[str, float] = {}
        """Site -> time of its best candidate so far."""
        self._is_shown = is_shown
        self.shows_steps = True
        """False beside a job that goes on: lines alone."""
        self._stream: Any = sys.stderr if is_shown else None
        # A stream of another class, as that of rich's Live, keeps rows of its own.
        self._is_live = isinstance(self._stream, io.TextIOWrapper) and _is_live(self._stream)
        self._is_drawn = False
        self._phase = "discover"
        self._n, self._total = 0, 0
        self._most, self._more_s = "", 0.0
        """Before the number of steps, where that is the most that there can be; seconds after
        these.
        """
        self._late = -inf
        """When a late rank was told last, on the monotonic clock."""
        self._began = self._phase_began = self._drawn = time.monotonic()

    def show(self, lines: Sequence[str]) -> None:
        """Lines that stay."""
        if self._is_shown:
            self._begin_row()
            to_terminal("".join(f"{printable(line)}\n" for line in lines))

    def begin_phase(self, name: str) -> None:
        """A phase begins."""
        self._phase, self._total, self._phase_began = name, 0, time.monotonic()
        self._most, self._more_s = "", 0.0
        self.step(0)

    def expect(self, n_most: int, more_s: float) -> None:
        """So many steps may follow at most, those of later phases among them, and then others of so
        many seconds; no steps: unknown.
        """
        self._total, self._more_s = self._n + n_most if n_most else 0, more_s
        self._most = "at most "

    def step(self, n: int, total: int | None = None) -> None:
        """So many steps of the phase are done. Draws if it is time."""
        self._n, self._total = n, total if total is not None else self._total
        if (
            not (self._is_shown and self.shows_steps)
            or (now := time.monotonic()) - self._drawn < LIVE_EVERY_S
        ):
            return
        if self._is_live and sys.stderr is self._stream:
            self._draw(self._text(n, now), now)
        elif now - self._drawn >= PLAIN_EVERY_S:
            self._drawn = now
            self.show([f"dist_tune: {self._text(n, now)}"])

    def late(self, text: str) -> None:
        """Told some times a second, by another thread, which rank this one waits for and for how
        long; empty if it waits for none.

        The live line, or a plain one at first and every ten seconds. Also on another rank than the
        first, where that is the late one.
        """
        now = time.monotonic()
        if text:
            self._drawn = now  # a wait is no progress that is due to be told
        if text and self._is_live and sys.stderr is self._stream:
            self._draw(text, now)
        elif text and now - self._late >= LATE_EVERY_S:
            to_terminal(f"dist_tune: {printable(text)}\n")
            self._late = now
        elif not text:
            self._late = -inf

    def end(self) -> None:
        """Nothing is shown from here on."""
        self._is_shown = False
        if self._is_drawn:
            self._write(_CLEAR)

    def _draw(self, text: str, now: float) -> None:
        self._drawn, self._is_drawn = now, True
        # A full row would wrap, and could not be erased.
        width = max(0, _columns_of(self._stream) - 1)
        # At the right: the second of two lines that come between two draws begins in this row.
        self._write(_BELOW.format(printable(text)[:width].rjust(min(width, _RIGHT))))

    def _text(self, n: int, now: float) -> str:
        text = f"{self._name}: {_WORDS[self._phase]}"
        if self._total:
            text += f" {min(n, self._total)} of {self._most}{self._total}"
        if self.best_ms:
            text += f", best {milliseconds(sum(self.best_ms.values()))} ms"
        if 0 < n < self._total:
            left_s = (now - self._phase_began) / n * (self._total - n) + self._more_s
            return f"{text}, {left_s:.0f} s left" + (" if all are needed" if self._most else "")
        return f"{text}, {now - self._began:.0f} s"

    def _begin_row(self) -> None:
        """Go to the next row if the cursor is within one, as a progress bar leaves it: spaces wrap
        there, and nowhere else.
        """
        if self._is_live and sys.stderr is self._stream:
            self._write(" " * (_columns_of(self._stream) - 1) + f"\r{_CLEAR}")

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError, AttributeError):  # full or gone, closed
            self._stream.write(text)
            self._stream.flush()


def _columns_of(stream: Any) -> int:
    """Columns of a terminal, unless COLUMNS says more; 0 of one that reports no size; 100 of a
    file.
    """
    with suppress(ValueError, OSError, AttributeError):  # no number; no terminal, such as a text
        columns = int(os.environ.get("COLUMNS") or 0)
        return max(10, columns) if columns > 0 else os.get_terminal_size(stream.fileno()).columns
    return 100


def _is_live(stream: Any) -> bool:
    """True for a terminal that understands a carriage return and an erased row, and whose width is
    known.
    """
    try:
        return (
            bool(stream.isatty())
            and _columns_of(stream) > 0
            and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
        )
    except (AttributeError, ValueError, OSError):
        return False
