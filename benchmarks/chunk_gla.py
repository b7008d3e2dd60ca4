"""``chunk_gla`` of flash-linear-attention (fla-core), a public library, forward, backward and the
all-reduce of three gradients: 11 sites.

Prints the seconds of the first call, the milliseconds of a later one, and those of the step on the
device, the host ahead. With an empty cache the first call tunes; a second process hits. With --step
scan all this of the state-space scan in examples/, 15 sites.

    launch/launch.sh benchmarks/chunk_gla.py cold
    launch/launch.sh benchmarks/chunk_gla.py hit
    launch/launch.sh benchmarks/chunk_gla.py cold --step scan
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
import torch.distributed as dist
from torch.nn import functional

from dist_tune import contextual_autotune

SHAPE = (2, 4096, 8, 128)


def make_step() -> Callable[[], torch.Tensor]:
    """The step with its operands, untuned."""
    from fla.ops.gla import chunk_gla  # here, so that --help needs no GPU

    q, k, v = (
        torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    gates = functional.logsigmoid(torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16))
    gradient = torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16)

    def step() -> torch.Tensor:
        out: torch.Tensor = chunk_gla(q, k, v, gates)[0]
        for each in torch.autograd.grad(out, (q, k, v), gradient):
            dist.all_reduce(each)
        return out

    return step


def make_scan() -> Callable[[], Any]:
    """The scan of examples/ with its operands, untuned."""
    from examples import state_space_scan

    given = state_space_scan.arguments(
        (2, 4096, 16, 64, 128, 256), torch.bfloat16, torch.device("cuda")
    )
    untuned: Any = state_space_scan.step
    return lambda: untuned.__wrapped__(*given)


def device_ms(step: Callable[[], Any]) -> float:
    """Median milliseconds on the device, the host ahead."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = list[float]()
    for _ in range(30):
        dist.barrier()
        torch.cuda._sleep(20_000_000)  # until the host has queued the step
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return sorted(found)[15]


def main(name: str, make: Callable[[], Callable[[], Any]]) -> None:
    """Time the first call and later ones of what ``make`` returns; ``name`` stands in the line that
    is printed.
    """
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    torch.manual_seed(rank)
    step = contextual_autotune(is_dist=True)(make())

    def seconds() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    dist.all_reduce(torch.ones(1, device="cuda"))
    first_s = seconds()
    later_s = [seconds() for _ in range(6)][-1]
    ms = device_ms(step)
    if rank == 0:
        print(
            f"{name}: first call {first_s:.2f} s, later {later_s * 1e3:.2f} ms, device {ms:.4f} ms",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("name", help="in the line that is printed")
    parser.add_argument("--step", choices=("gla", "scan"), default="gla")
    options = parser.parse_args()
    main(f"{options.step}, {options.name}", make_step if options.step == "gla" else make_scan)
