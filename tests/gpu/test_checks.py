"""What only a real GPU shows of checks and of arguments that kernels change: its allocator, its
NaN. Needs one.

python -m pytest -m gpu tests/gpu/test_checks.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton

from dist_tune import autotune, matches
from tests.steps import BLOCKS, QUICK, accumulate_kernel, add_kernel, failures

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("n", [33, 1 << 20, 100_000_003])
@pytest.mark.parametrize(
    "check",
    [matches(lambda x: x + 1), lambda result, x: torch.equal(result, x + 1), lambda x: x.cpu() + 1],
    ids=["reference", "check", "on the host"],
)
def test_the_allocator_saves_no_config(n: int, check: Any):
    """It gives a kernel that writes nothing the memory of the last result: without a checker that
    one would be right.

    A reference may compute on the host: what it expects is compared on the device of the result.
    """

    def shifted(x: torch.Tensor, n_written: int) -> torch.Tensor:
        out = torch.empty_like(x)
        if n_written:
            add_kernel[(triton.cdiv(n_written, 256),)](x, out, n_written, BLOCK=256)
        return out

    x = torch.randn(n, device="cuda")
    shifted(x, n)
    assert torch.equal(shifted(x, 0), x + 1)
    step: Any = autotune(
        [{"n_written": each} for each in (n, 0, n - 1)], None, check=check, **QUICK
    )(shifted)
    assert torch.equal(step(x), x + 1)
    assert [bool(each) for each in failures(step)] == [False, True, True]


FORMATS = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz"
    " float8_e8m0fnu"
)


@pytest.mark.parametrize("name", FORMATS.split())
def test_what_was_not_written_is_seen_in_every_format(name: str):
    """Its NaN goes through this device's copies unchanged."""
    source = (
        torch.arange(1, 1001, device="cuda").remainder(7).add(1).float().to(getattr(torch, name))
    )

    @autotune(
        [{"writes": True}, {"writes": False}],
        None,
        check=matches(lambda source: source.clone()),
        **QUICK,
    )
    def step(source: torch.Tensor, writes: bool) -> torch.Tensor:
        out = torch.empty_like(source)
        return out.copy_(source) if writes else out

    step(source)
    right, wrong = failures(step)
    assert right is None
    assert "1000 of 1000 elements are NaN" in str(wrong)


def test_a_kernel_that_adds_in_place_does_so_once_and_one_that_harms_its_input_is_undone():
    """Also where its runs are queued ahead of the device; torch does not see what a kernel
    writes.
    """
    c, x = torch.ones(1 << 20, device="cuda"), torch.randn(1 << 20, device="cuda")
    before = x.clone()

    @autotune(BLOCKS, None, check=lambda c, x: c + x, n_warmup=2, n_repeat=5, cache=False)
    def step(c: torch.Tensor, x: torch.Tensor, block: int) -> torch.Tensor:
        for target in (c, x)[: 1 + (block == 2)]:
            accumulate_kernel[(triton.cdiv(c.numel(), 256 * block),)](
                x, target, c.numel(), BLOCK=256 * block
            )
        return c

    assert torch.equal(step(c, x), 1 + before)
    assert torch.equal(step(c, x), 1 + before + before)
    assert torch.equal(x, before)
    assert ["it changes its argument x" in str(each) for each in failures(step)] == [
        False,
        True,
        False,
    ]
