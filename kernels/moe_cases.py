"""The command line of both steps of a mixture of experts: check results, tune, compare with others.

Knows torchrun's ranks, operands and what is printed; a step, its reference and its competitors are functions of a `Layer`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import triton
from rich.console import Console
from rich.table import Table

from dist_tune import DistTuneError, TuningRecord, contextual_autotune
from kernels import harness
from kernels.ag_gemm import DTYPES, Shape
from kernels.grouped_gemm import grouped_gemm_kernel, multiply_rows
from kernels.moe_times import Bound, times_table
from kernels.routing import Routing, RowSorter, route, skewed_logits
from kernels.step_times import Contenders

N_CHECK_INPUTS = 5
SIZES = "M,N,K,experts,top_k"
CYCLES_PER_MS = 2_000_000


@dataclass(frozen=True, slots=True)
class Operands:
    """What a step is given."""

    a: torch.Tensor
    b: torch.Tensor
    """[E, rows, columns]: a matrix of weights for each expert."""
    routing: Routing
    """The same on all ranks."""


Run = Callable[[Operands, torch.Tensor], object]
"""One step: its operands, and where the result goes."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A step, as its command line needs it."""

    description: str
    script: str
    defaults: Shape
    """Sizes that --M completes."""
    check_shapes: Callable[[int, torch.device], list[Shape]]
    perf_shapes: list[Shape]
    split_axis: int
    """Which size of a shape the ranks share, besides M: 1 or 2."""
    operand_shapes: Callable[[Shape, int], tuple[Shape, Shape, Shape]]
    """Of a, of b, and of the result, for a shape and a number of ranks."""
    expected: Callable[[Operands], torch.Tensor]
    """The right result of this rank, in float32, by torch. Collective."""
    n_roundings: int
    """How often a number is rounded to the dtype of the operands on its way."""
    fixed_ways: Callable[[torch.device], Iterator[tuple[str, Run]]]
    """Steps with configs that between them take every path."""
    tunable: Callable[[], Callable[..., torch.Tensor]]
    """A new step whose knobs and product are tuned, of operands and `out`."""
    contenders: Callable[[Operands, Callable[[], object]], Contenders]
    bound: Callable[[Shape, int], Bound]


def tuned_by(function: Any, ctx: object) -> Callable[..., torch.Tensor]:
    """The step that a tuned function makes with its context, of operands, their routing and `out`."""

    def step(a: torch.Tensor, b: torch.Tensor, routing: Routing, out: torch.Tensor | None = None) -> torch.Tensor:
        result: torch.Tensor = function(a, b, routing, ctx, out=out)
        return result

    return step


def random_operands(layer: Layer, shape: Shape, dtype: torch.dtype, device: torch.device, skew: float) -> Operands:
    """Normally distributed, other ranks' differ; the routing is the same on all ranks. Collective."""
    n_ranks, (m, _, _, n_experts, top_k) = dist.get_world_size(), shape
    a_shape, b_shape, _ = layer.operand_shapes(shape, n_ranks)
    a, b = (torch.randn(sizes, device=device, dtype=dtype) for sizes in (a_shape, b_shape))
    logits = skewed_logits(m, n_experts, skew, device)
    dist.broadcast(logits, 0)
    return Operands(a, b, route(logits, top_k))


def sleep_ms(duration_ms: float, device: torch.device) -> None:
    """Let this rank sleep: its GPU, or the process where there is none."""
    if device.type == "cuda":
        torch.cuda._sleep(int(duration_ms * CYCLES_PER_MS))
    else:
        time.sleep(duration_ms * 1e-3)


def worst_error(layer: Layer, run: Run, shape: Shape, dtype: torch.dtype, options: argparse.Namespace, device: torch.device) -> float:
    """The worst relative error of steps on fresh inputs, MAX over ranks; inf for a NaN.

    Steps are queued without a host sync, into outputs full of NaN. Their `a` is the same memory, overwritten for the next step, and ranks
    take turns in being late.
    """
    inputs = [random_operands(layer, shape, dtype, device, options.skew) for _ in range(N_CHECK_INPUTS)]
    rounds = inputs * (4 if device.type == "cuda" else 1)
    _, _, out_shape = layer.operand_shapes(shape, dist.get_world_size())
    outs = [torch.full(out_shape, float("nan"), dtype=dtype, device=device) for _ in rounds]
    live = torch.empty_like(inputs[0].a)
    late_ms = options.straggler if options.straggler is not None else 0.5 if device.type == "cuda" else 0.0
    for i, (operands, out) in enumerate(zip(rounds, outs, strict=True)):
        if late_ms and i % dist.get_world_size() == dist.get_rank():
            sleep_ms(late_ms, device)
        live.copy_(operands.a)
        run(Operands(live, operands.b, operands.routing), out)
    errors = [harness.relative_error(out, layer.expected(operands)) for operands, out in zip(rounds, outs, strict=True)]
    return max(largest_over_ranks(error, device) for error in errors)


