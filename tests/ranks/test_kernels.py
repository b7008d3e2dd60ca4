"""Kernels as libraries decorate and launch them: heuristics, hooks, restored tensors, tuples, None, dtypes, operators, checkpoints."""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch.utils.checkpoint import checkpoint

from dist_tune import DistTuneError
from tests.steps import accumulate_kernel, add_kernel, autotuned, best, configs, launch, tuned
from tests.worlds import is_interpreted, on_each_rank

N = 200
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


def heuristics_inside_and_outside(rank: int) -> Step:
    warps = [triton.Config({}, num_warps=w) for w in (1, 2)]
    inside = autotuned(triton.heuristics({"BLOCK": lambda args: 32 if args["n"] > 32 else 16})(add_kernel), configs=warps)
    outside = triton.heuristics({"n": lambda args: args["x_ptr"].numel()})(autotuned(blocks=(16, 32)))

    def step(x: torch.Tensor) -> torch.Tensor:
        y, z = torch.empty_like(x), torch.empty_like(x)
        inside[_grid](x, y, N)
        outside[_grid](x_ptr=y, y_ptr=z)
        return z

    return step


def tuples_none_and_dtypes(rank: int) -> Step:
    names = ["bias"]  # restored and zeroed, if it is there
    kernel = autotuned(_scaled_kernel, (16, 32), ("n", "scales", "bias", "DTYPE"), reset_to_zero=names, restore_value=names)
    bias = torch.zeros(N)

    def step(x: torch.Tensor) -> torch.Tensor:
        y, z = torch.empty_like(x, dtype=torch.float16), torch.empty_like(x)
        kernel[_grid]((x, y), N, (2.0, 1), None, tl.float16)
        kernel[_grid]((y, z), N, (2.0, 2), bias=bias, DTYPE=tl.float32)
        return z  # 4 x + 2 + 2

    return step


@triton.jit
def _double(value):
    return 2.0 * value


@triton.jit
def _negative(value):
    return -value


@triton.jit
def _activated_kernel(x_ptr, y_ptr, n, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, ACTIVATION(tl.load(x_ptr + at, mask=at < n)), mask=at < n)


def functions_in_the_key(rank: int) -> Step:
    kernel = autotuned(_activated_kernel, (16, 32), ("n", "ACTIVATION"))

    def step(x: torch.Tensor) -> torch.Tensor:
        y, z = torch.empty_like(x), torch.empty_like(x)
        kernel[_grid](x, y, N, _double)
        kernel[_grid](y, z, N, _negative)
        return z

    return step


def no_element_on_one_rank(rank: int) -> Step:
    kernel = autotuned()
    return lambda x: launch(kernel, x[: N * rank])


def no_dimension(rank: int) -> Step:
    kernel = autotuned()
    return lambda x: launch(kernel, x[0])


class _Own(torch.Tensor):
    pass


def a_subclass(rank: int) -> Step:
    kernel = autotuned()
    return lambda x: launch(kernel, x.as_subclass(_Own))


