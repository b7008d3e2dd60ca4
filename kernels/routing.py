# mypy: disable-error-code="no-untyped-def"
# Triton reads a kernel's annotations as argument types, so the arguments of @triton.jit functions
# carry none.
"""Routing of a mixture of experts: top-k experts of each token, and tokens sorted by expert into
tiles, on the device.

Knows experts, tiles and parts of the tokens; knows nothing of ranks, weights of experts or
products. A row is one (token, choice) pair: row t * top_k + j is token t with its j-th expert. No
size depends on the routing, so the host never waits for the device: buffers hold the worst case, at
most n_rows // BLOCK_M + n_experts tiles where parts share tiles.

The experts' rows are padded to the largest tile, and there is a list of tiles for each height of
`BLOCKS_M`: the kernel that reads them is free to choose BLOCK_M, and no tile of any list is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import triton
import triton.language as tl

from kernels.steady_launch import launch

BLOCKS_M = (32, 64) if triton.knobs.runtime.interpret else (16, 32, 64, 128)
"""Heights of tiles, each twice the one before; there is a list of tiles for each.

The interpreter takes 10 ms for each list.
"""
ROWS_PER_STEP = 64 if triton.knobs.runtime.interpret else 1024
"""Rows that a program of the sorting looks at together; few under the interpreter, so that tests
see several steps.
"""
TILES_PER_STEP = 64
TILE_FIELDS = 4
"""Expert, first place in `rows`, and the positions of the first and of the last part that the tile
has rows of.
"""

Order = Literal["arrival", "part"]
"""arrival: an expert's parts share tiles, and tiles come in the order in which their last part
does; part: each part has its own.
"""
ORDERS: tuple[Order, ...] = get_args(Order)


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of each token.

    Raises:
        ValueError: what kernels would read wrongly, which know no strides.
    """

    experts: torch.Tensor
    """int32 [M, top_k]"""
    weights: torch.Tensor
    """float32 [M, top_k]; those of a token sum up to 1."""

    def __post_init__(self) -> None:
        pair = self.experts, self.weights
        if (
            self.experts.dim() != 2
            or self.experts.shape != self.weights.shape
            or not all(each.is_contiguous() for each in pair)
        ):
            given = " and ".join(
                f"{list(each.shape)} of strides {list(each.stride())}" for each in pair
            )
            raise ValueError(f"need experts and weights as [M, top_k], contiguous; got {given}")
        if self.experts.dtype != torch.int32 or self.weights.dtype != torch.float32:
            raise ValueError(
                f"need int32 experts and float32 weights; got {self.experts.dtype} and"
                f" {self.weights.dtype}"
            )


def route(logits: torch.Tensor, top_k: int) -> Routing:
    """The `top_k` most probable experts of each token, for router outputs [M, E]; softmax first,
    then normalised once more.
    """
    weights, experts = logits.float().softmax(dim=-1).topk(top_k, dim=-1)
    return Routing(experts.int(), weights / weights.sum(dim=-1, keepdim=True))


def skewed_logits(n_tokens: int, n_experts: int, skew: float, device: torch.device) -> torch.Tensor:
    """Router outputs [n_tokens, n_experts] whose first choices are spread by Zipf's law: expert e
    with a share of (e + 1) ** -skew.

    0 is a balanced routing. From the generator of the device, so ranks that are to have the same
    logits need the same seed.
    """
    popularity = -skew * torch.arange(1, n_experts + 1, device=device, dtype=torch.float32).log()
    # The largest of log p + Gumbel noise is distributed as p.
    noise = -torch.empty(n_tokens, n_experts, device=device).exponential_().log()
    return popularity + noise


@dataclass(frozen=True, slots=True)
class SortedRows:
    """Rows by expert, and lists of their tiles, in device memory."""

    rows: torch.Tensor
    """int32: row numbers, the rows of each expert at multiples of the largest BLOCK_M, and n_rows
    for padding.
    """
    tiles: torch.Tensor
    """int32 [len(BLOCKS_M), most tiles, TILE_FIELDS]; entries from n_tiles on are undefined."""
    n_tiles: torch.Tensor
    """int32 [len(BLOCKS_M)]: no tile is without a row."""
    counters: torch.Tensor
    """int32 [parts]: 0 once the rows are sorted, for a kernel that reads the tiles to count what it
    has done of each part.
    """


