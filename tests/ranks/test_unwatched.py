"""Tunings that no thread watches: those that were never made, and those of a process that can start no thread."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch

from dist_tune import contextual_autotune
from dist_tune.testing import values
from tests.ranks.kernels import autotuned, launch
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once


def test_without_threads_a_tuning_goes_on_unwatched():
    """A process that can start no more threads is warned once, and no config is blamed."""
    assert values(on_ranks(1, has_no_threads, is_dist=False)) == [([None] * 3, ["dist_tune does not watch for configs that never return"])]


def has_no_threads(rank: int) -> Any:
    own = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if "watchdog" in thread.name:
            raise RuntimeError("can't start new thread")
        own(thread)

    pytest.MonkeyPatch().setattr(threading.Thread, "start", start)
    kernel = autotuned()
    step = contextual_autotune(n_repeat=1, n_warmup=0)(lambda: launch(kernel, torch.zeros(64)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step()
    return [each.failure for each in step.records[0].candidates], [str(each.message).partition(":")[0] for each in told]
