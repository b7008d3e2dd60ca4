"""Steps in which ranks send to each other: gloo counts what two ranks exchange among the group's collectives, so counts differ by right."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune.testing import values
from tests.ranks.kernels import autotuned, best, launch, tuned
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once


def _pipe(rank: int, n_before: int) -> Any:
    kernel = autotuned(blocks=(16, 32))

    def closure(x: torch.Tensor) -> torch.Tensor:
        if rank > 0:
            dist.recv(x, rank - 1)
        y = launch(kernel, x)
        if rank < 2:
            dist.send(y, rank + 1)
        return y

    for _ in range(n_before):  # as a warm-up would
        x = torch.zeros(4)
        if rank > 0:
            dist.recv(x, rank - 1)
        if rank < 2:
            dist.send(x, rank + 1)
    step = tuned(kernel, closure)
    began = time.monotonic()
    for n in (64, 128, 256, 64, 128, 256):
        step(torch.zeros(n))
    seconds = time.monotonic() - began
    dist.barrier()
    return best(kernel), len(step.records), seconds < 20


@pytest.mark.parametrize("n_before", [0, 2])
def test_a_pipeline_is_tuned_by_the_numbers_of_its_calls(n_before: int):
    """The middle rank issues twice as many as the others: they see that where they meet, and go by numbers from then on."""
    first, *others = values(on_ranks(3, _pipe, n_before, timeout_s=60))
    assert all(each[2] for each in (first, *others))
    if n_before == 0:  # else they may go on alone, each with a config that it has
        assert others == [first, first]
        assert first[1] == 3


def _sends_between_two(rank: int) -> Any:
    kernel = autotuned(blocks=(16, 32))

    def closure(x: torch.Tensor) -> torch.Tensor:
        y = launch(kernel, x)
        if rank == 0:
            dist.send(y, 1)
        elif rank == 1:
            dist.recv(y, 0)
        return y

    step = tuned(kernel, closure)
    for n in (64, 128, 64, 128):
        step(torch.zeros(n))
    dist.barrier()
    return best(kernel), len(step.records)


def test_a_rank_that_sends_nothing_strands_no_other():
    """Two of three exchange something in the first run: they may go on alone, and no rank waits for the others' end."""
    assert len(values(on_ranks(3, _sends_between_two, timeout_s=60))) == 3
