"""What is around the launches of a timed replay, under the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dist_tune import contextual_autotune
from dist_tune.measure.clocks import WallSpan
from dist_tune.replays.replays import Replayer
from dist_tune.testing import on_ranks, values
from tests.ranks.kernels import autotuned, launch

pytestmark = [pytest.mark.once, pytest.mark.processes]


def n_clocks(rank: int) -> dict[bool, set[int]]:
    """Clocks begun in replays of a race, by whether the replay times a candidate; two sites, of which one is through before the other."""
    kernels = [autotuned(blocks=blocks) for blocks in ((16, 32), (16, 32, 64, 128, 256, 512))]
    begun: list[WallSpan] = []
    in_replays: dict[bool, set[int]] = {True: set(), False: set()}
    begin, run = WallSpan.begin, Replayer.run

    def counted_begin(self: WallSpan) -> None:
        begun.append(self)
        begin(self)

    def counted_run(self: Replayer, closure: Any, schedule: Any, whole: Any = None, *, times_launches: bool = False) -> Any:
        begun.clear()
        value = run(self, closure, schedule, whole, times_launches=times_launches)
        if times_launches:
            in_replays[any(trial.is_timed for trial in schedule.values())].add(len(begun))
        return value

    WallSpan.begin, Replayer.run = counted_begin, counted_run  # type: ignore[method-assign]
    x = torch.arange(64.0)

    @contextual_autotune(is_dist=False, cache=False)
    def step() -> list[torch.Tensor]:
        return [launch(kernel, x) for kernel in kernels]

    step()
    WallSpan.begin, Replayer.run = begin, run  # type: ignore[method-assign]
    return in_replays


def test_each_timed_replay_has_as_many_clocks_in_it():
    """Two events take some microseconds of the device. A site that is through runs untimed, and its replays must not look faster."""
    assert values(on_ranks(1, n_clocks, is_dist=False)) == [{True: {3}, False: {1}}]
