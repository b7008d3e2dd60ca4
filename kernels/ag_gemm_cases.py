"""The command line of kernels/ag_gemm.py: check results, tune, compare with others.

Knows torchrun's ranks and what is printed; knows nothing of how the step works. It is tuned in both ways: the step by
`contextual_autotune`, the function by `autotune`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import triton
from rich.console import Console
from rich.table import Table

from dist_tune import DistTuneError, TuningRecord, autotune, contextual_autotune, matches, prune_by_shared_memory
from kernels import harness, shard_gemm, step_times
from kernels.ag_gemm import DTYPES, AllGatherGemm, Shape, ag_gemm, config_space, key_fn, random_operands
from kernels.gather import Gather
from kernels.shard_gemm import make_config

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""One step: shards of A and B, and where C goes."""
N_CHECK_INPUTS = 5
TUNERS = ("contextual", "function")


def product(a_shard: torch.Tensor, b_shard: torch.Tensor) -> torch.Tensor:
    """What a step is to return, in float32. Collective."""
    a = a_shard.new_empty(len(a_shard) * dist.get_world_size(), a_shard.shape[1])
    dist.all_gather_into_tensor(a, a_shard)
    return a.float() @ b_shard.float().T


def expected(a: torch.Tensor, b: torch.Tensor, ctx: AllGatherGemm, out: torch.Tensor | None = None) -> torch.Tensor:
    """What `ag_gemm` is to return. Collective."""
    return product(a, b).to(a.dtype)


def relative_error(c: torch.Tensor, a_shard: torch.Tensor, b_shard: torch.Tensor) -> float:
    """||C - reference|| / ||reference||, in float32, MAX over ranks; inf where a rank has a NaN."""
    error = torch.tensor([harness.relative_error(c, product(a_shard, b_shard))], device=c.device)
    worst = error.nan_to_num(nan=float("inf"), posinf=float("inf"))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def worst_error(run: Run, shape: Shape, dtype: torch.dtype, device: torch.device) -> float:
    """The worst relative error of steps on fresh inputs, queued without a host sync and with ranks out of step."""
    inputs = [random_operands(shape, dtype, device) for _ in range(N_CHECK_INPUTS)]
    a_live = torch.empty_like(inputs[0][0])
    rounds = inputs * (4 if device.type == "cuda" else 1)
    outs = [torch.full((shape[0], b.shape[0]), float("nan"), dtype=dtype, device=device) for _, b in rounds]
    for i, ((a, b), out) in enumerate(zip(rounds, outs, strict=True)):
        if device.type == "cuda" and (i + dist.get_rank()) % 3 == 0:
            torch.cuda._sleep(1_000_000)  # half a millisecond: longer than a step, so that peers run ahead of this rank
        a_live.copy_(a)  # the same memory for every step's A: a copy engine still at the last one would send this one
        run(a_live, b, out)
    return max(relative_error(out, a, b) for (a, b), out in zip(rounds, outs, strict=True))


def check_configs(device: torch.device) -> list[triton.Config]:
    """Configs that between them take every path of the kernel."""
    if device.type == "cpu":
        return [make_config(64, 64, 64, warps=4, stages=2), make_config(32, 64, 64, warps=4, stages=2, flatten=True, split=True)]
    wide = [make_config(128, 256, 64, warps=8, stages=3, flatten=f, split=s) for f in (False, True) for s in (False, True)]
    square = [make_config(128, 128, 64, warps=4, stages=6, flatten=True), make_config(64, 64, 64, warps=4, stages=4, flatten=True)]
    return [*wide, make_config(256, 128, 64, warps=8, stages=3), *square]


def ways_to_check(device: torch.device) -> Iterator[tuple[str, Run]]:
    """The step and the function with fixed configs, and both tuned, the function with its results checked while it is tuned."""
    ctx = AllGatherGemm()
    for config in check_configs(device):
        choices, fixed = harness.config_text(config), {"gemm_config": config, "autotune_allow_arg_overwrite": True}
        yield f"step {choices}", AllGatherGemm(config=config)
        yield f"function {choices}", lambda a, b, out, fixed=fixed: ag_gemm(a, b, ctx, out=out, **fixed)  # type: ignore[misc]
    # Without a cache: a config found there would have been checked at another time.
    yield "step, tuned", contextual_autotune(is_dist=True, n_warmup=1, n_repeat=1, cache=False)(ctx.__call__)
    tuned = autotune(config_space(), key_fn, prune_by_shared_memory, check=matches(expected), n_warmup=1, n_repeat=1, cache=False)
    function: Any = tuned(ag_gemm.__wrapped__)
    yield "function, tuned", lambda a, b, out: function(a, b, ctx, out=out)


def check(shape: Shape, dtype: torch.dtype, device: torch.device, console: Console) -> bool:
    """True if results are right with fixed configs and with tuned ones; prints a line for each."""
    # Accumulation is in float32, so only the result is rounded: by half a unit in the last place, by one where truncated.
    limit, is_good = torch.finfo(dtype).eps, True
    for way, run in ways_to_check(device):
        try:
            error, reason = worst_error(run, shape, dtype, device), ""
        except DistTuneError as refusal:  # on all ranks, so all go on
            error, reason = float("inf"), str(refusal)
        console.print(f"check M,N,K={shape} {dtype} relative error {error:.2e} {harness.verdict(error, limit, reason)} {way}", markup=False)
        is_good &= error <= limit
    return is_good


