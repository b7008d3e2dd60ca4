"""Tunes kernels/gemm_a8w8_blockscale.py for a list of weights, and writes the JSON files that its
launcher reads.

One GPU, five weights, 3645 configs; all GPUs, over which the sizes are shared out; your own sizes:

    .venv/bin/python launch/tune_a8w8_blockscale.py
    launch/launch.sh launch/tune_a8w8_blockscale.py
    .venv/bin/python launch/tune_a8w8_blockscale.py --m 64 512 --n 7168 --k 2048

Started again after it was interrupted, it goes on where it was. `--record FILE` keeps the times of
all configs on one GPU instead of writing configs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout

# Before triton: without a GPU it chooses the interpreter.
from kernels import gemm_a8w8_blockscale as gemm

from rich.console import Console  # isort: skip
from rich.table import Table

from dist_tune import autotune, matches
from dist_tune.offline import (
    SearchStrategy,
    load_config,
    measure,
    small_medium_large,
    tune_and_save_configs,
)

SIZES = [256, 2048, 4096]
WEIGHTS = [(1024, 1024), (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]
"""(N, K) of attention heads and feed-forward layers: those of aiter's tuning script for this GEMM.
"""
RTOL = 2e-2
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Size = tuple[int, int, int]
"""(M, N, K)."""


def sizes_of(options: argparse.Namespace) -> list[Size]:
    """The sizes to tune for."""
    weights = WEIGHTS if options.n is None else [(options.n, options.k)]
    return [(m, n, k) for n, k in weights for m in options.m]


def tune(options: argparse.Namespace, device: torch.device) -> None:
    """Write a file for each weight."""
    dtype, class_of = DTYPES[options.dtype], small_medium_large("_M")

    def make_for_size(size: Size) -> Callable[[gemm.Config], Any]:
        inputs = gemm.random_inputs(*size, device)
        expected = gemm.reference(*inputs, dtype)

        def make_run_and_gt(config: gemm.Config) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
            x, w, x_scale, w_scale = inputs
            return (
                lambda: gemm.gemm_a8w8_blockscale(x, w, x_scale, w_scale, dtype, config=config),
                expected,
            )

        return make_run_and_gt

    tune_and_save_configs(
        sizes_of(options),
        make_for_size,
        space_of(options.space),
        lambda size: gemm.config_file_name(*size[1:]),
        options.save_path,
        classes=lambda size: class_of(size[0]),
        num_iters=options.iters,
        atol=atol_of(options),
        rtol=RTOL,
        search=options.search,
        max_configs=options.max_configs,
        budget_s=options.budget_s,
        mode=options.mode,
    )


def full_space() -> list[gemm.Config]:
    """Every config that a tuner may try: 3645 on NVIDIA, 5832 on AMD, which has no TMA and one
    option more.

    They are the values of aiter's tuning script for this GEMM; on NVIDIA also five stages, and
    tiles by TMA, which knows no cache modifier.
    """
    blocks: list[list[Any]] = [
        [32, 64, 128],
        [32, 64, 128],
        [gemm.BLOCK],
        [1, 8, 16],
        [1, 2, 4],
        ["", ".cg"],
        [2, 4, 8],
    ]
    stages, waves, tma = (
        ([1, 2, 3, 4], [2, 4, 8], [False]) if gemm.IS_HIP else ([1, 2, 3, 4, 5], [2], [False, True])
    )
    names = (*gemm.CONFIG_KEYS, *gemm.AMD_KEYS, gemm.USE_TMA)
    configs = [
        dict(zip(names, values, strict=True))
        for values in itertools.product(*blocks, stages, waves, [2], [16], tma)
    ]
    return [config for config in configs if not (config[gemm.USE_TMA] and config["cache_modifier"])]


def small_space() -> list[gemm.Config]:
    """Two dozen configs of `full_space`: large tiles for many rows, small tiles and a split K where
    few tiles would leave SMs idle.
    """
    large = [
        (128, 128, 8, 3, 1),
        (128, 128, 8, 4, 1),
        (128, 64, 4, 4, 1),
        (64, 128, 4, 3, 1),
        (64, 128, 4, 4, 1),
        (64, 128, 4, 4, 2),
    ]
    small = [
        (64, 64, 4, 4, 1),
        (64, 64, 4, 4, 2),
        (64, 64, 4, 4, 4),
        (32, 128, 4, 4, 2),
        (32, 64, 4, 4, 1),
        (32, 64, 4, 4, 4),
    ]
    plain = [
        gemm.make_config(m, n, warps=warps, stages=stages, splits=splits)
        for m, n, warps, stages, splits in large + small
    ]
    return plain if gemm.IS_HIP else [*plain, *(config | {gemm.USE_TMA: True} for config in plain)]


def space_of(name: str) -> list[gemm.Config]:
    """The configs of a space by its name, or of a JSON file with a list of them."""
    if name in ("small", "full"):
        return small_space() if name == "small" else full_space()
    configs = json.loads(Path(name).read_text())
    if not isinstance(configs, list):
        raise SystemExit(
            f"--space {name}: need a JSON list of configs, got a {type(configs).__name__}"
        )
    for config in configs:
        gemm.check_config(config)
    return configs


def atol_of(options: argparse.Namespace) -> float:
    """A hundredth of what an element of y is like: a sum of K products of normally distributed
    numbers.
    """
    return 1e-2 * math.sqrt(min(k for _, _, k in sizes_of(options)))


def compare(options: argparse.Namespace, device: torch.device, console: Console) -> None:
    """The tuned configs beside the untuned default and cuBLAS, each at its size: microseconds and
    TFLOP/s, after an L2 flush.
    """
    table = Table(
        "M",
        "N",
        "K",
        "default us",
        "tuned us",
        "x default",
        "TFLOP/s",
        "torch._scaled_mm us",
        "its TFLOP/s",
        title="times",
    )
    gains = []
    for m, n, k in sizes_of(options):
        inputs = gemm.random_inputs(m, n, k, device)
        config = load_config(options.save_path / gemm.config_file_name(n, k), m)
        rows, columns = torch.ones(m, 1, device=device), torch.ones(1, n, device=device)
        runs: list[Callable[[], Any]] = [
            lambda inputs=inputs: gemm.gemm_a8w8_blockscale(*inputs, config=gemm.DEFAULT_CONFIG),  # type: ignore[misc]
            lambda inputs=inputs, config=config: gemm.gemm_a8w8_blockscale(*inputs, config=config),  # type: ignore[misc]
            # cuBLAS' closest: one scale for a row of x and of w, in place of one for each
            # block.
            lambda x=inputs[0], w=inputs[1], r=rows, c=columns: torch._scaled_mm(
                x, w.T, r, c, out_dtype=torch.bfloat16
            ),  # type: ignore[misc]
        ]
        # In turn, and the medians of three rounds: a GPU that changes its clock does so to all
        # of them.
        rounds = [[measure(run, num_iters=50).median_us for run in runs] for _ in range(3)]
        default, tuned, blas = (sorted(times)[1] for times in zip(*rounds, strict=True))
        gains.append(default / tuned)
        tflops = [2e-6 * m * n * k / us for us in (tuned, blas)]
        cells = [
            f"{default:.2f}",
            f"{tuned:.2f}",
            f"{default / tuned:.2f}",
            f"{tflops[0]:.0f}",
            f"{blas:.2f}",
            f"{tflops[1]:.0f}",
        ]
        table.add_row(str(m), str(n), str(k), *cells)
    console.print(table)
    mean = math.exp(math.fsum(map(math.log, gains)) / len(gains))
    console.print(f"tuned over default, geometric mean of {len(gains)}: {mean:.2f}x")


def record(options: argparse.Namespace, device: torch.device) -> None:
    """Keep the times of all configs at all sizes: one list of configs, and for each size its times
    in microseconds.
    """
    space, dtype = space_of(options.space), DTYPES[options.dtype]
    right = matches(gemm.reference, rtol=RTOL, atol=atol_of(options))

    @autotune(
        [{"config": config} for config in space],
        key=["x", "w"],
        check=right,
        search="exhaustive",
        n_repeat=options.iters,
        cache=False,
    )
    def run(
        x: torch.Tensor,
        w: torch.Tensor,
        x_scale: torch.Tensor,
        w_scale: torch.Tensor,
        dtype: torch.dtype,
        config: gemm.Config,
    ) -> torch.Tensor:
        return gemm.gemm_a8w8_blockscale(x, w, x_scale, w_scale, dtype, config=config)

    rows = []
    for m, n, k in sizes_of(options):
        run(*gemm.random_inputs(m, n, k, device), dtype)
        times_ms = [each.latency_ms for each in run.records[-1].candidates]
        us = [None if ms is None else round(1e3 * ms, 3) for ms in times_ms]
        rows.append(json.dumps({"problem": f"M={m} N={n} K={k}", "us": us}))
    body = ",\n".join(rows)
    options.record.write_text(
        f'{{"device": "{gemm.device_name()}", "configs": {json.dumps(space)},\n"problems":'
        f" [\n{body}\n]}}\n"
    )


def parsed() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    # The capitals are for those who call torchrun themselves: it takes --m for an abbreviation of
    # an option of its own.
    parser.add_argument(
        "--m", "--M", type=int, nargs="+", default=SIZES, help=f"rows of x; default {SIZES}"
    )
    parser.add_argument("--n", "--N", type=int, help="rows of w; with --k. Default: five weights")
    parser.add_argument("--k", "--K", type=int, help="depth")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16", help="of y")
    parser.add_argument(
        "--space", default="full", help="small, full, or a JSON file with a list of configs"
    )
    parser.add_argument("--search", choices=get_args(SearchStrategy), default="racing")
    parser.add_argument("--max-configs", type=int, help="tried at most, for each problem")
    parser.add_argument("--budget-s", type=float, help="seconds for each problem")
    parser.add_argument("--iters", type=int, default=10, help="timed runs of each of the best few")
    parser.add_argument(
        "--mode",
        choices=["split", "merge"],
        help="over several ranks: a problem each (the default), or all at one",
    )
    parser.add_argument("--save-path", type=Path, default=Path(gemm.__file__).parent / "configs")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="write the times of all configs there, and no files of configs",
    )
    options = parser.parse_args()
    if (options.n is None) != (options.k is None):
        parser.error("--n and --k go together")
    if options.record is not None and "RANK" in os.environ:
        parser.error("--record is for one GPU")
    return options


def main() -> int:
    """Tune, write, and show what was gained."""
    options = parsed()
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        # For its store alone: ranks that share out problems make no collective.
        dist.init_process_group("gloo")
    is_first = os.environ.get("RANK", "0") == "0"
    console = Console(width=None if sys.stdout.isatty() else 200, quiet=not is_first)
    console.print(
        f"{gemm.device_name()}, torch {torch.__version__}, {os.environ.get('WORLD_SIZE', '1')}"
        " ranks",
        markup=False,
    )
    began = time.monotonic()
    (tune if options.record is None else record)(options, device)
    console.print(
        f"tuning took {time.monotonic() - began:.1f} s for {len(sizes_of(options))} problems"
    )
    if options.record is None and is_first and device.type == "cuda":
        compare(options, device, console)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
