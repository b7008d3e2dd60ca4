"""Steps in which a grid, a later launch or a buffer follows the config that a kernel was just launched with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from dist_tune import contextual_autotune
from dist_tune.testing import values
from tests.ranks.kernels import add_kernel, atomic_kernel, autotuned, best, configs, launch
from tests.ranks.worlds import on_ranks

QUICK: Any = {"is_dist": True, "n_repeat": 1, "n_warmup": 0}
N = 128


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


def _every_launch(rank: int, search: Any) -> Any:
    kernel = autotuned(blocks=(16, 32, 64))
    seen: list[tuple[int, int]] = []

    def grid(meta: dict[str, Any]) -> tuple[int]:
        seen.append((meta["BLOCK"], block_of(kernel)))
        return (triton.cdiv(N, meta["BLOCK"]),)

    @contextual_autotune(**QUICK, search=search)
    def step(x: torch.Tensor) -> float:
        y = torch.empty_like(x)
        for n in (N, N // 2):
            kernel[grid](x, y, n)
            seen.append((seen[-1][0], block_of(kernel)))
        return y[0].item()

    got = [step(torch.zeros(N)) for _ in range(3)]
    n_wrong, n_seen = sum(meta != launched for meta, launched in seen), len(seen)
    return got, n_wrong, n_seen > 20, len({meta for meta, _ in seen})


@pytest.mark.parametrize("search", ["racing", "exhaustive"])
def test_best_config_is_what_was_just_launched(search: str):
    """In the grid and after the launch, in every replay and in later calls, for two keys of one kernel."""
    assert values(on_ranks(2, _every_launch, search)) == [([1.0] * 3, 0, True, 3)] * 2


def _stand_in(rank: int) -> Any:
    kernel, seen = autotuned(blocks=(16, 32, 64)), list[int]()

    def grid(meta: dict[str, Any]) -> tuple[int]:
        if meta["BLOCK"] == 32 and rank == 1:
            raise ValueError("no such block here")
        return (triton.cdiv(N, meta["BLOCK"]),)

    @contextual_autotune(**QUICK)
    def step(x: torch.Tensor) -> float:
        partials = torch.full((8,), float("nan"))
        kernel[grid](x, torch.empty_like(x), N)
        autotuned_partials[lambda meta: (triton.cdiv(N, meta["BLOCK"]),)](x, partials, N)
        seen.append(block_of(kernel))
        return partials[: N // block_of(autotuned_partials)].sum().item()

    autotuned_partials = autotuned(_partial_kernel, blocks=(16, 32, 64))
    return [step(torch.ones(N)) for _ in range(2)], rank == 0 or 32 not in seen


def test_best_config_is_the_stand_in_where_a_candidate_fails():
    """A rank that cannot launch a candidate sees the config that ran in its place."""
    assert values(on_ranks(2, _stand_in)) == [([N, N], True)] * 2


def _partials(rank: int, where: str) -> Any:
    first, second = autotuned(_partial_kernel, blocks=(16, 32, 64)), autotuned(_sum_kernel, blocks=(16, 32), key=("n_parts",))
    n_wrong: list[bool] = []

    @contextual_autotune(**QUICK)
    def step(x: torch.Tensor) -> torch.Tensor:
        partials = torch.full((8,), float("nan"))
        first[lambda meta: (triton.cdiv(N, meta["BLOCK"]),)](x, partials, N)
        n_parts = triton.cdiv(N, block_of(first))
        if where == "torch":
            y = partials[:n_parts].sum()
        elif where == "grid":  # its programs follow the first one's config: one for each partial sum
            y = torch.zeros(())
            second[lambda meta: (triton.cdiv(N, block_of(first)) * 0 + 1,)](partials, y, n_parts)
        else:  # the size of a buffer does
            copy = partials.new_empty(n_parts).copy_(partials[:n_parts])
            y = launch(plus_one, copy, torch.empty(n_parts)).sum() - n_parts
        n_wrong.append(y.item() != N)
        return y

    plus_one = autotuned(add_kernel, blocks=(16, 32))
    got = [step(torch.ones(N)).item() for _ in range(3)]
    return got, sum(n_wrong), len(best(first))


@pytest.mark.parametrize("where", ["torch", "grid", "buffer"])
def test_partial_sums_follow_the_config_that_made_them(where: str):
    """A sum over as many partial sums as the launched config has made is right in every replay, in the first call and later."""
    assert values(on_ranks(2, _partials, where)) == [([float(N)] * 3, 0, 1)] * 2


def _outside(rank: int) -> Any:
    kernel = autotuned(_partial_kernel, blocks=(64, 32, 16))

    @contextual_autotune(**QUICK)
    def step(x: torch.Tensor, partials: torch.Tensor) -> None:
        kernel[lambda meta: (triton.cdiv(N, meta["BLOCK"]),)](x, partials, N)

    got = []
    for _ in range(2):
        partials = torch.full((8,), float("nan"))
        step(torch.ones(N), partials)
        got.append(partials[: N // block_of(kernel)].sum().item())
    return got, partials.isnan().sum().item() == 8 - N // block_of(kernel)


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_after_the_call_best_config_is_that_of_the_run_that_counts(n_ranks: int):
    """An argument holds what the first run has written, and the caller reads from ``best_config`` how much that is."""
    assert values(on_ranks(n_ranks, _outside)) == [([float(N)] * 2, True)] * n_ranks


def _zeroed(rank: int, by: str) -> Any:
    zeroed: list[str] = []

    def zero(full: dict[str, Any], reset_only: bool = False) -> None:
        zeroed.append("reset" if reset_only else "launch")
        full["y_ptr"].zero_()

    options: Any = {
        "config": {"configs": configs(16, 32, 64, pre_hook=zero)},
        "kernel": {"blocks": (16, 32, 64), "pre_hook": zero},
        "names": {"blocks": (16, 32, 64), "reset_to_zero": ["y_ptr"]},
    }[by]
    kernel = autotuned(atomic_kernel, **options)

    @contextual_autotune(**QUICK)
    def step(x: torch.Tensor) -> torch.Tensor:
        y = torch.full((1,), 5.0) if by == "config" else torch.zeros(1)
        kernel[lambda meta: (triton.cdiv(N, meta["BLOCK"]),)](x, y, N)
        return y

    kept = torch.zeros(1)

    @contextual_autotune(**QUICK)
    def step_on(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if by != "config":
            y.zero_()
        kernel[lambda meta: (triton.cdiv(N, meta["BLOCK"]),)](x, y, N)
        return y

    first = [step(torch.ones(N)).item() for _ in range(3)]
    kernel.cache.clear()
    return first, [step_on(torch.ones(N), kept).item() for _ in range(3)], kept.item()


@pytest.mark.parametrize("by", ["config", "kernel", "names"])
def test_an_accumulated_output_is_zeroed_as_in_triton(by: str):
    """Atomics add into an output that a config's hook, the kernel's hook or ``reset_to_zero`` zeroes; it is of one launch."""
    assert values(on_ranks(2, _zeroed, by)) == [([float(N)] * 3, [float(N)] * 3, float(N))] * 2


def _other_hook(rank: int) -> Any:
    first, seen = autotuned(_partial_kernel, blocks=(16, 32, 64)), []

    def hook(full: dict[str, Any]) -> None:
        seen.append((block_of(first), launched[-1], second.nargs is not None, block_of(second) == full["BLOCK"]))
        full["y_ptr"].fill_(N // block_of(first))

    second = autotuned(atomic_kernel, configs=configs(16, 32, pre_hook=hook))
    launched: list[int] = []

    @contextual_autotune(**QUICK)
    def step(x: torch.Tensor) -> Any:
        partials, y = torch.zeros(8), torch.zeros(1)

        def grid(meta: dict[str, Any]) -> tuple[int]:
            launched.append(meta["BLOCK"])
            return (triton.cdiv(N, meta["BLOCK"]),)

        first[grid](x, partials, N)
        second[lambda meta: (triton.cdiv(N, meta["BLOCK"]),)](torch.zeros(N), y, N)
        return y.item() == N // launched[-1]

    got = [step(torch.ones(N)) for _ in range(2)]
    return got, all(a == b and has_nargs and is_own for a, b, has_nargs, is_own in seen), len(seen) > 5


def test_a_hook_sees_best_config_of_another_kernel():
    """The hook of a config reads what another kernel was launched with, and its own kernel's arguments."""
    assert values(on_ranks(2, _other_hook)) == [([True, True], True, True)] * 2
