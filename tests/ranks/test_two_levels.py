"""Eight ranks in three homes: a tuning, an abort, a rank that is killed and one that is late, by way of the homes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import contextual_autotune
from dist_tune.distributed import Reduction, ranks_of
from dist_tune.distributed.protocol import homes
from dist_tune.testing import values
from tests.ranks.kernels import autotuned, best, launch
from tests.ranks.world import caught
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once

N_RANKS = 8
KILLED = 4
"""The second rank of the second home, of ranks 3 to 5."""


@Reduction
def places(parts: Mapping[int, float]) -> dict[int, float]:
    return dict(parts)


def play(rank: int) -> Any:
    """All scenarios one after the other, because processes take longer to start than these to end."""
    vars(homes)["FLAT_RANKS"] = 1
    got: dict[str, Any] = {}
    kernel = autotuned(blocks=(16, 32))

    @contextual_autotune(is_dist=True, n_repeat=1, n_warmup=0)
    def step(x: torch.Tensor) -> torch.Tensor:
        y = launch(kernel, x)
        dist.all_reduce(y)
        return y

    got["tuned"] = step(torch.ones(64))[0].item(), best(kernel), step.records[0].winner
    ranks: Any = ranks_of(None, 3.0)
    got["home"] = ranks._parts.home.ranks

    ranks.enter("late", 1)
    time.sleep(0.5 if rank == 7 else 0.0)
    got["late"] = ranks.reduce("late", rank / 7, places)

    def meet() -> None:
        ranks.enter("abort", 1)  # which raises the error itself if all others have heard of it
        ranks.reduce("a", 0.0, places)

    if rank == 5:
        ranks.enter("abort", 1)
        time.sleep(0.2)
        ranks.abort(ValueError("no"))
    else:
        got["abort"] = caught(meet).message

    ranks.enter("killed", 1)
    if rank == KILLED:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    got["killed"] = caught(lambda: ranks.reduce("b", 0.0, places)).message
    got["seconds"] = time.monotonic() - began
    return got


def test_eight_ranks_in_three_homes():
    """One winner, one bit-equal result, the rank that aborts and the rank that died named on all others."""
    outcomes = on_ranks(N_RANKS, play, env={"LOCAL_WORLD_SIZE": "3"})
    assert outcomes.pop(KILLED).error == "Died"
    got = values(outcomes)
    assert [each["home"] for each in got] == [[0, 1, 2]] * 3 + [[3, 4, 5]] * 2 + [[6, 7]] * 2
    assert [each["tuned"] for each in got] == [got[0]["tuned"]] * 7
    assert [each["late"] for each in got] == [{rank: rank / 7 for rank in range(N_RANKS)}] * 7
    assert all("rank 5 raised ValueError: no" in each["abort"] for each in got if "abort" in each)
    assert sum("abort" in each for each in got) == 6
    assert all(each["killed"].startswith(f"ranks [{KILLED}] did not come") for each in got), got
    assert max(each["seconds"] for each in got) < 3 * 3.0
