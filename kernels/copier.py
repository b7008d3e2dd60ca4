"""Copy engines that bring partial results to the ranks that sum them, chunk by chunk as the product has computed them.

Knows staging memory, counts and the copy stream; knows nothing of products or sums. On a CPU the copies are made where they are queued.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kernels.gather import WAIT, WRITE, MemoryOps, copy
from kernels.sum_parts import FLAG_ROWS, count_kernel
from kernels.symmetric import SymmetricMemory

if TYPE_CHECKING:
    from kernels.partials import Plan


class Copier:
    """The copies of one plan: from staging memory of this rank to the rank that sums a part.

    The product stores a part for a peer in `staged` and counts it in `counts`, as it would at the peer. The copy stream waits for the
    counts of a chunk (no kernel does), copies it, and writes into the peer's flags what they are to be after the step: the number that
    they would have if the product had counted there itself.
    """

    def __init__(self, plan: Plan, memory: SymmetricMemory) -> None:
        if plan.n_parts < memory.n_ranks:
            raise ValueError("copy engines serve the rank that sums a part; where all ranks sum all rows, push or pull")
        self._plan, self._memory, self._rank = plan, memory, memory.rank
        self.staged = torch.empty_like(memory.own["received"][0])
        self.counts = torch.zeros_like(memory.own["arrivals"])
        self._n_done = 0
        self._peers = [(self._rank + i) % memory.n_ranks for i in range(1, memory.n_ranks)]
        self._words: dict[int, list[tuple[int, int, int, MemoryOps, MemoryOps]]] = {}
        self._stream = torch.cuda.Stream(memory.device, priority=-1) if memory.device.type == "cuda" else None

    def queue(self, slot: int, epoch: int, chunk_rows: int, started: Any) -> None:
        """Queue the copies of a step, whose product is queued; `started` is the event before the product."""
        self._n_done += 1
        if self._stream is None:
            self._copy_now(slot)
            return
        self._stream.wait_event(started)
        for peer, first, end, wait, write in self._words_of(chunk_rows):
            wait.queue(self._stream, self._n_done)
            source = self.staged[peer][first * self._plan.n : end * self._plan.n]
            target = self._memory.on(peer)["received"][slot, self._rank]
            copy(target.data_ptr() + first * self._plan.n * source.element_size(), source, self._stream)
            write.queue(self._stream, epoch)

    def join(self) -> None:
        """Let the current stream go on when the copies are made: the next product overwrites the staging memory."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _copy_now(self, slot: int) -> None:
        for peer in self._peers:
            rows = self._plan.rows_of(peer)
            self._memory.on(peer)["received"][slot, self._rank].copy_(self.staged[peer])
            # By a kernel, for its release orders the copy before the count.
            count_kernel[(1,)](self._memory.on(peer)["arrivals"][self._rank], rows, self._plan.n, FLAG_ROWS=FLAG_ROWS)

    def _words_of(self, chunk_rows: int) -> list[tuple[int, int, int, MemoryOps, MemoryOps]]:
        """Peer, first row and end of each chunk, in the product's order, with the counts to wait for and the flags to write."""
        if chunk_rows not in self._words:
            self._words[chunk_rows] = []
            for peer in self._peers:
                elements, rows = self._plan.flag_elements(peer), self._plan.rows_of(peer)
                for first in range(0, rows, chunk_rows):
                    end = min(first + chunk_rows, rows)
                    flags = range(first // FLAG_ROWS, -(-end // FLAG_ROWS))
                    weights = [elements[flag] for flag in flags]
                    wait = MemoryOps([(WAIT, self.counts[peer], flag) for flag in flags], weights)
                    write = MemoryOps([(WRITE, self._memory.on(peer)["arrivals"][self._rank], flag) for flag in flags], weights)
                    self._words[chunk_rows].append((peer, first, end, wait, write))
        return self._words[chunk_rows]
