"""Steps under ``torch.inference_mode``, whose tensors count no versions and may not be written to outside of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton

from dist_tune import contextual_autotune
from dist_tune.testing import on_ranks, values
from tests.ranks.kernels import accumulate_kernel, autotuned, launch

pytestmark = [pytest.mark.once, pytest.mark.processes]

QUICK: Any = {"n_repeat": 2, "n_warmup": 1}


def _inferred(rank: int, where: str, has_option: bool) -> Any:
    option: Any = {"restore_value": ["y_ptr"]} if has_option else {}
    total, other = autotuned(accumulate_kernel, blocks=(16, 32), **option), autotuned(blocks=(16, 32))
    if not has_option:
        total = triton.jit(accumulate_kernel.fn)

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if has_option:
            launch(total, x, y)
        else:
            total[(4,)](x, y, 64, BLOCK=16)
        return launch(other, y)

    if where == "inside":
        run = torch.inference_mode()(run)
    step: Any = contextual_autotune(**QUICK)(run)
    if where == "around":
        step = torch.inference_mode()(step)
    with torch.inference_mode(mode=where == "arguments"):
        x, y = torch.ones(64), torch.zeros(64)
    got = [step(x, y)[0].item(), y[0].item()]
    step(x, y)
    return [*got, y[0].item(), len(other.cache)]


@pytest.mark.parametrize("where", ["around", "inside", "arguments"])
@pytest.mark.parametrize("has_option", [True, False])
def test_inference_mode_changes_nothing(where: str, has_option: bool):
    """An argument that a kernel adds to holds what one run leaves, whatever is an inference tensor."""
    assert values(on_ranks(1, _inferred, where, has_option, is_dist=False)) == [[2.0, 1.0, 2.0, 1]]
