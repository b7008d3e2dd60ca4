"""A job of 2,000 calls on GPUs, untuned, tuned by replays and online: ``chunk_gla`` of fla-core, or
the AllGather-GEMM with 216 configs.

Prints the seconds of the whole job, the call and the second at which its winners were in use, and
the milliseconds of the step on the device at the end, the host ahead. One process tree for each
way, so that none finds what another has compiled or chosen:

    launch/launch.sh benchmarks/online_steps.py gla online        # or: ag-gemm; first, replayed
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
import torch.distributed as dist

from benchmarks import chunk_gla
from dist_tune import contextual_autotune

SHAPE = (4096, 11008, 4096)


def ag_gemm_step() -> Callable[[], Any]:
    """The AllGather-GEMM of kernels/, with the 216 configs of bench_tuning.py."""
    import triton

    from benchmarks.bench_tuning import notes_space
    from kernels import ag_gemm, shard_gemm

    kernel: Any = shard_gemm.ag_gemm_kernel
    shard_gemm.ag_gemm_kernel = triton.autotune(configs=notes_space(), key=["M", "N", "K"])(
        kernel.fn
    )
    operands = ag_gemm.random_operands(
        SHAPE, torch.bfloat16, torch.device("cuda", torch.cuda.current_device())
    )
    product = ag_gemm.AllGatherGemm()
    product.gather_for(operands[0])
    return lambda: product(*operands)


def main() -> None:
    """Run one job one way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=("gla", "ag-gemm"))
    parser.add_argument(
        "way",
        choices=("first", "replayed", "online"),
        help="first: the first config of each kernel, untuned",
    )
    parser.add_argument("--calls", type=int, default=2000)
    options = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    torch.manual_seed(rank)
    plain = chunk_gla.make_step() if options.step == "gla" else ag_gemm_step()
    if options.way == "first":
        from triton.runtime.autotuner import Autotuner

        for each in [each for each in gc.get_objects() if isinstance(each, Autotuner)]:
            each.configs = each.configs[:1]
        step: Any = plain
    else:
        step = contextual_autotune(
            is_dist=True, search="online" if options.way == "online" else None
        )(plain)
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    began, first_s, tuned_at, tuned_s = time.perf_counter(), 0.0, 0, 0.0
    for i in range(1, options.calls + 1):
        step()
        # As a job that reads its loss now and then; the host is not thousands of steps ahead.
        if i % 10 == 0:
            torch.cuda.synchronize()
        if i == 1:
            first_s = time.perf_counter() - began
        if not tuned_at and getattr(step, "records", None):
            tuned_at, tuned_s = i, time.perf_counter() - began
    torch.cuda.synchronize()
    total_s = time.perf_counter() - began
    ms = chunk_gla.device_ms(plain)
    if rank == 0:
        told = (
            f"first call {first_s:.2f} s, winners at call {tuned_at} after {tuned_s:.1f} s"
            if options.way != "first"
            else ""
        )
        print(
            f"{options.step} {options.way}: {options.calls} calls in {total_s:.2f} s; {told}; step"
            f" {ms:.4f} ms on the device",
            flush=True,
        )
        for record in getattr(step, "records", []):
            print(f"  {record.kernel}: {record.best.config}, {record.reason}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
