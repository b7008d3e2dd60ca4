"""The first call of a process on several ranks: what it does not do, because a hit is to cost milliseconds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dist_tune.runtime import kernel_identity
from dist_tune.testing import values
from tests.ranks.kernels import add_kernel, autotuned, launch, tuned
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once


def _identities_read(rank: int) -> Any:
    read: list[Any] = []
    own = vars(kernel_identity)["anatomy"]

    def noted(parts: Any) -> Any:
        read.append(parts)
        return own(parts)

    vars(kernel_identity)["anatomy"] = noted
    kernel, x = autotuned(add_kernel), torch.zeros(64)
    step = tuned(None, lambda: launch(kernel, x))
    step()
    return len(step.records), len(read)


def test_a_kernel_that_ranks_have_in_common_is_read_once():
    """Its fingerprint is its record's key as well; that the parts of one kernel are digested apart is half a millisecond of a hit."""
    assert values(on_ranks(2, _identities_read, mode="fake")) == [(1, 0)] * 2
