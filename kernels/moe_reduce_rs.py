"""MoE-ReduceScatter, the second layer of a mixture of experts: grouped GEMM, weighted sum over each token's experts, reduce-scatter.

out[M / W, N] of each rank = sum over ranks and over j of weight[t, j] * hidden[t * top_k + j, K / W] @ B[expert[t, j]][N, K / W].T, with
the sums and their way to the owner hidden behind the product. The kernels are in grouped_gemm.py and moe_combine.py, the sorting in
routing.py; what the command line does is in cases.py. Without a GPU the same step runs under the Triton interpreter on
gloo ranks.

    launch/launch.sh kernels/moe_reduce_rs.py 8192 2048 1536 32 2 --check --autotune
    launch/launch.sh kernels/moe_reduce_rs.py --case perf --shape 8192,2048,1536,32,2 --skew 1
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

if __name__ == "__main__":  # first: the kernels are loaded once, under the module name that their records carry
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from kernels.cases import main

    sys.exit(main("moe_reduce_rs"))

import torch
import torch.distributed as dist
import triton

from dist_tune import autotune
from kernels.ag_gemm import DTYPES, loadable, most_local_ranks, output_for
from kernels.ag_moe import key_fn
from kernels.grouped_gemm import multiply_rows
from kernels.moe_combine import N_QUARTERS, Partials, push, reduce
from kernels.routing import Routing, RowSorter
from kernels.shard_gemm import device_properties
from kernels.symmetric import N_SLOTS, Epochs, StepOrder, SymmetricMemory, refuse_capture

N_CHUNKS = (1, 2, 4)
"""Pieces of a shard that are multiplied, and then sent, one after the other: each has tiles of its own, so more of them pad more."""
N_PUSH_SMS = (8, 16, 32)
MUCH = 2**30
"""More units than a part has."""


class MoeReduceScatter:
    """One step on a process group; calling it queues the step on the current stream and returns this rank's tokens.

    The product takes the peers' tokens first. As soon as it is done with a chunk of them, a second stream sums the chunk over its experts
    and stores the sums in the owner's memory, in the dtype of the operands; the owner adds its own part and the peers' in float32.

    Order, beyond rules 1 to 4 of symmetric.py: a rank needs no credit to store into slot e mod 2 in step e. Its own step e - 1 has ended,
    so the sums of all peers' step e - 1 were there. A peer sends those only after its reduction of step e - 2, the last reader of that
    slot.

    Collective: every rank of the group calls it, with the same shapes, dtype and routing. M / W, N and K / W can be any number from 1;
    where K / W is no multiple of 8, operands are padded first, which costs a copy of each. Experts are 0 to E - 1: a step with another
    number never ends.

    Args:
        group: the ranks; the default group if None.

    Attributes:
        n_ranks: W, the ranks of the group.
        n_local_ranks: how many of them share a machine, at most.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        group = dist.group.WORLD if group is None else group
        if group is None:
            raise ValueError("MoeReduceScatter needs a process group: call torch.distributed.init_process_group first")
        self._group, self.rank, self.n_ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.n_local_ranks = most_local_ranks(group)
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
        """This rank's [M / W, N], written to `out` if given; `hidden` is [M * top_k, K / W], `experts_b` [E, N, K / W].

        `config`, if given, is the product's; None: the one in the kernel's cache, tuned on a miss.
        """
        refuse_capture("a MoE-ReduceScatter step")
        if self.n_ranks > 1:
            _require_room(n_push_sms)
        out = self._result_for(hidden, experts_b, routing, out)
        n_experts, n, _ = experts_b.shape
        hidden, flat = loadable(hidden), loadable(experts_b.flatten(0, 1))
        buffers = self._buffers_for(routing, n, hidden)
        self._stream_order.follow(hidden.device)
        sorter = self._sorter_for(routing, n_experts, n_chunks)
        partials = buffers.partials(routing)
        by_expert = sorter.sort(routing.experts)
        done = by_expert.counters
        buffers.fork()
        try:
            n_free_sms = n_push_sms if self.n_ranks > 1 else 0
            b = flat.view(n_experts, n, -1)
            multiply_rows(hidden, b, buffers.results, by_expert, done=done, n_free_sms=n_free_sms, config=config)
        except BaseException:
            done.fill_(MUCH)  # peers wait for this rank's sums, right or wrong: the error is for the caller alone
            raise
        finally:
            # Before the reduction, which waits for peers: what they wait for is queued first.
            if self.n_ranks > 1:
                with buffers.side():
                    push(partials, done, n_chunks, n_push_sms)
            buffers.count()
            try:
                reduce(partials, out, n_push_sms)
            finally:
                buffers.join()
        return out

    def _buffers_for(self, routing: Routing, n: int, like: torch.Tensor) -> Buffers:
        """The memory of steps of one shape. Collective where there is none yet."""
        key = (*routing.experts.shape, n, like.dtype, like.device)
        if key not in self._buffers:
            self._buffers[key] = Buffers(routing.experts.shape, n, like, self._group)
        return self._buffers[key]

    def _sorter_for(self, routing: Routing, n_experts: int, n_chunks: int) -> RowSorter:
        """The sorting of rows into parts, which have a counter each: the chunks of rank + 1, those of rank + 2, ..., the own shard."""
        (n_tokens, top_k), device = routing.experts.shape, routing.experts.device
        key = n_tokens, top_k, n_experts, n_chunks, device
        if key not in self._sorters:
            m, w = n_tokens // self.n_ranks, self.n_ranks
            ends = [chunk * (N_QUARTERS // n_chunks) * m // N_QUARTERS for chunk in range(n_chunks + 1)]
            peers = [(self.rank + step) % w * m for step in range(1, w)]
            parts = [(peer + first, peer + end) for peer in peers for first, end in itertools.pairwise(ends)]
            parts.append((self.rank * m, (self.rank + 1) * m))
            self._sorters[key] = RowSorter([(first * top_k, end * top_k) for first, end in parts], n_experts, "part", device)
        return self._sorters[key]

    def _result_for(self, hidden: torch.Tensor, experts_b: torch.Tensor, routing: Routing, out: torch.Tensor | None) -> torch.Tensor:
        tokens, top_k = routing.experts.shape
        if hidden.dim() != 2 or experts_b.dim() != 3 or hidden.shape[1] != experts_b.shape[2] or len(hidden) != tokens * top_k:
            given = f"{list(hidden.shape)}, {list(experts_b.shape)}, experts {list(routing.experts.shape)}"
            raise ValueError(f"need hidden as [M * top_k, K / W], B as [E, N, K / W] and experts as [M, top_k]; got {given}")
        if hidden.dtype not in DTYPES.values() or experts_b.dtype != hidden.dtype or experts_b.device != hidden.device:
            raise ValueError(f"need bfloat16 or float16, the same for both, on one device; got {hidden.dtype} and {experts_b.dtype}")
        if tokens % self.n_ranks or not hidden.numel() or not experts_b.numel():
            raise ValueError(f"need tokens for each of the {self.n_ranks} ranks, as many for all; got {tokens}")
        return output_for(hidden, (tokens // self.n_ranks, experts_b.shape[1]), out)


class Buffers:
    """Memory, flags and streams of steps of one shape; construction is collective."""

    def __init__(self, routed: torch.Size, n: int, like: torch.Tensor, group: dist.ProcessGroup) -> None:
        (n_tokens, top_k), n_ranks = routed, dist.get_world_size(group)
        self.results = like.new_empty(n_tokens * top_k, n)
        """Of the step under way: the next one begins when all that read it are done."""
        slot = (n_ranks, n_tokens // n_ranks, n), like.dtype
        layout = {f"sums {number}": slot for number in range(N_SLOTS)} | {"flags": ((n_ranks, N_QUARTERS), torch.int32)}
        self._memory, self._epochs = SymmetricMemory(layout, like.device, group), Epochs()
        self._streams = Streams(like.device) if like.device.type == "cuda" else None

    def partials(self, routing: Routing) -> Partials:
        """What the kernels of the next step are given."""
        memory, epochs = self._memory, self._epochs
        slots, flags = memory.addresses(f"sums {epochs.slot}"), memory.addresses("flags")
        return Partials(self.results, routing.weights, slots, flags, memory.rank, epochs.next)

    def fork(self) -> None:
        """Let the second stream begin when the current one has come here."""
        if self._streams is not None:
            self._streams.fork()

    def side(self) -> AbstractContextManager[object]:
        """Within it the second stream is the current one; a CPU has none, and does one thing after the other."""
        return nullcontext() if self._streams is None else torch.cuda.stream(self._streams.side)

    def count(self) -> None:
        """Count the step: what peers wait for is queued, even if the rest fails."""
        self._epochs.advance()

    def join(self) -> None:
        """Let the current stream go on when the second one is done."""
        if self._streams is not None:
            self._streams.join()


class Streams:
    """A second stream beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self.side = torch.cuda.Stream(device, priority=-1)  # its few programs come before those of a product
        self._forked, self._done = torch.cuda.Event(), torch.cuda.Event()

    def fork(self) -> None:
        """Let it begin when the current stream has come here."""
        self._forked.record()
        self.side.wait_event(self._forked)

    def join(self) -> None:
        """Let the current stream go on when it is done."""
        self._done.record(self.side)
        torch.cuda.current_stream().wait_event(self._done)


def _require_room(n_push_sms: int) -> None:
    """Raise if the push would have no program, or would leave the product, for which it waits, no SM."""
    if triton.knobs.runtime.interpret:
        return
    n_sms = device_properties()["multiprocessor_count"]
    if not 0 < n_push_sms < n_sms:
        raise ValueError(f"n_push_sms, the SMs of the push, must be 1 to {n_sms - 1} on this GPU of {n_sms} SMs, got {n_push_sms}")


def config_space() -> list[dict[str, int]]:
    """Knobs of the communication, as arguments of `moe_reduce_rs`; the product's configs are those of its own `triton.autotune`."""
    return [{"n_chunks": n_chunks, "n_push_sms": n_push_sms} for n_chunks in N_CHUNKS for n_push_sms in push_sms()]


def push_sms() -> tuple[int, ...]:
    """SMs that may push; one number under the interpreter, where it changes nothing."""
    return N_PUSH_SMS[:1] if triton.knobs.runtime.interpret else N_PUSH_SMS


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
    """The step of `ctx` with the knobs that the tuner chooses; below `contextual_autotune` the product's config is tuned with them."""
    # Called by its class's name: a record counts for the code that it was made with, and an argument's code is not looked at.
    return MoeReduceScatter.__call__(ctx, hidden, experts_b, routing, n_chunks, n_push_sms, out=out)
