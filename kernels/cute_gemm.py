"""Persistent GEMM C = A @ B.T for Hopper in CuTe DSL: TMA, mbarriers, wgmma, warpgroups of their
own for loads and for products.

The device code is in kernels/cute_kernel.py, its compilation in kernels/cute_build.py; here are the
search space, what of it is not worth compiling, and the function that is tuned. Two caches, two
keys, as in kernels/persistent_gemm.py: kernels by type and config, results of tuning by sizes, each
rounded up to a power of two, and type.

Needs the extra `cute` (nvidia-cutlass-dsl, apache-tvm-ffi), a C compiler and a Hopper GPU. Without
them the program says what is missing and ends with exit code 77, that of a skip.

    python kernels/cute_gemm.py --case check
    python kernels/cute_gemm.py --case tune --shape 4096,4096,4096 --dtype fp16
    python kernels/cute_gemm.py --case perf --shape 4096,4096,4096 --shape 8192,8192,8192
"""

from __future__ import annotations

import functools
import itertools
import runpy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# First: kernels are loaded once, under the module name that their records carry.
if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("program.py")))

import torch
import triton

from dist_tune import autotune, matches, power_of_two
from kernels.cute_build import kernel_key, kernels
from kernels.operands import check_operands, loadable
from kernels.persistent_gemm import config_key, padded_output

SHARED_BYTES = 232448
"""Shared memory of a block on Hopper: 227 KiB."""
BARRIER_BYTES = 1024
"""What the mbarriers take, with the padding to the first tile."""
MAX_SUMS = 192
"""Float32 sums of a thread: of its 232 registers the others hold addresses and what is being
stored.
"""
WGMMA_ROWS = 64
N_CONSUMERS = 2
"""Warpgroups that multiply.

Cooperative ones halve a tile's rows; ping-pong ones take tiles in turn.
"""
NUM_WARPS = 12
"""Three warpgroups: a loading one, and those that multiply."""
TILES_M, TILES_N, TILES_K = (128, 64, 256), (256, 128, 192), (64, 128)
"""Of each axis the first value is that of the config of an untuned call."""
CLUSTERS = ((2, 1), (1, 1), (1, 2))
"""Blocks along M and N that load for each other.

No more than two: multiprocessors come in pairs, so that pairs leave none idle.
"""
STAGES = (4, 3, 5, 6)
STORES = ((64, 2), (32, 4))
"""Columns that a warpgroup stores at once, and its buffers for them."""


@functools.cache
def all_configs() -> tuple[triton.Config, ...]:
    """Every combination, in one order, after the config of an untuned call."""
    return tuple(
        triton.Config(
            {
                "TILE_M": m,
                "TILE_N": n,
                "TILE_K": k,
                "CLUSTER_M": cluster[0],
                "CLUSTER_N": cluster[1],
                "PING_PONG": is_ping_pong,
                "STORE_N": store[0],
                "STORE_BUFFERS": store[1],
            },
            num_warps=NUM_WARPS,
            num_stages=stages,
        )
        for m, n, k, cluster, is_ping_pong, store, stages in itertools.product(
            TILES_M, TILES_N, TILES_K, CLUSTERS, (False, True), STORES, STAGES
        )
    )


def shared_bytes(config: triton.Config, n_stages: int | None = None) -> int:
    """Shared memory of a block: mbarriers, stages of A and B, buffers of C; with another number of
    stages, if given.
    """
    block = config.kwargs
    stage = (block["TILE_M"] + block["TILE_N"]) * block["TILE_K"]
    buffers = N_CONSUMERS * block["STORE_BUFFERS"] * WGMMA_ROWS * block["STORE_N"]
    return int(BARRIER_BYTES + 2 * (stage * (n_stages or config.num_stages) + buffers))


