"""MoE-ReduceScatter, the second layer of a mixture of experts: grouped GEMM, weighted sum over each
token's experts, reduce-scatter.

out[M / W, N] of each rank = sum over ranks and over j of weight[t, j] * hidden[t * top_k + j, K /
W] @ B[expert[t, j]][N, K / W].T, with the sums and their way to the owner hidden behind the
product. The kernels are in grouped_gemm.py and moe_combine.py, the sorting in routing.py; what the
command line does is in cases.py. Without a GPU the same step runs under the Triton interpreter on
gloo ranks.

    launch/launch.sh kernels/moe_reduce_rs.py 8192 2048 1536 32 2 --check --autotune
    launch/launch.sh kernels/moe_reduce_rs.py --case perf --shape 8192,2048,1536,32,2 --skew 1
"""

from __future__ import annotations

import itertools
import runpy
from collections.abc import Hashable
from pathlib import Path

# First: kernels are loaded once, under the module name that their records carry.
if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("program.py")))

import torch
import torch.distributed as dist
import triton

from dist_tune import autotune
from kernels.ag_moe import key_fn
from kernels.grouped_gemm import multiply_rows
from kernels.moe_combine import N_QUARTERS, Partials, push, reduce
from kernels.operands import GroupStep, check_operands, loadable, output_for
from kernels.routing import Routing, RowSorter
from kernels.shard_gemm import require_free_sms
from kernels.symmetric import N_SLOTS, StepOrder, SymmetricMemory, next_step, refuse_capture

N_CHUNKS = (1, 2, 4)
"""Pieces of a shard that are multiplied, and then sent, one after the other: each has tiles of its
own, so more of them pad more.
"""
N_PUSH_SMS = (8, 16, 32)
MUCH = 2**30
"""More units than a part has."""


