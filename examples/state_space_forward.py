# mypy: disable-error-code="no-untyped-def"
# Triton reads a kernel's annotations as argument types, so the arguments of @triton.jit functions
# carry none.
"""Forward kernels of a state-space model's chunked scan, with the launches that a library would
make of them.

Knows tiles and launch configs; knows nothing of tuning, of ranks or of autograd. Rows of time lie
in chunks of Q, the chunks of all sequences one after the other. Shapes, with H heads of P values
and a state of P x N numbers for each head:

    x, y [chunks, Q, H, P]    dt [chunks, Q, H]    b, c [chunks, Q, N]    cum, steps [chunks, H, Q]
    states [chunks, H, P, N]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

TILES = (
    (64, 64, 32, 4, 3),
    (128, 64, 32, 4, 3),
    (64, 128, 32, 4, 3),
    (128, 128, 32, 8, 3),
    (64, 32, 32, 4, 4),
    (32, 64, 32, 4, 4),
    (32, 32, 32, 2, 4),
    (64, 64, 64, 4, 2),
    (128, 64, 64, 4, 2),
)
"""BLOCK_M, BLOCK_N, BLOCK_K, warps and stages of the products."""
INTERPRETED_TILES = ((16, 16, 16, 4, 2), (32, 16, 16, 4, 2))
"""Few, because the interpreter takes milliseconds for each program."""
PRODUCT_KEY = ["H", "P", "N", "Q"]
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def zeroed(*names: str) -> Callable[[dict[str, Any]], None]:
    """A `Config.pre_hook` that zeroes what a launch adds to."""

    def zero(arguments: dict[str, Any]) -> None:
        for name in names:
            arguments[name].zero_()

    return zero


def tiles(*added_to: str) -> list[triton.Config]:
    """Configs of a product; `added_to` names the arguments that its programs add to."""
    hook = zeroed(*added_to) if added_to else None
    return [
        triton.Config(
            {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k},
            num_warps=warps,
            num_stages=stages,
            pre_hook=hook,
        )
        for m, n, k, warps, stages in (
            INTERPRETED_TILES if triton.knobs.runtime.interpret else TILES
        )
    ]


def blocks(name: str, *sizes: int, added_to: tuple[str, ...] = ()) -> list[triton.Config]:
    """Configs of a kernel with one block size."""
    hook = zeroed(*added_to) if added_to else None
    return [
        triton.Config({name: size}, pre_hook=hook)
        for size in (sizes[:2] if triton.knobs.runtime.interpret else sizes)
    ]


@triton.jit
def load_tile(base, rows, columns, row_stride, column_stride, n_rows, n_columns):
    """A tile of a matrix, with zeros beyond its ends."""
    inside = (rows[:, None] < n_rows) & (columns[None, :] < n_columns)
    return tl.load(
        base + rows[:, None] * row_stride + columns[None, :] * column_stride, mask=inside, other=0.0
    )


@triton.jit
def store_tile(base, value, rows, columns, row_stride, n_rows, n_columns):
    """Write a tile of a matrix whose columns are adjacent."""
    inside = (rows[:, None] < n_rows) & (columns[None, :] < n_columns)
    tl.store(
        base + rows[:, None] * row_stride + columns[None, :],
        value.to(base.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def own_tile(n_columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows and columns of this program's tile of a result."""
    n_across = tl.cdiv(n_columns, BLOCK_N)
    tile = tl.program_id(0)
    return tile // n_across * BLOCK_M + tl.arange(
        0, BLOCK_M
    ), tile % n_across * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def add_product(total, left, right):
    """Total + left @ right, of tiles of one dtype."""
    if INTERPRETED:  # it multiplies the bits of bfloat16 as integers
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total)
    return tl.dot(left, right, total)


@triton.jit
def row_scale(cum, steps, rows, Q: tl.constexpr, OF_OUTPUT: tl.constexpr):
    """By how much a row's output sees the state before the chunk, or the state after the chunk its
    input.
    """
    own = tl.load(cum + rows, mask=rows < Q, other=0.0)
    if OF_OUTPUT:
        return tl.where(rows < Q, tl.exp(own), 0.0)
    step = tl.load(steps + rows, mask=rows < Q, other=0.0)
    return tl.exp(tl.load(cum + Q - 1) - own) * step


