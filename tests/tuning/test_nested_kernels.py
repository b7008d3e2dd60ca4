"""Kernels inside a function that takes its config: each way of the function launches its kernel with another key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from dist_tune import autotune
from dist_tune.testing import ExactTime
from tests.steps import BLOCKS, autotuned, launch
from tests.worlds import on_each_rank

N, N_WAYS = 256, 30


@triton.jit(do_not_specialize=["way"])
def _kernel(x_ptr, y_ptr, n, way, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + 1.0, mask=at < n)


@pytest.mark.slow
@on_each_rank(1, is_dist=False)
def test_the_kernel_of_the_winning_way_runs_its_best_config(rank: int):
    """Kernels of two configs are through before the ways have raced; that of the winner is timed nevertheless."""
    kernel = autotuned(_kernel, blocks=(16, 256), key=("n", "way"))

    @autotune([{"way": way} for way in range(N_WAYS)], key_fn=None, n_warmup=1, n_repeat=4, cache=False)
    def step(x: torch.Tensor, way: int = 0) -> torch.Tensor:
        y = torch.empty_like(x)
        kernel[lambda meta: (triton.cdiv(N, meta["BLOCK"]),)](x, y, N, way)
        ExactTime.pass_ms(30.0 + way if way != N_WAYS - 1 else 0.0)
        return y

    step(torch.zeros(N))
    (way,) = [each for each in step.records if each.key == "[]"]
    (inner,) = [each for each in step.records if each.key.startswith(f"[{N},{N_WAYS - 1},")]
    assert way.best.fields == {"way": N_WAYS - 1}
    assert inner.best.fields["BLOCK"] == 256


@on_each_rank(1, is_dist=False)
def test_a_known_config_runs_once_also_where_kernels_inside_are_tuned(rank: int):
    """The run that meets them is none that counts."""

    def tuned() -> tuple[list[float], list[bool]]:
        kernel = autotuned(blocks=(2, 4))

        @autotune(BLOCKS, None, n_warmup=0, n_repeat=1)
        def step(c: torch.Tensor, block: int) -> torch.Tensor:
            return launch(kernel, c)

        return step(torch.ones(4)).tolist(), [record.is_recalled for record in step.records]

    assert tuned() == ([2.0] * 4, [False, False])
    for path in Path(os.environ["DIST_TUNE_CACHE_DIR"]).glob("*add_kernel*/*.json"):
        path.unlink()
    assert tuned() == ([2.0] * 4, [False, True])
