"""Command lines of kernels and of steps between ranks: options, checks against a reference,
tunings, and tables of times.

Knows a kernel as `Problem`s and a step of several ranks as a `Step`; knows nothing of how one works
or is tuned. Times are medians, MAX over ranks, compared only with others of the same method and
run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import triton
from rich.console import Console
from rich.table import Table

from dist_tune import DistTuneError, TuningRecord

Shape = tuple[int, ...]
Contenders = dict[str, Callable[[], object]]
Run = Callable[..., object]
"""A step of its operands and `out`, where the result goes."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDTH = 190
"""Columns of a table where there is no terminal: tables in logs stay in one piece."""
TUNED, PRODUCT, PRODUCT_ALONE = "tuned", "product", "product tuned alone"
LINK_BYTES = 367e9
"""What a copy engine of an H200 moves from one peer to another in a second (measured)."""
N_CHECK_INPUTS = 5
STRAGGLER_S = 0.005
"""How late a straggler begins each step: longer than a step on a GPU, so that its peers run ahead
as far as they may.
"""
CYCLES_PER_S = 2_000_000_000
HEAD_START_CYCLES = 2_000_000
"""About a millisecond: longer than a host takes to queue any contender."""
SUSTAINED_MS = 100.0
"""How long a contender runs before it is timed back to back: its power draw, not its predecessor's,
sets the clocks.
"""


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """||result - expected|| / ||expected||, in float32; NaN where the result has one."""
    return float((result.float() - expected.float()).norm() / expected.float().norm())


def largest_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest |result - expected| / (|expected| + rms(expected)); inf for a NaN or a shape that
    is not expected.
    """
    if result.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    expected = expected.float()
    scale = (expected.abs() + expected.square().mean().sqrt()).clamp_min(
        torch.finfo(torch.float32).tiny
    )
    error = (result.float() - expected).abs() / scale
    return float(error.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


@dataclass(frozen=True, slots=True)
class Problem:
    """One result to compute at one shape on one GPU."""

    name: str
    run: Callable[[Any], torch.Tensor]
    """The result with a given config; with the one that the tuner chooses, if None."""
    configs: Sequence[Any]
    """The search space, or what is checked of it; its first config stands for an untuned kernel.

    Empty: not timed.
    """
    expected: Callable[[], torch.Tensor]
    """The right result, in float32."""
    limit: float
    """The largest error that rounding explains."""
    others: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    """What computes the same."""
    n_bytes: int = 0
    """Bytes to read and write at least; 0 where arithmetic is the limit."""
    n_flops: int = 0
    error: Callable[[torch.Tensor, torch.Tensor], float] = largest_error


@dataclass(frozen=True, slots=True)
class Kernel:
    """A single-GPU kernel, as its command line needs it; the first dtype is the default, few and
    small shapes are for the interpreter.
    """

    description: str
    problems: Callable[[Shape, torch.dtype, torch.device], Iterable[Problem]]
    check_shapes: tuple[Shape, ...]
    perf_shapes: tuple[Shape, ...]
    sizes: str = "M,N,K"
    dtypes: tuple[str, ...] = ("bf16", "fp16")
    reason_to_skip: Callable[[], str] = str
    """Why the kernel cannot run here; empty if it can."""


class Step:
    """A step of several ranks, as its command line needs it."""

    description: str
    sizes, dtypes = "M,N,K", ("bf16", "fp16")
    tuners: tuple[str, ...] = ("function",)
    """The first one is the default."""
    shared: tuple[int, ...]
    """The sizes that ranks share, by their places."""
    small: tuple[Shape, ...] = ((37, 40, 72), (70, 35, 45), (1, 8, 8))
    """Sizes of one rank's share that no block divides, for a CPU, where the last ones are tuned."""
    large: tuple[Shape, ...] = ((1037, 1000, 1000), (333, 1003, 1001), (1, 8, 8))
    """The same for a GPU, where the first of `perf_shapes` is checked, too."""
    perf_shapes: tuple[Shape, ...]
    n_roundings = 1
    """How often a number is rounded on its way, at most."""
    reason_to_skip = str
    short_form: Shape = ()
    """Sizes that --M completes; with them sizes may stand as they are, and the experts' shares be
    skewed.
    """

    def operands(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, options: argparse.Namespace
    ) -> tuple[Any, ...]:
        """Those of this rank; the first one is overwritten between steps. Collective."""
        raise NotImplementedError

    def expected(self, operands: Any) -> torch.Tensor:
        """The right result of this rank, in float32. Collective."""
        raise NotImplementedError

    def ways(
        self, device: torch.device, options: argparse.Namespace
    ) -> Iterator[tuple[str, int, Run]]:
        """Steps that between them take every path: name, how often a number is rounded on its way,
        and the step.
        """
        raise NotImplementedError

    def tuned(
        self, tuner: str, config: Any = None
    ) -> tuple[Callable[..., torch.Tensor], list[TuningRecord]]:
        """The step as one of `tuners` tunes it, and the records.

        With `config` the product uses it, and only the rest is tuned.
        """
        raise NotImplementedError

    def fastest_product(self, operands: Any) -> Any:
        """The config with which the product alone, all of its operands there, is the fastest on the
        slowest rank. Collective.
        """
        raise NotImplementedError

    def contenders(self, run: Callable[..., torch.Tensor], operands: Any) -> Contenders:
        """The tuned step first, the product alone, the exchange alone, and what computes the same.

        Collective.
        """
        raise NotImplementedError

    def work(self, shape: Shape, n_ranks: int) -> tuple[int, int]:
        """Of a rank: FLOP, and bytes sent at least."""
        raise NotImplementedError

    def shapes(self, case: str, n_ranks: int, device: torch.device) -> tuple[Shape, ...]:
        """Those of a case, where none is given."""
        is_gpu = device.type == "cuda"
        if case != "check" and is_gpu:
            return self.perf_shapes
        own = self.large if is_gpu else self.small
        whole = (
            tuple(
                size * n_ranks if axis in self.shared else size for axis, size in enumerate(shape)
            )
            for shape in own
        )
        found = (*(self.perf_shapes[:1] if is_gpu else ()), *whole)
        return found if case == "check" else found[-1:]


