"""Dry runs, by which a tuning script learns what to compile, so that its kernels are compiled before they are launched."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from dist_tune.offline import tune_kernel
from dist_tune.testing import on_ranks, values
from tests.ranks.kernels import add_kernel

pytestmark = [pytest.mark.once, pytest.mark.processes]


def _tune(rank: int) -> Any:
    def make(config: dict[str, Any]) -> Any:
        x = torch.zeros(64)

        def run() -> torch.Tensor:
            if config["BLOCK"] == 32:
                time.sleep(1000)
            add_kernel[(4,)](x, x, 64, BLOCK=config["BLOCK"])
            return torch.zeros(1)

        return run, torch.zeros(1)

    tune_kernel([{"BLOCK": block} for block in (16, 32, 64)], make, num_iters=1, name="p")


def test_a_dry_run_that_never_returns_ends_the_process():
    """With exit code 86 after two deadlines, and the candidate and the stacks in the log."""
    (outcome,) = on_ranks(1, _tune, mode="fake", is_dist=False, env={"DIST_TUNE_DEADLINE_S": "1"}, timeout_s=20)
    assert outcome.error == "Died", f"{outcome.error}: {outcome.message}"
    assert "exit code 86" in outcome.message
    for word in ("the dry run of candidate", "BLOCK=32", "of p", "in run"):
        assert word in outcome.log, outcome.log


@triton.jit
def scale_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows, columns = tl.arange(0, 128), tl.arange(0, DEPTH)
    a = tl.load(x_ptr + rows[:, None] * DEPTH + columns[None, :])
    acc = tl.dot(a, tl.trans(a))
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n).to(tl.float32) * 2 + tl.sum(tl.sum(acc, 0), 0) * 0, mask=at < n)


def scale_space() -> list[dict[str, Any]]:
    """100 is no power of two; a tile of 128 by 1024 halves is a quarter of a megabyte."""
    good = [{"BLOCK": block, "DEPTH": 64, "num_warps": warps} for block in (64, 128, 256) for warps in (4, 8)]
    return [*good, {"BLOCK": 100, "DEPTH": 64, "num_warps": 4}, {"BLOCK": 64, "DEPTH": 1024, "num_warps": 4}]


def _compiled_ahead(rank: int) -> Any:
    x = torch.ones(128 * 1024, dtype=torch.float16)

    def make(config: dict[str, Any]) -> Any:
        return (lambda: scale_kernel[(triton.cdiv(4096, config["BLOCK"]),)](x, torch.empty(4096), 4096, **config)), None

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        best = tune_kernel(scale_space(), make, num_iters=2)
    log = Path(os.environ["DIST_TUNE_LOG_DIR"], f"rank-{rank}.log").read_text()
    return best, "out of resource" in log, "arange's range must be a power of 2" in log


def test_kernels_are_compiled_before_they_are_launched_and_what_does_not_fit_never_is():
    """Real sm_90 code: a config too large for shared memory and one that does not compile are dropped, with the reason."""
    best, has_too_large, has_uncompiled = values(on_ranks(1, _compiled_ahead, mode="fake", is_dist=False))[0]
    assert best["BLOCK"] in (64, 128, 256)
    assert (has_too_large, has_uncompiled) == (True, True)
