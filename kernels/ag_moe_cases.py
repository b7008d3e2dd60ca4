"""The command line of kernels/ag_moe.py: its reference, the ways to run it, and what it competes with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import triton

from kernels import moe_cases, moe_times
from kernels.ag_gemm import AllGatherGemm, Shape
from kernels.ag_gemm_cases import gather_only
from kernels.ag_moe import WAYS, AllGatherMoe, ag_moe, config_space
from kernels.grouped_gemm import check_configs
from kernels.moe_cases import Layer, Operands, Run
from kernels.moe_times import ALONE, FIRST, Bound
from kernels.routing import ORDERS, Order
from kernels.step_times import COPIES, GATHER, GATHER_MM, MM, STEP, Contenders


def operand_shapes(shape: Shape, n_ranks: int) -> tuple[Shape, Shape, Shape]:
    """Tokens [M / W, K], weights [E, N / W, K], result [M * top_k, N / W]."""
    m, n, k, n_experts, top_k = shape
    return (m // n_ranks, k), (n_experts, n // n_ranks, k), (m * top_k, n // n_ranks)


def gathered(tokens: torch.Tensor) -> torch.Tensor:
    """The tokens of all ranks. Collective."""
    everything = tokens.new_empty(len(tokens) * dist.get_world_size(), tokens.shape[1])
    dist.all_gather_into_tensor(everything, tokens)
    return everything


def expected(operands: Operands) -> torch.Tensor:
    """The step by torch, in float32. Collective."""
    experts, tokens = operands.routing.experts, gathered(operands.a).float()
    top_k = experts.shape[1]
    result = tokens.new_empty(experts.numel(), operands.b.shape[1])
    for expert, b in enumerate(operands.b):
        rows = (experts.flatten() == expert).nonzero().flatten()
        result[rows] = tokens[rows // top_k] @ b.float().T
    return result


def fixed_ways(device: torch.device) -> Iterator[tuple[str, Run]]:
    """Each order of tiles, each way to gather, and each path of the product."""
    ctx = AllGatherMoe()
    ways = WAYS if device.type == "cuda" else WAYS[:1]
    for way in ways:
        for order, config in zip(ORDERS, check_configs(), strict=False):
            yield f"order={order} way={way} {moe_cases.text_of(config)}", functools.partial(run_with, ctx, order, way, config)


def run_with(ctx: AllGatherMoe, order: Order, way: str, config: triton.Config, operands: Operands, out: torch.Tensor) -> object:
    """One step with a config of everything."""
    return ctx(operands.a, operands.b, operands.routing, order, way, out=out, config=config)


def tunable() -> Callable[..., torch.Tensor]:
    """The step whose knobs and product are tuned."""
    return moe_cases.tuned_by(ag_moe, AllGatherMoe())


def contenders(operands: Operands, step: Callable[[], object]) -> Contenders:
    """The tuned step, all-gather and grouped product by NCCL and torch, and the step with other choices.

    The rows of the competitors' product stay sorted by expert, which spares them a pass over the result.
    """
    a, b, routing = operands.a, operands.b, operands.routing
    top_k, n_experts = routing.experts.shape[1], len(b)
    everything, counts, ctx = gathered(a), moe_times.counts_on_host(routing, n_experts), AllGatherMoe()
    by_expert, gather = moe_times.sorted_by_torch(routing, n_experts), AllGatherGemm().gather_for(a)
    sorted_a = everything[by_expert.rows // top_k]

    def gather_then_multiply() -> None:
        dist.all_gather_into_tensor(everything, a)
        rows = moe_times.sorted_by_torch(routing, n_experts)
        moe_times.torch_product(everything[rows.rows // top_k], b, rows, counts)

    first: Any = config_space()[0]
    alone = moe_cases.tuned_alone(Operands(everything, b, routing))
    return {
        STEP: step,
        COPIES: lambda: gather_only(gather, a),
        MM: lambda: moe_times.torch_product(sorted_a, b, by_expert, counts),
        GATHER: lambda: dist.all_gather_into_tensor(everything, a),
        GATHER_MM: gather_then_multiply,
        FIRST: lambda: ctx(a, b, routing, **first, config=check_configs()[0]),
        ALONE: lambda: ctx(a, b, routing, **first, config=alone),
    }


def bound(shape: Shape, n_ranks: int) -> Bound:
    """Tokens and weights are read once, C is written once; each rank sends its tokens to each peer."""
    (own, k), (n_experts, n, _), (rows, _) = operand_shapes(shape, n_ranks)
    n_bytes = 2 * (own * n_ranks * k + n_experts * n * k + rows * n)
    return Bound(2 * rows * n * k, n_bytes, 2 * own * (n_ranks - 1) * k)


def check_shapes(n_ranks: int, device: torch.device) -> list[Shape]:
    """Sizes that no block divides, and more experts than rows."""
    w = n_ranks
    if device.type == "cuda":
        return [(1037 * w, 1000 * w, 1000, 8, 2), (333 * w, 1003 * w, 1001, 5, 3), (w, 8 * w, 8, 16, 1), (2048, 3072, 4096, 32, 2)]
    return [(37 * w, 70 * w, 72, 4, 2), (w, 35 * w, 45, 3, 1)]


LAYER = Layer(
    "AllGather-MoE: check its results, tune it, compare it with others.",
    "kernels/ag_moe.py",
    (2048, 3072, 4096, 32, 2),
    check_shapes,
    [(2048, 3072, 4096, 8, 2), (2048, 3072, 4096, 32, 2), (2048, 14336, 4096, 8, 2)],
    split_axis=1,
    operand_shapes=operand_shapes,
    expected=expected,
    n_roundings=1,
    fixed_ways=fixed_ways,
    tunable=tunable,
    contenders=contenders,
    bound=bound,
)


def main() -> int:
    """The command line."""
    return moe_cases.main(LAYER)
