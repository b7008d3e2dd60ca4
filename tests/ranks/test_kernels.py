"""Kernels as libraries decorate and launch them: wrappers, hooks, restored tensors, subclasses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner

from dist_tune import contextual_autotune
from tests.ranks.kernels import accumulate_kernel, add_kernel, autotuned, best, configs, launch
from tests.ranks.world import on_ranks, values

QUICK: Any = {"n_repeat": 1, "n_warmup": 0}


def _tuned(kernel: Any, closure: Any = None, **options: Any) -> Any:
    return contextual_autotune(is_dist=True, **{**QUICK, **options})(closure or (lambda x: launch(kernel, x)))


def _heuristics(rank: int) -> Any:
    size = {"BLOCK": lambda args: 32 if args["n"] > 32 else 16}
    warps = [triton.Config({}, num_warps=w) for w in (1, 2, 4)]
    inside = triton.autotune(configs=warps, key=["n"])(triton.heuristics(size)(add_kernel))
    outside = triton.heuristics({"n": lambda args: args["x_ptr"].numel()})(triton.autotune(configs=configs(16, 32), key=["n"])(add_kernel))
    x = torch.zeros(64)

    @contextual_autotune(is_dist=True, **QUICK)
    def step() -> list[float]:
        y, z = torch.empty_like(x), torch.empty_like(x)
        inside[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](x, y, 64)
        outside[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](x_ptr=y, y_ptr=z)
        return [y[0].item(), z[-1].item()]

    got = step()
    again = step()
    return got, again, len(inside.cache), len(outside.fn.cache), [r.kernel for r in step.records]


def test_heuristics_inside_and_outside():
    """Heuristics under the autotuner and over it, with arguments by keyword."""
    got = values(on_ranks(2, _heuristics))
    assert got[0] == got[1]
    assert got[0][:4] == ([1.0, 2.0], [1.0, 2.0], 1, 1)
    assert all(name.endswith("add_kernel") for name in got[0][4])


def _restored(rank: int, name: str) -> Any:
    options: dict[str, Any] = {name: ["y_ptr"]}
    kernel = autotuned(accumulate_kernel, configs=configs(16, 32, 64), **options)
    follower = autotuned(blocks=(32, 64))
    total = torch.full((64,), 5.0)
    seen = []

    @contextual_autotune(is_dist=True, n_repeat=2, n_warmup=1)
    def step(x: torch.Tensor) -> torch.Tensor:
        launch(kernel, x, total)
        y = launch(follower, total)
        seen.append(y[0].item())
        dist.all_reduce(y)
        return y

    y = step(torch.ones(64))
    tuned_total = total[0].item()
    step(torch.ones(64))
    return tuned_total, y[0].item(), set(seen[:-1]), total[0].item()


def test_restore_value_puts_back_at_the_end_of_a_replay():
    """Kernels later in the closure read what the launch wrote, in every replay; after the tuning the kernel ran once."""
    assert values(on_ranks(2, _restored, "restore_value")) == [(6.0, 14.0, {7.0}, 7.0)] * 2


def test_reset_to_zero_zeroes_once_before_the_run_that_counts():
    """As vanilla Triton leaves it: the first result starts from zero, later calls accumulate."""
    assert values(on_ranks(2, _restored, "reset_to_zero")) == [(1.0, 4.0, {2.0}, 2.0)] * 2


def _restored_twice(rank: int) -> Any:
    kernel = autotuned(accumulate_kernel, blocks=(16, 32), restore_value=["y_ptr"])
    total = torch.zeros(64)

    def closure(x: torch.Tensor) -> float:
        launch(kernel, x, total)
        launch(kernel, x, total)
        return total[0].item()

    return _tuned(kernel, closure)(torch.ones(64)), total[0].item()


def test_restore_value_of_a_kernel_launched_twice():
    """The second launch of a replay builds on the first, and the replay is undone as a whole."""
    assert values(on_ranks(2, _restored_twice)) == [(2.0, 2.0)] * 2


@triton.jit
def _maybe_kernel(x_ptr, bias_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + at, mask=at < n)
    if bias_ptr is not None:
        value += tl.load(bias_ptr + at, mask=at < n)
    tl.store(y_ptr + at, value, mask=at < n)


def _none_among_tensors(rank: int) -> Any:
    names = ["bias_ptr", "y_ptr"]
    kernel = triton.autotune(configs=configs(16, 32), key=["n"], reset_to_zero=names, restore_value=names)(_maybe_kernel)
    x, y = torch.ones(64), torch.zeros(64)
    _tuned(kernel, lambda: kernel[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](x, None, y, 64))()
    return y[0].item(), len(kernel.cache)


def test_none_among_restored_and_zeroed_tensors():
    """An optional tensor that is None is left out, in every Triton version."""
    assert values(on_ranks(2, _none_among_tensors)) == [(1.0, 1)] * 2


def _hooks(rank: int) -> Any:
    calls: list[str] = []

    def pre(full: dict[str, Any], reset_only: bool = False) -> None:
        calls.append("reset" if reset_only else f"pre {full['BLOCK']} {full['n']}")

    def post(full: dict[str, Any], exception: Exception | None) -> None:
        calls.append(f"post {type(exception).__name__}")

    def config_hook(full: dict[str, Any]) -> None:
        calls.append(f"config {full['BLOCK']}")

    candidates = [*configs(16), *configs(32, pre_hook=config_hook)]
    kernel = triton.autotune(configs=candidates, key=["n"], pre_hook=pre, post_hook=post)(add_kernel)
    step = _tuned(kernel)
    step(torch.zeros(64))
    tuned = list(calls)
    calls.clear()
    step(torch.zeros(64))
    return tuned, calls, best(kernel)


def test_hooks_run_as_in_vanilla_triton():
    """Pre- and post-hook around every launch of the tuning, the reset once before the final run, the config's hook always."""
    for tuned, later, winner in values(on_ranks(2, _hooks)):
        one, other = ["pre 16 64", "post NoneType"], ["config 32", "pre 32 64", "post NoneType"]
        final = ["reset"] + (["config 32"] if winner == [32] else [])
        assert tuned == one + one + other + final
        assert later == final[1:]


