"""What a step of 15 small kernels and an all-reduce takes on the device, by how far the host was ahead of it: no tuner.

Each replay begins behind a spin of the device (the lead) and a tiny all-reduce. "queue": the host goes on to the next replay at once;
"sync": it waits for each. "python": each launch comes after a millisecond of Python. Microseconds: percentiles over replays, rank 0.

    launch/launch.sh benchmarks/bench_leads.py
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import triton
from rich.table import Table

from benchmarks.bench_choices import N_SMALL, scale_add_kernel
from kernels.harness import join_ranks

PERCENTILES = (5, 25, 50, 75, 95)


@dataclass(frozen=True, slots=True)
class Case:
    """How replays follow one another."""

    lead_ms: float
    waits: bool = False
    python_s: float = 0.0
    reduces: bool = True
    n_replays: int = 100

    def __str__(self) -> str:
        """Its name in the table."""
        parts = ["sync" if self.waits else "queue", f"lead {self.lead_ms:g} ms"]
        return ", ".join([*parts, *["python"] * (self.python_s > 0), *["no all-reduce"] * (not self.reduces)])


CASES = (
    Case(3, waits=True),
    Case(3),
    Case(0.5),
    Case(0.2),
    Case(0.2, reduces=False),
    Case(0),
    Case(30, waits=True, n_replays=30),
    Case(30, waits=True, reduces=False, n_replays=30),
    Case(24, python_s=1e-3, n_replays=40),
    Case(24, waits=True, python_s=1e-3, n_replays=40),
)


def times_us(case: Case) -> list[float]:
    """The time of each replay between two events, sorted. Collective."""
    n = 1 << 18
    x, y, tiny = torch.ones(n, device="cuda"), torch.empty(n, device="cuda"), torch.ones(1, device="cuda")
    spans = []
    dist.barrier()
    torch.cuda.synchronize()
    for _ in range(case.n_replays):
        torch.cuda._sleep(int(case.lead_ms * 2e6))
        dist.all_reduce(tiny)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        y.zero_()
        for k in range(N_SMALL):
            until = time.perf_counter() + case.python_s
            while time.perf_counter() < until:
                pass
            scale_add_kernel[(triton.cdiv(n, 2048),)](x, y, n, SCALE=k + 1, BLOCK=2048, num_warps=8)
        total = y.sum()
        if case.reduces:
            dist.all_reduce(total)
        end.record()
        spans.append((begin, end))
        if case.waits:
            end.synchronize()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) * 1e3 for begin, end in spans)


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not torch.cuda.is_available():
        print("a lead needs a GPU: on the host a launch returns when it is done")
        return
    _, console = join_ranks()
    times_us(CASES[1])  # compiles
    table = Table("replays", *(f"p{each}" for each in PERCENTILES))
    for case in CASES:
        us = times_us(case)
        table.add_row(f"{case}", *(f"{us[each * (len(us) - 1) // 100]:.1f}" for each in PERCENTILES))
    console.print(table)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
