"""Calls that are made again after an error, and then hang on one rank: peers hear of it at once, though they number that call otherwise."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import PeerFailedError, StuckConfigError
from dist_tune.testing import Outcome
from tests.ranks.kernels import autotuned, launch, tuned
from tests.ranks.stuck import stuck_kernel
from tests.ranks.test_watchdog import left_with
from tests.ranks.world import DEADLINE_S
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once


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
