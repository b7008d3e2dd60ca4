"""Kernels behind other things: subclasses of the autotuner, keywords, backward passes, descriptors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner

from dist_tune import contextual_autotune
from dist_tune.testing import Mode, values
from tests.ranks.kernels import add_kernel, autotuned, best, configs, launch, tuned
from tests.ranks.worlds import on_ranks

QUICK: Any = {"n_repeat": 1, "n_warmup": 0}


class _Pruning(Autotuner):  # type: ignore[misc]  # Triton is not typed
    """Overrides ``prune_configs``, and never asks Triton's."""

    def prune_configs(self, kwargs: dict[str, Any]) -> list[triton.Config]:
        return [config for config in self.configs if config.kwargs["BLOCK"] > 16]


def _subclass(rank: int) -> Any:
    kernel = _Pruning(add_kernel, add_kernel.arg_names, configs(16, 32, 64), ["n"], None, None)
    step = tuned(kernel)
    return step(torch.zeros(64))[0].item(), best(kernel), [len(r.candidates) for r in step.records]


def test_a_subclass_with_a_pruning_of_its_own():
    """What it keeps is tuned."""
    got = values(on_ranks(2, _subclass))
    assert got[0] == got[1]
    assert got[0][::2] == (1.0, [2])


def _few_configs(rank: int) -> Any:
    single = autotuned(blocks=(32,))
    pruned = autotuned(blocks=(16, 32), prune_configs_by={"early_config_prune": lambda configs, named, **kw: configs[1:]})
    repeated = autotuned(configs=configs(32, 32, 32))
    runs = []

    def closure(x: torch.Tensor) -> float:
        runs.append(1)
        return launch(repeated, launch(pruned, launch(single, x)))[0].item()

    step = tuned(single, closure)
    return step(torch.zeros(64)), len(runs), best(pruned), best(repeated), len(single.cache), [len(r.candidates) for r in step.records]


def test_kernels_with_one_config_need_no_replay():
    """One config, one left after pruning, one repeated: nothing to choose: the closure runs for discovery, as the probe, and once more."""
    assert values(on_ranks(2, _few_configs)) == [(3.0, 3, [32], [32], 0, [1, 1])] * 2


def _keywords(rank: int) -> Any:
    kernel = autotuned(blocks=(16, 32))
    x, y = torch.zeros(64), torch.zeros(64)

    @contextual_autotune(is_dist=True, **QUICK)
    def step(kernel: Any, *, x: torch.Tensor) -> float:
        kernel[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](n=64, y_ptr=y, x_ptr=x)
        kernel.run(x, y, 64, grid=(4,), warmup=False)
        return y[-1].item()

    return step(kernel=kernel, x=x), best(kernel), len(step.records)


def test_kernels_and_arguments_by_keyword():
    """The closure takes the kernel by keyword, and the kernel its arguments."""
    got = values(on_ranks(2, _keywords))
    assert got[0] == got[1]
    assert got[0][0] == 1.0
    assert got[0][2] == 1


def _descriptor_hook(full: dict[str, Any]) -> None:
    for name in ("x_desc", "y_desc"):
        full[name].block_shape = [full["BLOCK"], full["BLOCK"]]


@triton.jit
def _copy_kernel(x_desc, y_desc, n: tl.constexpr, BLOCK: tl.constexpr):
    for i in range(0, n, BLOCK):
        for j in range(0, n, BLOCK):
            y_desc.store([i, j], x_desc.load([i, j]))


def _descriptors(rank: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    kernel = triton.autotune(configs=configs(16, 32, 64, pre_hook=_descriptor_hook), key=["n"])(_copy_kernel)
    x = torch.randn(64, 64)
    y = torch.zeros(64, 64)
    dummy = [1, 1]

    def closure() -> None:
        x_desc = TensorDescriptor(x, list(x.shape), list(x.stride()), dummy)
        kernel[(1,)](x_desc, TensorDescriptor(y, list(y.shape), list(y.stride()), dummy), 64)

    step = tuned(kernel, closure)
    step()
    return [c.failure for c in step.records[0].candidates], bool((x == y).all())


@pytest.mark.parametrize("mode", ["interpret", "fake"])
def test_hooks_that_set_the_block_shape_of_descriptors(mode: Mode):
    """What such a hook sets is part of what is compiled, so it also runs before compilation."""
    for failures, is_equal in values(on_ranks(2, _descriptors, mode=mode)):
        assert failures == [None] * 3
        assert is_equal or mode == "fake"
