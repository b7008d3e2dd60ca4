"""Calls that fail on one rank and are made again: all ranks hear of it or go on together, and later calls are tuned as always."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import PeerFailedError, autotune
from dist_tune.testing import values
from tests.ranks.kernels import autotuned, best, launch, tuned
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once


def _until_it_works(call: Callable[[], object]) -> list[str]:
    told = []
    for _ in range(4):
        try:
            call()
            break
        except (ValueError, MemoryError, PeerFailedError) as error:
            told.append(str(error))
    return told


def _elsewhere(rank: int) -> Any:
    kernel, other = autotuned(), autotuned()
    runs = []

    def first(x: torch.Tensor) -> torch.Tensor:
        if x.numel() == 32:
            time.sleep(1.0)  # the other rank has failed in its next closure, and made that call again, by the end of this one
        return launch(kernel, x)

    def second(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        if rank == 1 and len(runs) == 1:
            raise ValueError("once")
        return launch(other, x)

    one, two = tuned(kernel, first), tuned(other, second)
    one(torch.ones(64))
    one(torch.ones(64 if rank == 1 else 32))
    return _until_it_works(lambda: two(torch.ones(64))), len(two.records)


def test_the_end_of_a_call_that_a_rank_has_yet_to_make_is_not_lost():
    """A rank reads it while it waits in another closure's call, which is new to it alone; it hears of it in the call that has failed."""
    first, second = values(on_ranks(2, _elsewhere))
    assert second == (["once"], 1)
    assert len(first[0]) == 1
    assert "rank 1 raised ValueError: once" in first[0][0]
    assert first[1] == 1


def _matched(rank: int, slow: int) -> Any:
    kernel = autotuned()
    runs = []

    def step(x: torch.Tensor, talks: bool) -> torch.Tensor:
        runs.append(1)
        if rank == 1 and len(runs) == 1:
            raise ValueError("before the collective")
        y = launch(kernel, x)
        if talks:
            dist.all_reduce(y)
        if rank == slow and len(runs) <= 2:
            time.sleep(0.5)
        return y

    call = tuned(kernel, step)
    found = []
    for n, talks in ((64, True), (128, False), (256, True)):
        told = _until_it_works(lambda: call(torch.ones(n), talks))  # noqa: B023  # called within this round
        found.append((told, len(call.records)))
    return found, best(kernel)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_call_made_again_meets_the_one_that_waits_in_its_collective(slow: int):
    """The waiting rank goes on with it, also if it comes to the meeting first; later calls are tuned where collectives show the call."""
    (first, first_best), (second, second_best) = values(on_ranks(2, _matched, slow))
    assert first == [([], 1), ([], 1), ([], 2)]
    assert second == [(["before the collective"], 1), ([], 1), ([], 2)]
    assert first_best == second_best
    assert len(first_best) == 2


def _inner(rank: int) -> Any:
    kernel = autotuned()

    def function(x: torch.Tensor, n: int) -> torch.Tensor:
        y = x * n
        if "WITH_KERNEL" in os.environ:
            y = launch(kernel, x)
            dist.all_reduce(y)
            if rank == 1 and os.environ.pop("SLOW", ""):
                time.sleep(0.5)
        return y

    def decorated() -> Any:
        return autotune([{"n": 1}, {"n": 2}], key_fn=lambda x: x.numel(), n_warmup=0, n_repeat=1)(function)

    dist.barrier()  # a collective before the call, so that collectives are compared
    decorated()(torch.ones(64))
    os.environ.update({"WITH_KERNEL": "1", "SLOW": "1"})
    again = decorated()
    again(torch.ones(64))
    return [each.is_recalled for each in again.records], best(kernel)


def test_a_rank_that_is_slow_after_a_collective_of_a_recalled_function_is_waited_for():
    """It has not gone on: it has issued what the others have, and kernels inside the function are tuned."""
    first, second = values(on_ranks(2, _inner))
    assert first == second
    assert first[0] == [False, True]
    assert len(first[1]) == 1
