"""Command lines of the kernels: their options, their ranks, checks of results against a reference, and tables of times.

Knows problems as functions to call; knows nothing of how a kernel works or is tuned.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import triton
from rich.console import Console
from rich.table import Column, Table

from dist_tune import DistTuneError

Shape = tuple[int, ...]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDTH = 190
"""Columns of a table where there is no terminal: tables in logs stay in one piece."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One result to compute at one shape."""

    name: str
    run: Callable[[triton.Config | None], torch.Tensor]
    """The result with a given config; with the one that the tuner chooses, if None."""
    configs: Sequence[triton.Config]
    """The search space; its first config stands for an untuned kernel."""
    expected: Callable[[], torch.Tensor]
    """The right result, in float32."""
    by_torch: Callable[[], object]
    """The same by torch, for its time."""
    limit: float
    """The largest error that rounding explains, as `largest_error` measures it."""
    n_bytes: int = 0
    """Bytes to read and write at least; 0 where arithmetic is the limit."""
    n_flops: int = 0
    timed: Callable[[triton.Config | None], object] | None = None
    """Timed in place of `run`."""

    def rate(self, latency_us: float) -> str:
        """GB/s, or TFLOP/s where that is the measure."""
        return f"{self.n_flops / latency_us * 1e-6:.1f} TFLOP/s" if self.n_flops else f"{self.n_bytes / latency_us * 1e-3:.0f} GB/s"


@dataclass(frozen=True, slots=True)
class Example:
    """A single-GPU kernel, as its command line needs it."""

    description: str
    sizes: str
    """Names of the numbers of a shape, with commas between them."""
    dtypes: tuple[str, ...]
    """The first one is the default."""
    check_shapes: tuple[Shape, ...]
    """Few and small ones, for the interpreter."""
    perf_shapes: tuple[Shape, ...]
    """The first one is checked, too, where there is a GPU."""
    problems: Callable[[Shape, torch.dtype, torch.device], Iterable[Problem]]
    more_perf: Callable[[Shape, torch.dtype, torch.device], Table] | None = None
    """Shown below the times of a shape."""


def parse_shape(text: str) -> Shape:
    """Sizes, with commas between them.

    Raises:
        ValueError: not integers, or negative ones.
    """
    shape = tuple(int(size) for size in text.split(","))
    if min(shape) < 0:
        raise ValueError(f"sizes cannot be negative, got {text}")
    return shape


def command_line(description: str, *, sizes: str = "M,N,K", dtypes: Sequence[str] = (), script: str = "") -> argparse.ArgumentParser:
    """A parser with --shape and, where there is a choice, --dtype; `script` names a file that needs ranks. For `parsed`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--shape", type=parse_shape, action="extend", nargs="+", metavar=sizes, help="may be given again")
    if dtypes:
        parser.add_argument("--dtype", choices=dtypes, action="append", help=f"may be given again; {dtypes[0]} if not given")
    parser.set_defaults(sizes=sizes, dtypes=dtypes[:1], script=script, case="")
    return parser


def add_cases(parser: argparse.ArgumentParser, *more: str) -> None:
    """Give a parser --case: check, those of `more`, or perf."""
    parser.add_argument("--case", choices=["check", *more, "perf"], default="check", help="compare results, or times; check if not given")


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options given; ends the program with the reason where the case cannot run here."""
    options = parser.parse_args(argv)
    n_sizes, script = options.sizes.count(",") + 1, options.script
    for shape in options.shape or ():
        if len(shape) != n_sizes:
            parser.error(f"--shape needs {n_sizes} sizes, {options.sizes}; got {','.join(map(str, shape))}")
    if script and "LOCAL_RANK" not in os.environ:
        parser.error(f"needs ranks: torchrun --nproc_per_node=2 {script} ..., or launch/launch.sh {script} ...")
    if options.case == "perf" and not torch.cuda.is_available():
        need, them = ("GPUs", "them") if script else ("a GPU", "one")
        parser.error(f"--case perf needs {need}: the interpreter's times say nothing about {them}")
    return options


def chosen(options: argparse.Namespace, shapes: Iterable[Shape]) -> Iterator[tuple[Shape, torch.dtype]]:
    """Each shape that was given, or else each of `shapes`, with each dtype; none of them twice."""
    for shape in dict.fromkeys(options.shape or shapes):
        for name in dict.fromkeys(options.dtype or options.dtypes):
            yield shape, DTYPES[name]


