"""A rank whose replays take longer than two deadlines, as its first run did, is waited for."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from dist_tune import contextual_autotune
from dist_tune.testing import values
from tests.ranks.kernels import autotuned, best, launch, tuned
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once


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
