"""What kernels/gemm_a8w8_blockscale.py does from its command line: check results, and time them beside cuBLAS.

python kernels/gemm_a8w8_blockscale.py --case check
python kernels/gemm_a8w8_blockscale.py --case perf --shape 256,4096,1024 2048,4096,1024
"""

from __future__ import annotations

import argparse
import itertools

import torch

from kernels.gemm_a8w8_blockscale import (  # before triton: without a GPU it chooses the interpreter
    DEFAULT_CONFIG,
    LIMITS,
    device_name,
    gemm_a8w8_blockscale,
    make_config,
    random_inputs,
    reference,
    relative_error,
)

import triton  # isort: skip

from dist_tune.measure import measure


def check(shape: tuple[int, int, int], device: str) -> bool:
    """Whether results are within the limit at a shape, for configs that take every path of the kernels; a line for each."""
    inputs = random_inputs(*shape, device)
    expected, is_good = reference(*inputs), True
    uneven, wide = make_config(64, 64, warps=4, stages=3, splits=3), make_config(32, 256, warps=8, stages=2, group=1, cache=".cg")
    tma = make_config(64, 128, warps=4, stages=3, tma=True)
    small = make_config(32, 32, warps=2, stages=1, splits=4)
    configs = {"get_config": None, "3 splits": uneven, "256 wide": wide, "TMA": tma, "TMA split": tma | {"NUM_KSPLIT": 2}, "small": small}
    for (dtype, limit), (name, config) in itertools.product(LIMITS.items(), configs.items()):
        error = relative_error(gemm_a8w8_blockscale(*inputs, dtype=dtype, config=config), expected)
        is_good &= error <= limit  # a NaN is not
        print(f"{shape!s:20} {dtype!s:14} {name:10} relative error {error:.2e} limit {limit:.1e} {'ok' if error <= limit else 'FAILED'}")
    return is_good


def perf(shape: tuple[int, int, int], device: str) -> bool:
    """True, after a line for each way to multiply at a shape: median microseconds, and TFLOP/s."""
    x, w, *_ = inputs = random_inputs(*shape, device)
    x_ones, w_ones = torch.ones(len(x), 1, device=device), torch.ones(1, len(w), device=device)
    runs = {
        "default config": lambda: gemm_a8w8_blockscale(*inputs, config=DEFAULT_CONFIG),
        "config from files": lambda: gemm_a8w8_blockscale(*inputs),
        "torch._scaled_mm, scales by row": lambda: torch._scaled_mm(x, w.T, x_ones, w_ones, out_dtype=torch.bfloat16),
    }
    for name, run in runs.items():
        try:
            us = measure(run, n_warmup=5, num_iters=30).median_us
            print(f"{shape!s:20} {name:32} {us:10.1f} us {2e-6 * len(x) * len(w) * x.shape[1] / us:8.1f} TFLOP/s")
        except (RuntimeError, ValueError, TypeError) as error:
            if "torch" not in name:  # what torch._scaled_mm takes depends on torch's version
                raise
            print(f"{shape!s:20} {name:32} {error}")
    return True


def main() -> int:
    """Run the case at every shape; 1 if a check failed."""
    parser = argparse.ArgumentParser(description="FP8 GEMM with block scales: check its results, or time it beside torch's.")
    parser.add_argument("--case", choices=["check", "perf"], default="check")
    parser.add_argument("--shape", type=lambda text: tuple(map(int, text.split(","))), action="extend", nargs="+", metavar="M,N,K")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.case == "perf" and device == "cpu":
        parser.error("--case perf needs a GPU: the interpreter's times say nothing about it")
    small, large = [(64, 128, 256), (70, 200, 500), (1, 130, 129)], [(256, 4096, 1024), (2048, 4096, 1024), (4096, 6144, 1024)]
    shapes = options.shape or (large if options.case == "perf" else small if device == "cpu" else small + large)
    print(f"{device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    return int(False in [(check if options.case == "check" else perf)(shape, device) for shape in shapes])
