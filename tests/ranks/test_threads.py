"""Threads that come to one new closure together, or to several."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from dist_tune import autotune
from tests.steps import BLOCKS, QUICK, autotuned, is_unpatched, launch, tuned
from tests.worlds import on_each_rank


def in_threads(n: int, work: Callable[[int], Any]) -> list[Any]:
    """Values, or errors, of a function called in threads that begin together."""
    ready, got = threading.Barrier(n), [None] * n

    def one(i: int) -> None:
        ready.wait()
        try:
            got[i] = work(i)
        except Exception as error:  # noqa: BLE001  # the test shall see it
            got[i] = repr(error)  # type: ignore[call-overload]

    threads = [threading.Thread(target=one, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


def lasting(seconds: float, ran: list[int] | None = None) -> Any:
    """A function of two configs that returns its argument after that time; threads that ran it."""

    @autotune(BLOCKS[:2], lambda x: None, **QUICK)
    def function(x: int, block: int) -> int:
        if ran is not None:
            ran.append(threading.get_ident())
        time.sleep(seconds)
        return x

    return function


@on_each_rank()
def test_threads_that_miss_together_tune_once(rank: int):
    """On each rank one of them tunes, and the others wait for its config."""
    ran: list[int] = []
    step = lasting(2e-3, ran)
    assert in_threads(3, step) == [0, 1, 2]
    assert (len(step.records), len(set(ran)), is_unpatched()) == (1, 3, True)


@on_each_rank(1, is_dist=False)
def test_threads_tune_a_new_closure_once(rank: int):
    """Each gets its own value; one thread replays, for longer than the deadline, and the others call once."""
    os.environ["DIST_TUNE_DEADLINE_S"] = "1"
    function, ran = lasting(0.2), list[int]()

    def closure(x: torch.Tensor, number: int) -> int:
        ran.append(threading.get_ident())
        return int(function(number))

    step = tuned(None, closure, is_dist=False, cache=False)
    assert in_threads(6, lambda i: step(torch.zeros(64), i)) == [*range(6)]
    assert (len(step.records), sum(ran.count(each) > 1 for each in set(ran))) == (1, 1)


@on_each_rank(1, is_dist=False)
def test_tunings_wait_for_one_another(rank: int):
    """As long as they make progress, however many there are before."""
    os.environ["DIST_TUNE_DEADLINE_S"] = "1"
    functions = [lasting(0.12) for _ in range(4)]
    assert in_threads(4, lambda i: functions[i](i)) == [*range(4)]
    assert [len(each.records) for each in functions] == [1] * 4


@on_each_rank(1, is_dist=False)
def test_a_thread_that_the_first_run_waits_for_goes_on(rank: int):
    """After the deadline without progress it takes no turn."""
    os.environ["DIST_TUNE_DEADLINE_S"] = "0.5"
    kernel, inner = autotuned(blocks=(16, 32)), list[Any]()

    def closure(x: torch.Tensor) -> float:
        if threading.current_thread() is threading.main_thread() and not inner:
            inner.extend(in_threads(1, lambda _: step(x)))
        return launch(kernel, x)[0].item()

    step = tuned(kernel, closure, is_dist=False, cache=False)
    assert (step(torch.zeros(64)), inner) == (1.0, [1.0])


@on_each_rank(1, is_dist=False)
def test_a_miss_is_its_own_thread_s(rank: int):
    """Another thread is inside the same closure meanwhile, in a call without a miss: its value is the call's, and it tunes nothing."""
    kernel, is_inside, may_end = autotuned(blocks=(16, 32)), threading.Event(), threading.Event()

    def closure(x: torch.Tensor) -> float:
        if threading.current_thread() is threading.main_thread():
            return launch(kernel, x)[0].item()
        is_inside.set()
        assert may_end.wait(20)
        return 7.0

    step = tuned(kernel, closure, is_dist=False, cache=False)
    step(torch.zeros(64))
    kernel.cache.clear()
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.extend(in_threads(1, lambda _: step(torch.zeros(64)))))
    other.start()
    assert is_inside.wait(20)
    assert step(torch.zeros(64)) == 1.0
    may_end.set()
    other.join(20)
    assert (found, len(step.records), is_unpatched()) == ([7.0], 2, True)