def parse_shape(text: str) -> Shape:
    """Sizes, with commas between them.

    Raises:
        ValueError: not integers, or negative ones.
    """
    shape = tuple(int(size) for size in text.split(","))
    if min(shape) < 0:
        raise ValueError(f"sizes cannot be negative, got {text}")
    return shape


def command_line(
    description: str, *, sizes: str = "M,N,K", dtypes: Sequence[str] = (), script: str = ""
) -> argparse.ArgumentParser:
    """A parser with --shape and, where there is a choice, --dtype; `script` names a file that needs
    ranks. For `parsed`.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--shape",
        type=parse_shape,
        action="extend",
        nargs="+",
        metavar=sizes,
        help="may be given again",
    )
    if dtypes:
        parser.add_argument(
            "--dtype",
            choices=dtypes,
            action="append",
            help=f"may be given again; {dtypes[0]} if not given",
        )
    parser.set_defaults(sizes=sizes, dtypes=dtypes[:1], script=script, case="")
    return parser


def add_cases(parser: argparse.ArgumentParser, *more: str) -> None:
    """Give a parser --case: check, those of `more`, or perf."""
    parser.add_argument(
        "--case",
        choices=["check", *more, "perf"],
        default="check",
        help="compare results, or times; check if not given",
    )


def parsed(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """The options given; ends the program with the reason where the case cannot run here."""
    options = parser.parse_args(argv)
    n_sizes, script = options.sizes.count(",") + 1, options.script
    for shape in options.shape or ():
        if len(shape) != n_sizes:
            parser.error(
                f"--shape needs {n_sizes} sizes, {options.sizes}; got {','.join(map(str, shape))}"
            )
    if script and "LOCAL_RANK" not in os.environ:
        parser.error(
            f"needs ranks: torchrun --nproc_per_node=2 {script} ..., or launch/launch.sh"
            f" {script} ..."
        )
    if options.case == "perf" and not torch.cuda.is_available():
        need, them = ("GPUs", "them") if script else ("a GPU", "one")
        parser.error(f"--case perf needs {need}: the interpreter's times say nothing about {them}")
    return options


def chosen(
    options: argparse.Namespace, shapes: Iterable[Shape]
) -> Iterator[tuple[Shape, torch.dtype]]:
    """Each shape that was given, or else each of `shapes`, with each dtype; none of them twice."""
    for shape in dict.fromkeys(options.shape or shapes):
        for name in dict.fromkeys(options.dtype or options.dtypes):
            yield shape, DTYPES[name]


def versions(without_gpu: str = "CPU, Triton interpreter") -> str:
    """The device, and the versions of torch and triton."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else without_gpu
    return f"{device}, torch {torch.__version__}, triton {triton.__version__}"


