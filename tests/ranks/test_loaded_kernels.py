"""Kernels stay on the device as long as their function lives: a CUDA graph holds no reference to what it launches. Fake driver."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import triton

from dist_tune import contextual_autotune
from dist_tune.testing import FakeH200
from tests.steps import add_kernel, autotuned, launch
from tests.worlds import on_each_rank

pytestmark = pytest.mark.processes


class Modules:
    """The modules on the device, as Triton 3.9 and later unload those of kernels that are freed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.n_loaded, self.unloaded = 0, list[int]()
        patch.setattr(FakeH200.utils, "load_binary", self.load, raising=False)
        patch.setattr(FakeH200.utils, "unload_module", self.unloaded.append, raising=False)

    def load(self, *given: Any) -> tuple[int, int, int, int, int]:
        self.n_loaded += 1
        return self.n_loaded, 2, 64, 0, 1024


@on_each_rank(modes=("fake",), is_dist=False, n=1)
def test_no_kernel_is_unloaded_while_its_function_lives(rank: int):
    """Neither one that lost nor one that the step launches by itself while its candidates are compiled, at two keys and under capture."""
    kernel, own = autotuned(triton.jit(add_kernel.fn), blocks=(16, 32, 64)), list[Any]()

    @contextual_autotune()
    def step(x: torch.Tensor) -> None:
        y = launch(kernel, x)
        own.extend(id(kernel.fn[(1,)](x, y, x.numel(), **config.all_kwargs())) for config in kernel.configs)

    with pytest.MonkeyPatch.context() as patch:
        modules = Modules(patch)
        for n in (64, 128):
            step(torch.zeros(n))
            gc.collect()
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        step(torch.zeros(64))
        gc.collect()
        assert modules.n_loaded >= 3
        assert modules.unloaded == []
        assert len({*own}) == 3
