"""Interrupts at moments that belong to two steps: peers hear of them, and Triton is left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import autotune, contextual_autotune
from dist_tune.distributed.meetings import Meetings
from tests.ranks.kernels import autotuned, launch
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once


def _interrupted(rank: int, n_verdicts: int) -> Any:
    read, count = Meetings._read_verdict, [0]

    def interrupt(self: Meetings) -> Any:
        count[0] += 1
        if rank == 1 and count[0] == n_verdicts:
            raise KeyboardInterrupt
        return read(self)

    Meetings._read_verdict = interrupt  # type: ignore[method-assign]
    kernel = autotuned()
    contextual_autotune(is_dist=True, n_repeat=1, n_warmup=0)(lambda x: launch(kernel, x))(torch.ones(64))


@pytest.mark.parametrize("n_verdicts", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_an_interrupt_between_a_verdict_and_its_reading_is_told_to_peers(n_verdicts: int):
    """The rank raises KeyboardInterrupt, and the other names it at its next meeting."""
    peer, interrupted = on_ranks(2, _interrupted, n_verdicts)
    assert interrupted.error == "KeyboardInterrupt", f"{interrupted.error}: {interrupted.message}\n{interrupted.notes}"
    assert peer.error == "PeerFailedError", f"{peer.error}: {peer.message}"
    assert "rank 1 raised KeyboardInterrupt" in peer.message
    assert peer.seconds < 3


def _interrupted_after_a_failure(rank: int) -> Any:
    runs: list[int] = []

    @autotune([{"block": 16}, {"block": 32}], None, n_warmup=1, n_repeat=2)
    def step(x: torch.Tensor, block: int) -> torch.Tensor:
        y = x + 1
        dist.all_reduce(y)
        runs.append(block)
        if len(runs) == 1:
            raise ValueError("after the collective of the first run")
        raise KeyboardInterrupt

    step(torch.zeros(4))


def test_an_interrupt_after_a_first_run_that_failed_is_raised_as_it_is():
    """Not the error of that run in its place."""
    (only,) = on_ranks(1, _interrupted_after_a_failure, is_dist=True)
    assert only.error == "KeyboardInterrupt", f"{only.error}: {only.message}\n{only.notes}"