class _Counting(Autotuner):  # type: ignore[misc]  # Triton is not typed
    """Overrides ``run`` as flash-linear-attention's tuner does."""

    n_runs = 0

    def run(self, *args: Any, **kwargs: Any) -> Any:
        type(self).n_runs += 1
        return super().run(*args, **kwargs)


class _Pruning(Autotuner):  # type: ignore[misc]  # Triton is not typed
    """Overrides ``prune_configs``, and never asks Triton's."""

    def prune_configs(self, kwargs: dict[str, Any]) -> list[triton.Config]:
        return [config for config in self.configs if config.kwargs["BLOCK"] > 16]


class _OwnLoop(Autotuner):  # type: ignore[misc]  # Triton is not typed
    """Overrides ``run`` without asking Triton's: nobody could catch a miss."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        config = next(iter(self.prune_configs(kwargs)))
        return self.fn.run(*args, **kwargs, **config.all_kwargs())


def _subclass(rank: int, kind: str) -> Any:
    kernel = globals()[kind](add_kernel, add_kernel.arg_names, configs(16, 32, 64), ["n"], None, None)
    step = _tuned(kernel)
    y = step(torch.zeros(64))
    return y[0].item(), best(kernel), [len(r.candidates) for r in step.records]


@pytest.mark.parametrize(("kind", "candidates"), [("_Counting", [3]), ("_Pruning", [2]), ("_OwnLoop", [])])
def test_subclasses_of_the_autotuner(kind: str, candidates: list[int]):
    """A subclass with a run or a pruning of its own is tuned; one that never asks Triton's run keeps its own way."""
    got = values(on_ranks(2, _subclass, kind))
    assert got[0] == got[1]
    assert got[0][0] == 1.0
    assert got[0][2] == candidates


def _few_configs(rank: int) -> Any:
    single = autotuned(blocks=(32,))
    pruned = autotuned(blocks=(16, 32), prune_configs_by={"early_config_prune": lambda configs, named, **kw: configs[1:]})
    repeated = autotuned(configs=configs(32, 32, 32))
    runs = []

    def closure(x: torch.Tensor) -> float:
        runs.append(1)
        return launch(repeated, launch(pruned, launch(single, x)))[0].item()

    step = _tuned(single, closure)
    return step(torch.zeros(64)), len(runs), best(pruned), best(repeated), len(single.cache), [len(r.candidates) for r in step.records]


def test_kernels_with_one_config_need_no_replay():
    """One config, one left after pruning, one repeated: nothing to choose, so the closure runs for discovery and once more."""
    assert values(on_ranks(2, _few_configs)) == [(3.0, 2, [32], [32], 0, [1, 1])] * 2


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


class _Function(torch.autograd.Function):
    kernel: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return launch(_Function.kernel, x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return launch(_Function.kernel, grads[0].contiguous()[:32].clone()).repeat(2)


def _backward(rank: int) -> Any:
    _Function.kernel = autotuned(blocks=(16, 32))
    x = torch.zeros(64, requires_grad=True)

    @contextual_autotune(is_dist=True, **QUICK)
    def step() -> float:
        (gradient,) = torch.autograd.grad(_Function.apply(x).sum(), x)
        return float(gradient[0])

    return step(), len(_Function.kernel.cache), len(step.records)


def test_kernels_of_a_backward_pass():
    """Forward and backward are two keys of one kernel, tuned in the same replays."""
    assert values(on_ranks(2, _backward)) == [(2.0, 2, 2)] * 2


def _made_anew(rank: int) -> Any:
    kernels = []

    def closure(x: torch.Tensor) -> float:
        kernels.append(autotuned(blocks=(16, 32)))
        return launch(kernels[-1], x)[0].item()

    step = _tuned(None, closure)
    return step(torch.zeros(64)), len(kernels), len(step.records), len(kernels[-1].cache)


def test_a_kernel_decorated_anew_in_every_replay():
    """Code and configs make the site, not the object."""
    assert values(on_ranks(2, _made_anew)) == [(1.0, 1 + 2 + 1, 1, 1)] * 2


def _descriptor_hook(full: dict[str, Any]) -> None:
    for name in ("x_desc", "y_desc"):
        full[name].block_shape = [full["BLOCK"], full["BLOCK"]]


@triton.jit
def _copy_kernel(x_desc, y_desc, n, BLOCK: tl.constexpr):
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

    step = _tuned(kernel, closure)
    step()
    return [c.failure for c in step.records[0].candidates], bool((x == y).all())


@pytest.mark.parametrize("mode", ["interpret", "fake"])
def test_hooks_that_set_the_block_shape_of_descriptors(mode: str):
    """What such a hook sets is part of what is compiled, so it also runs before compilation."""
    for failures, is_equal in values(on_ranks(2, _descriptors, mode=mode)):
        assert failures == [None] * 3
        assert is_equal or mode == "fake"


def _imports(rank: int) -> Any:
    import sys

    return Autotuner.run.__module__, "dist_tune.contextual" in sys.modules


def test_importing_changes_nothing():
    """Triton's class is as Triton made it."""
    assert values(on_ranks(1, _imports, is_dist=False)) == [("triton.runtime.autotuner", True)]
