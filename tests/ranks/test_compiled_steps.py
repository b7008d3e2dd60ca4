"""``torch.compile`` inside a tuned closure, on a host where Dynamo does not know Triton's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.runtime.autotuner import Autotuner

from dist_tune.testing import on_ranks, values
from tests.ranks.kernels import autotuned, is_unpatched, launch, tuned

pytestmark = pytest.mark.once


def _compiled_inside(rank: int) -> Any:
    kernel = autotuned(blocks=(16, 32))

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return launch(kernel, x) * 2

    inner = torch.compile(doubled, backend="eager")
    step = tuned(None, lambda x: inner(x))
    before = dict(vars(Autotuner.run))
    got = [step(torch.zeros(n))[0].item() for n in (64, 64, 32)]
    return got, len(step.records), is_unpatched(), vars(Autotuner.run) == before


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_compiled_step_that_launches_kernels(n_ranks: int):
    """Dynamo runs the patched launch as it is, whose constants it cannot read; the kernel is tuned, and Triton is as before."""
    assert values(on_ranks(n_ranks, _compiled_inside)) == [([2.0, 2.0, 2.0], 2, True, True)] * n_ranks