@triton.jit
def pair_scale(cum, steps, rows, columns, Q: tl.constexpr):
    """By how much the output of a row sees the input of a column: not at all, if that is later."""
    i, j = (
        tl.load(cum + rows, mask=rows < Q, other=0.0),
        tl.load(cum + columns, mask=columns < Q, other=0.0),
    )
    step = tl.load(steps + columns, mask=columns < Q, other=0.0)
    seen = (rows[:, None] >= columns[None, :]) & (rows[:, None] < Q)
    # The minimum: where the column is later the exponent is positive, and its exponential may be
    # infinite.
    return tl.where(seen, tl.exp(tl.minimum(i[:, None] - j[None, :], 0.0)) * step[None, :], 0.0)


@triton.autotune(configs=blocks("BLOCK_H", 1, 2, 4, 8), key=["H", "Q"])
@triton.jit
def cumsum_kernel(dt, bias, a, steps, cum, H: tl.constexpr, Q: tl.constexpr, BLOCK_H: tl.constexpr):
    """Steps = softplus(dt + bias), and cum, the sums of a * steps from the chunk's beginning."""
    chunk, heads, q = (
        tl.program_id(1),
        tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H),
        tl.arange(0, Q),
    )
    inside = heads < H
    raw = (
        load_tile(dt + chunk * Q * H, heads, q, 1, H, H, Q)
        + tl.load(bias + heads, mask=inside, other=0.0)[:, None]
    )
    step = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
    store_tile(steps + chunk * H * Q, step, heads, q, Q, H, Q)
    sums = tl.cumsum(step * tl.load(a + heads, mask=inside, other=0.0)[:, None], axis=1)
    store_tile(cum + chunk * H * Q, sums, heads, q, Q, H, Q)


