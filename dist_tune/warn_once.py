"""Warnings about this process and its surroundings, each told once however often its reason comes up.

Knows Python's warnings and the terminal. Raises nothing, because a warning that ends a job is worse than what it is about.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress

_PASSED_OVER = {"dist_tune", "concurrent", "contextlib", "functools", "threading"}
"""Packages whose lines tell nothing to a reader of a warning."""
_told: set[str] = set()


def warn_once(text: str, topic: str = "") -> None:
    """Warn, unless this process has warned of the topic (by default the text) before."""
    if (topic or text) in _told:
        return
    _told.add(topic or text)
    try:
        warnings.warn(text, stacklevel=callers_level())
    except Warning:  # the program turns warnings into errors
        to_terminal(f"{text}\n")


def callers_level() -> int:
    """The ``stacklevel`` of a warning that the caller of this function gives: a line of the program says more than one of this package."""
    level, frame = 1, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_OVER:
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    return level if frame is not None else 2


def to_terminal(text: str) -> None:
    """Write to stderr, where there is one."""
    with suppress(OSError, ValueError, AttributeError):  # full or gone, closed, None
        sys.stderr.write(text)