class RowSorter:
    """Sorts the rows of steps of one shape; the buffers are its own, so one sorting is valid until
    the next.

    Args:
        parts: [first row, end) of each part of the rows, in the order in which tiles are to run.
            Together they are all rows.
        n_experts: experts are 0 to n_experts - 1; a row of any other number is in no tile.
        order: the order of tiles.
        device: where the experts of steps are.
    """

    def __init__(
        self, parts: Sequence[tuple[int, int]], n_experts: int, order: Order, device: torch.device
    ) -> None:
        self.n_rows = sum(end - first for first, end in parts)
        self.order: Order = order
        n_segments = n_experts * (len(parts) if order == "part" else 1)
        self.most_tiles = self.n_rows // BLOCKS_M[0] + n_segments
        n_places = self.n_rows + min(n_segments, self.n_rows) * (BLOCKS_M[-1] - 1)
        self._parts, self._n_experts = (
            torch.tensor(parts, dtype=torch.int32, device=device),
            n_experts,
        )
        self._counts = torch.empty(len(parts), n_experts, dtype=torch.int32, device=device)
        self._fixed = {
            "BLOCK": ROWS_PER_STEP,
            "PARTS_2": max(triton.next_power_of_2(len(parts)), 2),
            "EXPERTS_2": max(triton.next_power_of_2(n_experts), 2),
            "IS_MERGED": order != "part",
            "SMALLEST": BLOCKS_M[0],
            "N_HEIGHTS": len(BLOCKS_M),
            "TILES": TILES_PER_STEP,
        }
        shapes = (n_places,), (len(BLOCKS_M), self.most_tiles, TILE_FIELDS), (len(BLOCKS_M),)
        self.counters = torch.zeros(len(parts), dtype=torch.int32, device=device)
        rows, tiles, n_tiles = (
            torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes
        )
        self._sorted = SortedRows(rows, tiles, n_tiles, self.counters)

    def sort(self, experts: torch.Tensor) -> SortedRows:
        """Queue the sorting of rows with these `experts` (int32 [M, top_k], contiguous) on the
        current stream.
        """
        (n_parts, n_experts), to = self._counts.shape, self._sorted
        grid, key = (n_parts, n_experts), (self.n_rows, n_parts, n_experts, self.order)
        launch(
            _count_kernel,
            grid,
            (experts, self._parts, self._counts, n_experts),
            {"BLOCK": ROWS_PER_STEP},
            key=key,
        )
        lists, sizes = (
            (to.rows, to.tiles, to.n_tiles, to.counters, self.most_tiles),
            (self.n_rows, n_experts, n_parts),
        )
        launch(
            _place_kernel,
            grid,
            (experts, self._parts, self._counts, *lists, *sizes),
            self._fixed,
            key=key,
        )
        return to


