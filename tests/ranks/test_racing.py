"""Racing and finals on real ranks: how many replays, and by which clock the winner is chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton

from dist_tune import contextual_autotune
from dist_tune.testing import ExactTime
from tests.ranks.kernels import accumulate_kernel, autotuned, configs, launch
from tests.shared_worlds import on_each_rank

pytestmark = pytest.mark.once

BLOCKS = (2, 4, 8, 16, 32, 64, 128, 256)


@on_each_rank(1)
def test_many_kernels_take_no_more_replays_than_one(rank: int):
    """Twenty sites of eight candidates race in the same replays, and their finals are as long as one site's."""

    def n_replays(n_sites: int) -> int:
        kernel, runs = autotuned(blocks=BLOCKS), list[int]()

        @contextual_autotune(is_dist=True, cache=False)
        def step(x: torch.Tensor) -> None:
            runs.append(1)
            for i in range(n_sites):
                launch(kernel, x[: 40 - i])  # one kernel at many sizes: as many sites

        step(torch.zeros(40))
        assert len(step.records) == n_sites
        assert step.records[0].n_replays == len(runs)
        return len(runs)

    twenty = n_replays(20)
    assert twenty <= 2 + 8 * (3 + 5)  # first and last run, and as many as an exhaustive search takes at most
    assert twenty <= n_replays(1) + 4 * 5


def slow(ms: float) -> Any:
    """A config's hook that takes the host some time, which the kernel's own clock does not see."""
    return lambda nargs: ExactTime.pass_ms(ms)


DECIDING: list[dict[str, Any]] = [{}, {"objective": "kernel"}, *({"n_repeat": n, "n_warmup": m} for n, m in ((5, 0), (2, 1), (1, 0)))]


@on_each_rank(cases=DECIDING)
def test_the_closure_decides_unless_the_kernel_is_asked_for(rank: int, options: dict[str, Any]) -> Any:
    """The kernel with the largest block is fastest by far, and its config's hook makes the step slowest: few replays show it."""
    kernel = autotuned(configs=[*configs(64, pre_hook=slow(30.0)), *configs(8, 16, 4)])

    @contextual_autotune(is_dist=True, **options)
    def step(x: torch.Tensor) -> torch.Tensor:
        y = launch(kernel, x)
        dist.all_reduce(y)
        return y

    step(torch.zeros(64))
    (record,) = step.records
    is_kernel = options.get("objective") == "kernel"
    assert (record.best.fields["BLOCK"] == 64) == is_kernel
    assert options.get("n_repeat", 5) < 5 or (record.closure_weight > 0.5) != is_kernel
    return record.winner


@on_each_rank()
def test_a_rank_that_stops_meeting_a_site_leaves_it_its_times(rank: int) -> Any:
    """In the finals only one rank meets the kernel: what both have measured in the race decides."""
    kernel, runs = autotuned(blocks=BLOCKS), list[int]()

    @contextual_autotune(is_dist=True)
    def step(x: torch.Tensor) -> None:
        runs.append(1)
        if rank == 0 or len(runs) < 25:
            launch(kernel, x)

    step(torch.zeros(256))
    (record,) = step.records
    assert record.winner > 3
    assert record.best.latency_ms is not None
    return record.winner


@on_each_rank()
def test_the_time_of_a_replay_with_a_stand_in_is_of_no_candidate(rank: int):
    """A config fails on one rank after a while; what another kernel's candidates took beside it is measured again."""

    def failing(nargs: Any) -> None:
        if rank == 1:
            ExactTime.pass_ms(500.0)
            raise RuntimeError("not now")

    first = autotuned(configs=[*configs(16), triton.Config({"BLOCK": 32}, pre_hook=failing)])
    second = autotuned(accumulate_kernel, blocks=(16, 32))

    @contextual_autotune(is_dist=True, n_repeat=1, n_warmup=1)
    def step(x: torch.Tensor) -> torch.Tensor:
        return launch(second, launch(first, x), torch.zeros_like(x))

    step(torch.zeros(64))
    by_kernel = {record.kernel.rpartition(".")[2]: record.candidates for record in step.records}
    assert "RuntimeError: not now" in str(by_kernel["add_kernel"][1].failure)
    assert all(each.closure_ms is not None and each.closure_ms < 100 for each in by_kernel["accumulate_kernel"])
