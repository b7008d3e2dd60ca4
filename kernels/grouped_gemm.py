# mypy: disable-error-code="no-untyped-def"
# Triton reads a kernel's annotations as argument types, so the arguments of @triton.jit functions
# carry none.
"""C[row] = A[row // top_k] @ B[expert of row].T for rows sorted by expert: the Triton kernel and
its launch configs.

Knows lists of tiles (routing.py), flags to wait for and counters to raise; knows nothing of ranks
that copy, of streams or of process groups. One kernel for both layers of a mixture of experts: in
the first one the rows of A are tokens that arrive shard by shard, in the second one they are
results of the first, and counters tell a reader which parts of C are done.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.routing import BLOCKS_M, SortedRows
from kernels.shard_gemm import programs_at_once
from kernels.steady_launch import launch
from kernels.symmetric import wait_until

UNIT_COLS = 16
"""Columns of a unit of counting: a divisor of every BLOCK_N, so that tiles of any width count
alike, and units stay below 2^31.
"""


@dataclass(frozen=True, slots=True)
class Shards:
    """Rows of A that arrive: shard r is complete once flags[r] - epoch >= 0."""

    own: torch.Tensor
    """[tokens / W, K]: read where the caller has it, with no copy and no wait."""
    flags: torch.Tensor
    """int32 [W]"""
    epoch: int
    rank: int


def set_block_shapes(nargs: dict[str, Any]) -> None:
    """Give the tensor descriptor of a launch the block of its config (a `Config.pre_hook`)."""
    nargs["b"].block_shape = [nargs["BLOCK_N"], nargs["BLOCK_K"]]


def make_config(
    block_m: int,
    block_n: int,
    block_k: int,
    group_m: int,
    *,
    warps: int,
    stages: int,
    per_sm: int = 1,
) -> triton.Config:
    """A launch config of `grouped_gemm_kernel`.

    `group_m` tiles of rows run together, so that they share tiles of B. Of `per_sm` programs on an
    SM, one loads the numbers of its rows or stores a tile while another multiplies.
    """
    blocks = {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "GROUP_M": group_m,
        "PER_SM": per_sm,
    }
    return triton.Config(blocks, num_warps=warps, num_stages=stages, pre_hook=set_block_shapes)


def gpu_configs() -> list[triton.Config]:
    """Tiles for few and for many rows of an expert; with few, B is read for little work, and small
    tiles pad less.
    """
    tiles = (
        (128, 256, 64, 8, 3, 1),
        (128, 256, 64, 8, 4, 1),
        (128, 128, 64, 4, 4, 1),
        (128, 128, 64, 4, 3, 2),
        (128, 128, 64, 8, 3, 2),
        (64, 256, 64, 4, 4, 1),
        (64, 128, 64, 4, 4, 2),
        (64, 128, 128, 4, 3, 1),
        (32, 128, 128, 4, 4, 1),
        (32, 128, 64, 4, 4, 2),
        (16, 128, 128, 4, 4, 1),
        (16, 128, 64, 4, 4, 2),
    )
    return [
        make_config(bm, bn, bk, group_m, warps=warps, stages=stages, per_sm=per_sm)
        for (bm, bn, bk, warps, stages, per_sm), group_m in itertools.product(tiles, (1, 4, 16))
    ]


def interpreter_configs() -> list[triton.Config]:
    """A few block shapes: the interpreter ignores warps and stages, and each program costs
    milliseconds.
    """
    blocks = [(64, 64, 64, 1), (64, 64, 64, 4), (32, 64, 64, 2)]
    return [make_config(*block, warps=4, stages=2) for block in blocks]


def check_configs() -> list[triton.Config]:
    """Configs of three shapes, the first of which stands for an untuned product."""
    if triton.knobs.runtime.interpret:
        return interpreter_configs()
    return [
        make_config(*block, warps=4, stages=3)
        for block in ((128, 128, 64, 4), (64, 256, 64, 1), (16, 128, 128, 16))
    ]


@triton.autotune(
    configs=interpreter_configs() if triton.knobs.runtime.interpret else gpu_configs(),
    key=["n_rows", "N", "K", "n_experts", "TOP_K"],
)
@triton.jit(do_not_specialize=["rank", "epoch", "most_tiles"])
def grouped_gemm_kernel(
    # [n_rows / TOP_K, K]; where `a_own` is given, the rows of shard r are valid once flags[r] has
    # reached epoch
    a,
    a_own,  # rows of a that this rank has, or None: a is complete
    b,  # descriptor of [n_experts * N, K]
    c,  # [n_rows, N]
    rows,
    tiles,
    n_tiles,
    flags,
    # Int32 [parts]: units of UNIT_COLS columns of a row of C that are stored, by the row's part; or
    # None
    done,
    most_tiles,
    n_rows,
    N,
    K,
    n_experts,
    tokens_per_shard,
    rank,
    epoch,
    TOP_K: tl.constexpr,
    WORLD: tl.constexpr,
    SMALLEST: tl.constexpr,
    UNIT_COLS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PER_SM: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Persistent grouped GEMM: a program runs every n-th tile, in the order of the list of tiles of
    BLOCK_M rows.
    """
    # The list for BLOCK_M: heights double from SMALLEST.
    HEIGHT: tl.constexpr = (
        (BLOCK_M >= 2 * SMALLEST) + (BLOCK_M >= 4 * SMALLEST) + (BLOCK_M >= 8 * SMALLEST)
    )
    m_tiles, n_tiles_across = tl.load(n_tiles + HEIGHT), tl.cdiv(N, BLOCK_N)
    own_first = tokens_per_shard * rank
    ks = tl.arange(0, BLOCK_K)
    if a_own is not None:
        # Elements from where a row would be in `a` to where its owner has it.
        to_own = (a_own.to(tl.int64) - a.to(tl.int64)) // (
            a.dtype.element_ty.primitive_bitwidth // 8
        ) - own_first.to(tl.int64) * K
    for tile in tl.range(tl.program_id(0), m_tiles * n_tiles_across, tl.num_programs(0)):
        group = tile // (GROUP_M * n_tiles_across)
        group_rows = tl.minimum(m_tiles - group * GROUP_M, GROUP_M)
        within = tile % (GROUP_M * n_tiles_across)
        entry = tiles + (HEIGHT * most_tiles + group * GROUP_M + within % group_rows) * 4
        col = within // group_rows * BLOCK_N
        expert, first, first_part, last_part = (
            tl.load(entry),
            tl.load(entry + 1),
            tl.load(entry + 2),
            tl.load(entry + 3),
        )

        row = tl.load(rows + first + tl.arange(0, BLOCK_M))
        is_row = row < n_rows
        token = tl.where(is_row, row, 0) // TOP_K
        if a_own is None:
            at = a + token.to(tl.int64)[:, None] * K + ks[None, :]
        else:
            # Part p is shard rank - p, and part 0 is the own one.
            for part in range(tl.maximum(first_part, 1), last_part + 1):
                source = (rank + WORLD - part) % WORLD
                token += wait_until(flags + source, epoch)
            is_own = (token >= own_first) & (token < own_first + tokens_per_shard)
            # Rows start at multiples of 16 bytes. Without the hint a compiler may load them element
            # by element.
            first_of_row = tl.multiple_of(token.to(tl.int64) * K + tl.where(is_own, to_own, 0), 8)
            at = a + first_of_row[:, None] + ks[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(tl.cdiv(K, BLOCK_K)):
            a_block = tl.load(at + k * BLOCK_K, mask=(ks < K - k * BLOCK_K)[None, :], other=0.0)
            b_block = b.load([expert * N + col, k * BLOCK_K])
            if INTERPRETED:  # it multiplies the bits of bfloat16 as integers
                a_block, b_block = a_block.to(tl.float32), b_block.to(tl.float32)
            acc = tl.dot(a_block, b_block.T, acc)

        cols = col + tl.arange(0, BLOCK_N)
        # Loaded rows of other experts and columns behind N are not stored.
        tl.store(
            c + row.to(tl.int64)[:, None] * N + cols[None, :],
            acc.to(c.dtype.element_ty),
            mask=is_row[:, None] & (cols < N)[None, :],
        )
        if done is not None:
            # The release below is one thread's, and orders the other threads' stores through this
            # barrier
            tl.debug_barrier()
            # Units, not tiles: then the count means the same with every config.
            n_stored = tl.sum(is_row.to(tl.int32), 0) * tl.cdiv(
                tl.minimum(N - col, BLOCK_N), UNIT_COLS
            )
            tl.atomic_add(done + last_part, n_stored, sem="release", scope="gpu")


def multiply_rows(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    by_expert: SortedRows,
    *,
    shards: Shards | None = None,
    done: torch.Tensor | None = None,
    n_free_sms: int = 0,
    config: triton.Config | None = None,
) -> None:
    """Queue C = A @ B.T, row by row with the weights of its expert, on the current stream.

    `a` is [tokens, K], `b` [E, N, K], `c` [tokens * top_k, N], contiguous; the rows of `a` and `b`
    start at multiples of 16 bytes. With `shards`, the parts that rows were sorted with are the
    shards from this rank's downwards. With `done` (int32 [parts], zero), the parts have tiles of
    their own, and it counts the units stored of each. `n_free_sms` are left to other kernels.
    `config` is used as it is; None leaves the choice to the tuner.
    """
    (n_rows, n), (n_experts, _, k), top_k = c.shape, b.shape, len(c) // len(a)
    operand_b = TensorDescriptor(b, [n_experts * n, k], [k, 1], [1, 1])
    own, flags, epoch, rank = (
        (shards.own, shards.flags, shards.epoch, shards.rank) if shards else (None, None, 0, 0)
    )
    most_tiles = by_expert.tiles.shape[1]
    operands = (
        a,
        own,
        operand_b,
        c,
        by_expert.rows,
        by_expert.tiles,
        by_expert.n_tiles,
        flags,
        done,
    )
    sizes = (most_tiles, n_rows, n, k, n_experts, 0 if own is None else len(own))
    args = (*operands, *sizes, rank, epoch)
    is_interpreted = triton.knobs.runtime.interpret

    def grid(meta: dict[str, Any]) -> tuple[int]:
        n_programs = programs_at_once()
        if not is_interpreted:
            n_programs = (n_programs - n_free_sms) * meta["PER_SM"]
        return (max(min(n_programs, most_tiles * -(-n // meta["BLOCK_N"])), 1),)

    fixed = {
        "TOP_K": top_k,
        "WORLD": 1 if flags is None else len(flags),
        "SMALLEST": BLOCKS_M[0],
        "UNIT_COLS": UNIT_COLS,
        "INTERPRETED": is_interpreted,
    }
    if config is None:
        grouped_gemm_kernel[grid](*args, **fixed)
        return
    fixed |= config.all_kwargs()
    set_block_shapes({"b": operand_b, **fixed})
    key = (sizes, a.dtype, own is None, done is None, *fixed.items())
    launch(grouped_gemm_kernel.fn, grid(fixed), args, fixed, key=key)
