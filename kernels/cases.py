"""What the command lines of kernels/ check, tune and time: each kernel, and each step between
ranks, with its shapes and its reference.

Knows results, ways and competitors; harness.py knows options, errors and tables.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # defines torch.ops.symm_mem
import triton

from dist_tune import TuningRecord, autotune, contextual_autotune, matches, prune_by_shared_memory
from kernels import (
    ag_gemm,
    ag_moe,
    cute_build,
    cute_gemm,
    gemm_allreduce,
    gemm_rs,
    grouped_gemm,
    guides,
    harness,
    moe_reduce_rs,
    shard_gemm,
)
from kernels import gemm_a8w8_blockscale as a8w8
from kernels import persistent_gemm as persistent
from kernels.ag_gemm import AllGatherGemm
from kernels.harness import (
    PRODUCT,
    TUNED,
    Contenders,
    Kernel,
    Problem,
    Run,
    Shape,
    Step,
    config_text,
)
from kernels.operands import key_fn, loadable
from kernels.partials import Exchange
from kernels.push_gemm import gpu_configs, interpreter_configs, push_gemm_kernel
from kernels.routing import ORDERS, RowSorter, route, skewed_logits

NCCL_TORCH = "NCCL and torch"
QUICK: Any = {"n_warmup": 1, "n_repeat": 1, "cache": False}
"""Of a tuning that is checked.

Without a cache: a config found there would have been checked at another time.
"""
Tunable = Callable[..., torch.Tensor]


def random(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Normally distributed, the same for the same shape: a failure can be run again."""
    generator = torch.Generator(device=device).manual_seed(sum(shape) + seed)
    return torch.randn(shape, dtype=dtype, device=device, generator=generator)


def sums(shape: Shape, dtype: torch.dtype, device: torch.device) -> Iterator[Problem]:
    """The sum of vectors of `shape`, [n]."""
    a = random(shape, dtype, device)
    b = a.flip(0)
    yield Problem(
        f"a + b {list(shape)} {dtype}",
        lambda config: guides.vector_add(a, b, config),
        guides.add_kernel.configs,
        lambda: a.float() + b.float(),
        torch.finfo(dtype).eps,
        {"torch": lambda: a + b},
        3 * a.numel() * a.element_size(),
    )


def products(shape: Shape, dtype: torch.dtype, device: torch.device) -> Iterator[Problem]:
    """The product at `shape`, [M, N, K]."""
    m, n, k = shape
    a, b = random((m, k), dtype, device), random((k, n), dtype, device)
    yield Problem(
        f"A @ B {list(shape)} {dtype}",
        lambda config: guides.matmul(a, b, config),
        guides.matmul_kernel.configs,
        lambda: a.float() @ b.float(),
        torch.finfo(dtype).eps,  # the sum is in float32, so only the last rounding is seen
        {"torch": lambda: a @ b},
        n_flops=2 * m * n * k,
    )


def softmaxes(shape: Shape, dtype: torch.dtype, device: torch.device) -> Iterator[Problem]:
    """Softmax of a matrix [rows, n_cols] whose rows have one dominant element, of one masked like
    attention, and of one out of range.
    """
    x = random(shape, dtype, device)
    # Row i ends at column i: whole blocks of the others are -inf.
    masked = (
        x.masked_fill(torch.ones_like(x, dtype=torch.bool).triu(1), float("-inf"))
        .flip(1)
        .contiguous()
    )
    for title, rows in (("softmax", x), ("softmax, masked", masked), ("softmax, large", x * 1000)):
        yield Problem(
            f"{title} {list(shape)} {dtype}",
            lambda config, rows=rows: guides.softmax(rows, config),  # type: ignore[misc]
            guides.softmax_kernel.configs,
            lambda rows=rows: torch.softmax(rows.float(), dim=1),  # type: ignore[misc]
            max(torch.finfo(dtype).eps, 1e-5),
            {"torch": lambda rows=rows: torch.softmax(rows, dim=1)},  # type: ignore[misc]
            2 * x.numel() * x.element_size(),
        )


