"""Steps in which a grid, a later launch or a buffer follows the config that a kernel was just launched with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tests.ranks.kernels import add_kernel, atomic_kernel, autotuned, best, configs, launch, tuned
from tests.shared_worlds import on_each_rank

N = 128
Step = Callable[[torch.Tensor], torch.Tensor]


@triton.jit
def _partial_kernel(x_ptr, partials_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(partials_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + at, mask=at < n, other=0.0)))


@triton.jit
def _sum_kernel(partials_ptr, y_ptr, n_parts, BLOCK: tl.constexpr):
    at = tl.arange(0, 8)
    tl.store(y_ptr, tl.sum(tl.load(partials_ptr + at, mask=at < n_parts, other=0.0)))


def block_of(kernel: Any) -> int:
    """The block size of the launch before."""
    size: int = kernel.best_config.kwargs["BLOCK"]
    return size


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(N, meta["BLOCK"]),)


def partials() -> torch.Tensor:
    return torch.full((8,), float("nan"))


@on_each_rank(cases=["racing", "exhaustive"])
def test_best_config_is_what_was_just_launched(rank: int, search: str):
    """In the grid and after the launch, in every replay and in later calls, for two keys of one kernel."""
    kernel = autotuned()
    seen: list[tuple[int, int]] = []

    def grid(meta: dict[str, Any]) -> tuple[int]:
        seen.append((meta["BLOCK"], block_of(kernel)))
        return (triton.cdiv(N, meta["BLOCK"]),)

    def closure(x: torch.Tensor) -> float:
        y = torch.empty_like(x)
        for n in (N, N // 2):
            kernel[grid](x, y, n)
            seen.append((seen[-1][0], block_of(kernel)))
        return y[0].item()

    step = tuned(kernel, closure, search=search)
    assert [step(torch.zeros(N)) for _ in range(3)] == [1.0] * 3
    assert all(meta == launched for meta, launched in seen)
    assert (len(seen) > 20, {meta for meta, _ in seen}) == (True, {16, 32, 64})


@on_each_rank()
def test_best_config_is_the_stand_in_where_a_candidate_fails(rank: int):
    """A rank that cannot launch a candidate sees the config that ran in its place."""
    kernel, seen = autotuned(_partial_kernel), list[int]()

    def failing(meta: dict[str, Any]) -> tuple[int]:
        if meta["BLOCK"] == 32 and rank == 1:
            raise ValueError("no such block here")
        return grid(meta)

    def closure(x: torch.Tensor) -> float:
        parts = partials()
        kernel[failing](x, parts, N)
        seen.append(block_of(kernel))
        return parts[: N // block_of(kernel)].sum().item()

    step = tuned(kernel, closure)
    assert [step(torch.ones(N)) for _ in range(2)] == [N, N]
    assert rank == 0 or 32 not in seen


@on_each_rank(cases=["torch", "grid", "buffer"])
def test_partial_sums_follow_the_config_that_made_them(rank: int, where: str):
    """A sum over as many partial sums as the launched config has made is right in every replay, in the first call and later."""
    first, second = autotuned(_partial_kernel), autotuned(_sum_kernel, blocks=(16, 32), key=("n_parts",))
    plus_one, sums = autotuned(add_kernel, blocks=(16, 32)), list[float]()

    def closure(x: torch.Tensor) -> torch.Tensor:
        parts = partials()
        first[grid](x, parts, N)
        n_parts = triton.cdiv(N, block_of(first))
        if where == "torch":
            y = parts[:n_parts].sum()
        elif where == "grid":  # its programs follow the first one's config: one for each partial sum
            y = torch.zeros(())
            second[lambda meta: (triton.cdiv(N, block_of(first)) * 0 + 1,)](parts, y, n_parts)
        else:  # the size of a buffer does
            copy = parts.new_empty(n_parts).copy_(parts[:n_parts])
            y = launch(plus_one, copy, torch.empty(n_parts)).sum() - n_parts
        sums.append(y.item())
        return y

    step = tuned(first, closure)
    for _ in range(3):
        step(torch.ones(N))
    assert (set(sums), len(best(first))) == ({float(N)}, 1)


@on_each_rank()
def test_after_the_call_best_config_is_that_of_the_run_that_counts(rank: int):
    """An argument holds what the first run has written, and the caller reads from ``best_config`` how much that is."""
    kernel = autotuned(_partial_kernel, blocks=(64, 32, 16))

    def closure(x: torch.Tensor, parts: torch.Tensor) -> None:
        kernel[grid](x, parts, N)

    step = tuned(kernel, closure)
    for _ in range(2):
        parts = partials()
        step(torch.ones(N), parts)
        assert parts[: N // block_of(kernel)].sum().item() == N
    assert parts.isnan().sum().item() == 8 - N // block_of(kernel)


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


@on_each_rank()
def test_a_hook_sees_best_config_of_another_kernel(rank: int):
    """The hook of a config reads what another kernel was launched with, and its own kernel's arguments."""
    first, seen, launched = autotuned(_partial_kernel), list[bool](), list[int]()

    def hook(full: dict[str, Any]) -> None:
        seen.append(block_of(first) == launched[-1] and second.nargs is not None and block_of(second) == full["BLOCK"])
        full["y_ptr"].fill_(N // block_of(first))

    second = autotuned(atomic_kernel, configs=configs(16, 32, pre_hook=hook))

    def noted(meta: dict[str, Any]) -> tuple[int]:
        launched.append(meta["BLOCK"])
        return grid(meta)

    def closure(x: torch.Tensor) -> bool:
        y = torch.zeros(1)
        first[noted](x, torch.zeros(8), N)
        second[grid](torch.zeros(N), y, N)
        return y.item() == N // launched[-1]

    step = tuned(first, closure)
    assert [step(torch.ones(N)) for _ in range(2)] == [True, True]
    assert (all(seen), len(seen) > 5) == (True, True)
