"""Guides to `triton.autotune` kernels on one GPU: vector sums, matrix products, softmax of rows.

Each is launched by a function that is a step of `contextual_autotune`: that tunes such kernels where they are launched, keeps the winners
on disk, and works the same where the function is called inside a larger step. The kernel's own cache gets the winner, so a later call
costs what a plain Triton launch does.

- y = a + b, and total += x in place, whose output is its input.
- C = A @ B tile by tile, and with K split over programs that add into one float32 C: that step zeroes C first, so its time counts, too.
- Softmax of rows, as the example of a reduction: a program goes through one row in blocks, of any width. The block is not the row:
  BLOCK_SIZE is free to be tuned, as long as a program keeps a running maximum and a running sum. `autotune` would fit where the choice were
  between algorithms (a row in one block, a row over several programs); here it would add nothing.

    python kernels/guides.py vector_add --case check
    python kernels/guides.py matmul --case perf --shape 4096,4096,4096 --shape 64,4096,16384 --dtype bf16
    python kernels/guides.py softmax --case perf --shape 4096,32000
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # first: the kernels are loaded once, under the module name that their records carry
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from kernels.cases import main

    sys.exit(main("guides"))

import torch
import triton
import triton.language as tl

from dist_tune import contextual_autotune

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def vector_configs() -> list[triton.Config]:
    """Elements of a program and its warps: 2 to 32 elements a thread, in powers of two, for other sizes do not compile."""
    if triton.knobs.runtime.interpret:
        return [triton.Config({"BLOCK_SIZE": size}, num_warps=4) for size in (256, 1024)]
    sizes = [(1024, 4), (256, 4), (512, 8), (1024, 8), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8)]
    return [triton.Config({"BLOCK_SIZE": size}, num_warps=warps) for size, warps in sizes]


@triton.jit
def _offsets(n_elements, BLOCK_SIZE: tl.constexpr):
    """What this program is to do, and which of that there is."""
    # 64 bits: a 32-bit offset wraps around at 2**31 elements.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    return offsets, offsets < n_elements


@triton.autotune(configs=vector_configs(), key=["n_elements"])
@triton.jit
def add_kernel(a, b, y, n_elements, BLOCK_SIZE: tl.constexpr):
    """Y = a + b, each [n_elements], contiguous; summed in float32."""
    offsets, inside = _offsets(n_elements, BLOCK_SIZE)
    total = tl.load(a + offsets, mask=inside).to(tl.float32) + tl.load(b + offsets, mask=inside).to(tl.float32)
    tl.store(y + offsets, total.to(y.dtype.element_ty), mask=inside)


# Its output is its input: every trial launch would add x once more, so the tuner has to put `total` back.
@triton.autotune(configs=vector_configs(), key=["n_elements"], restore_value=["total"])
@triton.jit
def accumulate_kernel(total, x, n_elements, BLOCK_SIZE: tl.constexpr):
    """Total += x, each [n_elements], contiguous; summed in float32."""
    offsets, inside = _offsets(n_elements, BLOCK_SIZE)
    grown = tl.load(total + offsets, mask=inside).to(tl.float32) + tl.load(x + offsets, mask=inside).to(tl.float32)
    tl.store(total + offsets, grown.to(total.dtype.element_ty), mask=inside)


@contextual_autotune()
def vector_add(a: torch.Tensor, b: torch.Tensor, config: triton.Config | None = None) -> torch.Tensor:
    """A + b, of one shape, dtype and device, contiguous. `config` is used as it is; None leaves the choice to the tuner.

    Raises:
        ValueError: operands that do not go together.
    """
    _check_alike(a, b)
    y = torch.empty_like(a)
    _launch_vector(add_kernel, (a, b, y), config)
    return y


@contextual_autotune()
def accumulate(total: torch.Tensor, x: torch.Tensor, config: triton.Config | None = None) -> torch.Tensor:
    """Add `x` to `total` in place, and return that; operands and `config` as in `vector_add`.

    Raises:
        ValueError: operands that do not go together.
    """
    _check_alike(total, x)
    _launch_vector(accumulate_kernel, (total, x), config)
    return total


def _launch_vector(kernel: Any, operands: tuple[torch.Tensor, ...], config: triton.Config | None) -> None:
    n_elements = operands[0].numel()
    if not n_elements:  # a GPU takes no empty grid
        return

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (triton.cdiv(n_elements, meta["BLOCK_SIZE"]),)

    if config is None:
        kernel[grid](*operands, n_elements)
    else:
        kernel.fn[grid](*operands, n_elements, **config.all_kwargs())


def _check_alike(x: torch.Tensor, y: torch.Tensor) -> None:
    is_alike = x.shape == y.shape and x.dtype == y.dtype and x.device == y.device
    if not is_alike or x.dtype not in DTYPES or not (x.is_contiguous() and y.is_contiguous()):
        raise ValueError(
            f"need two contiguous tensors of one shape, device and dtype (fp32, bf16, fp16); "
            f"got {list(x.shape)} {x.dtype} {x.device} and {list(y.shape)} {y.dtype} {y.device}"
        )


def make_config(
    block_m: int, block_n: int, block_k: int, *, warps: int = 4, stages: int = 3, group: int = 8, split: int | None = None
) -> triton.Config:
    """A launch config; of `split_k_kernel`, if `split` is given."""
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP": group}
    return triton.Config(blocks if split is None else blocks | {"SPLIT_K": split}, num_warps=warps, num_stages=stages)


def matmul_configs() -> list[triton.Config]:
    """Tiles from large (each element loaded is used most often) to small (enough programs for all multiprocessors)."""
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


def split_configs() -> list[triton.Config]:
    """Small tiles, for where C has few of them and K is long."""
    if triton.knobs.runtime.interpret:
        return [make_config(32, 32, 32, split=2), make_config(32, 32, 32, split=1), make_config(16, 32, 64, split=4)]
    tiles = [(64, 64, 64, 4, 4), (64, 128, 64, 4, 4), (32, 64, 128, 4, 3), (16, 64, 128, 4, 4)]
    return [make_config(m, n, k, warps=w, stages=s, split=split) for split in (4, 8, 16) for m, n, k, w, s in tiles]


@triton.jit
def tile_at(index, m_tiles, n_tiles, GROUP: tl.constexpr):
    """Tile row and column: down columns of GROUP tiles, so that programs that run together share tiles of A and of B in L2."""
    group = index // (GROUP * n_tiles)
    rows = tl.minimum(m_tiles - group * GROUP, GROUP)
    within = index % (GROUP * n_tiles)
    return group * GROUP + within % rows, within // rows


@triton.jit
def _product(a, b, rows, cols, M, N, K, first, step, BLOCK_K: tl.constexpr, INTERPRETED: tl.constexpr):
    """A[rows, :] @ B[:, cols] in float32, over blocks of K at `first`, `first + step`, ...; what is outside counts as zero."""
    total = tl.zeros((rows.shape[0], cols.shape[0]), dtype=tl.float32)
    # 64 bits: a matrix may have more than 2**31 elements.
    a_rows = a + rows.to(tl.int64)[:, None] * K
    for k in range(first, K, step):
        depths = k + tl.arange(0, BLOCK_K)
        is_deep = depths < K
        a_block = tl.load(a_rows + depths[None, :], mask=(rows < M)[:, None] & is_deep[None, :], other=0.0)
        b_rows = b + depths.to(tl.int64)[:, None] * N
        b_block = tl.load(b_rows + cols[None, :], mask=is_deep[:, None] & (cols < N)[None, :], other=0.0)
        if INTERPRETED:  # it multiplies the bits of bfloat16 as integers
            a_block, b_block = a_block.to(tl.float32), b_block.to(tl.float32)
        total = tl.dot(a_block, b_block, total)
    return total


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
    row, col = tile_at(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    rows, cols = row * BLOCK_M + tl.arange(0, BLOCK_M), col * BLOCK_N + tl.arange(0, BLOCK_N)
    total = _product(a, b, rows, cols, M, N, K, 0, BLOCK_K, BLOCK_K, INTERPRETED)
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    tl.store(c + rows.to(tl.int64)[:, None] * N + cols[None, :], total.to(c.dtype.element_ty), mask=inside)


# It adds to what it finds: without a fresh zero for each trial launch C would hold the sum of all of them.
@triton.autotune(configs=split_configs(), key=["M", "N", "K"], reset_to_zero=["c"])
@triton.jit
def split_k_kernel(
    a,  # [M, K]
    b,  # [K, N]
    c,  # float32 [M, N], zero
    M,
    N,
    K,
    INTERPRETED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    """Every SPLIT_K-th block of K of one tile, added to C; the order of the additions is not the same in each run."""
    row, col = tile_at(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    rows, cols = row * BLOCK_M + tl.arange(0, BLOCK_M), col * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * BLOCK_K
    total = _product(a, b, rows, cols, M, N, K, first, BLOCK_K * SPLIT_K, BLOCK_K, INTERPRETED)
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    tl.atomic_add(c + rows.to(tl.int64)[:, None] * N + cols[None, :], total, mask=inside, sem="relaxed")


@contextual_autotune()
def matmul(a: torch.Tensor, b: torch.Tensor, config: triton.Config | None = None) -> torch.Tensor:
    """A @ B [M, N] in the dtype of A [M, K] and B [K, N], summed in float32. `config` is used as it is; None: the tuner chooses.

    Raises:
        ValueError: operands that do not go together.
    """
    _check_operands(a, b)
    c = a.new_empty(a.shape[0], b.shape[1])
    _launch_product(matmul_kernel, a, b, c, config)
    return c


@contextual_autotune()
def split_k_matmul(a: torch.Tensor, b: torch.Tensor, config: triton.Config | None = None) -> torch.Tensor:
    """A @ B [M, N] in float32; the rest as for `matmul`.

    Raises:
        ValueError: operands that do not go together.
    """
    _check_operands(a, b)
    c = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    add_product(a, b, c, config)
    return c


def add_product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, config: triton.Config | None = None) -> None:
    """Add A @ B to `c`, float32 [M, N], zeroed by the caller: a tuning zeroes it anyway, an ordinary call does not."""
    _launch_product(split_k_kernel, a, b, c, config)


def _launch_product(kernel: Any, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, config: triton.Config | None) -> None:
    (m, n), k = c.shape, a.shape[1]

    def grid(meta: dict[str, Any]) -> tuple[int, int]:
        return (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]), meta.get("SPLIT_K", 1))

    args, fixed = (a, b, c, m, n, k), {"INTERPRETED": triton.knobs.runtime.interpret}
    if config is None:
        kernel[grid](*args, **fixed)
    else:
        kernel.fn[grid](*args, **fixed, **config.all_kwargs())


def _check_operands(a: torch.Tensor, b: torch.Tensor) -> None:
    is_pair = a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0] and a.dtype == b.dtype and a.device == b.device
    if not is_pair or a.dtype not in (torch.float16, torch.bfloat16) or not (a.is_contiguous() and b.is_contiguous()):
        raise ValueError(
            "need A [M, K] and B [K, N], contiguous, on one device, both float16 or both bfloat16; "
            f"got {list(a.shape)} {a.dtype} and {list(b.shape)} {b.dtype}"
        )
    if not a.numel() or not b.numel():
        raise ValueError(f"nothing to multiply in {list(a.shape)} @ {list(b.shape)}")


def softmax_configs() -> list[triton.Config]:
    """Blocks that cover narrow rows at once and wide ones in a few turns; stages load the next blocks meanwhile."""
    if triton.knobs.runtime.interpret:
        return [triton.Config({"BLOCK_SIZE": size}, num_warps=4, num_stages=2) for size in (64, 256)]
    return [
        triton.Config({"BLOCK_SIZE": size}, num_warps=warps, num_stages=stages)
        for size, warps in ((1024, 4), (512, 2), (512, 4), (2048, 4), (2048, 8), (4096, 8), (8192, 8), (8192, 16), (16384, 16))
        for stages in (1, 3)
    ]


@triton.autotune(configs=softmax_configs(), key=["n_cols"])
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
