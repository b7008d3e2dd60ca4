"""Random routings, sorted by kernels/routing.py under the interpreter and by a plain loop; run as a program by test_routing.py."""

from __future__ import annotations

import sys

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels.routing import BLOCKS_M, ORDERS, Order, RowSorter

Parts = list[tuple[int, int]]
LARGEST = BLOCKS_M[-1]


def padded(rows: list[int], n_rows: int) -> list[int]:
    return rows + [n_rows] * (-len(rows) % LARGEST)


def sorted_by_loop(experts: list[int], parts: Parts, n_experts: int, order: Order) -> tuple[list[int], list[list[tuple[int, ...]]]]:
    """Rows with their padding, and for each BLOCK_M the tiles as (expert, first place, first part, last part)."""
    part_of = {row: part for part, (first, end) in enumerate(parts) for row in range(first, end)}
    segments = [
        (e, [row for first, end in group for row in range(first, end) if experts[row] == e])
        for group in ([[part] for part in parts] if order == "part" else [parts])
        for e in range(n_experts)
    ]
    rows: list[int] = []
    lists: list[list[tuple[int, ...]]] = [[] for _ in BLOCKS_M]
    for expert, segment in segments:
        for tiles, block_m in zip(lists, BLOCKS_M, strict=True):
            for first in range(0, len(segment), block_m):
                of = [part_of[row] for row in segment[first : first + block_m]]
                tiles.append((expert, len(rows) + first, of[0], of[-1]))
        rows += padded(segment, len(experts))
    if order == "arrival":
        lists = [sorted(tiles, key=lambda tile: tile[3]) for tiles in lists]  # a stable sort: by expert within a part
    return rows, lists


@st.composite
def routings(draw: st.DrawFn) -> tuple[list[int], Parts, int]:
    """Experts of rows, the parts of the rows in any order, some of them empty, and the number of experts."""
    n_experts = draw(st.integers(1, 5))
    used = draw(st.lists(st.integers(0, n_experts - 1), min_size=1, max_size=n_experts))  # often not all: some get no row
    experts = draw(st.lists(st.sampled_from(used), min_size=1, max_size=150))
    cuts = sorted(draw(st.lists(st.integers(0, len(experts)), max_size=2)))
    parts = list(zip([0, *cuts], [*cuts, len(experts)], strict=True))
    return experts, draw(st.permutations(parts)), n_experts


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(routings(), st.sampled_from(ORDERS))
@example(([1] * 140, [(70, 140), (0, 70)], 3), "arrival")
@example(([0, 1] * 70, [(70, 140), (0, 70)], 2), "arrival")
@example(([2], [(0, 1)], 3), "part")
@example(([7, 1, -1], [(0, 2), (2, 3)], 2), "expert")
def check(routing: tuple[list[int], Parts, int], order: Order) -> None:
    experts, parts, n_experts = routing
    sorter = RowSorter(parts, n_experts, order, torch.device("cpu"))
    sorter.counters.fill_(7)  # as a step leaves them
    got = sorter.sort(torch.tensor(experts, dtype=torch.int32).view(-1, 1))
    rows, lists = sorted_by_loop(experts, parts, n_experts, order)
    assert got.rows[: len(rows)].tolist() == rows
    assert len(rows) <= len(got.rows)
    assert got.counters is sorter.counters
    assert got.counters.tolist() == [0] * len(parts)
    assert got.n_tiles.tolist() == [len(tiles) for tiles in lists]
    assert max(got.n_tiles.tolist()) <= sorter.most_tiles <= len(experts) // BLOCKS_M[0] + n_experts * len(parts)
    assert [[tuple(tile) for tile in of[:n].tolist()] for of, n in zip(got.tiles, got.n_tiles, strict=True)] == lists


if __name__ == "__main__":
    check()
    sys.exit(0)
