"""Ranks that have made different numbers of calls of one closure: their collectives say which calls belong together."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import contextual_autotune
from dist_tune.testing import values
from tests.ranks.kernels import autotuned, launch
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once


def _extra(rank: int, news: tuple[tuple[int, ...], tuple[int, ...]]) -> Any:
    """Rank 0 makes two calls more, without a collective; ``news``: lengths of each rank from then on."""
    kernel = autotuned(blocks=(16, 32))

    @contextual_autotune(is_dist=True, n_repeat=1, n_warmup=0)
    def step(x: torch.Tensor, is_shared: bool) -> float:
        y = launch(kernel, x).sum()
        if is_shared:
            dist.all_reduce(y)
        return float(y)

    step(torch.zeros(64), True)
    for _ in range(2 if rank == 0 else 0):
        step(torch.zeros(64), False)
    began = time.monotonic()
    got = [step(torch.zeros(n), True) for n in news[rank]]
    seconds = time.monotonic() - began
    dist.barrier()  # a rank that ends without its interpreter's end does not answer the other
    return got, len(kernel.cache), seconds


@pytest.mark.parametrize(
    ("news", "n_known"),
    [
        (((128, 64), (128, 64)), 2),  # new on both: tuned
        (((128, 64, 64), (64, 64, 64)), 1),  # on the rank that is ahead in its count
        (((64, 64, 64), (128, 64, 64)), 1),  # on the other
        (((128, 96, 64, 128), (64, 128, 96, 128)), 2),
    ],
)
def test_counts_that_differ_strand_no_rank(news: Any, n_known: int):
    """No rank waits for a deadline, and what is new on all at once is tuned."""
    both = [float(a + b) for a, b in zip(*news, strict=True)]
    for got, n, seconds in values(on_ranks(2, _extra, news, env={"DIST_TUNE_DEADLINE_S": "10"})):
        assert got == both
        assert n >= n_known
        assert seconds < 8
