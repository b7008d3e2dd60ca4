"""Guided search of one site: which candidates of a large space are compiled and timed, and when
that is enough. Pure.

The candidates are points: a spread over all of them first, then waves of those that the times so
far point to. Read from the described configs, which all ranks have alike. Only sums, products,
quotients and square roots of single numbers, in one order: no library's kernels, whose last bits
differ between processors, and so every rank proposes the same candidates from the same times. Knows
nothing of rungs or finals: candidates that were tried race as all do.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from dist_tune.search.plan import PriorTimes, SearchName

# Up to the next name, so that tuples, lists and words with spaces are values; of a config inside a
# config the inner names count.
_FIELD = re.compile(r"([\w.]+)=(?!\(?[\w.]+=)(.*?)(?= [\w.]+=| \(#\d+\)$|$)")
# Chosen on the recorded tables: logs/guided-decorators-cpu and logs/guided-search have the commands
# and what they printed.
_N_LEADERS = 4
"""The best so far, whose neighbours differ from them in the value of one field."""
_NEAR_SHARE, _NEAR_SHARE_OF_FEW = 0.5, 0.75
"""Share of a wave that are such neighbours; of a wave of few."""
_NOISE = 6e-3
"""Variance of a time's noise, relative to the spread of all times."""
_REACH = 2.5
"""Length of the model's kernel; 1 is the way from a field's least value to its greatest."""
_CURIOSITY = 0.5
"""Standard deviations of the prediction that count for a candidate: the model may be wrong where
nothing was tried.
"""
_MAX_LEARNT = 128
"""Times that the model is fitted to, at most: the cost grows with their third power."""
_LARGE = 64
"""Spaces with more candidates are searched so, if the caller does not say how."""
_ROUNDS = 10
"""So they are only if each compile thread of a host would get more candidates than that: with
fewer, all are compiled sooner than waves,
each of which waits for its slowest compilation. 216 configs of the AllGather-GEMM: alike at 9.
"""
_FIRST_SHARE, _FIRST_SHARE_OF_FEW = 0.4, 0.3
"""Share of the candidates to try that are in the spread; each wave has half of that.

And where waves are of few.
"""
_MAX_WAVE = 48
_FEW = 8
"""Candidates in a wave where the caller says how many are tried: the model learns more often from
fewer.
"""
_SWEEP = 64
"""Candidates in a wave of those that are tried one after the other."""
_MAX_STALE = 3
"""Waves without a better candidate, after which the search ends, if the caller does not say how
many are tried.
"""
_GAIN = 0.005
"""Share of a time by which a candidate is better."""

_Column = np.ndarray[Any, np.dtype[np.float64]]
_Levels = np.ndarray[Any, np.dtype[np.int64]]