def reason_to_drop(config: triton.Config, shape: tuple[int, ...]) -> str:
    """Why a config is not worth compiling for a product of `shape` [M, N, K]; empty if it is.

    Equal for all sizes of a bucket.
    """
    block = config.kwargs
    rows = block["TILE_M"] if block["PING_PONG"] else block["TILE_M"] // N_CONSUMERS
    if rows % WGMMA_ROWS:
        return f"gives a warpgroup {rows} rows, a wgmma has {WGMMA_ROWS}"
    sums = rows * block["TILE_N"] // 128
    if sums > MAX_SUMS:
        return f"needs {sums} sums a thread, more than {MAX_SUMS}"
    needed = shared_bytes(config)
    if needed > SHARED_BYTES:
        return f"needs {needed} bytes of shared memory, there are {SHARED_BYTES}"
    if (
        config.num_stages + 2 <= max(STAGES)
        and shared_bytes(config, config.num_stages + 2) <= SHARED_BYTES
    ):
        return f"has {config.num_stages} stages where {config.num_stages + 2} fit"
    pieces = rows // WGMMA_ROWS * (block["TILE_N"] // block["STORE_N"])
    if pieces % block["STORE_BUFFERS"]:
        return f"stores {pieces} pieces, which {block['STORE_BUFFERS']} buffers do not take in turn"
    for axis, size, tiles in zip("MNK", shape, (TILES_M, TILES_N, TILES_K), strict=True):
        # The bucket's limit, not the size: the same configs for all that share a result.
        if block[f"TILE_{axis}"] > max(min(tiles), power_of_two(size)):
            return f"TILE_{axis}={block[f'TILE_{axis}']} is mostly padding for {axis}={size}"
    for axis, size in zip("MN", shape, strict=False):
        if block[f"CLUSTER_{axis}"] > 1 and power_of_two(size) <= block[f"TILE_{axis}"]:
            return f"CLUSTER_{axis}=2 has one tile for two blocks at {axis}={size}"
    return ""


def search_space(m: int, n: int, k: int) -> list[triton.Config]:
    """The configs worth trying for a product of [M, K] and [N, K]; the same for all sizes of a
    bucket.
    """
    return [config for config in all_configs() if not reason_to_drop(config, (m, n, k))]


def fits(config: Any, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a config is in the search space of the product."""
    return not reason_to_drop(config["config"], (a.shape[0], b.shape[0], a.shape[1]))


def compile_ahead(configs: Iterable[triton.Config], dtype: torch.dtype) -> int:
    """Compile the kernels of configs in processes, where they are not on disk; without it a tuning
    does so at its second launch.
    """
    return kernels.build(kernel_key(dtype, config) for config in configs)


def by_torch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product by cuBLAS."""
    return a @ b.T


@autotune(
    all_configs(),
    key_fn=config_key,
    prune_fn=fits,
    check=matches(by_torch),
    bucket=power_of_two,
    n_warmup=3,
    n_repeat=5,
    search="racing",
)
def cute_gemm(a: torch.Tensor, b: torch.Tensor, config: triton.Config) -> torch.Tensor:
    """C [M, N] of A [M, K] and B [N, K], summed in float32; `config` comes from the tuner.

    Rows of C begin at multiples of 16 bytes: where N is no multiple of 8, C is a view of a wider
    matrix. Where K is none, both operands are copied.

    Raises:
        ValueError: operands that do not go together.
        CuteBuildError: the config does not compile.
    """
    check_operands(a, b)
    bucket = tuple(map(power_of_two, (len(a), len(b), a.shape[1])))
    a, b = loadable(a.detach()), loadable(b.detach())
    c = padded_output(a, b)
    n_clusters = torch.cuda.get_device_properties(a.device).multi_processor_count // (
        config.kwargs["CLUSTER_M"] * config.kwargs["CLUSTER_N"]
    )
    key, dtype = kernel_key(a.dtype, config), a.dtype
    kernels.get(
        key, (dtype, bucket), lambda: [kernel_key(dtype, each) for each in search_space(*bucket)]
    )(a, b, c, n_clusters)
    return c
