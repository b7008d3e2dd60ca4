"""A kernel for tuning scripts under the fake driver: some of its configs do not compile, and some do not fit."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def scale_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows, columns = tl.arange(0, 128), tl.arange(0, DEPTH)
    a = tl.load(x_ptr + rows[:, None] * DEPTH + columns[None, :])
    acc = tl.dot(a, tl.trans(a))
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n).to(tl.float32) * 2 + tl.sum(tl.sum(acc, 0), 0) * 0, mask=at < n)


def scale_space() -> list[dict[str, Any]]:
    """100 is no power of two; a tile of 128 by 1024 halves is a quarter of a megabyte."""
    good = [{"BLOCK": block, "DEPTH": 64, "num_warps": warps} for block in (64, 128, 256) for warps in (4, 8)]
    return [*good, {"BLOCK": 100, "DEPTH": 64, "num_warps": 4}, {"BLOCK": 64, "DEPTH": 1024, "num_warps": 4}]
