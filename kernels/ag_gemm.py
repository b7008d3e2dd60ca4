"""AllGather-GEMM: C[M, N / W] = all_gather(A[M / W, K]) @ B[N / W, K].T, the gather hidden behind
the matrix product.

The step, as an object whose kernel `contextual_autotune` tunes (`AllGatherGemm`) and as a function
that takes its launch config and is tuned by `autotune` (`ag_gemm`). The kernel is in shard_gemm.py,
the gather in gather.py; what the command line does is in cases.py. Without a GPU the same step runs
under the Triton interpreter on gloo ranks.

    torchrun --nproc_per_node=4 kernels/ag_gemm.py --case check
    launch/launch.sh kernels/ag_gemm.py --case tune --shape 4096,11008,4096 --tuner function
    launch/launch.sh kernels/ag_gemm.py --case perf --shape 4096,11008,4096 --shape 8192,28672,8192
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

# First: kernels are loaded once, under the module name that their records carry.
if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("program.py")))

import torch
import torch.distributed as dist
import triton

from dist_tune import autotune, prune_by_shared_memory
from kernels.gather import CollectiveGather, Gather, PushGather
from kernels.operands import GroupStep, Shape, check_operands, key_fn, loadable, output_for
from kernels.shard_gemm import ag_gemm_kernel, multiply_shards


class AllGatherGemm(GroupStep):
    """One step of AllGather-GEMM."""

    def __init__(
        self, group: dist.ProcessGroup | None = None, config: triton.Config | None = None
    ) -> None:
        super().__init__(group, config)
        self._gathers: dict[tuple[torch.Size, torch.dtype, torch.device], Gather] = {}

    def __call__(
        self,
        a_shard: torch.Tensor,
        b_shard: torch.Tensor,
        out: torch.Tensor | None = None,
        config: triton.Config | None = None,
    ) -> torch.Tensor:
        """C [M, N / W], written to `out` if given; `a_shard` is [M / W, K], `b_shard` [N / W, K].

        `config`, if given, is used for this call in place of the object's.
        """
        check_operands(a_shard, b_shard, "A's shard as [M / W, K] and B's as [N / W, K]")
        c = output_for(a_shard, (a_shard.shape[0] * self.n_ranks, b_shard.shape[0]), out)
        a_shard, b_shard = loadable(a_shard), loadable(b_shard)
        gather = self.gather_for(a_shard)
        # The copies first: nothing that a peer waits for is queued behind a kernel that waits for a
        # peer.
        gathered = gather.start(a_shard)
        try:
            config = self.config if config is None else config
            multiply_shards(
                a_shard,
                gathered.shards,
                b_shard,
                c,
                gathered.flags,
                gathered.epoch,
                self.rank,
                config,
            )
        finally:
            gather.finish()
        return c

    def gather_for(self, a_shard: torch.Tensor) -> Gather:
        """The gather used by steps with shards like `a_shard`.

        Collective where there is none yet.
        """
        shape, dtype, device = a_shard.shape, a_shard.dtype, a_shard.device
        if (shape, dtype, device) not in self._gathers:
            by_rank: list[Any] = [None] * self.n_ranks
            dist.all_gather_object(by_rank, (tuple(shape), str(dtype)), group=self.group)
            if len(set(by_rank)) > 1:
                raise ValueError(
                    f"the shards of A need one shape and dtype on all ranks, got {by_rank}"
                )
            self._gathers[shape, dtype, device] = (
                PushGather(shape, dtype, device, self.group)
                if device.type == "cuda"
                else CollectiveGather(shape, dtype, self.group)
            )
        return self._gathers[shape, dtype, device]


def config_space() -> list[dict[str, triton.Config]]:
    """The configs of the kernel's own `triton.autotune`, as arguments of `ag_gemm`."""
    return [{"gemm_config": config} for config in ag_gemm_kernel.configs]


@autotune(
    config_space=config_space(),
    key_fn=key_fn,
    prune_fn=prune_by_shared_memory,
    n_warmup=3,
    n_repeat=5,
)
def ag_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    ctx: AllGatherGemm,
    gemm_config: triton.Config,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """C [M, N / W], written to `out` if given, of the shards `a` [M / W, K] and `b` [N / W, K];
    `gemm_config` comes from the tuner.

    Collective: all ranks of the group of `ctx` call it, and those are to be all ranks, or
    `autotune_pg` names their group. `ctx` holds symmetric memory; it is handed on as it is.
    """
    # Called by its class's name: a record counts for the code that it was made with, and an
    # argument's code is not looked at.
    return AllGatherGemm.__call__(ctx, a, b, out, gemm_config)


def random_operands(
    shape: Shape, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's shards of A and B, normally distributed; other ranks' differ."""
    (m, n, k), n_ranks = shape, dist.get_world_size()
    a, b = (torch.randn(rows // n_ranks, k, device=device, dtype=dtype) for rows in (m, n))
    return a, b
