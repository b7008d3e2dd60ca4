"""The command lines of kernels/gemm_rs.py and kernels/gemm_allreduce.py: check results, tune, compare with others.

Knows torchrun's ranks and what is printed; knows nothing of how the steps work, nor of how they are tuned.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from dist_tune import DistTuneError, autotune, matches
from kernels import gemm_allreduce, gemm_rs, harness, push_gemm, step_times
from kernels.ag_gemm import DTYPES, Shape
from kernels.partials import Exchange
from kernels.row_parallel_tuners import TUNERS, Step, chosen_by, tuned_alone, tuned_step

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""One step: this rank's columns of A and B, and where C goes."""
N_CHECK_INPUTS = 5
STRAGGLER_S = 0.005
"""How late a straggler begins each step: longer than a step on a GPU, so that its peers run ahead as far as they may."""
CYCLES_PER_S = 2_000_000_000


STEPS = {
    "gemm_rs": Step(
        description="GEMM-ReduceScatter",
        context=gemm_rs.GemmReduceScatter,
        module=gemm_rs,
        is_scattered=True,
        checked=[
            {"exchange": each}
            for each in (
                *(Exchange(), Exchange("pull"), Exchange("copy", "inside", 0, 64)),
                *(Exchange("copy", "behind", 0, 64), Exchange("push", "beside", 4, 128)),
            )
        ],
        perf_shapes=((4096, 4096, 11008), (8192, 8192, 28672)),
        contenders=step_times.reduce_scatter_contenders,
        sent_bytes=step_times.reduce_scatter_bytes,
    ),
    "gemm_allreduce": Step(
        description="GEMM-AllReduce",
        context=gemm_allreduce.GemmAllReduce,
        module=gemm_allreduce,
        is_scattered=False,
        checked=[
            *({"algorithm": "one_shot", "exchange": Exchange(move, "behind", 0, 8)} for move in ("push", "pull")),
            {"algorithm": "two_shot", "exchange": Exchange()},
            {"algorithm": "two_shot", "exchange": Exchange("copy", "inside", 0, 64)},
            {"algorithm": "two_shot", "exchange": Exchange("copy", "beside", 8, 64)},
        ],
        perf_shapes=((16, 8192, 8192), (128, 8192, 8192), (2048, 8192, 8192)),
        contenders=step_times.all_reduce_contenders,
        sent_bytes=step_times.all_reduce_bytes,
    ),
}