def console_of(width: int = WIDTH, *, quiet: bool = False) -> Console:
    """A console as wide as its terminal, or else `width` columns, which leaves longer lines in one
    piece.
    """
    console = Console(
        width=None if sys.stdout.isatty() else width, quiet=quiet, highlight=False, markup=False
    )
    console.soft_wrap = True
    return console


def join_ranks(width: int = WIDTH) -> tuple[torch.device, Console]:
    """Join the ranks that torchrun started: this rank's device, and a console that writes on rank 0
    alone.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        device_id=device if device.type == "cuda" else None,
    )
    torch.manual_seed(dist.get_rank())
    # torch 2.13 has a new name for it, which 2.11 has not.
    warnings.filterwarnings(
        "ignore", message=".*all_gather_into_tensor.* is deprecated", category=FutureWarning
    )
    console = console_of(width, quiet=dist.get_rank() != 0)
    console.print(f"{dist.get_world_size()} x {versions()}")
    return device, console


def verdict(error: float, limit: float, reason: str = "") -> str:
    """The end of a check's line: ok, or the limit that the error is above, and the reason if there
    is one.
    """
    if error <= limit:
        return "ok"
    cause = f": {reason}" if reason else ""
    return f"FAILED, the limit is {limit:.1e}{cause},"


def config_text(config: Any) -> str:
    """A config in a few words; "tuned" for None."""
    if config is None:
        return "tuned"
    choices = config if isinstance(config, dict) else config.all_kwargs()
    return " ".join(f"{name}={value}" for name, value in choices.items() if value is not None)


def without_hook(config: str) -> str:
    """A described config without its hook."""
    return re.sub(r" pre_hook=[\w.]+", "", config)


def times_table(
    name: str, us_by_method: dict[str, dict[str, float]], n_flops: int, n_bytes: int = 0
) -> Table:
    """A line for each method and contender, with how many times as long as the tuned one it takes;
    TFLOP/s, or GB/s without arithmetic.
    """
    table = Table(
        "problem",
        "method",
        "contender",
        "us",
        "x tuned",
        "rate",
        title="us: medians, MAX over ranks where there are some",
    )
    for method, us in us_by_method.items():
        for contender, each in us.items():
            rate = (
                f"{n_flops / each * 1e-6:.1f} TFLOP/s"
                if n_flops
                else f"{n_bytes / each * 1e-3:.0f} GB/s"
            )
            table.add_row(name, method, contender, f"{each:.2f}", f"{each / us[TUNED]:.2f}", rate)
    return table


Way = tuple[str, float, Callable[[], float]]
"""What is checked: its name, the largest error that rounding explains, and a run that returns its
error.
"""


def check(name: str, ways: Iterable[Way], console: Console) -> bool:
    """True if the results of all ways that fit the GPU are right; prints a line for each."""
    is_good = True
    for way, limit, run in ways:
        try:
            error, reason = run(), ""
        except triton.OutOfResources as refusal:  # not wrong: a tuner drops it
            console.print(f"check {name} not run: {refusal} {way}")
            continue
        except DistTuneError as refusal:  # between ranks on all of them, so all go on
            error, reason = float("inf"), str(refusal)
        console.print(f"check {name} error {error:.2e} {verdict(error, limit, reason)} {way}")
        is_good &= error <= limit
    return is_good


def ways_of(problem: Problem) -> Iterator[Way]:
    """Every config of a problem, and the tuned kernel."""
    expected = problem.expected()

    def error(config: Any) -> float:
        result = problem.run(config)
        found = problem.error(result, expected)
        result.fill_(float("nan"))  # the next result may get this memory: not written is not right
        return found

    for config in (*problem.configs, None):
        yield config_text(config), problem.limit, partial(error, config)


def perf(problem: Problem) -> Table:
    """Microseconds of a problem: tuned, with the first config, by others.

    Tunes it if it is not tuned yet.
    """
    from dist_tune.measure import measure  # here: checking results needs no clock

    run, first = problem.run, problem.configs[0]
    runs: Contenders = {
        TUNED: lambda: run(None),
        "first config": lambda: run(first),
        **problem.others,
    }
    for each in runs.values():
        each()  # tunes; from here on an ordinary call
    cold = {name: measure(each, n_warmup=5, num_iters=100).median_us for name, each in runs.items()}
    methods = {"host ahead, cold L2": cold}
    if torch.cuda.is_available():
        n_warmup = {name: int(SUSTAINED_MS * 1e3 / us) + 1 for name, us in cold.items()}
        methods["back to back"] = {
            name: 1e3 * ms for name, ms in back_to_back_ms(runs, n_warmup).items()
        }
    return times_table(problem.name, methods, problem.n_flops, problem.n_bytes)


def worst_over_ranks(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error, MAX over ranks; inf for a NaN. Collective."""
    error = torch.tensor([relative_error(result, expected)], device=result.device)
    worst = error.nan_to_num(nan=float("inf"), posinf=float("inf"))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def straggle(straggler: int | None, device: torch.device, i: int) -> None:
    """Sleep before step `i`: on the straggler, or on a GPU on each rank in turn, so that peers run
    ahead.
    """
    if straggler is None and device.type == "cuda":
        straggler = i % dist.get_world_size()
    if straggler != dist.get_rank():
        return
    if device.type == "cuda":
        torch.cuda._sleep(int(STRAGGLER_S * CYCLES_PER_S))
    else:
        time.sleep(STRAGGLER_S * 10)


