"""Ranks that disagree about what to tune, runs that communicate late, jobs that are started again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune.offline import Failed, Outcome, Problem, tune_and_save_configs, tune_kernel, tune_problems
from dist_tune.testing import values
from tests.offline.ranks.test_split import problem
from tests.ranks.world import DEADLINE_S, ROOT, same_error
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


def _no_space(rank: int, folder: str) -> Any:
    first, second = tune_problems([Problem("empty", [], lambda config: (lambda: None, None)), problem("good", 1, folder)], **QUICK)
    assert isinstance(first, Failed)
    assert isinstance(second, Outcome)
    return first.error, second.winner


def test_a_problem_that_cannot_even_begin_leaves_the_others_alone(tmp_path: Path):
    got = values(on_ranks(2, _no_space, str(tmp_path)))
    assert got[0] == got[1] == ("ValueError: the search space is empty: there is nothing to choose from", 1)


PROGRAM = """
import glob, os, pathlib, signal, sys, time
import torch, torch.distributed as dist
from dist_tune.offline import ConfigFile, Problem, tune_files, load_config
dist.init_process_group("gloo")
folder, rank = sys.argv[1], os.environ["RANK"]

def has_record(size):
    # One round of this problem is over: the next run is of a second round, or of the comparison at the end.
    journals = glob.glob(f"{os.environ['DIST_TUNE_LOG_DIR']}/journal/*M={size}-*.jsonl")
    return any('"t": "end"' in pathlib.Path(path).read_text() for path in journals)

def make_for_size(size):
    def make(config):
        def run():
            with open(f"{folder}/runs-{size}-{config['i']}", "a") as file:
                file.write("x")
            if size == 300 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and has_record(size):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.005 * (1 + abs(config["i"] - size % 4)))
            return torch.ones(2)
        return run, torch.ones(2)
    return make

sizes, space = (16, 300, 4097), [{"i": i} for i in range(4)]
tune_files([ConfigFile("k.json", sizes, make_for_size, space)], folder, num_iters=2)
print("rank", rank, [load_config(f"{folder}/k.json", size)["i"] for size in sizes], flush=True)
dist.barrier()
os._exit(0)
"""


@pytest.mark.slow  # tests/ranks/test_supervised.py has an agent that starts a job again
def test_a_job_that_torchrun_starts_again_goes_on_where_it_was(tmp_path: Path):
    """The agent ends all ranks when one is killed; after the restart problems that were done are not tuned again."""
    (tmp_path / "program.py").write_text(PROGRAM)
    env = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "DIST_TUNE_LOG_DIR": str(tmp_path / "logs"),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [str(ROOT / "launch/launch.sh"), "--nproc_per_node=2", "--max-restarts=2", "program.py", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env={**env, "PATH": path}, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[0, 0, 1]") == 2, done.stdout
    assert json.loads((tmp_path / "k.json").read_text()) == {"small": {"i": 0}, "medium": {"i": 0}, "large": {"i": 1}}
    # In the logs: stderr has the progress of rank 0 alone, and either rank may go on with the problem.
    assert any("tried before" in path.read_text() for path in (tmp_path / "logs").glob("rank-*.log"))
    assert not list((tmp_path / "logs" / "journal").glob("*.jsonl"))
