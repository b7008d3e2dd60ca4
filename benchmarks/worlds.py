"""Worlds that the simulator plays: recorded tables, random sites, and short kernels under a clock
that errs.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp

from benchmarks.timing_tables import Table, load_tables

HICCUP = 1.5
"""How many times as long a launch takes that something else got in the way of."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """True times of one site, in milliseconds."""

    ms: Sequence[Sequence[float]]
    """Candidate -> rank -> one launch."""
    unseen_ms: Sequence[float] = ()
    """Candidate -> what it costs the closure beside its launches; empty: nothing."""
    n_launches: int = 1
    failures: Mapping[int, str] = field(default_factory=dict)
    """Candidates that the vote before the first replay has dropped."""
    texts: Sequence[str] = ()
    """The configs described, for a guided search; empty: all candidates race."""

    def cost_ms(self, candidate: int, rank: int) -> float:
        """What a candidate adds to a replay on a rank."""
        return self.ms[candidate][rank] * self.n_launches + (
            self.unseen_ms[candidate] if self.unseen_ms else 0.0
        )

    def best(self) -> int:
        """The candidate that costs the slowest rank the least."""
        runnable = [i for i in range(len(self.ms)) if i not in self.failures]
        return min(
            runnable,
            key=lambda i: (max(self.cost_ms(i, rank) for rank in range(len(self.ms[i]))), i),
        )


@dataclass(frozen=True, slots=True)
class World:
    """A closure on some ranks, and what disturbs its times there."""

    sites: Mapping[str, Kernel]
    n_ranks: int = 4
    other_ms: float = 0.0
    """What else is in the closure."""
    noise: float = 0.01
    """Standard deviation of the logarithm of each time."""
    clock_ms: float = 0.0
    """Standard deviation of the error of a time that the device's clock reads; of a whole replay's,
    twice that.
    """
    events_ms: float = 0.0
    """What the two events around a timed launch add to its time."""
    host_ms: float = 0.0
    """What a replay takes the host; 0: not told."""
    hiccups: float = 0.003
    """Share of launches that take ``HICCUP`` times as long."""

    def closure_ms(self, choice: Mapping[str, int]) -> float:
        """True time of the closure on its slowest rank."""
        each = (
            sum(kernel.cost_ms(choice[site], rank) for site, kernel in self.sites.items())
            for rank in range(self.n_ranks)
        )
        return self.other_ms + max(each)


def kernel_of(table: Table, n_ranks: int = 4) -> Kernel:
    """A recorded site; more ranks than were recorded have the times of those in turn."""
    failures = {
        i: row.failure or "not measured"
        for i, row in enumerate(table.rows)
        if row.closure_ms is None
    }
    ms = [
        [row.ranks_ms[r % len(row.ranks_ms)] if row.ranks_ms else 1.0 for r in range(n_ranks)]
        for row in table.rows
    ]
    unseen_ms = [
        row.closure_ms - max(row.ranks_ms) if row.closure_ms is not None else 0.0
        for row in table.rows
    ]
    return Kernel(
        ms,
        [max(0.0, each) for each in unseen_ms],
        failures=failures,
        texts=[row.config for row in table.rows],
    )


def many(n_sites: int, n_candidates: int, seed: int = 0, other_ms: float = 0.0) -> World:
    """A closure of many sites with random times, each some per cent of it."""
    dice = random.Random(seed)
    sites = {}
    for number in range(n_sites):
        base_ms = dice.uniform(0.05, 0.2)
        ms = [[base_ms * exp(abs(dice.gauss(0, 0.4)))] * 4 for _ in range(n_candidates)]
        sites[f"site {number}"] = Kernel(ms)
    return World(sites, other_ms=other_ms)


def small(n_ranks: int = 2) -> World:
    """A closure of 15 small kernels, with the times, the clock and the noise of one on two H200.

    Microseconds by config; blocks of 256, 512, 1024, 2048, 4096, each with 2, 4 and 8 warps. The
    events around a launch see only a part of what a config adds to the replay.
    """
    best_us = 2.9
    over_us = (
        0.337,
        0.353,
        0.35,
        0.13,
        0.118,
        0.061,
        0.326,
        0.015,
        0.017,
        0.597,
        0.3,
        0.0,
        1.61,
        0.455,
        0.288,
    )
    seen_us = (
        0.256,
        0.256,
        0.224,
        0.064,
        0.032,
        0.032,
        0.224,
        0.0,
        0.0,
        0.48,
        0.192,
        0.0,
        1.61,
        0.416,
        0.288,
    )
    ms = [[(best_us + each) / 1e3] * n_ranks for each in seen_us]
    unseen_ms = [(over - seen) / 1e3 for over, seen in zip(over_us, seen_us, strict=True)]
    sites = {f"site {k}": Kernel(ms, unseen_ms) for k in range(15)}
    return World(
        sites, n_ranks, other_ms=0.007, noise=0.0, clock_ms=0.0002, events_ms=0.0023, host_ms=4.0
    )


def step_of_148(n_ranks: int = 4) -> tuple[World, dict[str, list[str]]]:
    """A closure of 1.25 ms with 148 candidates: a recorded table of its length, gone through twice,
    and its config texts.
    """
    table = next(table for name, table in load_tables().items() if name.endswith("8192x7168x8192"))
    rows = (table.rows * 2)[:148]
    site = Table(run=table.run, site=table.site, rows=rows)
    return World({table.site: kernel_of(site, n_ranks)}, n_ranks), {
        table.site: [row.config for row in rows]
    }
