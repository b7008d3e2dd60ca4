"""Steps that do without a kernel where no config fits, on all ranks or on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton

from dist_tune import contextual_autotune
from dist_tune.testing import values
from tests.ranks.kernels import add_kernel, launch
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once

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
