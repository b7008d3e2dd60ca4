"""The account of a tuning: one file per rank that explains the choice alone, and a few lines on rank 0's terminal.

Loguru does the writing, through a logger of its own: sinks that the user's program adds to loguru's global logger do not
receive our lines, and ours do not receive the program's.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from loguru._logger import Core, Logger  # the public logger is one for the whole process

from dist_tune.settings import Settings

if TYPE_CHECKING:
    import loguru

_FILE_FORMAT = "{time:HH:mm:ss.SSS} {level:<7} {message}"
_PROGRESS_FORMAT = "dist_tune: {message}"


@contextmanager
def tuning_log(settings: Settings, rank: int, is_first: bool) -> Iterator[loguru.Logger]:
    """The logger of one tuning on this rank; its file is open meanwhile. ``is_first``: the rank that also shows progress.

    A directory that cannot be written costs a warning and the log, not the tuning.
    """
    logger = cast("loguru.Logger", Logger(Core(), None, 0, False, False, False, False, True, [], {}))
    try:
        # Append: a second tuning, or a second run, adds to the story and does not erase the first.
        logger.add(settings.log_dir / f"rank-{rank}.log", format=_FILE_FORMAT, level=settings.log_level.upper(), mode="a", catch=True)
    except OSError as error:
        warnings.warn(f"dist_tune keeps no log: {settings.log_dir} cannot be written ({error})", stacklevel=4)
    if is_first and settings.progress:
        logger.add(_to_stderr, format=_PROGRESS_FORMAT, level="DEBUG", filter=_is_progress, catch=True)
    try:
        yield logger
    finally:
        logger.remove()


def _to_stderr(message: str) -> None:
    sys.stderr.write(message)


def _is_progress(record: loguru.Record) -> bool:
    return bool(record["extra"].get("progress"))
