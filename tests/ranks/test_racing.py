"""Racing and finals on real ranks: how many replays, and by which clock the winner is chosen."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import triton

from dist_tune import contextual_autotune
from dist_tune.testing import ExactTime
from tests.steps import accumulate_kernel, autotuned, configs, launch, tuned
from tests.worlds import on_each_rank


@on_each_rank(cases=[{}, {"objective": "kernel"}, {"n_repeat": 1, "n_warmup": 0}])
def test_the_closure_decides_unless_the_kernel_is_asked_for(rank: int, options: dict[str, Any]) -> Any:
    """The kernel with the largest block is fastest by far, and its config's hook, which takes the host 30 ms, makes the step slowest."""
    kernel = autotuned(configs=[*configs(64, pre_hook=lambda nargs: ExactTime.pass_ms(30.0)), *configs(8, 16, 4)])
    step = contextual_autotune(is_dist=True, **options)(lambda x: dist.all_reduce(launch(kernel, x)))
    step(torch.zeros(64))
    (record,) = step.records
    is_kernel = options.get("objective") == "kernel"
    assert (record.best.fields["BLOCK"] == 64) == is_kernel
    assert options.get("n_repeat", 5) < 5 or (record.closure_weight > 0.5) != is_kernel
    return record.winner


@on_each_rank()
def test_a_rank_that_stops_meeting_a_site_leaves_it_its_times(rank: int) -> Any:
    """In the finals only one rank meets the kernel: what both have measured in the race decides."""
    kernel, runs = autotuned(blocks=(2, 4, 8, 16, 32, 64, 128, 256)), list[int]()

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
    step = tuned(None, lambda x: launch(second, launch(first, x), torch.zeros_like(x)), n_warmup=1)
    step(torch.zeros(64))
    by_kernel = {record.kernel.rpartition(".")[2]: record.candidates for record in step.records}
    assert "RuntimeError: not now" in str(by_kernel["add_kernel"][1].failure)
    assert all(each.closure_ms is not None and each.closure_ms < 100 for each in by_kernel["accumulate_kernel"])
