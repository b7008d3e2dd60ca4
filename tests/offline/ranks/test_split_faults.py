"""Ranks that disagree about what to tune, runs that communicate late, jobs that are started again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune.offline import Problem, tune_and_save_configs, tune_kernel, tune_problems
from tests.offline.ranks.test_split import problem
from tests.ranks.world import DEADLINE_S, same_error
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once

QUICK: Any = {"num_iters": 1}


def _other_order(rank: int, folder: str) -> Any:
    problems = [problem("a", 1, folder), problem("b", 3, folder)]
    return tune_problems(problems[:: 1 - 2 * rank], **QUICK)


def test_ranks_with_other_problems_are_told_which(tmp_path: Path):
    """One rank's list is the other way round: nobody gets another problem's winner."""
    same_error(on_ranks(2, _other_order, str(tmp_path)), "RankMismatchError", "ranks 0 and 1 have other problems, first at index 0")


def _other_space(rank: int) -> Any:
    return tune_kernel([{"i": i} for i in range(2 + rank)], lambda config: (lambda: None, None), name="k", **QUICK)


def test_ranks_that_tune_together_need_the_same_configs():
    same_error(on_ranks(2, _other_space), "RankMismatchError", "rank 1 has 3 candidates, ranks before it have 2")


def _talks_late(rank: int) -> Any:
    def make(config: dict[str, Any]) -> Any:
        def run() -> torch.Tensor:
            total = torch.ones(2)
            if config["i"] == 3:
                dist.all_reduce(total)
            return total

        return run, torch.ones(2)

    return tune_problems([Problem(f"p{k}", [{"i": i} for i in range(4)], make) for k in range(2)], **QUICK)


def test_a_collective_in_one_config_alone_is_refused_as_well():
    """Before it is made: nobody waits for a peer that tunes something else."""
    outcomes = on_ranks(2, _talks_late)
    assert {each.error for each in outcomes} <= {"CommunicatesError", "PeerFailedError"}
    assert all('mode="merge"' in each.message and each.seconds < 3 * DEADLINE_S for each in outcomes)


def _cannot_save(rank: int, folder: str, mode: Any) -> Any:
    (Path(folder) / "file").write_text("")
    tune_and_save_configs([8], lambda size: lambda config: (lambda: None, None), [{"i": 1}], "k.json", f"{folder}/file", mode=mode, **QUICK)


def test_a_file_that_cannot_be_written_is_told_to_all(tmp_path: Path):
    """Its folder is a file."""
    for mode in ("merge", "split"):
        outcomes = on_ranks(2, _cannot_save, str(tmp_path), mode)
        assert "FileExistsError" in {each.error for each in outcomes}
        assert {each.error for each in outcomes} <= {"FileExistsError", "PeerFailedError"}
        assert all(each.seconds < 4 * DEADLINE_S for each in outcomes)
