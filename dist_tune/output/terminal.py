"""The terminal of the rank that shows progress: lines that stay, and one live line, or a plain one every few seconds.

Drawn by the tuning's own thread between replays, because a thread that draws would disturb what is timed. Text that the program
writes to its standard streams takes the live line's place, which is drawn again later. Knows nothing of tunings.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dist_tune.printable import printable
from dist_tune.warn_once import to_terminal

if TYPE_CHECKING:
    from rich.console import Console

LIVE_EVERY_S = 0.25
PLAIN_EVERY_S = 5.0
_CLEAR = "\r\x1b[2K"
"""Cursor to the first column, and the row emptied."""
_WORDS = {"discover": "first run", "compile": "compiling", "race": "racing", "finals": "finals", "settle": "last run"}


class Terminal:
    """Progress of one tuning on stderr; shows nothing on other ranks, and where the user wants none."""

    def __init__(self, name: str, *, is_shown: bool) -> None:
        """``name``: the tuning's, in each line of progress."""
        self._name = name.rpartition(".")[2]
        self.best_ms: float | None = None
        self._is_shown = is_shown
        self._is_live: bool | None = None
        """None until the stream was asked."""
        self._live = ""
        """The live line as it stands on the terminal; empty without one."""
        self._stream: Any = None
        self._phase = "discover"
        self._n, self._total = 0, 0
        self._began = self._phase_began = self._drawn = time.monotonic()
        self._wrapped: list[tuple[Any, Any]] = []
        """Standard streams whose ``write`` is ours, and ours."""

    def line(self, text: str) -> None:
        """A line that stays."""
        self._erase()
        to_terminal(f"dist_tune: {printable(text)}\n")

    def page(self, render: Callable[[Console], None], plain: Sequence[str] = ()) -> None:
        """Lines that stay, drawn by rich: with colour where the terminal understands it, and NO_COLOR is not set.

        ``plain``: the same for a file, which costs no import of rich.
        """
        if not self._is_shown:
            return
        self._erase()
        if plain and not is_live(sys.stderr):
            to_terminal("".join(f"{printable(line)}\n" for line in plain))
            return
        # Into a text first: where a pipe is broken, rich ends the process.
        console = console_of(sys.stderr, text := io.StringIO())
        render(console)
        to_terminal(_fitting(text.getvalue(), sys.stderr))

    def begin_phase(self, name: str) -> None:
        """A phase begins."""
        self._phase, self._total, self._phase_began = name, 0, time.monotonic()
        self.step(0)

    def expect(self, n_more: int) -> None:
        """The phase has so many steps more, as far as is known."""
        self._total = self._n + n_more

    def step(self, n: int, total: int | None = None) -> None:
        """So many steps of the phase are done. Draws if it is time."""
        self._n, self._total = n, total if total is not None else self._total
        if not self._is_shown or (now := time.monotonic()) - self._drawn < LIVE_EVERY_S:
            return
        if self._is_live is None:
            self._is_live = is_live(sys.stderr)
        if self._is_live:
            self._drawn = now
            self._draw(self._text(n, now))
        elif now - self._drawn >= PLAIN_EVERY_S:
            self._drawn = now
            self.line(self._text(n, now))

    def end(self) -> None:
        """Nothing is live from here on."""
        self._erase()
        self._is_shown = False
        for stream, ours in self._wrapped:
            with suppress(AttributeError, TypeError):
                if vars(stream).get("write") is ours:
                    del stream.write
        self._wrapped.clear()

    def _text(self, n: int, now: float) -> str:
        phase_s = now - self._phase_began
        told = [f"{self._name}: {_WORDS.get(self._phase, self._phase)}"]
        if self._total:
            told[0] += f" {min(n, self._total)} of {self._total}"
        if self.best_ms is not None:
            told.append(f"best {milliseconds(self.best_ms)} ms")
        if self._total and 0 < n < self._total:
            told.append(f"{phase_s / n * (self._total - n):.0f} s left")
        else:
            told.append(f"{now - self._began:.0f} s")
        return ", ".join(told)

    def _draw(self, text: str) -> None:
        from rich.cells import set_cell_size

        stream = sys.stderr
        width = columns_of(stream) - 1  # a full row would wrap, and could not be erased
        text = _fitting(printable(text), stream)
        text = text if len(text) <= width else set_cell_size(text, max(0, width))
        self._erase()
        self._wrap()
        with suppress(OSError, ValueError, AttributeError, UnicodeError):
            write_of(stream)(f"{_CLEAR}{text}")
            stream.flush()
            self._live, self._stream = text, stream

    def _erase(self) -> None:
        if self._live:
            self._live = ""
            with suppress(OSError, ValueError, AttributeError):
                write_of(self._stream)(_CLEAR)
                self._stream.flush()

    def _wrap(self) -> None:
        """Let what the program writes to a terminal erase the live line before."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError, TypeError):  # closed, None, or a stream that takes no attributes
                if not stream.isatty() or any(vars(stream).get("write") is ours for each, ours in self._wrapped if each is stream):
                    continue
                ours = self._erasing(stream.write)
                stream.write = ours  # type: ignore[method-assign]
                self._wrapped.append((stream, ours))

    def _erasing(self, own: Callable[[str], int]) -> Callable[[str], int]:
        def write(text: str) -> int:
            if self._live:
                self._erase()
            return own(text)

        vars(write)["own"] = own
        return write


def amount(n: int, noun: str) -> str:
    """Number and noun: "1 site", "2 sites"."""
    return f"{n} {noun}{'s' * (n != 1)}"


def write_of(stream: Any) -> Callable[[str], int]:
    """The stream's ``write`` without ours around it."""
    write: Callable[[str], int] = stream.write
    return getattr(write, "own", write)


def console_of(stream: Any, text: io.StringIO) -> Console:
    """A rich console that writes ``text`` as the stream would show it."""
    from rich.console import Console

    return Console(file=text, width=columns_of(stream), force_terminal=is_live(stream), highlight=False, markup=False, emoji=False)


def columns_of(stream: Any) -> int:
    """Columns of a terminal; of a file 100, unless COLUMNS says otherwise."""
    with suppress(ValueError, OSError, AttributeError):  # no number; no terminal, such as a text
        return max(10, int(os.environ["COLUMNS"])) if "COLUMNS" in os.environ else os.get_terminal_size(stream.fileno()).columns
    return 100


def _fitting(text: str, stream: Any) -> str:
    """The text with a question mark for what the stream's encoding does not have."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def is_live(stream: Any) -> bool:
    """True for a terminal that understands a carriage return and an erased row."""
    try:
        return bool(stream.isatty()) and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    except (AttributeError, ValueError, OSError):
        return False


def milliseconds(ms: float) -> str:
    """Three digits or more, as people compare them: "0.146", "12.3", "1234"."""
    return f"{ms:.3f}" if ms < 10 else f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"
