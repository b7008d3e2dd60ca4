"""Runs and seconds that slow configs cost on real ranks: each few times, and within a budget if there is one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from dist_tune import autotune
from dist_tune.testing import ExactTime
from tests import steps
from tests.steps import FACES, Face
from tests.worlds import on_each_rank


def tuned(face: Face, seconds: Sequence[float], **options: Any) -> SimpleNamespace:
    """Configs that take so long: runs of each, the seconds of their tuning, the winner, and why the others are not it. Nothing waits."""
    ran, began, monotonic = Counter[int](), ExactTime.seconds, time.monotonic

    def spend(i: int, x: Any = 0) -> Any:
        ran[i] += 1
        ExactTime.pass_ms(seconds[i] * 1e3)
        return x + 1

    if face == "function":
        space = [{"i": i} for i in range(len(seconds))]
        step: Any = autotune(space, None, cache=False, **options)(lambda x, i: spend(i, x))
    else:
        configs = [triton.Config({"BLOCK": 16 << i % 4}, pre_hook=lambda _, i=i: spend(i)) for i in range(len(seconds))]
        step = steps.tuned(steps.autotuned(configs=configs), n_repeat=5, n_warmup=3, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: monotonic() + ExactTime.seconds)
        assert step(torch.zeros(4))[0].item() == 1.0
    (record,) = step.records
    return SimpleNamespace(
        ran=[ran[i] for i in range(len(seconds))],
        seconds=ExactTime.seconds - began,
        winner=record.winner,
        whys=[each.failure or each.left or "" for each in record.candidates],
    )


SLOW: list[tuple[Face, list[float], list[int]]] = [
    ("function", [0.8, 0.002, 0.002], [0]),
    ("function", [0.3] * 7 + [0.002], [*range(7)]),
    ("contextual", [0.0, 0.001, 0.5], [2]),
]


@on_each_rank(cases=SLOW)
def test_a_slow_config_runs_twice_at_most(rank: int, case: Any) -> Any:
    """Once untimed, because its first run may compile, and once timed: 500 times slower than the best, it has had its chance.

    The config of the first run and of the probe runs twice more, and not in between.
    """
    face, seconds, slow = case
    got = tuned(face, seconds)
    assert got.winner not in slow
    assert all(got.whys[i] for i in slow)
    assert {got.ran[i] - 2 * (i == 0) for i in slow} <= {1, 2}
    assert got.seconds < sum((2 + 2 * (i == 0)) * seconds[i] for i in slow) + 2
    return got.ran, got.winner


@on_each_rank()
def test_long_configs_are_tuned_in_a_small_multiple_of_one_run_of_each(rank: int):
    """Of four alike none runs more than seven times, nor does one that is slow on one rank alone."""
    got = tuned("function", [0.6, 0.62, 0.64, 0.9])
    assert (max(got.ran) <= 7, got.ran[3], got.winner) == (True, 2, 0)
    assert got.seconds < 5 * (0.6 + 0.62 + 0.64 + 0.9)
    one_sided = tuned("function", [0.01, 0.8 if rank == 1 else 0.01, 0.011])
    assert (one_sided.ran[1] <= 3, one_sided.winner in (0, 2)) == (True, True)


@on_each_rank(cases=FACES)
def test_a_budget_ends_the_search_on_all_ranks(rank: int, face: Face) -> Any:
    """Twelve configs of 0.4 s in 1.5 s: a few have run, the best of these wins, and the record names the rest."""
    got = tuned(face, [0.4, 0.38, *[0.41] * 10], budget_s=1.5)
    assert got.seconds < 1.5 + 5 * 0.42  # the first run and the last, the batch under way
    assert {why for n, why in zip(got.ran, got.whys, strict=True) if n == 0} == {"not raced: the budget of 1.5 s was spent"}
    assert got.ran.count(0) >= 4
    assert "budget" not in got.whys[got.winner]
    assert got.ran[got.winner] > 0
    assert face == "contextual" or got.winner == 1
    return got.ran, got.winner, got.whys
