"""Kernels as libraries wrap them: tuners with a run of their own, and heuristics around the tuner."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import KernelInterface

from dist_tune import contextual_autotune
from dist_tune.testing import Mode, values
from tests.ranks.kernels import add_kernel, autotuned, best, configs, launch
from tests.ranks.worlds import on_ranks

N = 64
QUICK: Any = {"is_dist": True, "n_repeat": 1, "n_warmup": 0}


class Filed(Autotuner):  # type: ignore[misc]  # Triton is not typed
    """As libraries make it that keep configs in files of their own: a copy of Triton's run, with another key."""

    def own_key(self, named: dict[str, Any]) -> str:
        return f"{named['n'] // 10}_{named['x_ptr'].dtype}"

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.nargs: Any = dict(zip(self.arg_names, args, strict=False))
        if len(self.configs) > 1:
            key = self.own_key({**self.nargs, **kwargs})
            if key not in self.cache:
                self.cache[key] = self.prune_configs(kwargs)[0]
            config = self.cache[key]
        else:
            config = self.configs[0]
        self.best_config = config
        result = self.fn.run(*args, **kwargs, **config.all_kwargs())
        self.nargs = None
        return result


def filed(*blocks: int) -> Any:
    """Such a kernel."""
    return Filed(add_kernel, add_kernel.arg_names, configs(*blocks), ["n"], None, None)


class _Inherits(Filed):
    """A policy of its own on top of that run."""


class _Searches(Autotuner):  # type: ignore[misc]  # Triton is not typed
    """Looks nothing up: what it would launch cannot be known."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        self.best_config = self.prune_configs(kwargs)[0]
        return self.fn.run(*args, **kwargs, **self.best_config.all_kwargs())


def _own_run(rank: int, kind: str) -> Any:
    kernel, code = globals()[kind](add_kernel, add_kernel.arg_names, configs(16, 32, 64), ["n"], None, None), Filed.run.__code__
    alone = globals()[kind](add_kernel, add_kernel.arg_names, configs(16), ["n"], None, None)
    step = contextual_autotune(**QUICK)(lambda x: launch(alone, launch(kernel, x))[0].item())
    called = [step(torch.zeros(n)) for n in (N, N, N + 5, 2 * N)]
    outside = launch(kernel, torch.zeros(6 * N))[0].item()
    same = [kernel.cache[key].kwargs["BLOCK"] for key in kernel.cache]
    return called, outside, list(kernel.cache), same[:-1], same[-1], kernel.nargs, len(step.records), Filed.run.__code__ is code


@pytest.mark.parametrize("kind", ["Filed", "_Inherits"])
@pytest.mark.parametrize("mode", [pytest.param("interpret", marks=pytest.mark.once), "fake"])
def test_a_tuner_with_a_run_of_its_own_is_tuned_under_its_own_key(kind: str, mode: Mode):
    """Sizes of one key share a config; outside of the step the library tunes as ever, and its function has its own code again."""
    outcomes = on_ranks(2, _own_run, kind, mode=mode)
    first, second = values(outcomes)
    assert first == second or mode == "fake"
    called, outside, keys, chosen, left, nargs, n_records, is_restored = first
    assert mode == "fake" or (called, outside) == ([2.0] * 4, 1.0)
    assert keys == [f"{n // 10}_torch.float32" for n in (N, 2 * N, 6 * N)]
    assert (chosen, left) == (second[3], 16)
    assert (nargs, n_records, is_restored) == (None, 2, True)
    assert "add_kernel['6_torch.float32']" in outcomes[0].log


class _Late(_Searches):
    """Looks its key up when all is done."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        self.best_config = self.cache.setdefault(str(self.nargs["n"]), self.prune_configs(kwargs)[0])
        return self.fn.run(*args, **kwargs, **self.best_config.all_kwargs())


