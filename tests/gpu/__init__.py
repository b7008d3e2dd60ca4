"""What only real GPUs show; on one GPU, tests that need a second one are skipped."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

needs_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason=f"needs two GPUs, and here are {torch.cuda.device_count()}",
)
ALONE: Any = {"modes": ("gpu",), "n": 1, "is_dist": False}
"""Of `on_each_rank`: one process without ranks."""


@triton.jit
def turns_kernel(x_ptr, n, turns, lag, BLOCK: tl.constexpr):
    """Its time is in proportion to ``turns`` over BLOCK; with BLOCK 4 it takes ``lag`` times as
    long.
    """
    value = tl.load(x_ptr)
    for _ in range(turns // BLOCK * (lag if BLOCK == 4 else 1)):
        value = value * 1.0001 + 0.5
    tl.store(x_ptr, value)
