"""How long steps of a mixture of experts take on GPUs, and what they could take at best.

Knows numbers, and contenders as functions to call; knows nothing of how a step works. What torch itself offers for a grouped product is
here, because both layers compete with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.table import Column, Table

from kernels import step_times
from kernels.routing import Routing
from kernels.step_times import COPIES, GATHER, GATHER_MM, MM, STEP, Contenders

FIRST, ALONE = "first config", "tuned alone"
PEAK_FLOPS, PEAK_BYTES, LINK_BYTES = 989e12, 4.8e12, 450e9
"""Of an H200, per second: dense bf16, memory, and NVLink in one direction."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What perfect overlap would take, from sizes alone: the longer of the product and the way over NVLink."""

    n_flops: float
    n_bytes: float
    """Read and written by the product, at least, where all experts are used."""
    n_link_bytes: float
    """Sent by a rank, at least."""

    @property
    def product_ms(self) -> float:
        """By arithmetic or memory, whichever takes longer."""
        return 1e3 * max(self.n_flops / PEAK_FLOPS, self.n_bytes / PEAK_BYTES)

    @property
    def link_ms(self) -> float:
        """At the rate of all links together."""
        return 1e3 * self.n_link_bytes / LINK_BYTES

    def __str__(self) -> str:
        product = f"{self.product_ms:.4f} (989 TFLOP/s, 4.8 TB/s)"
        return (
            f"bound {max(self.product_ms, self.link_ms):.4f} ms, the longer of product {product} and NVLink {self.link_ms:.4f} (450 GB/s)"
        )


@dataclass(frozen=True, slots=True)
class TorchRows:
    """Rows sorted by expert, as torch's grouped product takes them."""

    rows: torch.Tensor
    """int64: row numbers by expert."""
    ends: torch.Tensor
    """int32 [E]: where the rows of each expert end."""


def sorted_by_torch(routing: Routing, n_experts: int) -> TorchRows:
    """Sort rows by expert without a host sync."""
    experts = routing.experts.flatten()
    counts = torch.zeros(n_experts, dtype=torch.int32, device=experts.device)
    counts.scatter_add_(0, experts.long(), torch.ones_like(experts))
    return TorchRows(experts.argsort(stable=True), counts.cumsum(0, dtype=torch.int32))


def torch_product(a: torch.Tensor, b: torch.Tensor, by_expert: TorchRows, counts: list[int]) -> torch.Tensor:
    """A[rows of each expert] @ B[expert].T for rows of A by expert: `torch._grouped_mm`, or for fp16 a loop of cuBLAS calls.

    The loop needs the `counts` of rows on the host, which are given to it for nothing.
    """
    if a.dtype == torch.bfloat16:
        return torch._grouped_mm(a, b.transpose(1, 2), offs=by_expert.ends)
    out = a.new_empty(len(a), b.shape[1])
    first = 0
    for weights, count in zip(b, counts, strict=True):
        torch.mm(a[first : first + count], weights.T, out=out[first : first + count])
        first += count
    return out


def counts_on_host(routing: Routing, n_experts: int) -> list[int]:
    """Rows of each expert; a host sync."""
    counts: list[int] = torch.bincount(routing.experts.flatten().long(), minlength=n_experts).tolist()
    return counts


def times_table(shape: tuple[int, ...], runs: Contenders, bound: Bound) -> Table:
    """Times of all contenders by both methods, with what the step gains. Collective."""
    return table_of(step_times.measure(shape, runs), bound)


def table_of(measured: list[step_times.StepTimes], bound: Bound) -> Table:
    """A line for each method."""
    names = [name for name in (GATHER_MM, MM, COPIES, GATHER, FIRST, ALONE) if name in measured[0].ms]
    headings = ("sizes", "method", "ms", "x NCCL + torch", "% of max(mm, copies)", "% of bound")
    columns = [*(Column(heading, no_wrap=True) for heading in headings), *(Column(f"{name} ms") for name in names)]
    result = Table(*columns, title="ms: median, MAX over ranks; bound from sizes")
    for times in measured:
        ms = times.ms
        of_bound = max(bound.product_ms, bound.link_ms) / ms[STEP]
        figures = [f"{ms[STEP]:.4f}", f"{ms[GATHER_MM] / ms[STEP]:.2f}", f"{times.of_bound:.0%}", f"{of_bound:.0%}"]
        result.add_row(", ".join(map(str, times.shape)), times.method, *figures, *(f"{ms[name]:.4f}" for name in names))
    return result
