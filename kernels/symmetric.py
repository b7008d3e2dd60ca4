# mypy: disable-error-code="no-untyped-def"
# Triton reads a kernel's annotations as argument types, so the arguments of @triton.jit functions
# carry none.
"""Symmetric memory: buffers that every rank of a group can address, the flags that go with them,
and their order.

Knows named tensors, addresses, flags and epochs; knows nothing of products, tiles or streams that
copy. On GPUs the memory is torch's symmetric memory over NVLink; on CPUs it is a file that the
processes of one host map, so that the same kernels store into a peer's memory and spin on flags
under Triton's interpreter.

The rules of order, for kernels that store into a peer's memory:

1. *Stores, then the flag.* Every thread of a program stores its part of a tile; `signal` then joins
  the threads (`bar.sync`) and one thread
   adds to the flag with release semantics at system scope. The barrier orders the stores of all
   threads before that add, and a release is cumulative: a peer that reads the new count sees the
   stores of all threads, not of the one thread alone. GPU scope would be too narrow, because the
   reader is another GPU or a copy engine.
2. *The flag, then loads.* `wait_until` reads the flag with acquire semantics at system scope, and a
  barrier behind it orders the loads of
   all threads. Triton's software pipelining may still move a load up; `wait_until` returns a 0 that
   it cannot foresee, and a caller that adds the 0 to the addresses of the loads makes them depend
   on the wait. LLVM, which comes later, does fold the 0, and moves no load over the acquire and its
   barriers, which are volatile to it.
3. *Bulk copies (TMA)* read and write through the async proxy, which rules 1 and 2 do not order.
  Loads: pass the 0 through
   `fence_bulk_loads` between the wait and the load. Stores: a program waits until the source of a
   descriptor store may be overwritten (`wait_group.read`), which says nothing of its target; tiles
   for a peer are therefore stored through pointers. What the same GPU reads after the kernel has
   ended may be stored in either way.
4. *Copy engines* take their turn in a stream, between a wait for a word and a write of one
  (`gather.MemoryOps`). The wait is for a flag
   of the same GPU, which a kernel raises by rule 1: its release at system scope orders its stores
   before the engine's reads, too. The write has a fence at system scope before it, which orders the
   copy before the flag, for a reader that keeps rule 2. A write sets a flag to what counting would
   make of it, so no flag is to be written and counted at once: the next launch waits for the
   copies. A kernel that spins on such a flag may have all multiprocessors, as no program makes the
   copy; but the host must be able to queue the copy while the kernel runs.
5. *Flags count and are never reset.* Resetting would need a moment without additions and reads. A
  flag that counts steps is waited
   for with `epoch`; one that counts elements, with epoch x elements of a step. Both wrap around at
   2^32: compare differences, which are right as long as no flag is 2^31 ahead of what is waited
   for.
6. *Reuse.* A buffer has `N_SLOTS` slots, used in turn. Slot e mod 2 may be written in step e once
  *all* its readers of step e - 2 are
   done. A rank says so for its own reads by a credit to every peer: at the start of step e - 1,
   when stream order has ended its step e - 2. A rank waits for the credits of step e - 2 before its
   first store of step e. No order of execution can deadlock, because the peer queued that credit
   before anything of its own that waits for step e of this rank.
7. *The same step on all ranks.* A step that raises before its first launch has not advanced the
  epoch; its repetition is the same step.
   A CUDA graph would replay one epoch for ever, so `refuse_capture` raises.

    parts = {"tiles": ((2, 128, 64), torch.bfloat16), "flags": ((8,), torch.int32)}
    memory = SymmetricMemory(parts, device, group)
    memory.own["tiles"]  # this rank's tensor
    memory.on(1)["flags"]  # that of rank 1
    memory.addresses("tiles")  # int64 [W], for kernels
"""

from __future__ import annotations

