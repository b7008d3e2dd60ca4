"""Groups of ranks: made anew, destroyed, others on other ranks, and used in turn."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune.ranks import Ranks, Reduction
from tests.steps import FACES, Face, Step, all_reduced, told
from tests.worlds import further, on_each_rank

GLOO = RuntimeError(
    "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"
)


@on_each_rank(is_dist=False)
def test_a_group_made_anew_decides_as_the_first_did(rank: int):
    """Without torch.distributed a process decides alone."""
    step = Step(
        "function",
        (16, 32),
        rest=lambda y: all_reduced(y) if dist.is_initialized() else y,
        cache=False,
    )
    step(torch.zeros(1))
    for n in (2, 3):
        store = dist.FileStore(f"{os.environ['DIST_TUNE_CACHE_DIR']}-{n}", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        step(torch.zeros(n))
        dist.destroy_process_group()
    assert [each.environment.world_size for each in step.records] == [1, 2, 2]


@Reduction
def listed(parts: Mapping[int, int]) -> list[int]:
    return [*parts.values()]


@on_each_rank(3)
def test_a_group_made_anew_meets_afresh_over_a_store_that_knows_it(rank: int):
    """What its ranks said at their end is of its last life."""
    for life in range(2):
        ranks = Ranks(dist.group.WORLD, 100.0)
        time.sleep(0.1 * rank)
        assert ranks.agree("made anew", "lives", partial(int, life), listed) == [life] * 3
        ranks.close()
        dist.barrier()


def grouped(face: Face, group: Any, **options: Any) -> tuple[Step, Any]:
    """A step, and its call with this group; None is the world."""
    if face == "contextual":
        step = Step(face, (16, 32), group=group, **options)
        return step, step
    step = Step(face, (16, 32), **options)
    return step, lambda x: step(x, autotune_pg=group)


@on_each_rank(cases=FACES)
def test_a_destroyed_group_is_told_and_strands_no_peer(rank: int, face: Face):
    """On one rank alone: what has its config runs; a new key is an error there, and the other rank
    goes on without it.
    """
    group = dist.new_group([0, 1])
    step, call = grouped(face, group, name=f"destroyed {face}")
    call(torch.ones(64))
    os.environ["DIST_TUNE_DEADLINE_S"] = "0.5"
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group(group)
    call(torch.ones(64))
    if rank == 1:
        with pytest.raises(
            ValueError, match="rank 1: the group that is to decide has been destroyed"
        ):
            call(torch.ones(128))
    else:
        assert call(torch.ones(128))[0] == 2.0
    assert len(step.records) == 1


ALL, ABSENT = (0, 1, 2), "AbsentRanksError"
WRONG: list[Any] = [
    ("contextual", (ALL, ALL, (2,)), (ABSENT, ABSENT, "PeerFailedError")),
    ("function", ((0,), ALL, ALL), ("RuntimeError", ABSENT, ABSENT)),
    ("contextual", (ALL, ALL, (1, 2)), (ABSENT, ABSENT, ABSENT)),
    ("contextual", ((0,), (0,), (0,)), ("RuntimeError", "ValueError", "ValueError")),
    further(("function", ((0,), (0,), (0,)), ("RuntimeError", "ValueError", "ValueError"))),
]
"""The group of each rank, and the error there."""


@on_each_rank(3, cases=WRONG)
def test_ranks_with_different_groups_are_told_by_the_timeout_of_their_group(rank: int, case: Any):
    """Which rank has made no call with the group, and what to do; also where a collective of all
    finds no peers.
    """
    face, groups, errors = case
    os.environ["DIST_TUNE_DEADLINE_S"] = "2"
    timeout = timedelta(seconds=4)
    made = {each: dist.new_group([*each], timeout=timeout) for each in sorted({*groups})}
    touched = dist.new_group(timeout=timeout)
    _, call = grouped(
        face,
        made[groups[rank]],
        rest=lambda y: dist.all_reduce(y, group=touched),
        name=f"{face} {groups}",
    )
    began = time.monotonic()
    with pytest.raises((RuntimeError, ValueError)) as caught:
        call(torch.zeros(64))
    error = caught.value
    message = "\n".join([str(error), *getattr(error, "__notes__", [])])
    assert type(error).__name__ == errors[rank], message
    assert time.monotonic() - began < 20
    if errors[rank] == "ValueError":
        assert message.startswith(f"rank {rank} is not in the group that is to decide on ")
        return
    assert "group= (autotune_pg= of a function)" in message
    absent = [each for each in groups[rank] if groups[each] != groups[rank]]
    assert errors[rank] != ABSENT or re.match(
        rf"rank {absent[0]} last seen at: no call with this group yet.* did not come to the"
        rf" exchange '\w+' of .* for which ranks \[.*{rank}.*\] waited",
        message,
    ), message


@on_each_rank(3)
def test_a_rank_may_use_two_groups_in_turn(rank: int):
    """It is waited for while it tunes with the other one, and its errors are its own."""
    every, again = dist.new_group(), dist.new_group()
    own = [dist.new_group([each]) for each in range(3)][rank]

    def rest(y: torch.Tensor) -> torch.Tensor:
        if len(y) == 5:
            raise GLOO
        return y

    step = Step("function", (16, 32), rest=rest, name="in turn")
    if rank == 2:
        step(torch.zeros(2), autotune_pg=own)
    step(torch.zeros(3), autotune_pg=every)
    time.sleep(0.2 if rank == 0 else 0.0)
    step(torch.zeros(4), autotune_pg=again)
    assert [each.environment.world_size for each in step.records] == [1, 3, 3][rank < 2 :]
    dist.barrier()
    if rank == 2:
        assert told(lambda: step(torch.zeros(5), autotune_pg=own))[:2] == (
            "RuntimeError",
            str(GLOO),
        )
