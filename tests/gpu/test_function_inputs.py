"""Arguments that real kernels change: copies on the GPU, and what there is no room for. Needs one.

python -m pytest -m gpu tests/gpu/test_function_inputs.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton

from dist_tune import autotune
from tests.steps import accumulate_kernel

pytestmark = pytest.mark.gpu
BLOCKS = [{"block": block} for block in (256, 512, 1024)]


def _tuned(harmful: int, check: Any) -> Any:
    @autotune(BLOCKS, None, check=check, n_warmup=2, n_repeat=5, cache=False)
    def step(c: torch.Tensor, x: torch.Tensor, block: int) -> torch.Tensor:
        for target in (c, x)[: 1 + (block == harmful)]:
            accumulate_kernel[(triton.cdiv(c.numel(), block),)](x, target, c.numel(), BLOCK=block)
        return c

    return step


@pytest.mark.parametrize("check", [None, lambda c, x: c + x])
def test_a_kernel_that_adds_in_place_does_so_once(check: Any):
    """Also where its runs are queued ahead of the device."""
    c, x = torch.ones(1 << 20, device="cuda"), torch.randn(1 << 20, device="cuda")
    step = _tuned(0, check)
    assert torch.equal(step(c, x), 1 + x)
    assert torch.equal(step(c, x), 1 + x + x)


def test_a_kernel_that_harms_its_input_is_dropped_and_undone():
    """Torch does not count what a kernel writes."""
    c, x = torch.ones(1 << 20, device="cuda"), torch.randn(1 << 20, device="cuda")
    before = x.clone()
    step = _tuned(512, lambda c, x: c + x)
    assert torch.equal(step(c, x), 1 + before)
    assert torch.equal(x, before)
    assert "it changes its argument x" in step.records[0].candidates[1].failure


def test_an_argument_that_no_run_changes_is_not_copied():
    """Nor widened where its bits are summed."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    x = torch.zeros(int(free * 0.3), dtype=torch.uint8, device="cuda")
    torch.cuda.reset_peak_memory_stats()

    @autotune(BLOCKS, None, n_warmup=0, n_repeat=1, cache=False)
    def reads(x: torch.Tensor, block: int) -> torch.Tensor:
        return x[:block].sum()

    reads(x)
    assert torch.cuda.max_memory_allocated() < 1.1 * x.numel()
