"""The account of a tuning: one file per rank that explains the choice alone, and a few lines on rank 0's terminal.

The logger is ours alone: handlers of the program's logging do not receive our lines, and ours do not receive the program's.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TextIO

from dist_tune.logger import Logger, Message, Record
from dist_tune.printable import printable
from dist_tune.safe_files import make_folder, opener, warn_of_folder
from dist_tune.settings import Settings
from dist_tune.warn_once import to_terminal, warn_once


class _Story:
    """The file and the terminal of one tuning. One event is one line in both, whatever names and error texts hold."""

    def __init__(self, file: TextIO | None, file_level: int, shown_level: int | None, *, shows_progress: bool) -> None:
        self._file = file
        self._file_level = file_level
        self._shown_level = shown_level
        self._shows_progress = shows_progress

    def write(self, line: str, record: Record) -> None:
        """Write a line to the file, and to the terminal if its level is high enough."""
        level = record["level"].no
        if level >= self._file_level:
            self._write_file(f"{printable(line[:-1])}\n")
        is_progress = self._shows_progress and bool(record["extra"].get("progress"))
        if is_progress or (self._shown_level is not None and level >= self._shown_level):
            to_terminal(f"dist_tune: {printable(record['message'])}\n")

    def _write_file(self, line: str) -> None:
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


@contextmanager
def tuning_log(settings: Settings, rank: int, is_first: bool, *, is_verbose: bool = False) -> Iterator[Logger]:
    """The logger of one tuning on this rank; its file is open meanwhile. ``is_first``: the rank that also shows progress.

    ``is_verbose``: it shows all that is worth a line in the file from level INFO on. A directory that cannot be written costs a
    warning and the log, not the tuning.
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
    shown_level = logger.level("INFO").no if is_first and is_verbose else None
    story = _Story(file, logger.level(level).no, shown_level, shows_progress=is_first and settings.progress)
    try:
        yield logger.bind(story=story)
    finally:
        story.end()


@cache
def _logger(least_level: str) -> Logger:
    """The logger for tunings that write lines from this level on: lines below it cost nothing."""
    return Logger(_write, least_level)


def _warn_of_file(path: Path, folder: Path, error: object) -> None:
    warn_once(f"dist_tune keeps no log: {path} cannot be written ({error})", topic=f"log in {folder}")


def _write(message: Message) -> None:
    message.record["extra"]["story"].write(str(message), message.record)
