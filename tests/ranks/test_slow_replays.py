"""A rank whose replays take longer than two deadlines, as its first run did, is waited for."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

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
