# mypy: disable-error-code="no-untyped-def"
# Triton reads a kernel's annotations as argument types, so the arguments of @triton.jit functions
# carry none.
"""Partial results that come from all ranks, counted by flags and summed: Triton functions, and the
kernel that sums.

Knows tables of addresses and flags; knows nothing of products, of process groups or of who holds
which memory. partials.py makes the tables, which alone say whether a block is stored into a peer's
memory or kept for a peer that pulls it.

A result of [M, N] consists of parts of `part_rows` rows: one for each rank that sums, or one that
all ranks sum. A flag counts the *elements* of FLAG_ROWS rows of a part that have come from one
source: after step e it is e x rows x N modulo 2^32 for all tiles, chunks and ways to travel. So a
rank may run another product config than its peers, and all of them another one in the next step;
only pull and push (or copy) use memory differently, and are to be the same on all ranks in a step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.symmetric import pointer_at, signal, wait_until

FLAG_ROWS = 16 if triton.knobs.runtime.interpret else 64
"""Rows that share a flag; under the interpreter few, so that small shapes have several flags."""
SUM_BLOCK = (8, 512)
"""Rows and columns that a program of `sum_kernel` sums at once: 1024 bytes of a row, 16 elements of
a source for each thread.
"""
TO_OWNER, TO_ALL, FOR_ALL = 0, 1, 2
"""Where a tile goes: to the rank that sums its part; to all ranks; into memory that all ranks pull
from.
"""


@triton.jit
def count_rows(flags, row, end_row, n_columns, ROWS: tl.constexpr, FLAG_ROWS: tl.constexpr):
    """Count `n_columns` elements of each of ROWS rows from `row` on, and of none from `end_row` on,
    in the flags of their rows.

    ROWS and FLAG_ROWS are powers of two, and `row` is a multiple of ROWS.
    """
    for i in tl.static_range((ROWS + FLAG_ROWS - 1) // FLAG_ROWS):
        flag = row // FLAG_ROWS + i
        end = tl.minimum(tl.minimum(row + ROWS, end_row), (flag + 1) * FLAG_ROWS)
        n_rows = end - tl.maximum(row, flag * FLAG_ROWS)
        if (n_rows > 0) & (n_columns > 0):
            signal(flags + flag, n_rows * n_columns)


@triton.jit
def wait_rows(flags, row, end_row, N, count, ROWS: tl.constexpr, FLAG_ROWS: tl.constexpr):
    """Spin until all N elements of each of these rows have come `count` times; return an
    unforeseeable 0, as `wait_until` does.
    """
    zero = 0
    for i in tl.static_range((ROWS + FLAG_ROWS - 1) // FLAG_ROWS):
        flag = row // FLAG_ROWS + i
        n_rows = tl.minimum(end_row - flag * FLAG_ROWS, FLAG_ROWS)
        # A flag of no rows stays 0, which after 2^31 elements of another one counts as behind.
        if n_rows > 0:
            # Modulo 2^32.
            zero += wait_until(flags + flag, (n_rows.to(tl.int64) * N * count).to(tl.int32))
    return zero


@triton.jit
def store_to(
    acc,
    row,
    col,
    end_row,
    N,
    part,
    targets,
    rank,
    SPREAD: tl.constexpr,
    WORLD: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    """Store a block of a part where the tables say: for its owner, for each rank, or once for all
    of them.
    """
    rows, cols = row + tl.arange(0, acc.shape[0]), col + tl.arange(0, acc.shape[1])
    at = rows.to(tl.int64)[:, None] * N + cols[None, :]
    mask = (rows < end_row)[:, None] & (cols < N)[None, :]
    block = acc.to(ELEMENT)
    if SPREAD == 0:
        tl.store(pointer_at(targets, part, ELEMENT) + at, block, mask=mask)
    elif SPREAD == 2:
        tl.store(pointer_at(targets, rank, ELEMENT) + at, block, mask=mask)
    else:
        for i in tl.static_range(1, WORLD + 1):
            tl.store(pointer_at(targets, (rank + i) % WORLD, ELEMENT) + at, block, mask=mask)


@triton.jit
def count_for(
    row,
    end_row,
    n_columns,
    part,
    arrivals,
    rank,
    ROWS: tl.constexpr,
    SPREAD: tl.constexpr,
    WORLD: tl.constexpr,
    FLAG_ROWS: tl.constexpr,
):
    """Count what `store_to` has stored, where its reader waits; behind all of the stores, because a
    release waits for those before it.
    """
    if SPREAD == 0:
        count_rows(pointer_at(arrivals, part, tl.int32), row, end_row, n_columns, ROWS, FLAG_ROWS)
    else:
        for i in tl.static_range(1, WORLD + 1):
            count_rows(
                pointer_at(arrivals, (rank + i) % WORLD, tl.int32),
                row,
                end_row,
                n_columns,
                ROWS,
                FLAG_ROWS,
            )


@triton.jit(do_not_specialize=["rank", "count"])
def sum_kernel(
    c,  # [M, N]: the result; its dtype is that of what `finals` gather
    sources,  # int64 [PARTS * SOURCES]: each part by source
    arrivals,  # int32 [PARTS * SOURCES, n_flags]
    finals,  # int64 [WORLD] or None: where each rank gathers the own part of the result
    final_arrivals,  # int64 [WORLD] or None: the flags that count it there
    M,
    N,
    part_rows,
    n_flags,
    rank,
    count,
    PARTS: tl.constexpr,
    SOURCES: tl.constexpr,
    WORLD: tl.constexpr,
    ELEMENT: tl.constexpr,
    FLAG_ROWS: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum each part over its sources in float32, chunk by chunk as they come; store the sum in `c`,
    or into the memory of all ranks.
    """
    chunks, strips = tl.cdiv(part_rows, CHUNK_ROWS), tl.cdiv(N, COLUMNS)
    for item in range(tl.program_id(0), PARTS * chunks * strips, tl.num_programs(0)):
        part = (rank + item // (chunks * strips)) % PARTS
        first, col = item // strips % chunks * CHUNK_ROWS, item % strips * COLUMNS
        end_row = tl.minimum(M - part * part_rows, part_rows)
        end = tl.minimum(first + CHUNK_ROWS, end_row)
        zero = 0
        for source in tl.static_range(SOURCES):
            zero += wait_rows(
                arrivals + (part * SOURCES + source) * n_flags,
                first,
                end_row,
                N,
                count,
                CHUNK_ROWS,
                FLAG_ROWS,
            )
        cols = col + tl.arange(0, COLUMNS)
        for row in tl.range(first, end, ROWS):
            rows = row + tl.arange(0, ROWS)
            at = rows.to(tl.int64)[:, None] * N + cols[None, :]
            mask = (rows < end)[:, None] & (cols < N)[None, :]
            acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            for source in tl.static_range(SOURCES):
                pointer = pointer_at(sources, part * SOURCES + source, ELEMENT)
                acc += tl.load(
                    pointer + (at + zero), mask=mask, other=0.0, cache_modifier=".cg"
                ).to(tl.float32)
            if finals is None:
                tl.store(
                    c + part.to(tl.int64) * part_rows * N + at,
                    acc.to(c.dtype.element_ty),
                    mask=mask,
                )
            else:
                store_to(acc, row, col, end, N, part, finals, rank, 1, WORLD, c.dtype.element_ty)
        if finals is not None:
            n_columns = tl.minimum(N - col, COLUMNS)
            count_for(
                first,
                end_row,
                n_columns,
                part,
                final_arrivals,
                rank,
                CHUNK_ROWS,
                1,
                WORLD,
                FLAG_ROWS,
            )
