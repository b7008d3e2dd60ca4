"""Online tuning on a real GPU: events that are read calls later, and no synchronisation in the
step's thread. Needs one.

python -m pytest -m gpu tests/gpu/test_online.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton

from dist_tune import contextual_autotune
from tests.steps import add_kernel, autotuned

pytestmark = pytest.mark.gpu
N = 1 << 22


def training(tuner: Callable[[Any], Any], kernel: Any) -> tuple[Any, torch.Tensor]:
    """A step with an optimizer and a kernel, and its parameter."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(N, device="cuda"))
    optimizer = torch.optim.AdamW([weight], lr=1e-3, fused=True)

    @tuner
    def step() -> torch.Tensor:
        shifted = torch.empty_like(weight)
        kernel[lambda meta: (triton.cdiv(N, meta["BLOCK"]),)](weight.detach(), shifted, N)
        loss = (weight * shifted).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, weight


def test_a_training_step_is_tuned_while_it_runs():
    """Losses and parameters are the untuned loop's to the bit; after the first call nothing in the
    step's thread waits for the device.
    """
    kernel = autotuned(add_kernel, (32, 256, 1024, 4096))
    step, weight = training(contextual_autotune(cache=False), kernel)
    losses = [step()]
    torch.cuda.set_sync_debug_mode("error")
    try:
        while not step.records and len(losses) < 5000:
            losses.append(step())
            time.sleep(1e-3)  # so that the host does not run thousands of steps ahead
    finally:
        torch.cuda.set_sync_debug_mode("default")
    plain, expected = training(lambda step: step, autotuned(add_kernel, (32,)))
    assert torch.equal(torch.stack(losses), torch.stack([plain() for _ in losses]))
    assert torch.equal(weight, expected)
    (record,) = step.records
    assert record.best.config.startswith(("BLOCK=1024", "BLOCK=4096", "BLOCK=256"))
