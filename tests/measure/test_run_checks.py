"""Runs of a tuning script: repeated at will by a process that is alone, and not where ranks make them together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dist_tune.measure import Snapshot
from dist_tune.offline.problem import Problem, SearchOptions
from dist_tune.offline.runs import RunLaunch

pytestmark = pytest.mark.once

OPTIONS = SearchOptions(atol=0.1, rtol=0.1)


def test_runs_of_several_ranks_are_checked_as_often_on_each():
    """Each has its own ground truth, and is made by the script; one that writes nothing leaves the right answer of its first run."""

    def make(config: dict[str, Any]) -> tuple[Callable[[], torch.Tensor], torch.Tensor | None]:
        out, right = torch.full((4,), float(config["n"])), torch.full((4,), float(config["n"]))
        if config["way"] == "raises":
            raise ValueError("no such tile")
        writes = {"right": lambda: out.copy_(right), "nothing": lambda: out, "wrong": lambda: out.fill_(9), "unchecked": lambda: out}
        return writes[config["way"]], None if config["way"] == "unchecked" else right

    configs = [{"way": way, "n": n} for n in (1, 2) for way in ("right", "nothing", "wrong", "raises", "unchecked")]
    launch = RunLaunch(Problem("f", configs, make), configs, OPTIONS, is_alone=False)
    checker = launch.checker()
    found: dict[int, list[str]] = {}
    for i, config in enumerate(configs):
        for k in range(checker.n_runs):
            launch.prepare(config)
            checker.begin(*launch.arguments, is_repeated=k > 0)
            try:
                found.setdefault(i, []).append(checker.judge(launch.run(config, Snapshot()), *launch.arguments))
            except ValueError:
                checker.restore()
    for i in (0, 5):
        assert found[i] == ["", ""]
        assert found[i + 1] == ["", "4 of 4 elements are NaN, the first at [0]: not written?"]
        assert found[i + 2][0].startswith("wrong by")
        assert found[i + 3] == []
        assert found[i + 4] == ["", ""]


def _check_alone(make: Callable[[dict[str, Any]], Any]) -> list[str]:
    """Of two configs, where one process tunes."""
    configs = [{"n": 0}, {"n": 1}]
    launch = RunLaunch(Problem("f", configs, make), configs, OPTIONS, is_alone=True)
    checker, found = launch.checker(), []
    for config in configs:
        launch.prepare(config)
        checker.begin(*launch.arguments, is_repeated=False)
        found.append(checker.judge(launch.run(config, Snapshot()), *launch.arguments))
    return found


def test_what_a_check_meets_is_no_fault_of_a_config():
    """A script is told what cannot be checked. Copies of a result, and runs that are held, are repeated without where memory is short."""
    right, n_runs, made = torch.ones(4), [0, 0], list[int]()
    assert _check_alone(lambda config: ([right.clone()].pop, right)) == ["its check raised IndexError: pop from empty list"] * 2
    for wrong in _check_alone(lambda config: (lambda: right, right)):
        assert wrong.startswith("its check raised TypeError: run and its reference ground_truth return the same memory")

    def make(config: dict[str, Any]) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
        def run() -> torch.Tensor:
            n_runs[config["n"]] += 1
            if n_runs[1] == 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return right.clone()

        made.append(config["n"])
        return run, right

    assert _check_alone(make) == ["", ""]
    assert (n_runs, made) == ([2, 3], [0, 1])
