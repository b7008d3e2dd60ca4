"""Calls with nothing to tune that raise on one rank alone: later calls find their peers, and no rank is left in another function's."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import autotune
from dist_tune.testing import values
from tests.ranks.kernels import autotuned, launch, tuned
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once


class _Steps:
    """Two tuned functions, the first of which raises when it is told to."""

    def __init__(self, kind: str) -> None:
        self.n_failures = 0
        kernel, other = autotuned(), autotuned()

        def first(x: torch.Tensor, config: int = 0) -> torch.Tensor:
            if self.n_failures:
                self.n_failures -= 1
                raise ValueError("once")
            return launch(kernel, x) if kind == "contextual" else x + config

        def second(x: torch.Tensor, config: int = 0) -> torch.Tensor:
            return launch(other, x) if kind == "contextual" else x + config

        if kind == "contextual":
            self.first, self.second = tuned(kernel, first), tuned(other, second)
        else:
            decorate = autotune([{"config": 1}, {"config": 2}], key_fn=lambda x, **_: x.numel(), n_warmup=0, n_repeat=1)
            self.first, self.second = decorate(first), decorate(second)

    def run(self, sizes: list[int]) -> list[tuple[int, int]]:
        """Call both at each size; records of both after each."""
        found = []
        for n in sizes:
            self.first(torch.ones(n))
            self.second(torch.ones(n))
            found.append((len(self.first.records), len(self.second.records)))
        return found


def _made_again(rank: int, kind: str, n_failures: int) -> Any:
    steps = _Steps(kind)
    steps.run([64])
    for _ in range(2):
        steps.n_failures = n_failures if rank == 1 else 0
        while True:
            try:
                steps.run([64])
            except ValueError:
                continue
            break
    return steps.run([128, 256])


@pytest.mark.parametrize("kind", ["contextual", "function"])
@pytest.mark.parametrize("n_failures", [1, 3])
def test_a_call_that_a_rank_makes_again_ends_in_no_error(kind: str, n_failures: int):
    """Without collectives nothing says which calls belong together: the ranks go on alone, each with a config that it has."""
    for found in values(on_ranks(2, _made_again, kind, n_failures)):
        assert len(found) == 2


def _passed_over(rank: int, kind: str) -> Any:
    steps = _Steps(kind)
    steps.run([64])
    steps.n_failures = 1 if rank == 1 else 0
    for _ in range(2):
        with suppress(ValueError):
            steps.first(torch.ones(64))
        dist.all_reduce(torch.ones(1))
    return steps.run([128])


@pytest.mark.parametrize("kind", ["contextual", "function"])
def test_a_call_that_raised_counts_where_a_collective_follows(kind: str):
    """The rank goes on with its peers: what it calls after their collective is another call."""
    assert values(on_ranks(2, _passed_over, kind)) == [[(2, 2)]] * 2


def _in_parts(rank: int, kind: str) -> None:
    steps = _Steps(kind)
    steps.run([64])
    steps.n_failures = 1 if rank == 1 else 0
    try:
        steps.first(torch.ones(64))
    except ValueError:
        for _ in range(2):
            steps.first(torch.ones(64))
    steps.run([128, 256])


@pytest.mark.parametrize("kind", ["contextual", "function"])
def test_ranks_that_count_otherwise_after_an_error_go_on_alone(kind: str):
    """Two calls in place of one that raised: the ranks wait in different functions. No error; the log says that they are alone."""
    for outcome in on_ranks(2, _in_parts, kind):
        assert not outcome.error, outcome.message
        assert " is alone in " in outcome.log
