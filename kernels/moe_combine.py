# mypy: disable-error-code="no-untyped-def"
# Triton reads a kernel's annotations as argument types, so the arguments of @triton.jit functions
# carry none.
"""The weighted sum over a token's experts, pushed to the token's owner, and the owner's sum over
ranks: two Triton kernels.

Knows tokens, shards, quarters and flags; knows nothing of products, streams or process groups.

A shard is the m = M / W tokens of one owner, and moves in quarters: quarter q is its tokens q * m
// 4 to (q + 1) * m // 4. Flags count units, a unit being up to `UNIT_COLS` columns of a row, and
there is a flag for each (sender, quarter) with every config: a rank that sends two quarters at once
raises both flags, and a receiver waits for as many units as a quarter has. So nothing goes wrong
where ranks run different configs, as they may while they are tuned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.grouped_gemm import UNIT_COLS
from kernels.shard_gemm import programs_at_once
from kernels.steady_launch import launch
from kernels.symmetric import element_type, pointer_at, signal, wait_until

N_QUARTERS = 4
"""Pieces of a shard that have a flag of their own."""


N_PROGRAMS_INTERPRETED = 2
MOST_REGISTERS = 128
"""Of a thread, at most; Triton 3.6 takes 80 to 128.

So two programs of 16 warps, of either kernel, do not share an SM, nor does one with a
large tile of the product: a push that starts first keeps the product off as many SMs as the product
leaves free, smaller ones off more.
"""
# What covers the latency of NVLink and memory is what is under way: 32 elements of each thread.
BLOCK_ROWS, BLOCK_COLS, N_WARPS = (16, 64, 4) if triton.knobs.runtime.interpret else (16, 1024, 16)
"""What a program sums at a time."""


@dataclass(frozen=True, slots=True)
class Partials:
    """What of a step is where, for both kernels."""

    results: torch.Tensor
    """[M * top_k, N]: this rank's part of the result of each (token, choice) pair."""
    weights: torch.Tensor
    """float32 [M, top_k]"""
    slots: torch.Tensor
    """int64 [W]: on each rank, where [W, M / W, N] received sums start, by sender."""
    flags: torch.Tensor
    """int64 [W]: on each rank, where int32 [W, N_QUARTERS] flags start, by sender."""
    rank: int
    epoch: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Tokens of a shard, and columns."""
        return len(self.weights) // len(self.slots), self.results.shape[1]


@triton.jit
def _combine(results, weights, tokens, is_token, cols, is_col, N, TOP_K: tl.constexpr):
    """The weighted sum over the experts of some tokens, in float32."""
    mask = is_token[:, None] & is_col[None, :]
    total = tl.zeros((tokens.shape[0], cols.shape[0]), dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        row = tokens * TOP_K + choice
        weight = tl.load(weights + row, mask=is_token, other=0.0)
        at = results + row.to(tl.int64)[:, None] * N + cols[None, :]
        # Past the first-level cache: another SM has just written it, and it is read once.
        total += weight[:, None] * tl.load(at, mask=mask, other=0.0, cache_modifier=".cg").to(
            tl.float32
        )
    return total


@triton.jit(do_not_specialize=["rank"])
def push_kernel(
    results,
    weights,
    # Int32: units of `results` that are stored, by part: CHUNKS parts for each peer, from rank + 1
    # upwards
    done,
    slots,
    flags,
    shard_tokens,
    N,
    rank,
    TOP_K: tl.constexpr,
    WORLD: tl.constexpr,
    CHUNKS: tl.constexpr,
    N_QUARTERS: tl.constexpr,
    UNIT_COLS: tl.constexpr,
    ELEMENT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Sums for the peers, each stored where its owner reads it; rank + 1 is served first, rank - 1
    last.
    """
    program, n_programs = tl.program_id(0), tl.num_programs(0)
    n_col_blocks, n_units = (N + BLOCK_COLS - 1) // BLOCK_COLS, (N + UNIT_COLS - 1) // UNIT_COLS
    for step in range(1, WORLD):
        peer = (rank + step) % WORLD
        slot = pointer_at(slots, peer, ELEMENT) + (rank * shard_tokens).to(tl.int64) * N
        flag = pointer_at(flags, peer, tl.int32) + rank * N_QUARTERS
        for quarter in range(N_QUARTERS):
            first, end = (
                quarter * shard_tokens // N_QUARTERS,
                (quarter + 1) * shard_tokens // N_QUARTERS,
            )
            chunk = quarter * CHUNKS // N_QUARTERS
            chunk_first = chunk * (N_QUARTERS // CHUNKS) * shard_tokens // N_QUARTERS
            chunk_end = (chunk + 1) * (N_QUARTERS // CHUNKS) * shard_tokens // N_QUARTERS
            zero = wait_until(
                done + (step - 1) * CHUNKS + chunk, (chunk_end - chunk_first) * TOP_K * n_units
            )
            n_pushed = 0
            for block in range(
                program, (end - first + BLOCK_ROWS - 1) // BLOCK_ROWS * n_col_blocks, n_programs
            ):
                row, col = (
                    first + block // n_col_blocks * BLOCK_ROWS,
                    block % n_col_blocks * BLOCK_COLS,
                )
                rows, cols = row + tl.arange(0, BLOCK_ROWS), col + tl.arange(0, BLOCK_COLS)
                is_token, is_col = rows < end, cols < N
                total = _combine(
                    results,
                    weights,
                    peer * shard_tokens + rows + zero,
                    is_token,
                    cols,
                    is_col,
                    N,
                    TOP_K,
                )
                to = slot + rows.to(tl.int64)[:, None] * N + cols[None, :]
                tl.store(to, total.to(ELEMENT), mask=is_token[:, None] & is_col[None, :])
                n_pushed += tl.minimum(end - row, BLOCK_ROWS) * (
                    (tl.minimum(N - col, BLOCK_COLS) + UNIT_COLS - 1) // UNIT_COLS
                )
            if n_pushed > 0:
                signal(flag + quarter, n_pushed)


@triton.jit(do_not_specialize=["rank", "epoch"])
def reduce_kernel(
    results,
    weights,
    slots,
    flags,
    out,  # [M / W, N]
    shard_tokens,
    N,
    rank,
    epoch,
    TOP_K: tl.constexpr,
    WORLD: tl.constexpr,
    N_QUARTERS: tl.constexpr,
    UNIT_COLS: tl.constexpr,
    ELEMENT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """The own sum plus those of the peers, in float32, rank - 1's first; rounded once, when it is
    stored.
    """
    program, n_programs = tl.program_id(0), tl.num_programs(0)
    n_col_blocks, n_units = (N + BLOCK_COLS - 1) // BLOCK_COLS, (N + UNIT_COLS - 1) // UNIT_COLS
    slot, flag = pointer_at(slots, rank, ELEMENT), pointer_at(flags, rank, tl.int32)
    for quarter in range(N_QUARTERS):
        first, end = (
            quarter * shard_tokens // N_QUARTERS,
            (quarter + 1) * shard_tokens // N_QUARTERS,
        )
        zero = 0
        for step in range(1, WORLD):
            source = (rank + WORLD - step) % WORLD
            # Counts of all steps so far, wrapped around as the flag is.
            zero += wait_until(
                flag + source * N_QUARTERS + quarter, epoch * ((end - first) * n_units)
            )
        for block in range(
            program, (end - first + BLOCK_ROWS - 1) // BLOCK_ROWS * n_col_blocks, n_programs
        ):
            rows = first + block // n_col_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
            cols = block % n_col_blocks * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
            is_token, is_col = rows < end, cols < N
            mask = is_token[:, None] & is_col[None, :]
            total = _combine(
                results, weights, rank * shard_tokens + rows, is_token, cols, is_col, N, TOP_K
            )
            for step in range(1, WORLD):
                source = (rank + WORLD - step) % WORLD
                at = (
                    slot
                    + (source * shard_tokens + rows + zero).to(tl.int64)[:, None] * N
                    + cols[None, :]
                )
                total += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
            tl.store(
                out + rows.to(tl.int64)[:, None] * N + cols[None, :], total.to(ELEMENT), mask=mask
            )


def push(partials: Partials, done: torch.Tensor, n_chunks: int, n_sms: int) -> None:
    """Queue the sums for the peers on the current stream: each chunk once `done` says that its
    results are stored, on `n_sms` SMs.
    """
    of, (tokens, n) = partials, partials.sizes
    n_programs = N_PROGRAMS_INTERPRETED if triton.knobs.runtime.interpret else n_sms
    operands = (of.results, of.weights, done, of.slots, of.flags)
    fixed = {"CHUNKS": n_chunks, **_fixed(partials)}
    launch(
        push_kernel,
        (n_programs,),
        (*operands, tokens, n, of.rank),
        fixed,
        key=(tokens, n, *fixed.values()),
    )


def reduce(partials: Partials, out: torch.Tensor, n_push_sms: int) -> None:
    """Queue the sum of this rank's tokens on the current stream, behind the products of the same
    stream.

    `n_push_sms` SMs are left free: the push, which peers wait for, finds room also if this kernel,
    which waits for peers, comes first.
    """
    of, (tokens, n) = partials, partials.sizes
    n_programs = N_PROGRAMS_INTERPRETED
    if not triton.knobs.runtime.interpret:
        n_programs = programs_at_once() - n_push_sms
    operands = (of.results, of.weights, of.slots, of.flags, out)
    fixed = _fixed(partials)
    launch(
        reduce_kernel,
        (n_programs,),
        (*operands, tokens, n, of.rank, of.epoch),
        fixed,
        key=(tokens, n, *fixed.values()),
    )


def _fixed(partials: Partials) -> dict[str, object]:
    return {
        "TOP_K": partials.weights.shape[1],
        "WORLD": len(partials.slots),
        "N_QUARTERS": N_QUARTERS,
        "UNIT_COLS": UNIT_COLS,
        "ELEMENT": element_type(partials.results.dtype),
        "BLOCK_ROWS": BLOCK_ROWS,
        "BLOCK_COLS": BLOCK_COLS,
        "num_warps": N_WARPS,
        "maxnreg": MOST_REGISTERS,
    }
