"""A logger with levels and bound values, whose lines go to one function.

Knows neither files nor terminals, which are log.py's. It shares no handler, level or root with the loggers of the program, so neither
hears the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple, TypedDict


class Level(NamedTuple):
    """A name and its rank: of two levels the higher number is the more severe."""

    name: str
    no: int


class Record(TypedDict):
    """One event."""

    level: Level
    message: str
    extra: dict[str, Any]
    """Values bound to the logger."""


class Message(str):
    """The line of an event, with time, level and line end."""

    __slots__ = ("record",)
    record: Record


_LEVELS = {each.name: each for each in (Level("TRACE", 5), Level("DEBUG", 10), Level("INFO", 20), Level("WARNING", 30), Level("ERROR", 40))}


class Logger:
    """Writes events from a least level on; those below cost a comparison."""

    def __init__(self, write: Callable[[Message], None], least: str = "DEBUG") -> None:
        """``write`` is called under a lock, by one thread at a time."""
        self._write = write
        self._least = self.level(least).no
        self._lock = threading.RLock()  # a signal may come in the middle of a line, and its handler may log
        self._extra: dict[str, Any] = {}

    def bind(self, **extra: Any) -> Logger:
        """The same logger, whose events hold these values as well."""
        bound = object.__new__(Logger)
        bound.__dict__ = {**self.__dict__, "_extra": {**self._extra, **extra}}
        return bound

    def level(self, name: str) -> Level:
        """The level of this name, in capitals."""
        return _LEVELS[name]

    def trace(self, message: str) -> None:
        """One timed launch."""
        self._log("TRACE", message)

    def debug(self, message: str) -> None:
        """One step of a tuning."""
        self._log("DEBUG", message)

    def info(self, message: str) -> None:
        """A result."""
        self._log("INFO", message)

    def warning(self, message: str) -> None:
        """A problem that the tuning goes on with."""
        self._log("WARNING", message)

    def error(self, message: str) -> None:
        """The end of a tuning."""
        self._log("ERROR", message)

    def _log(self, name: str, message: str) -> None:
        level = _LEVELS[name]
        if level.no < self._least:
            return
        now = datetime.now()
        line = Message(f"{now:%H:%M:%S}.{now.microsecond // 1000:03d} {name:<7} {message}\n")
        line.record = {"level": level, "message": message, "extra": self._extra}
        with self._lock:
            self._write(line)
