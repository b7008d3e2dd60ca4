"""Worlds that the simulator plays: recorded tables, random sites, and short kernels under a clock
that errs.
"""

from __future__ import annotations

import random
from math import exp

from benchmarks.simulator import Kernel, World
from benchmarks.timing_tables import Table, load_tables


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
