"""What a rank cannot bear, or leaves its peers in: told at once, and with the rank and the config that were the cause."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import contextual_autotune
from dist_tune.distributed import Ranks
from dist_tune.testing import values
from tests.ranks.kernels import autotuned, launch
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once

QUICK: Any = {"n_repeat": 1, "n_warmup": 0}


def _makes_more_calls(rank: int) -> float:
    kernel = autotuned(blocks=(16, 32))
    step = contextual_autotune(is_dist=True, **QUICK)(lambda x: float(launch(kernel, x)[0]))
    began = time.monotonic()
    for k in range(2 if rank == 0 else 4):
        step(torch.zeros(64 + k))
    dist.barrier()
    return time.monotonic() - began


def test_a_rank_that_makes_more_calls_than_its_peer_goes_on_alone():
    """No collective was issued on the group before: the one that the peer waits in says that it has gone on. It hung for ever."""
    assert all(seconds < 10 for seconds in values(on_ranks(2, _makes_more_calls, timeout_s=30)))


def _exits(rank: int, at_run: int, talks: bool) -> None:
    kernel = autotuned(blocks=(16, 32))
    runs = []

    @contextual_autotune(is_dist=True, **QUICK)
    def step(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        y = launch(kernel, x)
        if rank == 1 and len(runs) == at_run:
            os._exit(3)
        if talks:
            dist.all_reduce(y)
        return y

    step(torch.ones(64))


def test_a_process_that_ends_before_the_first_meeting_leaves_the_call_untuned():
    """The step itself says whether it needs that rank; the line says what has become of it."""
    first, _ = on_ranks(2, _exits, 1, False, env={"DIST_TUNE_DEADLINE_S": "20"}, timeout_s=60)
    assert first.error in ("", "AbsentRanksError"), first.message
    assert "its process has ended" in first.log
    assert first.seconds < 10


def _slow_store(rank: int) -> int:
    own = Ranks.beat

    def beat(self: Ranks, *args: Any, **options: Any) -> None:
        time.sleep(0.3)
        own(self, *args, **options)

    Ranks.beat = beat  # type: ignore[method-assign,assignment]
    kernel = autotuned(blocks=(16, 32, 64, 128))
    step = contextual_autotune(is_dist=True, n_repeat=3, n_warmup=0, search="exhaustive", cache=False)(lambda x: launch(kernel, x))
    step(torch.ones(64))
    return step.records[0].n_replays


def test_a_slow_store_costs_no_meeting_for_every_replay():
    """Its answers between replays are no time of theirs."""
    outcomes = on_ranks(2, _slow_store, timeout_s=60)
    for n_replays, outcome in zip(values(outcomes), outcomes, strict=True):
        assert outcome.log.count("meeting='report'") < n_replays / 2, outcome.log


def _at_rest(rank: int) -> list[str]:
    kernel = autotuned(blocks=(16, 32))
    step = contextual_autotune(is_dist=True, **QUICK)(lambda x: launch(kernel, x))
    step(torch.zeros(64))
    step(torch.zeros(64))
    found = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
    dist.barrier()
    return found


def test_a_steady_rank_has_one_thread():
    """That which answers peers; none is left of the tuning."""
    assert values(on_ranks(2, _at_rest)) == [["dist_tune presence"]] * 2
