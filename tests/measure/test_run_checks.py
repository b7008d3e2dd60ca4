"""Runs of a tuning script: repeated at will by a process that is alone, and not where ranks make them together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dist_tune.measure import Checker, Snapshot
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


def test_a_run_that_is_wrong_when_repeated_is_found_alone():
    """Runs of a process alone lie in memory that the check poisons, integers too; what returns the ground truth itself is an error."""
    right = torch.ones(4, dtype=torch.int32)

    def made(run: Callable[[], torch.Tensor]) -> list[str]:
        launch = RunLaunch(Problem("f", [{}], lambda config: (run, right)), [{}], OPTIONS, is_alone=True)
        ((config,), *_) = launch.candidates()
        launch.prepare(config)
        checker = launch.checker()
        return [run_once(checker, launch, config, k > 0) for k in range(checker.n_runs)]

    def run_once(checker: Checker, launch: RunLaunch, config: dict[str, Any], is_repeated: bool) -> str:
        checker.begin(*launch.arguments, is_repeated=is_repeated)
        return checker.judge(launch.run(config, Snapshot()), *launch.arguments)

    out = right.clone()
    assert made(lambda: out.copy_(right)) == ["", ""]
    (first, second) = made(lambda: out)
    assert (first, second.endswith("4 of 4 elements differ): not written?")) == ("", True)
    with pytest.raises(TypeError, match="run and its reference ground_truth return the same memory"):
        made(lambda: right)