def worst_error(
    step: Step,
    run: Run,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    options: argparse.Namespace,
) -> float:
    """The worst relative error of steps on fresh inputs, MAX over ranks; inf for a NaN.

    Steps are queued without a host sync, into outputs full of NaN. Their first operand is the same
    memory, overwritten for the next step: a copy engine still at the last one would send this one.
    """
    inputs = [step.operands(shape, dtype, device, options) for _ in range(N_CHECK_INPUTS)]
    live = torch.empty_like(inputs[0][0])
    expected = [step.expected(operands) for operands in inputs]
    n_steps = N_CHECK_INPUTS
    if device.type == "cuda":
        n_steps *= 4
    outs = [torch.full_like(expected[0], float("nan"), dtype=dtype) for _ in range(n_steps)]
    for i, out in enumerate(outs):
        first, *others = inputs[i % N_CHECK_INPUTS]
        straggle(options.straggler, device, i)
        live.copy_(first)
        run(live, *others, out=out)
    return max(worst_over_ranks(out, expected[i % N_CHECK_INPUTS]) for i, out in enumerate(outs))


def tune_step(
    step: Step, operands: tuple[Any, ...], tuner: str, console: Console
) -> tuple[Callable[..., torch.Tensor], bool]:
    """Tune a step, show how that went, and return it, and whether its result is right on all ranks,
    with the same winners.
    """
    run, records = step.tuned(tuner)
    error = worst_over_ranks(run(*operands), step.expected(operands))
    limit = step.n_roundings * torch.finfo(operands[0].dtype).eps
    for record in records:
        spent = f"{record.n_replays} replays, {record.seconds:.2f} s"
        if record.is_recalled:
            spent = (
                f"from the cache, tuned {record.tuned_at:%Y-%m-%d %H:%M} UTC in {spent};"
                " DIST_TUNE_ALWAYS_TUNE=1 tunes anew"
            )
        console.print(
            f"winner of {record.kernel}: {without_hook(record.best.config)}", spent, sep="\n"
        )
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, [record.best.config for record in records])
    is_same = all(each == by_rank[0] for each in by_rank)
    console.print(
        f"the same on all {len(by_rank)} ranks: {is_same}; why: .autotune_logs/rank-<i>.log; all"
        " candidates: dist-tune show"
    )
    console.print(f"relative error {error:.1e} {verdict(error, limit)} tuned")
    return run, is_same and error <= limit


