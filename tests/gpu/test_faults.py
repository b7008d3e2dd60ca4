"""Faults that only real GPUs show: one rank out of memory, ten times slower, or killed. Needs two GPUs.

python -m pytest -m gpu tests/gpu/test_faults.py
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from dist_tune import autotune, contextual_autotune
from dist_tune.testing import on_ranks, values
from tests.ranks.journaled import BLOCKS
from tests.ranks.kernels import autotuned, best
from tests.ranks.test_journals import supervised

pytestmark = pytest.mark.gpu


def _out_of_memory(rank: int) -> Any:
    @autotune([{"n_bytes": n} for n in (1 << 20, 1 << 50)], None, cache=False, n_warmup=0, n_repeat=2)
    def step(x: torch.Tensor, n_bytes: int = 0) -> torch.Tensor:
        scratch = torch.empty(n_bytes if rank == 1 else 1 << 20, dtype=torch.uint8, device="cuda")
        y = x + scratch[:1].float() * 0
        dist.all_reduce(y)
        return y

    y = step(torch.ones(4, device="cuda"))
    return y[0].item(), step.records[0].winner, [each.failure for each in step.records[0].candidates]


def test_a_config_that_needs_too_much_memory_on_one_rank_is_dropped_on_both():
    """It fails before its collective, so another config stands in there."""
    for y, winner, failures in values(on_ranks(2, _out_of_memory, mode="gpu", env={"DIST_TUNE_DEADLINE_S": "20"})):
        assert (y, winner, failures[0]) == (2.0, 0, None)
        assert "rank 1" in failures[1]
        assert "OutOfMemoryError" in failures[1]


@triton.jit
def _lagging_kernel(x_ptr, n, turns, lag, BLOCK: tl.constexpr):
    """Its time is in proportion to ``turns`` over BLOCK; with BLOCK 4 it takes ``lag`` times as long."""
    value = tl.load(x_ptr)
    for _ in range(turns // BLOCK * (lag if BLOCK == 4 else 1)):
        value = value * 1.0001 + 0.5
    tl.store(x_ptr, value)


def _straggles(rank: int) -> Any:
    kernel = autotuned(_lagging_kernel, blocks=(1, 2, 4), key=("n",))
    x = torch.zeros(64, device="cuda")

    @contextual_autotune(is_dist=True, n_repeat=3, n_warmup=1)
    def step() -> torch.Tensor:
        y = x * 2
        kernel[(1,)](y, 64, 400_000, 10 if rank == 1 else 1)
        dist.all_reduce(y)
        return y

    step()
    return best(kernel), step.records[0].best.rank_latencies_ms


def test_a_config_that_is_ten_times_slower_on_one_rank_does_not_win():
    """On rank 0 alone block 4 would be the fastest."""
    got = values(on_ranks(2, _straggles, mode="gpu", env={"DIST_TUNE_DEADLINE_S": "20"}))
    assert got[0] == got[1]
    assert got[0][0] == [2]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_costs_one_restart(tmp_path: Path, rank: int):
    """SIGKILL in the fifth replay of a supervised job, before ranks have agreed on a time: a second start is no longer than a first one."""
    began = time.monotonic()
    (first, n_restarts), (second, _) = supervised(tmp_path, (0, rank, 5, "once"), "cuda")
    print(f"rank {rank} killed: {time.monotonic() - began:.1f} s from start to end, {first['runs']} runs of the step after the restart")
    assert n_restarts == "1"
    assert first["runs"] == second["runs"] <= len(BLOCKS) + 3
    assert first["best"] == second["best"]
    assert first["y"] == second["y"] == 2.0
    assert not list((tmp_path / "cache" / "journals").iterdir())