def transposed_products(
    gemm: Any,
    space: Sequence[Any],
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> Problem:
    """A @ B.T at `shape`, [M, N, K], by a function that is tuned by `autotune`, beside cuBLAS."""
    m, n, k = shape
    a, b = random((m, k), dtype, device, seed), random((n, k), dtype, device, seed + 1)
    others: Contenders = {"cuBLAS": lambda: a @ b.T}
    if gemm is cute_gemm.cute_gemm:
        others["persistent_gemm"] = lambda: persistent.persistent_gemm(a, b)
    return Problem(
        f"A @ B.T {list(shape)} {dtype}",
        lambda config: gemm(a, b) if config is None else gemm.__wrapped__(a, b, config),
        space,
        lambda: a.float() @ b.float().T,
        torch.finfo(dtype).eps,  # the sum is in float32, so only the last rounding is seen
        others,
        n_flops=2 * m * n * k,
    )


def persistent_products(
    shape: Shape, dtype: torch.dtype, device: torch.device
) -> Iterator[Problem]:
    """The product with every config of its space."""
    m, n, k = shape
    yield transposed_products(
        persistent.persistent_gemm, persistent.search_space(m, n, k, dtype), shape, dtype, device
    )


def cute_products(shape: Shape, dtype: torch.dtype, device: torch.device) -> Iterator[Problem]:
    """The product with every config of its space, compiled ahead; then as it is tuned, with five
    fresh inputs.
    """
    space = cute_gemm.search_space(*shape)
    cute_gemm.compile_ahead(space, dtype)
    for seed in range(6):
        yield transposed_products(
            cute_gemm.cute_gemm, () if seed else space, shape, dtype, device, seed
        )


def scaled_products(shape: Shape, dtype: torch.dtype, device: torch.device) -> Iterator[Problem]:
    """The FP8 product with configs that take every path of the kernels, and with the one from
    files.
    """
    m, n, k = shape
    inputs = a8w8.random_inputs(m, n, k, device)
    x, w, ones = inputs[0], inputs[1], torch.ones(m + n, device=device)
    tma = a8w8.make_config(64, 128, warps=4, stages=3, tma=True)
    configs = [
        a8w8.DEFAULT_CONFIG,
        a8w8.make_config(64, 64, warps=4, stages=3, splits=3),
        a8w8.make_config(32, 256, warps=8, stages=2, group=1, cache=".cg"),
        *(tma, tma | {"NUM_KSPLIT": 2}),
        a8w8.make_config(32, 32, warps=2, stages=1, splits=4),
    ]
    by_torch = {
        "torch._scaled_mm, scales by row": lambda: torch._scaled_mm(
            x, w.T, ones[:m, None], ones[None, m:], out_dtype=torch.bfloat16
        )
    }
    yield Problem(
        f"x @ w.T, scaled {list(shape)} {dtype}",
        lambda config: a8w8.gemm_a8w8_blockscale(*inputs, dtype=dtype, config=config),
        configs,
        lambda: a8w8.reference(*inputs),
        # The rounding of y, relative to the norm: sums are float32, and single elements show that
        # fp8 units of Hopper keep fewer bits.
        torch.finfo(dtype).eps,
        by_torch if k % 16 == n % 16 == 0 else {},
        n_flops=2 * m * n * k,
        error=harness.relative_error,
    )


LARGE = (4096, 4096, 4096), (8192, 8192, 8192)
KERNELS = {
    "vector_add": Kernel(
        "Vector sums",
        sums,
        ((1,), (255,), (1024,), (1025,), (5000,)),
        ((1 << 16,), (1 << 20,), (10_000_019,), (1 << 26,)),
        sizes="n",
        dtypes=("fp32", "bf16", "fp16"),
    ),
    "matmul": Kernel(
        "Matrix products",
        products,
        ((1, 1, 1), (32, 32, 64), (33, 17, 70)),
        (*LARGE, (1000, 1000, 1000), (64, 4096, 16384)),
        dtypes=("fp16", "bf16"),
    ),
    "softmax": Kernel(
        "Softmax of rows",
        softmaxes,
        ((1, 1), (3, 63), (5, 256), (4, 257), (2, 1000)),
        ((4096, 1000), (4096, 4096), (4096, 32000), (512, 131072)),
        sizes="rows,n_cols",
        dtypes=("fp32", "bf16", "fp16"),
    ),
    "persistent_gemm": Kernel(
        "Persistent GEMM",
        persistent_products,
        ((1, 1, 1), (64, 64, 64), (33, 17, 70), (70, 130, 72)),
        (*LARGE, (4096, 11008, 4096), (1000, 1000, 1000)),
    ),
    "cute_gemm": Kernel(
        "Persistent Hopper GEMM in CuTe DSL",
        cute_products,
        ((1, 1, 1), (33, 17, 70), (200, 328, 136), (1000, 1000, 1000)),
        LARGE,
        reason_to_skip=cute_build.reason_to_skip,
    ),
    "gemm_a8w8_blockscale": Kernel(
        "FP8 GEMM with block scales",
        scaled_products,
        ((64, 128, 256), (70, 200, 500), (1, 130, 129)),
        ((256, 4096, 1024), (2048, 4096, 1024), (4096, 6144, 1024)),
    ),
}


@functools.cache
def group_of_this_rank() -> Any:
    """A group of one rank, in whose steps nothing is exchanged. Collective, the first time."""
    groups: list[Any] = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def fastest_alone(kernel: Any, run: Callable[[], object]) -> triton.Config:
    """The config of a kernel that is the fastest without a step around it; what was tuned before
    stays. Collective.
    """
    known = dict(kernel.cache)
    kernel.cache.clear()
    contextual_autotune(is_dist=True, n_warmup=3, n_repeat=5, cache=False)(run)()
    best: triton.Config = kernel.best_config
    kernel.cache.clear()
    kernel.cache.update(known)
    return best


def gathered(shard: torch.Tensor) -> torch.Tensor:
    """The shards of all ranks. Collective."""
    everything = shard.new_empty(len(shard) * dist.get_world_size(), shard.shape[1])
    dist.all_gather_into_tensor(everything, shard)
    return everything


def copies_of(shard: torch.Tensor) -> Callable[[], None]:
    """A step without its product: a gather of shards."""
    gather = AllGatherGemm().gather_for(shard)

    def run() -> None:
        gather.start(shard)
        gather.finish()

    return run


class GemmStep(Step):
    """A product of shards, as an object `context` and as a `function` of it."""

    context: Any
    function: Any

    def checked_function(self, *space: Any) -> Any:
        """The function tuned in a space, its results checked meanwhile."""
        check: Any = matches(lambda a, b, *_, **__: self.expected((a, b)).to(a.dtype))
        return autotune(*space, check=check, **QUICK)(self.function.__wrapped__)

    def tuned(self, tuner: str, config: Any = None) -> tuple[Tunable, list[TuningRecord]]:
        """All in one tuning of the function by `autotune`; or the product alone, in the step, by
        `contextual_autotune`.
        """
        ctx = self.context(config=config)
        if tuner == "function":
            return partial(self.function, ctx=ctx), self.function.records
        step: Any = contextual_autotune(is_dist=True, n_warmup=3, n_repeat=5)(ctx.__call__)
        return step, step.records


class AllGather(GemmStep):
    """kernels/ag_gemm.py."""

    description, tuners, shared = "AllGather-GEMM", ("contextual", "function"), (0, 1)
    perf_shapes = ((4096, 11008, 4096), (2048, 14336, 4096), (8192, 28672, 8192))
    context, function = AllGatherGemm, staticmethod(ag_gemm.ag_gemm)

    def operands(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, options: Any
    ) -> tuple[Any, ...]:
        """Shards of A and B."""
        return ag_gemm.random_operands(shape, dtype, device)

    def expected(self, operands: Any) -> torch.Tensor:
        """All rows of A times this rank's of B."""
        a, b = operands
        product: torch.Tensor = gathered(a).float() @ b.float().T
        return product

    def ways(
        self, device: torch.device, options: argparse.Namespace
    ) -> Iterator[tuple[str, int, Run]]:
        """The step with fixed configs, and step and function tuned, the function with its results
        checked while it is tuned.
        """
        ctx = AllGatherGemm()
        for config in (
            shard_gemm.interpreter_configs()[5::2]
            if device.type == "cpu"
            else shard_gemm.gpu_configs()[::3]
        ):
            yield f"step {config_text(config)}", 1, AllGatherGemm(config=config)
        yield "step, tuned", 1, contextual_autotune(is_dist=True, **QUICK)(ctx.__call__)
        tuned = self.checked_function(ag_gemm.config_space(), key_fn, prune_by_shared_memory)
        yield "function, tuned", 1, partial(tuned, ctx=ctx)

    def tuned(self, tuner: str, config: Any = None) -> tuple[Tunable, list[TuningRecord]]:
        """Only the product is tuned, by either way."""
        return super().tuned(tuner) if config is None else (AllGatherGemm(config=config), [])

    def fastest_product(self, operands: Any) -> triton.Config:
        """Of all of A and this rank's rows of B."""
        (a, b), lonely = operands, AllGatherGemm(group_of_this_rank())
        everything = gathered(a)
        return fastest_alone(shard_gemm.ag_gemm_kernel, lambda: lonely(everything, b))

    def contenders(self, run: Tunable, operands: Any) -> Contenders:
        """NCCL with cuBLAS, and torch's fused operator, without the gathered A among its results:
        its faster form.
        """
        a, b = operands
        everything, group_name = gathered(a), dist.distributed_c10d._get_default_group().group_name
        c = a.new_empty(len(everything), len(b))

        def gather_then_multiply() -> None:
            dist.all_gather_into_tensor(everything, a)
            torch.mm(everything, b.T, out=c)

        fused = torch.ops.symm_mem.fused_all_gather_matmul
        return {
            TUNED: lambda: run(a, b),
            PRODUCT: lambda: torch.mm(everything, b.T, out=c),
            "copies": copies_of(a),
            "NCCL": lambda: dist.all_gather_into_tensor(everything, a),
            NCCL_TORCH: gather_then_multiply,
            "torch fused": lambda: fused(
                a, [b.T], gather_dim=0, group_name=group_name, return_A=False
            ),
        }

    def work(self, shape: Shape, n_ranks: int) -> tuple[int, int]:
        """A rank sends its rows of A to each peer."""
        m, n, k = shape
        return 2 * m * n * k // n_ranks, 2 * m * k * (n_ranks - 1) // n_ranks


class RowParallel(GemmStep):
    """kernels/gemm_rs.py and kernels/gemm_allreduce.py; `checked` are exchanges that between them
    take every path.
    """

    tuners, n_roundings = ("function", "contextual"), 2

    def __init__(
        self,
        function: Any,
        context: Any,
        checked: list[dict[str, Any]],
        perf_shapes: tuple[Shape, ...],
    ) -> None:
        self.description, self.perf_shapes = context.__name__, perf_shapes
        self.function, self.context, self.checked = function, context, checked
        self.is_scattered = function is gemm_rs.gemm_rs
        self.shared = (0, 2) if self.is_scattered else (2,)

    def operands(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, options: Any
    ) -> tuple[Any, ...]:
        """This rank's columns of A and B."""
        m, n, own_k = shape[0], shape[1], shape[2] // dist.get_world_size()
        return torch.randn(m, own_k, device=device, dtype=dtype), torch.randn(
            n, own_k, device=device, dtype=dtype
        )

    def expected(self, operands: Any) -> torch.Tensor:
        """The sum over ranks, or this rank's rows of it."""
        a, b = operands
        c: torch.Tensor = a.float() @ b.float().T
        dist.all_reduce(c)
        return c.chunk(dist.get_world_size())[dist.get_rank()] if self.is_scattered else c

    def ways(
        self, device: torch.device, options: argparse.Namespace
    ) -> Iterator[tuple[str, int, Run]]:
        """Fixed configs with each exchange, also with partial results in float32; and the function
        tuned, its results checked meanwhile.
        """
        configs = interpreter_configs() if device.type == "cpu" else gpu_configs()
        for i, choices in enumerate(self.checked):
            for partial_dtype, n_roundings in ((None, 2), (torch.float32, 1)):
                config = configs[(2 * i + n_roundings - 1) % len(configs)]
                context: Any = self.context(config=config, partial_dtype=partial_dtype)
                travels = partial_dtype or "partials as operands"
                way = f"step {choices} {travels} {config_text(config)}"
                yield way, n_roundings, partial(context, **choices)
        ctx, tuned = self.context(), self.checked_function(self.checked, key_fn)
        yield "function, tuned", 2, partial(tuned, ctx=ctx)

    def fastest_product(self, operands: Any) -> triton.Config:
        """On a group of one rank, whose result is its own partial result."""
        (a, b), lonely = operands, self.context(group_of_this_rank())
        return fastest_alone(push_gemm_kernel, lambda: lonely(a, b))

    def contenders(self, run: Tunable, operands: Any) -> Contenders:
        """Untuned, cuBLAS with NCCL, and torch's operators."""
        a, b = operands
        first: Any = self.context(config=gpu_configs()[0])
        product = a @ b.T
        out = product.chunk(dist.get_world_size())[0].clone() if self.is_scattered else product
        exchange = (
            (lambda: dist.reduce_scatter_tensor(out, product))
            if self.is_scattered
            else (lambda: dist.all_reduce(product))
        )

        def multiply_then_exchange() -> None:
            torch.mm(a, b.T, out=product)
            exchange()

        return {
            TUNED: lambda: run(a, b),
            PRODUCT: lambda: torch.mm(a, b.T, out=product),
            "NCCL": exchange,
            NCCL_TORCH: multiply_then_exchange,
            "first config": lambda: first(a, b),
            **torch_row_parallel(a, b, is_scattered=self.is_scattered),
        }

    def work(self, shape: Shape, n_ranks: int) -> tuple[int, int]:
        """A rank sends a partial result of each row that another rank sums; for all rows the sums,
        too.
        """
        m, n, k = shape
        return 2 * m * n * k // n_ranks, 2 * m * n * (n_ranks - 1) // n_ranks * (
            1 if self.is_scattered else 2
        )


