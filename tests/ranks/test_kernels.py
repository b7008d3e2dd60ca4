"""Kernels as libraries decorate and launch them: wrappers, hooks, restored tensors, subclasses."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from dist_tune import contextual_autotune
from dist_tune.testing import values
from tests.ranks.kernels import accumulate_kernel, add_kernel, autotuned, best, configs, launch, tuned
from tests.ranks.worlds import on_ranks

QUICK: Any = {"n_repeat": 1, "n_warmup": 0}


def _heuristics(rank: int) -> Any:
    size = {"BLOCK": lambda args: 32 if args["n"] > 32 else 16}
    warps = [triton.Config({}, num_warps=w) for w in (1, 2, 4)]
    inside = triton.autotune(configs=warps, key=["n"])(triton.heuristics(size)(add_kernel))
    outside = triton.heuristics({"n": lambda args: args["x_ptr"].numel()})(triton.autotune(configs=configs(16, 32), key=["n"])(add_kernel))
    x = torch.zeros(64)

    @contextual_autotune(is_dist=True, **QUICK)
    def step() -> list[float]:
        y, z = torch.empty_like(x), torch.empty_like(x)
        inside[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](x, y, 64)
        outside[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](x_ptr=y, y_ptr=z)
        return [y[0].item(), z[-1].item()]

    got = step()
    again = step()
    return got, again, len(inside.cache), len(outside.fn.cache), [r.kernel for r in step.records]


def test_heuristics_inside_and_outside():
    """Heuristics under the autotuner and over it, with arguments by keyword."""
    got = values(on_ranks(2, _heuristics))
    assert got[0] == got[1]
    assert got[0][:4] == ([1.0, 2.0], [1.0, 2.0], 1, 1)
    assert all(name.endswith("add_kernel") for name in got[0][4])


def _restored(rank: int, name: str) -> Any:
    options: dict[str, Any] = {name: ["y_ptr"]}
    kernel = autotuned(accumulate_kernel, configs=configs(16, 32, 64), **options)
    follower = autotuned(blocks=(32, 64))
    total = torch.full((64,), 5.0)
    seen = []

    @contextual_autotune(is_dist=True, n_repeat=2, n_warmup=1)
    def step(x: torch.Tensor) -> torch.Tensor:
        launch(kernel, x, total)
        y = launch(follower, total)
        seen.append(y[0].item())
        dist.all_reduce(y)
        return y

    y = step(torch.ones(64))
    tuned_total = total[0].item()
    step(torch.ones(64))
    return tuned_total, y[0].item(), set(seen[:-1]), total[0].item()


def test_restore_value_puts_back_at_the_end_of_a_replay():
    """Kernels later in the closure read what the launch wrote, in every replay; after the tuning the kernel ran once."""
    assert values(on_ranks(2, _restored, "restore_value")) == [(6.0, 14.0, {7.0}, 7.0)] * 2


def test_reset_to_zero_zeroes_once_before_the_run_that_counts():
    """As vanilla Triton leaves it: the first result starts from zero, later calls accumulate."""
    assert values(on_ranks(2, _restored, "reset_to_zero")) == [(1.0, 4.0, {2.0}, 2.0)] * 2


@triton.jit
def _maybe_kernel(x_ptr, bias_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + at, mask=at < n)
    if bias_ptr is not None:
        value += tl.load(bias_ptr + at, mask=at < n)
    tl.store(y_ptr + at, value, mask=at < n)


def _none_among_tensors(rank: int) -> Any:
    names = ["bias_ptr", "y_ptr"]
    kernel = triton.autotune(configs=configs(16, 32), key=["n"], reset_to_zero=names, restore_value=names)(_maybe_kernel)
    x, y = torch.ones(64), torch.zeros(64)
    tuned(kernel, lambda: kernel[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](x, None, y, 64))()
    return y[0].item(), len(kernel.cache)


def test_none_among_restored_and_zeroed_tensors():
    """An optional tensor that is None is left out, in every Triton version."""
    assert values(on_ranks(2, _none_among_tensors)) == [(1.0, 1)] * 2


def _hooks(rank: int) -> Any:
    calls: list[str] = []

    def pre(full: dict[str, Any], reset_only: bool = False) -> None:
        calls.append("reset" if reset_only else f"pre {full['BLOCK']} {full['n']}")

    def post(full: dict[str, Any], exception: Exception | None) -> None:
        calls.append(f"post {type(exception).__name__}")

    def config_hook(full: dict[str, Any]) -> None:
        calls.append(f"config {full['BLOCK']}")

    candidates = [*configs(16), *configs(32, pre_hook=config_hook)]
    kernel = triton.autotune(configs=candidates, key=["n"], pre_hook=pre, post_hook=post)(add_kernel)
    step = tuned(kernel)
    step(torch.zeros(64))
    while_tuning = list(calls)
    calls.clear()
    step(torch.zeros(64))
    return while_tuning, calls, best(kernel)


def test_hooks_run_as_in_vanilla_triton():
    """Pre- and post-hook around every launch of the tuning, the reset once before the final run, the config's hook always."""
    for while_tuning, later, winner in values(on_ranks(2, _hooks)):
        one, other = ["pre 16 64", "post NoneType"], ["config 32", "pre 32 64", "post NoneType"]
        final = ["reset"] + (["config 32"] if winner == [32] else [])
        assert while_tuning == one + one + one + other + final
        assert later == final[1:]
