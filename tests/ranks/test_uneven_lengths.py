"""A public library's kernels in a step of uneven lengths: the norm of flash-linear-attention (fla-core), compiled for an H200."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from triton.runtime.driver import driver

from dist_tune import contextual_autotune, power_of_two
from dist_tune.testing import values
from tests.worlds import on_fake

pytestmark = [pytest.mark.processes, pytest.mark.slow]  # the library's kernels take seconds each to compile

HEADS, DIM = 8, 128
LENGTHS = [[700, 1900, 1000, 1300], [1000, 1500, 760, 2000]]
"""Of each rank: 3 to 8 blocks of 2048 rows, which the library calls NB and has in the key."""


def norm_of_fla() -> Any:
    """``rms_norm``, imported as on a machine without a GPU: the fake one has no properties for fla to read."""
    fake = driver.active
    driver.set_active(None)
    try:
        with warnings.catch_warnings(action="ignore"):
            from fla.modules import layernorm
    finally:
        driver.set_active(fake)
    for kernel in (layernorm.layer_norm_fwd_kernel, layernorm.layer_norm_bwd_kernel.fn):
        kernel.configs = kernel.configs[:2]  # each takes a second to compile
    return layernorm.rms_norm


def uneven(rank: int) -> tuple[list[int], list[tuple[str, str]]]:
    rms_norm, weight = norm_of_fla(), torch.ones(DIM, dtype=torch.bfloat16, requires_grad=True)

    @contextual_autotune(is_dist=True, bucket={"layer_norm_*": {"NB": power_of_two}})
    def step(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = rms_norm(x, weight, None)
        (gradient,) = torch.autograd.grad(y.sum(), weight)
        dist.all_reduce(gradient)
        return y.detach()

    shapes = [step(torch.zeros(1, n, HEADS, DIM, dtype=torch.bfloat16)).shape[1] for n in LENGTHS[rank]]
    keys = [(each.kernel.rpartition(".")[2], each.key.split(",")[1]) for each in step.records if not each.is_recalled]
    return shapes, keys


def test_a_library_s_norm_is_tuned_once_for_each_power_of_two():
    """Forward and backward on two ranks with lengths of their own; the library is used as it is, but for the number of configs."""
    for lengths, (shapes, keys) in zip(LENGTHS, values(on_fake(2, uneven)), strict=True):
        assert shapes == lengths
        assert sorted(keys) == [(f"layer_norm_{way}_kernel", nb) for way in ("bwd", "fwd") for nb in ("4", "8")]
