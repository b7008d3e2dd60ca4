"""The standard library's logging, apart from the program's: a logger with bound values, whose lines go to one function.

Records, levels, format and lock are logging's. Its loggers are not used: they stand in one hierarchy with the program's, whose handlers,
levels, record factory and ``logging.disable`` would reach our lines. Knows neither files nor terminals, which are log.py's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

TRACE = 5
"""Below DEBUG: a line for each timed launch."""
logging.addLevelName(TRACE, "TRACE")


class Handler(logging.Handler):
    """Gives each line, without its end, to a function, from one thread at a time."""

    def __init__(self, write: Callable[[str, logging.LogRecord], None]) -> None:
        """``write`` gets the line and the record, whose attribute ``bound`` holds the logger's values."""
        super().__init__()
        self._write = write
        self.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)-7s %(message)s", "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging, under the handler's lock."""
        self._write(self.format(record), record)


class Logger:
    """Writes events from a least level on; those below cost a comparison."""

    def __init__(self, write: Callable[[str, logging.LogRecord], None], least: str = "DEBUG") -> None:
        """``write``: see ``Handler``. ``least``: name of a level."""
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
            record = logging.LogRecord("dist_tune", level, "", 0, message, (), None)
            record.bound = self._bound
            self._handler.handle(record)
