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

from dist_tune import autotune, contextual_autotune
from dist_tune.testing import ExactTime
from tests.ranks.jobs import Face
from tests.ranks.kernels import autotuned, launch
from tests.shared_worlds import on_each_rank

pytestmark = pytest.mark.once


def tuned(face: Face, seconds: Sequence[float], **options: Any) -> SimpleNamespace:
    """Configs that take so long: runs of each, the seconds of their tuning, the winner, and why the others are not it. Nothing waits."""
    ran: Counter[int] = Counter()

    def spend(i: int) -> None:
        ran[i] += 1
        ExactTime.pass_ms(seconds[i] * 1e3)

    step: Any
    if face == "function":

        @autotune([{"i": i} for i in range(len(seconds))], None, cache=False, **options)
        def step(x: torch.Tensor, i: int) -> torch.Tensor:
            spend(i)
            return x + 1

    else:
        configs = [triton.Config({"BLOCK": 16 << i % 4}, pre_hook=lambda _, i=i: spend(i)) for i in range(len(seconds))]
        kernel = autotuned(configs=configs)
        step = contextual_autotune(is_dist=True, cache=False, **options)(lambda x: launch(kernel, x))
    began, monotonic = ExactTime.seconds, time.monotonic
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


def is_one(result: torch.Tensor, x: torch.Tensor) -> bool:
    return bool((result == 1).all())


SLOW: list[tuple[Face, list[float], list[int], dict[str, Any]]] = [
    ("function", [0.002, 0.002, 0.8], [2], {}),
    ("function", [0.8, 0.002, 0.002], [0], {}),
    ("function", [0.3] * 7 + [0.002], [*range(7)], {}),
    ("function", [0.002, 0.8], [1], {"check": is_one}),
    ("contextual", [0.0, 0.001, 0.5], [2], {}),
]


@on_each_rank(cases=SLOW)
def test_a_slow_config_runs_twice_at_most(rank: int, case: Any) -> Any:
    """Once untimed, because its first run may compile, and once timed: 500 times slower than the best, it has had its chance.

    The config of the first run and of the probe runs twice more, and not in between.
    """
    face, seconds, slow, options = case
    got = tuned(face, seconds, **options)
    assert got.winner not in slow
    assert all(got.whys[i] for i in slow)
    assert {got.ran[i] - 2 * (i == 0) for i in slow} <= {1, 2}
    assert got.seconds < sum((2 + 2 * (i == 0)) * seconds[i] for i in slow) + 2
    return got.ran, got.winner


@on_each_rank()
def test_long_configs_are_tuned_in_a_small_multiple_of_one_run_of_each(rank: int):
    """The only one runs once more to see that it runs; of four alike none runs more than seven times."""
    assert tuned("function", [0.5]).ran == [4]
    got = tuned("function", [0.6, 0.62, 0.64, 0.9])
    assert (max(got.ran) <= 7, got.ran[3], got.winner) == (True, 2, 0)
    assert got.seconds < 5 * (0.6 + 0.62 + 0.64 + 0.9)


@on_each_rank()
def test_a_config_that_is_slow_on_one_rank_is_dropped_by_name(rank: int):
    """All ranks say which rank it was, and what the other one needs."""
    got = tuned("function", [0.01, 0.8 if rank == 1 else 0.01, 0.011])
    assert (got.ran[1], got.winner in (0, 2)) == (2, True)
    assert got.whys[1].startswith("rank 1: 0.80 s a launch, where rank 0 needs 0.01")


BUDGETS: list[tuple[Face, dict[str, Any]]] = [
    ("function", {}), ("contextual", {"search": "racing"}), ("contextual", {"search": "exhaustive"})
]  # fmt: skip


@on_each_rank(cases=BUDGETS)
def test_a_budget_ends_the_search_on_all_ranks(rank: int, case: Any) -> Any:
    """Twelve configs of 0.4 s in 1.5 s: a few have run, the best of these wins, and the record names the rest."""
    face, options = case
    got = tuned(face, [0.4, 0.38, *[0.41] * 10], budget_s=1.5, **options)
    assert got.seconds < 1.5 + 5 * 0.42  # the first run and the last, the batch under way
    assert {why for n, why in zip(got.ran, got.whys, strict=True) if n == 0} == {"not raced: the budget of 1.5 s was spent"}
    assert got.ran.count(0) >= 4
    assert "budget" not in got.whys[got.winner]
    assert got.ran[got.winner] > 0
    assert face == "contextual" or got.winner == 1
    return got.ran, got.winner, got.whys