@triton.jit
def _count_kernel(experts, parts, counts, n_experts, BLOCK: tl.constexpr):
    """Rows of one expert in one part."""
    part, expert = tl.program_id(0), tl.program_id(1)
    end = tl.load(parts + 2 * part + 1)
    n = 0
    for start in range(tl.load(parts + 2 * part), end, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        n += tl.sum((tl.load(experts + rows, mask=rows < end, other=-1) == expert).to(tl.int32), 0)
    tl.store(counts + part * n_experts + expert, n)


@triton.jit
def _place_kernel(
    experts,  # int32 [n_rows]
    parts,  # int32 [n_parts, 2]
    counts,  # int32 [n_parts, n_experts]
    rows,
    tiles,
    n_tiles,
    counters,  # int32 [n_parts]
    most_tiles,
    n_rows,
    n_experts,
    n_parts,
    BLOCK: tl.constexpr,
    PARTS_2: tl.constexpr,
    EXPERTS_2: tl.constexpr,
    IS_MERGED: tl.constexpr,
    SMALLEST: tl.constexpr,
    N_HEIGHTS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Rows of one expert in one part go to their places, and its tiles into the lists: those whose
    last rows are in this part.

    Each program computes from all counts where its own things begin, so programs need not wait for
    one another.
    """
    part, expert = tl.program_id(0), tl.program_id(1)
    if expert == 0:
        tl.store(counters + part, 0)  # here rather than by a launch of its own
    LARGEST: tl.constexpr = SMALLEST * 2 ** (N_HEIGHTS - 1)
    p, e = tl.arange(0, PARTS_2)[:, None], tl.arange(0, EXPERTS_2)[None, :]
    count = tl.load(counts + p * n_experts + e, mask=(p < n_parts) & (e < n_experts), other=0)
    is_own = (p == part) & (e == expert)
    is_earlier = (p < part) | ((p == part) & (e < expert))
    if IS_MERGED:
        # Of each expert: its rows in parts up to p, before p, and in all.
        until = tl.cumsum(count, 0)
        before = until - count
        total = tl.sum(count, 0)[None, :]
        # Rows of this expert up to each part, as a vector.
        own_until = tl.sum(tl.where(e == expert, until, 0), 1)
        start = tl.sum(tl.where(e < expert, (total + LARGEST - 1) // LARGEST * LARGEST, 0))
        place = start + tl.sum(tl.where(is_own, before, 0))
        n_own = tl.sum(tl.where(e == expert, total, 0))
        n_padded = tl.where(part == n_parts - 1, (n_own + LARGEST - 1) // LARGEST * LARGEST, 0)
    else:
        start = tl.sum(tl.where(is_earlier, (count + LARGEST - 1) // LARGEST * LARGEST, 0))
        place = start
        n_own = tl.sum(tl.where(is_own, count, 0))
        n_padded = (n_own + LARGEST - 1) // LARGEST * LARGEST

    end = tl.load(parts + 2 * part + 1)
    for first in range(tl.load(parts + 2 * part), end, BLOCK):
        row = first + tl.arange(0, BLOCK)
        is_here = tl.load(experts + row, mask=row < end, other=-1) == expert
        n_here = is_here.to(tl.int32)
        tl.store(rows + place + tl.cumsum(n_here, 0) - 1, row, mask=is_here)
        place += tl.sum(n_here, 0)
    padding = n_own + tl.arange(0, LARGEST)
    tl.store(rows + start + padding, n_rows, mask=padding < n_padded)

    for height in tl.static_range(N_HEIGHTS):
        size = SMALLEST * 2**height
        if IS_MERGED:
            # A tile is there when its last row is; the last tile of an expert need not be full.
            done_until = tl.where(until == total, (total + size - 1) // size, until // size)
            done_before = tl.where(before == total, (total + size - 1) // size, before // size)
            n_new = tl.where(p < n_parts, done_until - done_before, 0)
            first_tile = tl.sum(tl.where(is_own, done_before, 0))
        else:
            n_new = (count + size - 1) // size
            first_tile = 0
        slot = tl.sum(tl.where(is_earlier, n_new, 0))
        n_own_tiles = tl.sum(tl.where(is_own, n_new, 0))
        if (part == 0) & (expert == 0):
            tl.store(n_tiles + height, tl.sum(n_new))
        for step in range(0, n_own_tiles, TILES):
            tile = step + tl.arange(0, TILES)
            row = (first_tile + tile) * size
            first_part = part + tile * 0
            if IS_MERGED:
                first_part = tl.sum((own_until[None, :] <= row[:, None]).to(tl.int32), 1)
            entry = tiles + (height * most_tiles + slot + tile) * 4
            is_tile = tile < n_own_tiles
            tl.store(entry, expert + tile * 0, mask=is_tile)
            tl.store(entry + 1, start + row, mask=is_tile)
            tl.store(entry + 2, first_part, mask=is_tile)
            tl.store(entry + 3, part + tile * 0, mask=is_tile)
