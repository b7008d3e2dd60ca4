"""FP8 GEMM with block scales: y[M, N] = (x * x_scale) @ (w * w_scale).T, its launch configs, its
reference and its check.

x [M, K] has a scale for each (1, 128) block, w [N, K] for each (128, 128) block. Knows one GPU;
knows nothing of ranks, nor of how configs are tuned: it reads what a tuner left in JSON files. What
its command line does is in cases.py. Without a GPU it runs under the Triton interpreter.

    python kernels/gemm_a8w8_blockscale.py --case check
    python kernels/gemm_a8w8_blockscale.py --case perf --shape 256,4096,1024 2048,4096,1024
"""

from __future__ import annotations

import functools
import os
import runpy
from pathlib import Path
from typing import Any

# First: kernels are loaded once, under the module name that their records carry.
if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("program.py")))

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

Config = dict[str, Any]
BLOCK = 128  # depth of a block of x, depth and width of a block of w, that share one scale
CONFIG_KEYS = (
    "BLOCK_SIZE_M",
    "BLOCK_SIZE_N",
    "BLOCK_SIZE_K",
    "GROUP_SIZE_M",
    "NUM_KSPLIT",
    "cache_modifier",
    "num_warps",
    "num_stages",
)
# For AMD's compiler; a config can have them anywhere.
AMD_KEYS = ("waves_per_eu", "kpack", "matrix_instr_nonkdim")
# Whether tiles come by TMA; a config without it, as other tuners write them, says no.
USE_TMA = "USE_TMA"
TMA_ALIGNMENT_BYTES = 16
IS_HIP = torch.version.hip is not None


def make_config(
    block_m: int,
    block_n: int,
    *,
    warps: int,
    stages: int,
    group: int = 8,
    splits: int = 1,
    cache: str = "",
    tma: bool = False,
) -> Config:
    """A launch config; `splits` programs share the K of one tile."""
    values = (block_m, block_n, BLOCK, group, splits, cache, warps, stages, 2, 2, 16, tma)
    return dict(zip((*CONFIG_KEYS, *AMD_KEYS, USE_TMA), values, strict=True))


# A tile and the product to add to it would not fit in the registers of 4 warps.
DEFAULT_CONFIG = make_config(128, 128, warps=8, stages=3)


