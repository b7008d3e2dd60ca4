"""AllGather-MoE, the first layer of a mixture of experts: all-gather of tokens, and a grouped GEMM that starts before they are there.

C[M * top_k, N / W]: row t * top_k + j is token t times the weights B[expert[t, j]][N / W, K].T of its j-th expert. The kernel is in
grouped_gemm.py, the gather in gather.py, the sorting in routing.py; what the command line does is in cases.py. Without a GPU the
same step runs under the Triton interpreter on gloo ranks.

    launch/launch.sh kernels/ag_moe.py --M 2048 --autotune
    launch/launch.sh kernels/ag_moe.py --case perf --shape 2048,14336,4096,32,2 --skew 1
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # first: the kernels are loaded once, under the module name that their records carry
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from kernels.cases import main

    sys.exit(main("ag_moe"))

import torch
import torch.distributed as dist
import triton

from dist_tune import autotune, to_hashable
from kernels.ag_gemm import DTYPES, AllGatherGemm, loadable, output_for
from kernels.gather import CollectiveGather, Gather
from kernels.grouped_gemm import Shards, multiply_rows
from kernels.routing import ORDERS, Order, Routing, RowSorter
from kernels.symmetric import StepOrder

WAYS = ("push", "collective")
"""push: copy engines, shard by shard, beside the product; collective: all_gather_into_tensor before it."""


class AllGatherMoe:
    """One step on a process group; calling it queues the step on the current stream and returns C.

    The experts of all tokens are known on all ranks. Every step sorts its rows by expert, and those of an expert by the shard of their
    token, in the order in which shards arrive: a tile waits for the shards that it has tokens of, and the first tiles are of this rank's
    own tokens.

    Collective: every rank of the group calls it, with the same shapes, dtype and routing. M / W, N / W and K can be any number from 1;
    where K is no multiple of 8, operands are padded first, which costs a copy of each.

    Args:
        group: the ranks that hold tokens and weights; the default group if None.

    Attributes:
        n_ranks: W, the ranks of the group.
        n_local_ranks: how many of them share a machine, at most.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        group = dist.group.WORLD if group is None else group
        if group is None:
            raise ValueError("AllGatherMoe needs a process group: call torch.distributed.init_process_group first")
        self._gemm = AllGatherGemm(group)  # its gathers are for shards of any rows
        self.n_ranks, self.n_local_ranks = self._gemm.n_ranks, self._gemm.n_local_ranks
        self._group, self._rank = group, dist.get_rank(group)
        self._stream_order = StepOrder()
        self._collectives: dict[Hashable, Gather] = {}
        self._sorters: dict[Hashable, RowSorter] = {}

    def __call__(
        self,
        tokens: torch.Tensor,
        experts_b: torch.Tensor,
        routing: Routing,
        order: Order = "arrival",
        way: str = "push",
        *,
        out: torch.Tensor | None = None,
        config: triton.Config | None = None,
    ) -> torch.Tensor:
        """C [M * top_k, N / W], written to `out` if given; `tokens` is this rank's [M / W, K], `experts_b` [E, N / W, K].

        `config`, if given, is the product's; None: the one in the kernel's cache, tuned on a miss.
        """
        c = self._result_for(tokens, experts_b, routing, out)
        n_experts, n, _ = experts_b.shape
        tokens, flat = loadable(tokens), loadable(experts_b.flatten(0, 1))
        gather = self._gather_for(tokens, way)
        self._stream_order.follow(tokens.device)
        # The copies first: they run while rows are sorted, and nothing that a peer waits for is queued behind a kernel that waits.
        gathered = gather.start(tokens)
        try:
            by_expert = self._sorter_for(routing, n_experts, order).sort(routing.experts)
            shards = Shards(tokens, gathered.flags, gathered.epoch, self._rank)
            multiply_rows(gathered.shards, flat.view(n_experts, n, -1), c, by_expert, shards=shards, config=config)
        finally:
            gather.finish()
        return c

    def _gather_for(self, tokens: torch.Tensor, way: str) -> Gather:
        """The gather of steps with such tokens. Collective where there is none yet."""
        if way == "push" or tokens.device.type == "cpu":
            return self._gemm.gather_for(tokens)
        key = tokens.shape, tokens.dtype, tokens.device
        if key not in self._collectives:
            self._collectives[key] = CollectiveGather(tokens.shape, tokens.dtype, self._group, tokens.device)
        return self._collectives[key]

    def _sorter_for(self, routing: Routing, n_experts: int, order: Order) -> RowSorter:
        """The sorting of rows whose part p are the tokens of shard rank - p: shards arrive in this order."""
        (n_tokens, top_k), device = routing.experts.shape, routing.experts.device
        key = n_tokens, top_k, n_experts, order, device
        if key not in self._sorters:
            rows, w = n_tokens // self.n_ranks * top_k, self.n_ranks
            parts = [((self._rank - part) % w * rows, ((self._rank - part) % w + 1) * rows) for part in range(w)]
            self._sorters[key] = RowSorter(parts, n_experts, order, device)
        return self._sorters[key]

    def _result_for(self, tokens: torch.Tensor, experts_b: torch.Tensor, routing: Routing, out: torch.Tensor | None) -> torch.Tensor:
        n_tokens, top_k = routing.experts.shape
        if tokens.dim() != 2 or experts_b.dim() != 3 or tokens.shape[1] != experts_b.shape[2] or len(tokens) * self.n_ranks != n_tokens:
            given = f"{list(tokens.shape)}, {list(experts_b.shape)}, experts {list(routing.experts.shape)}"
            raise ValueError(f"need tokens as [M / W, K], B as [E, N / W, K] and experts as [M, top_k], W {self.n_ranks}; got {given}")
        if tokens.dtype not in DTYPES.values() or experts_b.dtype != tokens.dtype or experts_b.device != tokens.device:
            raise ValueError(f"need bfloat16 or float16, the same for both, on one device; got {tokens.dtype} and {experts_b.dtype}")
        if not tokens.numel() or not experts_b.numel():
            raise ValueError(f"nothing to multiply; got {list(tokens.shape)} and {list(experts_b.shape)}")
        return output_for(tokens, (n_tokens * top_k, experts_b.shape[1]), out)


def config_space() -> list[dict[str, str]]:
    """Knobs of the communication, as arguments of `ag_moe`; the product's configs are those of its own `triton.autotune`."""
    ways = WAYS[:1] if triton.knobs.runtime.interpret else WAYS  # on a CPU both are the same
    return [{"order": order, "way": way} for way in ways for order in ORDERS]


def key_fn(rows: torch.Tensor, experts_b: torch.Tensor, routing: Routing, ctx: Any, *args: Any, **kwargs: Any) -> Hashable:
    """Calls of either layer's function that share a config: the same operands, on as many ranks, spread alike, with any routing."""
    return to_hashable(rows), to_hashable(experts_b), routing.experts.shape[1], ctx.n_ranks, ctx.n_local_ranks


@autotune(config_space=config_space(), key_fn=key_fn, n_warmup=3, n_repeat=5)
def ag_moe(
    tokens: torch.Tensor,
    experts_b: torch.Tensor,
    routing: Routing,
    ctx: AllGatherMoe,
    order: Order,
    way: str,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The step of `ctx` with the knobs that the tuner chooses; below `contextual_autotune` the product's config is tuned with them."""
    # Called by its class's name: a record counts for the code that it was made with, and an argument's code is not looked at.
    return AllGatherMoe.__call__(ctx, tokens, experts_b, routing, order, way, out=out)
