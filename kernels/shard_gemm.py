# mypy: disable-error-code="no-untyped-def"
# Triton reads a kernel's annotations as argument types, so the arguments of @triton.jit functions
# carry none.
"""C = A @ B.T where A is made of shards that arrive one by one: the Triton kernel and its launch
configs.

Knows tiles, flags and tensor descriptors; knows nothing of ranks that copy, of streams or of
process groups. Tiles are laid out shard by shard, so none straddles two shards, and each waits for
one flag at most.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.operands import TMA_ALIGNMENT_BYTES
from kernels.symmetric import fence_bulk_loads, wait_until


def set_block_shapes(nargs: dict[str, Any]) -> None:
    """Give the tensor descriptors of a launch the blocks of its config (a `Config.pre_hook`)."""
    block_m, block_n, block_k = nargs["BLOCK_M"], nargs["BLOCK_N"], nargs["BLOCK_K"]
    nargs["a_own"].block_shape = [block_m, block_k]
    nargs["a_gathered"].block_shape = [block_m, block_k]
    nargs["b"].block_shape = [block_n, block_k]
    if nargs["c_tiles"] is not None:
        nargs["c_tiles"].block_shape = [
            1,
            block_m,
            block_n // 2 if nargs["SPLIT_STORE"] else block_n,
        ]


def make_config(
    block_m: int,
    block_n: int,
    block_k: int,
    *,
    warps: int,
    stages: int,
    flatten: bool = False,
    split: bool = False,
) -> triton.Config:
    """A launch config of `ag_gemm_kernel`."""
    choices = {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "FLATTEN": flatten,
        "SPLIT_STORE": split,
    }
    return triton.Config(choices, num_warps=warps, num_stages=stages, pre_hook=set_block_shapes)


def gpu_configs() -> list[triton.Config]:
    """What was ever near the best on a Hopper GPU: 128 x 256 tiles for long runs, smaller ones
    where they fill the last wave.
    """
    plain, split = [False], [True]
    return [
        make_config(bm, bn, 64, warps=warps, stages=stages, flatten=flatten, split=is_split)
        for bm, bn, warps, stages, splits in (
            (128, 256, 8, 3, plain + split),
            (128, 256, 8, 4, split),
            (256, 128, 8, 4, split),
            (128, 128, 4, 5, plain + split),
            (128, 128, 4, 6, plain + split),
            (64, 256, 4, 4, plain),
            (64, 128, 4, 6, plain),
            (128, 64, 4, 6, plain),
            (64, 64, 4, 6, plain),
        )
        for flatten in (False, True)
        for is_split in splits
    ]


def interpreter_configs() -> list[triton.Config]:
    """A few block shapes: the interpreter ignores warps and stages, and each program costs
    milliseconds.
    """
    blocks = [
        (128, 128, 128),
        (128, 128, 64),
        (128, 64, 128),
        (64, 128, 128),
        (64, 64, 128),
        (64, 64, 64),
    ]
    return [
        *(make_config(*block, warps=4, stages=2) for block in blocks),
        make_config(128, 128, 128, warps=4, stages=2, split=True),
        make_config(64, 64, 64, warps=4, stages=2, flatten=True, split=True),
    ]


def device_properties() -> dict[str, int]:
    """What Triton's driver knows of the current GPU."""
    driver = triton.runtime.driver.active
    return _properties_of(driver.get_current_device())


def programs_at_once() -> int:
    """Programs of a launch with one on each multiprocessor; under the interpreter so few that one
    meets several tiles.
    """
    if triton.knobs.runtime.interpret:
        return 3
    return device_properties()["multiprocessor_count"]


@functools.cache
def _properties_of(device: int) -> dict[str, int]:
    return dict(triton.runtime.driver.active.utils.get_device_properties(device))


def require_free_sms(name: str, n_sms: int) -> None:
    """Raise a ValueError if a kernel beside a product, which waits for it, has no multiprocessor,
    or leaves the product none.
    """
    n_all = 0 if triton.knobs.runtime.interpret else device_properties()["multiprocessor_count"]
    if n_all and not 0 < n_sms < n_all:
        raise ValueError(
            f"{name}, the SMs of a kernel beside the product, must be 1 to {n_all - 1} on this GPU"
            f" of {n_all} SMs, got {n_sms}"
        )


@triton.jit
def tile_block(tile, m_tiles, n_tiles, group_m):
    """Block row and column of a tile of a shard: columns of `group_m` tiles, so that programs that
    run together share B.

    Plain arithmetic: `tile_block.fn` answers in Python, too.
    """
    group = tile // (group_m * n_tiles)
    group_rows = min(m_tiles - group * group_m, group_m)
    within = tile % (group_m * n_tiles)
    return group * group_m + within % group_rows, within // group_rows


