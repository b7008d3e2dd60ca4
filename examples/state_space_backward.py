# mypy: disable-error-code="no-untyped-def"
# Triton reads a kernel's annotations as argument types, so the arguments of @triton.jit functions
# carry none.
"""Backward kernels of a state-space model's chunked scan, with the launches that a library would
make of them.

Shapes are those of state_space_forward.py. As public libraries do, a launch gets memory for as many
partial sums as the smallest block makes, and the host reads `best_config` right after it to know
how many there are; sums over tiles are atomic, into memory that a config's `pre_hook` has zeroed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from examples.state_space_forward import (
    PRODUCT_KEY,
    add_product,
    block_grid,
    blocks,
    load_tile,
    own_tile,
    pair_scale,
    row_scale,
    states_kernel,
    store_tile,
    tile_grid,
    tiles,
)


@triton.autotune(configs=blocks("BLOCK", 64, 128, 256, 512), key=["H", "Q", "SIZE"])
@triton.jit
def passing_backward_kernel(
    d_before,
    before,
    cum,
    d_states,
    d_last,
    n_chunks,
    n_parts,
    H: tl.constexpr,
    Q: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """From the last chunk to the first: the gradient of what each adds to the state, and a part of
    that of its decay.
    """
    part, sequence, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = part * BLOCK + tl.arange(0, BLOCK)
    gradient = tl.zeros((BLOCK,), tl.float32)
    for k in range(n_chunks):
        chunk = (sequence * n_chunks + n_chunks - 1 - k) * H + head
        tl.store(d_states + chunk * SIZE + at, gradient, mask=at < SIZE)
        gradient *= tl.exp(tl.load(cum + chunk * Q + Q - 1))
        state = tl.load(before + chunk * SIZE + at, mask=at < SIZE, other=0.0)
        tl.store(d_last + chunk * n_parts + part, tl.sum(gradient * state, 0))
        gradient += tl.load(d_before + chunk * SIZE + at, mask=at < SIZE, other=0.0)


@triton.autotune(configs=tiles("d_steps"), key=PRODUCT_KEY)
@triton.jit
def input_kernel(
    x,
    dy,
    b,
    cb,
    d_states,
    cum,
    steps,
    d,
    dx,
    d_steps,
    d_skip,
    n_parts,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Dx, added to d_steps, and a part of the gradient of d."""
    rows, columns = own_tile(P, BLOCK_M, BLOCK_N)
    chunk, head, total = (
        tl.program_id(1),
        tl.program_id(2),
        tl.zeros((BLOCK_M, BLOCK_N), tl.float32),
    )
    times, values = (chunk * H + head) * Q, (chunk * Q * H + head) * P
    for k in range(0, N, BLOCK_K):
        depth = k + tl.arange(0, BLOCK_K)
        left = load_tile(b + chunk * Q * N, rows, depth, N, 1, Q, N)
        state = load_tile(d_states + (chunk * H + head) * P * N, depth, columns, 1, N, N, P)
        total = add_product(total, left, state.to(left.dtype))
    # Without their steps: these are multiplied in at the end.
    own = tl.load(cum + times + rows, mask=rows < Q, other=0.0)
    total *= tl.exp(tl.load(cum + times + Q - 1) - own)[:, None]
    for k in range(tl.min(rows, 0), Q, BLOCK_K):
        later = k + tl.arange(0, BLOCK_K)
        decay = tl.exp(
            tl.minimum(
                tl.load(cum + times + later, mask=later < Q, other=0.0)[None, :] - own[:, None], 0.0
            )
        )
        seen = load_tile(cb + chunk * Q * Q, rows, later, 1, Q, Q, Q) * tl.where(
            later[None, :] >= rows[:, None], decay, 0.0
        )
        right = load_tile(dy + values, later, columns, H * P, 1, Q, P)
        total = add_product(total, seen.to(right.dtype), right)
    x_tile = load_tile(x + values, rows, columns, H * P, 1, Q, P).to(tl.float32)
    dy_tile = load_tile(dy + values, rows, columns, H * P, 1, Q, P).to(tl.float32)
    tl.atomic_add(d_steps + times + rows, tl.sum(total * x_tile, 1), mask=rows < Q)
    tl.store(
        d_skip + (chunk * H + head) * n_parts + tl.program_id(0),
        tl.sum(tl.sum(x_tile * dy_tile, 1), 0),
    )
    step = tl.load(steps + times + rows, mask=rows < Q, other=0.0)
    store_tile(
        dx + values, total * step[:, None] + tl.load(d + head) * dy_tile, rows, columns, H * P, Q, P
    )


