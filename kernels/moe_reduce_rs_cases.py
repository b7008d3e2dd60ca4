"""The command line of kernels/moe_reduce_rs.py: its reference, the ways to run it, and what it competes with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import triton

from kernels import moe_cases, moe_times
from kernels.ag_gemm import Shape
from kernels.grouped_gemm import check_configs
from kernels.moe_cases import Layer, Operands, Run
from kernels.moe_reduce_rs import MoeReduceScatter, config_space, moe_reduce_rs
from kernels.moe_times import ALONE, FIRST, Bound
from kernels.step_times import COPIES, GATHER_MM, MM, STEP, Contenders


def operand_shapes(shape: Shape, n_ranks: int) -> tuple[Shape, Shape, Shape]:
    """Rows of the hidden layer [M * top_k, K / W], weights [E, N, K / W], result [M / W, N]."""
    m, n, k, n_experts, top_k = shape
    return (m * top_k, k // n_ranks), (n_experts, n, k // n_ranks), (m // n_ranks, n)


def expected(operands: Operands) -> torch.Tensor:
    """The step by torch, in float32. Collective."""
    experts, weights = operands.routing.experts, operands.routing.weights
    sums = operands.a.new_zeros(len(experts), operands.b.shape[1], dtype=torch.float32)
    for expert, b in enumerate(operands.b):
        tokens, choices = (experts == expert).nonzero(as_tuple=True)
        product = operands.a[tokens * experts.shape[1] + choices].float() @ b.float().T
        sums.index_add_(0, tokens, product * weights[tokens, choices, None])
    dist.all_reduce(sums)
    return sums.chunk(dist.get_world_size())[dist.get_rank()]


def fixed_ways(device: torch.device) -> Iterator[tuple[str, Run]]:
    """Each number of chunks, and each path of the product."""
    ctx = MoeReduceScatter()
    for (n_chunks, n_push_sms), config in zip(((1, 16), (4, 8), (2, 32)), check_configs(), strict=False):
        run = functools.partial(run_with, ctx, n_chunks, n_push_sms, config)
        yield f"n_chunks={n_chunks} n_push_sms={n_push_sms} {moe_cases.text_of(config)}", run


def run_with(ctx: MoeReduceScatter, n_chunks: int, n_push_sms: int, config: triton.Config, operands: Operands, out: torch.Tensor) -> object:
    """One step with a config of everything."""
    return ctx(operands.a, operands.b, operands.routing, n_chunks, n_push_sms, out=out, config=config)


def tunable() -> Callable[..., torch.Tensor]:
    """The step whose knobs and product are tuned."""
    return moe_cases.tuned_by(moe_reduce_rs, MoeReduceScatter())


def contenders(operands: Operands, step: Callable[[], object]) -> Contenders:
    """The tuned step, grouped product and reduce-scatter by torch and NCCL, and the step with other choices."""
    a, b, routing = operands.a, operands.b, operands.routing
    (n_tokens, top_k), n_experts = routing.experts.shape, len(b)
    counts, ctx = moe_times.counts_on_host(routing, n_experts), MoeReduceScatter()
    by_expert = moe_times.sorted_by_torch(routing, n_experts)
    sorted_a = a[by_expert.rows]
    partial = a.new_zeros(n_tokens, b.shape[1])
    out = a.new_empty(n_tokens // ctx.n_ranks, b.shape[1])

    def product_then_scatter() -> None:
        rows = moe_times.sorted_by_torch(routing, n_experts)
        product = moe_times.torch_product(a[rows.rows], b, rows, counts)
        by_token = torch.empty_like(product)
        by_token[rows.rows] = product
        weights = routing.weights.to(a.dtype).unsqueeze(1)
        torch.bmm(weights, by_token.view(n_tokens, top_k, -1), out=partial.unsqueeze(1))
        dist.reduce_scatter_tensor(out, partial)

    first: Any = config_space()[0]
    alone = moe_cases.tuned_alone(operands)
    return {
        STEP: step,
        COPIES: lambda: dist.reduce_scatter_tensor(out, partial),
        MM: lambda: moe_times.torch_product(sorted_a, b, by_expert, counts),
        GATHER_MM: product_then_scatter,
        FIRST: lambda: ctx(a, b, routing, **first, config=check_configs()[0]),
        ALONE: lambda: ctx(a, b, routing, **first, config=alone),
    }


def bound(shape: Shape, n_ranks: int) -> Bound:
    """Rows of the hidden layer and weights are read once; each peer is sent the sums of its tokens."""
    (rows, k), (n_experts, n, _), (own, _) = operand_shapes(shape, n_ranks)
    n_bytes = 2 * (rows * k + n_experts * n * k + own * n)
    return Bound(2 * rows * n * k, n_bytes, 2 * own * (n_ranks - 1) * n)


def check_shapes(n_ranks: int, device: torch.device) -> list[Shape]:
    """Sizes that no block divides, fewer tokens than quarters, and more experts than rows."""
    w = n_ranks
    if device.type == "cuda":
        return [(1037 * w, 1000, 1000 * w, 8, 2), (333 * w, 1003, 501 * w, 5, 3), (3 * w, 136, 8 * w, 16, 1), (8192, 2048, 1536, 32, 2)]
    return [(37 * w, 70, 40 * w, 4, 2), (3 * w, 35, 13 * w, 3, 1)]


LAYER = Layer(
    "MoE-ReduceScatter: check its results, tune it, compare it with others.",
    "kernels/moe_reduce_rs.py",
    (8192, 2048, 1536, 32, 2),
    check_shapes,
    [(8192, 2048, 1536, 32, 2)],
    split_axis=2,
    operand_shapes=operand_shapes,
    expected=expected,
    n_roundings=3,  # a row's result, a rank's sum, the result
    fixed_ways=fixed_ways,
    tunable=tunable,
    contenders=contenders,
    bound=bound,
)


def main() -> int:
    """The command line."""
    return moe_cases.main(LAYER)