@triton.jit
def _store_tile(acc, c_tiles, c, shard, row, col, M_shard, N, SPLIT_STORE: tl.constexpr):
    """Write one tile of C; what lies outside the shard's rows or C's columns is not written."""
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    if c_tiles is None:
        # No 16-byte row pitch, no descriptor.
        rows = row + tl.arange(0, BLOCK_M)
        cols = col + tl.arange(0, BLOCK_N)
        at = c + (shard * M_shard + rows).to(tl.int64)[:, None] * N + cols[None, :]
        tl.store(
            at, acc.to(c.dtype.element_ty), mask=(rows < M_shard)[:, None] & (cols < N)[None, :]
        )
    elif SPLIT_STORE:
        # Two halves: the staging buffer in shared memory is half as large, which can buy a pipeline
        # stage.
        halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        left = left.to(c.dtype.element_ty).reshape(1, BLOCK_M, BLOCK_N // 2)
        c_tiles.store([shard, row, col], left)
        right = right.to(c.dtype.element_ty).reshape(1, BLOCK_M, BLOCK_N // 2)
        c_tiles.store([shard, row, col + BLOCK_N // 2], right)
    else:
        c_tiles.store([shard, row, col], acc.to(c.dtype.element_ty).reshape(1, BLOCK_M, BLOCK_N))


@triton.autotune(
    configs=interpreter_configs() if triton.knobs.runtime.interpret else gpu_configs(),
    key=["M", "N", "K"],
)
@triton.jit(do_not_specialize=["rank", "epoch"])
def ag_gemm_kernel(
    a_own,  # descriptor of this rank's shard [M / WORLD, K]
    # Descriptor of the gathered [M, K]; rows of shard r are valid once flags[r] has reached epoch
    a_gathered,
    b,  # descriptor of [N, K]
    c_tiles,  # descriptor of C as [WORLD, M / WORLD, N], or None: store through the pointer
    c,  # [M, N]
    flags,  # int32 [WORLD]
    M,
    N,
    K,
    rank,
    epoch,
    WORLD: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FLATTEN: tl.constexpr,
    SPLIT_STORE: tl.constexpr,
):
    """Persistent GEMM: a program runs every n-th tile, first those of its own shard, then shard by
    shard as they arrive.

    Shards come in the order in which `gather.py` sends them: rank, rank - 1, rank - 2, ... (modulo
    WORLD).
    """
    M_shard = M // WORLD
    m_tiles = tl.cdiv(M_shard, BLOCK_M)
    n_tiles = tl.cdiv(N, BLOCK_N)
    tiles_per_shard = m_tiles * n_tiles
    program, n_programs = tl.program_id(0), tl.num_programs(0)
    # 2048 rows of A and about as many of B are read at a time: least traffic, and both stay in L2.
    GROUP_M: tl.constexpr = 2048 // BLOCK_M

    # Tiles of the own shard come first; they are read where the caller has it, with no copy and no
    # wait.
    stored = program - n_programs
    for tile in tl.range(program, tiles_per_shard * WORLD, n_programs, flatten=FLATTEN):
        block_row, block_col = tile_block(tile % tiles_per_shard, m_tiles, n_tiles, GROUP_M)
        a_row = block_row * BLOCK_M
        a = a_own
        if tile >= tiles_per_shard:
            source = (rank + WORLD - tile // tiles_per_shard) % WORLD
            # The tiles are loaded by the bulk copy unit.
            a_row += source * M_shard + fence_bulk_loads(
                wait_until(flags + source, epoch), INTERPRETED
            )
            a = a_gathered
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(tl.cdiv(K, BLOCK_K)):
            a_block = a.load([a_row, k * BLOCK_K])
            b_block = b.load([block_col * BLOCK_N, k * BLOCK_K])
            if INTERPRETED:  # it multiplies the bits of bfloat16 as integers
                a_block, b_block = a_block.to(tl.float32), b_block.to(tl.float32)
            acc = tl.dot(a_block, b_block.T, acc)
        # Counted anew rather than taken from `tile`: a flattened loop would carry the value through
        # every stage.
        stored += n_programs
        block_row, block_col = tile_block(stored % tiles_per_shard, m_tiles, n_tiles, GROUP_M)
        shard = (rank + WORLD - stored // tiles_per_shard) % WORLD
        _store_tile(
            acc,
            c_tiles,
            c,
            shard,
            block_row * BLOCK_M,
            block_col * BLOCK_N,
            M_shard,
            N,
            SPLIT_STORE,
        )


def multiply_shards(
    a_own: torch.Tensor,
    a_gathered: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    flags: torch.Tensor,
    epoch: int,
    rank: int,
    config: triton.Config | None = None,
) -> None:
    """Queue C = A @ B.T on the current stream, each shard of A read once its flag has reached
    `epoch`.

    `a_own` [M / W, K] is this rank's shard, `a_gathered` [M, K] holds the others, `b` is [N, K],
    `c` [M, N], all contiguous; the rows of `a_own` and `b` start at multiples of 16 bytes. `config`
    is used as it is; None leaves the choice to the tuner.
    """
    (m, n), k, n_ranks = c.shape, b.shape[1], len(flags)
    c_tiles = None
    if n * c.element_size() % TMA_ALIGNMENT_BYTES == 0 and c.data_ptr() % TMA_ALIGNMENT_BYTES == 0:
        c_tiles = TensorDescriptor(
            c, [n_ranks, m // n_ranks, n], [m // n_ranks * n, n, 1], [1, 1, 1]
        )
    operands = [TensorDescriptor(x, list(x.shape), [k, 1], [1, 1]) for x in (a_own, a_gathered, b)]
    args = (*operands, c_tiles, c, flags, m, n, k, rank, epoch)

    def grid(meta: dict[str, Any]) -> tuple[int]:
        tiles_per_shard = triton.cdiv(m // n_ranks, meta["BLOCK_M"]) * triton.cdiv(
            n, meta["BLOCK_N"]
        )
        return (min(programs_at_once(), tiles_per_shard * n_ranks),)

    fixed = {"WORLD": n_ranks, "INTERPRETED": triton.knobs.runtime.interpret}
    if config is None:
        ag_gemm_kernel[grid](*args, **fixed)
        return
    set_block_shapes({**dict(zip(ag_gemm_kernel.arg_names, args, strict=False)), **config.kwargs})
    ag_gemm_kernel.fn[grid](*args, **fixed, **config.all_kwargs())
