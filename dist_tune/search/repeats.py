"""Repeats of kernels so short that the clock cannot tell them apart: whether they are of use, and how many a site may have. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from math import sqrt

from dist_tune.search.plan import Times
from dist_tune.search.selection import RacingOptions, error_of_median_ms


class Repeats:
    """Replays of one site beyond those of a plain race. Half of them are for the race, half for the finals."""

    def __init__(self) -> None:
        self.n_spare = 0
        """Replays that there is time for."""
        self.is_noisy = False
        """True if the clock's error is too large beside the step, or a round of finals has left open who is the fastest."""
        self.error_ms = 0.0
        """Standard error of the launches of a replay."""
        self._n_used = 0

    def judge(self, times: Mapping[int, Times], n_sites: int, options: RacingOptions) -> None:
        """Take in the times so far of a site, of which a step has ``n_sites``."""
        self.error_ms = clock_error_ms(times, options)
        self.is_noisy = self.n_spare > 0 and self.error_ms > options.tie / 4 * share_ms(times, n_sites)

    @property
    def n_extra(self) -> int:
        """Replays beyond those of a plain race that the site may have now, used ones included."""
        return self.n_spare if self.is_noisy else 0

    @property
    def n_left(self) -> int:
        """Replays that the race may still have of them."""
        return max(0, self.n_extra // 2 - self._n_used)

    def use(self, n_replays: int) -> None:
        """Count replays that a plain race would not have had."""
        self._n_used += n_replays


def share_ms(times: Mapping[int, Times], n_sites: int) -> float:
    """A site's part of the step, if all of ``n_sites`` had the same one: errors of a share of it add up to that share of the step."""
    if not times:
        return 0.0
    return max(min(each.launches_ms for each in times.values()), min(each.closure_ms for each in times.values()) / n_sites)


def clock_error_ms(times: Mapping[int, Times], options: RacingOptions) -> float:
    """Standard error of the launches of a replay, as far as the clock makes it: by the spread of repeats, if there are some."""
    n_timed = statistics.median([each.n_timed for each in times.values()] or [1])
    n_launches = statistics.median([each.n_launches for each in times.values()] or [1])
    most_ms = options.clock_ms * sqrt(n_launches / n_timed)
    error_ms = error_of_median_ms([(each.spread_ms * sqrt(each.n_launches), each.n_timed) for each in times.values()])
    return most_ms if error_ms is None else min(error_ms, most_ms)
