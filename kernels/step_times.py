"""How long steps of products and exchanges take on GPUs, beside the collectives and products that they compete with.

Knows clocks, and contenders as functions to call; knows nothing of how the step works. Times are medians in milliseconds,
MAX over ranks, and are compared only with others of the same method and run.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # defines torch.ops.symm_mem
from rich.table import Column, Table

Shape = tuple[int, ...]
Contenders = dict[str, Callable[[], object]]
STEP, COPIES, MM, GATHER, GATHER_MM, FUSED = "step", "copies", "mm", "gather", "gather, mm", "fused"
EXCHANGE, MM_EXCHANGE, ONE_SHOT, TWO_SHOT = "exchange", "mm, exchange", "torch one-shot", "torch two-shot"
NVLINK_GBYTES_PER_S = 367.0
"""What a copy engine of an H200 moves from one peer to another (measured); the bytes of a bound travel at this rate."""
HEAD_START_CYCLES = 2_000_000
"""About a millisecond: longer than a host takes to queue any contender."""

SUSTAINED_MS = 100.0
"""How long a contender runs before it is timed back to back: its power draw, not its predecessor's, sets the clocks."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds of each contender at one shape, by one method."""

    shape: Shape
    n_ranks: int
    method: str
    ms: dict[str, float]

    @property
    def tflops(self) -> float:
        """TFLOP/s of one rank's step."""
        m, n, k = self.shape
        return 2e-9 * m * n * k / self.n_ranks / self.ms[STEP]

    @property
    def gbytes_per_s(self) -> float:
        """GB/s that one rank receives from its peers, over the whole step."""
        m, _, k = self.shape
        return 2e-6 * m * k * (self.n_ranks - 1) / self.n_ranks / self.ms[STEP]

    @property
    def of_bound(self) -> float:
        """What perfect overlap would take, as a share of the step: the longer of the product and the copies alone."""
        return max(self.ms[MM], self.ms[COPIES]) / self.ms[STEP]


def contenders(step: Callable[[], object], copies: Callable[[], object], a: torch.Tensor, b: torch.Tensor) -> Contenders:
    """The step, its copies alone, and what else computes the same, on A's shard `a` and B's shard `b`."""
    n_ranks = dist.get_world_size()
    gathered, c = a.new_empty(len(a) * n_ranks, a.shape[1]), a.new_empty(len(a) * n_ranks, len(b))
    dist.all_gather_into_tensor(gathered, a)
    group_name = dist.distributed_c10d._get_default_group().group_name

    def gather_then_multiply() -> None:
        dist.all_gather_into_tensor(gathered, a)
        torch.mm(gathered, b.T, out=c)

    return {
        STEP: step,
        COPIES: copies,
        MM: lambda: torch.mm(gathered, b.T, out=c),
        GATHER: lambda: dist.all_gather_into_tensor(gathered, a),
        GATHER_MM: gather_then_multiply,
        # Without the gathered A among its results: its faster form.
        FUSED: lambda: torch.ops.symm_mem.fused_all_gather_matmul(a, [b.T], gather_dim=0, group_name=group_name, return_A=False),
    }


def reduce_scatter_contenders(a: torch.Tensor, b: torch.Tensor) -> Contenders:
    """What else computes a GEMM-ReduceScatter, and its pieces, on this rank's columns of A and B."""
    product, out = a.new_empty(len(a), len(b)), a.new_empty(len(a) // dist.get_world_size(), len(b))
    group_name = dist.distributed_c10d._get_default_group().group_name

    def multiply_then_scatter() -> None:
        torch.mm(a, b.T, out=product)
        dist.reduce_scatter_tensor(out, product)

    return {
        MM: lambda: torch.mm(a, b.T, out=product),
        EXCHANGE: lambda: dist.reduce_scatter_tensor(out, product),
        MM_EXCHANGE: multiply_then_scatter,
        FUSED: lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b.T, "sum", 0, group_name),
    }


def all_reduce_contenders(a: torch.Tensor, b: torch.Tensor) -> Contenders:
    """What else computes a GEMM-AllReduce, and its pieces, on this rank's columns of A and B. Collective."""
    group = dist.distributed_c10d._get_default_group()
    product = a.new_empty(len(a), len(b))
    shared = torch.distributed._symmetric_memory.empty(len(a), len(b), dtype=a.dtype, device=a.device)
    torch.distributed._symmetric_memory.rendezvous(shared, group)

    def multiply_then_reduce() -> None:
        torch.mm(a, b.T, out=product)
        dist.all_reduce(product)

    def by_torch(reduce: Callable[[torch.Tensor, str, str], object]) -> None:
        torch.mm(a, b.T, out=shared)
        reduce(shared, "sum", group.group_name)

    runs = {
        MM: lambda: torch.mm(a, b.T, out=product),
        EXCHANGE: lambda: dist.all_reduce(product),
        MM_EXCHANGE: multiply_then_reduce,
    }
    if a.dtype == torch.bfloat16:  # torch's sum bfloat16 and float32 alone
        runs[ONE_SHOT] = lambda: by_torch(torch.ops.symm_mem.one_shot_all_reduce)
        runs[TWO_SHOT] = lambda: by_torch(torch.ops.symm_mem.two_shot_all_reduce_)
    return runs


