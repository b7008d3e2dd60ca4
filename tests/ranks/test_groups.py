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

DEADLINE_S = 2.0
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


Groups = tuple[tuple[int, ...], ...]
"""The group of each rank; empty: the world."""
ALL, WORLD = (0, 1, 2), ()


def called(
    rank: int,
    face: Face,
    groups: Groups,
    *,
    is_shared: bool = True,
    name: str = "",
    n_more: int = 0,
) -> tuple[str, str]:
    """The error, and its message, of a call with these groups, in which all ranks sum if it
    ``is_shared``; rank 2 calls more often.
    """
    os.environ["DIST_TUNE_DEADLINE_S"] = str(DEADLINE_S)
    timeout = timedelta(seconds=(3 if is_shared else 1.3) * DEADLINE_S)
    made = {
        members: dist.new_group([*members], timeout=timeout)
        for members in sorted({*groups})
        if members
    }
    touched = dist.new_group(timeout=timeout)

    def rest(y: torch.Tensor) -> None:
        if is_shared:
            dist.all_reduce(y, group=touched)

    _, call = grouped(face, made.get(groups[rank]), rest=rest, name=f"{face} {name or groups}")
    for _ in range(n_more * (rank == 2)):
        told(lambda: call(torch.zeros(64)))
    kind, text, _ = told(lambda: call(torch.zeros(64)))
    return kind, text


WRONG: list[Any] = [
    ("contextual", (ALL, ALL, (2,))),
    ("function", ((0,), ALL, ALL)),
    ("contextual", (ALL, ALL, (1, 2))),
    ("function", (WORLD, ALL, ALL)),
    further(("contextual", ((0,), ALL, ALL))),
    further(("function", (ALL, ALL, (2,)))),
]


@on_each_rank(3, cases=WRONG)
def test_a_group_that_is_another_one_on_another_rank_is_told_on_all(
    rank: int, case: tuple[Face, Groups]
):
    """With its ranks, also on a rank that waits for that one, and on one whose collective finds no
    peers; not in gloo's words.
    """
    error, message = called(rank, *case)
    assert error == "RankMismatchError", f"{error}: {message}"
    of_each = [str([*(members or ALL)]) for members in case[1]]
    found = re.findall(r"rank (\d) with a group of ranks (\[[0-9, ]*\])", message)
    assert {members for _, members in found} == {*of_each}, message
    assert all(of_each[int(each)] == members for each, members in found)
    assert ("/gloo/" in message, "Give group=" in message) == (False, True)


@on_each_rank(3)
def test_a_wrong_group_is_told_where_the_call_is_made_again(rank: int):
    """At once after each error, as a retry would: the rank that found it says so until it comes
    with another group.
    """
    error, message = called(rank, "contextual", (ALL, ALL, (2,)), name="again", n_more=4)
    assert rank == 2 or error == "RankMismatchError", f"{error}: {message}"


@on_each_rank(3, cases=FACES)
def test_a_group_without_the_calling_rank_is_told_on_all(rank: int, face: Face):
    """Also on the rank that is in it, and waits for the others in a collective."""
    error, message = called(rank, face, ((0,),) * 3)
    assert error == ("ValueError" if rank else "RankMismatchError"), f"{error}: {message}"
    assert re.match(rf"rank {rank or '[12]'} is not in the group that is to decide on ", message)


@on_each_rank(3)
def test_a_rank_that_waits_for_one_with_another_group_says_so(rank: int):
    """Where no collective holds them together: rank 2 tunes alone, and the others wait for it, or
    see it in that call.
    """
    error, message = called(rank, "contextual", (ALL, ALL, (2,)), is_shared=False)
    words = {
        "": "",
        "AbsentRanksError": (
            "rank 2 last seen at: a call with a group of ranks [2]. So ranks [2] did not come "
        ),
        "RankMismatchError": (
            "is called on rank 0 with a group of ranks [0, 1, 2] and on rank 2 with a group of"
            " ranks [2]"
        ),
    }
    assert (rank == 2) == (error == "")
    assert words[error] in message


@on_each_rank(3)
def test_a_rank_may_use_two_groups_in_turn(rank: int):
    """It is waited for while it tunes with the other one, and what was shown of that wait is taken
    back; its errors are its own.
    """
    every, again = dist.new_group(), dist.new_group()
    own = [dist.new_group([each]) for each in range(3)][rank]

    def rest(y: torch.Tensor) -> torch.Tensor:
        if len(y) == 5:
            raise GLOO
        # With its replays longer than a second, after which others show that they wait.
        time.sleep(0.4 if len(y) == 2 else 0.0)
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
