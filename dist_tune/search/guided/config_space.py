"""The candidates of a large site as points: a spread over all of them first, then those that the times so far point to. Pure.

Read from the described configs, which all ranks have alike. Only sums, products and quotients of single numbers, in one order: no library's
kernels, whose last bits differ between processors, and so every rank proposes the same candidates from the same times.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

_FIELD = re.compile(r"([\w.]+)=([^\s()]+)")
# Chosen on the recorded tables: logs/guided-decorators-cpu has the command and what it printed.
_N_LEADERS = 4
"""The best so far; half of a wave are their neighbours, which differ in the value of one field."""
_NOISE = 1e-2
"""Variance of a time's noise, relative to the spread of all times."""
_REACH = 1.5
"""Length of the model's kernel; 1 is the way from a field's least value to its greatest."""
_MAX_LEARNT = 128
"""Times that the model is fitted to, at most: the cost grows with their third power."""

_Column = np.ndarray[Any, np.dtype[np.float64]]


class ConfigSpace:
    """The candidates of one site, by their described configs."""

    def __init__(self, texts: Sequence[str]) -> None:
        rows = [dict(_FIELD.findall(text)) for text in texts]
        columns = [_Field([row.get(name, "") for row in rows]) for name in dict.fromkeys(name for row in rows for name in row)]
        self._fields = [each for each in columns if each.n_values > 1]
        self._n = len(texts)
        self._order: list[int] = []
        self._away = np.full(self._n, np.inf)
        """Candidate -> distance to the nearest one of the order so far."""
        turns = list(range(self._n))
        random.Random(0).shuffle(turns)  # among equally far ones
        self._turns = np.array(turns, dtype=np.int64)

    def spread(self, n: int) -> list[int]:
        """``n`` candidates, each as far as can be from those before it; the first candidate first."""
        while len(self._order) < min(n, self._n):
            taken = int(self._turns[np.argmax(self._away[self._turns])]) if self._order else 0
            self._order.append(taken)
            self._away = np.minimum(self._away, self._distances(taken))
            self._away[taken] = -1.0
        return self._order[:n]

    def wave(self, n: int, times_ms: Mapping[int, float], failures: Collection[int], untried: Collection[int]) -> list[int]:
        """The ``n`` most promising of the ``untried``: half of them neighbours of the best, the others by the model alone.

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
            is_near |= self._n_differing(leader) == 1
        near = [i for i in order if is_near[i] and not beyond[i]][: n // 2]
        return [*near, *(i for i in order if i not in near)][:n]

    def _speeds(self, times_ms: Mapping[int, float]) -> _Column:
        """Predicted speed of all candidates, relative to the best one's: a Gaussian process with a rational quadratic kernel."""
        learnt = sorted(times_ms, key=lambda i: (times_ms[i], i))
        if len(learnt) > _MAX_LEARNT:  # the best, and of the others every so many
            half = _MAX_LEARNT // 2
            others = learnt[half:]
            learnt = learnt[:half] + [others[k * len(others) // half] for k in range(half)]
        best_ms = times_ms[learnt[0]]
        speeds = [best_ms / times_ms[i] for i in learnt]
        mean = 0.0
        for each in speeds:
            mean += each / len(speeds)
        kernels = np.stack([1.0 / (1.0 + self._squares(i) / (_REACH * _REACH)) for i in learnt])
        system = kernels[:, learnt] + _NOISE * np.eye(len(learnt))
        weights = _solved(system, np.array(speeds) - mean)
        predicted = np.full(self._n, mean)
        for weight, kernel in zip(weights, kernels, strict=True):
            predicted += weight * kernel
        return predicted

    def _beyond(self, times_ms: Mapping[int, float], failures: Collection[int]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Candidates that need at least as much of everything as a failed one, unless such a candidate has run."""
        beyond = np.zeros(self._n, dtype=bool)
        ran = list(times_ms)
        for failed in sorted(failures):
            is_more = np.ones(self._n, dtype=bool)
            for field in self._fields:
                levels = field.levels
                is_more &= levels >= levels[failed] if field.is_number else levels == levels[failed]
            if not is_more[ran].any():
                beyond |= is_more
        return beyond

    def _distances(self, i: int) -> _Column:
        distances = np.zeros(self._n)
        for field in self._fields:
            distances += field.differences(i)
        return distances

    def _squares(self, i: int) -> _Column:
        squares = np.zeros(self._n)
        for field in self._fields:
            difference = field.differences(i)
            squares += difference * difference
        return squares

    def _n_differing(self, i: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        n_differing = np.zeros(self._n, dtype=np.int64)
        for field in self._fields:
            n_differing += field.levels != field.levels[i]
        return n_differing


class _Field:
    """One field of the configs: its value's place among all values."""

    def __init__(self, texts: list[str]) -> None:
        distinct = set(texts)
        self.is_number = all(re.fullmatch(r"-?\d+(\.\d+)?", text) for text in distinct)
        places = {text: place for place, text in enumerate(sorted(distinct, key=float if self.is_number else None))}
        self.n_values = len(places)
        self.levels = np.array([places[text] for text in texts])

    def differences(self, i: int) -> _Column:
        """From candidate ``i``'s value to those of all: steps as a share of all steps, or 1 for another word."""
        steps: _Column = np.abs(self.levels - self.levels[i]) / (self.n_values - 1.0)
        return steps if self.is_number else np.ceil(steps)


def _solved(system: _Column, right: _Column) -> _Column:
    """The solution of a positive definite system, by Gaussian elimination."""
    system, right = system.copy(), right.copy()
    n = len(right)
    for k in range(n - 1):
        factors = system[k + 1 :, k] / system[k, k]
        system[k + 1 :, k:] -= factors[:, None] * system[k, k:]
        right[k + 1 :] -= factors * right[k]
    for k in range(n - 1, -1, -1):
        right[k] /= system[k, k]
        right[:k] -= system[:k, k] * right[k]
    return right