class MoeReduceScatter(GroupStep):
    """One step of MoE-ReduceScatter.

    The product takes the peers' tokens first. As soon as it is done with a chunk of them, a second
    stream sums the chunk over its experts and stores the sums in the owner's memory, in the dtype
    of the operands; the owner adds its own part and the peers' in float32.

    Order, beyond rules 1 to 4 of symmetric.py: a rank needs no credit to store into slot e mod 2 in
    step e. Its own step e - 1 has ended, so the sums of all peers' step e - 1 were there. A peer
    sends those only after its reduction of step e - 2, the last reader of that slot.

    Experts are 0 to E - 1: a step with another number never ends.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, config: triton.Config | None = None
    ) -> None:
        super().__init__(group, config)
        self._stream_order = StepOrder()
        self._buffers: dict[Hashable, Buffers] = {}
        self._sorters: dict[Hashable, RowSorter] = {}

    def __call__(
        self,
        hidden: torch.Tensor,
        experts_b: torch.Tensor,
        routing: Routing,
        n_chunks: int = 1,
        n_push_sms: int = 16,
        *,
        out: torch.Tensor | None = None,
        config: triton.Config | None = None,
    ) -> torch.Tensor:
        """This rank's [M / W, N], written to `out` if given; `hidden` is [M * top_k, K / W],
        `experts_b` [E, N, K / W].

        `config`, if given, is used for this call in place of the object's.
        """
        refuse_capture("a MoE-ReduceScatter step")
        if self.n_ranks > 1:
            require_free_sms("n_push_sms", n_push_sms)
        check_operands(hidden, experts_b, "hidden as [M * top_k, K / W] and B as [E, N, K / W]", 3)
        (n_experts, n, _), (n_tokens, top_k) = experts_b.shape, routing.experts.shape
        if len(hidden) != n_tokens * top_k or n_tokens % self.n_ranks:
            given = f"{n_tokens} tokens on {self.n_ranks} ranks, top_k {top_k}, {len(hidden)} rows"
            raise ValueError(
                "need as many tokens for each rank, and a row for each choice of a token; got"
                f" {given}"
            )
        out = output_for(hidden, (n_tokens // self.n_ranks, n), out)
        hidden, flat = loadable(hidden), loadable(experts_b.flatten(0, 1))
        buffers = self._buffers_for(routing, n, hidden)
        self._stream_order.follow(hidden.device)
        by_expert = self._sorter_for(routing, n_experts, n_chunks).sort(routing.experts)
        partials, done, side = buffers.partials(routing), by_expert.counters, buffers.side
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        try:
            n_free_sms = n_push_sms if self.n_ranks > 1 else 0
            b, config = flat.view(n_experts, n, -1), self.config if config is None else config
            multiply_rows(
                hidden,
                b,
                buffers.results,
                by_expert,
                done=done,
                n_free_sms=n_free_sms,
                config=config,
            )
        except BaseException:
            # Peers wait for this rank's sums, right or wrong: the error is for the caller alone.
            done.fill_(MUCH)
            raise
        finally:
            # Before the reduction, which waits for peers: what they wait for is queued first.
            if self.n_ranks > 1:
                # None is a CPU's, which does one thing after the other.
                with torch.cuda.stream(side):
                    push(partials, done, n_chunks, n_push_sms)
            buffers.n_done += 1  # what peers wait for is queued, even if the rest fails
            try:
                reduce(partials, out, n_push_sms)
            finally:
                if side is not None:
                    torch.cuda.current_stream().wait_stream(side)
        return out

    def _buffers_for(self, routing: Routing, n: int, like: torch.Tensor) -> Buffers:
        """The memory of steps of one shape. Collective where there is none yet."""
        key = (*routing.experts.shape, n, like.dtype, like.device)
        if key not in self._buffers:
            self._buffers[key] = Buffers(routing.experts.shape, n, like, self.group)
        return self._buffers[key]

    def _sorter_for(self, routing: Routing, n_experts: int, n_chunks: int) -> RowSorter:
        """The sorting of rows into parts, which have a counter each: the chunks of rank + 1, those
        of rank + 2, ..., the own shard.
        """
        (n_tokens, top_k), device = routing.experts.shape, routing.experts.device
        key = n_tokens, top_k, n_experts, n_chunks, device
        if key not in self._sorters:
            m, w = n_tokens // self.n_ranks, self.n_ranks
            ends = [
                chunk * (N_QUARTERS // n_chunks) * m // N_QUARTERS for chunk in range(n_chunks + 1)
            ]
            peers = [(self.rank + step) % w * m for step in range(1, w)]
            parts = [
                (peer + first, peer + end)
                for peer in peers
                for first, end in itertools.pairwise(ends)
            ]
            parts.append((self.rank * m, (self.rank + 1) * m))
            self._sorters[key] = RowSorter(
                [(first * top_k, end * top_k) for first, end in parts], n_experts, "part", device
            )
        return self._sorters[key]


class Buffers:
    """Memory, flags and the second stream of steps of one shape; construction is collective."""

    def __init__(
        self, routed: torch.Size, n: int, like: torch.Tensor, group: dist.ProcessGroup
    ) -> None:
        (n_tokens, top_k), n_ranks = routed, dist.get_world_size(group)
        self.results = like.new_empty(n_tokens * top_k, n)
        """Of the step under way: the next one begins when all that read it are done."""
        slot = (n_ranks, n_tokens // n_ranks, n), like.dtype
        layout = {f"sums {number}": slot for number in range(N_SLOTS)} | {
            "flags": ((n_ranks, N_QUARTERS), torch.int32)
        }
        self._memory, self.n_done = SymmetricMemory(layout, like.device, group), 0
        # Its few programs come before those of a product.
        self.side = (
            torch.cuda.Stream(like.device, priority=-1) if like.device.type == "cuda" else None
        )

    def partials(self, routing: Routing) -> Partials:
        """What the kernels of the next step are given."""
        memory, (epoch, slot) = self._memory, next_step(self.n_done)
        slots, flags = memory.addresses(f"sums {slot}"), memory.addresses("flags")
        return Partials(self.results, routing.weights, slots, flags, memory.rank, epoch)


def config_space() -> list[dict[str, int]]:
    """Knobs of the communication, as arguments of `moe_reduce_rs`; the product's configs are those
    of its own `triton.autotune`.
    """
    # Under the interpreter it changes nothing.
    push_sms = N_PUSH_SMS[:1] if triton.knobs.runtime.interpret else N_PUSH_SMS
    return [
        {"n_chunks": n_chunks, "n_push_sms": n_push_sms}
        for n_chunks in N_CHUNKS
        for n_push_sms in push_sms
    ]


@autotune(config_space=config_space(), key_fn=key_fn, n_warmup=3, n_repeat=5)
def moe_reduce_rs(
    hidden: torch.Tensor,
    experts_b: torch.Tensor,
    routing: Routing,
    ctx: MoeReduceScatter,
    n_chunks: int,
    n_push_sms: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The step of `ctx` with the knobs that the tuner chooses; below `contextual_autotune` the
    product's config is tuned with them.
    """
    # Called by its class's name: a record counts for the code that it was made with, and an
    # argument's code is not looked at.
    return MoeReduceScatter.__call__(ctx, hidden, experts_b, routing, n_chunks, n_push_sms, out=out)
