"""Guides to `triton.autotune` kernels on one GPU: vector sums, matrix products, softmax of rows.

Each is launched by a function that is a step of `contextual_autotune`: that tunes such kernels
where they are launched, keeps the winners on disk, and works the same where the function is called
inside a larger step. The kernel's own cache gets the winner, so a later call costs what a plain
Triton launch does.

- y = a + b.
- C = A @ B, tile by tile.
- Softmax of rows, as the example of a reduction: a program goes through one row in blocks, of any
  width. The block is not the row: BLOCK_SIZE is free to be tuned, as long as a program keeps a
  running maximum and a running sum. `autotune` would fit where the choice were between algorithms
  (a row in one block, a row over several programs); here it would add nothing.

    python kernels/guides.py vector_add --case check
    python kernels/guides.py matmul --case perf --shape 4096,4096,4096 --dtype bf16
    python kernels/guides.py softmax --case perf --shape 4096,32000
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

# First: kernels are loaded once, under the module name that their records carry.
if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("program.py")))

import torch
import triton
import triton.language as tl

from dist_tune import contextual_autotune
from kernels.operands import check_operands
from kernels.shard_gemm import tile_block

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def vector_configs() -> list[triton.Config]:
    """Elements of a program and its warps: 2 to 32 elements a thread, in powers of two, for other
    sizes do not compile.
    """
    if triton.knobs.runtime.interpret:
        return [triton.Config({"BLOCK_SIZE": size}, num_warps=4) for size in (256, 1024)]
    sizes = [
        (1024, 4),
        (256, 4),
        (512, 8),
        (1024, 8),
        (2048, 4),
        (2048, 8),
        (4096, 4),
        (4096, 8),
        (8192, 8),
    ]
    return [triton.Config({"BLOCK_SIZE": size}, num_warps=warps) for size, warps in sizes]


@triton.autotune(configs=vector_configs(), key=["n_elements"])
@triton.jit
def add_kernel(a, b, y, n_elements, BLOCK_SIZE: tl.constexpr):
    """Y = a + b, each [n_elements], contiguous; summed in float32."""
    # 64 bits: a 32-bit offset wraps around at 2**31 elements.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = offsets < n_elements
    total = tl.load(a + offsets, mask=inside).to(tl.float32) + tl.load(b + offsets, mask=inside).to(
        tl.float32
    )
    tl.store(y + offsets, total.to(y.dtype.element_ty), mask=inside)


@contextual_autotune()
def vector_add(
    a: torch.Tensor, b: torch.Tensor, config: triton.Config | None = None
) -> torch.Tensor:
    """A + b, of one shape, dtype and device, contiguous.

    `config` is used as it is; None leaves the choice to the tuner.

    Raises:
        ValueError: operands that do not go together.
    """
    is_alike = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
    if not is_alike or a.dtype not in DTYPES or not (a.is_contiguous() and b.is_contiguous()):
        raise ValueError(
            "need two contiguous tensors of one shape, device and dtype (fp32, bf16, fp16); "
            f"got {list(a.shape)} {a.dtype} {a.device} and {list(b.shape)} {b.dtype} {b.device}"
        )
    y, n_elements = torch.empty_like(a), a.numel()
    if n_elements:  # a GPU takes no empty grid
        _launch(
            add_kernel,
            lambda meta: (triton.cdiv(n_elements, meta["BLOCK_SIZE"]),),
            (a, b, y, n_elements),
            config,
        )
    return y


def _launch(
    kernel: Any, grid: Any, args: tuple[Any, ...], config: triton.Config | None, **fixed: Any
) -> None:
    """With a config, or with the one that the kernel's tuner chooses."""
    if config is None:
        kernel[grid](*args, **fixed)
    else:
        kernel.fn[grid](*args, **fixed, **config.all_kwargs())


def make_config(
    block_m: int, block_n: int, block_k: int, *, warps: int = 4, stages: int = 3, group: int = 8
) -> triton.Config:
    """A launch config of `matmul_kernel`."""
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP": group}
    return triton.Config(blocks, num_warps=warps, num_stages=stages)


def matmul_configs() -> list[triton.Config]:
    """Tiles from large (each element loaded is used most often) to small (enough programs for all
    multiprocessors).
    """
    if triton.knobs.runtime.interpret:
        return [make_config(32, 32, 32), make_config(64, 32, 64, group=1), make_config(16, 64, 32)]
    tiles = [
        (128, 128, 64, 8, 3),
        (128, 256, 64, 8, 3),
        (128, 128, 64, 4, 4),
        (128, 128, 32, 4, 4),
        (128, 64, 64, 4, 4),
        (64, 128, 64, 4, 4),
        (64, 64, 64, 4, 5),
        (64, 32, 64, 4, 5),
        (32, 64, 64, 2, 5),
    ]
    return [make_config(m, n, k, warps=warps, stages=stages) for m, n, k, warps, stages in tiles]