def largest_over_ranks(error: float, device: torch.device) -> float:
    """MAX over ranks; inf for a NaN. Collective."""
    worst = torch.tensor([error], device=device).nan_to_num(nan=float("inf"), posinf=float("inf"))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def limit_of(layer: Layer, dtype: torch.dtype) -> float:
    """The largest relative error that rounding explains: half a unit in the last place each time, one where the interpreter truncates."""
    return layer.n_roundings * torch.finfo(dtype).eps


def check(layer: Layer, shape: Shape, dtype: torch.dtype, options: argparse.Namespace, device: torch.device, console: Console) -> bool:
    """True if results are right with fixed configs and, where asked for, with tuned ones; prints a line for each."""
    limit, is_good = limit_of(layer, dtype), True
    ways = list(layer.fixed_ways(device))
    if options.autotune or not options.check:
        # Without a cache: a config found there would have been checked at another time.
        tuned: Any = contextual_autotune(is_dist=True, n_warmup=1, n_repeat=1, cache=False)(layer.tunable())
        ways.append(("tuned", lambda operands, out: tuned(operands.a, operands.b, operands.routing, out=out)))
    for way, run in ways:
        try:
            error, reason = worst_error(layer, run, shape, dtype, options, device), ""
        except DistTuneError as refusal:  # on all ranks, so all go on
            error, reason = float("inf"), str(refusal)
        how = harness.verdict(error, limit, reason)
        console.print(f"check {SIZES}={shape} {dtype} skew {options.skew:g} relative error {error:.2e} {how} {way}", markup=False)
        is_good &= error <= limit
    return is_good


def text_of(config: triton.Config) -> str:
    """The blocks of a config."""
    return " ".join(f"{name}={value}" for name, value in config.kwargs.items())


def tuned_alone(operands: Operands) -> triton.Config:
    """The config of the product that is the fastest by itself: all rows there, nothing beside it. Collective."""
    n_rows = operands.routing.experts.numel()
    c = operands.a.new_empty(n_rows, operands.b.shape[1])
    sorter = RowSorter([(0, n_rows)], len(operands.b), "expert", operands.a.device)
    by_expert = sorter.sort(operands.routing.experts)

    @contextual_autotune(is_dist=True, n_warmup=3, n_repeat=5, cache=False)
    def product() -> None:
        multiply_rows(operands.a, operands.b, c, by_expert)

    product()
    best: triton.Config = grouped_gemm_kernel.best_config
    return best


def tune(layer: Layer, operands: Operands, console: Console) -> tuple[Callable[[], torch.Tensor], bool]:
    """Tune knobs and product together, show how that went, and return the tuned step, and whether its result is right. Collective."""
    # A few runs are enough of the interpreter, whose times say nothing about GPUs.
    n_warmup, n_repeat = (3, 5) if operands.a.device.type == "cuda" else (1, 1)

    @contextual_autotune(is_dist=True, n_warmup=n_warmup, n_repeat=n_repeat)
    def step(a: torch.Tensor, b: torch.Tensor, routing: Routing) -> torch.Tensor:
        return tunable(a, b, routing)

    tunable = layer.tunable()
    result = step(operands.a, operands.b, operands.routing)
    for record in step.records:
        console.print(record_table(record))
    error = largest_over_ranks(harness.relative_error(result, layer.expected(operands)), operands.a.device)
    how = harness.verdict(error, limit_of(layer, operands.a.dtype))
    console.print(f"relative error {error:.2e} {how} tuned; why each choice: .autotune_logs/rank-<i>.log", markup=False)
    return lambda: step(operands.a, operands.b, operands.routing), error <= limit_of(layer, operands.a.dtype)


def record_table(record: TuningRecord) -> Table:
    """The candidates of a site, fastest first."""
    spent = "from the cache" if record.is_recalled else f"{record.n_replays} replays, {record.seconds:.2f} s"
    table = Table("", "agreed ms", "step ms", "failure", "config", title=f"{record.kernel}: {spent}")
    for candidate in sorted(record.candidates, key=lambda each: float("inf") if each.latency_ms is None else each.latency_ms):
        times = [f"{ms:.4f}" if ms is not None else "-" for ms in (candidate.latency_ms, candidate.closure_ms)]
        config = candidate.config.split(" pre_hook=")[0]
        table.add_row("*" if candidate.index == record.winner else "", *times, candidate.failure or "", config)
    return table


