"""Steps in which a grid, a sum or a hook follows the config that a kernel was just launched with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tests.steps import atomic_kernel, autotuned, best, configs, tuned
from tests.worlds import on_each_rank

N = 128
Step = Callable[[torch.Tensor], object]


@triton.jit
def _partial_kernel(x_ptr, partials_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(partials_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + at, mask=at < n, other=0.0)))


def block_of(kernel: Any) -> int:
    """The block size of the launch before."""
    size: int = kernel.best_config.kwargs["BLOCK"]
    return size


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(N, meta["BLOCK"]),)


def in_its_grid_and_after_it(rank: int, is_right: list[bool]) -> Step:
    """For two keys of one kernel."""
    kernel, launched = autotuned(), list[int]()

    def noted(meta: dict[str, Any]) -> tuple[int]:
        launched.append(meta["BLOCK"])
        is_right.append(block_of(kernel) == launched[-1])
        return grid(meta)

    def step(x: torch.Tensor) -> float:
        y = torch.empty_like(x)
        for n in (N, N // 2):
            kernel[noted](x, y, n)
            is_right.append(block_of(kernel) == launched[-1])
        return y[0].item()

    return step


def of_a_stand_in(rank: int, is_right: list[bool]) -> Step:
    """A sum of as many parts as the launched config has made, where one rank cannot launch a candidate."""
    kernel = autotuned(_partial_kernel)

    def failing(meta: dict[str, Any]) -> tuple[int]:
        if meta["BLOCK"] == 32 and rank == 1:
            raise ValueError("no such block here")
        return grid(meta)

    def step(x: torch.Tensor) -> torch.Tensor:
        partials = torch.full((8,), float("nan"))
        kernel[failing](x, partials, N)
        y = partials[: triton.cdiv(N, block_of(kernel))].sum()
        is_right.append(y.item() == N)
        return y

    return step


def by_a_hook_of_another(rank: int, is_right: list[bool]) -> Step:
    """The hook of a config reads what another kernel was launched with, and its own kernel's arguments."""
    first, launched = autotuned(_partial_kernel), list[int]()

    def hook(full: dict[str, Any]) -> None:
        is_right.append(block_of(first) == launched[-1] and second.nargs is not None and block_of(second) == full["BLOCK"])
        full["y_ptr"].fill_(N // block_of(first))

    second = autotuned(atomic_kernel, configs=configs(16, 32, pre_hook=hook))

    def noted(meta: dict[str, Any]) -> tuple[int]:
        launched.append(meta["BLOCK"])
        return grid(meta)

    def step(x: torch.Tensor) -> None:
        y = torch.zeros(1)
        first[noted](x, torch.zeros(8), N)
        second[grid](torch.zeros(N), y, N)
        is_right.append(y.item() == N // launched[-1])

    return step


@on_each_rank(cases=[in_its_grid_and_after_it, of_a_stand_in, by_a_hook_of_another])
def test_best_config_is_what_was_just_launched(rank: int, make: Callable[[int, list[bool]], Step]):
    """In every replay and in later calls."""
    is_right: list[bool] = []
    step = tuned(None, make(rank, is_right))
    for _ in range(3):
        step(torch.ones(N))
    assert (all(is_right), len(is_right) > 7, len(step.records) > 0) == (True, True, True)


@on_each_rank()
def test_after_the_call_best_config_is_that_of_the_run_that_counts(rank: int):
    """An argument holds what the first run has written, and the caller reads from ``best_config`` how much that is."""
    kernel = autotuned(_partial_kernel, blocks=(64, 32, 16))
    step = tuned(kernel, lambda x, partials: kernel[grid](x, partials, N) and None)
    for _ in range(2):
        partials = torch.full((8,), float("nan"))
        step(torch.ones(N), partials)
        assert partials[: N // block_of(kernel)].sum().item() == N
    assert (partials.isnan().sum().item(), len(best(kernel))) == (8 - N // block_of(kernel), 1)


@on_each_rank(cases=["config", "kernel", "names"])
def test_an_accumulated_output_is_zeroed_as_in_triton(rank: int, by: str):
    """Atomics add into an output that a config's hook, the kernel's hook or ``reset_to_zero`` zeroes; it is of one launch."""

    def zero(full: dict[str, Any], reset_only: bool = False) -> None:
        full["y_ptr"].zero_()

    options: Any = {
        "config": {"configs": configs(16, 32, 64, pre_hook=zero)},
        "kernel": {"pre_hook": zero},
        "names": {"reset_to_zero": ["y_ptr"]},
    }[by]
    kernel, kept = autotuned(atomic_kernel, **options), torch.full((1,), 5.0)

    def closure(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.full((1,), 5.0) if y is None else y
        if by != "config":
            y.zero_()
        kernel[grid](x, y, N)
        return y

    for args in ((), (kept,)):
        step = tuned(kernel, closure)
        assert [step(torch.ones(N), *args).item() for _ in range(3)] == [N] * 3
        kernel.cache.clear()
    assert kept.item() == N
