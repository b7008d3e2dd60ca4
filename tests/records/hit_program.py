"""A step of two kernels with one callee, for what a first call that hits reads and imports; without
the libraries of the tests.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import triton
import triton.language as tl

from dist_tune import contextual_autotune

HEAVY = {"sklearn", "scipy", "pandas", "rich", "typer", "click", "jinja2", "matplotlib", "IPython"}
"""Packages of the command line, of reports and of tuning, none of which a hit needs."""


def calls_in(function: Callable[[], Any], *names: str) -> Counter[str]:
    """How often ``function`` calls Python functions of these names."""
    counted: Counter[str] = Counter()

    def count(frame: FrameType, event: str, what: Any) -> None:
        if event == "call" and frame.f_code.co_name in names:
            counted[frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return counted


@triton.jit
def shifted(x):
    """A callee that both kernels have."""
    return x + 1.0


CONFIGS = [triton.Config({"BLOCK": block}) for block in (16, 32)]


@triton.autotune(configs=CONFIGS, key=["n"])
@triton.jit
def first_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, shifted(tl.load(x_ptr + at, mask=at < n)), mask=at < n)


@triton.autotune(configs=CONFIGS, key=["n"])
@triton.jit
def second_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, shifted(shifted(tl.load(x_ptr + at, mask=at < n))), mask=at < n)


def first_call(rank: int = 0, *, is_dist: bool = True) -> dict[str, Any]:
    """Tune or hit, and count."""

    def step(x: torch.Tensor) -> None:
        y = torch.empty_like(x)
        first_kernel[(1,)](x, y, 64)
        second_kernel[(1,)](x, y, 64)

    tuned = contextual_autotune(is_dist=is_dist, n_repeat=1, n_warmup=0)(step)
    before, x = set(sys.modules), torch.zeros(64)
    names = ("record_in", "read_code", "_settings_build_values", "environment", "start")
    counted = calls_in(lambda: tuned(x), *names)
    return {
        "imported": sorted(set(sys.modules) - before),
        "loaded": sorted(HEAVY & sys.modules.keys()),
        "counted": counted,
        "hits": [each.is_recalled for each in tuned.records],
    }