import math
import shutil
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import triton
import triton.language as tl

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Name -> shape and dtype; the same on all ranks."""
N_SLOTS = 2
"""Buffers used in turn: a rank one step ahead stores into the one that nobody reads any more."""
ALIGNMENT_BYTES = 128
"""Where each tensor of a block starts: vector stores and bulk copies need 16, and tensors of two
writers share no cache line.
"""


def offsets(layout: Layout) -> tuple[dict[str, int], int]:
    """The byte at which each tensor starts, and the bytes of the whole block."""
    starts, end = {}, 0
    for name, (shape, dtype) in layout.items():
        starts[name] = end
        end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return starts, max(end, ALIGNMENT_BYTES)


class SymmetricMemory:
    """Named tensors in one block per rank, zero at first, that every rank of a group can address.

    Construction is collective: every rank of the group, the same layout. The block of a rank lives
    as long as a process maps it; ranks leave together (a barrier), because a peer may still store
    into the block of one that is done.

    Raises:
        ValueError: ranks gave different layouts.
        RuntimeError: on all ranks, if one of them got no memory; CPU ranks on several hosts.
    """

    def __init__(self, layout: Layout, device: torch.device, group: dist.ProcessGroup) -> None:
        self.rank, self.n_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.device = device
        text = ", ".join(f"{name} {list(shape)} {dtype}" for name, (shape, dtype) in layout.items())
        by_rank: list[str] = [""] * self.n_ranks
        dist.all_gather_object(by_rank, text, group=group)
        if len(set(by_rank)) > 1:
            raise ValueError(f"symmetric memory needs one layout on all ranks, got {by_rank}")
        starts, n_bytes = offsets(layout)
        if device.type == "cuda":
            blocks, self._mappings = _cuda_blocks(n_bytes, device, group)
        else:
            blocks = _mapped_blocks(n_bytes, group)
        self._tensors = [
            {
                name: (
                    block[starts[name] : starts[name] + math.prod(shape) * dtype.itemsize]
                    .view(dtype)
                    .view(shape)
                )
                for name, (shape, dtype) in layout.items()
            }
            for block in blocks
        ]
        self._addresses: dict[str, torch.Tensor] = {}

    @property
    def own(self) -> dict[str, torch.Tensor]:
        """This rank's tensors."""
        return self._tensors[self.rank]

    def on(self, rank: int) -> dict[str, torch.Tensor]:
        """The tensors of a rank of the group, as this process addresses them."""
        return self._tensors[rank]

    def addresses(self, name: str) -> torch.Tensor:
        """Int64 [W] on the device: where the tensor of each rank starts.

        The same tensor at every call.
        """
        if name not in self._addresses:
            self._addresses[name] = self.table([tensors[name] for tensors in self._tensors])
        return self._addresses[name]

    def table(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Int64 on the device: where each of some tensors starts, for `pointer_at`; they are to
        start at multiples of 16 bytes.
        """
        starts = [tensor.data_ptr() for tensor in tensors]
        if any(start % 16 for start in starts):
            raise ValueError(
                "need tensors that start at multiples of 16 bytes, got offsets"
                f" {[start % 16 for start in starts]}"
            )
        return torch.tensor(starts, dtype=torch.int64).to(self.device)


def _cuda_blocks(
    n_bytes: int, device: torch.device, group: dist.ProcessGroup
) -> tuple[list[torch.Tensor], object]:
    """The block of each rank, in torch's symmetric memory, and the handle that keeps the peers'
    blocks mapped. Collective.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    rank, n_ranks, failure = dist.get_rank(group), dist.get_world_size(group), ""
    if n_ranks == 1:
        return [torch.zeros(n_bytes, dtype=torch.uint8, device=device)], None
    try:
        own = symmetric_memory.empty(n_bytes, dtype=torch.uint8, device=device).zero_()
    except RuntimeError as error:  # out of memory is one
        failure = str(error)
    # Before the rendezvous, in which ranks would wait for ever for one that has no memory.
    by_rank: list[str] = [""] * n_ranks
    dist.all_gather_object(by_rank, failure, group=group)
    if any(by_rank):
        refused = "; ".join(f"rank {r}: {text}" for r, text in enumerate(by_rank) if text)
        raise RuntimeError(f"no symmetric memory of {n_bytes} bytes on all ranks: {refused}")
    # A peer may raise a flag once it has the address, and a later zero would undo that.
    torch.cuda.synchronize(device)
    memory = symmetric_memory.rendezvous(own, group)
    dist.barrier(group)
    blocks = [
        own if r == rank else memory.get_buffer(r, [n_bytes], torch.uint8) for r in range(n_ranks)
    ]
    # The handle goes along: a tensor of `get_buffer` is a bare address, which does not hold what it
    # points to.
    return blocks, memory


def _mapped_blocks(n_bytes: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The block of each rank, as a file that all processes of a host map; the files have no name
    any more when this returns. Collective.
    """
    rank, n_ranks = dist.get_rank(group), dist.get_world_size(group)
    shared = Path("/dev/shm")  # memory: no disk is written
    folder = (
        tempfile.mkdtemp(prefix="symmetric-", dir=shared if shared.is_dir() else None)
        if rank == 0
        else ""
    )
    by_rank: list[tuple[str, str]] = [("", "")] * n_ranks
    dist.all_gather_object(by_rank, (folder, socket.gethostname()), group=group)
    root, hosts = Path(by_rank[0][0]), {host for _, host in by_rank}
    try:
        if len(hosts) > 1:
            raise RuntimeError(
                f"CPU ranks share memory on one host only, got ranks on {sorted(hosts)}: start them"
                " on one"
            )
        with (root / str(rank)).open("wb") as block:
            block.truncate(n_bytes)
        dist.barrier(group)
        return [
            torch.from_file(str(root / str(r)), shared=True, size=n_bytes, dtype=torch.uint8)
            for r in range(n_ranks)
        ]
    finally:
        dist.barrier(group)
        if rank == 0:
            shutil.rmtree(root, ignore_errors=True)


def next_step(n_done: int) -> tuple[int, int]:
    """Epoch and slot of the step that follows `n_done` steps: a step that raised before its first
    launch is not one of them.
    """
    return as_int32(n_done + 1), (n_done + 1) % N_SLOTS


class StepOrder:
    """Steps one after another on the device, also where the caller changes streams: credits say
    that stream order has ended a step.

    Flags order ranks, not the steps of one rank: memory that only this rank uses is overwritten
    when the next step begins.
    """

    def __init__(self) -> None:
        self._last: torch.cuda.Stream | None = None

    def follow(self, device: torch.device) -> None:
        """Let the current stream wait for the stream of the last step, if that is another one."""
        if device.type != "cuda":
            return
        current = torch.cuda.current_stream()
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current


def as_int32(count: int) -> int:
    """`count` as a signed 32-bit number, wrapped around."""
    return (count + 2**31) % 2**32 - 2**31


def refuse_capture(step: str) -> None:
    """Raise a RuntimeError if the current stream is captured in a CUDA graph."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{step} cannot be captured in a CUDA graph: its epoch would be the same at every"
            " replay"
        )


def element_type(dtype: torch.dtype) -> tl.dtype:
    """Triton's type of a torch dtype, as `pointer_at` takes it."""
    found: tl.dtype = getattr(tl, str(dtype).removeprefix("torch."))
    return found


@triton.jit
def pointer_at(addresses, index, ELEMENT: tl.constexpr):
    """The address at `index` of an int64 table (`SymmetricMemory.addresses`) as a pointer to
    ELEMENT, a Triton dtype.
    """
    # Without the hint a loaded address counts as unaligned, and a tile is stored element by
    # element.
    return tl.multiple_of(tl.load(addresses + index).to(tl.pointer_type(ELEMENT)), 16)


@triton.jit
def signal(flag, amount):
    """Add `amount` to a flag, own or a peer's: what all threads of this program stored before is
    visible to a reader of the new count.
    """
    # The release below is one thread's, and orders the other threads' stores through this barrier
    tl.debug_barrier()
    tl.atomic_add(flag, amount, sem="release", scope="sys")


@triton.jit
def wait_until(flag, count):
    """Spin until `flag` has reached `count`; return 0 by a path that Triton cannot foresee.

    A caller adds the 0 to the addresses of its loads: then no load, however deep the pipeline, is
    placed before the wait.
    """
    # At system scope, for the writer is another GPU. The difference is compared: counts wrap
    # around.
    behind = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - count
    while behind < 0:
        behind = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - count
    # The hint keeps vector loads: an unknown summand would make their addresses unaligned.
    return tl.multiple_of(tl.minimum(behind, 0), 16)


@triton.jit
def fence_bulk_loads(zero, INTERPRETED: tl.constexpr):
    """The 0 of `wait_until`, behind a fence that orders bulk loads (TMA), which an acquire does not
    order, after the wait.
    """
    if INTERPRETED:  # it has no inline assembly
        return zero
    else:
        return tl.inline_asm_elementwise(
            "fence.proxy.async; mov.u32 $0, $1;",
            "=r,r",
            [zero],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