def reduce_scatter_bytes(m: int, n: int, itemsize: int, n_ranks: int) -> int:
    """Bytes that a rank sends at least: a partial result of each row that another rank sums."""
    return m * n * itemsize * (n_ranks - 1) // n_ranks


def all_reduce_bytes(m: int, n: int, itemsize: int, n_ranks: int) -> int:
    """Bytes that a rank sends at least: two-shot, the partial results and then the sums."""
    return 2 * reduce_scatter_bytes(m, n, itemsize, n_ranks)


def bound_ms(product_ms: float, n_bytes: int) -> float:
    """What perfect overlap would take: the longer of the product and the bytes over NVLink."""
    return max(product_ms, n_bytes / NVLINK_GBYTES_PER_S * 1e-6)


def measure(shape: Shape, runs: Contenders) -> list[StepTimes]:
    """The times of all contenders by both methods. Collective."""
    for run in runs.values():  # also tunes what is not tuned yet
        for _ in range(3):
            run()
    n_ranks, aligned = dist.get_world_size(), aligned_ms(runs)
    sustained = back_to_back_ms(runs, {name: int(SUSTAINED_MS / ms) + 1 for name, ms in aligned.items()})
    return [StepTimes(shape, n_ranks, "aligned, host ahead", aligned), StepTimes(shape, n_ranks, "back to back", sustained)]


def aligned_ms(runs: Contenders, n_rounds: int = 30, head_start_cycles: int = HEAD_START_CYCLES) -> dict[str, float]:
    """Every call starts on all ranks at once (behind a tiny all-reduce) and, with head start enough, is queued before it starts."""
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


def back_to_back_ms(runs: Contenders, n_warmup: dict[str, int], n_rounds: int = 3, n_calls: int = 20) -> dict[str, float]:
    """Calls follow one another as fast as host and GPU can; the time is from one call's end to the next one's."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(n_rounds):
        for name, run in runs.items():
            dist.barrier()
            for _ in range(n_warmup[name]):
                run()
            ends = [torch.cuda.Event(enable_timing=True) for _ in range(n_calls + 1)]
            for end in ends:
                run()
                end.record()
            torch.cuda.synchronize()
            samples[name] += [earlier.elapsed_time(later) for earlier, later in itertools.pairwise(ends)]
    return slowest_medians_ms(samples)


def slowest_medians_ms(samples: dict[str, list[float]]) -> dict[str, float]:
    """The median of each contender on the rank where it is largest. Collective."""
    medians = torch.tensor([statistics.median(times) for times in samples.values()], device="cuda")
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return dict(zip(samples, medians.tolist(), strict=True))


def table(times: list[StepTimes]) -> Table:
    """One line per shape and method."""
    others = {"NCCL + cuBLAS": GATHER_MM, "fused": FUSED, "mm": MM, "copies": COPIES, "NCCL": GATHER}
    headings = ("M, N, K", "method", "ms", "TFLOP/s", "GB/s", "x NCCL + cuBLAS", "x torch fused", "% of max(mm, copy)")
    columns = [*(Column(heading, no_wrap=True) for heading in headings), *(Column(f"{heading} ms") for heading in others)]
    result = Table(*columns, title="ms: median, MAX over ranks; TFLOP/s of a rank; GB/s that a rank receives")
    for t in times:
        rates = [f"{t.ms[STEP]:.4f}", f"{t.tflops:.0f}", f"{t.gbytes_per_s:.0f}"]
        speedups = [f"{t.ms[other] / t.ms[STEP]:.2f}" for other in (GATHER_MM, FUSED)]
        competitors = [f"{t.ms[other]:.4f}" for other in others.values()]
        result.add_row(", ".join(map(str, t.shape)), t.method, *rates, *speedups, f"{t.of_bound:.0%}", *competitors)
    return result


def bound_table(times: list[StepTimes], n_bytes: int) -> Table:
    """One line per shape and method: the step, its share of the bound, and how many times longer each other contender takes."""
    others = [name for name in times[0].ms if name not in (STEP, MM, EXCHANGE)]
    headings = ("ms", "TFLOP/s", "bound", "% of bound", *(f"x {name}" for name in others), MM, EXCHANGE)
    # Headings alone are folded: numbers stay whole in a table as wide as a log.
    columns = [
        Column("M, N, K", no_wrap=True),
        Column("method", no_wrap=True),
        *(Column(each, min_width=max(map(len, each.split()))) for each in headings),
    ]
    result = Table(*columns, title="ms (bound, mm, exchange too): median, MAX over ranks; bound: max(mm, NVLink)", pad_edge=False)
    for t in times:
        bound = bound_ms(t.ms[MM], n_bytes)
        cells = [f"{t.ms[STEP]:.4f}", f"{t.tflops:.0f}", f"{bound:.4f}", f"{bound / t.ms[STEP]:.0%}"]
        cells += [f"{t.ms[name] / t.ms[STEP]:.2f}" for name in others]
        result.add_row(", ".join(map(str, t.shape)), t.method, *cells, f"{t.ms[MM]:.4f}", f"{t.ms[EXCHANGE]:.4f}")
    return result
