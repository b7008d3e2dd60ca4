"""``release=``: a config that never returns goes on, and is dropped on all ranks."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch

from dist_tune import autotune, contextual_autotune
from dist_tune.testing import values
from tests.ranks.stuck import free, stuck_step
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once


def test_a_released_config_is_dropped_on_all_ranks():
    """Config 2 waits for an event on rank 1: the watchdog calls release=, and the tuning goes on without that config."""
    outcomes = on_ranks(2, released, timeout_s=40)
    got = values(outcomes)
    assert got[0] == got[1]
    winner, y, failures, left = got[0]
    assert winner != [64]
    assert y == 2.0
    assert left == []
    assert [each is None for each in failures] == [True, True, False, True]
    # Rank 0 waited in the all-reduce of that replay, and may have released it a little earlier.
    assert re.match(r"rank [01]: (it did not return|a replay with it did not end) until release= was called, after 1", failures[2])
    assert "it did not return until release= was called" in outcomes[1].log
    assert "in hang" in outcomes[1].log


def released(rank: int) -> Any:
    return stuck_step(rank, "event", [1], 1, True, {"release": [free.set]})


def test_a_spinning_flag_is_released_by_a_tensor():
    """A tensor in release= is filled with ones from another thread; the function that waits for it goes on, and is dropped."""
    (got,) = values(on_ranks(1, waits_for_flag, timeout_s=40, is_dist=False))
    assert got == ([1.0, 1.0], "1", True)


def waits_for_flag(rank: int) -> Any:
    flag = torch.zeros(2)

    @autotune([{"block": block} for block in (1, 2, 4)], key_fn=lambda x: x.numel(), n_warmup=0, n_repeat=1, release=[flag])
    def function(x: torch.Tensor, block: int) -> torch.Tensor:
        while block == 2 and flag[0].item() == 0:
            time.sleep(0.01)
        time.sleep(0.001 * block)
        return x + 1

    function(torch.zeros(4))
    record = function.records[0]
    return flag.tolist(), record.best.config[-1], "release=" in str(record.candidates[1].failure)


@pytest.mark.parametrize("given", [1, "flag", [1], None])
def test_release_takes_tensors_and_functions_only(given: Any):
    """All else is refused where the function is decorated."""
    with pytest.raises(TypeError, match="release must"):
        contextual_autotune(release=given)(print)