def versions(without_gpu: str = "CPU, Triton interpreter") -> str:
    """The device, and the versions of torch and triton."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else without_gpu
    return f"{device}, torch {torch.__version__}, triton {triton.__version__}"


def console_of(width: int = WIDTH, *, quiet: bool = False) -> Console:
    """A console as wide as its terminal, or else `width` columns."""
    return Console(width=None if sys.stdout.isatty() else width, quiet=quiet)


def join_ranks(width: int = WIDTH) -> tuple[torch.device, Console]:
    """Join the ranks that torchrun started: this rank's device, and a console that writes on rank 0 alone."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None)
    torch.manual_seed(dist.get_rank())
    # torch 2.13 has a new name for it, which 2.11 has not.
    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.* is deprecated", category=FutureWarning)
    console = console_of(width, quiet=dist.get_rank() != 0)
    console.print(f"{dist.get_world_size()} x {versions()}")
    return device, console


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """||result - expected|| / ||expected||, in float32; NaN where the result has one."""
    return float((result.float() - expected.float()).norm() / expected.float().norm())


def largest_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest |result - expected| / (|expected| + rms(expected)); inf for a NaN or a shape that is not expected."""
    if result.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    expected = expected.float()
    scale = (expected.abs() + expected.square().mean().sqrt()).clamp_min(torch.finfo(torch.float32).tiny)
    error = (result.float() - expected).abs() / scale
    return float(error.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def verdict(error: float, limit: float, reason: str = "") -> str:
    """The end of a check's line: ok, or the limit that the error is above, and the reason if there is one."""
    return "ok" if error <= limit else f"FAILED, the limit is {limit:.1e}{reason and f': {reason}'},"


def check(problem: Problem, console: Console) -> bool:
    """True if the results of every config that fits the GPU and of the tuned kernel are right; prints a line for each."""
    is_good, expected = True, problem.expected()
    for config in (*problem.configs, None):
        try:
            result = problem.run(config)
            error, reason = largest_error(result, expected), ""
            result.fill_(float("nan"))  # the next result may get this memory: not written is not right
        except triton.OutOfResources as refusal:  # not wrong: a tuner drops it
            console.print(f"check {problem.name} not run: {refusal} {config_text(config)}", markup=False, highlight=False)
            continue
        except DistTuneError as refusal:
            error, reason = float("inf"), str(refusal)
        how = f"{verdict(error, problem.limit, reason)} {config_text(config)}"
        console.print(f"check {problem.name} error {error:.1e} {how}", markup=False, highlight=False)
        is_good &= error <= problem.limit
    return is_good


def config_text(config: triton.Config | None) -> str:
    """A config in a few words; "tuned" for None."""
    if config is None:
        return "tuned"
    return " ".join(f"{name}={value}" for name, value in config.all_kwargs().items() if value is not None)


def perf(problems: Iterable[Problem]) -> Table:
    """Microseconds of each problem: tuned, with the first config, by torch. Tunes each problem that is not tuned yet."""
    # Imported here: checking results needs no clock.
    from dist_tune.measure import measure

    headings = ("tuned us", "min us", "outliers", "first config us", "torch us", "rate", "x first config", "x torch")
    columns = [Column("problem", no_wrap=True), *(Column(heading, justify="right") for heading in headings)]
    table = Table(*columns, title="us: mean without outliers, after warm-up")
    for problem in problems:
        run = problem.timed or problem.run
        run(None)  # tunes; from here on an ordinary call
        calls = (partial(run, None), partial(run, problem.configs[0]), problem.by_torch)
        tuned, first, torchs = (measure(call, n_warmup=5, num_iters=100) for call in calls)
        times = [f"{tuned.mean_us:.2f}", f"{tuned.min_us:.2f}", str(tuned.n_outliers), f"{first.mean_us:.2f}", f"{torchs.mean_us:.2f}"]
        ratios = [f"{other.mean_us / tuned.mean_us:.2f}" for other in (first, torchs)]
        table.add_row(problem.name, *times, problem.rate(tuned.mean_us), *ratios)
    return table


def main(example: Example, argv: Sequence[str] | None = None) -> int:
    """Run the case of a single-GPU kernel at every shape and dtype; 1 if any result was wrong."""
    parser = command_line(example.description, sizes=example.sizes, dtypes=example.dtypes)
    add_cases(parser)
    options, device = parsed(parser, argv), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console = console_of()
    console.soft_wrap = True
    console.print(versions(), highlight=False)
    checked_shapes = example.check_shapes + (example.perf_shapes[:1] if device.type == "cuda" else ())
    is_good = True
    for shape, dtype in chosen(options, checked_shapes if options.case == "check" else example.perf_shapes):
        problems = list(example.problems(shape, dtype, device))
        if options.case == "check":
            for problem in problems:  # all of them, also after one that failed
                is_good &= check(problem, console)
            continue
        console.print(perf(problems))
        if example.more_perf is not None:
            console.print(example.more_perf(shape, dtype, device))
    return 0 if is_good else 1