def scaled_down(shape: Shape, n_ranks: int) -> Shape:
    """A shape that the interpreter runs in seconds."""
    limits = (32 * n_ranks, 32 * n_ranks, 32 * n_ranks, 4, 2)
    return tuple(min(size, limit) for size, limit in zip(shape, limits, strict=True))


def chosen_shapes(layer: Layer, options: argparse.Namespace, device: torch.device, console: Console) -> list[Shape]:
    """--shape as it is, the sizes of the other forms scaled down where there is no GPU, or else the shapes of the case."""
    n_ranks = dist.get_world_size()
    named = tuple(options.sizes_given) or (() if options.M is None else (options.M, *layer.defaults[1:]))
    if options.shape or named:
        shapes = list(options.shape or [])
        if named and device.type == "cpu":
            small = scaled_down(named, n_ranks)
            if small != named:
                text = (
                    f"no GPU: the interpreter would take hours for {SIZES} = {named}, so this runs {small}; --shape runs sizes as they are"
                )
                console.print(text, markup=False)
            named = small
        return [*shapes, *([named] if named else [])]
    return layer.perf_shapes if options.case != "check" and device.type == "cuda" else layer.check_shapes(n_ranks, device)


def parser_of(layer: Layer) -> argparse.ArgumentParser:
    """The options of a layer's command line."""
    parser = harness.command_line(layer.description, sizes=SIZES, dtypes=sorted(DTYPES), script=layer.script)
    parser.add_argument("sizes_given", type=int, nargs="*", metavar="SIZE", help="M N K experts top_k; on a CPU scaled down")
    parser.add_argument("--M", type=int, help=f"with N,K,experts,top_k = {','.join(map(str, layer.defaults[1:]))}; on a CPU scaled down")
    case_help = "compare results, tune, or compare times; if not given: check, or with --autotune times, or tune on a CPU"
    parser.add_argument("--case", choices=["check", "tune", "perf"], default="", help=case_help)
    parser.add_argument("--check", action="store_true", help="--case check")
    parser.add_argument("--autotune", action="store_true", help="tune; without it --check tunes nothing")
    parser.add_argument("--skew", type=float, default=0.0, metavar="S", help="Zipf exponent of the experts' shares; 0: equal shares")
    parser.add_argument("--straggler", type=float, metavar="MS", help="for check: one rank after the other starts so many ms late")
    return parser


def parsed(layer: Layer, argv: list[str] | None = None) -> argparse.Namespace:
    """The options given; ends the program with the reason where they do not fit together or cannot run here."""
    parser = parser_of(layer)
    options = harness.parsed(parser, argv)
    if len(options.sizes_given) not in (0, 5):
        parser.error(f"need five sizes, M N K experts top_k; got {' '.join(map(str, options.sizes_given))}")
    if options.check and options.case not in ("", "check"):
        parser.error(f"--check is --case check; got --case {options.case}, too")
    if not options.case:
        timed = "perf" if torch.cuda.is_available() else "tune"
        options.case = timed if options.autotune and not options.check else "check"
    return options


def check_sizes(layer: Layer, shape: Shape, n_ranks: int) -> None:
    """Raise if ranks cannot share a shape.

    Raises:
        ValueError: with the sizes.
    """
    name, split, n_experts, top_k = SIZES[2 * layer.split_axis], shape[layer.split_axis], *shape[3:]
    if shape[0] % n_ranks or split % n_ranks or not 1 <= top_k <= n_experts:
        given = ",".join(map(str, shape))
        raise ValueError(f"M and {name} must be multiples of the {n_ranks} ranks, and top_k from 1 to experts; got --shape {given}")


def main(layer: Layer) -> int:
    """Run the case on every shape and dtype, and leave; 1 if any failed."""
    options = parsed(layer)
    device, console = harness.join_ranks()
    console.soft_wrap = True
    options.shape = chosen_shapes(layer, options, device, console)
    is_good = True
    try:
        for shape, dtype in harness.chosen(options, ()):
            check_sizes(layer, shape, dist.get_world_size())
            if options.case == "check":
                is_good &= check(layer, shape, dtype, options, device, console)
                continue
            operands = random_operands(layer, shape, dtype, device, options.skew)
            told = f": {layer.bound(shape, dist.get_world_size())}" if device.type == "cuda" else ""
            console.print(f"{SIZES}={shape} {dtype} skew {options.skew:g}{told}", markup=False)
            step, is_right = tune(layer, operands, console)
            is_good &= is_right
            if options.case == "perf":
                console.print(times_table(shape, layer.contenders(operands, step), layer.bound(shape, dist.get_world_size())))
        dist.barrier()  # a rank that leaves frees memory that its peers may still write to
    finally:
        dist.destroy_process_group()
    return 0 if is_good else 1
