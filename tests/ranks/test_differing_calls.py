"""Ranks whose calls differ: other lengths on each rank, calls new on one rank alone, ranks that come late."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import autotune, contextual_autotune
from dist_tune.testing import values
from tests.cases import further
from tests.ranks.kernels import autotuned, launch
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once

QUICK: Any = {"n_repeat": 1, "n_warmup": 0}
LENGTHS = (64, 96, 128, 160, 192, 224)


def _step(kernel: Any, has_collective: bool, decorate: Any) -> Any:
    @decorate
    def step(x: torch.Tensor) -> float:
        y = launch(kernel, x).sum()
        if has_collective:
            dist.all_reduce(y)
        return float(y)

    return step


def _crossed(rank: int, has_collective: bool) -> Any:
    """Rank 1 has a new length in its second step, rank 0 in its third."""
    kernel = autotuned(blocks=(16, 32))
    step = _step(kernel, has_collective, contextual_autotune(is_dist=True, **QUICK))
    lengths = ((64, 64, 128, 128), (64, 128, 128, 64))[rank]
    return [step(torch.full((n,), float(rank))) for n in lengths], len(kernel.cache)


@pytest.mark.parametrize("has_collective", [True, False])
def test_a_meeting_is_about_one_call(has_collective: bool):
    """A rank in its second step and one in its third do not replay together: each step's sum is its own."""
    first, second = values(on_ranks(2, _crossed, has_collective))
    mine, theirs = [64.0, 64.0, 128.0, 128.0], [128.0, 256.0, 256.0, 128.0]
    both = [a + b for a, b in zip(mine, theirs, strict=True)]
    assert (first[0], second[0]) == ((both, both) if has_collective else (mine, theirs))
    assert first[1] == 2


def _meets_later(rank: int) -> Any:
    kernel = autotuned(blocks=(16, 32))
    step = _step(kernel, True, contextual_autotune(is_dist=True, **QUICK))
    step(torch.zeros(64))
    step(torch.zeros(64 if rank == 0 else 128))  # new on rank 1 alone
    n_alone, seconds = len(kernel.cache), []
    for n in (64, 128):
        began = time.monotonic()
        step(torch.zeros(n))
        seconds.append(time.monotonic() - began)
    return n_alone, len(kernel.cache), seconds, [each.kernel_ms if hasattr(each, "kernel_ms") else each.key for each in step.records]


def test_a_site_met_alone_is_tuned_when_all_ranks_are_there():
    """It runs a known config until then, and is no error; the first call in which all ranks miss it tunes."""
    for rank, (n_alone, n_known, _, records) in enumerate(values(on_ranks(2, _meets_later))):
        assert (rank, n_alone, n_known) == (rank, 1, 2)
        assert len(records) == 2


def _variable_lengths(rank: int, kind: str, face: str) -> Any:
    kernel = autotuned(blocks=(16, 32), key=("n",) if kind != "bucket" else ())
    if face == "contextual":
        step = _step(kernel, kind != "alone", contextual_autotune(is_dist=True, **QUICK))
    else:

        @autotune([{"block": 1}, {"block": 2}], key_fn=lambda x: x.numel(), n_warmup=0, n_repeat=1)
        def step(x: torch.Tensor, block: int) -> float:
            y = x.sum() + x.numel()
            if kind != "alone":
                dist.all_reduce(y)
            return float(y)

    drawn = random.Random(f"{kind} {'both' if kind == 'same' else rank}").choice
    lengths = [drawn(LENGTHS) for _ in range(50)]
    began = time.monotonic()
    got = [step(torch.full((n,), float(rank))) for n in lengths]
    return lengths, got, time.monotonic() - began


@pytest.mark.parametrize("kind", ["same", "other", further("bucket"), further("alone")])
@pytest.mark.parametrize("face", ["contextual", "function"])
def test_fifty_steps_of_variable_lengths(kind: str, face: str):
    """Same or other keys on the ranks, with a collective or without one: every sum is right, and no rank waits for a deadline."""
    results = values(on_ranks(2, _variable_lengths, kind, face, env={"DIST_TUNE_DEADLINE_S": "20"}))
    each = [[n * (rank + 1.0) for n in lengths] for rank, (lengths, _, _) in enumerate(results)]
    both = [a + b for a, b in zip(*each, strict=True)]
    for rank, (_, got, seconds) in enumerate(results):
        assert got == (each[rank] if kind == "alone" else both)
        assert seconds < 15