def perf_step(step: Step, shape: Shape, name: str, contenders: Contenders) -> Table:
    """The times of all contenders by both methods, beside the longer of the product and the way
    over NVLink.
    """
    for run in contenders.values():  # also tunes what is not tuned yet
        for _ in range(3):
            run()
    aligned = aligned_ms(contenders)
    sustained = back_to_back_ms(
        contenders, {name: int(SUSTAINED_MS / ms) + 1 for name, ms in aligned.items()}
    )
    n_flops, n_link_bytes = step.work(shape, dist.get_world_size())
    methods = {}
    for method, ms in {"aligned, host ahead": aligned, "back to back": sustained}.items():
        bound_us = max(1e3 * ms[PRODUCT], 1e6 * n_link_bytes / LINK_BYTES)
        methods[method] = {
            **{name: 1e3 * each for name, each in ms.items()},
            "bound: product or NVLink": bound_us,
        }
    return times_table(name, methods, n_flops)


def main(program: Kernel | Step, script: str, argv: Sequence[str] | None = None) -> int:
    """Run the case of a program at every shape and dtype; 1 if any result was wrong, 77 where it
    cannot run.
    """
    step = program if isinstance(program, Step) else None
    about = f"{program.description}: check, tune, compare."
    parser = command_line(
        about, sizes=program.sizes, dtypes=program.dtypes, script=script if step else ""
    )
    add_cases(parser, "tune")
    if step:
        add_step_options(parser, step)
    parser.parse_args(argv)  # --help and mistakes come first
    reason = program.reason_to_skip()
    if reason:
        print(f"skipped: {reason}")
        return 77  # test harnesses (automake, meson) take it for a skip
    options = parsed(parser, argv)
    if step:
        take_short_form(parser, options, step)
        return run_step(step, options)
    return run_kernel(program, options)  # type: ignore[arg-type]  # no step


