"""A step of fla-core whose sequences have another length in each call, with sizes in buckets and
without: tunings, seconds, steady calls.

``chunk_gla`` and the norm of its output, forward, backward and the all-reduce of the norm's
gradient; each rank draws lengths of its own. The key of ``chunk_gla`` holds no length from 64 on.
That of the norm holds ``NB``, the length times heads / 2048. One process tree for each way, so that
neither finds what the other has compiled or chosen:

    launch/launch.sh benchmarks/uneven_lengths.py bucket  # or: exact
    launch/launch.sh benchmarks/uneven_lengths.py bucket --kernels norm --calls 20 --longest 2048

The second needs no GPU: kernels are compiled for an H200, and not run.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["TRITON_INTERPRET"] = (
    "0"  # before triton is imported: launch.sh sets it where there is no GPU
)
import torch
import torch.distributed as dist

from dist_tune import contextual_autotune, power_of_two

HEADS, DIM = 8, 128


def make_step(
    kernels: str, device: torch.device
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The step, untuned; of an input [1, T, HEADS, DIM] and of gates in that shape."""
    with warnings.catch_warnings(action="ignore" if device.type == "cpu" else "default"):
        from fla.modules.layernorm import rms_norm  # here, so that --help needs no GPU
        from fla.ops.gla import chunk_gla

    weight = torch.ones(DIM, device=device, dtype=torch.bfloat16, requires_grad=True)

    def step(x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        y: torch.Tensor = rms_norm(
            chunk_gla(x, x, x, gates)[0] if kernels == "gla" else x, weight, None
        )
        for_x, for_weight = torch.autograd.grad(y.sum(), (x, weight))
        dist.all_reduce(for_weight)
        return for_x

    return step


def main() -> None:
    """Run one job one way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("way", choices=("bucket", "exact"))
    parser.add_argument(
        "--kernels", choices=("gla", "norm"), default="gla", help="norm: the norm alone"
    )
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--shortest", type=int, default=256)
    parser.add_argument("--longest", type=int, default=8192)
    options = parser.parse_args()
    rank, has_gpu = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.is_available()
    device = torch.device("cuda", rank) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if has_gpu else "gloo", device_id=device if has_gpu else None)
    torch.manual_seed(rank)
    plain = make_step(options.kernels, device)
    if not has_gpu:
        from dist_tune.testing.fake_gpu import install_fake_driver

        install_fake_driver()
    bucket: Any = {"layer_norm_*": {"NB": power_of_two}} if options.way == "bucket" else None
    step = contextual_autotune(is_dist=True, cache=False, bucket=bucket)(plain)
    x, gates = (
        torch.randn(1, options.longest, HEADS, DIM, device=device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    gates = torch.nn.functional.logsigmoid(gates)

    def seconds(n: int, n_calls: int = 1) -> float:
        """Of a call over sequences of length ``n``."""
        if has_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(n_calls):
            step(x[:, :n], gates[:, :n])
        queued = time.perf_counter()
        if has_gpu:
            torch.cuda.synchronize()
        return (queued if n_calls > 1 else time.perf_counter()) - began

    drawn = random.Random(rank)
    lengths = [drawn.randint(options.shortest, options.longest) for _ in range(options.calls)]
    dist.all_reduce(torch.ones(1, device=device))
    began = time.perf_counter()
    each_s = sorted(seconds(n) for n in lengths)
    total_s = time.perf_counter() - began
    seconds(options.shortest)
    dist.barrier()
    # The shortest, whose kernels the device ends before the host has launched the next ones; a few,
    # so that no queue is full.
    steady_us = min(seconds(options.shortest, 20) for _ in range(20)) / 20 * 1e6
    if rank == 0:
        kernels = Counter(each.kernel for each in step.records if not each.is_recalled)
        call_ms = each_s[len(each_s) // 2] * 1e3
        told = (
            f"{kernels.total()} sites tuned, {total_s:.1f} s, median call {call_ms:.2f} ms, steady"
            f" {steady_us:.1f} us"
        )
        print(
            f"{options.way}: {options.calls} calls, lengths {options.shortest} to"
            f" {options.longest}: {told}",
            flush=True,
        )
        for name, n_keys in sorted(kernels.items()):
            print(f"  {name}: {n_keys} keys", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
