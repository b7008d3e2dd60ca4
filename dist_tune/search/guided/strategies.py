"""The order and number of the configs that are tried in a large space.

Pure, but for the model of ``guided``: scikit-learn's, an optional dependency that is imported on use. From the same times a strategy
proposes the same candidates, so ranks that run in lockstep need no exchange about it.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

import numpy as np

SearchStrategy = Literal["racing", "exhaustive", "random", "guided"]
"""The first two try all configs: racing drops the hopeless after one timed run, exhaustive times all alike."""
STRATEGIES = get_args(SearchStrategy)
GUIDED_SHARE = 0.05
"""Share of a space that random and guided search try by default, but at least ``GUIDED_LEAST`` configs."""
GUIDED_LEAST = 48
# Chosen on the recorded tables of a full space: logs/guided-search has these and what was tried beside them.
_BATCH = 8
"""Configs between two fits of the model, at most."""
_FIRST_SHARE = 0.25
"""Share of the configs to try that are drawn at random before the first fit."""
_N_LEADERS = 3
"""The best so far; half of each batch are their neighbours, which differ in the value of one field."""
_MAX_LEARNT = 400
"""Configs to fit the model to, at most: its time grows with their third power."""


class Strategy(Protocol):
    """The order in which candidates are tried."""

    n_planned: int
    """Candidates that it proposes in all."""

    def propose(self, n: int) -> list[int]:
        """Up to ``n`` candidates that are neither proposed nor known yet; none at the end of the search."""

    def tell(self, latencies_ms: Mapping[int, float], failures: Iterable[int]) -> None:
        """Take in times and failures of candidates, proposed or known from before."""


class Sweep:
    """All candidates, in a given order."""

    def __init__(self, order: Sequence[int]) -> None:
        self.n_planned = len(order)
        self._left = list(order)

    def propose(self, n: int) -> list[int]:
        """The next ones."""
        taken, self._left = self._left[:n], self._left[n:]
        return taken

    def tell(self, latencies_ms: Mapping[int, float], failures: Iterable[int]) -> None:
        """Leave out those known from before."""
        known = {*latencies_ms, *failures}
        self._left = [i for i in self._left if i not in known]


class Guided:
    """Candidates that a model of the times so far predicts to be fast, or cannot predict well, and neighbours of the best.

    The model is a Gaussian process over the config's fields; candidates are ranked by predicted log time less one standard deviation.
    One of each batch is drawn at random, because the model does not correct its own errors.
    """

    def __init__(self, configs: Sequence[Mapping[str, Any]], n_planned: int, seed: int = 0) -> None:
        self.n_planned = min(n_planned, len(configs))
        self._features = features(configs)
        self._dice = random.Random(seed)
        self._latencies_ms: dict[int, float] = {}
        self._failures: set[int] = set()
        self._proposed: set[int] = set()
        _gaussian_process(1)  # an absent library is an error at once

    def propose(self, n: int) -> list[int]:
        """The most promising, or random ones until the first fit."""
        known = self._proposed | self._latencies_ms.keys() | self._failures
        open_ = [i for i in range(len(self._features)) if i not in known]
        n = min(n, self.n_planned - len(known), len(open_))
        if n <= 0:
            return []
        n_first = max(_BATCH, round(_FIRST_SHARE * self.n_planned)) - len(known)
        if n_first > 0 or len(self._latencies_ms) < 2:
            taken = self._dice.sample(open_, min(n, max(n_first, _BATCH)))
        else:
            taken = self._promising(open_, min(n, _BATCH))
        self._proposed |= set(taken)
        return taken

    def tell(self, latencies_ms: Mapping[int, float], failures: Iterable[int]) -> None:
        """Keep for the next fit."""
        self._latencies_ms |= latencies_ms
        self._failures |= set(failures)

    def _promising(self, candidates: Sequence[int], n: int) -> list[int]:
        best = [candidates[k] for k in np.argsort(self._worth(candidates), kind="stable")]
        leaders = sorted(self._latencies_ms, key=lambda i: (self._latencies_ms[i], i))[:_N_LEADERS]
        near = [i for i in best if any(np.count_nonzero(self._features[i] != self._features[leader]) == 1 for leader in leaders)]
        taken = near[: n // 2]
        taken += [i for i in best if i not in taken][: max(1, n - 1) - len(taken)]
        others = [i for i in best if i not in taken]
        return taken + self._dice.sample(others, min(n - len(taken), len(others)))

    def _worth(self, candidates: Sequence[int]) -> np.ndarray[Any, Any]:
        times = {i: math.log(ms) for i, ms in self._latencies_ms.items()}
        # Failures count as the slowest time, so that the search avoids their neighbours.
        times |= dict.fromkeys(self._failures - times.keys(), max(times.values()))
        learnt = sorted(times, key=lambda i: (times[i], i))
        if len(learnt) > _MAX_LEARNT:
            half = _MAX_LEARNT // 2
            learnt = learnt[:half] + self._dice.sample(learnt[half:], half)
        model = _gaussian_process(self._features.shape[1])
        with warnings.catch_warnings():  # a field without influence has no scale
            warnings.simplefilter("ignore")
            model.fit(self._features[learnt], [times[i] for i in learnt])
            mean, deviation = model.predict(self._features[list(candidates)], return_std=True)
        worth: np.ndarray[Any, Any] = mean - deviation
        return worth


def features(configs: Sequence[Mapping[str, Any]]) -> np.ndarray[Any, Any]:
    """Candidate -> numbers from 0 to 1 for the fields that vary: logarithms of positive numbers, ranks of other values."""
    columns = []
    for name in dict.fromkeys(name for config in configs for name in config):
        values = [config.get(name) for config in configs]
        is_number = all(isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in values)
        places = {text: place for place, text in enumerate(sorted({repr(value) for value in values}))}
        if len(places) > 1:
            column = np.array([math.log2(value) if is_number else places[repr(value)] for value in values])  # type: ignore[arg-type]
            columns.append((column - column.min()) / (column.max() - column.min()))
    return np.stack(columns, axis=1) if columns else np.zeros((len(configs), 1))


def grouped_order(configs: Sequence[Mapping[str, Any]], seed: int) -> list[int]:
    """All candidates, shuffled in groups that share Triton's front end: they differ in warps and stages alone."""
    groups: dict[str, list[int]] = {}
    for i, config in enumerate(configs):
        groups.setdefault(repr({name: value for name, value in config.items() if name not in ("num_warps", "num_stages")}), []).append(i)
    order = list(groups.values())
    random.Random(seed).shuffle(order)
    return [i for group in order for i in group]


