"""How the AllGather-GEMM's configs compare where a GPU is at its power limit and where it is not: no tuner.

Configs are timed four ways: aligned, with a rest before each call; back to back, each after 60 calls of its own; mixed in random order with
rests of 0, 0.2 and 1 ms; and 60 calls in a row after half a second without work. Milliseconds: medians, MAX over ranks. Needs GPUs.

    launch/launch.sh benchmarks/bench_power.py
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from benchmarks.bench_tuning import notes_space
from kernels import ag_gemm, harness

SHAPE = (8192, 28672, 8192)
CONFIGS = (131, 125, 127, 179, 110, 60)
"""The best of an exhaustive search at this shape, and some others."""
CYCLES_PER_MS = 2_000_000


def in_turn(order: Sequence[str], runs: harness.Contenders, rest_ms: float) -> dict[str, list[float]]:
    """Milliseconds of each call of a list, by name; the host is ahead, and the device rests before each."""
    spans = [(name, torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for name in order]
    dist.barrier()
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * CYCLES_PER_MS)
    for name, begin, end in spans:
        if rest_ms:
            torch.cuda._sleep(int(rest_ms * CYCLES_PER_MS))
        begin.record()
        runs[name]()
        end.record()
    torch.cuda.synchronize()
    found: dict[str, list[float]] = {name: [] for name in runs if name in order}
    for name, begin, end in spans:
        found[name].append(begin.elapsed_time(end))
    return found


def main() -> None:
    """Time the configs, and print a line for each way."""
    argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]).parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/bench_power.py needs a GPU: a host has no power limit that its clock shows")
    device, console = harness.join_ranks(width=220)
    operands, shared = ag_gemm.random_operands(SHAPE, torch.bfloat16, device), ag_gemm.AllGatherGemm()
    shared.gather_for(operands[0])
    runs: harness.Contenders = {}
    for index in CONFIGS:
        step = ag_gemm.AllGatherGemm(config=notes_space()[index])
        step._gathers = shared._gathers
        runs[str(index)] = lambda step=step: step(*operands)  # type: ignore[misc]
        runs[str(index)]()

    def show(what: str, ms: dict[str, float]) -> None:
        console.print(what, ", ".join(f"{name}: {each:.4f}" for name, each in ms.items()), markup=False)

    show("aligned", harness.aligned_ms(runs, 20))
    show("back to back", harness.back_to_back_ms(runs, dict.fromkeys(runs, 60)))
    dice = random.Random(1)
    for rest_ms in (0.0, 0.2, 1.0):
        found = in_turn([name for _ in range(25) for name in dice.sample(list(runs), len(runs))], runs, rest_ms)
        show(f"mixed, rests of {rest_ms:g} ms, median", harness.slowest_medians_ms(found))
        show(f"mixed, rests of {rest_ms:g} ms, least", harness.slowest_medians_ms({name: [min(each)] for name, each in found.items()}))
    for name in runs:
        time.sleep(0.5)
        console.print(f"{name}, 60 in a row, rank 0", *(f"{ms:.3f}" for ms in in_turn([name] * 60, runs, 0.0)[name]), markup=False)
    dist.barrier()  # a rank that leaves frees memory that its peers may still write to
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
