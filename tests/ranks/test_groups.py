"""Groups of real processes: who reduces for all, and what a group is when it is made anew."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune.distributed.group import Ranks, group_of
from dist_tune.distributed.messages import Reduction
from dist_tune.errors import DistTuneError
from dist_tune.testing import values
from tests.ranks.kernels import autotuned, tuned
from tests.ranks.test_ranks import AGAIN, entered, meet_again
from tests.ranks.world import DEADLINE_S
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once


def _counted(rank: int) -> Any:
    ranks, calls = entered(), []

    @Reduction
    def joined(parts: Mapping[int, str]) -> str:
        calls.append(parts)
        return "+".join(f"{each}:{part}" for each, part in parts.items())

    results = []
    for number in range(9):
        time.sleep(0.02 if rank == number % 3 else 0.0)
        results.append(ranks.reduce(f"step {number}", "abc"[rank], joined))
    return results, len(calls)


def test_the_last_to_come_reduces_for_all():
    """Once a meeting, from the parts of all in the order of members; the others read what came of it."""
    results, n_calls = zip(*values(on_ranks(3, _counted)), strict=True)
    assert results == (["0:a+1:b+2:c"] * 9,) * 3
    assert sum(n_calls) == 9


def _bad_reduction(rank: int) -> Any:
    ranks = entered()

    @Reduction
    def reduce(parts: Mapping[int, str]) -> str:
        raise ValueError("cannot reduce")

    time.sleep(0.3 if rank == 1 else 0.0)
    try:
        return ranks.reduce("report", "", reduce)
    except (ValueError, DistTuneError) as error:
        ranks.abort(error)
        return str(error), meet_again(ranks)


def test_a_reduction_that_raises_strands_nobody():
    """The last to come raises its error, and the others learn whose it was."""
    errors, again = zip(*values(on_ranks(2, _bad_reduction)), strict=True)
    assert errors[1] == "cannot reduce"
    assert "rank 1 raised ValueError: cannot reduce" in errors[0]
    assert again == (AGAIN[:2],) * 2


def _groups(rank: int, folder: str) -> Any:
    with pytest.raises(DistTuneError, match=r"call init_process_group\(\)"):
        group_of(None, 1.0)
    met = []
    for name in ("first", "second"):
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{name}", 2), rank=rank, world_size=2)
        not_mine = [dist.new_group([0]), dist.new_group([1])][1 - rank]
        with pytest.raises(ValueError, match=f"rank {rank} is not in the group"):
            group_of(not_mine, 1.0)
        ranks = group_of(None, 1.0)
        assert (group_of(dist.group.WORLD, 2.0), ranks.deadline_s) == (ranks, 2.0)
        met.append(meet_again(ranks))
        met.append(meet_again(Ranks(ranks._group, 1.0)))  # made anew over one store, where the verdict of its last life still is
        dist.destroy_process_group()
    return met


def test_a_group_is_one_object_as_long_as_it_lives(tmp_path: Path):
    """Not without torch.distributed, not for strangers; one for a group; one that meets afresh when it is made anew."""
    assert values(on_ranks(2, _groups, str(tmp_path), is_dist=False)) == [[AGAIN[:2]] * 4] * 2


def _destroyed(rank: int) -> Any:
    group = dist.new_group([0, 1])
    kernel = autotuned()
    step = tuned(kernel, group=group)
    step(torch.ones(64))
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group(group)
    step(torch.ones(64))
    try:
        step(torch.ones(128))
    except ValueError as error:
        return str(error)
    return len(step.records)


def test_a_destroyed_group_is_told_and_strands_no_peer():
    """On one rank alone: what has its config runs; a new key is an error there, and the other rank goes on without it."""
    first, second = on_ranks(2, _destroyed)
    assert first.value == 1
    assert "rank 1: the group that is to decide has been destroyed" in second.value
    assert first.seconds < 3 * DEADLINE_S
