"""Problems shared out over ranks, and tuned together: real processes, a rank that dies, runs that communicate."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune.offline import ConfigFile, Failed, Outcome, Problem, load_config, tune_files, tune_kernel, tune_problems
from dist_tune.testing import values
from tests.ranks.world import same_error
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once

QUICK: Any = {"num_iters": 3}


def problem(name: str, best: int, folder: str, rank: int = -1, dies_at: int = -1, step_s: float = 0.01) -> Problem:
    """Fastest with ``delay=best``; writes down who has run what. Rank ``rank`` is killed by its run with ``dies_at``."""

    def make(config: dict[str, Any]) -> Any:
        delay = config["delay"]

        def run() -> torch.Tensor:
            with open(f"{folder}/{name}.runs", "a") as file:
                file.write(f"{os.environ['RANK']} {delay}\n")
            if rank == int(os.environ["RANK"]) and delay == dies_at and not os.path.exists(f"{folder}/again"):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(step_s * (1 + abs(delay - best)))
            return torch.ones(4)

        return run, torch.ones(4)

    return Problem(name, [{"delay": i} for i in range(4)], make)


def ran(folder: Path, name: str) -> set[tuple[int, int]]:
    """(rank, delay) of all runs of a problem."""
    lines = (folder / f"{name}.runs").read_text().split("\n")[:-1]
    return {(int(rank), int(delay)) for rank, delay in (line.split() for line in lines)}


def _own_share(rank: int, folder: str, killed: int = -1) -> Any:
    torch.manual_seed(rank)
    problems = [problem(f"p{i}", i % 4, folder, rank=killed, dies_at=2) for i in range(6)]
    ended = tune_problems(problems, **QUICK)
    return [(each.name, each.winner, len(each.latencies_us)) if isinstance(each, Outcome) else each for each in ended]


def test_each_problem_is_tuned_by_one_rank(tmp_path: Path):
    """All ranks learn all results, and share the work."""
    got = values(on_ranks(3, _own_share, str(tmp_path)))
    assert got[0] == got[1] == got[2] == [(f"p{i}", i % 4, 4) for i in range(6)]
    owners = [{rank for rank, _ in ran(tmp_path, f"p{i}")} for i in range(6)]
    assert all(len(each) == 1 for each in owners)
    assert len(set.union(*owners)) == 3


@pytest.mark.parametrize("killed", [0, 1])
def test_one_rank_is_killed_and_the_others_go_on_with_the_rest(tmp_path: Path, killed: int):
    """They end with an error that names it; started again, the job tunes what is missing, and nothing else but the winners' checks."""
    env = {"DIST_TUNE_CACHE_DIR": str(tmp_path / "cache")}
    outcomes = on_ranks(3, _own_share, str(tmp_path), killed, env=env)
    assert outcomes.pop(killed).error == "Died"
    for each in outcomes:
        assert (each.error, f"rank {killed}" in each.message) == ("AbsentRanksError", True), each.message
    (lost,) = [i for i in range(6) if {rank for rank, _ in ran(tmp_path, f"p{i}")} == {killed}]
    for path in tmp_path.glob("*.runs"):
        path.unlink()
    (tmp_path / "again").touch()
    assert values(on_ranks(3, _own_share, str(tmp_path), killed, env=env)) == [[(f"p{i}", i % 4, 4) for i in range(6)]] * 3
    assert [len(ran(tmp_path, f"p{i}")) for i in range(6)] == [4 if i == lost else 1 for i in range(6)]


def _all_reduce(rank: int, folder: str, mode: str) -> Any:
    def make(config: dict[str, Any]) -> Any:
        def run() -> torch.Tensor:
            total = torch.ones(4)
            time.sleep(config["ms"] * 5e-3 * (1 + 3 * (rank == config["slow"])))
            dist.all_reduce(total)
            return total

        return run, torch.full((4,), float(dist.get_world_size()))

    space = [{"ms": ms, "slow": slow} for ms, slow in ((3, 0), (4, -1), (3, 1))]
    problems = [Problem(f"p{i}", space, make) for i in range(2)]
    return [each.winner for each in tune_problems(problems, mode=mode, **QUICK) if isinstance(each, Outcome)]  # type: ignore[arg-type]


