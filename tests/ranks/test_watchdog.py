"""Configs that never return: the tuning says which, and ends with an error on every rank."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import contextual_autotune
from dist_tune.testing import values
from tests.ranks.kernels import autotuned, launch, tuned
from tests.ranks.stuck import left_with, stuck_kernel, stuck_step, threads_left
from tests.ranks.world import DEADLINE_S
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once


def test_a_lone_process_leaves_a_config_that_never_returns():
    """Without peers the same."""
    (outcome,) = on_ranks(1, stuck_step, "sleep", [0], 1, False, {}, timeout_s=25, is_dist=False)
    left_with(outcome, 86)
    assert "candidate 2" in outcome.log


def test_a_config_that_hangs_in_the_first_run_is_named():
    """In discovery: peers wait for a rank in its first run, however long that takes, but not for a config."""
    outcomes: list[Any] = on_ranks(2, first_run_hangs, 1, timeout_s=25)
    left_with(outcomes[1], 86)
    assert outcomes[0].error == "StuckConfigError", f"{outcomes[0].error}: {outcomes[0].message}"
    assert "discovery" in outcomes[0].message
    assert outcomes[0].seconds < 2 * DEADLINE_S + 3  # on a busy machine


def test_a_process_that_leaves_its_first_run_leaves_no_temporary_files(tmp_path: Path):
    """Where no peer is left that would delete them."""
    (outcome,) = on_ranks(1, first_run_hangs, 0, timeout_s=25, is_dist=False, env={"TMPDIR": str(tmp_path)})
    left_with(outcome, 86)
    assert list(tmp_path.glob("dist_tune-*")) == []


def first_run_hangs(rank: int, who: int) -> Any:
    import torch

    kernel = stuck_kernel("sleep", 0, 1 if rank == who else 0)
    return tuned(kernel, lambda x: launch(kernel, x), is_dist=dist.is_initialized())(torch.zeros(64)).sum().item()


def test_nothing_watches_a_steady_call():
    """While a tuning is under way there is one thread more, and after it none, and no timer of faulthandler that could end the process."""
    (got,) = values(on_ranks(1, steady, env={"DIST_TUNE_DEADLINE_S": "0.5"}, is_dist=False))
    during, after, is_late = got
    assert during == {"dist_tune watchdog"}
    assert after == set()
    assert is_late


def steady(rank: int) -> Any:
    kernel = autotuned()
    during: set[str] = set()

    def step(x: torch.Tensor) -> torch.Tensor:
        y = launch(kernel, x)
        during.update(threads_left())
        return y

    own = contextual_autotune(n_repeat=1, n_warmup=0)(step)
    own(torch.zeros(64))
    seen, after = set(during), set(threads_left())
    during.clear()
    own(torch.zeros(64))
    end = time.monotonic() + 1.5
    ctypes.PyDLL(None).usleep(1_200_000)  # with the interpreter lock
    return seen, after | during, time.monotonic() > end - 1.0


def test_a_process_that_was_stopped_is_not_late():
    """SIGSTOP for a deadline and a half, while the config before would have been given up: the tuning goes on."""
    got = values(on_ranks(1, is_stopped, is_dist=False, timeout_s=40))
    assert got == [2.0]


def is_stopped(rank: int) -> Any:
    kernel, runs = autotuned(), [0]

    @contextual_autotune(n_repeat=1, n_warmup=0)
    def step(x: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        if runs[0] == 3:
            subprocess.Popen(["sh", "-c", f"kill -STOP {os.getpid()}; sleep {1.5 * DEADLINE_S}; kill -CONT {os.getpid()}"])
            time.sleep(0.5 * DEADLINE_S)
        return launch(kernel, x) + 1

    return step(torch.zeros(64))[0].item()


def test_a_rank_that_waits_for_one_that_hangs_names_it():
    """Rank 0 waits for rank 1 where no timeout frees it, so it leaves, too: later, and with rank 1's message."""
    first, second = on_ranks(2, waits_for_ever, timeout_s=25)
    left_with(first, 86)
    left_with(second, 86)
    assert "The tuning had been ended before: rank 1: candidate 2" in first.log
    assert "ended before" not in second.log


def waits_for_ever(rank: int) -> Any:
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

    return tuned(kernel, step, search="exhaustive")(torch.zeros(64)).sum().item()


def test_without_threads_a_tuning_goes_on_unwatched():
    """A process that can start no more threads is warned once, and no config is blamed."""
    assert values(on_ranks(1, has_no_threads, is_dist=False)) == [([None] * 3, ["dist_tune does not watch for configs that never return"])]


def has_no_threads(rank: int) -> Any:
    own = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if "watchdog" in thread.name:
            raise RuntimeError("can't start new thread")
        own(thread)

    pytest.MonkeyPatch().setattr(threading.Thread, "start", start)
    kernel = autotuned()
    step = contextual_autotune(n_repeat=1, n_warmup=0)(lambda: launch(kernel, torch.zeros(64)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step()
    return [each.failure for each in step.records[0].candidates], [str(each.message).partition(":")[0] for each in told]