class _Checks(_Late):
    """Asks what only the kernel itself can answer, and not one that stands for it."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, Autotuner):
            raise TypeError(f"{self} is no kernel")
        self.best_config = self.cache.setdefault(str(args[2]), self.prune_configs(kwargs)[0])
        return self.fn.run(*args, **kwargs, **self.best_config.all_kwargs())


def _unheard(rank: int, kind: str) -> Any:
    kernel = globals()[kind](add_kernel, add_kernel.arg_names, configs(16, 32), ["n"], None, None)
    step = contextual_autotune(**QUICK)(lambda x: launch(kernel, x)[0].item())
    return [step(torch.zeros(N)) for _ in range(2)], kernel.best_config.kwargs["BLOCK"]


@pytest.mark.once
@pytest.mark.parametrize("kind", ["_Searches", "_Late", "_Checks"])
def test_a_tuner_that_looks_nothing_up_is_named(kind: str):
    """Its kernels are launched as without dist_tune; the log says why nothing is tuned, and does not say that nothing was launched."""
    outcomes = on_ranks(2, _unheard, kind)
    assert values(outcomes) == [([1.0, 1.0], 16)] * 2
    for each in outcomes:
        (told,) = (line for line in each.log.splitlines() if "Left alone are kernels of " in line)
        assert f"tests.ranks.test_library_wrappers.{kind}" in told
        assert "which tune in a run of their own" in told


class _Wrapper(KernelInterface):  # type: ignore[misc]  # Triton is not typed
    """As libraries put around a kernel: delegates what it does not have."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.kernel.run(*args, **kwargs)


def _wrapped(rank: int) -> Any:
    kernel = _Wrapper(autotuned(blocks=(16, 32, 64)))
    heuristics = triton.heuristics({"BLOCK": lambda args: args["n"]})(add_kernel)
    inner = triton.autotune(configs=[triton.Config({}, num_warps=w) for w in (4, 8)], key=["n"])(heuristics)

    @contextual_autotune(**QUICK)
    def step(x: torch.Tensor) -> tuple[float, bool]:
        y = launch(kernel, x)
        z = torch.empty_like(y)
        inner[(1,)](y, z, N)
        return z[0].item(), kernel.best_config in kernel.configs and inner.best_config.num_warps in (4, 8)

    return [step(torch.zeros(N)) for _ in range(2)], len(best(kernel))


def test_wrapped_kernels_and_heuristics_inside():
    """``best_config`` is found through a wrapper, and where heuristics lie between the tuner and the function."""
    assert values(on_ranks(2, _wrapped)) == [([(2.0, True)] * 2, 1)] * 2


@triton.jit
def _even_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr = False):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = (at < n) | EVEN
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=keep) + 1.0, mask=keep)


def _heuristics_above(rank: int) -> Any:
    kernel = autotuned(_even_kernel, blocks=(16, 32))
    above = triton.heuristics({"EVEN": lambda args: args["n"] % 32 == 0})(kernel)
    step = contextual_autotune(**QUICK)(lambda x: launch(kernel, launch(above, x))[0].item())
    return [step(torch.zeros(N)) for _ in range(2)], len(best(kernel)), step.records[0].n_variants


@pytest.mark.parametrize("mode", [pytest.param("interpret", marks=pytest.mark.once), "fake"])
def test_heuristics_above_the_tuner(mode: Mode):
    """One site with and without the constant that they give; the log tells of the variant that is compiled without it."""
    outcomes = on_ranks(2, _heuristics_above, mode=mode)
    if mode == "interpret":
        assert values(outcomes) == [([2.0, 2.0], 1, 1)] * 2
        return
    for (_, n_keys, n_variants), each in zip(values(outcomes), outcomes, strict=True):
        assert (n_keys, n_variants) == (1, 2)
        assert "variant=2 is compiled: EVEN is not given\n" in each.log


@triton.jit
def _double(value):
    return 2.0 * value


@triton.jit
def _negative(value):
    return -value


@triton.autotune(configs=configs(16, 32), key=["n", "ACTIVATION"])
@triton.jit
def _activated_kernel(x_ptr, y_ptr, n, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, ACTIVATION(tl.load(x_ptr + at, mask=at < n)), mask=at < n)


def _activations(rank: int) -> Any:
    @contextual_autotune(**QUICK)
    def step(x: torch.Tensor) -> list[float]:
        y, z = torch.empty_like(x), torch.empty_like(x)
        for source, target, activation in ((x, y, _double), (y, z, _negative)):
            _activated_kernel[lambda meta: (triton.cdiv(N, meta["BLOCK"]),)](source, target, N, activation)
        return [y[0].item(), z[0].item()]

    return [step(torch.ones(N)) for _ in range(2)], len(step.records), len(_activated_kernel.cache)


@pytest.mark.parametrize("mode", [pytest.param("interpret", marks=pytest.mark.once), "fake"])
def test_a_function_in_the_key(mode: Mode):
    """One site for each: both have their configs after the first call."""
    for called, *counts in values(on_ranks(2, _activations, mode=mode)):
        assert counts == [2, 2]
        assert mode == "fake" or called == [[2.0, -2.0]] * 2