def run_kernel(kernel: Kernel, options: argparse.Namespace) -> int:
    """Check, tune or time a kernel of one GPU; 1 if any result was wrong."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console, is_good = console_of(), True
    console.print(versions())
    shapes = kernel.check_shapes + (kernel.perf_shapes[:1] if device.type == "cuda" else ())
    for shape, dtype in chosen(options, kernel.perf_shapes if options.case == "perf" else shapes):
        # All of them, also after one that failed.
        for problem in kernel.problems(shape, dtype, device):
            if options.case == "check":
                is_good &= check(problem.name, ways_of(problem), console)
            elif problem.configs and options.case == "perf":
                console.print(perf(problem))
            elif problem.configs:
                problem.run(None)
                console.print(f"tuned {problem.name}; dist-tune show has its candidates")
    return 0 if is_good else 1


def run_step(step: Step, options: argparse.Namespace) -> int:
    """Check, tune or time a step on all ranks, and leave; 1 if any result was wrong."""
    device, console = join_ranks()
    n_ranks, is_good = dist.get_world_size(), True
    try:
        for shape, dtype in chosen(options, step.shapes(options.case, n_ranks, device)):
            if any(shape[axis] % n_ranks for axis in step.shared):
                names = " and ".join(step.sizes.split(",")[axis] for axis in step.shared)
                given = ",".join(map(str, shape))
                raise ValueError(
                    f"{names} must be multiples of the {n_ranks} ranks, got --shape {given}"
                )
            if options.case == "check":
                # Sums are in float32: a number is rounded by half a unit in the last place, or one
                # where it is cut off.
                ways = (
                    (
                        way,
                        n_roundings * torch.finfo(dtype).eps,
                        partial(worst_error, step, run, shape, dtype, device, options),
                    )
                    for way, n_roundings, run in step.ways(device, options)
                )
                is_good &= check(f"{step.sizes}={shape} {dtype} relative", ways, console)
                continue
            operands = step.operands(shape, dtype, device, options)
            run, is_right = tune_step(step, operands, options.tuner, console)
            is_good &= is_right
            if options.case == "perf":
                contenders = step.contenders(run, operands)
                alone = step.fastest_product(operands)
                by_product, _ = step.tuned(options.tuner, alone)
                contenders[PRODUCT_ALONE] = partial(by_product, *operands)
                console.print(f"fastest product alone: {config_text(alone)}")
                console.print(perf_step(step, shape, f"{step.sizes}={shape} {dtype}", contenders))
        dist.barrier()  # a rank that leaves frees memory that its peers may still write to
    finally:
        dist.destroy_process_group()
    return 0 if is_good else 1


def add_step_options(parser: argparse.ArgumentParser, step: Step) -> None:
    """The options of a step, and of one of a mixture of experts."""
    parser.add_argument(
        "--tuner",
        choices=step.tuners,
        default=step.tuners[0],
        help="for tune and perf: all of it, or the product alone",
    )
    parser.add_argument(
        "--straggler", type=int, metavar="RANK", help="for check: this rank sleeps before each step"
    )
    parser.set_defaults(given=(), M=None, check=False, autotune=False)
    if step.short_form:
        parser.add_argument(
            "given",
            type=int,
            nargs="*",
            metavar="SIZE",
            help=f"{step.sizes.replace(',', ' ')}; on a CPU scaled down",
        )
        parser.add_argument(
            "--M",
            type=int,
            help=(
                f"with the other sizes {','.join(map(str, step.short_form[1:]))}; on a CPU scaled"
                " down"
            ),
        )
        parser.add_argument("--check", action="store_true", help="--case check")
        parser.add_argument(
            "--autotune",
            action="store_true",
            help="tune, and compare times on GPUs; with --check: check the tuned step, too",
        )
        parser.add_argument(
            "--skew",
            type=float,
            default=0.0,
            metavar="S",
            help="Zipf exponent of the experts' shares; 0: equal shares",
        )


def take_short_form(
    parser: argparse.ArgumentParser, options: argparse.Namespace, step: Step
) -> None:
    """Make --case and --shape of the short form; sizes are scaled down where there is no GPU."""
    if len(options.given) not in (0, 5):
        parser.error(
            f"need five sizes, {step.sizes.replace(',', ' ')}; got"
            f" {' '.join(map(str, options.given))}"
        )
    if options.autotune and not options.check:
        options.case = "perf" if torch.cuda.is_available() else "tune"
    named = tuple(options.given) or (() if options.M is None else (options.M, *step.short_form[1:]))
    if named and not torch.cuda.is_available():
        n_rows = 32 * int(os.environ["WORLD_SIZE"])
        small = tuple(map(min, named, (n_rows, n_rows, n_rows, 4, 2)))
        if small != named and os.environ["RANK"] == "0":
            print(
                f"no GPU: the interpreter would take hours for {named}, so this runs {small};"
                " --shape runs sizes as they are"
            )
        named = small
    if named:
        options.shape = [*(options.shape or ()), named]


def aligned_ms(
    runs: Contenders, n_rounds: int = 30, head_start_cycles: int = HEAD_START_CYCLES
) -> dict[str, float]:
    """Every call starts on all ranks at once (behind a tiny all-reduce) and, with head start
    enough, is queued before it starts.
    """
    samples: dict[str, list[float]] = {name: [] for name in runs}
    tiny = torch.ones(1, device="cuda")
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # Contenders take turns, so that a GPU growing hot slows them all alike.
    for _ in range(n_rounds):
        for name, run in runs.items():
            torch.cuda._sleep(head_start_cycles)
            dist.all_reduce(tiny)
            start.record()
            run()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end))
    return slowest_medians_ms(samples)


def back_to_back_ms(runs: Contenders, n_warmup: dict[str, int]) -> dict[str, float]:
    """Calls follow one another as fast as host and GPU can; the time is from one call's end to the
    next one's.
    """
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(3):
        for name, run in runs.items():
            if dist.is_initialized():
                dist.barrier()
            for _ in range(n_warmup[name]):
                run()
            ends = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
            for end in ends:
                run()
                end.record()
            torch.cuda.synchronize()
            samples[name] += [
                earlier.elapsed_time(later) for earlier, later in itertools.pairwise(ends)
            ]
    return slowest_medians_ms(samples)


def slowest_medians_ms(samples: dict[str, list[float]]) -> dict[str, float]:
    """The median of each contender on the rank where it is largest.

    Collective where there are ranks.
    """
    medians = torch.tensor([statistics.median(times) for times in samples.values()], device="cuda")
    if dist.is_initialized():
        dist.all_reduce(medians, dist.ReduceOp.MAX)
    return dict(zip(samples, medians.tolist(), strict=True))
