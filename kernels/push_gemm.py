# mypy: disable-error-code="no-untyped-def"
# Triton reads a kernel's annotations as argument types, so the arguments of @triton.jit functions
# carry none.
"""A row-parallel product whose tiles go to the ranks that sum them: the Triton kernel and its
launch configs.

Knows tiles, tables of addresses and flags; knows nothing of process groups, of streams or of who
holds which memory: partials.py makes the tables. Parts and flags are those of sum_parts.py, the
order of memory that of symmetric.py.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kernels.shard_gemm import device_properties, tile_block
from kernels.sum_parts import count_for, count_rows, store_to, wait_rows
from kernels.symmetric import pointer_at, signal, wait_until

MOST_REGISTERS = 255
"""Of a thread; a compiler that is not told fewer may take them all."""
LEAST_GROUP_ROWS, MOST_GROUP_ROWS = tl.constexpr(512), tl.constexpr(1024)
"""Rows whose tiles run together, so that they share tiles of B: half of a part, within these
limits. The first half is copied to a peer
while the second one is computed, and is there when the peer adds it to its own first half.
"""
RESERVED_BYTES = 1024
"""Shared memory that each program takes besides its own.

An SM has that much more than one program may have.
"""


def set_block_shapes(nargs: dict[str, Any]) -> None:
    """Give the tensor descriptors of a launch the blocks of its config (a `Config.pre_hook`).

    Raises:
        ValueError: an SM has no room for all programs that the config asks for, or it asks for
            none.
    """
    if nargs["PER_SM"] < 1:
        raise ValueError(
            "PER_SM, the programs of push_gemm_kernel on each SM, must be 1 or more, got"
            f" {nargs['PER_SM']}"
        )
    if nargs["PER_SM"] > 1:
        reason = no_room(nargs, nargs["num_stages"], nargs["num_warps"])
        if reason:
            raise ValueError(f"{reason}. Give the config fewer stages or warps, or PER_SM=1")
    nargs["a"].block_shape = [nargs["BLOCK_M"], nargs["BLOCK_K"]]
    nargs["b"].block_shape = [nargs["BLOCK_N"], nargs["BLOCK_K"]]


def make_config(
    block_m: int,
    block_n: int,
    block_k: int,
    *,
    warps: int,
    stages: int,
    split: bool = False,
    per_sm: int = 1,
    stagger: bool = False,
) -> triton.Config:
    """A launch config of `push_gemm_kernel`.

    Of `per_sm` programs on an SM, one sends a tile while another multiplies; with `stagger` from
    the first tile on.
    """
    choices = {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "SPLIT_STORE": split,
        "PER_SM": per_sm,
        "STAGGER": stagger,
    }
    return triton.Config(choices, num_warps=warps, num_stages=stages, pre_hook=set_block_shapes)


def gpu_configs() -> list[triton.Config]:
    """The blocks that serve the AllGather-GEMM on Hopper, narrow ones for few rows, where reading B
    is the limit, and pairs of programs.

    No loop is flattened: Triton 3.6 fails to compile that where a branch follows the product.
    """
    wide = (
        (128, 256, 8, 3),
        (128, 256, 8, 4),
        (256, 128, 8, 3),
        (256, 128, 8, 4),
        (128, 128, 4, 4),
        (128, 128, 8, 4),
        (128, 128, 4, 5),
    )
    narrow = (
        (64, 256, 64, 4, 4),
        (64, 128, 64, 4, 5),
        (64, 128, 128, 4, 4),
        (64, 64, 128, 4, 4),
        (64, 64, 64, 4, 6),
    )
    flat = ((16, 64, 128, 4, 5), (16, 64, 256, 4, 4), (16, 128, 128, 4, 5), (16, 128, 256, 8, 3))
    configs = [
        make_config(bm, bn, 64, warps=warps, stages=stages, split=split)
        for bm, bn, warps, stages in wide
        for split in (False, True)
    ]
    pairs = ((128, 128, 64, 3), (64, 256, 64, 2), (64, 256, 32, 5), (64, 128, 64, 4))
    configs += [
        make_config(bm, bn, bk, warps=4, stages=stages, per_sm=2, stagger=stagger)
        for bm, bn, bk, stages in pairs
        for stagger in (False, True)
    ]
    return configs + [
        make_config(bm, bn, bk, warps=warps, stages=stages)
        for bm, bn, bk, warps, stages in narrow + flat
    ]


def interpreter_configs() -> list[triton.Config]:
    """A few block shapes: the interpreter ignores warps and stages, and each program costs
    milliseconds.
    """
    return [
        make_config(64, 64, 64, warps=4, stages=2),
        make_config(32, 64, 64, warps=4, stages=2),
        make_config(64, 64, 32, warps=4, stages=2, split=True, per_sm=2, stagger=True),
    ]


def shared_bytes(block: dict[str, Any], n_stages: int) -> int:
    """Shared memory of a program, at most: its stages with a barrier of 8 bytes each, or, where
    they were, a tile on its way out.

    A tile changes its layout there, and takes half of its bytes as float32.
    """
    stages = (block["BLOCK_M"] + block["BLOCK_N"]) * block["BLOCK_K"] * n_stages * 2
    return int(max(stages, block["BLOCK_M"] * block["BLOCK_N"] * 2) + 8 * n_stages)


def no_room(block: dict[str, Any], n_stages: int, n_warps: int) -> str:
    """Why the programs of a config are not all on the GPU at once; empty if they are, as far as
    that is foreseen.

    One that is not keeps those waiting that need its tiles. One program may have all registers of
    an SM; of several, each gets its part, as a compiler may take `MOST_REGISTERS` for each thread.
    """
    if triton.knobs.runtime.interpret:
        return ""
    per_sm, n_bytes, properties = (
        block["PER_SM"],
        shared_bytes(block, n_stages),
        device_properties(),
    )
    most_bytes = (properties["max_shared_mem"] + RESERVED_BYTES) // per_sm - RESERVED_BYTES
    most_warps = properties["max_num_regs"] // (MOST_REGISTERS * properties["warpSize"]) // per_sm
    if n_bytes <= most_bytes and (per_sm == 1 or n_warps <= most_warps):
        return ""
    return (
        f"{per_sm} programs of push_gemm_kernel need room on an SM at once: got {n_bytes} bytes of"
        f" shared memory and {n_warps} warps each for at most {most_bytes} and {most_warps}"
    )


def drop_hopeless(
    configs: list[triton.Config], nargs: dict[str, Any], **meta: Any
) -> list[triton.Config]:
    """Drop the configs that need more of an SM than there is for their programs, and tiles of which
    few rows are needed.
    """
    if triton.knobs.runtime.interpret:
        return configs
    most_rows = 2 * max(nargs["part_rows"], 16)
    flat = [each for each in configs if each.kwargs["BLOCK_M"] < most_rows]
    # Where none fits, the compiler's own error, or that of the config's hook, says more than an
    # empty list.
    return [
        each for each in flat if not no_room(each.kwargs, each.num_stages, each.num_warps)
    ] or configs[:1]


def refuse_repeats(kernel_call: Any, quantiles: Any = None) -> Any:
    """Raise a RuntimeError in place of `triton.autotune`'s own measurement, which launches a kernel
    many times in one step.
    """
    raise RuntimeError(
        "push_gemm_kernel counts what it sends in its peers' flags, so it runs once a step and"
        " cannot be timed by repeating it: tune the step with contextual_autotune or autotune of"
        " dist_tune, or pass a launch config"
    )


@triton.jit
def start_cycles(program, n_programs, block_elements, K, PER_SM: tl.constexpr):
    """Cycles by which a program starts later than the first one of its SM: those that the tensor
    cores take for a tile of each before it.

    Tensor cores of a Hopper SM do 4096 operations of 16-bit operands a cycle. Programs that start
    together finish their tiles together, on all SMs: then the tensor cores wait for NVLink, and
    later it for them. Plain arithmetic: `start_cycles.fn` answers in Python, too.
    """
    return program * PER_SM // n_programs * (2 * block_elements // 4096) * K


@triton.jit
def _wait_cycles(cycles):
    """Sleep until the clock of the SM has gone on by this."""
    start = tl.inline_asm_elementwise(
        "mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
    now = start
    while now - start < cycles:
        now = tl.inline_asm_elementwise(
            "nanosleep.u32 200; mov.u64 $0, %clock64;",
            "=l",
            [],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _trade_credits(credits, own_credits, rank, epoch, WORLD: tl.constexpr):
    """Say to all peers that the step before is over here, and wait until the one before that is
    over there: its slot is free now.
    """
    for i in range(1, WORLD):
        if tl.program_id(0) == 0:
            signal(pointer_at(credits, (rank + i) % WORLD, tl.int32) + rank, 1)
    for i in range(1, WORLD):
        # The peer has started step epoch - 1. Stores need no 0 added to their addresses: none is
        # moved up over an acquire.
        wait_until(own_credits + (rank + i) % WORLD, epoch - 1)


@triton.jit
def _finish(
    acc,
    row,
    col,
    end_row,
    N,
    part,
    c,
    targets,
    arrivals,
    sources,
    own_arrivals,
    n_flags,
    finals,
    final_arrivals,
    rank,
    count,
    INSIDE: tl.constexpr,
    SPREAD: tl.constexpr,
    WORLD: tl.constexpr,
    FLAG_ROWS: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    """Send a block to where it is summed; or, of the own part where the product sums, add what the
    peers have sent and store the result.
    """
    BLOCK_M: tl.constexpr = acc.shape[0]
    n_columns = tl.minimum(N - col, acc.shape[1])
    if not INSIDE:
        store_to(acc, row, col, end_row, N, part, targets, rank, SPREAD, WORLD, ELEMENT)
        count_for(row, end_row, n_columns, part, arrivals, rank, BLOCK_M, SPREAD, WORLD, FLAG_ROWS)
    elif part != rank:
        store_to(acc, row, col, end_row, N, part, targets, rank, SPREAD, WORLD, ELEMENT)
        count_for(row, end_row, n_columns, part, arrivals, rank, BLOCK_M, SPREAD, WORLD, FLAG_ROWS)
    else:
        rows, cols = row + tl.arange(0, BLOCK_M), col + tl.arange(0, acc.shape[1])
        at = rows.to(tl.int64)[:, None] * N + cols[None, :]
        mask = (rows < end_row)[:, None] & (cols < N)[None, :]
        for i in tl.static_range(1, WORLD):
            # In the order in which they send: rank - 1 sends this part first.
            source = (rank + WORLD - i) % WORLD
            zero = wait_rows(
                own_arrivals + source * n_flags, row, end_row, N, count, BLOCK_M, FLAG_ROWS
            )
            # Not through L1, which may hold the line of two steps ago.
            acc += tl.load(
                pointer_at(sources, source, ELEMENT) + (at + zero),
                mask=mask,
                other=0.0,
                cache_modifier=".cg",
            ).to(tl.float32)
        if finals is None:
            tl.store(c + at, acc.to(c.dtype.element_ty), mask=mask)
        else:
            store_to(acc, row, col, end_row, N, part, finals, rank, 1, WORLD, c.dtype.element_ty)
            count_for(
                row, end_row, n_columns, part, final_arrivals, rank, BLOCK_M, 1, WORLD, FLAG_ROWS
            )
        # The own flag counts in this step, too, so that it means the same in each step.
        count_rows(own_arrivals + rank * n_flags, row, end_row, n_columns, BLOCK_M, FLAG_ROWS)


@triton.autotune(
    configs=interpreter_configs() if triton.knobs.runtime.interpret else gpu_configs(),
    key=["M", "N", "K", "PARTS", "INSIDE", "SPREAD", "ELEMENT", "move"],
    prune_configs_by={"early_config_prune": drop_hopeless},
    do_bench=refuse_repeats,
)
@triton.jit(do_not_specialize=["rank", "count", "move"])
def push_gemm_kernel(
    a,  # descriptor of [M, K], this rank's columns of A
    b,  # descriptor of [N, K], this rank's columns of B
    c,  # [part_rows, N], the own part of the result; written where INSIDE and not `finals`
    targets,  # int64 [WORLD]: where the tiles of a part, or those for a rank, are stored
    arrivals,  # int64 [WORLD]: the flags that count them there
    sources,  # int64 [WORLD]: the own part by the rank that computed it
    own_arrivals,  # int32 [WORLD, n_flags]
    credits,  # int64 [WORLD]: credits that a rank has got
    own_credits,  # int32 [WORLD]
    finals,  # int64 [WORLD] or None: where each rank gathers the own part of the result
    final_arrivals,  # int64 [WORLD] or None: the flags that count it there
    M,
    N,
    K,
    part_rows,
    n_flags,
    rank,
    count,  # the number of this step, modulo 2^32
    # How tiles travel, a number: for the key alone, as the best config differs and the code does
    # not
    move,
    PARTS: tl.constexpr,
    WORLD: tl.constexpr,
    INSIDE: tl.constexpr,
    SPREAD: tl.constexpr,
    ELEMENT: tl.constexpr,
    FLAG_ROWS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_STORE: tl.constexpr,
    PER_SM: tl.constexpr,
    STAGGER: tl.constexpr,
):
    """Persistent GEMM: a program runs every n-th tile, part by part, its own last, and sends each
    tile as soon as it is computed.

    Where INSIDE, tiles of the own part come last and wait for the peers' tiles. Each program has
    sent all its tiles before it waits, and all programs are on the GPU at once, so ranks cannot
    wait for each other in a circle: the grid has PER_SM programs for each SM, and a config with
    more than one is launched only if an SM has shared memory and registers for them, as many as the
    compiler may take.
    """
    m_tiles, n_tiles = tl.cdiv(part_rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tiles_per_part = m_tiles * n_tiles
    program, n_programs = tl.program_id(0), tl.num_programs(0)
    group_m = tl.maximum(tl.minimum(part_rows // 2, MOST_GROUP_ROWS), LEAST_GROUP_ROWS) // BLOCK_M
    _trade_credits(credits, own_credits, rank, count, WORLD)
    if STAGGER and not INTERPRETED:  # no inline assembly there
        if tiles_per_part * PARTS > n_programs:
            _wait_cycles(start_cycles(program, n_programs, BLOCK_M * BLOCK_N, K, PER_SM))
    for tile in range(program, tiles_per_part * PARTS, n_programs):
        block_row, block_col = tile_block(tile % tiles_per_part, m_tiles, n_tiles, group_m)
        part = (rank + 1 + tile // tiles_per_part) % PARTS
        a_row = part * part_rows + block_row * BLOCK_M
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(tl.cdiv(K, BLOCK_K)):
            a_block = a.load([a_row, k * BLOCK_K])
            b_block = b.load([block_col * BLOCK_N, k * BLOCK_K])
            if INTERPRETED:  # it multiplies the bits of bfloat16 as integers
                a_block, b_block = a_block.to(tl.float32), b_block.to(tl.float32)
            acc = tl.dot(a_block, b_block.T, acc)
        row, col = block_row * BLOCK_M, block_col * BLOCK_N
        end_row = tl.minimum(M - part * part_rows, part_rows)
        if SPLIT_STORE:
            # Two halves: fewer registers hold what the peers have sent, and the way out takes half
            # the shared memory.
            left, right = tl.split(
                tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
            )
            _finish(
                left,
                row,
                col,
                end_row,
                N,
                part,
                c,
                targets,
                arrivals,
                sources,
                own_arrivals,
                n_flags,
                finals,
                final_arrivals,
                rank,
                count,
                INSIDE,
                SPREAD,
                WORLD,
                FLAG_ROWS,
                ELEMENT,
            )
            _finish(
                right,
                row,
                col + BLOCK_N // 2,
                end_row,
                N,
                part,
                c,
                targets,
                arrivals,
                sources,
                own_arrivals,
                n_flags,
                finals,
                final_arrivals,
                rank,
                count,
                INSIDE,
                SPREAD,
                WORLD,
                FLAG_ROWS,
                ELEMENT,
            )
        else:
            _finish(
                acc,
                row,
                col,
                end_row,
                N,
                part,
                c,
                targets,
                arrivals,
                sources,
                own_arrivals,
                n_flags,
                finals,
                final_arrivals,
                rank,
                count,
                INSIDE,
                SPREAD,
                WORLD,
                FLAG_ROWS,
                ELEMENT,
            )
