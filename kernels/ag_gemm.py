"""AllGather-GEMM: C[M, N / W] = all_gather(A[M / W, K]) @ B[N / W, K].T, the gather hidden behind the matrix product.

The step, as an object whose kernel `contextual_autotune` tunes (`AllGatherGemm`) and as a function that takes its launch config
and is tuned by `autotune` (`ag_gemm`). The kernel is in shard_gemm.py, the gather in gather.py; what the command line does is in
cases.py. Without a GPU the same step runs under the Triton interpreter on gloo ranks.

    torchrun --nproc_per_node=4 kernels/ag_gemm.py --case check
    launch/launch.sh kernels/ag_gemm.py --case tune --shape 4096,11008,4096 --tuner function
    launch/launch.sh kernels/ag_gemm.py --case perf --shape 4096,11008,4096 --shape 8192,28672,8192
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # first: the kernel is loaded once, under the module name that its records carry
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from kernels.cases import main

    sys.exit(main("ag_gemm"))

import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton

from dist_tune import autotune, prune_by_shared_memory, to_hashable
from kernels.gather import CollectiveGather, Gather, PushGather
from kernels.shard_gemm import TMA_ALIGNMENT_BYTES, ag_gemm_kernel, multiply_shards

Shape = tuple[int, ...]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class AllGatherGemm:
    """One step of AllGather-GEMM on a process group; calling it queues the step on the current stream and returns C.

    Collective: every rank of the group calls it, with the same shapes and dtype. M / W, N / W and K can be any number from 1;
    where K is no multiple of 8, both operands are padded first, which costs a copy of each.

    Args:
        group: the ranks that hold A and B; the default group if None.
        config: the launch config to use. None: the one in the kernel's cache, tuned on a miss.

    Attributes:
        n_ranks: W, the ranks of the group.
        n_local_ranks: how many of them share a machine, at most.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, config: triton.Config | None = None) -> None:
        group = dist.group.WORLD if group is None else group
        if group is None:
            raise ValueError("AllGatherGemm needs a process group: call torch.distributed.init_process_group first")
        self._group = group
        self._rank, self.n_ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        self.n_local_ranks = most_local_ranks(self._group)
        self._gathers: dict[tuple[torch.Size, torch.dtype, torch.device], Gather] = {}
        self.config = config

    def __call__(
        self, a_shard: torch.Tensor, b_shard: torch.Tensor, out: torch.Tensor | None = None, config: triton.Config | None = None
    ) -> torch.Tensor:
        """C [M, N / W], written to `out` if given; `a_shard` is [M / W, K], `b_shard` [N / W, K].

        `config`, if given, is used for this call in place of the object's.
        """
        c = self._result_for(a_shard, b_shard, out)
        a_shard, b_shard = loadable(a_shard), loadable(b_shard)
        gather = self.gather_for(a_shard)
        # The copies first: nothing that a peer waits for is queued behind a kernel that waits for a peer.
        gathered = gather.start(a_shard)
        try:
            config = self.config if config is None else config
            multiply_shards(a_shard, gathered.shards, b_shard, c, gathered.flags, gathered.epoch, self._rank, config)
        finally:
            gather.finish()
        return c

    def gather_for(self, a_shard: torch.Tensor) -> Gather:
        """The gather used by steps with shards like `a_shard`. Collective where there is none yet."""
        shape, dtype, device = a_shard.shape, a_shard.dtype, a_shard.device
        if (shape, dtype, device) not in self._gathers:
            by_rank: list[Any] = [None] * self.n_ranks
            dist.all_gather_object(by_rank, (tuple(shape), str(dtype)), group=self._group)
            if len(set(by_rank)) > 1:
                raise ValueError(f"the shards of A need one shape and dtype on all ranks, got {by_rank}")
            self._gathers[shape, dtype, device] = (
                PushGather(shape, dtype, device, self._group) if device.type == "cuda" else CollectiveGather(shape, dtype, self._group)
            )
        return self._gathers[shape, dtype, device]

    def _result_for(self, a_shard: torch.Tensor, b_shard: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        reason = unusable(a_shard, b_shard)
        if reason:
            given = f"A's shard {list(a_shard.shape)} {a_shard.dtype}, B's {list(b_shard.shape)} {b_shard.dtype}"
            raise ValueError(f"{reason}; got {given}")
        shape = (a_shard.shape[0] * self.n_ranks, b_shard.shape[0])
        return output_for(a_shard, shape, out)


def output_for(like: torch.Tensor, shape: Shape, out: torch.Tensor | None) -> torch.Tensor:
    """`out` if it is given and fits, or else a new tensor of a shape, with the dtype and device of another."""
    if out is None:
        return like.new_empty(shape)
    if out.shape != shape or out.dtype != like.dtype or out.device != like.device or not out.is_contiguous():
        raise ValueError(f"need out as contiguous {list(shape)} {like.dtype} on {like.device}; got {list(out.shape)} {out.dtype}")
    return out


def config_space() -> list[dict[str, triton.Config]]:
    """The configs of the kernel's own `triton.autotune`, as arguments of `ag_gemm`."""
    return [{"gemm_config": config} for config in ag_gemm_kernel.configs]


def key_fn(a: torch.Tensor, b: torch.Tensor, ctx: AllGatherGemm, *args: Any, **kwargs: Any) -> Hashable:
    """Calls of `ag_gemm` that share a config: the same operands, on as many ranks, spread alike."""
    return to_hashable(a), to_hashable(b), ctx.n_ranks, ctx.n_local_ranks


@autotune(config_space=config_space(), key_fn=key_fn, prune_fn=prune_by_shared_memory, n_warmup=3, n_repeat=5)
def ag_gemm(
    a: torch.Tensor, b: torch.Tensor, ctx: AllGatherGemm, gemm_config: triton.Config, out: torch.Tensor | None = None
) -> torch.Tensor:
    """C [M, N / W], written to `out` if given, of the shards `a` [M / W, K] and `b` [N / W, K]; `gemm_config` comes from the tuner.

    Collective: all ranks of the group of `ctx` call it, and those are to be all ranks, or `autotune_pg` names their group. `ctx`
    holds symmetric memory; it is handed on as it is.
    """
    # Called by its class's name: a record counts for the code that it was made with, and an argument's code is not looked at.
    return AllGatherGemm.__call__(ctx, a, b, out, gemm_config)


def most_local_ranks(group: dist.ProcessGroup) -> int:
    """How many ranks of a group share a machine, at most."""
    n_per_host = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))  # torchrun numbers ranks host by host
    return max(Counter(rank // n_per_host for rank in dist.get_process_group_ranks(group)).values())


def unusable(a_shard: torch.Tensor, b_shard: torch.Tensor) -> str:
    """Why two operands cannot be multiplied; empty if they can."""
    if a_shard.dim() != 2 or b_shard.dim() != 2 or a_shard.shape[1] != b_shard.shape[1]:
        return "need A's shard as [M / W, K] and B's as [N / W, K]"
    if a_shard.dtype not in DTYPES.values() or b_shard.dtype != a_shard.dtype or b_shard.device != a_shard.device:
        return "need bfloat16 or float16, the same for both, on one device"
    return "" if a_shard.numel() and b_shard.numel() else "nothing to multiply"


def loadable(operand: torch.Tensor) -> torch.Tensor:
    """`operand` as a tensor descriptor can read it: contiguous, aligned, K padded with zeros to a multiple of 16 bytes."""
    alignment = TMA_ALIGNMENT_BYTES // operand.element_size()
    if operand.shape[1] % alignment:
        return F.pad(operand, (0, -operand.shape[1] % alignment))
    if not operand.is_contiguous() or operand.data_ptr() % TMA_ALIGNMENT_BYTES:
        return operand.clone(memory_format=torch.contiguous_format)
    return operand


def random_operands(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's shards of A and B, normally distributed; other ranks' differ."""
    (m, n, k), n_ranks = shape, dist.get_world_size()
    if m % n_ranks or n % n_ranks:
        raise ValueError(f"M and N must be multiples of the {n_ranks} ranks, got --shape {m},{n},{k}")
    a, b = (torch.randn(rows // n_ranks, k, device=device, dtype=dtype) for rows in (m, n))
    return a, b
