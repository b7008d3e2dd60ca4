"""What libraries pass to kernels and how they launch them: tuples, None, dtypes, tensors without elements, operators, checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch.utils.checkpoint import checkpoint

from dist_tune import contextual_autotune
from dist_tune.testing import Mode, values
from tests.ranks.kernels import add_kernel, autotuned, launch
from tests.ranks.worlds import on_ranks

N = 200
QUICK: Any = {"is_dist": True, "n_repeat": 1, "n_warmup": 0, "cache": False}
Step = Callable[[torch.Tensor], torch.Tensor]


@triton.jit
def _scaled_kernel(pointers, n, scales, bias, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(pointers[0] + at, mask=at < n) * scales[0] + scales[1]
    if bias is not None:
        value += tl.load(bias + at, mask=at < n)
    tl.store(pointers[1] + at, value.to(DTYPE), mask=at < n)


def _grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(N, meta["BLOCK"]),)


def _tuples(rank: int) -> Step:
    kernel = autotuned(_scaled_kernel, key=("n", "scales", "bias", "DTYPE"))

    def step(x: torch.Tensor) -> torch.Tensor:
        y, z = torch.empty_like(x, dtype=torch.float16), torch.empty_like(x)
        kernel[_grid]((x, y), N, (2.0, 1), None, tl.float16)
        kernel[_grid]((y, z), N, (2.0, 2), bias=x, DTYPE=tl.float32)
        return z  # 4 x + 2 + 2 + x

    return step


def _empty(rank: int) -> Step:
    kernel = autotuned()
    return lambda x: launch(kernel, x[: N * rank]) if rank == 0 else launch(kernel, x)


def _zero_dimensions(rank: int) -> Step:
    kernel = autotuned()
    return lambda x: launch(kernel, x[0])


class _Own(torch.Tensor):
    pass


def _subclass(rank: int) -> Step:
    kernel = autotuned()
    return lambda x: launch(kernel, x.as_subclass(_Own))


def _partial(rank: int) -> Step:
    kernel = autotuned()

    def step(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        functools.partial(kernel[_grid], x, y_ptr=y)(n=N)
        functools.partial(kernel.run, grid=_grid, warmup=False)(y, y, N)
        return y

    return step


def _operator(rank: int) -> Step:
    kernel = autotuned()

    @torch.library.triton_op("dist_tune_tests::add_one", mutates_args={})
    def add_one(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        torch.library.wrap_triton(kernel)[_grid](x, y, N)
        return y

    return lambda x: add_one(add_one(x))


class _AddOne(torch.autograd.Function):
    kernel: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = launch(_AddOne.kernel, x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return launch(_AddOne.kernel, grads[0].contiguous())


def _checkpoints(rank: int) -> Step:
    _AddOne.kernel = autotuned(add_kernel)

    def step(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        again, once = (checkpoint(_AddOne.apply, x, use_reentrant=each).square().sum() for each in (True, False))
        again.backward()
        assert x.grad is not None
        return x.grad + torch.autograd.grad(once, x)[0]  # 2 (2 (x + 1) + 1)

    return step


CASES: dict[str, tuple[Callable[[int], Step], int, Callable[[int, torch.Tensor], torch.Tensor]]] = {
    "tuples, None and dtypes": (_tuples, 2, lambda rank, x: 5 * x + 4),
    "no element on one rank": (_empty, 2, lambda rank, x: (x + 1)[: N * rank]),
    "no dimension": (_zero_dimensions, 1, lambda rank, x: x[0] + 1),
    "a subclass": (_subclass, 1, lambda rank, x: x + 1),
    "partials": (_partial, 1, lambda rank, x: x + 2),
    "triton_op": (_operator, 1, lambda rank, x: x + 2),
    "checkpoints": (_checkpoints, 1, lambda rank, x: 4 * x + 6),
}
"""What is passed -> step, sites, and the result."""


def _tried(rank: int) -> Any:
    x, got = torch.arange(float(N)), {}
    for name, (make, n_sites, expected) in CASES.items():
        step = contextual_autotune(**QUICK)(make(rank))
        results = [step(x) for _ in range(2)]
        is_right = all(torch.equal(each, expected(rank, x)) for each in results)
        got[name] = is_right, len(step.records) == n_sites, [(each.key, each.best.config) for each in step.records]
    return got


@pytest.mark.parametrize("mode", [pytest.param("interpret", marks=pytest.mark.once), "fake"])
def test_what_libraries_pass_and_how_they_launch(mode: Mode):
    """Tuned as any other launch, with the right result and one config for all ranks."""
    first, second = values(on_ranks(2, _tried, mode=mode))
    assert {name: each[2] for name, each in first.items()} == {name: each[2] for name, each in second.items()}
    for got in (first, second):
        assert [name for name, (is_right, is_counted, _) in got.items() if not is_counted or not (is_right or mode == "fake")] == []
