"""The account of a tuning: one file per rank that explains the choice alone, and a few lines on rank 0's terminal.

The logger is ours alone: handlers of the program's logging do not receive our lines, and ours do not receive the program's.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from dist_tune.output.event_file import RunFacts
from dist_tune.output.logger import Logger, Record
from dist_tune.output.words import printable
from dist_tune.safe_files import make_folder, opener, warn_of_folder
from dist_tune.settings import Settings
from dist_tune.warn_once import to_terminal, warn_once

if TYPE_CHECKING:
    from dist_tune.output.story import Story

WIDTH = 160
"""Characters of a line at most."""
_INDENT = 23
"""Of the second and later rows of a longer line: time, level, and two."""
_headed: set[tuple[int, str]] = set()
"""Process and file, of logs that have the header of this process."""


class _Sink:
    """The file and the terminal of one tuning. One event is one line in both: line ends in names and errors are escaped."""

    def __init__(
        self, file: TextIO | None, file_level: int, shown_level: int | None, story: Story | None = None, *, shows_progress: bool
    ) -> None:
        self._file = file
        self._file_level = file_level
        self._shown_level = shown_level
        self._story = story
        self._shows_progress = shows_progress
        self._headed_by = 0
        """Process that has looked for the header of its own."""

    def write(self, line: str, record: Record) -> None:
        """Write a line to the file, and to the terminal if its level is high enough."""
        level, message = record.level, record.message
        if level >= self._file_level:
            # Without lines of level INFO there is none that explains a number.
            text = self._numbered(line) if self._file_level <= logging.INFO else line
            self._write_file(wrapped(printable(text)))
        if self._story is not None and level >= logging.WARNING:
            self._story.told(record.level_name, message)
        is_verbose = self._shown_level is not None and level >= self._shown_level
        progress = record.bound.get("progress")  # True, or the text in place of the line
        if is_verbose or (self._shows_progress and progress):
            text = self._numbered(message) if is_verbose else progress if isinstance(progress, str) else message
            if self._story is not None:  # numbers are explained in lines that verbose shows
                self._story.terminal.line(text if is_verbose else self._story.for_people(text))
            else:
                to_terminal(f"dist_tune: {printable(text)}\n")

    def _numbered(self, line: str) -> str:
        """The line with the short numbers of sites in place of their labels."""
        if self._story is not None and "site=" in line:
            # The longest first: one label may begin with another.
            for label, number in sorted([*self._story.numbers.items()], key=lambda each: -len(each[0])):
                line = line.replace(f"site={label}", f"site {number}")
        return line

    def _write_file(self, line: str) -> None:
        if self._file is None:
            return
        if self._headed_by != (pid := os.getpid()):
            self._headed_by = pid
            if (mine := (pid, os.path.abspath(self._file.name))) not in _headed:
                _headed.add(mine)
                line = _header(line[:12], Path(self._file.name).stem) + line
        self._write_text(f"{line}\n")

    def _write_text(self, line: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(line)
            self._file.flush()  # the last line before a crash is the one that matters
        except (OSError, ValueError) as error:  # a full disk, a file that another thread has closed
            _warn_of_file(Path(self._file.name), Path(self._file.name).parent, error)
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError, ValueError):  # what could not be written is tried once more
                file.close()

    def end(self) -> None:
        """Close the file; later lines go nowhere."""
        self._close()
        self._shown_level, self._shows_progress = None, False


def wrapped(line: str) -> str:
    """A line in rows of at most ``WIDTH`` characters, broken at spaces where there are some; ``unwrapped`` undoes it."""
    if len(line) <= WIDTH:
        return line
    # As textwrap would, which takes 15 times as long: with a quarter of the candidates dropped that was 2 % of a tuning.
    rows, rest, width = [], line.rstrip(" "), WIDTH
    while len(rest) > width:
        end = width if rest[width] == " " else rest.rfind(" ", 0, width)
        of_word = rest.find(" ", width) % (len(rest) + 1)  # of that which does not fit; -1 is the end of all
        if of_word - end - 1 > width:  # into no row
            end = width
        rows.append(rest[:end].rstrip(" "))
        rest, width = rest[end:].lstrip(" "), WIDTH - _INDENT
    return f"\n{' ' * _INDENT}".join([*rows, rest])


def unwrapped(text: str) -> str:
    """A log's text with each event on one line."""
    return re.sub(rf"\n {{{_INDENT}}}", " ", text)


def _header(when: str, name: str) -> str:
    """The run's header. ``when``: the time of the first line. ``name``: the file's, "rank-0"."""
    facts = RunFacts.now()
    world = text if (text := os.environ.get("WORLD_SIZE", "")).isdecimal() else "1"
    told = [
        f"run of {facts.date}: {name.replace('-', ' ')} of {world} on {facts.host}, pid {facts.pid}, device {facts.device}",
        ", ".join(f"{name} {text}" for name, text in facts.versions.items()),
        f"command: {' '.join(facts.command)}",
    ]
    if os.environ.get("DIST_TUNE_PROGRESS"):  # in the log alone: on the terminal "quiet" says nothing
        told.append("DIST_TUNE_PROGRESS is deprecated: set DIST_TUNE_VERBOSITY=quiet, normal or verbose in its place")
    return "".join(f"{wrapped(printable(f'{when} INFO    {each}'))}\n" for each in told)


@contextmanager
def tuning_log(settings: Settings, rank: int, is_first: bool, *, is_verbose: bool = False, story: Story | None = None) -> Iterator[Logger]:
    """The logger of one tuning on this rank; its file is open meanwhile. ``is_first``: the rank that also shows progress.

    ``is_verbose``: it shows all that is worth a line in the file from level INFO on. ``story``: hears of warnings.
    A directory that cannot be written costs a warning and the log, not the tuning.
    """
    level = settings.log_level.upper()
    logger = _logger("TRACE" if level == "TRACE" else "DEBUG")
    file: TextIO | None = None
    path = settings.log_dir / f"rank-{rank}.log"
    try:
        make_folder(settings.log_dir)
        warn_of_folder(settings.log_dir, "DIST_TUNE_LOG_DIR")
        # Append: a second tuning, or a second run, adds to the story and does not erase the first. A link is not followed: in a folder
        # that others write it may lead to any file of this user's.
        file = open(path, "a", encoding="utf-8", opener=opener(follows_links=False))  # noqa: SIM115  # closed at the end of the story
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        is_link = isinstance(error, OSError) and error.errno == errno.ELOOP
        _warn_of_file(path if is_link else settings.log_dir, settings.log_dir, "it is a symbolic link" if is_link else error)
    shown_level = logging.INFO if is_first and (is_verbose or settings.shown == "verbose") else None
    sink = _Sink(file, logging.getLevelNamesMapping()[level], shown_level, story, shows_progress=is_first and settings.shown != "quiet")
    try:
        yield logger.bind(sink=sink)
    finally:
        sink.end()


@cache
def _logger(least_level: str) -> Logger:
    """The logger for tunings that write lines from this level on: lines below it cost nothing."""
    return Logger(_write, least_level)


def _warn_of_file(path: Path, folder: Path, error: object) -> None:
    warn_once(
        f"dist_tune keeps no log: {path} cannot be written ({error}). DIST_TUNE_LOG_DIR names another folder", topic=f"log in {folder}"
    )


def _write(line: str, record: Record) -> None:
    record.bound["sink"].write(line, record)