@triton.autotune(configs=matmul_configs(), key=["M", "N", "K"])
@triton.jit
def matmul_kernel(
    a,  # [M, K]
    b,  # [K, N]
    c,  # [M, N]
    M,
    N,
    K,
    INTERPRETED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One tile of C; all matrices contiguous, which is why strides need no place in the key."""
    row, col = tile_block(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    rows, cols = row * BLOCK_M + tl.arange(0, BLOCK_M), col * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # 64 bits: a matrix may have more than 2**31 elements.
    a_rows = a + rows.to(tl.int64)[:, None] * K
    for k in range(0, K, BLOCK_K):
        depths = k + tl.arange(0, BLOCK_K)
        is_deep = depths < K
        a_block = tl.load(
            a_rows + depths[None, :], mask=(rows < M)[:, None] & is_deep[None, :], other=0.0
        )
        b_rows = b + depths.to(tl.int64)[:, None] * N
        b_block = tl.load(
            b_rows + cols[None, :], mask=is_deep[:, None] & (cols < N)[None, :], other=0.0
        )
        if INTERPRETED:  # it multiplies the bits of bfloat16 as integers
            a_block, b_block = a_block.to(tl.float32), b_block.to(tl.float32)
        total = tl.dot(a_block, b_block, total)
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    tl.store(
        c + rows.to(tl.int64)[:, None] * N + cols[None, :],
        total.to(c.dtype.element_ty),
        mask=inside,
    )


@contextual_autotune()
def matmul(a: torch.Tensor, b: torch.Tensor, config: triton.Config | None = None) -> torch.Tensor:
    """A @ B [M, N] in the dtype of A [M, K] and B [K, N], summed in float32.

    `config` is used as it is; None: the tuner chooses.

    Raises:
        ValueError: operands that do not go together.
    """
    check_operands(a, b.T, "A as [M, K] and B as [K, N]")
    if not (a.is_contiguous() and b.is_contiguous()):
        raise ValueError(f"need A and B contiguous; got strides {a.stride()} and {b.stride()}")
    (m, k), n = a.shape, b.shape[1]
    c = a.new_empty(m, n)

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)

    _launch(
        matmul_kernel, grid, (a, b, c, m, n, k), config, INTERPRETED=triton.knobs.runtime.interpret
    )
    return c


def softmax_configs() -> list[triton.Config]:
    """Blocks that cover narrow rows at once and wide ones in a few turns; stages load the next
    blocks meanwhile.
    """
    if triton.knobs.runtime.interpret:
        return [
            triton.Config({"BLOCK_SIZE": size}, num_warps=4, num_stages=2) for size in (64, 256)
        ]
    return [
        triton.Config({"BLOCK_SIZE": size}, num_warps=warps, num_stages=stages)
        for size, warps in (
            (1024, 4),
            (512, 2),
            (512, 4),
            (2048, 4),
            (2048, 8),
            (4096, 8),
            (8192, 8),
            (8192, 16),
            (16384, 16),
        )
        for stages in (1, 3)
    ]


@triton.autotune(configs=softmax_configs(), key=["n_cols"])
@triton.jit
def softmax_kernel(
    x,  # [rows, n_cols], contiguous
    y,  # [rows, n_cols], contiguous
    n_cols,
    BLOCK_SIZE: tl.constexpr,
    # The config's own: loads that feed no product are pipelined only where a loop asks for it
    num_stages: tl.constexpr,
):
    """One row: twice through its blocks, for the sum and for the quotients, which find the row in a
    cache.
    """
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
        tl.store(
            y + row + cols, (tl.exp(block - top) / divisor).to(y.dtype.element_ty), mask=inside
        )


@contextual_autotune()
def softmax(x: torch.Tensor, config: triton.Config | None = None) -> torch.Tensor:
    """The softmax of each row of `x` [rows, n_cols], contiguous, computed in float32; a row of -inf
    alone gives NaN, as in torch.

    `config` is used as it is; None leaves the choice to the tuner. How many rows there are is not
    in the key: each is a program.

    Raises:
        ValueError: not a contiguous matrix of float32, bfloat16 or float16.
    """
    if x.dim() != 2 or x.dtype not in DTYPES or not x.is_contiguous():
        raise ValueError(
            f"need a contiguous matrix (fp32, bf16, fp16); got {list(x.shape)} {x.dtype}, strides"
            f" {x.stride()}"
        )
    y = torch.empty_like(x)
    if y.numel():
        _launch(softmax_kernel, (len(x),), (x, y, x.shape[1]), config)
    return y
