"""Kernels of one name and key in one step: each is a site of its own, the same on all ranks however they come to it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from dist_tune import autotune
from dist_tune.testing import values
from tests.ranks.kernels import add_kernel, autotuned, best, configs, launch, tuned
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once


def _runs_only(block: int, turn: int = 0) -> Any:
    """A kernel of a factory that compiles with one block size alone."""
    block, turn = tl.constexpr(block), tl.constexpr(turn)

    @triton.jit
    def kernel(x_ptr, n, BLOCK: tl.constexpr):
        tl.static_assert(block == BLOCK)
        tl.store(x_ptr, 1.0 + turn)

    return autotuned(kernel, blocks=(16, 32, 64))


def _stepped(kernels: list[Any]) -> Any:
    x = torch.zeros(64)

    def closure() -> None:
        for kernel in kernels:
            kernel[(1,)](x, 64)

    step = tuned(None, closure)
    step()
    return step


def _in_another_order(rank: int) -> Any:
    kernels = [_runs_only(block) for block in (16, 32, 64)]
    step = _stepped(kernels[::-1] if rank else kernels)
    return [best(kernel) for kernel in kernels], len(step.records)


def test_factory_kernels_that_ranks_meet_in_another_order_get_their_own_winners():
    """Sites are matched by what the kernels are."""
    assert values(on_ranks(2, _in_another_order, mode="fake")) == [([[16], [32], [64]], 3)] * 2


def _with_its_rank(rank: int) -> Any:
    step = _stepped([_runs_only(16, turn=rank)])
    return [record.winner for record in step.records]


def test_a_captured_rank_leaves_one_site():
    """One kernel of a name and key on each rank is one site, whatever it has captured there."""
    outcomes = on_ranks(2, _with_its_rank, mode="fake")
    assert values(outcomes) == [[0]] * 2
    assert all("site 1 = " in outcome.log and "kernel[64,torch.float32]: " in outcome.log for outcome in outcomes)
    assert all("site 1 winner=0 " in outcome.log for outcome in outcomes)


def _of_other_code(rank: int) -> Any:
    if rank == 0:

        @triton.jit
        def kernel(x_ptr, n, BLOCK: tl.constexpr):
            tl.static_assert(BLOCK == 16)
            tl.store(x_ptr, 1.0)
    else:

        @triton.jit
        def kernel(x_ptr, n, BLOCK: tl.constexpr):
            tl.static_assert(BLOCK > 16)
            tl.store(x_ptr, 2.0)

    mine = autotuned(kernel, blocks=(16, 32))
    step = _stepped([mine])
    return best(mine), len(step.records)


def test_a_kernel_of_other_code_on_each_rank_is_two_sites():
    """No config that only one of them can run is lost to it."""
    assert values(on_ranks(2, _of_other_code, mode="fake")) == [([16], 2), ([32], 2)]


def _with_rank_and_block(rank: int, turns: list[list[int]]) -> Any:
    kernels = [_runs_only(block, turn) for block, turn in zip((16, 32), turns[rank], strict=True)]
    step = _stepped(kernels[::-1] if rank else kernels)
    return [best(kernel) for kernel in kernels], len(step.records)


@pytest.mark.parametrize(("turns", "n_sites"), [([[0, 1], [10, 11]], 2), ([[0, 1], [1, 0]], 0)])
def test_kernels_are_matched_by_what_ranks_have_in_common(turns: list[list[int]], n_sites: int):
    """Values that are different on each rank tell no kernels apart where others do; where none do, nothing is tuned."""
    assert [n for _, n in values(on_ranks(2, _with_rank_and_block, turns, mode="fake"))] == [n_sites] * 2


@triton.jit
def fill_kernel(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)


def _with_a_prune_rule(rank: int) -> Any:
    """One fills what it is given alone, the other has a rule that keeps the one block that fills all."""
    pruned = autotuned(fill_kernel, blocks=(64, 128), prune_configs_by={"early_config_prune": _whole})
    free = autotuned(fill_kernel, blocks=(64, 128))
    free_first = rank == 0

    def closure() -> tuple[float, float]:
        x, y = torch.zeros(128), torch.zeros(128)
        for kernel, each in [(free, x), (pruned, y)][:: 1 if free_first else -1]:
            kernel[(1,)](each, 100)
        return x.sum().item(), y.sum().item()

    step = tuned(None, closure)
    return step()[1], best(pruned)


def _whole(configs: Any, named: Any, **kwargs: Any) -> Any:
    return [each for each in configs if each.kwargs["BLOCK"] >= named["n"]]


def test_a_kernel_with_a_prune_rule_never_runs_what_the_rule_leaves_out():
    """Also where another kernel of its name and key has none; the rule is there for the result."""
    assert values(on_ranks(2, _with_a_prune_rule)) == [(128.0, [128])] * 2


def _known_in_another_order(rank: int) -> Any:
    kernels = [_runs_only(block) for block in (16, 32)]
    _stepped(kernels)
    n_runs = []

    def closure() -> None:
        n_runs.append(1)
        for each in kernels[::-1] if rank else kernels:
            each[(1,)](torch.zeros(64), 64)

    step = tuned(None, closure)
    step()
    return len(n_runs), len(step.records)


def test_known_configs_are_compared_kernel_by_kernel():
    """A step whose kernels all have configs runs once, however the ranks come to them."""
    assert values(on_ranks(2, _known_in_another_order, mode="fake")) == [(1, 0)] * 2


def _made_anew(rank: int) -> Any:
    used: dict[int, list[list[int]]] = {16: [], 32: []}

    def closure() -> None:
        kernels = {block: _runs_only(block) for block in ((16, 32) if rank else (32, 16))}
        for kernel in kernels.values():
            kernel[(1,)](torch.zeros(64), 64)
        for block, kernel in kernels.items():
            used[block].append(best(kernel))

    step = tuned(None, closure)
    step()
    return [each[-1] for each in used.values()], len(step.records)


def test_factory_kernels_that_the_step_makes_anew_keep_their_sites():
    """In each replay they are other objects, and the same kernels."""
    assert values(on_ranks(2, _made_anew, mode="fake")) == [([[16], [32]], 2)] * 2


def _recalled_in_another_order(rank: int) -> Any:
    got = []
    for turn in range(2):
        kernels = [_runs_only(block) for block in (16, 32)]
        step = _stepped(kernels[::-1] if rank != turn else kernels)
        got.append(([best(kernel) for kernel in kernels], [record.is_recalled for record in step.records]))
    return got


def test_factory_kernels_are_recalled_in_another_order():
    """Each with its own record."""
    assert (
        values(on_ranks(2, _recalled_in_another_order, mode="fake")) == [[([[16], [32]], [False, False]), ([[16], [32]], [True, True])]] * 2
    )


def _functions_of_one_factory(rank: int) -> Any:
    ran: list[tuple[int, int]] = []

    def made(good: int) -> Any:
        def work(x: torch.Tensor, *, block: int) -> torch.Tensor:
            ran.append((good, block))
            if block != good:
                raise ValueError("another block")
            return x + 1.0

        return autotune([{"block": block} for block in (16, 32)], None, n_warmup=0, n_repeat=1)(work)

    functions = [made(16), made(32)]
    step = tuned(None, lambda x: [each(x) for each in (functions[::-1] if rank else functions)])
    step(torch.zeros(4))
    ran.clear()
    step(torch.zeros(4))
    return sorted(ran), len(step.records)


def test_functions_of_one_factory_are_sites_of_their_own():
    """As kernels are."""
    assert values(on_ranks(2, _functions_of_one_factory)) == [([(16, 16), (32, 32)], 2)] * 2


def _seen(number: int, found: list[int]) -> Any:
    def hook(named: Any) -> None:
        found.append(number)

    return hook


def _hooks_of_one_factory(rank: int) -> Any:
    """The second of three configs that read alike is the only fast one."""
    found: list[int] = []

    def wait(number: int) -> Any:
        def hook(named: Any) -> None:
            found.append(number)
            if number != 1:
                time.sleep(0.02)

        return hook

    kernel = autotuned(add_kernel, configs=[triton.Config({"BLOCK": 64}, pre_hook=wait(i)) for i in range(3)])
    step = tuned(kernel, n_repeat=3)
    step(torch.zeros(64))
    found.clear()
    step(torch.zeros(64))
    (record,) = step.records
    (config,) = kernel.cache.values()
    texts = [each.config for each in record.candidates]
    return record.winner, kernel.configs.index(config), found, len(set(texts)), record.best.config == texts[record.winner]


def test_a_winner_among_configs_that_read_alike_is_that_config():
    """In the record, in ``kernel.cache`` and on all ranks."""
    assert values(on_ranks(2, _hooks_of_one_factory)) == [(1, 1, [1], 3, True)] * 2


def _known_apart(rank: int) -> Any:
    """Ranks know different configs that read alike."""
    kernel = autotuned(add_kernel, configs=[triton.Config({"BLOCK": 64}, pre_hook=_seen(i, [])) for i in range(2)])
    kernel.cache[(64, "torch.float32", "torch.float32")] = kernel.configs[rank]
    step = tuned(kernel)
    step(torch.zeros(64))
    (config,) = kernel.cache.values()
    return len(step.records), kernel.configs.index(config)


def test_ranks_that_know_different_configs_that_read_alike_tune():
    """All ranks launch the same config."""
    one, other = values(on_ranks(2, _known_apart))
    assert one == other
    assert one[0] == 1


def _recalled(rank: int) -> Any:
    def kernel() -> Any:
        return autotuned(add_kernel, configs=[triton.Config({"BLOCK": 64}, pre_hook=_seen(i, [])) for i in range(3)] + configs(32))

    got = []
    for _ in range(2):
        each = kernel()
        step = tuned(each, lambda x, each=each: launch(each, x))
        step(torch.zeros(64))
        (config,) = each.cache.values()
        got.append((step.records[0].is_recalled, step.records[0].winner, each.configs.index(config)))
    return got


def test_a_record_on_disk_names_one_of_the_configs_that_read_alike():
    """The file has texts alone: equal ones are numbered."""
    for (is_first_recalled, winner, first), (is_recalled, recalled, second) in values(on_ranks(2, _recalled)):
        assert (is_first_recalled, is_recalled) == (False, True)
        assert winner == first == recalled == second


def _of_stage(rank: int, values: list[int]) -> Any:
    """Each stage of a pipeline launches its own kernel of one factory."""
    value = tl.constexpr(values[rank])

    @triton.jit
    def kernel(x_ptr, n, BLOCK: tl.constexpr):
        tl.store(x_ptr, 1.0 + value)

    mine = autotuned(kernel, blocks=(16, 32))
    step = _stepped([mine])
    return best(mine), len(step.records)


def test_kernels_that_differ_in_captured_values_alone_are_not_mixed():
    """Ranks cannot know whether they are one: both run the first config, and one line names the values. A captured rank tells nothing."""
    outcomes = on_ranks(2, _of_stage, [7, 10], mode="fake")
    assert values(outcomes) == [([16], 0)] * 2
    assert "value=7 on rank 0, 10 on rank 1" in outcomes[0].log
    assert "not tuned" in outcomes[0].log
    assert [n_sites for _, n_sites in values(on_ranks(2, _of_stage, [0, 1], mode="fake"))] == [1, 1]
