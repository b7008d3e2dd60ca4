"""Row-parallel products on a process group: who sums which rows, and how partial results get there.

Knows memory, tables, streams and launches; the kernels are in push_gemm.py and sum_parts.py, the
rules of memory order in symmetric.py. Used by gemm_rs.py, where each rank keeps the rows that it
sums, and by gemm_allreduce.py, where all ranks get all rows.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.gather import WAIT, WRITE, MemoryOps, copy
from kernels.operands import GroupStep, loadable
from kernels.push_gemm import push_gemm_kernel, set_block_shapes
from kernels.shard_gemm import programs_at_once, require_free_sms
from kernels.steady_launch import launch
from kernels.sum_parts import FLAG_ROWS, FOR_ALL, SUM_BLOCK, TO_ALL, TO_OWNER, sum_kernel
from kernels.symmetric import (
    N_SLOTS,
    StepOrder,
    SymmetricMemory,
    element_type,
    next_step,
    refuse_capture,
)

ROW_PARALLEL = "A as [M, K / W] and B as [N, K / W]"
Move = Literal["push", "pull", "copy"]
MOVES: tuple[Move, ...] = get_args(Move)
FLAGS_PER_LINE = 32
"""Flags of 4 bytes that fill 128 bytes: those of two sources share no cache line."""
SUM_PROGRAMS_PER_SM = 4
"""Programs of a reduction that has the GPU to itself: as many as hide the latency of memory."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """How partial results travel, and where they are summed: the knobs of communication, the same
    on all ranks in a step.
    """

    move: Move = "push"
    """push: the product stores its tiles where they are summed; pull: the rank that sums loads
    them; copy: copy engines bring chunks.
    """
    reduction: Literal["inside", "beside", "behind"] = "inside"
    """inside: the product adds what the peers have sent to its own tiles; beside: a kernel runs
    along with it; behind: a kernel follows.
    """
    sms: int = 0
    """Multiprocessors of a reduction beside the product, which leaves them free, or behind it; 0
    behind it: all.
    """
    chunk_rows: int = 256
    """Rows that a copy engine moves, or a program of the reduction waits for, at once."""

    def __post_init__(self) -> None:
        if self.reduction == "beside" and self.sms < 1:
            raise ValueError(
                f"a reduction beside the product needs multiprocessors, got sms={self.sms}"
            )
        if self.chunk_rows.bit_count() != 1 or (
            self.move == "copy" and self.chunk_rows < FLAG_ROWS
        ):
            raise ValueError(
                f"chunk_rows must be a power of two, for copies {FLAG_ROWS}, the rows of a flag, or"
                f" more; got {self.chunk_rows}"
            )


@dataclass(frozen=True, slots=True)
class Plan:
    """A result to compute by a group, as all its ranks agree on it."""

    m: int
    n: int
    n_parts: int
    """1: all ranks sum all rows; else as many as ranks."""
    dtype: torch.dtype
    partial_dtype: torch.dtype
    """The type in which partial results travel; they are summed in float32."""
    gathers: bool
    """Whether each rank's part of the sum goes to all ranks."""

    @property
    def part_rows(self) -> int:
        """Rows of a part; the last parts may have fewer, or none."""
        return -(-self.m // self.n_parts)

    @property
    def n_flags(self) -> int:
        """Flags of one source of a part, with those that fill a cache line."""
        return -(-self.part_rows // (FLAG_ROWS * FLAGS_PER_LINE)) * FLAGS_PER_LINE

    def rows_of(self, part: int) -> int:
        """Rows of one part."""
        return min(max(self.m - part * self.part_rows, 0), self.part_rows)

    def flag_elements(self, part: int) -> list[int]:
        """The elements that each flag of a part counts in a step."""
        rows = self.rows_of(part)
        return [min(rows - first, FLAG_ROWS) * self.n for first in range(0, rows, FLAG_ROWS)]


@dataclass(frozen=True, slots=True)
class Tables:
    """Addresses for the kernels of one slot; the kernels' arguments of the same names.

    The last three: None if the plan does not gather.
    """

    targets: torch.Tensor
    arrivals: torch.Tensor
    sources: torch.Tensor
    finals: torch.Tensor | None = None
    """Where each rank gathers this rank's part of the sum."""
    final_arrivals: torch.Tensor | None = None
    """The flags that count it there."""
    gathered: torch.Tensor | None = None
    """Where this rank gathers the parts of all ranks."""


class Copier:
    """The copies of one plan by copy engines: from staging memory of this rank to the rank that
    sums a part, chunk by chunk.

    The product stores a part for a peer in `staged` and counts it in `counts`, as it would at the
    peer. The copy stream waits for the counts of a chunk (no kernel does, no program is taken up),
    copies it, and writes into the peer's flags what they are to be after the step: the number that
    they would have if the product had counted there itself. So a product may wait, on all
    multiprocessors, for what its peers' engines copy.

    Use: the product, then `queue`; last `join`.
    """

    def __init__(self, plan: Plan, memory: SymmetricMemory) -> None:
        self._plan, self._memory = plan, memory
        self.staged = torch.empty_like(memory.own["received"][0])
        self.counts = torch.zeros_like(memory.own["arrivals"])
        self._n_done = 0
        self._words: dict[int, list[tuple[int, slice, MemoryOps, MemoryOps]]] = {}
        self._stream = torch.cuda.Stream(memory.device, priority=-1)

    def queue(self, slot: int, epoch: int, chunk_rows: int, started: Any) -> None:
        """Queue the copies of a step, whose product is queued; `started` is the event before the
        product.
        """
        self._n_done += 1
        self._stream.wait_event(started)
        for peer, elements, wait, write in self._words_of(chunk_rows):
            wait.queue(self._stream, self._n_done)
            target = self._memory.on(peer)["received"][slot, self._memory.rank][elements]
            copy(target.data_ptr(), self.staged[peer][elements], self._stream)
            write.queue(self._stream, epoch)

    def join(self) -> None:
        """Let the current stream go on when the copies are made: the next product overwrites the
        staging memory.
        """
        torch.cuda.current_stream().wait_stream(self._stream)

    def _words_of(self, chunk_rows: int) -> list[tuple[int, slice, MemoryOps, MemoryOps]]:
        """The chunks in the product's order: a peer, elements of its part, counts to wait for,
        flags to write, both by rows' elements.
        """
        if chunk_rows not in self._words:
            found = self._words[chunk_rows] = []
            rank, n_ranks, n = self._memory.rank, self._memory.n_ranks, self._plan.n
            for peer in ((rank + i) % n_ranks for i in range(1, n_ranks)):
                weights, rows = self._plan.flag_elements(peer), self._plan.rows_of(peer)
                arrivals = self._memory.on(peer)["arrivals"][rank]
                for first in range(0, rows, chunk_rows):
                    end = min(first + chunk_rows, rows)
                    flags = range(first // FLAG_ROWS, -(-end // FLAG_ROWS))
                    words = [
                        MemoryOps(
                            [(operation, where, flag) for flag in flags],
                            weights[flags.start : flags.stop],
                        )
                        for operation, where in ((WAIT, self.counts[peer]), (WRITE, arrivals))
                    ]
                    found.append((peer, slice(first * n, end * n), words[0], words[1]))
        return self._words[chunk_rows]


class PartialSums:
    """The memory of one plan on a process group, and its steps.

    Construction is collective: every rank of the group, the same plan.
    """

    def __init__(self, plan: Plan, device: torch.device, group: dist.ProcessGroup) -> None:
        if plan.n * FLAG_ROWS >= 2**29:
            raise ValueError(
                f"N is {plan.n}: a flag that counts {FLAG_ROWS} rows of it could not tell two steps"
                " apart"
            )
        self.plan = plan
        # Parts are padded, so that each starts at a multiple of 128 bytes.
        n_ranks = dist.get_world_size(group)
        numel = -(-plan.part_rows * plan.n // 64) * 64
        flags = ((n_ranks, plan.n_flags), torch.int32)
        layout: dict[str, Any] = {
            "received": ((N_SLOTS, n_ranks, numel), plan.partial_dtype),
            "arrivals": flags,
            "credits": ((n_ranks,), torch.int32),
        }
        if plan.gathers:
            layout["gathered"] = (N_SLOTS, n_ranks, numel), plan.dtype
            layout["gathered_arrivals"] = flags
        self._memory = SymmetricMemory(layout, device, group)
        self._rank, self._n_ranks = self._memory.rank, n_ranks
        self._n_done, self._device = 0, device
        self._tables: dict[tuple[str, int], Tables] = {}
        self._copier: Copier | None = None
        self._side: torch.cuda.Stream | None = None
        self._order = StepOrder()

    def step(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        exchange: Exchange,
        *,
        config: triton.Config | None,
    ) -> None:
        """Queue one step on the current stream: `c` is the own part of the sum, or all of it if the
        plan gathers. Collective.

        `a` [M, K] and `b` [N, K] are loadable; `config` None leaves the product's config to the
        tuner.
        """
        refuse_capture("a step that sends partial results")
        plan, (epoch, slot) = self.plan, next_step(self._n_done)
        if exchange.reduction == "inside" and plan.n_parts == 1 < self._n_ranks:
            raise ValueError("all ranks sum all rows: reduction='beside' or 'behind'")
        if exchange.move == "copy":
            if plan.n_parts < self._n_ranks:
                raise ValueError(
                    "copy engines serve the rank that sums a part; where all ranks sum all rows,"
                    " push or pull"
                )
            if self._device.type == "cpu":  # which has no copy engine
                exchange = replace(exchange, move="push")
        is_blocking = (
            os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0"
            and not triton.knobs.runtime.interpret
        )
        if exchange.move == "copy" and exchange.reduction == "inside" and is_blocking:
            raise ValueError(
                "CUDA_LAUNCH_BLOCKING=1 lets a launch return when its kernel has ended, but a"
                " product that adds what copy engines bring ends only when they are queued, behind"
                " its launch: unset it, or use reduction='behind', or move='push'"
            )
        if exchange.reduction == "beside":
            require_free_sms("sms", exchange.sms)
        self._order.follow(self._device)
        copier = None
        if exchange.move == "copy":
            copier = self._copier = self._copier or Copier(plan, self._memory)
        tables = self._tables_of(exchange.move, slot)
        started = None
        if self._device.type == "cuda" and (copier is not None or exchange.reduction == "beside"):
            started = torch.cuda.Event()
            started.record()
        self._multiply(a, b, c, tables, exchange, epoch=epoch, config=config)
        self._n_done += 1  # from here on peers get what they wait for
        if copier is not None:
            copier.queue(slot, epoch, exchange.chunk_rows, started)
        self._reduce(c, tables, exchange, epoch=epoch, started=started)
        if copier is not None:
            copier.join()

    def _reduce(
        self, c: torch.Tensor, tables: Tables, exchange: Exchange, *, epoch: int, started: Any
    ) -> None:
        """Queue the kernels behind the product or beside it: one that sums, where the product does
        not, and one that gathers the sums.
        """
        plan, own = self.plan, self._memory.own
        sizes = (plan.n, plan.part_rows, plan.n_flags, self._rank, epoch)
        if exchange.reduction != "inside":
            # The own part, or all of the one part.
            rows = plan.rows_of(self._rank if plan.n_parts > 1 else 0)
            fixed = {
                "PARTS": 1,
                "SOURCES": self._n_ranks,
                "ELEMENT": element_type(plan.partial_dtype),
            }
            args: tuple[Any, ...] = (
                c,
                tables.sources,
                own["arrivals"],
                tables.finals,
                tables.final_arrivals,
                rows,
                *sizes,
            )
            self._sum(args, fixed, exchange, started)
        if plan.gathers:  # each part has one source: the rank that has summed it
            fixed = {"PARTS": plan.n_parts, "SOURCES": 1, "ELEMENT": element_type(plan.dtype)}
            args = (c, tables.gathered, own["gathered_arrivals"], None, None, plan.m, *sizes)
            self._sum(args, fixed, Exchange(reduction="behind"), None)

    def _multiply(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        tables: Tables,
        exchange: Exchange,
        *,
        epoch: int,
        config: triton.Config | None,
    ) -> None:
        """Queue the product."""
        plan, k, is_interpreted, own = (
            self.plan,
            a.shape[1],
            triton.knobs.runtime.interpret,
            self._memory.own,
        )
        credits = (self._memory.addresses("credits"), own["credits"])
        sent = (
            tables.targets,
            tables.arrivals,
            tables.sources,
            own["arrivals"],
            *credits,
            tables.finals,
            tables.final_arrivals,
        )
        operands = [TensorDescriptor(x, list(x.shape), [k, 1], [1, 1]) for x in (a, b)]
        args = (
            *operands,
            c,
            *sent,
            plan.m,
            plan.n,
            k,
            plan.part_rows,
            plan.n_flags,
            self._rank,
            epoch,
            MOVES.index(exchange.move),
        )
        spread, is_inside = TO_OWNER, exchange.reduction == "inside"
        if plan.n_parts < self._n_ranks:
            spread = FOR_ALL if exchange.move == "pull" else TO_ALL
        fixed = {
            "PARTS": plan.n_parts,
            "WORLD": self._n_ranks,
            "INSIDE": is_inside,
            "SPREAD": spread,
            "ELEMENT": element_type(plan.partial_dtype),
            "FLAG_ROWS": FLAG_ROWS,
            "INTERPRETED": is_interpreted,
        }

        def grid(meta: dict[str, Any]) -> tuple[int]:
            # Not by `triton.cdiv`, which takes the host 1.7 us.
            tiles = (
                plan.n_parts * -(-plan.part_rows // meta["BLOCK_M"]) * -(-plan.n // meta["BLOCK_N"])
            )
            # Programs run one after the other there, so one that waits for peers must have sent all
            # tiles itself
            if is_interpreted:
                return (1 if is_inside else min(3 * meta["PER_SM"], tiles),)
            withheld = exchange.sms if exchange.reduction == "beside" else 0
            return (min((programs_at_once() - withheld) * meta["PER_SM"], tiles),)

        if config is None:
            push_gemm_kernel[grid](*args, **fixed)
            return
        fixed |= config.all_kwargs()
        set_block_shapes({"a": operands[0], "b": operands[1], **fixed})
        launch(push_gemm_kernel.fn, grid(fixed), args, fixed, key=(plan, k, *fixed.items()))

    def _sum(
        self,
        args: tuple[Any, ...],
        fixed: dict[str, Any],
        exchange: Exchange,
        started: torch.cuda.Event | None,
    ) -> None:
        """Queue a reduction, on a stream of its own where it is beside the product; the current
        stream goes on behind it.
        """
        items = (
            fixed["PARTS"]
            * -(-self.plan.part_rows // exchange.chunk_rows)
            * -(-self.plan.n // SUM_BLOCK[1])
        )
        key = self.plan, self._n_ranks, fixed["PARTS"], exchange.chunk_rows, args[5]
        fixed = {
            **fixed,
            "WORLD": self._n_ranks,
            "FLAG_ROWS": FLAG_ROWS,
            "CHUNK_ROWS": exchange.chunk_rows,
            "ROWS": SUM_BLOCK[0],
            "COLUMNS": SUM_BLOCK[1],
            "num_warps": 8,
        }
        if started is None or exchange.reduction != "beside":
            most = 2
            if not triton.knobs.runtime.interpret:
                most = SUM_PROGRAMS_PER_SM * (exchange.sms or programs_at_once())
            launch(sum_kernel, (min(items, most),), args, fixed, key=key)
            return
        if self._side is None:
            self._side = torch.cuda.Stream(self._device, priority=-1)
        self._side.wait_event(started)
        with torch.cuda.stream(self._side):
            # No more programs than multiprocessors that the product leaves free, however many
            # programs it has on each of the others: wherever they start, they cannot keep a program
            # of the product off the GPU, for whose tiles a peer may wait.
            launch(sum_kernel, (min(items, exchange.sms),), args, fixed, key=key)
        torch.cuda.current_stream().wait_stream(self._side)

    def _tables_of(self, move: str, slot: int) -> Tables:
        if (move, slot) not in self._tables:
            memory, rank, ranks = self._memory, self._rank, range(self._n_ranks)
            has_parts = self.plan.n_parts > 1
            arrivals = [memory.on(r)["arrivals"][rank] for r in ranks]
            # Kept here, in the place of the part's owner, or in one place for all.
            if move == "pull":
                targets = [memory.own["received"][slot, r if has_parts else rank] for r in ranks]
                sources = [memory.on(r)["received"][slot, rank if has_parts else r] for r in ranks]
            else:
                targets = [memory.on(r)["received"][slot, rank] for r in ranks]
                sources = [memory.own["received"][slot, r] for r in ranks]
            if move == "copy":
                assert self._copier is not None
                targets = [targets[r] if r == rank else self._copier.staged[r] for r in ranks]
                arrivals = [arrivals[r] if r == rank else self._copier.counts[r] for r in ranks]
            tables = [targets, arrivals, sources]
            if self.plan.gathers:
                tables += [
                    [memory.on(r)["gathered"][slot, rank] for r in ranks],
                    [memory.on(r)["gathered_arrivals"][rank] for r in ranks],
                ]
                tables.append([memory.own["gathered"][slot, r] for r in ranks])
            self._tables[move, slot] = Tables(*map(memory.table, tables))
        return self._tables[move, slot]


class RowParallelGemm(GroupStep):
    """A @ B.T where each rank holds K / W columns of both, so that results are sums over ranks.

    Args:
        group, config: those of any `GroupStep`.
        partial_dtype: the type in which partial results travel: None for the operands' type, or
            torch.float32, which doubles the bytes.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        config: triton.Config | None = None,
        partial_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, config)
        self.partial_dtype = partial_dtype
        self._sums: dict[tuple[Plan, torch.device], PartialSums] = {}

    def run(
        self,
        plan: Plan,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        *,
        exchange: Exchange,
        config: triton.Config | None,
    ) -> torch.Tensor:
        """Queue a step of a plan, and return `c`. Collective where a plan has no memory yet."""
        sums = self._sums.get((plan, a.device))
        if sums is None:
            sums = self._sums[plan, a.device] = PartialSums(plan, a.device, self.group)
        PartialSums.step(
            sums,
            loadable(a),
            loadable(b),
            c,
            exchange,
            config=self.config if config is None else config,
        )
        return c
