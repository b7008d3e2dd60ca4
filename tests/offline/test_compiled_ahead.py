"""Kernels of tuning scripts are compiled before they are launched."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from dist_tune.offline import tune_kernel
from dist_tune.testing import FakeH200, on_ranks, values
from tests.offline_kernels import scale_space, scaled

pytestmark = [pytest.mark.once, pytest.mark.processes]


def _compiled_ahead(rank: int) -> Any:
    launched: list[int] = []
    make = scaled(launched, lambda: len(FakeH200.launches))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        best = tune_kernel(scale_space(), make, num_iters=2)
    log = Path(os.environ["DIST_TUNE_LOG_DIR"], f"rank-{rank}.log").read_text()
    return best, "out of resource" in log, "arange's range must be a power of 2" in log


def test_kernels_are_compiled_before_they_are_launched_and_what_does_not_fit_never_is():
    """Real sm_90 code: a config too large for shared memory and one that does not compile are dropped, with the reason."""
    best, has_too_large, has_uncompiled = values(on_ranks(1, _compiled_ahead, mode="fake", is_dist=False))[0]
    assert best["BLOCK"] in (64, 128, 256)
    assert (has_too_large, has_uncompiled) == (True, True)
