"""Groups of real processes, made anew and destroyed."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist

from dist_tune import autotune
from dist_tune.distributed.group import Ranks, group_of
from dist_tune.distributed.messages import Reduction
from tests.ranks.functions import BLOCKS, QUICK, shape_of
from tests.ranks.kernels import autotuned, tuned
from tests.ranks.world import DEADLINE_S
from tests.shared_worlds import on_each_rank

pytestmark = pytest.mark.once


@Reduction
def _listed(parts: Mapping[int, str]) -> list[str]:
    return list(parts.values())


def meets(ranks: Ranks, part: str = "") -> bool:
    """Whether a meeting of a next call brings the parts of two ranks together."""
    dist.barrier()
    with ranks.calling("again") as call:
        ranks.enter(call)
        return ranks.reduce("once more", f"part {ranks.rank}", _listed) == ["part 0", "part 1"]


@on_each_rank(is_dist=False)
def test_a_group_is_one_object_as_long_as_it_lives(rank: int):
    """Not without torch.distributed, where a process tunes alone; not for strangers; one that meets afresh when it is made anew."""
    step = autotune(BLOCKS, shape_of, **QUICK)(lambda x, block: x)
    step(torch.zeros(1))
    with pytest.raises(RuntimeError, match=r"call init_process_group\(\)"):
        group_of(None, 1.0)
    for n, name in enumerate(("first", "second"), 2):
        store = dist.FileStore(f"{os.environ['DIST_TUNE_CACHE_DIR']}-{name}", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        step(torch.zeros(n))
        not_mine = [dist.new_group([0]), dist.new_group([1])][1 - rank]
        with pytest.raises(ValueError, match=f"rank {rank} is not in the group"):
            group_of(not_mine, 1.0)
        ranks = group_of(None, 1.0)
        assert (group_of(dist.group.WORLD, 2.0), ranks.deadline_s) == (ranks, 2.0)
        assert meets(ranks)
        assert meets(Ranks(ranks._group, 1.0))  # made anew over one store, where the verdict of its last life still is
        dist.destroy_process_group()
    assert [each.environment.world_size for each in step.records] == [1, 2, 2]


@on_each_rank()
def test_a_destroyed_group_is_told_and_strands_no_peer(rank: int):
    """On one rank alone: what has its config runs; a new key is an error there, and the other rank goes on without it."""
    group = dist.new_group([0, 1])
    step = tuned(autotuned(), group=group)
    step(torch.ones(64))
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group(group)
    step(torch.ones(64))
    began = time.monotonic()
    if rank == 1:
        with pytest.raises(ValueError, match="rank 1: the group that is to decide has been destroyed"):
            step(torch.ones(128))
    else:
        step(torch.ones(128))
        assert time.monotonic() - began < 3 * DEADLINE_S
        assert len(step.records) == 1
