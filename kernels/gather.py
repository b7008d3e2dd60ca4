"""Two ways to gather A: copy engines of GPUs that push shards into each other's memory, or a
collective.

Knows buffers, flags, epochs and streams; knows nothing of the kernel that consumes the shards. Both
ways are used alike: `start` queues the gather of one step and says where shard r will be once
`flags[r]` has reached `epoch`; `finish` is called when the consumer of that step has been queued.
Flags and epochs keep the rules of symmetric.py; here streams raise and await them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from kernels.symmetric import N_SLOTS, SymmetricMemory, as_int32, refuse_capture

DRIVER_ARGUMENTS = {
    "cuMemcpyAsync": (
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_size_t,
        ctypes.c_void_p,
    ),  # to, from, bytes, stream
    "cuStreamBatchMemOp_v2": (
        ctypes.c_void_p,
        ctypes.c_uint,
        ctypes.c_void_p,
        ctypes.c_uint,
    ),  # stream, count, operations, flags
}
WAIT, WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32 and CU_STREAM_MEM_OP_WRITE_VALUE_32
MOST_OPS = 255
"""Operations that the driver takes in one submission."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """Where the shards of one step are, or will be."""

    shards: torch.Tensor
    """[M, K]: shard r in rows r * M / W and on. The own shard may be missing: its owner has it."""
    flags: torch.Tensor
    """int32 [W]: shard r is complete once flags[r] - epoch >= 0."""
    epoch: int


class CollectiveGather:
    """`all_gather_into_tensor`, complete when `start` returns: for CPUs, where nothing overlaps
    anyway.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        n_ranks = dist.get_world_size(group)
        self._group = group
        self._shards = torch.empty(n_ranks * shape[0], shape[1], dtype=dtype)
        self._flags = torch.zeros(n_ranks, dtype=torch.int32)
        self._epoch = 0

    def start(self, shard: torch.Tensor) -> Gathered:
        """Gather now; `shard` is [M / W, K], contiguous.

        Collective: every rank of the group calls this.
        """
        self._epoch += 1
        dist.all_gather_into_tensor(self._shards, shard, group=self._group)
        self._flags.fill_(as_int32(self._epoch))
        return Gathered(self._shards, self._flags, as_int32(self._epoch))

    def finish(self) -> None:
        """Nothing to do: readers have run when their launch returns."""


