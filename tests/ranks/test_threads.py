"""Threads that come to one new closure together."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch

from dist_tune import autotune
from dist_tune.testing import values
from tests.ranks.kernels import autotuned, launch, tuned
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once


def _in_threads(n: int, work: Any) -> list[Any]:
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


def _six(rank: int) -> Any:
    """A step of a quarter of a second, which is tuned for longer than the deadline of a second."""
    function = _made()
    n_runs: list[int] = []

    def closure(x: torch.Tensor, number: int) -> int:
        n_runs.append(threading.get_ident())
        return int(function(number))

    step = tuned(None, closure, is_dist=False, cache=False)
    got = _in_threads(6, lambda i: step(torch.zeros(64), i))
    return got, len(step.records), sum(n_runs.count(each) > 1 for each in set(n_runs))


def test_six_threads_tune_a_new_closure_once():
    """Each gets its own value; one thread replays, for longer than the deadline, and the others call once."""
    ((got, n_records, n_replaying),) = values(on_ranks(1, _six, is_dist=False, env={"DIST_TUNE_DEADLINE_S": "1"}))
    assert got == [*range(6)]
    assert (n_records, n_replaying) == (1, 1)


def _made() -> Any:
    @autotune([{"block": 1}, {"block": 2}], None, n_warmup=0, n_repeat=1, cache=False)
    def f(x: int, block: int = 0) -> int:
        time.sleep(0.25)
        return x

    return f


def _six_tunings(rank: int) -> Any:
    functions = [_made() for _ in range(6)]
    return _in_threads(6, lambda i: functions[i](i)), [len(each.records) for each in functions]


def test_six_tunings_wait_for_one_another():
    """As long as they make progress, however many there are before."""
    ((got, n_records),) = values(on_ranks(1, _six_tunings, is_dist=False, env={"DIST_TUNE_DEADLINE_S": "1"}))
    assert (got, n_records) == ([*range(6)], [1] * 6)


def _waited_for(rank: int) -> Any:
    """The first run waits for another thread that calls the same closure."""
    kernel = autotuned(blocks=(16, 32))
    is_inner = threading.local()

    def closure(x: torch.Tensor) -> float:
        if not hasattr(is_inner, "yes") and not started:
            started.append(1)

            def inner() -> None:
                is_inner.yes = True
                inner_values.append(step(x))

            thread = threading.Thread(target=inner)
            thread.start()
            thread.join()
        return launch(kernel, x)[0].item()

    started: list[int] = []
    inner_values: list[float] = []
    step = tuned(kernel, closure, is_dist=False, cache=False)
    return step(torch.zeros(64)), inner_values, os.environ["DIST_TUNE_DEADLINE_S"]


def test_a_thread_that_the_first_run_waits_for_goes_on():
    """After the deadline without progress it takes no turn."""
    assert values(on_ranks(1, _waited_for, is_dist=False, env={"DIST_TUNE_DEADLINE_S": "0.5"})) == [(1.0, [1.0], "0.5")]
