"""Persistent GEMM C = A @ B.T, one compiled kernel for all sizes, one tuned config for all sizes of
a bucket.

As many programs as the GPU has multiprocessors, each running every n-th tile. Two caches, two keys:

- compiled kernels, by *kernel key*: dtype and config. Sizes are runtime arguments that nothing is
  compiled for. The cache is Triton's own;
- results of tuning, by *config key*: M, N and K, each rounded up to a power of two, and the dtype.

Tuned by `autotune`, since what is tuned here is a function that takes its config: `triton.autotune`
knows neither buckets nor a space that depends on the sizes.

    python kernels/persistent_gemm.py --case check
    python kernels/persistent_gemm.py --case perf --shape 4096,4096,4096 --dtype fp16
"""

from __future__ import annotations

import itertools
import runpy
from collections.abc import Hashable
from pathlib import Path
from typing import Any

# First: kernels are loaded once, under the module name that their records carry.
if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("program.py")))

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dist_tune import autotune, power_of_two
from kernels.operands import TMA_ALIGNMENT_BYTES, check_operands, loadable
from kernels.shard_gemm import device_properties, programs_at_once, tile_block

HOPPER_SHARED_BYTES = 232448
"""Shared memory of a program where there is no GPU to ask."""
MAX_ACCUMULATORS = 128
"""Float32 sums of a thread: of its 255 registers the others hold addresses and what is being
loaded.
"""
INTERPRETER_BLOCKS = ((64, 32), (64, 32), (64, 32))
GPU_BLOCKS = ((128, 64, 256), (128, 64, 256), (64, 32, 128))
"""BLOCK_M, BLOCK_N, BLOCK_K, those of an untuned call first: powers of two, for others do not
compile.
"""


def all_configs() -> list[triton.Config]:
    """Every combination, in one order; the first one is what an untuned call gets."""
    is_interpreted = triton.knobs.runtime.interpret
    blocks, warps, stages = (
        (INTERPRETER_BLOCKS, (4,), (2,)) if is_interpreted else (GPU_BLOCKS, (4, 8), (3, 4))
    )
    return [
        triton.Config(
            {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP": 8},
            num_warps=n_warps,
            num_stages=n_stages,
        )
        for m, n, k, n_warps, n_stages in itertools.product(*blocks, warps, stages)
    ]


def reason_to_drop(config: triton.Config, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Why a config is not worth compiling for a product of `shape` [M, N, K]; empty if it is.

    Equal for all sizes of a bucket.
    """
    block = config.kwargs
    block_m, block_n, block_k = block["BLOCK_M"], block["BLOCK_N"], block["BLOCK_K"]
    shared_bytes = (
        HOPPER_SHARED_BYTES
        if triton.knobs.runtime.interpret
        else device_properties()["max_shared_mem"]
    )
    # Each pipeline stage holds a tile of A and one of B; a tile of C is stored from beside them.
    needed = (
        (block_m + block_n) * block_k * config.num_stages + block_m * block_n
    ) * dtype.itemsize
    if needed > shared_bytes:
        return f"needs {needed} bytes of shared memory, there are {shared_bytes}"
    accumulators = block_m * block_n // (32 * config.num_warps)
    if accumulators > MAX_ACCUMULATORS:
        return f"needs {accumulators} accumulators a thread, more than {MAX_ACCUMULATORS}"
    smallest = INTERPRETER_BLOCKS if triton.knobs.runtime.interpret else GPU_BLOCKS
    for axis, size, blocks in zip("MNK", shape, smallest, strict=True):
        # The bucket's limit, not the size: the same configs for all that share a result.
        if block[f"BLOCK_{axis}"] > max(min(blocks), power_of_two(size)):
            return f"BLOCK_{axis}={block[f'BLOCK_{axis}']} is mostly padding for {axis}={size}"
    return ""


def search_space(m: int, n: int, k: int, dtype: torch.dtype) -> list[triton.Config]:
    """The configs worth trying for a product of [M, K] and [N, K]; the same for all sizes of a
    bucket.
    """
    return [config for config in all_configs() if not reason_to_drop(config, (m, n, k), dtype)]


# Without do_not_specialize Triton compiles once more for sizes that are 1 and for those that are
# multiples of 16. Descriptors promise the alignment that loads need, so nothing is lost.
@triton.jit(do_not_specialize=["M", "N", "K"])
def persistent_gemm_kernel(
    a,  # descriptor of [M, K]
    b,  # descriptor of [N, K]
    c,  # descriptor of [M, N]
    M,
    N,
    K,
    INTERPRETED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Every n-th tile of C, n being the number of programs.

    Descriptors read zeros outside, and do not write there.
    """
    m_tiles, n_tiles = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0)):
        row, col = tile_block(tile, m_tiles, n_tiles, GROUP)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(tl.cdiv(K, BLOCK_K)):
            a_block = a.load([row * BLOCK_M, k * BLOCK_K])
            b_block = b.load([col * BLOCK_N, k * BLOCK_K])
            if INTERPRETED:  # it multiplies the bits of bfloat16 as integers
                a_block, b_block = a_block.to(tl.float32), b_block.to(tl.float32)
            total = tl.dot(a_block, b_block.T, total)
        c.store([row * BLOCK_M, col * BLOCK_N], total.to(c.dtype))


def config_key(a: torch.Tensor, b: torch.Tensor) -> Hashable:
    """M, N, K and dtype, by which results are kept; `bucket=power_of_two` rounds the sizes up.

    Raises:
        ValueError: operands that do not go together; here, since in a tuning it would read as a
            fault of the configs.
    """
    check_operands(a, b)
    return a.shape[0], b.shape[0], a.shape[1], a.dtype


def fits(config: Any, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a config is in the search space of the product."""
    return not reason_to_drop(config["config"], (a.shape[0], b.shape[0], a.shape[1]), a.dtype)


@autotune(
    all_configs(), key_fn=config_key, prune_fn=fits, bucket=power_of_two, n_warmup=3, n_repeat=5
)
def persistent_gemm(a: torch.Tensor, b: torch.Tensor, config: triton.Config) -> torch.Tensor:
    """C [M, N] of A [M, K] and B [N, K], summed in float32; `config` comes from the tuner.

    Rows of C begin at multiples of 16 bytes: where N is no multiple of 8, C is a view of a wider
    matrix. Where K is none, both operands are copied.

    Raises:
        ValueError: operands that do not go together.
    """
    check_operands(a, b)
    m, n = a.shape[0], b.shape[0]
    a, b = loadable(a), loadable(b)
    c = padded_output(a, b)
    block_m, block_n, block_k = (config.kwargs[f"BLOCK_{axis}"] for axis in "MNK")
    blocks = ((a, [block_m, block_k]), (b, [block_n, block_k]), (c, [block_m, block_n]))
    args = (
        *(TensorDescriptor(x, list(x.shape), list(x.stride()), block) for x, block in blocks),
        m,
        n,
        a.shape[1],
    )
    n_tiles = triton.cdiv(m, block_m) * triton.cdiv(n, block_n)
    kernel: Any = persistent_gemm_kernel
    kernel[(min(programs_at_once(), n_tiles),)](
        *args, INTERPRETED=triton.knobs.runtime.interpret, **config.all_kwargs()
    )
    return c


def padded_output(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """C [M, N], not filled, whose rows begin at multiples of 16 bytes."""
    n = b.shape[0]
    return a.new_empty(a.shape[0], n + -n % (TMA_ALIGNMENT_BYTES // a.element_size()))[:, :n]
