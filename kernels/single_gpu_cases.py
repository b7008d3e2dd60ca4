"""Problems of the single-GPU kernels, checked and timed from the kernels' command lines by harness.py.

Knows which results, references and shapes to compare; knows nothing of tables and options.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
from rich.table import Table

from kernels import matmul, persistent_gemm, softmax, vector_add
from kernels.harness import Example, Problem, Shape, config_text


def random(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normally distributed, the same for the same shape: a failure can be run again."""
    generator = torch.Generator(device=device).manual_seed(sum(shape))
    return torch.randn(shape, dtype=dtype, device=device, generator=generator)


def sums(shape: Shape, dtype: torch.dtype, device: torch.device) -> Iterator[Problem]:
    """Both sums of vectors of `shape`, [n]."""
    (n,) = shape
    a, b = random(n, dtype=dtype, device=device), random(n, dtype=dtype, device=device).flip(0)
    running = a.clone()  # grows without end while it is timed, which takes no longer
    add, accumulate, limit, n_bytes = vector_add.vector_add, vector_add.accumulate, torch.finfo(dtype).eps, 3 * n * a.element_size()

    def problem(name: str, run: Any, kernel: Any, by_torch: Any, timed: Any = None) -> Problem:
        full_name, expected = f"{name} {list(shape)} {dtype}", lambda: a.float() + b.float()
        return Problem(full_name, run, kernel.configs, expected, by_torch, limit=limit, n_bytes=n_bytes, timed=timed)

    yield problem("a + b", lambda config: add(a, b, config), vector_add.add_kernel, lambda: a + b)
    run, timed = (lambda config: accumulate(a.clone(), b, config)), (lambda config: accumulate(running, b, config))
    yield problem("total += x", run, vector_add.accumulate_kernel, lambda: running.add_(b), timed)


def products(shape: Shape, dtype: torch.dtype, device: torch.device) -> Iterator[Problem]:
    """Both products at `shape`, [M, N, K]."""
    m, n, k = shape
    a, b = random(m, k, dtype=dtype, device=device), random(k, n, dtype=dtype, device=device)
    # Sums are in float32: of C only the last rounding is seen; without one, the order of the sum and what tensor cores cut off.
    ways: list[tuple[str, Any, Any, float]] = [
        ("A @ B", matmul.matmul, matmul.matmul_kernel, torch.finfo(dtype).eps),
        ("A @ B, K split", matmul.split_k_matmul, matmul.split_k_kernel, 1e-4),
    ]
    for title, function, kernel, limit in ways:
        yield Problem(
            f"{title} {list(shape)} {dtype}",
            lambda config, function=function: function(a, b, config),  # type: ignore[misc]
            kernel.configs,
            lambda: a.float() @ b.float(),
            lambda: a @ b,
            limit=limit,
            n_flops=2 * m * n * k,
        )


def softmaxes(shape: Shape, dtype: torch.dtype, device: torch.device) -> Iterator[Problem]:
    """Softmax of a matrix [rows, n_cols] whose rows have one dominant element, of one masked like attention, and of one out of range."""
    x = random(*shape, dtype=dtype, device=device)
    # Row i ends at column i: whole blocks of the others are -inf.
    masked = x.masked_fill(torch.ones_like(x, dtype=torch.bool).triu(1), float("-inf")).flip(1).contiguous()
    for title, rows in (("softmax", x), ("softmax, masked", masked), ("softmax, large", x * 1000)):
        yield Problem(
            f"{title} {list(shape)} {dtype}",
            lambda config, rows=rows: softmax.softmax(rows, config),  # type: ignore[misc]
            softmax.softmax_kernel.configs,
            lambda rows=rows: torch.softmax(rows.float(), dim=1),  # type: ignore[misc]
            lambda rows=rows: torch.softmax(rows, dim=1),  # type: ignore[misc]
            limit=max(torch.finfo(dtype).eps, 1e-5),
            n_bytes=2 * x.numel() * x.element_size(),
        )


