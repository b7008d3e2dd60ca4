"""Groups of real processes, made anew and destroyed."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dist_tune import autotune
from dist_tune.distributed.group import Ranks, group_of
from dist_tune.distributed.messages import Reduction
from tests.steps import BLOCKS, QUICK, autotuned, launch, named, shape_of, tuned
from tests.worlds import DEADLINE_S, further, on_each_rank, on_ranks


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


Groups = tuple[tuple[int, ...], ...]
"""The group of each rank; empty: the world."""


def _called(rank: int, face: str, groups: Groups, has_collective: bool = True) -> None:
    timeout = timedelta(seconds=(3 if has_collective else 1.3) * DEADLINE_S)
    made = {members: dist.new_group([*members], timeout=timeout) for members in sorted({*groups}) if members}
    kernel, group = autotuned(blocks=(16, 32)), made.get(groups[rank])

    def work(x: torch.Tensor, block: int = 0) -> torch.Tensor:
        y = launch(kernel, x) if face == "contextual" else x + 1
        if has_collective:
            dist.all_reduce(y)
        return y

    if face == "contextual":
        tuned(kernel, work, group=group)(torch.zeros(64))
    else:
        autotune([{"block": 1}, {"block": 2}], None, n_warmup=0, n_repeat=1)(work)(torch.zeros(64), autotune_pg=group)


ALL, LAST, FIRST, WORLD = (0, 1), (1,), (0,), ()
WRONG = [
    ("contextual", (ALL, LAST)),
    ("function", (FIRST, ALL)),
    ("contextual", ((0, 1, 2), (0, 1, 2), (1, 2))),
    ("function", (WORLD, ALL)),
    further("contextual", (FIRST, ALL)),
    further("function", (ALL, LAST)),
]


@pytest.mark.parametrize(("face", "groups"), WRONG)
def test_a_group_that_is_another_one_on_another_rank_is_told_on_all(face: str, groups: Groups):
    """With its ranks, also on a rank that waits for that one, and on one whose collective finds no peers; not in gloo's words."""
    for rank, outcome in enumerate(on_ranks(len(groups), _called, face, groups)):
        assert outcome.error == "RankMismatchError", f"rank {rank}: {outcome.error}: {outcome.message}\n{outcome.notes}"
        told = re.findall(r"rank (\d) with a group of ranks (\[[0-9, ]*\])", outcome.message)
        of_each = [str([*(members or range(len(groups)))]) for members in groups]
        assert {members for _, members in told} == {*of_each}, outcome.message
        assert all(of_each[int(each)] == members for each, members in told)
        assert ("/gloo/" in outcome.message, "Give group=" in outcome.message) == (False, True)
        assert outcome.seconds < 2.5 * DEADLINE_S  # on a busy machine


def _called_again(rank: int) -> None:
    """At once after each error, as often as a retry of the user's would."""
    group, kernel = [dist.new_group([0, 1]), dist.new_group([1])][rank], autotuned(blocks=(16, 32))

    def work(x: torch.Tensor) -> None:
        dist.all_reduce(launch(kernel, x))

    step = tuned(kernel, work, group=group)
    for _ in range(4 * rank):
        with suppress(Exception):
            step(torch.zeros(64))
    step(torch.zeros(64))


def test_a_wrong_group_is_told_where_the_call_is_made_again():
    """The rank that found it says so until it comes with another group: the one that waits for it looks now and then only."""
    first, _ = on_ranks(2, _called_again)
    assert first.error == "RankMismatchError", f"{first.error}: {first.message}\n{first.notes}"
    assert first.seconds < 2.5 * DEADLINE_S


@pytest.mark.parametrize("face", ["contextual", "function"])
def test_a_group_without_the_calling_rank_is_told_on_all(face: str):
    """At once, also on the rank that is in it, and waits for the other one in a collective."""
    first, second = on_ranks(2, _called, face, (FIRST, FIRST))
    told = "rank 1 is not in the group that is to decide on "
    assert (second.error, second.message.startswith(told)) == ("ValueError", True), second.message
    assert (first.error, first.message) == ("RankMismatchError", second.message), f"{first.message}\n{first.notes}"
    assert first.seconds < DEADLINE_S


def test_a_rank_that_waits_for_one_with_another_group_says_so():
    """Where no collective holds them together: rank 1 tunes alone, and rank 0 waits for the timeout of its group."""
    first, second = on_ranks(2, _called, "contextual", (ALL, LAST), False)
    assert (first.error, second.error) == ("AbsentRanksError", ""), f"{first.message}\n{second.message}"
    assert first.message.startswith("rank 1 last seen at: a call with a group of ranks [1]. So ranks [1] did not come ")
    assert "rank 1: a call with a group of ranks [1]" in first.log


@on_each_rank()
def test_a_step_may_be_called_with_two_groups(rank: int):
    """Rank 1 takes that of rank 0 for another one only until it has called with that one itself."""
    every, own = dist.new_group([0, 1]), [dist.new_group([0]), dist.new_group([1])][rank]
    for wrong in ("both is called on rank 0 with a group of ranks [0, 1] and on rank 1 with a group of ranks [1]. Give group=", ""):
        if rank == 0 or not wrong:
            with group_of(every, DEADLINE_S).calling("both"):
                pass
        dist.barrier()
        if rank == 1:
            ranks = group_of(own, DEADLINE_S)
            with ranks.calling("both") as place:
                ranks.enter(place)
                found = ranks._wrong_group()
            assert (found is not None, found is None or found.text.startswith(wrong)) == (bool(wrong), True), found
        dist.barrier()


@on_each_rank()
def test_a_rank_that_uses_two_groups_in_turn_is_waited_for(rank: int):
    """While it is in a call with the other group; what was shown of the wait is taken back."""
    every, own = dist.new_group([0, 1]), [dist.new_group([0]), dist.new_group([1])][rank]

    def work(x: torch.Tensor, block: int) -> torch.Tensor:
        return x + 1

    step = autotune(BLOCKS, shape_of, reset=lambda: time.sleep(0.3 if rank == 1 else 0.0), **QUICK)(named("in turn", work))
    if rank == 1:
        step(torch.zeros(2), autotune_pg=own)
    step(torch.zeros(3), autotune_pg=every)
    assert [each.environment.world_size for each in step.records] == [1, 2][1 - rank :]
    if rank == 1:
        ranks = group_of(own, DEADLINE_S)
        with ranks.calling(ranks.activity.call.place.closure) as place:
            ranks.enter(place)
            ((group, why),) = ranks._elsewhere([0]).values()
        assert (group.members, group.waits, why) == ((0, 1), (), "")
