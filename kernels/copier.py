"""Copy engines that bring partial results to the ranks that sum them, chunk by chunk as the product has computed them.

Knows staging memory, counts and the copy stream; knows nothing of products or sums. On a CPU a thread stands for the copy engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kernels.gather import WAIT, WRITE, MemoryOps, copy
from kernels.sum_parts import FLAG_ROWS
from kernels.symmetric import SymmetricMemory, as_int32

if TYPE_CHECKING:
    from kernels.partials import Plan


POLL_S = 0.0002
"""Between two looks of a CPU's thread at the counts."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of a part for a peer that are copied at once."""

    peer: int
    first: int
    end: int
    flags: range
    """Those of its rows, with as many elements each in `weights`."""
    weights: Sequence[int]


class Copier:
    """The copies of one plan: from staging memory of this rank to the rank that sums a part.

    The product stores a part for a peer in `staged` and counts it in `counts`, as it would at the peer. The copy stream waits for the
    counts of a chunk (no kernel does, no program is taken up), copies it, and writes into the peer's flags what they are to be after the
    step: the number that they would have if the product had counted there itself. So a product may wait, on all multiprocessors, for what
    its peers' engines copy.

    Use: `begin`, the product, then `queue` or, if the product was not launched, `give_up`; last `join`.
    """

    def __init__(self, plan: Plan, memory: SymmetricMemory) -> None:
        if plan.n_parts < memory.n_ranks:
            raise ValueError("copy engines serve the rank that sums a part; where all ranks sum all rows, push or pull")
        self._plan, self._memory, self._rank = plan, memory, memory.rank
        self.staged = torch.empty_like(memory.own["received"][0])
        self.counts = torch.zeros_like(memory.own["arrivals"])
        self._n_done = 0
        self._peers = [(self._rank + i) % memory.n_ranks for i in range(1, memory.n_ranks)]
        self._words: dict[int, list[tuple[Chunk, MemoryOps, MemoryOps]]] = {}
        self._stream = torch.cuda.Stream(memory.device, priority=-1) if memory.device.type == "cuda" else None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._failure: Exception | None = None

    def begin(self, slot: int, epoch: int, chunk_rows: int) -> None:
        """Get ready for a step. On a CPU the copies start here: a product that waits for them returns only when they are made."""
        if self._stream is None:
            self._stop.clear()
            self._failure = None
            self._thread = threading.Thread(target=self._copy_now, args=(slot, epoch, self._n_done + 1, chunk_rows), daemon=True)
            self._thread.start()

    def give_up(self) -> None:
        """Make no copies: the product raised and was not launched."""
        self._stop.set()
        self._end_thread()

    def queue(self, slot: int, epoch: int, chunk_rows: int, started: Any) -> None:
        """Queue the copies of a step, whose product is queued; `started` is the event before the product."""
        self._n_done += 1
        if self._stream is None:
            return
        self._stream.wait_event(started)
        for chunk, wait, write in self._words_of(chunk_rows):
            wait.queue(self._stream, self._n_done)
            source, target = self._ends(slot, chunk)
            copy(target.data_ptr(), source, self._stream)
            write.queue(self._stream, epoch)

    def join(self) -> None:
        """Let the current stream go on when the copies are made: the next product overwrites the staging memory.

        Raises the first error of a CPU's thread.
        """
        self._end_thread()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _end_thread(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _copy_now(self, slot: int, epoch: int, n_done: int, chunk_rows: int) -> None:
        """The work of the copy stream, by a CPU's thread. x86 keeps the order of stores, so the flags follow the rows."""
        for chunk in self._chunks(chunk_rows):
            counts = self.counts[chunk.peer][chunk.flags.start : chunk.flags.stop]
            while any(as_int32(int(count) - n_done * weight) < 0 for count, weight in zip(counts, chunk.weights, strict=True)):
                if self._stop.is_set():
                    return
                time.sleep(POLL_S)
            try:
                source, target = self._ends(slot, chunk)
                target.copy_(source)
            except Exception as error:  # noqa: BLE001  any: `join` raises it in the caller, and the peer's product spins on the flags
                self._failure = self._failure or error
            arrivals = self._memory.on(chunk.peer)["arrivals"][self._rank]
            arrivals[chunk.flags.start : chunk.flags.stop] = torch.tensor([as_int32(epoch * weight) for weight in chunk.weights]).int()

    def _ends(self, slot: int, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the rows of a chunk are, and where they go."""
        elements = slice(chunk.first * self._plan.n, chunk.end * self._plan.n)
        return self.staged[chunk.peer][elements], self._memory.on(chunk.peer)["received"][slot, self._rank][elements]

    def _chunks(self, chunk_rows: int) -> list[Chunk]:
        """The chunks in the product's order, peer by peer."""
        chunks = []
        for peer in self._peers:
            elements, rows = self._plan.flag_elements(peer), self._plan.rows_of(peer)
            for first in range(0, rows, chunk_rows):
                end = min(first + chunk_rows, rows)
                flags = range(first // FLAG_ROWS, -(-end // FLAG_ROWS))
                chunks.append(Chunk(peer, first, end, flags, [elements[flag] for flag in flags]))
        return chunks

    def _words_of(self, chunk_rows: int) -> list[tuple[Chunk, MemoryOps, MemoryOps]]:
        """The chunks with the counts to wait for and the flags to write."""
        if chunk_rows not in self._words:
            self._words[chunk_rows] = []
            for chunk in self._chunks(chunk_rows):
                arrivals = self._memory.on(chunk.peer)["arrivals"][self._rank]
                wait = MemoryOps([(WAIT, self.counts[chunk.peer], flag) for flag in chunk.flags], chunk.weights)
                write = MemoryOps([(WRITE, arrivals, flag) for flag in chunk.flags], chunk.weights)
                self._words[chunk_rows].append((chunk, wait, write))
        return self._words[chunk_rows]