def persistent_products(shape: Shape, dtype: torch.dtype, device: torch.device) -> Iterator[Problem]:
    """The product at `shape`, [M, N, K]."""
    m, n, k = shape
    a, b = _persistent_operands(shape, dtype, device)
    gemm: Any = persistent_gemm.persistent_gemm
    yield Problem(
        f"A @ B.T {list(shape)} {dtype}",
        lambda config: gemm(a, b) if config is None else gemm(a, b, config=config, autotune_allow_arg_overwrite=True),
        persistent_gemm.search_space(m, n, k, dtype),
        lambda: a.float() @ b.float().T,
        lambda: a @ b.T,
        limit=torch.finfo(dtype).eps,  # the sum is in float32, so only the last rounding is seen
        n_flops=2 * m * n * k,
    )


def bucket_cost(shape: Shape, dtype: torch.dtype, device: torch.device) -> Table:
    """What it costs another shape of the bucket to use the config of `shape`, beside the best of the whole space there. Needs a GPU.

    Of the space each config is timed shortly and the best three again; the slowdown is of means without outliers.
    """
    from dist_tune.measure import measure

    gemm: Any = persistent_gemm.persistent_gemm
    gemm(*_persistent_operands(shape, dtype, device))
    n_records = len(gemm.records)
    m, n, k = other = tuple(persistent_gemm.in_same_bucket(size) for size in shape)
    a, b = _persistent_operands(other, dtype, device)

    def mean_us(config: triton.Config, num_iters: int) -> float:
        try:
            return measure(lambda: gemm.__wrapped__(a, b, config), n_warmup=5, num_iters=num_iters).mean_us
        except triton.OutOfResources:
            return float("inf")

    space = persistent_gemm.search_space(m, n, k, dtype)
    finalists = sorted(space, key=lambda config: mean_us(config, 20))[:3]
    best_us, best = min([(mean_us(config, 100), config_text(config)) for config in finalists])
    ours_us = measure(lambda: gemm(a, b), n_warmup=5, num_iters=100).mean_us
    assert len(gemm.records) == n_records, "a shape of the same bucket was tuned"
    n_kernels = max((len(hashes) for hashes in persistent_gemm.kernels_by_key.values()), default=0)
    title = f"the config of {list(shape)} at another shape of its bucket; at most {n_kernels} kernel for each kernel key"
    table = Table("shape", "us", "best us", "slowdown", "best config there", "of", title=title)
    times = (f"{ours_us:.2f}", f"{best_us:.2f}", f"{ours_us / best_us - 1:+.1%}")
    table.add_row(str(list(other)), *times, best, str(len(space)))
    return table


def _persistent_operands(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    m, n, k = shape
    return random(m, k, dtype=dtype, device=device), random(n, k, dtype=dtype, device=device)


VECTOR_ADD = Example(
    "Vector sums: check their results, compare them with torch.",
    "n",
    ("fp32", "bf16", "fp16"),
    check_shapes=((1,), (255,), (1024,), (1025,), (5000,)),
    perf_shapes=((1 << 16,), (1 << 20,), (10_000_019,), (1 << 26,)),
    problems=sums,
)
MATMUL = Example(
    "Matrix products: check their results, compare them with torch.",
    "M,N,K",
    ("fp16", "bf16"),
    check_shapes=((1, 1, 1), (32, 32, 64), (33, 17, 70)),
    perf_shapes=((4096, 4096, 4096), (8192, 8192, 8192), (1000, 1000, 1000), (64, 4096, 16384)),
    problems=products,
)
SOFTMAX = Example(
    "Softmax of rows: check its results, compare it with torch.",
    "rows,n_cols",
    ("fp32", "bf16", "fp16"),
    check_shapes=((1, 1), (3, 63), (5, 256), (4, 257), (2, 1000)),
    perf_shapes=((4096, 1000), (4096, 4096), (4096, 32000), (512, 131072)),
    problems=softmaxes,
)
PERSISTENT_GEMM = Example(
    "Persistent GEMM: check its results, compare it with torch, and a bucket's config with the best.",
    "M,N,K",
    ("bf16", "fp16"),
    check_shapes=((1, 1, 1), (64, 64, 64), (33, 17, 70), (70, 130, 72)),
    perf_shapes=((4096, 4096, 4096), (8192, 8192, 8192), (4096, 11008, 4096), (1000, 1000, 1000)),
    problems=persistent_products,
    more_perf=bucket_cost,
)
