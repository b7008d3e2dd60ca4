"""An AllGather-GEMM of two layers' sizes, tuned inside the step: each rank holds rows of A and of
B, and gets C for all rows of A.

The kernel and the copies are those of kernels/ag_gemm.py. What is tuned is the product while the
other ranks' shards arrive.

    launch/launch.sh examples/allgather_gemm.py
    launch/launch.sh examples/allgather_gemm.py --shapes 4096,11008,4096 8192,28672,8192
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

import examples  # noqa: F401  # chooses the interpreter where there is no GPU
from dist_tune import contextual_autotune
from kernels import harness
from kernels.ag_gemm import AllGatherGemm


def main() -> None:
    """Tune each shape, and compare the result with a plain gather and product."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["64,64,32", "64,96,32"],
        metavar="M,N,K",
        help="of the whole product",
    )
    shapes = [tuple(map(int, text.split(","))) for text in parser.parse_args().shapes]
    device, console = harness.join_ranks()
    world = dist.get_world_size()
    ag_gemm = AllGatherGemm()

    @contextual_autotune(is_dist=True)
    def step(a_shard: torch.Tensor, b_shard: torch.Tensor) -> torch.Tensor:
        return ag_gemm(a_shard, b_shard)

    for m, n, k in shapes:
        a, b = (
            torch.randn(rows // world, k, dtype=torch.bfloat16, device=device) for rows in (m, n)
        )
        c = step(a, b)
        whole = torch.empty(m // world * world, k, dtype=a.dtype, device=device)
        dist.all_gather_into_tensor(whole, a)
        torch.testing.assert_close(c.float(), whole.float() @ b.float().T, rtol=2e-2, atol=0.1)
        console.print(f"{m} x {n} x {k}: {step.records[-1].best.config}")  # on rank 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
