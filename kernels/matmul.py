"""Matrix product C = A @ B: tile by tile, and with K split over programs that add into one float32 C.

Each is one `triton.autotune` kernel, launched by a function that is a step of `contextual_autotune`: that tunes the kernel where it
is launched and keeps the winners on disk. The step of the split product zeroes C first, so its time counts, too.

    python kernels/matmul.py --case check
    python kernels/matmul.py --case perf --shape 4096,4096,4096 --shape 64,4096,16384 --dtype bf16
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # first: the kernel is loaded once, under the module name that its records carry
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from kernels.harness import main
    from kernels.single_gpu_cases import MATMUL

    sys.exit(main(MATMUL))

import torch
import triton
import triton.language as tl

from dist_tune import contextual_autotune


def make_config(
    block_m: int, block_n: int, block_k: int, *, warps: int = 4, stages: int = 3, group: int = 8, split: int | None = None
) -> triton.Config:
    """A launch config; of `split_k_kernel`, if `split` is given."""
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP": group}
    return triton.Config(blocks if split is None else blocks | {"SPLIT_K": split}, num_warps=warps, num_stages=stages)


def configs() -> list[triton.Config]:
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


@triton.autotune(configs=configs(), key=["M", "N", "K"])
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
    _launch(matmul_kernel, a, b, c, config)
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
    _launch(split_k_kernel, a, b, c, config)


def _launch(kernel: Any, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, config: triton.Config | None) -> None:
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
