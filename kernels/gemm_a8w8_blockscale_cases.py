"""The command line of kernels/gemm_a8w8_blockscale.py: check results, and time them beside cuBLAS.

python kernels/gemm_a8w8_blockscale.py --case check
python kernels/gemm_a8w8_blockscale.py --case perf --shape 256,4096,1024 2048,4096,1024
"""

from __future__ import annotations

import itertools

import torch
import triton

from dist_tune.measure import measure
from kernels.gemm_a8w8_blockscale import DEFAULT_CONFIG, LIMITS, device_name, gemm_a8w8_blockscale, make_config, random_inputs, reference
from kernels.harness import Shape, add_cases, command_line, parsed, relative_error


def check(shape: Shape, device: str) -> bool:
    """Whether results are within the limit at a shape, for configs that take every path of the kernels; a line for each."""
    m, n, k = shape
    inputs = random_inputs(m, n, k, device)
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


def perf(shape: Shape, device: str) -> bool:
    """True, after a line for each way to multiply at a shape: median microseconds, and TFLOP/s."""
    m, n, k = shape
    x, w, *_ = inputs = random_inputs(m, n, k, device)
    x_ones, w_ones = torch.ones(m, 1, device=device), torch.ones(1, n, device=device)
    runs = {
        "default config": lambda: gemm_a8w8_blockscale(*inputs, config=DEFAULT_CONFIG),
        "config from files": lambda: gemm_a8w8_blockscale(*inputs),
        "torch._scaled_mm, scales by row": lambda: torch._scaled_mm(x, w.T, x_ones, w_ones, out_dtype=torch.bfloat16),
    }
    for name, run in runs.items():
        try:
            us = measure(run, n_warmup=5, num_iters=30).median_us
            print(f"{shape!s:20} {name:32} {us:10.1f} us {2e-6 * m * n * k / us:8.1f} TFLOP/s")
        except (RuntimeError, ValueError, TypeError) as error:
            if "torch" not in name:  # what torch._scaled_mm takes depends on torch's version
                raise
            print(f"{shape!s:20} {name:32} {error}")
    return True


def main() -> int:
    """Run the case at every shape; 1 if a check failed."""
    parser = command_line("FP8 GEMM with block scales: check its results, or time it beside torch's.")
    add_cases(parser)
    options, device = parsed(parser), "cuda" if torch.cuda.is_available() else "cpu"
    small, large = [(64, 128, 256), (70, 200, 500), (1, 130, 129)], [(256, 4096, 1024), (2048, 4096, 1024), (4096, 6144, 1024)]
    shapes = options.shape or (large if options.case == "perf" else small if device == "cpu" else small + large)
    print(f"{device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    return int(False in [(check if options.case == "check" else perf)(shape, device) for shape in shapes])