def torch_row_parallel(a: torch.Tensor, b: torch.Tensor, *, is_scattered: bool) -> Contenders:
    """Torch's own operators, of which those that sum all rows take bfloat16 (and float32) alone.

    Collective.
    """
    group, symm_mem = dist.distributed_c10d._get_default_group(), torch.ops.symm_mem
    if is_scattered:
        return {
            "torch fused": lambda: symm_mem.fused_matmul_reduce_scatter(
                a, b.T, "sum", 0, group.group_name
            )
        }
    if a.dtype != torch.bfloat16:
        return {}
    shared = torch.distributed._symmetric_memory.empty(
        len(a), len(b), dtype=a.dtype, device=a.device
    )
    torch.distributed._symmetric_memory.rendezvous(shared, group)

    def by(reduce: Any) -> Callable[[], object]:
        return lambda: reduce(torch.mm(a, b.T, out=shared), "sum", group.group_name)

    return {
        "torch one-shot": by(symm_mem.one_shot_all_reduce),
        "torch two-shot": by(symm_mem.two_shot_all_reduce_),
    }


class Experts(Step):
    """kernels/ag_moe.py and kernels/moe_reduce_rs.py; `split` is the size that ranks share, besides
    M.
    """

    sizes = "M,N,K,experts,top_k"
    small, large = (
        ((37, 70, 40, 4, 2), (3, 35, 13, 3, 1)),
        ((1037, 1000, 1000, 8, 2), (333, 1003, 501, 5, 3), (3, 136, 8, 16, 1)),
    )

    def __init__(
        self,
        description: str,
        split: int,
        module: ModuleType,
        context: Any,
        perf_shapes: tuple[Shape, ...],
    ) -> None:
        self.description, self.shared, self.module, self.context = (
            description,
            (0, split),
            module,
            context,
        )
        self.function = getattr(module, module.__name__.rpartition(".")[2])
        self.perf_shapes, self.short_form, self.gathers = perf_shapes, perf_shapes[-1], split == 1
        self.n_roundings = 1 if self.gathers else 3  # a row's result, a rank's sum, the result

    def operands(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, options: Any
    ) -> tuple[Any, ...]:
        """Tokens, or rows of the hidden layer; weights [E, N, K]; the routing, which is the same on
        all ranks.
        """
        (m, n, k, n_experts, top_k), n_ranks = shape, dist.get_world_size()
        if not 1 <= top_k <= n_experts:
            raise ValueError(
                f"need top_k from 1 to experts, got --shape {','.join(map(str, shape))}"
            )
        rows, n, k = (
            (m // n_ranks, n // n_ranks, k) if self.gathers else (m * top_k, n, k // n_ranks)
        )
        a, b = (
            torch.randn(rows, k, device=device, dtype=dtype),
            torch.randn(n_experts, n, k, device=device, dtype=dtype),
        )
        logits = skewed_logits(m, n_experts, options.skew, device)
        dist.broadcast(logits, 0)
        return a, b, route(logits, top_k)

    def expected(self, operands: Any) -> torch.Tensor:
        """Each row times the weights of its expert; summed over a token's experts, by their
        weights, and over ranks.
        """
        a, b, routing = operands
        experts, (n_tokens, top_k) = routing.experts.flatten(), routing.experts.shape
        rows = gathered(a).float().repeat_interleave(top_k, 0) if self.gathers else a.float()
        product = rows.new_empty(len(experts), b.shape[1])
        for expert, weights in enumerate(b):
            product[experts == expert] = rows[experts == expert] @ weights.float().T
        if self.gathers:
            return product
        sums: torch.Tensor = (product.view(n_tokens, top_k, -1) * routing.weights[:, :, None]).sum(
            1
        )
        dist.all_reduce(sums)
        return sums.chunk(dist.get_world_size())[dist.get_rank()]

    def ways(
        self, device: torch.device, options: argparse.Namespace
    ) -> Iterator[tuple[str, int, Run]]:
        """Each order of tiles, or number of chunks, with each path of the product; and the step
        tuned, if asked for.
        """
        ctx = self.context()
        chunks = [
            {"n_chunks": n_chunks, "n_push_sms": n_sms}
            for n_chunks, n_sms in ((1, 16), (4, 8), (2, 32))
        ]
        knobs: list[dict[str, Any]] = (
            [{"order": order} for order in ORDERS] if self.gathers else chunks
        )
        for choices, config in zip(knobs, grouped_gemm.check_configs(), strict=False):
            way = f"{config_text(choices)} {config_text(config)}"
            yield way, self.n_roundings, partial(ctx, **choices, config=config)
        if options.autotune or not options.check:
            yield (
                "tuned",
                self.n_roundings,
                contextual_autotune(is_dist=True, **QUICK)(self.step_of(ctx)),
            )

    def step_of(self, ctx: Any) -> Tunable:
        """The step whose knobs and product are tuned."""
        function: Tunable = self.function
        return lambda a, b, routing, out=None: function(a, b, routing, ctx, out=out)

    def tuned(self, tuner: str, config: Any = None) -> tuple[Tunable, list[TuningRecord]]:
        """Knobs and product in one tuning; a few runs are enough of the interpreter, whose times
        say nothing about GPUs.
        """
        n_warmup, n_repeat = (3, 5) if torch.cuda.is_available() else (1, 1)
        step: Any = contextual_autotune(is_dist=True, n_warmup=n_warmup, n_repeat=n_repeat)(
            self.step_of(self.context(config=config))
        )
        return step, step.records

    def fastest_product(self, operands: Any) -> triton.Config:
        """Of all rows, without communication beside it."""
        (a, b, routing), (n_experts, n, _) = operands, operands[1].shape
        rows, experts = loadable(gathered(a) if self.gathers else a), routing.experts
        sorted_rows = RowSorter([(0, experts.numel())], n_experts, "arrival", a.device).sort(
            experts
        )
        b, c = loadable(b.flatten(0, 1)).view(n_experts, n, -1), a.new_empty(experts.numel(), n)
        return fastest_alone(
            grouped_gemm.grouped_gemm_kernel,
            lambda: grouped_gemm.multiply_rows(rows, b, c, sorted_rows),
        )

    def contenders(self, run: Tunable, operands: Any) -> Contenders:
        """NCCL and torch's grouped product, whose rows stay sorted by expert where none are summed;
        and the step with other choices.
        """
        a, b, routing = operands
        experts, (n_tokens, top_k), n_experts = (
            routing.experts.flatten(),
            routing.experts.shape,
            len(b),
        )
        # For nothing: no other way needs them on the host.
        counts: list[int] = torch.bincount(experts.long(), minlength=n_experts).tolist()
        rows, partial = (gathered(a), a) if self.gathers else (a, a.new_zeros(n_tokens, b.shape[1]))
        out = rows if self.gathers else a.new_empty(n_tokens // dist.get_world_size(), b.shape[1])
        collective = dist.all_gather_into_tensor if self.gathers else dist.reduce_scatter_tensor
        top = top_k if self.gathers else 1

        def by_expert() -> tuple[torch.Tensor, torch.Tensor]:
            ends = torch.zeros(n_experts, dtype=torch.int32, device=a.device).scatter_add_(
                0, experts.long(), torch.ones_like(experts)
            )
            return experts.argsort(stable=True), ends.cumsum(0, dtype=torch.int32)

        def product(sorted_a: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            if a.dtype == torch.bfloat16:
                return torch._grouped_mm(sorted_a, b.transpose(1, 2), offs=ends)
            parts = sorted_a.split(counts)
            return torch.cat([part @ weights.T for part, weights in zip(parts, b, strict=True)])

        def by_torch() -> None:
            if self.gathers:
                collective(out, partial)
            order, ends = by_expert()
            c = product(rows[order // top], ends)
            if not self.gathers:
                by_token = torch.empty_like(c)
                by_token[order] = c
                torch.bmm(
                    routing.weights.to(a.dtype).unsqueeze(1),
                    by_token.view(n_tokens, top_k, -1),
                    out=partial.unsqueeze(1),
                )
                collective(out, partial)

        (order, ends), ctx = by_expert(), self.context()
        sorted_a = rows[order // top]
        first: Any = self.module.config_space()[0]
        return {
            TUNED: lambda: run(a, b, routing),
            PRODUCT: lambda: product(sorted_a, ends),
            "copies" if self.gathers else "NCCL": (
                copies_of(a) if self.gathers else lambda: collective(out, partial)
            ),
            NCCL_TORCH: by_torch,
            "first config": lambda: ctx(
                a, b, routing, **first, config=grouped_gemm.check_configs()[0]
            ),
        }

    def work(self, shape: Shape, n_ranks: int) -> tuple[int, int]:
        """A rank sends its tokens, or the sums of its peers' tokens."""
        m, n, k, _, top_k = shape
        return 2 * m * top_k * n * k // n_ranks, 2 * m // n_ranks * (n_ranks - 1) * (
            k if self.gathers else n
        )


STEPS: dict[str, Step] = {
    "ag_gemm": AllGather(),
    "gemm_rs": RowParallel(
        gemm_rs.gemm_rs,
        gemm_rs.GemmReduceScatter,
        [
            *({"exchange": each} for each in (Exchange(), Exchange("pull"))),
            *(
                {"exchange": Exchange("copy", reduction, 0, 64)}
                for reduction in ("inside", "behind")
            ),
            {"exchange": Exchange("push", "beside", 4, 128)},
        ],
        ((4096, 4096, 11008), (8192, 8192, 28672)),
    ),
    "gemm_allreduce": RowParallel(
        gemm_allreduce.gemm_allreduce,
        gemm_allreduce.GemmAllReduce,
        [
            *(
                {"algorithm": "one_shot", "exchange": Exchange(move, "behind", 0, 8)}
                for move in ("push", "pull")
            ),
            {"algorithm": "two_shot", "exchange": Exchange()},
            *(
                {"algorithm": "two_shot", "exchange": Exchange("copy", reduction, 8, 64)}
                for reduction in ("inside", "beside")
            ),
        ],
        ((16, 8192, 8192), (128, 8192, 8192), (2048, 8192, 8192)),
    ),
    "ag_moe": Experts(
        "AllGather-MoE",
        1,
        ag_moe,
        ag_moe.AllGatherMoe,
        ((2048, 3072, 4096, 8, 2), (2048, 14336, 4096, 8, 2), (2048, 3072, 4096, 32, 2)),
    ),
    "moe_reduce_rs": Experts(
        "MoE-ReduceScatter",
        2,
        moe_reduce_rs,
        moe_reduce_rs.MoeReduceScatter,
        ((8192, 2048, 1536, 32, 2),),
    ),
}


def main(name: str, argv: Sequence[str] | None = None) -> int:
    """The command line of kernels/<name>.py; that of guides.py takes the kernel's name first."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if name == "guides":
        if argv[:1] not in (["vector_add"], ["matmul"], ["softmax"]):
            is_help = argv[:1] in (["-h"], ["--help"])
            usage = "usage: guides.py {vector_add,matmul,softmax} [--case {check,tune,perf}] ..."
            print(usage, file=sys.stdout if is_help else sys.stderr)
            return 0 if is_help else 2
        name = argv.pop(0)
    return harness.main(STEPS[name] if name in STEPS else KERNELS[name], f"kernels/{name}.py", argv)
