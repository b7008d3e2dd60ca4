"""Jobs whose steps may not be repeated, and which are tuned while they run: what ranks run in tests of online tuning."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import triton

from dist_tune import contextual_autotune
from dist_tune.testing import FakeH200
from tests.ranks.kernels import autotuned, launch

BLOCKS = (16, 32, 64, 128)


def times_of(rank: int, speeds: dict[int, float], late: int = -1) -> Any:
    """Milliseconds of a launch by its BLOCK; twice as long on the rank ``late`` for the fastest."""

    def launch_ms(source: Any, metadata: Any) -> float:
        block = next(value for name, value in named(source).items() if name == "BLOCK")
        return speeds[block] * (3.0 if rank == late and speeds[block] == min(speeds.values()) else 1.0)

    return launch_ms


def named(source: Any) -> dict[str, Any]:
    names = source.fn.arg_names
    return {names[at[0]] if isinstance(at, tuple) else at: value for at, value in source.constants.items()}


def job(rank: int, n_calls: int, is_dist: bool, late: int = -1, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """A step that counts itself; times of its config after each call."""
    FakeH200.launch_ms = staticmethod(times_of(rank, {16: 1.0, 32: 0.5, 64: 0.25, 128: 0.8}, late))
    kernel = autotuned(configs=[triton.Config({"BLOCK": block}) for block in BLOCKS])
    x = torch.zeros(256)
    weight = torch.zeros(1)

    @contextual_autotune(is_dist=is_dist, **(options or {}))
    def step() -> float:
        launch(kernel, x)
        weight.add_(1.0)
        if is_dist:
            dist.all_reduce(weight.clone())
        return float(weight)

    values, used, ended = [], [], None
    for k in range(n_calls):
        values.append(step())
        used.append(next(iter(kernel.cache.values())).kwargs["BLOCK"])
        if step.records and ended is None:
            ended = k
        time.sleep(0.002)
    return {"values": values, "used": used, "ended": ended, "records": [r.best.config for r in step.records], "weight": float(weight)}
