"""Kernels and recorded launches, for the tests that predict the launches of other configs."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from dist_tune.compiler.patches import replaced
from dist_tune.configs import as_configs, distinct
from dist_tune.runtime.recording import LaunchRecorder
from dist_tune.sites.site import Site


@triton.jit
def copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, ROWS: tl.constexpr = 1):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


@triton.jit
def twice(x):
    return 2 * x


@triton.jit
def act_kernel(x_ptr, ACT: tl.constexpr, block: tl.constexpr):
    at = tl.arange(0, block)
    tl.store(x_ptr + at, ACT(tl.load(x_ptr + at)))


def tiles(*blocks: int, **options: Any) -> list[dict[str, Any]]:
    return [{"config": triton.Config({"BLOCK": block}, **options)} for block in blocks]


def record(function: Any, space: Any, candidate: int, *args: Any) -> tuple[Site, LaunchRecorder]:
    """A function's launches with one of its configs."""
    configs, texts = distinct(as_configs(space, function))
    site, recorder = Site("f[]", "f", "[]", configs, texts), LaunchRecorder()
    with (
        replaced(JITFunction, "run", lambda run: lambda *args, **kwargs: None),
        recorder.recording(),
        recorder.running(site.label, candidate),
    ):
        function(*args, **configs[candidate])
    return site, recorder


def x_and_y() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(256), torch.zeros(256, dtype=torch.float16)
