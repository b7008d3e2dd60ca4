"""Kernels and functions with large spaces, for the tests of guided search on real ranks."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dist_tune import contextual_autotune
from dist_tune.testing import ExactTime, FakeH200

SPACE = [
    triton.Config({"BLOCK": block, "PAD": pad, "FLAT": flat}, num_warps=warps)
    for block in (16, 32, 64, 128, 256)
    for pad in (1, 2, 4, 8, 16)
    for flat in (False, True)
    for warps in (1, 2, 4, 8)
]
"""200 configs."""
BEST = {"BLOCK": 128, "PAD": 4, "FLAT": True, "num_warps": 4}


@triton.jit
def padded_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, PAD: tl.constexpr, FLAT: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + PAD, mask=at < n)


def cost(block: int, pad: int, *, flat: bool, warps: int) -> float:
    """Steps away from the best config."""
    return abs(block.bit_length() - 8) + abs(pad.bit_length() - 3) + abs(warps.bit_length() - 3) + (not flat)


def launch_ms(src: Any, metadata: Any) -> float:
    """Milliseconds of a launch on the fake device: 4 for the best config, 0.8 more for each step away from it; 1 of other kernels."""
    constants = {src.fn.arg_names[place]: value for (place,), value in src.constants.items()}
    if "PAD" not in constants:
        return 1.0
    return 4.0 + 0.8 * cost(constants["BLOCK"], constants["PAD"], flat=constants["FLAT"], warps=metadata.num_warps)


def padded(**options: Any) -> tuple[Any, Any]:
    """A kernel of 200 configs, and a step that launches it; from here on, time is exact."""
    FakeH200.launch_ms = staticmethod(launch_ms)
    kernel = triton.autotune(configs=SPACE, key=["n"])(padded_kernel)
    x, y = torch.zeros(256), torch.zeros(256)
    step = contextual_autotune(**{"n_warmup": 1, "n_repeat": 3, **options})(lambda: kernel[(1,)](x, y, 256))
    return kernel, step


def sleep_steps(n_steps: float) -> None:
    """A function's run: 2 ms, and 1 ms more for each step, once time is exact."""
    ExactTime.pass_ms(2.0 + n_steps)
