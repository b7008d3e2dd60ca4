"""Runs of a tuning script are checked alike where one process makes them and where ranks make them
together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dist_tune.measure import Snapshot
from dist_tune.offline.problem import Problem, SearchOptions
from dist_tune.offline.runs import RunLaunch

OPTIONS = SearchOptions(atol=0.1, rtol=0.1)


@pytest.mark.parametrize("is_alone", [False, True])
def test_runs_are_checked_twice(is_alone: bool):
    """Each has its own ground truth, and is made by the script; one that writes nothing leaves the
    right answer of its first run.
    """

    def make(config: dict[str, Any]) -> tuple[Callable[[], torch.Tensor], torch.Tensor | None]:
        out, right = torch.full((4,), float(config["n"])), torch.full((4,), float(config["n"]))
        if config["way"] == "raises":
            raise ValueError("no such tile")
        writes = {
            "right": lambda: out.copy_(right),
            "nothing": lambda: out,
            "wrong": lambda: out.fill_(9),
            "unchecked": lambda: out,
        }
        return writes[config["way"]], None if config["way"] == "unchecked" else right

    configs = [
        {"way": way, "n": n}
        for n in (1, 2)
        for way in ("right", "nothing", "wrong", "raises", "unchecked")
    ]
    launch = RunLaunch(Problem("f", configs, make), configs, OPTIONS, is_alone=is_alone)
    checker = launch.checker()
    found: dict[int, list[str]] = {}
    for i, config in enumerate(configs):
        for k in range(checker.n_runs):
            launch.prepare(config)
            checker.begin(*launch.arguments, is_repeated=k > 0)
            try:
                found.setdefault(i, []).append(
                    checker.judge(launch.run(config, Snapshot()), *launch.arguments)
                )
            except ValueError:
                checker.restore()
    for i in (0, 5):
        assert found[i] == ["", ""]
        assert found[i + 1] == ["", "4 of 4 elements are NaN, the first at [0]: not written?"]
        assert found[i + 2][0].startswith("wrong by")
        assert found[i + 3] == []
        assert found[i + 4] == ["", ""]