def random_operands(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's columns of A and B, normally distributed; other ranks' differ."""
    (m, n, k), n_ranks = shape, dist.get_world_size()
    if k % n_ranks:
        raise ValueError(f"K must be a multiple of the {n_ranks} ranks, got --shape {m},{n},{k}")
    return torch.randn(m, k // n_ranks, device=device, dtype=dtype), torch.randn(n, k // n_ranks, device=device, dtype=dtype)


def product(step: Step, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What a step is to return, in float32. Collective."""
    c = a.float() @ b.float().T
    dist.all_reduce(c)
    return c.chunk(dist.get_world_size())[dist.get_rank()] if step.is_scattered else c


def relative_error(c: torch.Tensor, expected: torch.Tensor) -> float:
    """||C - expected|| / ||expected||, in float32, MAX over ranks; inf where a rank has a NaN."""
    worst = torch.tensor([harness.relative_error(c, expected)], device=c.device).nan_to_num(nan=float("inf"), posinf=float("inf"))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def straggle(options: argparse.Namespace, device: torch.device, i: int) -> None:
    """Sleep before a step: on the straggler, or in turn on each rank of a GPU check, so that peers run ahead."""
    rank = dist.get_rank()
    if device.type == "cpu":
        time.sleep(STRAGGLER_S * 10 * (options.straggler == rank))
    elif options.straggler == rank or (options.straggler is None and (i + rank) % 3 == 0):
        torch.cuda._sleep(int(STRAGGLER_S * CYCLES_PER_S))


def worst_error(step: Step, run: Run, shape: Shape, dtype: torch.dtype, device: torch.device, options: argparse.Namespace) -> float:
    """The worst relative error of steps on fresh inputs, queued without a host sync and with ranks out of step."""
    inputs = [random_operands(shape, dtype, device) for _ in range(N_CHECK_INPUTS)]
    references = [product(step, a, b) for a, b in inputs]
    a_live = torch.empty_like(inputs[0][0])
    n_rounds = len(inputs) * (4 if device.type == "cuda" else 1)
    outs = [torch.full((step.rows(shape[0]), shape[1]), float("nan"), dtype=dtype, device=device) for _ in range(n_rounds)]
    for i, out in enumerate(outs):
        a, b = inputs[i % len(inputs)]
        straggle(options, device, i)
        a_live.copy_(a)  # the same memory for every step's A
        run(a_live, b, out)
    return max(relative_error(out, references[i % len(inputs)]) for i, out in enumerate(outs))


def ways_to_check(step: Step, device: torch.device) -> Iterator[tuple[str, bool, Run]]:
    """Fixed configs with each exchange, also with partial results in float32; and the function tuned, its results checked meanwhile.

    Each with its name, and whether partial results are float32.
    """
    configs = push_gemm.interpreter_configs() if device.type == "cpu" else push_gemm.gpu_configs()
    for i, choices in enumerate(step.checked):
        for partial_dtype in (None, torch.float32):
            config = configs[(2 * i + (partial_dtype is None)) % len(configs)]
            context: Any = step.context(config=config, partial_dtype=partial_dtype)
            name = f"step {text_of(choices)} {'fp32 partials ' * (partial_dtype is not None)}{harness.config_text(config)}"
            yield name, partial_dtype is not None, lambda a, b, out, c=context, k=choices: c(a, b, out, **k)  # type: ignore[misc]
    context = step.context()
    # Without a cache: a config found there would have been checked at another time.
    check = matches(lambda a, b, *args, **kwargs: product(step, a, b).to(a.dtype))
    tuned: Any = autotune(step.checked, step.module.key_fn, check=check, n_warmup=1, n_repeat=1, cache=False)
    function = tuned(step.function.__wrapped__)
    yield "function, tuned", False, lambda a, b, out: function(a, b, context, out=out)


def text_of(choices: dict[str, Any]) -> str:
    """A config of a function in a few words."""
    exchange = choices["exchange"]
    sums = f"{exchange.reduction}{f' on {exchange.sms} SMs' if exchange.sms else ''}"
    return f"{choices.get('algorithm', '')} {exchange.move}, sum {sums}, chunks of {exchange.chunk_rows}".strip()


def check(step: Step, shape: Shape, dtype: torch.dtype, device: torch.device, console: Console, options: argparse.Namespace) -> bool:
    """True if results are right with fixed configs and with tuned ones; prints a line for each."""
    is_good = True
    for way, is_fp32, run in ways_to_check(step, device):
        # The sum is rounded, and each partial result that travels in the output's type: by half a unit in the last place, or one where
        # truncated.
        limit = torch.finfo(dtype).eps * (1 if is_fp32 else 2)
        try:
            error, reason = worst_error(step, run, shape, dtype, device, options), ""
        except DistTuneError as refusal:  # on all ranks, so all go on
            error, reason = float("inf"), str(refusal)
        console.print(f"check M,N,K={shape} {dtype} relative error {error:.2e} {harness.verdict(error, limit, reason)} {way}", markup=False)
        is_good &= error <= limit
    return is_good


def tune(step: Step, shape: Shape, dtype: torch.dtype, device: torch.device, console: Console, options: argparse.Namespace) -> Any:
    """Tune the step at a shape, show how that went, and return the tuned step."""
    run: Any = tuned_step(step, options.tuner, step.context())
    a, b = random_operands(shape, dtype, device)
    error = relative_error(run(a, b), product(step, a, b))
    records = run.records
    for record in records:  # of the function, and of the product for each way to send its tiles
        table = Table("", "agreed ms", "step ms", "failure", "config", title=f"{record.kernel} {record.key}")
        for candidate in sorted(record.candidates, key=lambda c: float("inf") if c.latency_ms is None else c.latency_ms):
            times = [f"{ms:.4f}" if ms is not None else "-" for ms in (candidate.latency_ms, candidate.closure_ms)]
            table.add_row("*" if candidate.index == record.winner else "", *times, candidate.failure or "", candidate.config)
        console.print(table)
    chosen = {f"{record.kernel} {record.key}": record.best.config for record in records}
    winners: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(winners, chosen)
    console.print(*(f"winner of {kernel}: {config}" for kernel, config in chosen.items()), sep="\n", markup=False)
    console.print(f"the same on all {len(winners)} ranks: {all(each == chosen for each in winners)}; relative error {error:.1e}")
    if any(each != chosen for each in winners):
        raise RuntimeError(f"ranks hold different winners: {winners}")
    return run


def perf(step: Step, shape: Shape, dtype: torch.dtype, device: torch.device, console: Console, options: argparse.Namespace) -> None:
    """The step as each tuner leaves it, beside untuned ones and what torch and NCCL take for the same; the bound first."""
    (m, n, _), n_ranks = shape, dist.get_world_size()
    a, b = random_operands(shape, dtype, device)
    n_bytes = step.sent_bytes(m, n, dtype.itemsize, n_ranks)
    console.print(f"{shape}: {n_bytes * 1e-6:.1f} MB sent by a rank, {step_times.bound_ms(0, n_bytes):.4f} ms over NVLink at least")
    runs: step_times.Contenders = {}
    default: Any = step.context(config=push_gemm.gpu_configs()[0])
    alone: Any = step.context(config=tuned_alone(step, a, b))
    for tuner in dict.fromkeys((options.tuner, *TUNERS)):
        choices, config, context = chosen_by(step, tuner, a, b)
        console.print(f"{tuner}: {text_of(choices)} {harness.config_text(config)}", markup=False)
        runs[tuner if runs else step_times.STEP] = lambda c=context, k=choices, g=config: c(a, b, **k, config=g)  # type: ignore[misc]
    runs |= {"tuned alone": lambda: alone(a, b), "default": lambda: default(a, b), **step.contenders(a, b)}
    console.print(f"ms is what --tuner {options.tuner} has chosen")
    console.print(step_times.bound_table(step_times.measure(shape, runs), n_bytes))


def default_shapes(step: Step, case: str, device: torch.device) -> list[Shape]:
    """Shapes for a case; those of `check` include rows, columns and depths that no block divides."""
    w = dist.get_world_size()
    if device.type == "cuda":
        odd: list[Shape] = [(1037 * w, 1000, 1000 * w), (333 * w, 1003, 1001 * w), (w, 8, 8 * w)]
        return [step.perf_shapes[0], *odd] if case == "check" else list(step.perf_shapes)
    return [(37 * w, 40, 72 * w), (70 * w, 35, 45 * w), (w, 8, 8 * w)] if case == "check" else [(32 * w, 64, 64 * w)]


def main(name: str) -> int:
    """Run the case on every shape and dtype, and leave; 1 if any failed."""
    step = STEPS[name]
    parser = harness.command_line(f"{step.description}: check, tune, compare.", dtypes=sorted(DTYPES), script=f"kernels/{name}.py")
    harness.add_cases(parser, "tune")
    parser.add_argument(
        "--tuner",
        choices=TUNERS,
        default=TUNERS[0],
        help="for tune and perf: exchange and product at once, or in stages; or the product alone",
    )
    parser.add_argument("--straggler", type=int, metavar="RANK", help="for check: this rank sleeps before each step")
    options = harness.parsed(parser)
    device, console = harness.join_ranks()
    cases = {"check": check, "tune": tune, "perf": perf}
    try:
        shapes = default_shapes(step, options.case, device)
        results = [cases[options.case](step, s, d, device, console, options) for s, d in harness.chosen(options, shapes)]
        dist.barrier()  # a rank that leaves frees memory that its peers may still write to
    finally:
        dist.destroy_process_group()
    return 0 if options.case != "check" or all(results) else 1
