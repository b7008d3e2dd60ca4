"""Steps of a mixture of experts with something amiss, and the error that their check finds; run on two ranks by test_moe.py.

Prints a line per try: its name, and whether the error is within the limit. What is late here is late by order, not by time.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from kernels import cases, grouped_gemm, harness, moe_combine, moe_reduce_rs
from kernels.ag_gemm import AllGatherGemm
from kernels.gather import Gathered
from kernels.harness import Run, Step

SHAPE = (18, 36, 30, 3, 2)
OPTIONS = argparse.Namespace(skew=1.0, straggler=None, autotune=False, check=True)


@triton.jit
def no_wait(flag, count):
    return tl.load(flag) * 0


class LateGather:
    """A gather whose shards arrive while the product waits, or, `too_late`, when it has been run."""

    def __init__(self, *, too_late: bool) -> None:
        self.epoch, self.too_late, self.flags = 0, too_late, torch.zeros(2, dtype=torch.int32)
        self.arrivals: list[threading.Thread] = []

    def start(self, shard: torch.Tensor) -> Gathered:
        shards = cases.gathered(shard)
        self.epoch += 1
        seen, epoch = torch.full_like(shards, float("nan")), self.epoch

        def arrive() -> None:
            time.sleep(0.05)
            seen.copy_(shards)
            self.flags.fill_(epoch)

        self.arrivals = [threading.Thread(target=arrive)]
        if not self.too_late:
            self.arrivals[0].start()
        return Gathered(seen, self.flags, self.epoch)

    def finish(self) -> None:
        if self.too_late:
            self.arrivals[0].start()
        self.arrivals[0].join()


def first_way(layer: Step) -> Run:
    return next(iter(layer.ways(torch.device("cpu"), OPTIONS)))[2]


def tell(name: str, layer: Step, run: Run) -> None:
    error = harness.worst_error(layer, run, SHAPE, torch.float16, torch.device("cpu"), OPTIONS)
    if dist.get_rank() == 0:
        print(f"{name}: {error <= layer.n_roundings * torch.finfo(torch.float16).eps}", flush=True)


def taking_turns(run: Run) -> Run:
    """One rank begins its step when the other has ended it: a step that waits for its peer would never end."""
    calls = iter(range(100))

    def turn(*operands: Any, out: torch.Tensor) -> None:
        is_late = next(calls) % 2 == dist.get_rank()
        if is_late:
            dist.barrier()
        run(*operands, out=out)
        if not is_late:
            dist.barrier()

    return turn


def amiss(module: Any, name: str, value: object, trial: Callable[[], None]) -> None:
    right = getattr(module, name)
    setattr(module, name, value)
    try:
        trial()
    finally:
        setattr(module, name, right)


def main() -> None:
    harness.join_ranks()
    late, too_late = LateGather(too_late=False), LateGather(too_late=True)
    second, first = cases.STEPS["moe_reduce_rs"], cases.STEPS["ag_moe"]
    scatter = first_way(second)
    tell("second layer", second, scatter)
    amiss(AllGatherGemm, "gather_for", lambda *_: late, lambda: tell("first layer, shards late", first, first_way(first)))
    harness.N_CHECK_INPUTS = 2  # enough for what is always wrong, on one rank or the other
    equal = moe_combine.Partials

    def ignoring(results: torch.Tensor, weights: torch.Tensor, *rest: Any) -> moe_combine.Partials:
        return equal(results, torch.full_like(weights, 0.5), *rest)

    amiss(moe_reduce_rs, "Partials", ignoring, lambda: tell("weights ignored", second, scatter))
    # The step has its memory by now: where one rank runs alone, nothing may be collective.
    amiss(moe_combine, "wait_until", no_wait, lambda: tell("no wait for sums", second, taking_turns(scatter)))

    def without_waiting() -> None:
        amiss(AllGatherGemm, "gather_for", lambda *_: too_late, lambda: tell("no wait for shards", first, first_way(first)))

    amiss(grouped_gemm, "wait_until", no_wait, without_waiting)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
