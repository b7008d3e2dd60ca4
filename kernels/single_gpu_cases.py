"""What the single-GPU examples do from their command line: compare results with torch, and times.

Knows problems as functions to call; knows nothing of how a kernel works or is tuned. Each example hands over one `Example`.
Imported after an example has chosen between GPU and interpreter, since triton reads that choice when it is imported.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table

from dist_tune import DistTuneError

Shape = tuple[int, ...]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Problem:
    """One result to compute at one shape."""

    name: str
    run: Callable[[triton.Config | None], torch.Tensor]
    """The result with a given config; with the one that the tuner chooses, if None."""
    configs: Sequence[triton.Config]
    """What is chosen from; the first one is what stands for an untuned kernel."""
    expected: Callable[[], torch.Tensor]
    """The right result, in float32."""
    by_torch: Callable[[], object]
    """The same by torch, for its time."""
    limit: float
    """The largest error that rounding explains, as `error_of` measures it."""
    n_bytes: int = 0
    """What has to be read and written at least; 0 where arithmetic is the limit."""
    n_flops: int = 0
    timed: Callable[[triton.Config | None], object] | None = None
    """What is timed in place of `run`."""

    def rate(self, latency_us: float) -> str:
        """GB/s, or TFLOP/s where that is the measure."""
        return f"{self.n_flops / latency_us * 1e-6:.1f} TFLOP/s" if self.n_flops else f"{self.n_bytes / latency_us * 1e-3:.0f} GB/s"


@dataclass(frozen=True, slots=True)
class Example:
    """A kernel file, as its command line needs it."""

    description: str
    sizes: tuple[str, ...]
    """Names of the numbers of a shape."""
    dtypes: tuple[str, ...]
    """The first one is the default."""
    check_shapes: tuple[Shape, ...]
    """Few and small ones, for the interpreter."""
    perf_shapes: tuple[Shape, ...]
    """The first one is checked, too, where there is a GPU."""
    problems: Callable[[Shape, torch.dtype, torch.device], Iterable[Problem]]
    more_perf: Callable[[Shape, torch.dtype, torch.device], Table] | None = None
    """Shown below the times of a shape."""


def error_of(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest |result - expected| / (|expected| + rms(expected)); inf for a NaN or a shape that is not expected."""
    if result.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    expected = expected.float()
    scale = (expected.abs() + expected.square().mean().sqrt()).clamp_min(torch.finfo(torch.float32).tiny)
    error = (result.float() - expected).abs() / scale
    return float(error.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def check(problem: Problem, console: Console) -> bool:
    """Whether the results of every config that fits the GPU and of the tuned kernel are right; a line for each."""
    is_good, expected = True, problem.expected()
    for config in (*problem.configs, None):
        try:
            result = problem.run(config)
            error, reason = error_of(result, expected), ""
            result.fill_(float("nan"))  # the next result may get this memory: not written is not right
        except triton.OutOfResources as refusal:  # not wrong: a tuner drops it
            console.print(f"check {problem.name} not run: {refusal} {config_text(config)}", markup=False, highlight=False)
            continue
        except DistTuneError as refusal:
            error, reason = float("inf"), f": {refusal}"
        verdict = "ok" if error <= problem.limit else f"FAILED, the limit is {problem.limit:.1e}{reason},"
        console.print(f"check {problem.name} error {error:.1e} {verdict} {config_text(config)}", markup=False, highlight=False)
        is_good &= error <= problem.limit
    return is_good


def config_text(config: triton.Config | None) -> str:
    """A config in a few words; "tuned" for None."""
    if config is None:
        return "tuned"
    return " ".join(f"{name}={value}" for name, value in config.all_kwargs().items() if value is not None)


def perf(problems: Iterable[Problem]) -> Table:
    """Microseconds of each problem: tuned, with the first config, by torch. Tunes whatever is not tuned yet."""
    # Imported here: checking results needs no clock.
    from dist_tune.measure import measure

    table = Table(title="us: mean without outliers, after warm-up")
    for heading in ("problem", "tuned us", "min us", "outliers", "first config us", "torch us", "rate", "x first config", "x torch"):
        table.add_column(heading, no_wrap=heading == "problem", justify="left" if heading == "problem" else "right")
    for problem in problems:
        run = problem.timed or problem.run
        run(None)  # tunes; from here on an ordinary call
        calls = (partial(run, None), partial(run, problem.configs[0]), problem.by_torch)
        tuned, first, torchs = (measure(call, n_warmup=5, num_iters=100) for call in calls)
        times = [f"{tuned.mean_us:.2f}", f"{tuned.min_us:.2f}", str(tuned.n_outliers), f"{first.mean_us:.2f}", f"{torchs.mean_us:.2f}"]
        ratios = [f"{other.mean_us / tuned.mean_us:.2f}" for other in (first, torchs)]
        table.add_row(problem.name, *times, problem.rate(tuned.mean_us), *ratios)
    return table


def random(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normally distributed, the same for the same shape: a failure can be run again."""
    generator = torch.Generator(device=device).manual_seed(sum(shape))
    return torch.randn(shape, dtype=dtype, device=device, generator=generator)


def parse_shape(text: str) -> Shape:
    """Sizes, with commas between them.

    Raises:
        ValueError: not integers, or negative ones.
    """
    shape = tuple(int(size) for size in text.split(","))
    if min(shape) < 0:
        raise ValueError(f"sizes cannot be negative, got {text}")
    return shape


def parsed(example: Example, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    names = ",".join(example.sizes)
    parser = argparse.ArgumentParser(description=example.description)
    parser.add_argument("--case", choices=["check", "perf"], default="check", help="compare results with torch, or times")
    parser.add_argument("--shape", type=parse_shape, action="append", metavar=names, help="may be given again")
    parser.add_argument("--dtype", choices=example.dtypes, action="append", help=f"may be given again; {example.dtypes[0]} if not given")
    options = parser.parse_args(argv)
    for shape in options.shape or ():
        if len(shape) != len(example.sizes):
            parser.error(f"--shape needs {len(example.sizes)} sizes, {names}; got {','.join(map(str, shape))}")
    if options.case == "perf" and not torch.cuda.is_available():
        parser.error("--case perf needs a GPU: the interpreter's times say nothing about one")
    return options


def chosen(example: Example, options: argparse.Namespace) -> Iterator[tuple[Shape, torch.dtype]]:
    """What to run the case at."""
    on_gpu = example.perf_shapes[:1] if torch.cuda.is_available() else ()
    shapes = options.shape or ((*example.check_shapes, *on_gpu) if options.case == "check" else example.perf_shapes)
    for shape in dict.fromkeys(shapes):
        for name in dict.fromkeys(options.dtype or example.dtypes[:1]):
            yield shape, DTYPES[name]


def main(example: Example, argv: Sequence[str] | None = None) -> int:
    """Run the case at every shape and dtype; 1 if any result was wrong."""
    options = parsed(example, argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # A terminal's width where there is none to ask: tables in logs stay in one piece.
    console = Console(width=None if sys.stdout.isatty() else 190, soft_wrap=True)
    name: Any = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, Triton interpreter"
    console.print(f"{name}, torch {torch.__version__}, triton {triton.__version__}", highlight=False)
    is_good = True
    for shape, dtype in chosen(example, options):
        problems = list(example.problems(shape, dtype, device))
        if options.case == "check":
            for problem in problems:  # all of them, whatever the first one says
                is_good &= check(problem, console)
            continue
        console.print(perf(problems))
        if example.more_perf is not None:
            console.print(example.more_perf(shape, dtype, device))
    return 0 if is_good else 1
