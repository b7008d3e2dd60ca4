"""The order in which compilations of several sites are run: the longest first, by what is known of each site."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dist_tune.compiler.candidate import Compilation

_DISK_S = 0.05
"""A compilation that took no longer may have been found in Triton's disk cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Queued:
    """A compilation in the queue, with the first candidate that asked for it."""

    compilation: Compilation
    label: str
    """Of the site."""
    order: tuple[float, int]
    """Sort key among the candidates of its site (``partition.order``)."""
    candidate: int


class Pace:
    """Seconds that compilations take, by site."""

    def __init__(self) -> None:
        self._pace_s: dict[str, float] = {}
        """Site -> seconds of its latest compilation, per root of its estimated cost."""

    def turn(self, queued: Queued) -> tuple[float, int, str, int]:
        """Sort key: the longest first, by what the site's latest compilation took; of equals the smallest tiles."""
        expected_s = self._pace_s.get(queued.label, 1.0) * sqrt(-queued.order[0])
        return -expected_s, queued.order[1], queued.label, queued.candidate

    def note(self, queued: Queued) -> None:
        """Learn from a compilation that has just ended."""
        started_at = queued.compilation.started_at
        if started_at is not None and queued.order[0] and (took_s := time.monotonic() - started_at) > _DISK_S:
            self._pace_s[queued.label] = took_s / sqrt(-queued.order[0])
