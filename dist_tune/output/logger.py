"""A logger with bound values, whose lines go to one function, apart from the program's logging.

Levels and lock are the standard library's. Its loggers are not used: they stand in one hierarchy with the program's, whose handlers,
levels, record factory and ``logging.disable`` would reach our lines. Nor are its records and formats, which take longer than all the
rest of a line. Knows neither files nor terminals, which are log.py's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

TRACE = 5
"""Below DEBUG: a line for each timed launch."""
logging.addLevelName(TRACE, "TRACE")


class Record(NamedTuple):
    """One event."""

    level: int
    level_name: str
    message: str
    bound: dict[str, Any]
    """The logger's values."""


class Handler(logging.Handler):
    """Gives each line, without its end, to a function, from one thread at a time. The lock is logging's, which a fork makes anew."""

    def __init__(self, write: Callable[[str, Record], None]) -> None:
        super().__init__()
        self._write = write
        self._second, self._time = -1, ""
        """Seconds since 1970 of the latest line, and the time of day."""

    def tell(self, level: int, message: str, bound: dict[str, Any]) -> None:
        """Write one event."""
        self.acquire()
        try:
            now = time.time()
            if int(now) != self._second:
                self._second, self._time = int(now), time.strftime("%H:%M:%S", time.localtime(now))
            name = logging.getLevelName(level)
            line = f"{self._time}.{int(now % 1 * 1000):03d} {name:<7} {message}"
            self._write(line, Record(level, name, message, bound))
        finally:
            self.release()


class Logger:
    """Writes events from a least level on; those below cost a comparison."""

    def __init__(self, write: Callable[[str, Record], None], least: str = "DEBUG") -> None:
        """``write`` gets the line and the event. ``least``: name of a level."""
        self._handler = Handler(write)
        self._handler.setLevel(least)
        self._bound: dict[str, Any] = {}

    def bind(self, **values: Any) -> Logger:
        """The same logger, whose events hold these values as well."""
        other = object.__new__(Logger)
        other._handler, other._bound = self._handler, {**self._bound, **values}
        return other

    def trace(self, message: str) -> None:
        """One timed launch."""
        self._log(TRACE, message)

    def debug(self, message: str) -> None:
        """One step of a tuning."""
        self._log(logging.DEBUG, message)

    def info(self, message: str) -> None:
        """A result."""
        self._log(logging.INFO, message)

    def warning(self, message: str) -> None:
        """A problem that the tuning goes on with."""
        self._log(logging.WARNING, message)

    def error(self, message: str) -> None:
        """The end of a tuning."""
        self._log(logging.ERROR, message)

    def _log(self, level: int, message: str) -> None:
        if level >= self._handler.level:
            self._handler.tell(level, message, self._bound)
