"""Runs and seconds that slow configs cost on real ranks: each few times, and within a budget if there is one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton

from dist_tune import autotune, contextual_autotune
from dist_tune.testing import values
from tests.ranks.kernels import autotuned, launch
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once


def _sleeping(seconds: Sequence[float], **options: Any) -> Any:
    """Runs of each config, the seconds of the tuning, the winner, and why the others are not it."""
    ran: Counter[int] = Counter()

    @autotune([{"i": i} for i in range(len(seconds))], None, cache=False, **options)
    def step(x: torch.Tensor, i: int) -> torch.Tensor:
        ran[i] += 1
        time.sleep(seconds[i])
        return x + 1

    began = time.monotonic()
    step(torch.zeros(4))
    record = step.records[0]
    return [ran[i] for i in range(len(seconds))], time.monotonic() - began, record.winner, [c.failure or c.left for c in record.candidates]


def _functions(rank: int) -> dict[str, Any]:
    one_rank = [0.01, 0.8 if rank == 1 else 0.01, 0.011]
    return {
        "one of three": _sleeping([0.002, 0.002, 0.8]),
        "the first": _sleeping([0.8, 0.002, 0.002]),
        "seven of eight": _sleeping([0.3] * 7 + [0.002]),
        "checked": _sleeping([0.002, 0.8], check=lambda result, x: bool((result == 1).all())),
        "the only one": _sleeping([0.5]),
        "all alike": _sleeping([0.6, 0.62, 0.64, 0.9]),
        "on one rank": _sleeping(one_rank),
        "budget": _sleeping([0.4, 0.38, *[0.41] * 10], budget_s=1.5),
    }


@pytest.fixture(scope="module")
def functions() -> list[dict[str, Any]]:
    """All of them, one after the other, on two ranks."""
    return values(on_ranks(2, _functions))


@pytest.mark.parametrize(("name", "slow"), [("one of three", [2]), ("the first", [0]), ("seven of eight", [*range(7)]), ("checked", [1])])
def test_a_slow_config_runs_twice_at_most(functions: list[dict[str, Any]], name: str, slow: list[int]):
    """Once untimed, because its first run may compile, and once timed: 500 times slower than the best, it has had its chance.

    The config of the first run and of the probe runs twice more.
    """
    for rank in functions:
        ran, _, winner, whys = rank[name]
        assert all(whys[i] for i in slow)
        assert {ran[i] - 2 * (i == 0) for i in slow} <= {1, 2}
        assert winner not in slow


def test_the_slow_ones_cost_two_runs_of_each(functions: list[dict[str, Any]]):
    """Seven of 0.3 s beside a quick one: twice that and little more, and a slow first config is not run in between."""
    ran, seconds, winner, _ = functions[0]["seven of eight"]
    assert (ran[:7], winner) == ([4, *[2] * 6], 7)
    assert seconds < 2 * 8 * 0.3 + 2
    assert functions[0]["the first"][0][0] == 4


def test_long_configs_are_tuned_in_a_small_multiple_of_one_run_of_each(functions: list[dict[str, Any]]):
    """The only one runs once more to see that it runs; of four alike none runs more than seven times."""
    assert functions[0]["the only one"][0] == [4]
    ran, seconds, winner, _ = functions[0]["all alike"]
    assert (max(ran) <= 7, ran[3], winner) == (True, 2, 0)
    assert seconds < 5 * (0.6 + 0.62 + 0.64 + 0.9)


def test_a_config_that_is_slow_on_one_rank_is_dropped_by_name(functions: list[dict[str, Any]]):
    """All ranks say which rank it was, and what the other one needs."""
    for rank in functions:
        ran, _, winner, whys = rank["on one rank"]
        assert (ran[1], winner in (0, 2)) == (2, True)
        assert whys[1].startswith("rank 1: 0.80 s a launch, where rank 0 needs 0.01")


def test_a_budget_ends_the_search_of_a_function_on_all_ranks(functions: list[dict[str, Any]]):
    """Twelve configs of 0.4 s in 1.5 s: a few have run, the best of these wins, and the record names the rest."""
    (ran, seconds, winner, whys), (other_ran, _, other_winner, other_whys) = (rank["budget"] for rank in functions)
    assert (ran, winner, whys) == (other_ran, other_winner, other_whys)
    assert (winner, ran[-1]) == (1, 0)
    assert seconds < 1.5 + 3 * 0.42  # a batch under way, and the run for the value
    assert {why for n, why in zip(ran, whys, strict=True) if n == 0} == {"not raced: the budget of 1.5 s was spent"}


def _kernels(rank: int, hook_s: Sequence[float], options: dict[str, Any]) -> Any:
    ran: Counter[int] = Counter()

    def slow(i: int) -> Any:
        def hook(nargs: dict[str, Any]) -> None:
            ran[i] += 1
            time.sleep(hook_s[i])

        return hook

    kernel = autotuned(configs=[triton.Config({"BLOCK": 16 << i % 4}, pre_hook=slow(i)) for i in range(len(hook_s))])

    @contextual_autotune(is_dist=True, cache=False, **options)
    def step(x: torch.Tensor) -> torch.Tensor:
        y = launch(kernel, x)
        dist.all_reduce(y)
        return y

    began = time.monotonic()
    y = step(torch.zeros(64))
    record = step.records[0]
    return y[0].item(), ran, time.monotonic() - began, record.winner, [c.left or "" for c in record.candidates]


def test_a_kernel_whose_hook_takes_long_runs_once():
    """Three configs, one of which takes 0.5 s longer; the first run may have been its own."""
    for y, ran, _, winner, _ in values(on_ranks(2, _kernels, (0.0, 0.001, 0.5), {})):
        assert (y, winner in (0, 1)) == (2.0, True)
        assert ran[2] <= 2


@pytest.mark.parametrize("search", ["racing", "exhaustive"])
def test_a_budget_ends_the_search_of_a_closure_on_all_ranks(search: str):
    """Eight configs of 0.3 s in a second: both ranks end with the same one, soon, and name those that were not measured."""
    (y, ran, seconds, winner, lefts), other = values(on_ranks(2, _kernels, [0.3] * 8, {"budget_s": 1.0, "search": search}))
    assert (y, other[0]) == (2.0, 2.0)
    assert (ran, winner, lefts) == (other[1], other[3], other[4])
    assert seconds < 1.0 + 5 * 0.35 + 1.5  # the first run and the last, the replay under way; compilation
    assert lefts.count("not raced: the budget of 1 s was spent") >= 4
    assert "budget" not in lefts[winner]