class PushGather:
    """Each GPU's copy engine pushes its shard to one peer after the other and raises the peer's
    flag behind each.

    Pushing needs neither a copy into symmetric memory nor a barrier before the first byte: the
    source is the caller's tensor. What it needs is leave to overwrite: slot e mod 2 was last read
    in step e - 2. So behind its pushes of step e - 1 a copy stream waits (no kernel does, no
    program is taken up) for each peer's credit of step e - 2, which the peer gives behind its own
    pushes of step e - 1. Whatever a rank waits for was queued by its peers before anything of
    theirs that waits for this rank in turn: no order of execution can deadlock.

    Construction is collective: every rank of the group, the same shape and dtype.
    """

    def __init__(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        layout = {
            "slots": ((N_SLOTS, dist.get_world_size(group), *shape), dtype),
            "ready": ((dist.get_world_size(group),), torch.int32),  # by source
            "credits": ((dist.get_world_size(group),), torch.int32),  # by destination
        }
        self._memory = memory = SymmetricMemory(layout, device, group)
        rank, n_ranks = memory.rank, memory.n_ranks
        # Each at another peer at any time, so that no link carries two shards; rank - 1's shard is
        # the first to come.
        peers = [(rank + i) % n_ranks for i in range(1, n_ranks)]
        self._own_slots = [slot.flatten(0, 1) for slot in memory.own["slots"]]
        self._targets = [
            [memory.on(peer)["slots"][slot, rank].data_ptr() for peer in peers]
            for slot in range(N_SLOTS)
        ]
        self._ready = memory.own["ready"]
        self._raise_ready = [MemoryOps([(WRITE, memory.on(peer)["ready"], rank)]) for peer in peers]
        give = [(WRITE, memory.on(peer)["credits"], rank) for peer in peers]
        self._trade_credits = MemoryOps(
            give + [(WAIT, memory.own["credits"], peer) for peer in peers]
        )
        self._copies = torch.cuda.Stream(device, priority=-1)
        self._inputs_ready, self._pushed, self._consumed = (torch.cuda.Event() for _ in range(3))
        self._epoch = 0

    def start(self, shard: torch.Tensor) -> Gathered:
        """Queue the pushes of this step on the copy stream, behind what the current stream holds so
        far.

        `shard` is [M / W, K], contiguous, and stays unchanged until after `finish`.
        """
        refuse_capture("an AllGather-GEMM step")
        self._epoch += 1
        slot = self._epoch % N_SLOTS
        self._inputs_ready.record()
        self._copies.wait_event(self._inputs_ready)
        for target, ready in zip(self._targets[slot], self._raise_ready, strict=True):
            copy(target, shard, self._copies)
            ready.queue(self._copies, self._epoch)
        self._pushed.record(self._copies)
        # Here rather than before the pushes of the next step: there it would delay the first shard.
        self._trade_credits.queue(self._copies, self._epoch - 1)
        return Gathered(self._own_slots[slot], self._ready, as_int32(self._epoch))

    def finish(self) -> None:
        """Let the current stream go on only when the shard has left: the caller may overwrite
        it.
        """
        self._consumed.record()
        # Now rather than at the next start: there it would stand between the inputs and the first
        # push.
        self._copies.wait_event(self._consumed)
        torch.cuda.current_stream().wait_event(self._pushed)


Gather = CollectiveGather | PushGather


class MemoryOp(ctypes.Structure):
    """CUstreamBatchMemOpParams of cuda.h: a write of a 32-bit word, or a wait for one, that takes
    its turn in a stream.
    """

    _fields_ = (
        ("operation", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        (
            "flags",
            ctypes.c_uint64,
        ),  # 0: write behind a fence; wait until word - value >= 0, so values may wrap around
        ("unused", ctypes.c_uint64 * 2),
    )


class MemoryOps:
    """Writes of and waits for words, some of them a peer's: `(operation, tensor, index)` each, of
    one value times a weight, or times 1.
    """

    def __init__(
        self, ops: list[tuple[int, torch.Tensor, int]], weights: Sequence[int] | None = None
    ) -> None:
        if len(ops) > MOST_OPS:
            raise ValueError(
                f"the driver takes at most {MOST_OPS} operations at once, got {len(ops)}: copy"
                " fewer rows at once"
            )
        self._weights = [1] * len(ops) if weights is None else weights
        records = [
            MemoryOp(operation, words.data_ptr() + 4 * index) for operation, words, index in ops
        ]
        self._batch = (MemoryOp * len(records))(*records)

    def queue(self, stream: torch.cuda.Stream, value: int) -> None:
        """Queue them in one submission: each takes a stream about 3 microseconds."""
        for op, weight in zip(self._batch, self._weights, strict=True):
            op.value = value * weight & 0xFFFFFFFF
        if len(self._batch):
            call_driver(
                "cuStreamBatchMemOp_v2", stream.cuda_stream, len(self._batch), self._batch, 0
            )


def copy(target: int, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Queue a copy of a contiguous tensor to an address: what `Tensor.copy_` does, for less of the
    host's time.
    """
    call_driver("cuMemcpyAsync", target, source.data_ptr(), source.nbytes, stream.cuda_stream)


def call_driver(name: str, *args: object) -> None:
    """Call a function of the CUDA driver, and raise if it fails."""
    status = driver_function(name)(*args)
    if status != 0:
        raise RuntimeError(f"{name} failed with CUDA driver error {status}; cuda.h has its name")


@functools.cache
def driver_function(name: str) -> Callable[..., int]:
    """One of the driver's own functions: torch can queue writes of words, but no waits for them,
    and its copies cost the host more.
    """
    function: Callable[..., int] = getattr(ctypes.CDLL("libcuda.so.1"), name)
    function.argtypes = DRIVER_ARGUMENTS[name]  # type: ignore[attr-defined]
    return function
