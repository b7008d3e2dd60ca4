"""Warnings about this process and its surroundings, each told once however often its reason comes up.

Knows Python's warnings and the terminal. Raises nothing, because a warning that ends a job is worse than what it is about.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress

_told: set[str] = set()


def warn_once(text: str, topic: str = "") -> None:
    """Warn, unless this process has warned of the topic (by default the text) before."""
    if (topic or text) in _told:
        return
    _told.add(topic or text)
    try:
        warnings.warn(text, stacklevel=3)
    except Warning:  # the program turns warnings into errors
        to_terminal(f"{text}\n")


def to_terminal(text: str) -> None:
    """Write to stderr, where there is one."""
    with suppress(OSError, ValueError, AttributeError):  # full or gone, closed, None
        sys.stderr.write(text)
