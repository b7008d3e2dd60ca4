"""Steps for ``bench_first_hit.py``: one kernel, eleven kernels with callees in other modules, and a
public library's.

Kernels are written to files, because Triton reads their source there. The fake H200 driver compiles
them and launches nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Step = Callable[..., Any]
N_KERNELS = 11

_HELPERS = """
import triton
import triton.language as tl

SCALE: tl.constexpr = tl.constexpr({k}.5)
OFFSETS = (1, 2, {k})

@triton.jit
def scaled_{k}(x):
    return tl.exp2(x * SCALE)

@triton.jit
def summed_{k}(x, y):
    return scaled_{k}(x) + scaled_{k}(y)
"""
_KERNELS = """
import triton
import triton.language as tl

from hit_helpers_0 import scaled_0, summed_0
from hit_helpers_1 import scaled_1, summed_1
from hit_helpers_2 import scaled_2, summed_2

SIZES = [(block, warps) for block in (16, 32, 64, 128) for warps in (1, 2, 4, 8)]
CONFIGS = [triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in SIZES]

def small_enough(configs, named, **kwargs):
    return [each for each in configs if each.kwargs["BLOCK"] <= 64]
"""
_KERNEL = """
@triton.heuristics({{"IS_EVEN": lambda args: args["n"] % 2 == 0}})
@triton.autotune(configs=CONFIGS, key=["n", "m"], prune_configs_by={{"early_config_prune": small_enough}})
@triton.jit
def kernel_{k}(a, b, c, n, m, BLOCK: tl.constexpr, IS_EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(a + at, mask=at < n), tl.load(b + at, mask=at < n)
    if IS_EVEN:
        x = summed_{first}(x, y) + scaled_{second}(y)
    for _ in range({k}, m):
        x += summed_{second}(x, scaled_{third}(y))
    tl.store(c + at, x, mask=at < n)
"""  # noqa: E501


def step_of(name: str, folder: Path) -> tuple[Step, tuple[Any, ...]]:
    """A step and its arguments: "one", "eleven" or "gla", which needs the package fla-core."""
    return _gla() if name == "gla" else _written(1 if name == "one" else N_KERNELS, folder)


def _written(n_kernels: int, folder: Path) -> tuple[Step, tuple[Any, ...]]:
    files = {f"hit_helpers_{k}": _HELPERS.format(k=k) for k in range(3)}
    parts = [
        _KERNEL.format(k=k, first=k % 3, second=(k + 1) % 3, third=(k + 2) % 3)
        for k in range(N_KERNELS)
    ]
    files["hit_kernels"] = "\n".join([_KERNELS, *parts])
    for module, text in files.items():
        # Ranks and later processes find the files of the first one.
        if not (folder / f"{module}.py").exists():
            (folder / f"{module}.py").write_text(text)
    sys.path.insert(0, str(folder))
    kernels = [
        getattr(importlib.import_module("hit_kernels"), f"kernel_{k}") for k in range(n_kernels)
    ]

    def step(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        for kernel in kernels:
            kernel[(1,)](a, b, c, 64, 64)

    return step, (torch.zeros(64), torch.zeros(64), torch.zeros(64))


def _gla() -> tuple[Step, tuple[Any, ...]]:
    """Gated linear attention, forward and backward, of flash-linear-attention."""
    # The library asks the device at import.
    torch.cuda.get_device_name = lambda device=None: "NVIDIA H200"
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    chunk_gla = importlib.import_module("fla.ops.gla").chunk_gla
    for name, module in list(sys.modules.items()):
        if name.startswith("fla") and hasattr(module, "custom_device_ctx"):
            vars(module)["custom_device_ctx"] = lambda *_: contextlib.nullcontext()

    def step(*inputs: torch.Tensor) -> None:
        q, k, v, g = inputs
        out, _ = chunk_gla(q, k, v, torch.nn.functional.logsigmoid(g))
        out.sum().backward()

    torch.manual_seed(0)
    return step, tuple(
        torch.randn(1, 128, 2, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(4)
    )