def partials(rank: int) -> Step:
    kernel = autotuned()

    def step(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        functools.partial(kernel[_grid], x, y_ptr=y)(n=N)
        functools.partial(kernel.run, grid=_grid, warmup=False)(y, y, N)
        return y

    return step


def a_triton_op(rank: int) -> Step:
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


def checkpoints(rank: int) -> Step:
    _AddOne.kernel = autotuned()

    def step(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        again, once = (checkpoint(_AddOne.apply, x, use_reentrant=each).square().sum() for each in (True, False))
        again.backward()
        assert x.grad is not None
        return x.grad + torch.autograd.grad(once, x)[0]  # 2 (2 (x + 1) + 1)

    return step


CASES: dict[Any, tuple[int, Callable[[int, torch.Tensor], torch.Tensor]]] = {
    heuristics_inside_and_outside: (2, lambda rank, x: x + 2),
    tuples_none_and_dtypes: (2, lambda rank, x: 4 * x + 4),
    functions_in_the_key: (2, lambda rank, x: -2 * x),
    no_element_on_one_rank: (2, lambda rank, x: (x + 1)[: N * rank]),
    no_dimension: (1, lambda rank, x: x[0] + 1),
    a_subclass: (1, lambda rank, x: x + 1),
    partials: (1, lambda rank, x: x + 2),
    a_triton_op: (1, lambda rank, x: x + 2),
    checkpoints: (1, lambda rank, x: 4 * x + 6),
}
"""What makes the step on a rank -> sites, and the result."""


@on_each_rank(cases=[*CASES], modes=("interpret", "fake"))
def test_what_libraries_pass_and_how_they_launch(rank: int, make: Callable[[int], Step]) -> Any:
    """Tuned as any other launch, with the right result and one config for all ranks."""
    n_sites, expected = CASES[make]
    step, x = tuned(None, make(rank)), torch.arange(float(N))
    results = [step(x) for _ in range(2)]
    assert not is_interpreted() or all(torch.equal(each, expected(rank, x)) for each in results)
    assert len(step.records) == n_sites
    return [(each.key, each.best.config) for each in step.records]


RESTORED = [("restore_value", (6.0, 14.0, 7.0, 7.0)), ("reset_to_zero", (1.0, 4.0, 2.0, 2.0))]


@on_each_rank(cases=RESTORED)
def test_restored_and_zeroed_tensors_are_those_of_one_launch(rank: int, case: tuple[str, tuple[float, ...]]):
    """Put back at the end of a replay, so that later kernels read what the launch wrote; zeroed once, before the run that counts."""
    name, expected = case
    options: dict[str, Any] = {name: ["y_ptr"]}
    kernel, follower = autotuned(accumulate_kernel, **options), autotuned(blocks=(32, 64))
    total, seen = torch.full((64,), 5.0), list[float]()

    def closure(x: torch.Tensor) -> torch.Tensor:
        launch(kernel, x, total)
        y = launch(follower, total)
        seen.append(y[0].item())
        dist.all_reduce(y)
        return y

    step = tuned(None, closure, n_repeat=2, n_warmup=1)
    y, after = step(torch.ones(64))[0].item(), total[0].item()
    step(torch.ones(64))
    assert (after, y, *set(seen[:-1]), total[0].item()) == expected


@on_each_rank()
def test_hooks_run_as_in_vanilla_triton(rank: int):
    """Pre- and post-hook around every launch of the tuning, the reset once before the final run, the config's hook always."""
    calls: list[str] = []

    def pre(full: dict[str, Any], reset_only: bool = False) -> None:
        calls.append("reset" if reset_only else f"pre {full['BLOCK']} {full['n']}")

    def post(full: dict[str, Any], exception: Exception | None) -> None:
        calls.append(f"post {type(exception).__name__}")

    candidates = [*configs(16), *configs(32, pre_hook=lambda full: calls.append(f"config {full['BLOCK']}"))]
    kernel = autotuned(configs=candidates, pre_hook=pre, post_hook=post)
    step = tuned(kernel)
    step(torch.zeros(64))
    one, other = ["pre 16 64", "post NoneType"], ["config 32", "pre 32 64", "post NoneType"]
    final = ["config 32"] * (best(kernel) == [32])
    assert calls == [*one * 3, *other, "reset", *final]
    calls.clear()
    step(torch.zeros(64))
    assert calls == final


@on_each_rank()
def test_a_tensor_that_triton_reinterprets_is_restored(rank: int):
    """It is no ``torch.Tensor``; the call counts once, as with Triton alone."""
    kernel, total = autotuned(accumulate_kernel, restore_value=["y_ptr"]), torch.full((64,), 5, dtype=torch.uint8)

    def closure(x: torch.Tensor) -> None:
        kernel[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](triton.reinterpret(x, tl.int8), triton.reinterpret(total, tl.int8), 64)

    step = tuned(None, closure, n_repeat=2, n_warmup=1)
    for n_calls in (1, 2):
        step(torch.ones(64, dtype=torch.uint8))
        assert total.tolist() == [5 + n_calls] * 64
    assert len(step.records) == 1


@triton.jit
def optional_kernel(x_ptr, y_ptr, n, z_ptr=None, BLOCK: tl.constexpr = 16):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + 1.0, mask=at < n)


MISTAKES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "autotuned twice": (
        lambda: triton.autotune([triton.Config({"SIZE": 1}), triton.Config({"SIZE": 2})], key=["n"])(autotuned()),
        "TypeError",
        "kernel tests.steps.add_kernel is decorated with triton.autotune twice",
    ),
    "left out": (
        lambda: autotuned(optional_kernel, restore_value=["z_ptr"]),
        "ValueError",
        "optional_kernel names 'z_ptr', which this launch leaves out: pass it, None if there is none",
    ),
    "misspelt": (
        lambda: autotuned(reset_to_zero=["y_prt"]),
        "ValueError",
        "y_prt",  # Triton 3.9 says so where the kernel is decorated
    ),
    "another argument": (
        lambda: autotuned(configs=[triton.Config({"BLOCKS": 16}), triton.Config({"BLOCKS": 32})]),
        "NoValidConfigError",
        "none of its 2 configs runs on rank 0:\n  each of them: ",
    ),
}


@on_each_rank(1, cases=[*MISTAKES], is_dist=False)
def test_what_no_config_can_cure_is_told_once(rank: int, mistake: str):
    """Not for each config, and not with the advice to add one."""
    make, kind, text = MISTAKES[mistake]
    x = torch.zeros(64)
    with pytest.raises((TypeError, ValueError, DistTuneError)) as raised:
        tuned(None, lambda kernel: kernel[(4,)](x, torch.empty_like(x), 64), is_dist=False)(make())
    assert (type(raised.value).__name__, text in str(raised.value)) == (kind, True), str(raised.value)
    assert "Add a config" not in str(raised.value)


@triton.jit
def locking_kernel(x_ptr, y_ptr, n, lock_ptr, BLOCK: tl.constexpr):
    """Fails while it holds the lock, with all blocks but 64."""
    tl.store(lock_ptr, 1)
    tl.static_assert(BLOCK == 64)
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + 1.0, mask=at < n)
    tl.store(lock_ptr, 0)


@on_each_rank(1, is_dist=False)
def test_what_a_failed_launch_leaves_is_told_on_the_terminal(rank: int):
    """Once: the error, and the tensors that it may have written to and nothing restores; the next config may wait for a lock in them."""
    os.environ["DIST_TUNE_VERBOSITY"] = "normal"
    kernel, lock = autotuned(locking_kernel, restore_value=["y_ptr"]), torch.zeros(1, dtype=torch.int32)

    def closure(x: torch.Tensor) -> None:
        kernel[(1,)](x, torch.empty_like(x), 64, lock)

    with contextlib.redirect_stderr(io.StringIO()) as terminal:
        tuned(None, closure, is_dist=False, reset=list)(torch.zeros(64))
    (line,) = [each for each in terminal.getvalue().splitlines() if "failed in its launch" in each]
    assert "AssertionError" in line
    assert line.endswith("what it may have written to x_ptr, lock_ptr stays, because restore_value does not name it")
