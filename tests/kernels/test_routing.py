"""The routing of experts in kernels/: which are chosen, and how their rows are sorted into
tiles.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.worlds import on_each_rank

CPU = torch.device("cpu")
Parts = list[tuple[int, int]]


def sorted_by_loop(
    experts: list[int], parts: Parts, n_experts: int, order: str
) -> tuple[list[int], list[list[list[int]]]]:
    """Rows with their padding, and for each BLOCK_M the tiles as [expert, first place, first part,
    last part].
    """
    from kernels.routing import BLOCKS_M

    part_of = {row: part for part, (first, end) in enumerate(parts) for row in range(first, end)}
    rows: list[int] = []
    lists: list[list[list[int]]] = [[] for _ in BLOCKS_M]
    for group in [[part] for part in parts] if order == "part" else [parts]:
        for expert in range(n_experts):
            own = [
                row for first, end in group for row in range(first, end) if experts[row] == expert
            ]
            for tiles, block_m in zip(lists, BLOCKS_M, strict=True):
                for first in range(0, len(own), block_m):
                    of = [part_of[row] for row in own[first : first + block_m]]
                    tiles.append([expert, len(rows) + first, of[0], of[-1]])
            rows += own + [len(experts)] * (-len(own) % BLOCKS_M[-1])
    if order == "arrival":
        # A stable sort: by expert within a part.
        lists = [sorted(tiles, key=lambda tile: tile[3]) for tiles in lists]
    return rows, lists


@st.composite
def routings(draw: st.DrawFn) -> tuple[list[int], Parts, int]:
    """Experts of rows, the parts of the rows in any order, some of them empty, and the number of
    experts.
    """
    n_experts = draw(st.integers(1, 5))
    # Often not all: some get no row.
    used = draw(st.lists(st.integers(0, n_experts - 1), min_size=1, max_size=n_experts))
    experts = draw(st.lists(st.sampled_from(used), min_size=1, max_size=150))
    cuts = sorted(draw(st.lists(st.integers(0, len(experts)), max_size=2)))
    parts = list(zip([0, *cuts], [*cuts, len(experts)], strict=True))
    return experts, draw(st.permutations(parts)), n_experts


@on_each_rank(1, is_dist=False)
def test_rows_are_sorted_and_padded_as_by_a_plain_loop_for_any_imbalance(rank: int):
    """Random routings, experts without rows, all rows to one expert, empty parts, experts that do
    not exist; all orders of tiles.
    """
    from kernels.routing import BLOCKS_M, RowSorter

    @settings(max_examples=8, deadline=None, derandomize=True, database=None)
    @given(routings(), st.sampled_from(["arrival", "part"]))
    @example(([1] * 140, [(70, 140), (0, 70)], 3), "arrival")
    @example(([0, 1] * 70, [(70, 140), (0, 70)], 2), "arrival")
    @example(([2], [(0, 1)], 3), "part")
    @example(([7, 1, -1], [(0, 2), (2, 3)], 2), "arrival")
    def check(routing: tuple[list[int], Parts, int], order: Any) -> None:
        experts, parts, n_experts = routing
        sorter = RowSorter(parts, n_experts, order, CPU)
        sorter.counters.fill_(7)  # as a step leaves them
        got = sorter.sort(torch.tensor(experts, dtype=torch.int32).view(-1, 1))
        rows, lists = sorted_by_loop(experts, parts, n_experts, order)
        assert got.rows[: len(rows)].tolist() == rows
        assert (got.counters is sorter.counters, got.counters.tolist()) == (True, [0] * len(parts))
        assert [of[:n].tolist() for of, n in zip(got.tiles, got.n_tiles, strict=True)] == lists
        assert (
            max(map(len, lists))
            <= sorter.most_tiles
            <= len(experts) // BLOCKS_M[0] + n_experts * len(parts)
        )

    check()


@pytest.mark.parametrize("top_k", [1, 5])
def test_the_most_probable_experts_are_chosen_with_weights_that_sum_up_to_one(top_k: int):
    from kernels.routing import route

    logits = torch.randn(50, 5, generator=torch.Generator().manual_seed(3)).half()
    chosen = logits.float().topk(top_k)
    routing = route(logits, top_k)
    assert torch.equal(routing.experts.long(), chosen.indices)
    assert torch.allclose(routing.weights, chosen.values.softmax(1), rtol=1e-5)


def test_skewed_logits_choose_experts_by_zipfs_law():
    """First choices at exponent 1 come close to 1 : 1/2 : 1/3 : 1/4, and at 0 to equal shares."""
    from kernels.routing import skewed_logits

    torch.manual_seed(0)
    for skew, parts in ((1.0, [1, 1 / 2, 1 / 3, 1 / 4]), (0.0, [1.0] * 4)):
        shares = (
            torch.bincount(skewed_logits(20_000, 4, skew, CPU).argmax(dim=1), minlength=4) / 20_000
        )
        assert torch.allclose(shares, torch.tensor(parts) / sum(parts), atol=0.02)
