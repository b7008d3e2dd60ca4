"""Kernels inside a function that takes its config: each way of the function launches its kernel with another key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from dist_tune import autotune
from dist_tune.testing import ExactTime, on_ranks, values

pytestmark = [pytest.mark.processes, pytest.mark.once, pytest.mark.slow]

N, N_WAYS = 256, 30


@triton.jit(do_not_specialize=["way"])
def _kernel(x_ptr, y_ptr, n, way, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + 1.0, mask=at < n)


def _tune(rank: int) -> Any:
    kernel = triton.autotune([triton.Config({"BLOCK": block}) for block in (16, 256)], key=["n", "way"])(_kernel)

    @autotune([{"way": way} for way in range(N_WAYS)], key_fn=None, n_warmup=1, n_repeat=4, cache=False)
    def step(x: torch.Tensor, way: int = 0) -> torch.Tensor:
        y = torch.empty_like(x)
        kernel[lambda meta: (triton.cdiv(N, meta["BLOCK"]),)](x, y, N, way)
        ExactTime.pass_ms(30.0 + way if way != N_WAYS - 1 else 0.0)
        return y

    step(torch.zeros(N))
    (way,) = [each for each in step.records if each.key == "[]"]
    (inner,) = [each for each in step.records if each.key.startswith(f"[{N},{N_WAYS - 1},")]
    return way.best.fields, inner.best.fields


def test_the_kernel_of_the_winning_way_runs_its_best_config():
    """Kernels of two configs are through before the ways have raced; that of the winner is timed nevertheless."""
    ((way, inner),) = values(on_ranks(1, _tune, is_dist=False, clock="exact"))
    assert way == {"way": N_WAYS - 1}
    assert inner["BLOCK"] == 256
