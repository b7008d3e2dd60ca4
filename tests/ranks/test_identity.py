"""Kernels of one name and key in one step: each is a site of its own, the same on all ranks however they come to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import triton
import triton.language as tl

from dist_tune import autotune
from tests.steps import add_kernel, autotuned, best, configs, tuned
from tests.worlds import log, on_each_rank


def _runs_only(block: int, turn: int = 0) -> Any:
    """A kernel of a factory that compiles with one block size alone."""
    block, turn = tl.constexpr(block), tl.constexpr(turn)

    @triton.jit
    def kernel(x_ptr, n, BLOCK: tl.constexpr):
        tl.static_assert(block == BLOCK)
        tl.store(x_ptr, 1.0 + turn)

    return autotuned(kernel)


def _captured(value: int) -> Any:
    """A kernel of a factory that runs with any block size."""
    value = tl.constexpr(value)

    @triton.jit
    def kernel(x_ptr, n, BLOCK: tl.constexpr):
        tl.store(x_ptr, 1.0 + value)

    return autotuned(kernel, blocks=(16, 32, 64))


def _stepped(kernels: Iterable[Any], runs: list[int] | None = None, **options: Any) -> list[Any]:
    """The records of a step that launches them."""
    x, kernels = torch.zeros(64), [*kernels]

    def closure() -> None:
        if runs is not None:
            runs.append(1)
        for kernel in kernels:
            kernel[(1,)](x, 64)

    step = tuned(None, closure, **options)
    step()
    return [*step.records]


@on_each_rank(modes=["fake"])
def test_factory_kernels_have_their_own_winners(rank: int):
    """Sites go by the order of launches, also where records are taken over and where the step makes the kernels anew in each replay."""
    used: dict[int, list[int]] = {}

    def closure() -> None:
        for block in (16, 32, 64):
            kernel = _runs_only(block, turn=rank)
            kernel[(1,)](torch.zeros(64), 64)
            used[block] = best(kernel)

    for is_recalled in (False, True):
        step = tuned(None, closure)
        step()
        assert is_recalled or used == {16: [16], 32: [32], 64: [64]}
        winners = [record.best.config.partition(" ")[0] for record in step.records]
        assert (winners, {record.is_recalled for record in step.records}) == (["BLOCK=16", "BLOCK=32", "BLOCK=64"], {is_recalled})


OTHERS: dict[str, Callable[[int], list[Any]]] = {
    "value=7 on rank 0, 10 on rank 1": lambda rank: [_captured([7, 10][rank])],
    "block=16 on rank 0, 32 on rank 1": lambda rank: [_runs_only(block) for block in ((16, 32), (32, 16))[rank]],
    "turn=0 on rank 0, 10 on rank 1": lambda rank: [_runs_only(16, turn=10 * rank)],
    "code=": lambda rank: [_captured(0) if rank else _runs_only(16)],
}
"""What ranks cannot take for one kernel: other values, other orders of launches, other code."""


@on_each_rank(modes=["fake"], cases=[*OTHERS])
def test_kernels_that_are_others_on_other_ranks_are_not_mixed(rank: int, case: str):
    """All ranks run the first config that loads on all, and one line tells why; configs that are known stay as they are."""
    kernels, runs = OTHERS[case](rank), list[int]()
    assert len(_stepped(kernels)) == 0
    assert (case in log() or rank, "not tuned" in log()) == (True, True)
    for kernel in kernels:
        kernel.cache.clear()
        _stepped([kernel], is_dist=False)
    assert (_stepped(kernels, runs), runs) == ([], [1])


@on_each_rank(modes=["fake"])
def test_a_captured_rank_leaves_one_site(rank: int):
    """One kernel of a name and key on each rank is one site, if all that differs is the rank's own number."""
    (record,) = _stepped([_runs_only(16, turn=rank)])
    assert record.winner == 0
    assert [text for text in ("site 1 = ", "kernel[64,torch.float32]: ", "site 1  kernel [64] ") if text not in log()] == []


@triton.jit
def fill_kernel(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)


@on_each_rank()
def test_a_kernel_with_a_prune_rule_never_runs_what_the_rule_leaves_out(rank: int):
    """Also where another kernel of its name and key has none: the one whose rule keeps the block that fills all has it for the result."""
    rule = {"early_config_prune": lambda configs, named, **kwargs: [each for each in configs if each.kwargs["BLOCK"] >= named["n"]]}
    free, pruned = autotuned(fill_kernel, blocks=(64, 128)), autotuned(fill_kernel, blocks=(64, 128), prune_configs_by=rule)

    def closure() -> float:
        x, y = torch.zeros(128), torch.zeros(128)
        for kernel, each in [(free, x), (pruned, y)]:
            kernel[(1,)](each, 100)
        return y.sum().item()

    assert (tuned(None, closure)(), best(pruned)) == (128.0, [128])


@on_each_rank()
def test_functions_of_one_factory_are_sites_of_their_own(rank: int):
    """As kernels are."""
    ran: list[tuple[int, int]] = []

    def made(good: int) -> Any:
        def work(x: torch.Tensor, *, block: int) -> torch.Tensor:
            ran.append((good, block))
            if block != good:
                raise ValueError("another block")
            return x + 1.0

        return autotune([{"block": block} for block in (16, 32)], None, n_warmup=0, n_repeat=1)(work)

    functions = [made(16), made(32)]
    step = tuned(None, lambda x: [each(x) for each in functions])
    step(torch.zeros(4))
    ran.clear()
    step(torch.zeros(4))
    assert (sorted(ran), len(step.records)) == ([(16, 16), (32, 32)], 2)


def _alike(found: list[int], n: int = 3) -> Any:
    """A kernel with configs that read alike; the second is the only fast one."""

    def wait(number: int) -> Any:
        def hook(named: Any) -> None:
            found.append(number)
            if number != 1:
                time.sleep(0.02)

        return hook

    return autotuned(add_kernel, configs=[triton.Config({"BLOCK": 64}, pre_hook=wait(i)) for i in range(n)] + configs(16))


@on_each_rank()
def test_a_winner_among_configs_that_read_alike_is_that_config(rank: int):
    """In the record, in ``kernel.cache`` and on all ranks; a file has texts alone, of which equal ones are numbered."""
    for is_recalled in (False, True):
        found: list[int] = []
        kernel = _alike(found)
        step = tuned(kernel, n_repeat=3)
        step(torch.zeros(64))
        found.clear()
        step(torch.zeros(64))
        ((record,), (config,)) = step.records, kernel.cache.values()
        assert (record.is_recalled, record.winner, kernel.configs.index(config), found) == (is_recalled, 1, 1, [1])
        assert len({each.config for each in record.candidates}) == 4


@on_each_rank()
def test_ranks_that_know_different_configs_that_read_alike_tune(rank: int) -> Any:
    """All ranks launch the same config."""
    kernel = _alike([], 2)
    kernel.cache[64, "torch.float32", "torch.float32"] = kernel.configs[rank]
    step = tuned(kernel)
    step(torch.zeros(64))
    assert len(step.records) == 1
    return [kernel.configs.index(config) for config in kernel.cache.values()]
