"""Settings that ranks do not have in common, or that one of them cannot read: told, and the tuning goes on."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from typing import Any

import pytest
import torch

from dist_tune.testing import values
from tests.ranks.kernels import autotuned, launch, tuned
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once


def _told(rank: int, of_rank_1: dict[str, str]) -> Any:
    if rank == 1:
        os.environ.update(of_rank_1)
    with contextlib.redirect_stderr(io.StringIO()) as terminal, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        kernels = [autotuned(blocks=(16, 32)), autotuned(blocks=(16, 32))]
        got = [tuned(None, lambda x, kernel=kernel: launch(kernel, x))(torch.zeros(64))[0].item() for kernel in kernels]
    lines = [line for line in terminal.getvalue().splitlines() if "settings differ" in line]
    return got, lines, [str(each.message) for each in warned if "DIST_TUNE" in str(each.message)]


def test_settings_that_differ_are_told_once():
    """By the first rank, with the values and a rank of each; folders may differ."""
    env = {"DIST_TUNE_DEADLINE_S": "4", "DIST_TUNE_ALWAYS_TUNE": "yes", "DIST_TUNE_LOG_LEVEL": "INFO"}
    got = values(on_ranks(2, _told, env, env={"DIST_TUNE_VERBOSITY": "normal"}))
    line = (
        "dist_tune: settings differ between ranks: DIST_TUNE_DEADLINE_S is 3 on rank 0, 4 on rank 1; DIST_TUNE_ALWAYS_TUNE is 0 on "
        "rank 0, 1 on rank 1. Give all ranks the same environment"
    )
    assert got == [([1.0, 1.0], [line], []), ([1.0, 1.0], [], [])]


def test_a_value_that_one_rank_cannot_read():
    """That rank warns once and takes the default, which all hear of; no rank ends."""
    got = values(
        on_ranks(2, _told, {"DIST_TUNE_ALWAYS_TUNE": "perhaps", "DIST_TUNE_DEADLINE_S": ""}, env={"DIST_TUNE_VERBOSITY": "normal"})
    )
    assert [each[0] for each in got] == [[1.0, 1.0]] * 2
    assert got[0][1] == [
        "dist_tune: settings differ between ranks: DIST_TUNE_DEADLINE_S is 3 on rank 0, 30 on rank 1. Give all ranks the same environment"
    ]
    (warning,) = got[1][2]
    assert warning == (
        "dist_tune: DIST_TUNE_ALWAYS_TUNE='perhaps' cannot be read: need 1, 0, true, false, yes, no, on or off. The default is used"
    )