@triton.autotune(configs=tiles(), key=["N", "Q"])
@triton.jit
def product_kernel(
    c,
    b,
    cb,
    N: tl.constexpr,
    Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Cb = c @ b.T in each chunk."""
    rows, columns = own_tile(Q, BLOCK_M, BLOCK_N)
    chunk, total = tl.program_id(1), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, N, BLOCK_K):
        depth = k + tl.arange(0, BLOCK_K)
        left = load_tile(c + chunk * Q * N, rows, depth, N, 1, Q, N)
        total = add_product(total, left, load_tile(b + chunk * Q * N, depth, columns, 1, N, N, Q))
    store_tile(cb + chunk * Q * Q, total, rows, columns, Q, Q, Q)


@triton.autotune(configs=tiles(), key=[*PRODUCT_KEY, "OF_OUTPUT"])
@triton.jit
def states_kernel(
    x,
    b,
    cum,
    steps,
    states,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    Q: tl.constexpr,
    OF_OUTPUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """What a chunk adds to the state: the sum over rows of x and b, scaled.

    With dy and c: the gradient of the state before it.
    """
    rows, columns = own_tile(N, BLOCK_M, BLOCK_N)
    chunk, head, total = (
        tl.program_id(1),
        tl.program_id(2),
        tl.zeros((BLOCK_M, BLOCK_N), tl.float32),
    )
    times = (chunk * H + head) * Q
    for k in range(0, Q, BLOCK_K):
        depth = k + tl.arange(0, BLOCK_K)
        left = load_tile(x + (chunk * Q * H + head) * P, rows, depth, 1, H * P, P, Q)
        right = (
            load_tile(b + chunk * Q * N, depth, columns, N, 1, Q, N)
            * row_scale(cum + times, steps + times, depth, Q, OF_OUTPUT)[:, None]
        )
        total = add_product(total, left, right.to(left.dtype))
    store_tile(states + (chunk * H + head) * P * N, total, rows, columns, N, P, N)


@triton.autotune(configs=blocks("BLOCK", 64, 128, 256, 512), key=["H", "Q", "SIZE"])
@triton.jit
def passing_kernel(
    states,
    cum,
    before,
    n_chunks,
    H: tl.constexpr,
    Q: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Before = the state at each chunk's beginning, from one chunk of a sequence to the next."""
    at, sequence, head = (
        tl.program_id(0) * BLOCK + tl.arange(0, BLOCK),
        tl.program_id(1),
        tl.program_id(2),
    )
    state = tl.zeros((BLOCK,), tl.float32)
    for k in range(n_chunks):
        chunk = (sequence * n_chunks + k) * H + head
        tl.store(before + chunk * SIZE + at, state, mask=at < SIZE)
        added = tl.load(states + chunk * SIZE + at, mask=at < SIZE, other=0.0)
        state = state * tl.exp(tl.load(cum + chunk * Q + Q - 1)) + added


@triton.autotune(configs=tiles(), key=PRODUCT_KEY)
@triton.jit
def scan_kernel(
    x,
    c,
    cb,
    before,
    cum,
    steps,
    d,
    y,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Y = what rows see of the state before the chunk, of earlier rows of the chunk, and of
    themselves (d * x).
    """
    rows, columns = own_tile(P, BLOCK_M, BLOCK_N)
    chunk, head, total = (
        tl.program_id(1),
        tl.program_id(2),
        tl.zeros((BLOCK_M, BLOCK_N), tl.float32),
    )
    times, values = (chunk * H + head) * Q, (chunk * Q * H + head) * P
    for k in range(0, N, BLOCK_K):
        depth = k + tl.arange(0, BLOCK_K)
        left = load_tile(c + chunk * Q * N, rows, depth, N, 1, Q, N)
        state = load_tile(before + (chunk * H + head) * P * N, depth, columns, 1, N, N, P)
        total = add_product(total, left, state.to(left.dtype))
    total *= row_scale(cum + times, steps + times, rows, Q, True)[:, None]
    # Rows see none that are later than the last of them.
    for k in range(0, tl.minimum(Q, tl.max(rows, 0) + 1), BLOCK_K):
        depth = k + tl.arange(0, BLOCK_K)
        seen = load_tile(cb + chunk * Q * Q, rows, depth, Q, 1, Q, Q) * pair_scale(
            cum + times, steps + times, rows, depth, Q
        )
        right = load_tile(x + values, depth, columns, H * P, 1, Q, P)
        total = add_product(total, seen.to(right.dtype), right)
    total += tl.load(d + head) * load_tile(x + values, rows, columns, H * P, 1, Q, P).to(tl.float32)
    store_tile(y + values, total, rows, columns, H * P, Q, P)


def tile_grid(
    n_rows: int, n_columns: int, *others: int
) -> Callable[[dict[str, Any]], tuple[int, ...]]:
    """A program for each tile of a result, and for each of `others`."""
    return lambda meta: (
        triton.cdiv(n_rows, meta["BLOCK_M"]) * triton.cdiv(n_columns, meta["BLOCK_N"]),
        *others,
    )


def block_grid(name: str, size: int, *others: int) -> Callable[[dict[str, Any]], tuple[int, ...]]:
    """A program for each block of a vector, and for each of `others`."""
    return lambda meta: (triton.cdiv(size, meta[name]), *others)


def forward(
    x: torch.Tensor,
    dt: torch.Tensor,
    vectors: tuple[torch.Tensor, ...],
    b: torch.Tensor,
    c: torch.Tensor,
    n_chunks: int,
) -> Any:
    """Y, and what the backward pass needs: steps, cum, cb and the states before the chunks.

    `vectors`: a, bias and d, each [H].
    """
    (n, q, h, p), state_size, (a, bias, d) = x.shape, b.shape[-1], vectors
    steps, cum, cb = (
        torch.empty(sizes, dtype=torch.float32, device=x.device)
        for sizes in ((n, h, q), (n, h, q), (n, q, q))
    )
    states, y = cum.new_empty(n, h, p, state_size), torch.empty_like(x)
    before = torch.empty_like(states)
    sizes = {"H": h, "P": p, "N": state_size, "Q": q}
    cumsum_kernel[block_grid("BLOCK_H", h, n)](dt, bias, a, steps, cum, H=h, Q=q)
    product_kernel[tile_grid(q, q, n)](c, b, cb, N=state_size, Q=q)
    states_kernel[tile_grid(p, state_size, n, h)](
        x, b, cum, steps, states, **sizes, OF_OUTPUT=False
    )
    grid = block_grid("BLOCK", p * state_size, n // n_chunks, h)
    passing_kernel[grid](states, cum, before, n_chunks, H=h, Q=q, SIZE=p * state_size)
    scan_kernel[tile_grid(q, p, n, h)](x, c, cb, before, cum, steps, d, y, **sizes)
    return y, (steps, cum, cb, before)