class ConfigSpace:
    """The candidates of one site, by their described configs."""

    def __init__(self, texts: Sequence[str]) -> None:
        rows = [
            {name: word if "(" in word else word.rstrip(")") for name, word in _FIELD.findall(text)}
            for text in texts
        ]
        columns = [
            [row.get(name, "") for row in rows]
            for name in dict.fromkeys(name for row in rows for name in row)
        ]
        self._fields = [_field(column) for column in columns if len(set(column)) > 1]
        self._n = len(texts)
        self._order: list[int] = []
        self._away = np.full(self._n, np.inf)
        """Candidate -> distance to the nearest one of the order so far."""
        turns = list(range(self._n))
        random.Random(0).shuffle(turns)  # among equally far ones
        self._turns = np.array(turns, dtype=np.int64)

    def spread(self, n: int) -> list[int]:
        """``n`` candidates, each as far as can be from those before it; the first candidate
        first.
        """
        while len(self._order) < min(n, self._n):
            taken = int(self._turns[np.argmax(self._away[self._turns])]) if self._order else 0
            self._order.append(taken)
            self._away = np.minimum(self._away, sum(self._differences(taken), np.zeros(self._n)))
            self._away[taken] = -1.0
        return self._order[:n]

    def wave(
        self,
        n: int,
        times_ms: Mapping[int, float],
        failures: Collection[int],
        untried: Collection[int],
        near_share: float = _NEAR_SHARE,
    ) -> list[int]:
        """The ``n`` most promising of the ``untried``: this share of them neighbours of the best,
        the others by the model alone.

        Candidates that need at least as much of everything as one that failed come last.
        """
        if len(times_ms) < 2:
            order = [i for i in self.spread(self._n) if i in untried]
        else:
            speeds = self._speeds(times_ms)
            order = sorted(untried, key=lambda i: (-speeds[i], i))
        beyond = self._beyond(times_ms, failures)
        order.sort(key=lambda i: bool(beyond[i]))
        leaders = sorted(times_ms, key=lambda i: (times_ms[i], i))[:_N_LEADERS]
        is_near = np.zeros(self._n, dtype=bool)
        for leader in leaders:
            is_near |= self.n_differing(leader) == 1
        near = [i for i in order if is_near[i] and not beyond[i]][: int(near_share * n)]
        return [*near, *(i for i in order if i not in near)][:n]

    def _speeds(self, times_ms: Mapping[int, float]) -> _Column:
        """Predicted speed of all candidates, and a share of its error: a Gaussian process with a
        rational quadratic kernel.
        """
        learnt = sorted(times_ms, key=lambda i: (times_ms[i], i))
        if len(learnt) > _MAX_LEARNT:  # the best, and of the others every so many
            half = _MAX_LEARNT // 2
            others = learnt[half:]
            learnt = learnt[:half] + [others[k * len(others) // half] for k in range(half)]
        best_ms = times_ms[learnt[0]]
        # Nearly its logarithm: twice as slow is as far from the best as twice as fast.
        speeds = [math.sqrt(math.sqrt(best_ms / times_ms[i])) for i in learnt]
        mean = 0.0
        for speed in speeds:
            mean += speed / len(speeds)
        shifted = np.array(speeds) - mean
        squares = [
            sum((each * each for each in self._differences(i)), np.zeros(self._n)) for i in learnt
        ]
        kernels = np.stack([1.0 / (1.0 + square / (_REACH * _REACH)) for square in squares])
        pivots, rows = _eliminated(
            kernels[:, learnt] + _NOISE * np.eye(len(learnt)), np.column_stack([shifted, kernels])
        )
        predicted, variance = np.full(self._n, mean), np.full(self._n, 1.0 + _NOISE)
        for pivot, row in zip(pivots, rows, strict=True):
            predicted += row[1:] * row[0] / pivot
            variance -= row[1:] * row[1:] / pivot
        scale = math.sqrt(sum(float(each) * float(each) for each in shifted) / len(shifted))
        worth: _Column = predicted + _CURIOSITY * scale * np.sqrt(np.maximum(variance, 0.0))
        return worth

    def n_differing(self, i: int) -> _Levels:
        """Fields in which each candidate differs from this one."""
        return sum(
            (levels != levels[i] for levels, _ in self._fields), np.zeros(self._n, dtype=np.int64)
        )

    def _beyond(
        self, times_ms: Mapping[int, float], failures: Collection[int]
    ) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Candidates that need at least as much of everything as a failed one, unless such a
        candidate has run.
        """
        beyond = np.zeros(self._n, dtype=bool)
        ran = list(times_ms)
        for failed in sorted(failures):
            is_more = np.ones(self._n, dtype=bool)
            for levels, is_number in self._fields:
                is_more &= levels >= levels[failed] if is_number else levels == levels[failed]
            if not is_more[ran].any():
                beyond |= is_more
        return beyond

    def _differences(self, i: int) -> list[_Column]:
        """By field, from candidate ``i``'s value to those of all: steps as a share of all steps, or
        1 for another word.
        """
        found: list[_Column] = []
        for levels, is_number in self._fields:
            steps = np.abs(levels - levels[i]) / levels.max()
            found.append(steps if is_number else np.ceil(steps))
        return found


def _field(texts: Sequence[str]) -> tuple[_Levels, bool]:
    """One field of all configs: its value's place among all values, and whether these are
    numbers.
    """
    distinct = set(texts)
    is_number = all(re.fullmatch(r"-?\d+(\.\d+)?", text) for text in distinct)
    places = {
        text: place for place, text in enumerate(sorted(distinct, key=float if is_number else None))
    }
    return np.array([places[text] for text in texts]), is_number


def _eliminated(system: _Column, rights: _Column) -> tuple[_Column, _Column]:
    """Gaussian elimination of a positive definite system below its diagonal: the pivots, and the
    right sides. Changes both arguments.
    """
    for k in range(len(system) - 1):
        factors = system[k + 1 :, k] / system[k, k]
        system[k + 1 :, k:] -= factors[:, None] * system[k, k:]
        rights[k + 1 :] -= factors[:, None] * rights[k]
    return np.diag(system), rights


class Guide:
    """The candidates of one site, in the order in which they are tried.

    Fed alike on all ranks, it answers alike.

    ``n_tried``: candidates that are tried, if any of them runs; None: as many as a space of this
    size needs, or fewer. ``known``: some that an earlier tuning has found good, beside those.
    """

    def __init__(
        self, texts: Sequence[str], n_tried: int | None = None, known: Collection[int | None] = ()
    ) -> None:
        self._space, self._n = ConfigSpace(texts), len(texts)
        self.n_planned = _n_planned(len(texts)) if n_tried is None else min(n_tried, len(texts))
        """Candidates that are tried at most, if any of them runs."""
        self.spread = self._space.spread(
            math.ceil((_FIRST_SHARE if n_tried is None else _FIRST_SHARE_OF_FEW) * self.n_planned)
        )
        """Those that are tried first."""
        self.untried = set(range(len(texts))) - {*self.spread, *known}
        """Those that it has not come to: neither compiled nor run."""
        self._n_wave = (
            _FEW
            if n_tried is not None
            else min(_MAX_WAVE, math.ceil(_FIRST_SHARE / 2 * self.n_planned))
        )
        self._near_share = _NEAR_SHARE_OF_FEW if n_tried is not None else _NEAR_SHARE
        self._may_end = n_tried is None
        self._best_ms = math.inf
        self._n_stale = 0

    def wave(self, times_ms: Mapping[int, float], failures: Collection[int]) -> list[int]:
        """Candidates to try next, which are ``untried`` no more; none if enough were tried.

        While nothing runs the search goes on.

        ``times_ms``: candidate -> reduced time of its launches.
        """
        best_ms = min(times_ms.values(), default=math.inf)
        is_better = best_ms < (1 - _GAIN) * self._best_ms
        self._n_stale = 0 if is_better or not times_ms else self._n_stale + 1
        self._best_ms = min(best_ms, self._best_ms)
        n = (
            min(self._n_wave, self.n_planned - self._n + len(self.untried))
            if times_ms
            else self._n_wave
        )
        if n <= 0 or (self._may_end and self._n_stale >= _MAX_STALE):
            return []
        wave = self._space.wave(n, times_ms, failures, self.untried, self._near_share)
        self.untried.difference_update(wave)
        return wave


class Sweep(Guide):
    """All candidates, in their order: those that a search has come to when its time is over are the
    ones that count.
    """

    def __init__(self, n_candidates: int) -> None:
        self.n_planned, self.untried = n_candidates, set(range(n_candidates))
        self.spread = self.wave({}, ())

    def wave(self, times_ms: Mapping[int, float], failures: Collection[int]) -> list[int]:
        """The next ones."""
        wave = sorted(self.untried)[:_SWEEP]
        self.untried.difference_update(wave)
        return wave


def guide_of(
    search: SearchName | None,
    texts: Sequence[str],
    prior: PriorTimes | None = None,
    n_threads: int = 0,
    *,
    n_tried: int | None = None,
    in_waves: bool = False,
) -> Guide | None:
    """The guide of a site's search; None where all candidates race.

    ``prior``: candidates with such times need none. ``n_threads``: that compile them on a host; 0
    if they are not compiled ahead. ``n_tried``, ``in_waves``: see ``Plan``.
    """
    if in_waves:
        return Sweep(len(texts)) if len(texts) > _SWEEP else None
    known = (prior.winner, prior.near) if prior is not None else ()
    if n_tried is not None:
        return Guide(texts, max(n_tried, 2), known) if len(texts) > 2 else None
    n_new = len(texts) - (len(prior.times) if prior is not None else 0)
    is_guided = (
        n_new > max(_LARGE, _ROUNDS * n_threads)
        if search is None
        else search == "guided" and _n_planned(n_new) < n_new
    )
    return Guide(texts, known=known) if is_guided else None


def _n_planned(n: int) -> int:
    """All of 27, 45 of 76, 97 of 216; of very large spaces little more than an eighth."""
    return min(n, 16 + math.ceil(3 * n / 8), 80 + n // 8)
