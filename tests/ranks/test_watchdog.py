"""Configs that never return: the tuning says which, frees it with ``release=``, or ends with an error on every rank."""

from __future__ import annotations

import ctypes
import re
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import autotune, contextual_autotune
from dist_tune.testing import values
from tests.faults.jobs import stop_for
from tests.ranks.stuck import free, left_with, stuck_kernel, threads_left
from tests.steps import autotuned, best, launch, tuned
from tests.worlds import DEADLINE_S, on_each_rank, on_ranks


def test_a_lone_process_leaves_a_config_that_never_returns(tmp_path: Path):
    """As with peers, and without the temporary files that a peer would delete."""
    (outcome,) = on_ranks(1, _hangs_in_first_run, 0, timeout_s=25, is_dist=False, env={"TMPDIR": str(tmp_path)})
    left_with(outcome, 86)
    assert "candidate 0" in outcome.log
    assert list(tmp_path.glob("dist_tune-*")) == []


def _hangs_in_first_run(rank: int, who: int) -> None:
    kernel = stuck_kernel("sleep", 0, 1 if rank == who else 0)
    tuned(kernel, is_dist=dist.is_initialized())(torch.zeros(64))


def test_a_config_that_hangs_in_the_first_run_is_named():
    """In discovery: peers wait for a rank in its first run, however long that takes, but not for a config."""
    first, second = on_ranks(2, _hangs_in_first_run, 1, timeout_s=25)
    left_with(second, 86)
    assert first.error == "StuckConfigError", f"{first.error}: {first.message}"
    assert "discovery" in first.message
    assert first.seconds < 2 * DEADLINE_S + 3  # on a busy machine


def _waits_for_ever(rank: int) -> None:
    kernel, launched = stuck_kernel("sleep", 2, 1 if rank == 1 else 0), [0]

    def step(x: torch.Tensor) -> torch.Tensor:
        y = launch(kernel, x)
        launched[0] += 1
        store = dist.distributed_c10d._get_default_store()
        while store.add(f"launched {launched[0]} {1 - rank}", 0) == 0:  # a peer's signal
            store.add(f"launched {launched[0]} {rank}", 1)
            time.sleep(0.01)
        store.add(f"launched {launched[0]} {rank}", 1)
        return y

    tuned(kernel, step, search="exhaustive")(torch.zeros(64))


def test_a_rank_that_waits_for_one_that_hangs_names_it():
    """Rank 0 waits for rank 1 where no timeout frees it, so it leaves, too: later, and with rank 1's message."""
    first, second = on_ranks(2, _waits_for_ever, timeout_s=25)
    left_with(first, 86)
    left_with(second, 86)
    assert "The tuning had been ended before: rank 1: candidate 2" in first.log
    assert "ended before" not in second.log


def _is_stopped(rank: int) -> float:
    kernel, runs = autotuned(), [0]

    def step(x: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        if runs[0] == 3:
            stop_for(1.5 * DEADLINE_S)
        return launch(kernel, x)

    return float(tuned(kernel, step, is_dist=False)(torch.zeros(64))[0])


def test_a_process_that_was_stopped_is_not_late():
    """SIGSTOP for a deadline and a half, while the config before would have been given up: the tuning goes on."""
    assert values(on_ranks(1, _is_stopped, is_dist=False, timeout_s=40)) == [1.0]


def _steady(rank: int) -> Any:
    kernel, during = autotuned(), set[str]()

    def step(x: torch.Tensor) -> torch.Tensor:
        during.update(threads_left())
        return launch(kernel, x)

    call = tuned(kernel, step, is_dist=False)
    call(torch.zeros(64))
    seen, after = set(during), set(threads_left())
    during.clear()
    call(torch.zeros(64))
    ctypes.PyDLL(None).usleep(1_200_000)  # with the interpreter lock
    return seen, after | during


def test_nothing_watches_a_steady_call():
    """While a tuning is under way there is one thread more, and after it none, and no timer of faulthandler that could end the process."""
    assert values(on_ranks(1, _steady, env={"DIST_TUNE_DEADLINE_S": "0.5"}, is_dist=False)) == [({"dist_tune watchdog"}, set())]


@on_each_rank(1, is_dist=False)
def test_without_threads_a_tuning_goes_on_unwatched(rank: int):
    """A process that can start no more threads is warned once, and no config is blamed."""
    own = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if "watchdog" in thread.name:
            raise RuntimeError("can't start new thread")
        own(thread)

    step = tuned(autotuned(), is_dist=False)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as told:
        patch.setattr(threading.Thread, "start", start)
        warnings.simplefilter("always")
        step(torch.zeros(64))
    assert [each.failure for each in step.records[0].candidates] == [None] * 3
    assert [str(each.message).partition(":")[0] for each in told] == ["dist_tune does not watch for configs that never return"]


def _released(rank: int) -> Any:
    kernel = stuck_kernel("event", 2, 1 if rank == 1 else 0)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = launch(kernel, x)
        dist.all_reduce(y)
        return y

    call = tuned(kernel, step, n_repeat=2, search="exhaustive", release=[free.set])
    y = call(torch.zeros(64))
    return best(kernel), y[0].item(), [each.failure for each in call.records[0].candidates], threads_left()


def test_a_released_config_is_dropped_on_all_ranks():
    """Config 2 waits for an event on rank 1: the watchdog calls release=, and the tuning goes on without that config."""
    outcomes = on_ranks(2, _released, timeout_s=40)
    got = values(outcomes)
    assert got[0] == got[1]
    winner, y, failures, left = got[0]
    assert (winner != [64], y, left) == (True, 2.0, [])
    assert [each is None for each in failures] == [True, True, False, True]
    # Rank 0 waited in the all-reduce of that replay, and may have released it a little earlier.
    assert re.match(r"rank [01]: (it did not return|a replay with it did not end) until release= was called, after 1", failures[2])
    assert "it did not return until release= was called" in outcomes[1].log
    assert "in hang" in outcomes[1].log


def _waits_for_flag(rank: int) -> Any:
    flag = torch.zeros(2)

    @autotune([{"block": block} for block in (1, 2, 4)], key_fn=lambda x: x.numel(), n_warmup=0, n_repeat=1, release=[flag])
    def function(x: torch.Tensor, block: int) -> torch.Tensor:
        while block == 2 and flag[0].item() == 0:
            time.sleep(0.01)
        return x + 1

    function(torch.zeros(4))
    record = function.records[0]
    return flag.tolist(), record.winner != 1, "release=" in str(record.candidates[1].failure)


def test_a_spinning_flag_is_released_by_a_tensor():
    """A tensor in release= is filled with ones from another thread; the function that waits for it goes on, and is dropped."""
    assert values(on_ranks(1, _waits_for_flag, timeout_s=40, is_dist=False)) == [([1.0, 1.0], True, True)]


@pytest.mark.parametrize("given", [1, "flag", [1], None])
def test_release_takes_tensors_and_functions_only(given: Any):
    """All else is refused where the function is decorated."""
    with pytest.raises(TypeError, match="release must"):
        contextual_autotune(release=given)(print)
