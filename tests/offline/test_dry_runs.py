"""Dry runs, by which a tuning script learns what to compile: one that never returns ends the process, and says which it was."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from dist_tune.offline import tune_kernel
from dist_tune.testing import on_ranks
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