def tuned_step(tuner: str, *, uses_cache: bool = True) -> tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], list[TuningRecord]]:
    """The step as one of `TUNERS` tunes it, and the records of its tunings."""
    ctx = AllGatherGemm()
    if tuner == "function":
        function: Any = ag_gemm
        if not uses_cache:
            function = autotune(config_space(), key_fn, prune_by_shared_memory, cache=False)(ag_gemm.__wrapped__)
        return lambda a, b: function(a, b, ctx), function.records

    @contextual_autotune(is_dist=True, n_warmup=3, n_repeat=5, cache=uses_cache)
    def step(a_shard: torch.Tensor, b_shard: torch.Tensor) -> torch.Tensor:
        return ctx(a_shard, b_shard)

    return step, step.records


def tune(
    options: argparse.Namespace, shape: Shape, dtype: torch.dtype, device: torch.device, console: Console
) -> Callable[..., torch.Tensor]:
    """Tune the step at a shape, show how that went, and return the tuned step."""
    # Its records carry the name of the kernel that takes any epoch.
    step, records = tuned_step(options.tuner, uses_cache=options.epoch == "any")
    a, b = random_operands(shape, dtype, device)
    error = relative_error(step(a, b), a, b)
    record = records[-1]
    by_latency = sorted(record.candidates, key=lambda c: float("inf") if c.latency_ms is None else c.latency_ms)
    table = Table("", "agreed ms", "step ms", "failure", "config", title=f"{record.kernel} {record.key}")
    for candidate in by_latency:
        is_winner = candidate.index == record.winner
        times = [f"{ms:.4f}" if ms is not None else "-" for ms in (candidate.latency_ms, candidate.closure_ms)]
        table.add_row("*" if is_winner else "", *times, candidate.failure or "", shortened(candidate.config))
    console.print(table)
    winners: list[tuple[int, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(winners, (record.winner, record.best.config))
    console.print(f"winner: {shortened(record.best.config)}; the same on all {len(winners)} ranks: {len(set(winners)) == 1}")
    spent = f"{record.n_replays} replays, {record.seconds:.2f} s"
    if record.is_recalled:
        console.print(f"from the cache, tuned {record.tuned_at:%Y-%m-%d %H:%M} UTC in {spent}; DIST_TUNE_ALWAYS_TUNE=1 tunes anew")
    else:
        kept = "from now on this choice comes from the cache" if options.epoch == "any" else "this choice is not kept"
        console.print(f"{spent}; why: .autotune_logs/rank-<i>.log; {kept}")
    console.print(f"{record.n_variants} variant{'s' * (record.n_variants != 1)} of each config")
    console.print(f"relative error {error:.1e}")
    if len(set(winners)) > 1:
        raise RuntimeError(f"ranks hold different winners: {winners}")
    return step


def shortened(config: str) -> str:
    """A described config without its hook, which is the same for all."""
    return re.sub(r" pre_hook=[\w.]+", "", config)


def gather_only(gather: Gather, a_shard: torch.Tensor) -> None:
    """A step without its product."""
    gather.start(a_shard)
    gather.finish()


def default_shapes(case: str, n_ranks: int, device: torch.device) -> list[Shape]:
    """Shapes for a case; those of `check` include rows, columns and depths that no block divides."""
    w = n_ranks
    large: list[Shape] = [(4096, 11008, 4096), (2048, 14336, 4096), (8192, 28672, 8192)]
    if case != "check":
        return large if device.type == "cuda" else [(256, 256, 128)]
    if device.type == "cuda":
        return [large[0], (1037 * w, 1000 * w, 1000), (333 * w, 1003 * w, 1001), (w, 8 * w, 8)]
    return [(37 * w, 40 * w, 72), (70 * w, 35 * w, 45), (w, 8 * w, 8)]


def run_case(options: argparse.Namespace, shape: Shape, dtype: torch.dtype, device: torch.device, console: Console) -> bool:
    """Run one case at one shape; False if it failed."""
    if options.case == "check":
        return check(shape, dtype, device, console)
    step = tune(options, shape, dtype, device, console)
    if options.case == "perf":
        a, b = random_operands(shape, dtype, device)
        gather = AllGatherGemm().gather_for(a)
        runs = step_times.contenders(lambda: step(a, b), lambda: gather_only(gather, a), a, b)
        console.print(step_times.table(step_times.measure(shape, runs)))
    return True


def main() -> int:
    """Run the case on every shape and dtype, and leave; 1 if any failed."""
    description = "AllGather-GEMM: check its results, tune it, compare it with others."
    parser = harness.command_line(description, dtypes=sorted(DTYPES), script="kernels/ag_gemm.py")
    harness.add_cases(parser, "tune")
    parser.add_argument("--tuner", choices=TUNERS, default=TUNERS[0], help="for tune and perf: contextual_autotune, or autotune")
    epoch_help = "int: with a kernel that Triton compiles anew where the epoch is 1, a multiple of 16, or neither"
    parser.add_argument("--epoch", choices=("any", "int"), default="any", help=epoch_help)
    options = harness.parsed(parser)
    if options.epoch == "int":
        shard_gemm.ag_gemm_kernel = shard_gemm.with_int_epoch()
    device, console = harness.join_ranks()
    shapes = default_shapes(options.case, dist.get_world_size(), device)
    try:
        results = [run_case(options, shape, dtype, device, console) for shape, dtype in harness.chosen(options, shapes)]
        dist.barrier()  # a rank that leaves frees memory that its peers may still write to
    finally:
        dist.destroy_process_group()
    return 0 if all(results) else 1
