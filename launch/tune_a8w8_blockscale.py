"""Tunes kernels/gemm_a8w8_blockscale.py for a list of weights, and writes the JSON files that its
launcher reads.

    .venv/bin/python launch/tune_a8w8_blockscale.py                                 # one GPU: five
    weights, 1944 configs launch/launch.sh launch/tune_a8w8_blockscale.py
    # all GPUs: problems are shared out over them .venv/bin/python launch/tune_a8w8_blockscale.py
    --m 64 512 --n 7168 --k 2048    # your own sizes .venv/bin/python launch/tune_a8w8_blockscale.py
    --compare                       # replaces what is at least 3 % slower, and shows both

Started again after it was interrupted, it goes on where it was. `--record FILE` keeps the times of
all configs instead of writing configs.
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
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout

# Before triton: without a GPU it chooses the interpreter.
from kernels import gemm_a8w8_blockscale as gemm

from rich.console import Console  # isort: skip
from rich.table import Table

from dist_tune.offline import (
    ConfigFile,
    Outcome,
    SearchStrategy,
    Settled,
    launchable,
    load_config,
    measure,
    small_medium_large,
    tune_files,
    tune_problems,
)

MIN_GAIN = 0.03
"""With --compare an older config is replaced if the new one is faster by this share."""
SIZES = [256, 2048, 4096]
WEIGHTS = [(1024, 1024), (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]
"""(N, K) of attention heads and feed-forward layers: those of aiter's tuning script for this GEMM.
"""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Weight = tuple[int, int]


def make_for_size(
    n: int, k: int, dtype: torch.dtype, device: torch.device, m: int
) -> Callable[[gemm.Config], Any]:
    """Inputs and reference for one problem, made once, when the first config asks for them; then a
    run for each config.
    """
    made: list[Any] = []

    def make_run_and_gt(config: gemm.Config) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
        if not made:
            inputs = gemm.random_inputs(m, n, k, device)
            made.extend([inputs, gemm.reference(*inputs, dtype)])
        inputs, expected = made
        x, w, x_scale, w_scale = inputs
        return (
            lambda: gemm.gemm_a8w8_blockscale(x, w, x_scale, w_scale, dtype, config=config),
            expected,
        )

    return make_run_and_gt


def files_of(options: argparse.Namespace, device: torch.device) -> list[ConfigFile]:
    """A file for each weight."""
    space, dtype = space_of(options.space), DTYPES[options.dtype]
    return [
        ConfigFile(
            gemm.config_file_name(n, k),
            options.m,
            partial(make_for_size, n, k, dtype, device),
            space,
            small_medium_large("_M"),
        )
        for n, k in weights_of(options)
    ]


def weights_of(options: argparse.Namespace) -> list[Weight]:
    """The (N, K) to tune for."""
    return WEIGHTS if options.n is None else [(options.n, options.k)]


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
    return 1e-2 * math.sqrt(min(k for _, k in weights_of(options)))


def show(settled: list[Settled], console: Console) -> None:
    """What was chosen for each class, beside what was there before."""
    table = Table(
        "file", "class", "us", "before, us", "gain", "saved", "config", title="tuned configs"
    )
    for each in settled:
        times = [
            " ".join(f"{size}:{us:.1f}" for size, us in found.items())
            for found in (each.latencies_us, each.old_latencies_us)
        ]
        gain = "" if each.gain is None else f"{each.gain:+.1%}"
        config = " ".join(
            f"{name}={value}" for name, value in each.config.items() if name not in gemm.AMD_KEYS
        )
        table.add_row(
            each.json_file_name,
            each.size_class,
            *times,
            gain,
            "yes" if each.is_saved else "no",
            config,
        )
    console.print(table)


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
    for n, k in weights_of(options):
        for m in options.m:
            inputs = gemm.random_inputs(m, n, k, device)
            config = load_config(options.save_path / gemm.config_file_name(n, k), m)
            rows, columns = torch.ones(m, 1, device=device), torch.ones(1, n, device=device)
            runs: list[Callable[[], Any]] = [
                lambda inputs=inputs: gemm.gemm_a8w8_blockscale(
                    *inputs, config=gemm.DEFAULT_CONFIG
                ),  # type: ignore[misc]
                lambda inputs=inputs, config=config: gemm.gemm_a8w8_blockscale(
                    *inputs, config=config
                ),  # type: ignore[misc]
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


def record(files: list[ConfigFile], how: dict[str, Any], path: Path) -> None:
    """Keep the times of all configs of all problems: one list of configs, and for each problem its
    times in microseconds.
    """
    problems = [file.problem(size) for file in files for size in file.sizes]
    ended = tune_problems(problems, **how)
    if os.environ.get("RANK", "0") != "0":
        return
    texts, _ = launchable(files[0].search_space)
    rows = [
        {
            "problem": each.name,
            "us": [
                round(us, 3) if (us := each.latencies_us.get(i)) is not None else None
                for i in range(len(texts))
            ],
        }
        for each in ended
        if isinstance(each, Outcome)
    ]
    body = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(
        f'{{"device": "{gemm.device_name()}", "configs": {json.dumps(texts)},\n"problems":'
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
    parser.add_argument(
        "--compare",
        action="store_true",
        help=f"replace only configs that are slower by {MIN_GAIN:.0%}% or more",
    )
    parser.add_argument("--save-path", type=Path, default=Path(gemm.__file__).parent / "configs")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="write all times there, and no configs"
    )
    options = parser.parse_args()
    if (options.n is None) != (options.k is None):
        parser.error("--n and --k go together")
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
    how: dict[str, Any] = {
        "num_iters": options.iters,
        "atol": atol_of(options),
        "rtol": 2e-2,
        "search": options.search,
        "max_configs": options.max_configs,
        "budget_s": options.budget_s,
        "mode": options.mode,
    }
    files, began = files_of(options, device), time.monotonic()
    if options.record is not None:
        record(files, how, options.record)
    else:
        show(
            tune_files(
                files, options.save_path, min_gain=MIN_GAIN if options.compare else None, **how
            ),
            console,
        )
    console.print(
        f"tuning took {time.monotonic() - began:.1f} s for {len(files) * len(options.m)} problems"
    )
    if options.record is None and is_first and device.type == "cuda":
        compare(options, device, console)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