def make_strategy(
    search: SearchStrategy, configs: Sequence[Mapping[str, Any]], max_configs: int | None, seed: int = 0, start: float = 0.0
) -> Strategy:
    """The strategy of a name. ``max_configs``: tried at most; None: all of them, or ``GUIDED_SHARE`` of them for random and guided.

    ``start``: first place in the circle of all, from 0 to 1. Ranks that start apart find what others have compiled meanwhile.
    """
    n_few = min(len(configs), max(GUIDED_LEAST, math.ceil(GUIDED_SHARE * len(configs)))) if max_configs is None else max_configs
    if search == "guided":
        return Guided(configs, n_few, seed)
    if search == "random":
        order = list(range(len(configs)))
        random.Random(seed).shuffle(order)
        return Sweep(order[:n_few])
    order = grouped_order(configs, seed)[:max_configs]
    first = round(start * len(order))
    return Sweep(order[first:] + order[:first])


def _gaussian_process(n_fields: int) -> Any:
    try:
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
    except ImportError as error:
        raise ImportError('search="guided" needs scikit-learn: pip install "dist-tune[guided]", or use another search') from error
    scales = Matern(length_scale=np.ones(n_fields), length_scale_bounds=(0.05, 20.0), nu=2.5)
    return GaussianProcessRegressor(ConstantKernel() * scales + WhiteKernel(1e-3, (1e-6, 1e-1)), normalize_y=True, random_state=0)
