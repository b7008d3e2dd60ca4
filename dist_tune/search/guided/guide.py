"""Guided search of one site: which candidates of a large space are compiled and timed, and when that is enough. Pure.

A spread over the space first, then waves of what the times so far point to. Knows nothing of rungs or finals: candidates that were tried
race as all do.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from dist_tune.search.guided.config_space import ConfigSpace
from dist_tune.search.plan import PriorTimes, SearchName

# Chosen on the recorded tables: logs/guided-decorators-cpu has the command and what it printed.
_LARGE = 64
"""Spaces with more candidates are searched so, if the caller does not say how."""
_ROUNDS = 10
"""So they are only if each compile thread of a host would get more candidates than that: with fewer, all are compiled sooner than waves,
each of which waits for its slowest compilation. 216 configs of the AllGather-GEMM: alike at 9."""
_FIRST_SHARE = 0.4
"""Share of the candidates to try that are in the spread; each wave has half of that."""
_MAX_WAVE = 48
_MAX_STALE = 3
"""Waves without a better candidate, after which the search ends."""
_GAIN = 0.005
"""Share of a time by which a candidate is better."""


class Guide:
    """The candidates of one site, in the order in which they are tried. Fed alike on all ranks, it answers alike."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._space = ConfigSpace(texts)
        self.n_planned = _n_planned(len(texts))
        """Candidates that are tried at most, if any of them runs."""
        self.spread = self._space.spread(math.ceil(_FIRST_SHARE * self.n_planned))
        """Those that are tried first."""
        self._n_wave = min(_MAX_WAVE, math.ceil(_FIRST_SHARE / 2 * self.n_planned))
        self._best_ms = math.inf
        self._n_stale = 0

    def wave(
        self, times_ms: Mapping[int, float], failures: Collection[int], untried: Collection[int], *, n_tried: int, is_barren: bool
    ) -> list[int]:
        """Candidates to try next; none if enough were tried. Called once for each wave.

        ``times_ms``: candidate -> reduced time of its launches. ``is_barren``: nothing runs so far, so the search goes on.
        """
        best_ms = min(times_ms.values(), default=math.inf)
        is_better = best_ms < (1 - _GAIN) * self._best_ms
        self._n_stale = 0 if is_better or is_barren else self._n_stale + 1
        self._best_ms = min(best_ms, self._best_ms)
        n = self._n_wave if is_barren else min(self._n_wave, self.n_planned - n_tried)
        if n <= 0 or self._n_stale >= _MAX_STALE:
            return []
        return self._space.wave(n, times_ms, failures, untried)


def guide_of(search: SearchName | None, texts: Sequence[str], prior: PriorTimes | None = None, n_threads: int = 0) -> Guide | None:
    """The guide of a site's search; None where all candidates race.

    ``prior``: candidates with such times need none. ``n_threads``: that compile them on a host; 0 if they are not compiled ahead.
    """
    n_new = len(texts) - (len(prior.times) if prior is not None else 0)
    is_guided = n_new > max(_LARGE, _ROUNDS * n_threads) if search is None else search == "guided" and _n_planned(n_new) < n_new
    return Guide(texts) if is_guided else None


def _n_planned(n: int) -> int:
    """All of 27, 45 of 76, 97 of 216; of very large spaces little more than an eighth."""
    return min(n, 16 + math.ceil(3 * n / 8), 80 + n // 8)
