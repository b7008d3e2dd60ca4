"""Softmax of rows, as the example of a reduction: a program goes through one row in blocks, whatever its width.

The block is not the row: BLOCK_SIZE is free to be tuned, as long as a program keeps a running maximum and a running sum. One
`triton.autotune` kernel whose output is fresh and whose configs compute the same thing, launched by a function that is a step of
`contextual_autotune`. `autotune` would fit where the choice were between algorithms (a row in one block, a row over several
programs); here it would add nothing.

    python kernels/softmax.py --case check
    python kernels/softmax.py --case perf --shape 4096,32000
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # first: the kernel is loaded once, under the module name that its records carry
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from kernels.harness import main
    from kernels.single_gpu_cases import SOFTMAX

    sys.exit(main(SOFTMAX))

import torch
import triton
import triton.language as tl

from dist_tune import contextual_autotune

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def configs() -> list[triton.Config]:
    """Blocks that cover narrow rows at once and wide ones in a few turns; stages load the next blocks meanwhile."""
    if triton.knobs.runtime.interpret:
        return [triton.Config({"BLOCK_SIZE": size}, num_warps=4, num_stages=2) for size in (64, 256)]
    return [
        triton.Config({"BLOCK_SIZE": size}, num_warps=warps, num_stages=stages)
        for size, warps in ((1024, 4), (512, 2), (512, 4), (2048, 4), (2048, 8), (4096, 8), (8192, 8), (8192, 16), (16384, 16))
        for stages in (1, 3)
    ]


@triton.autotune(configs=configs(), key=["n_cols"])
@triton.jit
def softmax_kernel(
    x,  # [rows, n_cols], contiguous
    y,  # [rows, n_cols], contiguous
    n_cols,
    BLOCK_SIZE: tl.constexpr,
    num_stages: tl.constexpr,  # the config's own: loads that feed no product are pipelined only where a loop asks for it
):
    """One row: twice through its blocks, for the sum and for the quotients, which find the row in a cache."""
    row = tl.program_id(0).to(tl.int64) * n_cols
    lanes = tl.arange(0, BLOCK_SIZE)
    # A maximum and a sum per lane: lanes meet once a row rather than once a block.
    peak = tl.full((BLOCK_SIZE,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_SIZE,), dtype=tl.float32)
    for begin in tl.range(0, n_cols, BLOCK_SIZE, num_stages=num_stages):
        cols = begin + lanes
        block = tl.load(x + row + cols, mask=cols < n_cols, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, block)
        # Of a lane that has met nothing but -inf: -inf - -inf is NaN, and what it adds is nothing.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(peak - base) + tl.exp(block - base)
        peak = higher
    top = tl.max(peak, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    divisor = tl.sum(total * tl.exp(peak - top), axis=0)
    for begin in tl.range(0, n_cols, BLOCK_SIZE, num_stages=num_stages):
        cols = begin + lanes
        inside = cols < n_cols
        block = tl.load(x + row + cols, mask=inside, other=float("-inf")).to(tl.float32)
        tl.store(y + row + cols, (tl.exp(block - top) / divisor).to(y.dtype.element_ty), mask=inside)


@contextual_autotune()
def softmax(x: torch.Tensor, config: triton.Config | None = None) -> torch.Tensor:
    """The softmax of each row of `x` [rows, n_cols], contiguous, computed in float32; a row of -inf alone gives NaN, as in torch.

    `config` is used as it is; None leaves the choice to the tuner. How many rows there are is not in the key: each is a program.

    Raises:
        ValueError: not a contiguous matrix of float32, bfloat16 or float16.
    """
    if x.dim() != 2 or x.dtype not in DTYPES or not x.is_contiguous():
        raise ValueError(f"need a contiguous matrix (fp32, bf16, fp16); got {list(x.shape)} {x.dtype}, strides {x.stride()}")
    y = torch.empty_like(x)
    n_rows, n_cols = x.shape
    if not y.numel():
        return y
    kernel: Any = softmax_kernel
    if config is None:
        kernel[(n_rows,)](x, y, n_cols)
    else:
        kernel.fn[(n_rows,)](x, y, n_cols, **config.all_kwargs())
    return y
