"""AllGather-MoE, the first layer of a mixture of experts: all-gather of tokens, and a grouped GEMM
that starts before they are there.

C[M * top_k, N / W]: row t * top_k + j is token t times the weights B[expert[t, j]][N / W, K].T of
its j-th expert. The kernel is in grouped_gemm.py, the gather in gather.py, the sorting in
routing.py; what the command line does is in cases.py. Without a GPU the same step runs under the
Triton interpreter on gloo ranks.

    launch/launch.sh kernels/ag_moe.py --M 2048 --autotune
    launch/launch.sh kernels/ag_moe.py --case perf --shape 2048,14336,4096,32,2 --skew 1
"""

from __future__ import annotations

import runpy
from collections.abc import Hashable
from pathlib import Path
from typing import Any

# First: kernels are loaded once, under the module name that their records carry.
if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("program.py")))

import torch
import torch.distributed as dist
import triton

from dist_tune import autotune
from kernels import operands
from kernels.ag_gemm import AllGatherGemm
from kernels.grouped_gemm import Shards, multiply_rows
from kernels.operands import GroupStep, check_operands, loadable, output_for
from kernels.routing import ORDERS, Order, Routing, RowSorter
from kernels.symmetric import StepOrder


class AllGatherMoe(GroupStep):
    """One step of AllGather-MoE.

    The experts of all tokens are known on all ranks. Every step sorts its rows by expert, and those
    of an expert by the shard of their token, in the order in which shards arrive: a tile waits for
    the shards that it has tokens of, and the first tiles are of this rank's own tokens.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, config: triton.Config | None = None
    ) -> None:
        super().__init__(group, config)
        self._gemm = AllGatherGemm(group)  # its gathers are for shards of any rows
        self._stream_order = StepOrder()
        self._sorters: dict[Hashable, RowSorter] = {}

    def __call__(
        self,
        tokens: torch.Tensor,
        experts_b: torch.Tensor,
        routing: Routing,
        order: Order = "arrival",
        *,
        out: torch.Tensor | None = None,
        config: triton.Config | None = None,
    ) -> torch.Tensor:
        """C [M * top_k, N / W], written to `out` if given; `tokens` is this rank's [M / W, K],
        `experts_b` [E, N / W, K].

        `config`, if given, is used for this call in place of the object's.
        """
        check_operands(tokens, experts_b, "tokens as [M / W, K] and B as [E, N / W, K]", 3)
        (n_experts, n, _), (n_tokens, top_k) = experts_b.shape, routing.experts.shape
        if len(tokens) * self.n_ranks != n_tokens:
            raise ValueError(
                f"need the experts of {self.n_ranks} ranks with {len(tokens)} tokens each, got"
                f" those of {n_tokens} tokens"
            )
        c = output_for(tokens, (n_tokens * top_k, n), out)
        tokens, flat = loadable(tokens), loadable(experts_b.flatten(0, 1))
        gather = self._gemm.gather_for(tokens)
        self._stream_order.follow(tokens.device)
        # The copies first: they run while rows are sorted, and nothing that a peer waits for is
        # queued behind a kernel that waits.
        gathered = gather.start(tokens)
        try:
            by_expert = self._sorter_for(routing, n_experts, order).sort(routing.experts)
            shards = Shards(tokens, gathered.flags, gathered.epoch, self.rank)
            b, config = flat.view(n_experts, n, -1), self.config if config is None else config
            multiply_rows(gathered.shards, b, c, by_expert, shards=shards, config=config)
        finally:
            gather.finish()
        return c

    def _sorter_for(self, routing: Routing, n_experts: int, order: Order) -> RowSorter:
        """The sorting of rows whose part p are the tokens of shard rank - p: shards arrive in this
        order.
        """
        (n_tokens, top_k), device = routing.experts.shape, routing.experts.device
        key = n_tokens, top_k, n_experts, order, device
        if key not in self._sorters:
            rows, w = n_tokens // self.n_ranks * top_k, self.n_ranks
            parts = [
                ((self.rank - part) % w * rows, ((self.rank - part) % w + 1) * rows)
                for part in range(w)
            ]
            self._sorters[key] = RowSorter(parts, n_experts, order, device)
        return self._sorters[key]


def config_space() -> list[dict[str, str]]:
    """Orders of tiles, as arguments of `ag_moe`; the product's configs are those of its own
    `triton.autotune`.
    """
    return [{"order": order} for order in ORDERS]


def key_fn(
    rows: torch.Tensor,
    experts_b: torch.Tensor,
    routing: Routing,
    ctx: Any,
    *args: Any,
    **kwargs: Any,
) -> Hashable:
    """Calls of either layer's function that share a config: the same operands, on as many ranks,
    spread alike, with any routing.
    """
    return *operands.key_fn(rows, experts_b, ctx), routing.experts.shape[1]


@autotune(config_space=config_space(), key_fn=key_fn, n_warmup=3, n_repeat=5)
def ag_moe(
    tokens: torch.Tensor,
    experts_b: torch.Tensor,
    routing: Routing,
    ctx: AllGatherMoe,
    order: Order,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The step of `ctx` with the order that the tuner chooses; below `contextual_autotune` the
    product's config is tuned with it.
    """
    # Called by its class's name: a record counts for the code that it was made with, and an
    # argument's code is not looked at.
    return AllGatherMoe.__call__(ctx, tokens, experts_b, routing, order, out=out)
