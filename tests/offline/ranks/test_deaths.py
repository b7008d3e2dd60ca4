"""Configs that end the process of a rank while all ranks tune one problem together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_tune.offline import Outcome, Problem, tune_problems
from dist_tune.testing import values
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once


def _dies(rank: int, turns: str) -> Any:
    os.environ["DIES"] = str(turns[:1] == str(rank))

    def make(config: dict[str, Any]) -> Any:
        def run() -> torch.Tensor:
            if config["i"] == 2 and os.environ["DIES"] == "True":
                os._exit(7)
            return torch.ones(2)

        return run, torch.ones(2)

    (ended,) = tune_problems([Problem("p", [{"i": i} for i in range(4)], make)], num_iters=1, mode="merge")
    assert isinstance(ended, Outcome)
    return list(ended.failures)


@pytest.mark.parametrize("turns", ["11", "01", "10"])
def test_deaths_of_any_rank_put_a_config_into_quarantine(tmp_path: Path, turns: str):
    """Two are enough. Those of the first rank alone were counted: a config that ended another one was tried for ever."""
    env = {"DIST_TUNE_CACHE_DIR": str(tmp_path)}
    for k in range(2):
        assert on_ranks(2, _dies, turns[k:], env=env)[int(turns[k])].error == "Died"
    assert values(on_ranks(2, _dies, "", env=env)) == [[2]] * 2
    assert not list((tmp_path / "journals").iterdir())
