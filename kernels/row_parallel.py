"""The object behind the steps of row-parallel products: its group, its choices, its memory per shape, and what it refuses.

Knows operands and plans; knows nothing of kernels, and of how partial results travel only the name.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton

from kernels.ag_gemm import DTYPES, loadable, most_local_ranks
from kernels.partials import Exchange, PartialSums, Plan


class RowParallelGemm:
    """A @ B.T on a process group where each rank holds K / W columns of both, so that results are sums over ranks.

    Args:
        group: the ranks that hold A and B; the default group if None.
        config: the launch config to use. None: the one in the kernel's cache, tuned on a miss by the tuner around the step.
        partial_dtype: the type in which partial results travel: None for the operands' type, or torch.float32, which doubles the bytes.
        exchange: how partial results travel, where a call does not say.

    Attributes:
        n_ranks: W, the ranks of the group.
        n_local_ranks: how many of them share a machine, at most.
        last: the plan and the exchange of the last call, None before the first.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        config: triton.Config | None = None,
        partial_dtype: torch.dtype | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        group = dist.group.WORLD if group is None else group
        if group is None:
            raise ValueError(f"{type(self).__name__} needs a process group: call torch.distributed.init_process_group first")
        self._group, self.config, self.partial_dtype, self.exchange = group, config, partial_dtype, exchange
        self.n_ranks, self.n_local_ranks = dist.get_world_size(group), most_local_ranks(group)
        self.last: tuple[Plan, Exchange] | None = None
        self._sums: dict[tuple[Plan, torch.device], PartialSums] = {}

    def sums_for(self, plan: Plan, device: torch.device) -> PartialSums:
        """The memory of a plan. Collective where there is none yet."""
        sums = self._sums.get((plan, device))
        if sums is None:
            sums = self._sums[plan, device] = PartialSums(plan, device, self._group)
        return sums

    def run(
        self, plan: Plan, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *, exchange: Exchange, config: triton.Config | None
    ) -> torch.Tensor:
        """Queue a step of a plan, and return `c`."""
        self.last = plan, exchange
        sums = RowParallelGemm.sums_for(self, plan, a.device)
        PartialSums.step(sums, loadable(a), loadable(b), c, exchange, config=self.config if config is None else config)
        return c


def checked_operands(a: torch.Tensor, b: torch.Tensor) -> None:
    """Raise if two operands cannot be multiplied.

    Raises:
        ValueError: with the operands.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        needed = "need A as [M, K / W] and B as [N, K / W]"
    elif a.dtype not in DTYPES.values() or b.dtype != a.dtype or b.device != a.device:
        needed = "need bfloat16 or float16, the same for both, on one device"
    elif not a.numel() or not b.numel():
        needed = "nothing to multiply"
    else:
        return
    raise ValueError(f"{needed}; got A {list(a.shape)} {a.dtype}, B {list(b.shape)} {b.dtype}")
