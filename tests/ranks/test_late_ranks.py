"""Ranks that are late, stopped or slow: waiting costs time and no job, and the log names the late one."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest
import torch

from dist_tune import AbsentRanksError, PeerFailedError, contextual_autotune
from dist_tune.testing import Outcome, values
from tests.ranks.kernels import autotuned, best, launch, tuned
from tests.ranks.phases import DEADLINE_S, PHASES, once_in, stop_for, two_kernels
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once

ENV = {"DIST_TUNE_DEADLINE_S": f"{DEADLINE_S:g}"}


def names_of_late(outcomes: list[Outcome]) -> set[tuple[int, int]]:
    """(Rank whose log says so, rank that it says is late)."""
    return {(rank, int(late)) for rank, each in enumerate(outcomes) for late in re.findall(r"WARNING rank (\d) is late", each.log)}


def _stopped(rank: int, phase: str, who: int) -> Any:
    step, winners = two_kernels(once_in(phase, (lambda: stop_for(3.0)) if rank == who else lambda: None))
    y = step(torch.ones(64))
    return winners(), y[0].item(), [each.name for each in threading.enumerate() if "heartbeat" in each.name]


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("phase", [each if each in ("discover", "race") else pytest.param(each, marks=pytest.mark.slow) for each in PHASES])
def test_a_rank_that_is_stopped_for_less_than_the_deadline_costs_waiting(phase: str, who: int):
    """SIGSTOP for 3 s: the same winners on both, the right value, and the log of the other rank names the one that was stopped."""
    outcomes = on_ranks(2, _stopped, phase, who, env=ENV)
    first, second = values(outcomes)
    assert first == second
    assert first[1:] == (6.0, [])
    assert names_of_late(outcomes) == {(1 - who, who)}, outcomes[1 - who].log
    assert f"rank {who} did not run for" in outcomes[who].log


def _stopped_for_long(rank: int) -> Any:
    step, _ = two_kernels(once_in("race", (lambda: stop_for(8.0)) if rank == 1 else lambda: None))
    began = time.monotonic()
    try:
        step(torch.ones(64))
    except AbsentRanksError as error:
        return error.ranks, time.monotonic() - began, str(error)


def test_a_rank_that_stays_stopped_after_a_collective_has_failed_is_not_waited_for():
    """Twice the deadline at most (2 s here), although its process can be seen to be stopped: no wait saves the tuning any more.

    The one that was stopped is past 1.75 deadlines when it goes on: its timer ends it, or it is told the same.
    """
    first, late = on_ranks(2, _stopped_for_long, env={"DIST_TUNE_DEADLINE_S": "2"})
    assert late.error == "Died" or values([late])[0][0] == (1,), late
    ((ranks, seconds, told),) = values([first])
    assert ranks == (1,)
    assert seconds < 6.0, told
    assert "rank 1 last seen at" in told
    assert "its process is stopped" in told


def _alone(rank: int, wait: str, seconds: float) -> Any:
    kernel = autotuned()
    runs = []

    @contextual_autotune(is_dist=True, n_repeat=1, n_warmup=0)
    def step(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        if rank == 1 and len(runs) == 1:
            time.sleep(0.8)  # time to answer its peer that it is in this call
            stop_for(seconds) if wait == "stop" else time.sleep(seconds)
        return launch(kernel, x)

    step(torch.ones(64))
    return best(kernel), step.records[0].winner


WAITS = [("stop", 3.0), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("sleep", 4.0), ("stop", 8.0)))]


@pytest.mark.parametrize(("wait", "seconds"), WAITS)
def test_a_rank_that_is_late_in_its_first_run_is_waited_for(wait: str, seconds: float):
    """Without a collective; also one that is stopped for longer than the deadline, and less than the group's timeout."""
    outcomes = on_ranks(2, _alone, wait, seconds, env=ENV)
    first, second = values(outcomes)
    assert first == second
    assert names_of_late(outcomes) == {(0, 1)}
    assert "its first run of tests.ranks.test_late_ranks._alone.<locals>.step, call 1" in outcomes[0].log


def _retried(rank: int) -> Any:
    kernel = autotuned()
    runs = []

    @contextual_autotune(is_dist=True, n_repeat=1, n_warmup=0)
    def step(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        if rank == 1 and len(runs) == 1:
            raise ValueError("once")
        if rank == 0 and len(runs) == 1:
            time.sleep(1.0)  # rank 1 waits in its second call by then
        return launch(kernel, x)

    told = []
    for _ in range(2):
        try:
            step(torch.ones(64))
        except (ValueError, PeerFailedError) as error:
            told.append(str(error))
    return told, len(step.records)


def test_a_rank_that_comes_late_to_a_call_that_failed_hears_of_it():
    """Also when the one that raised has called again, and waits there: the late one does not pass the call untuned."""
    first, second = values(on_ranks(2, _retried))
    assert second == (["once"], 1)
    (told,), n_records = first
    assert n_records == 1
    assert "rank 1" in told
    assert "ValueError: once" in told


def _slow(rank: int) -> Any:
    kernel = autotuned(blocks=(16, 32))

    def closure(x: torch.Tensor) -> torch.Tensor:
        time.sleep(3.0 * rank)
        return launch(kernel, x)

    tuned(kernel, closure)(torch.zeros(64))
    return best(kernel)


def test_a_rank_with_slow_replays_is_waited_for():
    """Its own watchdog allows what its first run took; its peers do, too."""
    one, other = values(on_ranks(2, _slow, env={"DIST_TUNE_DEADLINE_S": "1"}))
    assert one == other


def _slow_reset(rank: int) -> Any:
    kernel = autotuned(blocks=(16, 32))

    def reset() -> None:
        time.sleep(3.0 * rank)

    step = contextual_autotune(is_dist=True, n_repeat=1, n_warmup=0, reset=reset)(lambda x: launch(kernel, x))
    step(torch.zeros(64))
    return best(kernel)


def test_a_rank_with_a_slow_reset_is_waited_for():
    """The user's function has ten deadlines on its own rank, and its peers wait as long."""
    one, other = values(on_ranks(2, _slow_reset, env={"DIST_TUNE_DEADLINE_S": "1"}))
    assert one == other
