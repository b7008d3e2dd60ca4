"""A candidate whose collectives wait for a rank that has yet to come to the call is no config that never returns."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from dist_tune import autotune, contextual_autotune
from dist_tune.testing import values
from tests.ranks.world import DEADLINE_S
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once


@autotune([{"factor": 1.0}, {"factor": 2.0}], None, cache=False, n_warmup=0, n_repeat=1)
def reduced(x: torch.Tensor, factor: float) -> torch.Tensor:
    y = x / factor
    dist.all_reduce(y)
    return y * factor


@contextual_autotune(is_dist=True, cache=False, n_warmup=0, n_repeat=1)
def step(x: torch.Tensor) -> torch.Tensor:
    return reduced(x)


def late(rank: int) -> float:
    if rank == 1:
        time.sleep(2.5 * DEADLINE_S)
    return step(torch.ones(4)).sum().item()


def test_a_launch_waits_for_a_rank_that_has_not_come():
    """For 2.5 deadlines, in the first run: the group's timeout is what bounds it, as without a tuner."""
    assert values(on_ranks(2, late, timeout_s=40)) == [8.0, 8.0]