# Not specialised on the values of these: one compiled kernel serves all row counts, depths of a
# split and scale layouts.
@triton.jit(
    do_not_specialize=[
        "M",
        "blocks_per_split",
        "stride_xsm",
        "stride_xsk",
        "stride_wsn",
        "stride_wsk",
    ]
)
def gemm_a8w8_blockscale_kernel(
    # Fp8 [M, K] and [N, K], rows contiguous; with USE_TMA their descriptors, in tiles of 128
    # columns
    x,
    w,
    x_scale,
    w_scale,  # float32 [M, cdiv(K, 128)] and [cdiv(N, 128), cdiv(K, 128)]
    out,  # [splits, M, N]: y itself, or contiguous float32 partial sums
    M,
    N,
    K,
    blocks_per_split,  # of K, 128 deep each; the last splits may have fewer, or none
    stride_xm,
    stride_wn,
    stride_xsm,
    stride_xsk,
    stride_wsn,
    stride_wsk,
    stride_om,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    cache_modifier: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """One tile of one split: the fp8 product of each 128-deep block, scaled, is added up in
    float32.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    # Groups of GROUP_SIZE_M tile rows, column by column, so that programs that run together share x
    # and w in L2.
    m_tiles, n_tiles = tl.cdiv(M, BLOCK_SIZE_M), tl.cdiv(N, BLOCK_SIZE_N)
    group = tile // (GROUP_SIZE_M * n_tiles)
    group_rows = tl.minimum(m_tiles - group * GROUP_SIZE_M, GROUP_SIZE_M)
    within = tile % (GROUP_SIZE_M * n_tiles)
    row_block, col_block = group * GROUP_SIZE_M + within % group_rows, within // group_rows
    rows = row_block * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    cols = col_block * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    # Past the edge the last row is read again and never stored: loads in the loop need no mask.
    x_rows, w_rows = tl.minimum(rows, M - 1).to(tl.int64), tl.minimum(cols, N - 1).to(tl.int64)
    first = split * blocks_per_split
    # Below `first` in an empty split.
    last = tl.minimum(first + blocks_per_split, tl.cdiv(K, BLOCK_SIZE_K))
    depths = first * BLOCK_SIZE_K + tl.arange(0, BLOCK_SIZE_K)
    if not USE_TMA:
        x_at = x + x_rows[:, None] * stride_xm + depths[None, :]
        w_at = w + w_rows[None, :] * stride_wn + depths[:, None]
    x_scale_at = x_scale + x_rows * stride_xsm + first * stride_xsk
    is_in_one_block: tl.constexpr = 128 % BLOCK_SIZE_N == 0  # of w: then its scale is a scalar
    w_blocks = col_block * BLOCK_SIZE_N // 128 if is_in_one_block else w_rows // 128
    w_scale_at = w_scale + w_blocks * stride_wsn + first * stride_wsk
    acc = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for block in range(first, last):
        if USE_TMA:  # fills what lies outside with zeros
            x_tile = x.load([row_block * BLOCK_SIZE_M, block * BLOCK_SIZE_K])
            w_tile = w.load([col_block * BLOCK_SIZE_N, block * BLOCK_SIZE_K]).T
        elif EVEN_K:
            x_tile = tl.load(x_at, cache_modifier=cache_modifier)
            w_tile = tl.load(w_at, cache_modifier=cache_modifier)
        else:
            inside = tl.arange(0, BLOCK_SIZE_K) < K - block * BLOCK_SIZE_K
            x_tile = tl.load(x_at, mask=inside[None, :], other=0.0, cache_modifier=cache_modifier)
            w_tile = tl.load(w_at, mask=inside[:, None], other=0.0, cache_modifier=cache_modifier)
        row_scale, col_scale = tl.load(x_scale_at), tl.load(w_scale_at)
        scale = (
            (row_scale * col_scale)[:, None]
            if is_in_one_block
            else row_scale[:, None] * col_scale[None, :]
        )
        acc += tl.dot(x_tile, w_tile) * scale
        if not USE_TMA:
            x_at, w_at = x_at + BLOCK_SIZE_K, w_at + BLOCK_SIZE_K
        x_scale_at, w_scale_at = x_scale_at + stride_xsk, w_scale_at + stride_wsk
    at = out + (split.to(tl.int64) * M + rows)[:, None] * stride_om + cols[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :])


@triton.jit(do_not_specialize=["M"])
def sum_partials_kernel(
    partials,
    y,
    M,
    N,
    stride_ym,
    NUM_KSPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Y [M, N] = the sum of the partials, contiguous float32 [NUM_KSPLIT, M, N], always in the same
    order.
    """
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    cols = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    inside = (rows < M) & (cols < N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for split in tl.static_range(NUM_KSPLIT):
        total += tl.load(partials + (split * M + rows) * N + cols, mask=inside, other=0.0)
    tl.store(y + rows * stride_ym + cols, total.to(y.dtype.element_ty), mask=inside)


def gemm_a8w8_blockscale(
    x: Tensor,
    w: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    y: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """Queue y [M, N] = (x * x_scale) @ (w * w_scale).T on the current stream, on the current
    device; returns y.

    x is float8_e4m3fn [M, K], w float8_e4m3fn [N, K], y bfloat16 or float16 as `dtype` says, a new
    tensor if not given: all three with contiguous rows. x_scale is float32 [M, ceil(K / 128)],
    w_scale float32 [ceil(N / 128), ceil(K / 128)], with any strides. `config` is as `make_config`
    makes them; None takes that of `get_config`. One with USE_TMA is used without where TMA cannot
    be.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes, strides or devices do not fit, or the config has a value that the kernel
            cannot have.
    """
    check_operands(x, w, x_scale, w_scale, dtype)
    m, n, k = len(x), len(w), x.shape[1]
    if y is None:
        y = torch.empty((m, n), dtype=dtype, device=x.device)
    elif y.dtype != dtype:
        raise TypeError(f"need y in {dtype}, as dtype= says; got {y.dtype}")
    elif y.shape != (m, n) or (n > 1 and y.stride(1) != 1) or y.device != x.device:
        raise ValueError(
            f"need y as [{m}, {n}] with contiguous rows on {x.device}; got {list(y.shape)},"
            f" {y.stride()}, {y.device}"
        )
    config = get_config(m, n, k) if config is None else config
    check_config(config)
    n_splits = config["NUM_KSPLIT"]
    out = (
        y if n_splits == 1 else torch.empty((n_splits, m, n), dtype=torch.float32, device=x.device)
    )
    grid = (
        triton.cdiv(m, config["BLOCK_SIZE_M"]) * triton.cdiv(n, config["BLOCK_SIZE_N"]),
        n_splits,
    )
    sizes = (m, n, k, triton.cdiv(triton.cdiv(k, BLOCK), n_splits))
    strides = (x.stride(0), w.stride(0), *x_scale.stride(), *w_scale.stride(), out.stride(-2))
    options = {
        key: value
        for key, value in config.items()
        if key != "NUM_KSPLIT" and (IS_HIP or key not in AMD_KEYS)
    }
    options[USE_TMA] = config.get(USE_TMA, False) and has_tma(x) and has_tma(w)
    x_tiles, w_tiles = x, w
    if options[USE_TMA]:
        x_tiles, w_tiles = (
            TensorDescriptor.from_tensor(t, [config[f"BLOCK_SIZE_{d}"], BLOCK])
            for t, d in ((x, "M"), (w, "N"))
        )
    gemm_a8w8_blockscale_kernel[grid](
        x_tiles, w_tiles, x_scale, w_scale, out, *sizes, *strides, EVEN_K=k % BLOCK == 0, **options
    )
    if n_splits > 1:
        sum_partials_kernel[triton.cdiv(m, 8), triton.cdiv(n, 256)](
            out, y, m, n, y.stride(0), NUM_KSPLIT=n_splits, BLOCK_M=8, BLOCK_N=256
        )
    return y


def has_tma(tensor: Tensor) -> bool:
    """Whether TMA can read a matrix [rows, K] of fp8: from Hopper on, where rows begin at multiples
    of 16 bytes. Always, if interpreted.
    """
    is_aligned = (
        tensor.data_ptr() % TMA_ALIGNMENT_BYTES == 0 and tensor.stride(0) % TMA_ALIGNMENT_BYTES == 0
    )
    return is_aligned and (
        tensor.device.type == "cpu" or torch.cuda.get_device_capability(tensor.device) >= (9, 0)
    )


def check_operands(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype
) -> None:
    """Raise what `gemm_a8w8_blockscale` states for operands that it cannot multiply."""
    operands = (x, w, x_scale, w_scale)
    dtypes, shapes, devices = (
        [each.dtype for each in operands],
        [[*each.shape] for each in operands],
        {each.device for each in operands},
    )
    if dtypes != [torch.float8_e4m3fn] * 2 + [torch.float32] * 2 or dtype not in (
        torch.bfloat16,
        torch.float16,
    ):
        raise TypeError(
            "need x and w in float8_e4m3fn, scales in float32, dtype= bfloat16 or float16; got"
            f" {dtypes}, dtype={dtype}"
        )
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1] or not x.numel() or not w.numel():
        raise ValueError(f"need x as [M, K] and w as [N, K], none of them 0; got {shapes[:2]}")
    n_blocks, k_blocks = triton.cdiv(len(w), BLOCK), triton.cdiv(x.shape[1], BLOCK)
    if shapes[2:] != [[len(x), k_blocks], [n_blocks, k_blocks]]:
        raise ValueError(
            f"need x_scale as {[len(x), k_blocks]} and w_scale as {[n_blocks, k_blocks]}; got"
            f" {shapes[2:]}"
        )
    if len(devices) > 1 or (x.shape[1] > 1 and (x.stride(1) != 1 or w.stride(1) != 1)):
        raise ValueError(
            f"need x and w with contiguous rows, all on one device; got strides {x.stride()},"
            f" {w.stride()}, {devices}"
        )


def check_config(config: Config) -> None:
    """Raise ValueError for a config with a key missing or unknown, or a value that the kernel
    cannot have.
    """
    others = {*AMD_KEYS, USE_TMA}
    if config.keys() - others != {*CONFIG_KEYS}:
        raise ValueError(
            f"need a config with the keys {CONFIG_KEYS}, and none but {others} beside them; got"
            f" {config}"
        )
    block_m, block_n, block_k, group, n_splits, cache, *_ = (config[key] for key in CONFIG_KEYS)
    if block_k != BLOCK or any(size < 16 or size & (size - 1) for size in (block_m, block_n)):
        raise ValueError(
            f"need BLOCK_SIZE_K {BLOCK}, BLOCK_SIZE_M and BLOCK_SIZE_N as powers of 2 from 16; got"
            f" {config}"
        )
    if group < 1 or n_splits < 1 or cache not in ("", ".cg"):
        raise ValueError(
            f"need GROUP_SIZE_M and NUM_KSPLIT from 1, cache_modifier '' or '.cg'; got {config}"
        )


def device_name() -> str:
    """The current GPU as files name it, such as NVIDIA_H200; `cpu` without one."""
    return torch.cuda.get_device_name().replace(" ", "_") if torch.cuda.is_available() else "cpu"


def config_file_name(N: int, K: int) -> str:
    """The file with the configs of one weight's shape, by classes of M."""
    return f"{device_name()}-GEMM-A8W8_BLOCKSCALE-N={N}-K={K}.json"


def get_config(M: int, N: int, K: int) -> Config:
    """The config of the first file there is: in $DIST_TUNE_CONFIG_DIR, then in kernels/configs;
    none: `DEFAULT_CONFIG`.

    In each folder the file for N and K comes before the one for the device. Files are read once,
    until `get_config.cache_clear()`. Raises what `dist_tune.offline.load_config` does for a damaged
    file.
    """
    return dict(_config_of(M, N, K, os.environ.get("DIST_TUNE_CONFIG_DIR", "")))


@functools.cache
def _config_of(m: int, n: int, k: int, folder: str) -> Config:
    folders = [Path(each) for each in (folder, Path(__file__).parent / "configs") if each]
    for path in (
        each / name
        for each in folders
        for name in (config_file_name(n, k), f"{device_name()}-GEMM-A8W8_BLOCKSCALE.json")
    ):
        if path.exists():
            # Here: a launch with a given config needs no tuner.
            from dist_tune.offline import (
                load_config,
            )

            return load_config(path, m)
    return DEFAULT_CONFIG


get_config.cache_clear = _config_of.cache_clear  # type: ignore[attr-defined]


def random_inputs(
    M: int, N: int, K: int, device: torch.device | str, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, w, x_scale, w_scale): normally distributed values, quantised with the scales amax / 448
    of their blocks.
    """
    x_values, w_values = torch.randn(
        M + N, K, device=device, generator=torch.Generator(device).manual_seed(seed)
    ).split((M, N))
    (x, x_scale), (w, w_scale) = quantised(x_values, 1), quantised(w_values, BLOCK)
    return x, w, x_scale, w_scale


def quantised(values: Tensor, block_rows: int) -> tuple[Tensor, Tensor]:
    """`values` as float8_e4m3fn, and the scales of its blocks [block_rows, 128]; 448 is the largest
    number of that dtype.
    """
    padded = torch.nn.functional.pad(
        values, (0, -values.shape[1] % BLOCK, 0, -len(values) % block_rows)
    )
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, block_rows))
    scale = (blocks.abs().amax((1, 3)) / 448).clamp_min(1e-12)
    return (values / per_element(scale, block_rows, *values.shape)).to(torch.float8_e4m3fn), scale


def per_element(scale: Tensor, block_rows: int, rows: int, k: int) -> Tensor:
    """The scales of blocks [block_rows, 128], as [rows, k]."""
    return scale.repeat_interleave(block_rows, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :k]


def reference(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Y [M, N] by torch: both operands dequantised, multiplied in float32.

    On CUDA TF32 must be off, as it is in torch by default.
    """
    x_values, w_values = (
        x.float() * per_element(x_scale, 1, *x.shape),
        w.float() * per_element(w_scale, BLOCK, *w.shape),
    )
    return (x_values @ w_values.T).to(dtype)
