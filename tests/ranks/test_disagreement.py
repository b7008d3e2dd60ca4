"""Ranks that differ: lists, keys, calls, absences, and what bad input is told."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_tune import CaptureError, contextual_autotune
from dist_tune.testing import values
from tests.ranks.kernels import autotuned, best, configs, is_unpatched, launch
from tests.ranks.world import DEADLINE_S, same_error
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once

QUICK: Any = {"n_repeat": 1, "n_warmup": 0}


def _different_lists(rank: int, kind: str) -> Any:
    blocks = {"more": (16, 32, 64)[: 3 - rank], "order": ((16, 32), (32, 16))[rank], "warps": (16, 32)}[kind]
    options = {"num_warps": 4 + 4 * rank} if kind == "warps" else {}
    kernel = autotuned(configs=configs(*blocks, **options))
    step = contextual_autotune(is_dist=True, **QUICK)(lambda x: launch(kernel, x))
    step(torch.zeros(64))


@pytest.mark.parametrize(("kind", "index"), [("more", 2), ("order", 0), ("warps", 0)])
def test_different_candidate_lists_are_named_with_their_first_difference(kind: str, index: int):
    """All ranks raise the same error, which says the site and where the lists part."""
    same_error(on_ranks(2, _different_lists, kind), "RankMismatchError", "add_kernel[64", f"first difference at index {index}")


def _one_misses(rank: int, stays: bool) -> Any:
    kernel = autotuned(blocks=(16, 32))
    n = [64]
    step = contextual_autotune(is_dist=True, **QUICK)(lambda: launch(kernel, torch.zeros(n[0])))
    step()
    if rank == 1:
        n[0] = 128  # only here the key changes
    began = time.monotonic()
    value = step()
    seconds = time.monotonic() - began
    if stays:
        dist.barrier()
    return value[0].item(), len(kernel.cache), seconds, is_unpatched()


@pytest.mark.parametrize("stays", [True, False])
def test_a_rank_that_misses_alone_goes_on_alone(stays: bool):
    """Ranks that hit make an ordinary call and do not know; the one that misses learns it, after the deadline if they are gone."""
    for outcome in on_ranks(2, _one_misses, stays):
        (value, n_known, seconds, unpatched), *_ = values([outcome])
        assert (value, n_known, unpatched) == (1.0, 1, True)
        assert seconds < (DEADLINE_S / 2 if stays else 3 * DEADLINE_S)


def _new_shapes_on_one_rank(rank: int) -> Any:
    kernel = autotuned(blocks=(16, 32), key=())
    step = contextual_autotune(is_dist=True, **QUICK)(lambda x: launch(kernel, x))
    times = []
    for n in (64, 65, 66):
        began = time.monotonic()
        step(torch.zeros(n if rank == 1 else 64))
        times.append(time.monotonic() - began)
    dist.barrier()
    kernel.cache.clear()
    step(torch.zeros(128))
    return times, len(step.records)


def test_new_shapes_on_one_rank_without_a_miss_cost_no_deadline():
    """The ranks' calls differ and nothing misses: the rank learns that the other has passed, and from then on meets only for misses."""
    got = values(on_ranks(2, _new_shapes_on_one_rank))
    assert all(seconds < DEADLINE_S / 2 for seconds in got[1][0][1:])
    assert got[0][1] == got[1][1] == 2


def _late_on_one_first_on_the_other(rank: int) -> Any:
    kernel = autotuned(blocks=(16, 32))
    n = [64]

    @contextual_autotune(is_dist=True, **QUICK)
    def step(x: torch.Tensor) -> float:
        y = launch(kernel, torch.zeros(n[0]))
        dist.all_reduce(y)
        return float(y[0])

    step(torch.zeros(1))
    n[0] = 128
    return step(torch.zeros(1 + rank)), best(kernel)


def test_a_call_that_is_new_on_one_rank_and_misses_on_both():
    """One rank hears the call from its beginning and the other from the miss on: they replay the same number of times."""
    got = values(on_ranks(2, _late_on_one_first_on_the_other))
    assert got[0] == got[1]
    assert got[0][0] == 2.0


def _different_closures(rank: int) -> Any:
    kernel = autotuned(blocks=(16, 32))

    def one(x: torch.Tensor) -> None:
        launch(kernel, x)

    def other(x: torch.Tensor) -> None:
        launch(kernel, x)

    contextual_autotune(is_dist=True, **QUICK)([one, other][rank])(torch.zeros(64))


def test_ranks_in_different_closures_go_on_untuned():
    """Each waits for the other: no error, and the line names both closures."""
    for outcome in on_ranks(2, _different_closures):
        assert not outcome.error, outcome.message
        assert re.search(r"rank 0 waits in \S*one, call 1 and rank 1 waits in \S*other, call 1", outcome.log)


def _captured(rank: int, monkeypatched: bool) -> Any:
    kernel = autotuned(blocks=(16, 32))
    step = contextual_autotune(is_dist=True, **QUICK)(lambda x: launch(kernel, x))
    original, torch.cuda.is_current_stream_capturing = torch.cuda.is_current_stream_capturing, lambda: True
    with pytest.raises(CaptureError, match="captured"):
        step(torch.zeros(64))
    torch.cuda.is_current_stream_capturing = original
    step(torch.zeros(64))
    torch.cuda.is_current_stream_capturing = lambda: True
    known = step(torch.zeros(64))
    with pytest.raises(CaptureError, match="before the capture"):
        step(torch.zeros(128))
    return known[0].item(), len(kernel.cache), is_unpatched()


def test_graph_capture_uses_known_winners_and_tunes_nothing():
    """Under capture a known key runs, also at new shapes of other arguments; an unknown one is a clear error."""
    assert values(on_ranks(2, _captured, True)) == [(1.0, 1, True)] * 2
