"""Runs that ranks make together for a tuning script are checked without being repeated at will."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dist_tune.offline.runs import RunLaunch, Runs
from dist_tune.runtime import Undo

pytestmark = pytest.mark.once


def test_runs_of_several_ranks_are_checked_as_often_on_each():
    """Each has its own ground truth, and is made by the script; one that writes nothing leaves the right answer of its first run."""

    def make(config: dict[str, Any]) -> tuple[Callable[[], torch.Tensor], torch.Tensor | None]:
        out, right = torch.full((4,), float(config["n"])), torch.full((4,), float(config["n"]))
        if config["way"] == "raises":
            raise ValueError("no such tile")
        writes = {"right": lambda: out.copy_(right), "nothing": lambda: out, "wrong": lambda: out.fill_(9), "unchecked": lambda: out}
        return writes[config["way"]], None if config["way"] == "unchecked" else right

    configs = [{"way": way, "n": n} for n in (1, 2) for way in ("right", "nothing", "wrong", "raises", "unchecked")]
    launch = RunLaunch("f", Runs(make, configs, None), range(10), (0.1, 0.1), is_alone=False, is_watched=False)
    checker = launch.checker()
    found: dict[int, list[str]] = {}
    for i, config in enumerate(launch.candidates()):
        for k in range(checker.n_runs):
            launch.prepare(config)
            checker.begin(*launch.arguments, is_repeated=k > 0)
            try:
                found.setdefault(i, []).append(checker.judge(launch.run(config, Undo()), *launch.arguments))
            except ValueError:
                checker.restore()
    for i in (0, 5):
        assert found[i] == ["", ""]
        assert found[i + 1] == ["", "4 of 4 elements are NaN, the first at [0]: not written?"]
        assert found[i + 2][0].startswith("wrong by")
        assert found[i + 3] == []
        assert found[i + 4] == ["", ""]
