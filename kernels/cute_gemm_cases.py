"""The command line of kernels/cute_gemm.py: check results, tune, and time it beside cuBLAS and kernels/persistent_gemm.py.

Knows which results and times to compare; where the kernel cannot run it says why and ends as a skip.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table

from dist_tune.measure import measure
from kernels.cute_build import SKIP_CODE, missing_packages, reason_to_skip
from kernels.cute_gemm import by_torch, compile_ahead, cute_gemm, search_space
from kernels.harness import Problem, Shape, add_cases, check, chosen, command_line, console_of, parsed, versions
from kernels.persistent_gemm import persistent_gemm

CHECK_SHAPES = ((1, 1, 1), (33, 17, 70), (200, 328, 136), (1000, 1000, 1000))
PERF_SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192))
ROUNDS = 3
"""Each way to multiply is timed in turn: the first one finds a cooler GPU than the last."""
SUSTAINED_MS, N_CALLS = 100.0, 20
"""Before and while calls are timed back to back: their own power draw, not their predecessor's, sets the clocks."""
Operands = tuple[torch.Tensor, torch.Tensor]


def operands(shape: Shape, dtype: torch.dtype, seed: int = 0) -> Operands:
    """Normally distributed A [M, K] and B [N, K] on the GPU."""
    m, n, k = shape
    generator = torch.Generator("cuda").manual_seed(seed)
    a, b = (torch.randn(rows, k, dtype=dtype, device="cuda", generator=generator) for rows in (m, n))
    return a, b


def problem(shape: Shape, dtype: torch.dtype, seed: int) -> Problem:
    """The product at a shape with every config that fits, as `check` runs it."""
    a, b = operands(shape, dtype, seed)
    return Problem(
        f"A @ B.T {list(shape)} {dtype}",
        lambda config: cute_gemm(a, b) if config is None else cute_gemm.__wrapped__(a, b, config),
        search_space(*shape),
        lambda: a.float() @ b.float().T,
        lambda: by_torch(a, b),
        limit=torch.finfo(dtype).eps,
        n_flops=2 * shape[0] * shape[1] * shape[2],
    )


def check_case(shape: Shape, dtype: torch.dtype, console: Console) -> bool:
    """Every config of the space and the tuned function, each into poisoned memory, then the tuned function with five fresh inputs."""
    compile_ahead(search_space(*shape), dtype)
    is_good = check(problem(shape, dtype, 0), console)
    for seed in range(1, 6):
        a, b = operands(shape, dtype, seed)
        is_right = torch.allclose(cute_gemm(a, b).float(), a.float() @ b.float().T, rtol=2**-6, atol=2**-6 * shape[2] ** 0.5)
        console.print(f"check fresh input {seed} {list(shape)} {dtype} {'ok' if is_right else 'FAILED'}", markup=False, highlight=False)
        is_good &= is_right
    return is_good


def tune_case(shape: Shape, dtype: torch.dtype, console: Console) -> float:
    """Tune at a shape, unless it is in the cache, and print what that found; returns the seconds of compilation and tuning."""
    began, space = time.perf_counter(), search_space(*shape)
    n_compiled = compile_ahead(space, dtype)
    compile_s = time.perf_counter() - began
    cute_gemm(*operands(shape, dtype))
    record = cute_gemm.records[-1]
    found = "in the cache" if record.is_recalled else f"tuned in {record.seconds:.1f} s"
    console.print(
        f"tune {list(shape)} {dtype} {len(space)} configs, {n_compiled} compiled in {compile_s:.1f} s, {found}: {record.best.config}",
        markup=False,
        highlight=False,
    )
    return time.perf_counter() - began


def back_to_back_us(run: Callable[[], object], first_us: float) -> float:
    """Median from one call's end to the next one's, after calls for `SUSTAINED_MS`."""
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(N_CALLS + 1)]
    for _ in range(int(SUSTAINED_MS * 1000 / first_us) + 1):
        run()
    for end in ends:
        run()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(earlier.elapsed_time(later) for earlier, later in itertools.pairwise(ends)) * 1000)


def perf_case(shape: Shape, dtype: torch.dtype, tune_s: float) -> list[list[str]]:
    """Rows of the table, one for each method: medians over rounds in which all ways to multiply take turns."""
    a, b = operands(shape, dtype)
    first = search_space(*shape)[0]
    runs: dict[str, Callable[[], object]] = {
        "tuned": lambda: cute_gemm(a, b),
        "first": lambda: cute_gemm.__wrapped__(a, b, first),
        "cuBLAS": lambda: by_torch(a, b),
        "persistent": lambda: persistent_gemm(a, b),
    }
    for run in runs.values():
        run()  # tunes; from here on an ordinary call
    ahead: dict[str, list[float]] = {name: [] for name in runs}
    sustained: dict[str, list[float]] = {name: [] for name in runs}
    for name, run in [*runs.items()] * ROUNDS:
        ahead[name].append(measure(run, n_warmup=5, num_iters=50).mean_us)
    for name, run in [*runs.items()] * ROUNDS:
        sustained[name].append(back_to_back_us(run, ahead[name][0]))
    methods = {"host ahead, cold L2": ahead, "back to back": sustained}
    us = {method: {name: statistics.median(each) for name, each in times.items()} for method, times in methods.items()}
    return [row(shape, dtype, method, times, tune_s) for method, times in us.items()]


def row(shape: Shape, dtype: torch.dtype, method: str, us: dict[str, float], tune_s: float) -> list[str]:
    """A line of the table; ratios are of times, so more than 1 is faster than the other."""
    rate = 2e-6 * shape[0] * shape[1] * shape[2] / us["tuned"]
    ratios = [f"{us['cuBLAS'] / us['tuned']:.1%}", *(f"{us[other] / us['tuned']:.2f}" for other in ("persistent", "first"))]
    return [f"{list(shape)} {dtype}", method, *(f"{each:.1f}" for each in us.values()), f"{rate:.1f}", *ratios, f"{tune_s:.1f}"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the case at every shape and type; 1 if a result was wrong, 77 where the kernel cannot run."""
    parser = command_line("Persistent Hopper GEMM in CuTe DSL: check it, tune it, time it beside cuBLAS.", dtypes=("bf16", "fp16"))
    add_cases(parser, "tune")
    parser.parse_args(argv)  # --help and mistakes come first
    if reason := reason_to_skip(missing_packages(), torch.cuda.get_device_capability() if torch.cuda.is_available() else None):
        print(f"skipped: kernels/cute_gemm.py cannot run here: {reason}")
        return SKIP_CODE
    options, console = parsed(parser, argv), console_of()
    console.soft_wrap = True
    console.print(versions(), highlight=False)
    table = Table("problem", "method", *(f"{name} us" for name in ("tuned", "first config", "cuBLAS", "persistent_gemm")), "TFLOP/s")
    for heading in ("of cuBLAS", "x persistent", "x first config", "compile + tune s"):
        table.add_column(heading, justify="right")
    is_good = True
    for shape, dtype in chosen(options, CHECK_SHAPES if options.case == "check" else PERF_SHAPES):
        if options.case == "check":
            is_good &= check_case(shape, dtype, console)
            continue
        seconds = tune_case(shape, dtype, console)
        if options.case == "perf":
            for cells in perf_case(shape, dtype, seconds):
                table.add_row(*cells)
    if options.case == "perf":
        console.print(table)
    return 0 if is_good else 1
