"""Calls that fail on one rank and are made again: all ranks hear of it or go on together, and later calls are tuned as always."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import PeerFailedError, StuckConfigError, autotune, contextual_autotune
from dist_tune.testing import Outcome, values
from tests.ranks.kernels import autotuned, best, launch, tuned
from tests.ranks.stuck import stuck_kernel
from tests.ranks.test_watchdog import left_with
from tests.ranks.world import DEADLINE_S
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


def _hangs(rank: int, who: int, where: str, n_failures: int) -> Any:
    """Rank 1 fails before it has issued a collective, and calls again; rank 0 waits in its first call meanwhile."""
    kernel = autotuned()
    stuck = stuck_kernel("sleep", 0, 1 if rank == who else 0)
    runs = []

    def step(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        if rank == 1 and len(runs) <= n_failures:
            raise ValueError("once")
        y = launch(kernel, x)
        if where == "before":
            y = launch(stuck, y)
        dist.all_reduce(y)
        if where == "killed" and rank == 1:
            time.sleep(1.0)  # it tells where it is
            os.kill(os.getpid(), signal.SIGKILL)
        return y if where in ("before", "killed") else launch(stuck, y)

    call = tuned(kernel, step)
    for _ in range(n_failures if rank == 1 else 0):
        with pytest.raises(ValueError, match="once"):
            call(torch.ones(64))
    began = time.monotonic()
    try:
        call(torch.ones(64))
    except (PeerFailedError, StuckConfigError) as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def _is_told(outcome: Outcome, who: int) -> None:
    assert not outcome.error, f"{outcome.error}: {outcome.message}\n{outcome.notes}"
    kind, message, seconds = outcome.value
    assert kind == "StuckConfigError", message
    for word in (f"rank {who}", "candidate 0", "BLOCK=16", "discovery"):
        assert word in message, message
    assert seconds < 2 * DEADLINE_S + 3  # on a busy machine


@pytest.mark.parametrize(("where", "n_failures"), [("after", 1), ("before", 1), ("before", 2)])
def test_a_config_that_hangs_in_a_call_made_again_is_named(where: str, n_failures: int):
    """Before the collective that the other rank waits in, and after it: that rank is in its first call, and the one that hangs is not."""
    first, second = on_ranks(2, _hangs, 1, where, n_failures, timeout_s=25)
    left_with(second, 86)
    _is_told(first, 1)


def test_a_rank_that_dies_in_a_call_made_again_is_told_as_dead():
    """And not by the error of its call before, after which it had gone on."""
    first, second = on_ranks(2, _hangs, 1, "killed", 1, timeout_s=25)
    assert second.error == "Died"
    assert first.error == "AbsentRanksError", f"{first.value} {first.error}: {first.message}\n{first.notes}"
    assert "ranks [1]" in first.message


def _extra(rank: int, news: tuple[tuple[int, ...], tuple[int, ...]]) -> Any:
    """Rank 0 makes two calls more, without a collective; ``news``: lengths of each rank from then on."""
    kernel = autotuned(blocks=(16, 32))

    @contextual_autotune(is_dist=True, n_repeat=1, n_warmup=0)
    def step(x: torch.Tensor, is_shared: bool) -> float:
        y = launch(kernel, x).sum()
        if is_shared:
            dist.all_reduce(y)
        return float(y)

    step(torch.zeros(64), True)
    for _ in range(2 if rank == 0 else 0):
        step(torch.zeros(64), False)
    began = time.monotonic()
    got = [step(torch.zeros(n), True) for n in news[rank]]
    seconds = time.monotonic() - began
    dist.barrier()  # a rank that ends without its interpreter's end does not answer the other
    return got, len(kernel.cache), seconds


@pytest.mark.parametrize(
    ("news", "n_known"),
    [
        (((128, 64), (128, 64)), 2),  # new on both: tuned
        (((128, 64, 64), (64, 64, 64)), 1),  # on the rank that is ahead in its count
        (((64, 64, 64), (128, 64, 64)), 1),  # on the other
        (((128, 96, 64, 128), (64, 128, 96, 128)), 2),
    ],
)
def test_counts_that_differ_strand_no_rank(news: Any, n_known: int):
    """No rank waits for a deadline, and what is new on all at once is tuned."""
    both = [float(a + b) for a, b in zip(*news, strict=True)]
    for got, n, seconds in values(on_ranks(2, _extra, news, env={"DIST_TUNE_DEADLINE_S": "10"})):
        assert got == both
        assert n >= n_known
        assert seconds < 8


def _retried(rank: int) -> Any:
    kernel, runs = autotuned(), []

    def step(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        if rank == 1 and len(runs) == 1:
            raise ValueError("once")
        if rank == 0 and len(runs) == 1:
            time.sleep(1.0)  # rank 1 waits in its second call by then
        return launch(kernel, x)

    call = tuned(kernel, step)
    return _until_it_works(lambda: call(torch.ones(64))), len(call.records)


def test_a_rank_that_comes_late_to_a_call_that_failed_hears_of_it():
    """Also when the one that raised has called again, and waits there: the late one does not pass the call untuned."""
    (told, n_records), second = values(on_ranks(2, _retried))
    assert second == (["once"], 1)
    assert n_records == 1
    assert "rank 1 raised ValueError: once" in told[0]
