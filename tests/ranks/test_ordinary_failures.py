"""Calls with nothing to tune that raise on one rank alone: later calls find their peers, and no rank is left in another function's."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton

from dist_tune import autotune, contextual_autotune
from dist_tune.testing import values
from tests.ranks.kernels import add_kernel, autotuned, launch, tuned
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once


class _Steps:
    """Two tuned functions, the first of which raises when it is told to."""

    def __init__(self, kind: str) -> None:
        self.n_failures = 0
        kernel, other = autotuned(), autotuned()

        def first(x: torch.Tensor, config: int = 0) -> torch.Tensor:
            if self.n_failures:
                self.n_failures -= 1
                raise ValueError("once")
            return launch(kernel, x) if kind == "contextual" else x + config

        def second(x: torch.Tensor, config: int = 0) -> torch.Tensor:
            return launch(other, x) if kind == "contextual" else x + config

        if kind == "contextual":
            self.first, self.second = tuned(kernel, first), tuned(other, second)
        else:
            decorate = autotune([{"config": 1}, {"config": 2}], key_fn=lambda x, **_: x.numel(), n_warmup=0, n_repeat=1)
            self.first, self.second = decorate(first), decorate(second)

    def run(self, sizes: list[int]) -> list[tuple[int, int]]:
        """Call both at each size; records of both after each."""
        found = []
        for n in sizes:
            self.first(torch.ones(n))
            self.second(torch.ones(n))
            found.append((len(self.first.records), len(self.second.records)))
        return found


def _made_again(rank: int, kind: str, n_failures: int) -> Any:
    steps = _Steps(kind)
    steps.run([64])
    for _ in range(2):
        steps.n_failures = n_failures if rank == 1 else 0
        while True:
            try:
                steps.run([64])
            except ValueError:
                continue
            break
    return steps.run([128, 256])


@pytest.mark.parametrize("kind", ["contextual", "function"])
@pytest.mark.parametrize("n_failures", [1, 3])
def test_a_call_that_a_rank_makes_again_ends_in_no_error(kind: str, n_failures: int):
    """Without collectives nothing says which calls belong together: the ranks go on alone, each with a config that it has."""
    for found in values(on_ranks(2, _made_again, kind, n_failures)):
        assert len(found) == 2


def _passed_over(rank: int, kind: str) -> Any:
    steps = _Steps(kind)
    steps.run([64])
    steps.n_failures = 1 if rank == 1 else 0
    for _ in range(2):
        with suppress(ValueError):
            steps.first(torch.ones(64))
        dist.all_reduce(torch.ones(1))
    return steps.run([128])


@pytest.mark.parametrize("kind", ["contextual", "function"])
def test_a_call_that_raised_counts_where_a_collective_follows(kind: str):
    """The rank goes on with its peers: what it calls after their collective is another call."""
    assert values(on_ranks(2, _passed_over, kind)) == [[(2, 2)]] * 2


def _in_parts(rank: int, kind: str) -> None:
    steps = _Steps(kind)
    steps.run([64])
    steps.n_failures = 1 if rank == 1 else 0
    try:
        steps.first(torch.ones(64))
    except ValueError:
        for _ in range(2):
            steps.first(torch.ones(64))
    steps.run([128, 256])


@pytest.mark.parametrize("kind", ["contextual", "function"])
def test_ranks_that_count_otherwise_after_an_error_go_on_alone(kind: str):
    """Two calls in place of one that raised: the ranks wait in different functions. No error; the log says that they are alone."""
    for outcome in on_ranks(2, _in_parts, kind):
        assert not outcome.error, outcome.message
        assert " is alone in " in outcome.log


QUICK: Any = {"n_repeat": 1, "n_warmup": 0}


def _falls_back(rank: int, where: tuple[int, ...], caught: str) -> Any:
    def hook(args: Any) -> None:
        if rank in where:
            raise triton.OutOfResources(300_000, 232_448, "shared memory")

    configs = [triton.Config({"BLOCK": block}, pre_hook=hook) for block in (16, 32)]
    kernel = triton.autotune(configs=configs, key=["n"])(add_kernel)
    n_fallbacks = 0

    @contextual_autotune(is_dist=True, **QUICK)
    def step(x: torch.Tensor) -> float:
        nonlocal n_fallbacks
        try:
            y = launch(kernel, x)
        except {"any": Exception, "triton": triton.OutOfResources}[caught]:
            y, n_fallbacks = x + 1, n_fallbacks + 1
        dist.all_reduce(y)
        return float(y[0])

    got = [step(torch.zeros(64))]
    n_first = n_fallbacks
    got += [step(torch.zeros(64)), step(torch.zeros(128))]
    return got, n_first > 0, n_fallbacks - n_first > 1, len(step.records)


@pytest.mark.parametrize("caught", ["any", "triton"])
def test_a_fallback_on_one_rank_leaves_the_kernel_to_the_others(caught: str):
    """Rank 1 falls back in every run and every call; rank 0 tunes the kernel for itself."""
    first, second = values(on_ranks(2, _falls_back, (1,), caught))
    assert first[:3] == ([2.0, 2.0, 2.0], False, False)
    assert second[:3] == ([2.0, 2.0, 2.0], True, True)
    assert first[3] == second[3] == 2


def test_a_fallback_on_all_ranks_is_no_error():
    """No config runs anywhere and the step does not need one: an ordinary call, now and later."""
    for got in values(on_ranks(2, _falls_back, (0, 1), "triton")):
        assert got == ([2.0, 2.0, 2.0], True, True, 0)
