"""Dry runs, by which a tuning script learns what to compile: one that never returns ends the process, and says which it was."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from dist_tune.offline import tune_kernel
from dist_tune.testing import on_ranks, values
from tests.ranks.kernels import add_kernel

pytestmark = [pytest.mark.once, pytest.mark.processes]


def _tune(rank: int, hangs: bool) -> Any:
    names: set[str] = set()

    def make(config: dict[str, Any]) -> Any:
        x = torch.zeros(64)

        def run() -> torch.Tensor:
            names.update(each.name for each in threading.enumerate() if "dry run" in each.name)
            if hangs and config["BLOCK"] == 32:
                time.sleep(1000)
            add_kernel[(4,)](x, x, 64, BLOCK=config["BLOCK"])
            return torch.zeros(1)

        return run, torch.zeros(1)

    tune_kernel([{"BLOCK": block} for block in (16, 32, 64)], make, num_iters=1, name="p")
    return names, [each.name for each in threading.enumerate() if "dry run" in each.name]


def test_a_dry_run_that_never_returns_ends_the_process():
    """With exit code 86 after one and a half deadlines, and the candidate and the stacks in the log."""
    (outcome,) = on_ranks(1, _tune, True, mode="fake", is_dist=False, env={"DIST_TUNE_DEADLINE_S": "1"}, timeout_s=20)
    assert outcome.error == "Died", f"{outcome.error}: {outcome.message}"
    assert "exit code 86" in outcome.message
    for word in ("the dry run of candidate 1", "BLOCK=32", "of p", "in run"):
        assert word in outcome.log, outcome.log


def test_dry_runs_leave_no_thread():
    """Each is watched, and none after it."""
    assert values(on_ranks(1, _tune, False, mode="fake", is_dist=False)) == [({"dist_tune dry run"}, [])]
