"""Racing and finals on real ranks: how many replays, and by which clock the winner is chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton

from dist_tune import contextual_autotune
from dist_tune.search.plan import Objective
from dist_tune.testing import ExactTime, values
from tests.ranks.kernels import autotuned, launch
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once

BLOCKS = (2, 4, 8, 16, 32, 64, 128, 256)


def _many_kernels(rank: int, n_kernels: int) -> Any:
    kernel = autotuned(blocks=BLOCKS)
    runs = []

    @contextual_autotune(is_dist=True)
    def step(x: torch.Tensor) -> None:
        runs.append(1)
        for i in range(n_kernels):
            launch(kernel, x[: 40 - i])  # one kernel at many sizes: as many sites

    step(torch.zeros(40))
    assert step.records[0].spent.race > 0
    return len(runs), step.records[0].n_replays, len(step.records)


def test_many_kernels_take_no_more_replays_than_one():
    """Twenty sites of eight candidates race in the same replays, and their finals are as long as one site's."""
    (one, recorded, n_records), *_ = values(on_ranks(1, _many_kernels, 1))
    assert (one, n_records) == (recorded, 1)
    (twenty, _, n_records), *_ = values(on_ranks(1, _many_kernels, 20))
    assert n_records == 20
    assert twenty <= 2 + 8 * (3 + 5)  # first and last run, and as many as an exhaustive search takes at most
    assert twenty <= one + 4 * 5


def _slow(ms: float) -> Any:
    """A config's hook that takes the host some time, which the kernel's own clock does not see."""

    def hook(nargs: dict[str, Any]) -> None:
        ExactTime.pass_ms(ms)

    return hook


def _hooked(rank: int, objective: Objective, n_repeat: int = 5, n_warmup: int = 3) -> Any:
    configs = [triton.Config({"BLOCK": 64}, pre_hook=_slow(30.0)), *(triton.Config({"BLOCK": block}) for block in (8, 16, 4))]
    kernel = autotuned(configs=configs)

    @contextual_autotune(is_dist=True, n_repeat=n_repeat, n_warmup=n_warmup, objective=objective)
    def step(x: torch.Tensor) -> torch.Tensor:
        y = launch(kernel, x)
        dist.all_reduce(y)
        return y

    step(torch.zeros(64))
    record = step.records[0]
    return record.best.fields["BLOCK"], record.closure_weight


@pytest.mark.parametrize("objective", ["closure", "kernel"])
def test_the_closure_decides_unless_the_kernel_is_asked_for(objective: Objective):
    """The kernel with the largest block is fastest by far, and its config's hook makes the step slowest."""
    got = values(on_ranks(2, _hooked, objective))
    assert got[0] == got[1]
    assert (got[0][0] == 64) == (objective == "kernel")
    assert (got[0][1] > 0.5) == (objective == "closure"), got


@pytest.mark.parametrize(("n_repeat", "n_warmup"), [(5, 0), (2, 1), (1, 0)])
def test_the_closure_decides_also_in_short_searches(n_repeat: int, n_warmup: int):
    """As above with few replays, down to one of each candidate: too few to tell the others apart, enough to see the hook."""
    got = values(on_ranks(2, _hooked, "closure", n_repeat, n_warmup))
    assert got[0] == got[1]
    assert got[0][0] != 64


def _leaves(rank: int) -> Any:
    kernel = autotuned(blocks=BLOCKS)
    runs = []

    @contextual_autotune(is_dist=True)
    def step(x: torch.Tensor) -> None:
        runs.append(1)
        if rank == 0 or len(runs) < 25:
            launch(kernel, x)

    step(torch.zeros(256))
    record = step.records[0]
    return record.winner, record.best.latency_ms is not None


def test_a_rank_that_stops_meeting_a_site_leaves_it_its_times():
    """In the finals only one rank meets the kernel: what both have measured in the race decides."""
    got = values(on_ranks(2, _leaves))
    assert got[0] == got[1]
    assert got[0][0] > 3
    assert got[0][1]


def test_an_unknown_search_is_a_mistake_of_the_caller():
    """The message names the choices."""
    for options in ({"search": "random"}, {"objective": "step"}):
        with pytest.raises(ValueError, match="one of"):
            contextual_autotune(**options)  # type: ignore[arg-type]