def test_sharing_out_what_communicates_is_refused():
    """On all ranks, in time, before the collective is made, with the reason."""
    outcomes = on_ranks(2, _all_reduce, "", "split", env={"TRITON_INTERPRET": "0", "DIST_TUNE_DEADLINE_S": "3"}, mode="fake")
    assert {each.error for each in outcomes} <= {"CommunicatesError", "PeerFailedError"}
    assert any(each.error == "CommunicatesError" for each in outcomes)
    for each in outcomes:
        assert 'mode="merge"' in each.message
        assert "allreduce" in each.message
        assert each.seconds < 9


def test_what_communicates_is_tuned_by_all_together():
    """The slowest rank decides, and all have one winner."""
    got = values(on_ranks(2, _all_reduce, "", "merge"))
    assert got == [[1, 1], [1, 1]]


def _alone_together(rank: int) -> Any:
    """tune_kernel under torch.distributed: config 0 is fastest on rank 0 only."""

    def make(config: dict[str, Any]) -> Any:
        if config["i"] == 3 and rank == 1:
            raise ValueError("not on this rank")
        ms = [[2, 3, 6, 1], [6, 3, 2, 1]][rank][config["i"]]

        def run() -> torch.Tensor:
            time.sleep(ms * 5e-3)
            return torch.ones(2) * (2 if config["i"] == 4 and rank == 1 else 1)

        return run, torch.ones(2)

    return tune_kernel([{"i": i} for i in range(4)], make, num_iters=3)


def test_tune_kernel_in_a_group_is_decided_by_the_slowest_rank():
    """One rank's failures drop a config on both."""
    assert values(on_ranks(2, _alone_together)) == [{"i": 1}] * 2


def _files(rank: int, folder: str) -> Any:
    files = [
        ConfigFile(f"k{n}.json", (16, 512, 4096), lambda size, n=n: problem(f"k{n}-{size}", size % 3, folder).make_run_and_gt_fn, SPACE)  # type: ignore[misc]
        for n in range(2)
    ]
    settled = tune_files(files, folder, **QUICK)
    return [(each.json_file_name, each.size_class, each.config) for each in settled], load_config(f"{folder}/k1.json", 600)


SPACE = [{"delay": i, "waves_per_eu": 2} for i in range(4)]


def test_files_are_there_when_any_rank_returns(tmp_path: Path):
    """Every rank reads what one of them has written."""
    got = values(on_ranks(2, _files, str(tmp_path)))
    assert got[0] == got[1]
    assert got[0][1] == {"delay": 512 % 3}
    assert json.loads((tmp_path / "k0.json").read_text())["small"] == {"delay": 1, "waves_per_eu": 2}
    assert not list(tmp_path.rglob("journals/*.jsonl"))


def _one_fails(rank: int, folder: str) -> Any:
    def fails(config: dict[str, Any]) -> Any:
        return (lambda: torch.zeros(2)), torch.ones(2)

    problems = [Problem("bad", SPACE, fails), Problem("empty", [], fails), problem("good", 1, folder)]
    bad, empty, good = tune_problems(problems, **QUICK)
    assert isinstance(bad, Failed)
    assert isinstance(empty, Failed)
    assert isinstance(good, Outcome)
    return bad.error, empty.error, good.winner


def test_a_problem_that_fails_leaves_the_others_alone(tmp_path: Path):
    """Nothing answers rightly in the first, the second cannot begin: these are their results, with the reasons, on all ranks."""
    got = values(on_ranks(2, _one_fails, str(tmp_path)))
    assert got[0] == got[1]
    assert got[0][1:] == ("ValueError: the search space is empty: there is nothing to choose from", 1)
    assert "NoValidConfigError" in got[0][0]
    assert "wrong by 1" in got[0][0]


def _same_names(rank: int, folder: str) -> Any:
    return tune_problems([problem("p", 1, folder), problem("p", 2, folder)])


def test_two_problems_of_one_name_are_refused(tmp_path: Path):
    same_error(on_ranks(2, _same_names, str(tmp_path)), "ValueError", "'p'")