@triton.autotune(configs=tiles("weights"), key=[*PRODUCT_KEY, "OF_OUTPUT"])
@triton.jit
def projection_kernel(
    x,
    states,
    b,
    cum,
    steps,
    db,
    weights,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    Q: tl.constexpr,
    OF_OUTPUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Db through the states, the sum over heads, and the weight of each row's decay.

    With dy, c and OF_OUTPUT: dc.
    """
    rows, columns = own_tile(N, BLOCK_M, BLOCK_N)
    chunk, total = tl.program_id(1), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    own = load_tile(b + chunk * Q * N, rows, columns, N, 1, Q, N).to(tl.float32)
    for head in range(H):
        times, of_head = (chunk * H + head) * Q, tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, P, BLOCK_K):
            depth = k + tl.arange(0, BLOCK_K)
            left = load_tile(x + (chunk * Q * H + head) * P, rows, depth, H * P, 1, Q, P)
            state = load_tile(states + (chunk * H + head) * P * N, depth, columns, N, 1, P, N)
            of_head = add_product(of_head, left, state.to(left.dtype))
        of_head *= row_scale(cum + times, steps + times, rows, Q, OF_OUTPUT)[:, None]
        tl.atomic_add(weights + times + rows, tl.sum(of_head * own, 1), mask=rows < Q)
        total += of_head
    store_tile(db + chunk * Q * N, total, rows, columns, N, Q, N)


@triton.autotune(configs=tiles(), key=["H", "P", "Q"])
@triton.jit
def pairs_kernel(
    x,
    dy,
    cum,
    steps,
    d_cb,
    H: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The gradient of cb, the sum over heads."""
    rows, columns = own_tile(Q, BLOCK_M, BLOCK_N)
    chunk, total = tl.program_id(1), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for head in range(H):
        values, times, of_head = (
            (chunk * Q * H + head) * P,
            (chunk * H + head) * Q,
            tl.zeros((BLOCK_M, BLOCK_N), tl.float32),
        )
        for k in range(0, P, BLOCK_K):
            depth = k + tl.arange(0, BLOCK_K)
            left = load_tile(dy + values, rows, depth, H * P, 1, Q, P)
            of_head = add_product(
                of_head, left, load_tile(x + values, depth, columns, 1, H * P, P, Q)
            )
        total += of_head * pair_scale(cum + times, steps + times, rows, columns, Q)
    store_tile(d_cb + chunk * Q * Q, total, rows, columns, Q, Q, Q)


@triton.autotune(configs=tiles(), key=["N", "Q", "TRANSPOSED"])
@triton.jit
def product_backward_kernel(
    d_cb,
    b,
    dc,
    N: tl.constexpr,
    Q: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Dc += d_cb @ b in each chunk; with c and TRANSPOSED, db += d_cb.T @ c, into a result of its
    own.
    """
    rows, columns = own_tile(N, BLOCK_M, BLOCK_N)
    chunk, total = tl.program_id(1), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    row_stride, depth_stride = (1, Q) if TRANSPOSED else (Q, 1)
    for k in range(0, Q, BLOCK_K):
        depth = k + tl.arange(0, BLOCK_K)
        right = load_tile(b + chunk * Q * N, depth, columns, N, 1, Q, N)
        left = load_tile(d_cb + chunk * Q * Q, rows, depth, row_stride, depth_stride, Q, Q)
        total = add_product(total, left.to(right.dtype), right)
    store_tile(dc + chunk * Q * N, total, rows, columns, N, Q, N)


@triton.autotune(configs=blocks("BLOCK_M", 16, 32, 64, 128), key=["H", "P", "Q"])
@triton.jit
def decay_kernel(
    x,
    dy,
    cb,
    cum,
    steps,
    of_rows,
    of_columns,
    n_parts,
    H: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Gradients of the decays within a chunk: those of rows, and a part of those of columns, which
    are subtracted from them.
    """
    part, chunk, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    values, times, depth = (chunk * Q * H + head) * P, (chunk * H + head) * Q, tl.arange(0, P)
    rows = part * BLOCK_M + tl.arange(0, BLOCK_M)
    left, total = (
        load_tile(dy + values, rows, depth, H * P, 1, Q, P),
        tl.zeros((BLOCK_M,), tl.float32),
    )
    for k in range(0, Q, 32):
        columns = k + tl.arange(0, 32)
        pairs = add_product(
            tl.zeros((BLOCK_M, 32), tl.float32),
            left,
            load_tile(x + values, depth, columns, 1, H * P, P, Q),
        )
        pairs *= load_tile(cb + chunk * Q * Q, rows, columns, Q, 1, Q, Q) * pair_scale(
            cum + times, steps + times, rows, columns, Q
        )
        total += tl.sum(pairs, 1)
        tl.store(
            of_columns + ((chunk * H + head) * n_parts + part) * Q + columns,
            tl.sum(pairs, 0),
            mask=columns < Q,
        )
    tl.store(of_rows + times + rows, total, mask=rows < Q)


@triton.autotune(configs=blocks("BLOCK_H", 1, 2, 4, 8, added_to=("da", "d_bias")), key=["H", "Q"])
@triton.jit
def cumsum_backward_kernel(
    dt,
    bias,
    a,
    d_cum,
    d_steps,
    d_dt,
    da,
    d_bias,
    H: tl.constexpr,
    Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """D_dt, and added to da and d_bias, from the gradients of cum and steps."""
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
    of_sums = load_tile(d_cum + chunk * H * Q, heads, q, Q, 1, H, Q)
    # A sum is of its own row and of all before it, so a row's gradient is of its own sum and of all
    # after it.
    of_row = of_sums + tl.sum(of_sums, 1)[:, None] - tl.cumsum(of_sums, axis=1)
    gradient = (
        load_tile(d_steps + chunk * H * Q, heads, q, Q, 1, H, Q)
        + of_row * tl.load(a + heads, mask=inside, other=0.0)[:, None]
    )
    gradient *= 1.0 / (1.0 + tl.exp(-raw))
    tl.store(d_dt + chunk * Q * H + heads[:, None] + q[None, :] * H, gradient, mask=inside[:, None])
    tl.atomic_add(da + heads, tl.sum(of_row * step, 1), mask=inside)
    tl.atomic_add(d_bias + heads, tl.sum(gradient, 1), mask=inside)


def smallest(kernel: Any, name: str) -> int:
    """The smallest block that the kernel's configs have."""
    return int(min(config.kwargs[name] for config in kernel.configs))


def backward(
    dy: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    kept: tuple[torch.Tensor, ...],
    n_chunks: int,
) -> tuple[torch.Tensor, ...]:
    """Gradients of x, dt, a, bias, d, b and c, of which `inputs` are; `kept` is what the forward
    pass kept.
    """
    (x, dt, a, bias, d, b, c), (steps, cum, cb, before) = inputs, kept
    (n, q, h, p), state_size = x.shape, b.shape[-1]
    sizes = {"H": h, "P": p, "N": state_size, "Q": q}

    d_before, d_states = torch.empty_like(before), torch.empty_like(before)
    states_kernel[tile_grid(p, state_size, n, h)](
        dy, c, cum, steps, d_before, **sizes, OF_OUTPUT=True
    )
    size = p * state_size
    n_parts = triton.cdiv(size, smallest(passing_backward_kernel, "BLOCK"))
    d_last = cum.new_empty(n, h, n_parts)
    grid = block_grid("BLOCK", size, n // n_chunks, h)
    passing_backward_kernel[grid](
        d_before, before, cum, d_states, d_last, n_chunks, n_parts, H=h, Q=q, SIZE=size
    )
    of_last = d_last[
        :, :, : triton.cdiv(size, passing_backward_kernel.best_config.kwargs["BLOCK"])
    ].sum(-1)

    dx, d_steps = torch.empty_like(x), torch.empty_like(steps)
    n_parts = triton.cdiv(q, smallest(input_kernel, "BLOCK_M")) * triton.cdiv(
        p, smallest(input_kernel, "BLOCK_N")
    )
    d_skip = cum.new_empty(n, h, n_parts)
    input_kernel[tile_grid(q, p, n, h)](
        x, dy, b, cb, d_states, cum, steps, d, dx, d_steps, d_skip, n_parts, **sizes
    )
    block = input_kernel.best_config.kwargs
    dd = d_skip[:, :, : triton.cdiv(q, block["BLOCK_M"]) * triton.cdiv(p, block["BLOCK_N"])].sum(
        (0, 2)
    )

    db, dc, of_inputs, of_outputs = (
        torch.empty_like(b),
        torch.empty_like(c),
        torch.empty_like(cum),
        torch.empty_like(cum),
    )
    projection_kernel[tile_grid(q, state_size, n)](
        x, d_states, b, cum, steps, db, of_inputs, **sizes, OF_OUTPUT=False
    )
    projection_kernel[tile_grid(q, state_size, n)](
        dy, before, c, cum, steps, dc, of_outputs, **sizes, OF_OUTPUT=True
    )
    d_cb, of_c, of_b = torch.empty_like(cb), torch.empty_like(c), torch.empty_like(b)
    pairs_kernel[tile_grid(q, q, n)](x, dy, cum, steps, d_cb, H=h, P=p, Q=q)
    product_backward_kernel[tile_grid(q, state_size, n)](
        d_cb, b, of_c, N=state_size, Q=q, TRANSPOSED=False
    )
    product_backward_kernel[tile_grid(q, state_size, n)](
        d_cb, c, of_b, N=state_size, Q=q, TRANSPOSED=True
    )

    n_parts = triton.cdiv(q, smallest(decay_kernel, "BLOCK_M"))
    of_rows, of_columns = torch.empty_like(cum), cum.new_empty(n, h, n_parts, q)
    decay_kernel[block_grid("BLOCK_M", q, n, h)](
        x, dy, cb, cum, steps, of_rows, of_columns, n_parts, H=h, P=p, Q=q
    )
    n_parts = triton.cdiv(q, decay_kernel.best_config.kwargs["BLOCK_M"])
    d_cum = of_outputs + of_rows - of_columns[:, :, :n_parts].sum(2) - of_inputs
    d_cum[:, :, -1] += of_inputs.sum(-1) + of_last

    d_dt, da, d_bias = torch.empty_like(dt), torch.empty_like(a), torch.empty_like(bias)
    cumsum_backward_kernel[block_grid("BLOCK_H", h, n)](
        dt, bias, a, d_cum, d_steps, d_dt, da, d_bias, H=h, Q=q
    )
    return dx, d_dt, da, d_bias, dd, db + of_b, dc + of_c
