"""Kernels as libraries wrap them: tuners with a run of their own, caches above the tuner, heuristics around it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import KernelInterface

from dist_tune import contextual_autotune
from dist_tune.testing import Mode, values
from tests.ranks.kernels import accumulate_kernel, add_kernel, autotuned, best, configs, launch
from tests.ranks.worlds import on_ranks

N = 64
QUICK: Any = {"is_dist": True, "n_repeat": 1, "n_warmup": 0}


class _Filed(Autotuner):  # type: ignore[misc]  # Triton is not typed
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
    return _Filed(add_kernel, add_kernel.arg_names, configs(*blocks), ["n"], None, None)


class _Inherits(_Filed):
    """A policy of its own on top of that run."""


class _Searches(Autotuner):  # type: ignore[misc]  # Triton is not typed
    """Looks nothing up: what it would launch cannot be known."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        self.best_config = self.prune_configs(kwargs)[0]
        return self.fn.run(*args, **kwargs, **self.best_config.all_kwargs())


def _own_run(rank: int, kind: str) -> Any:
    kernel, code = globals()[kind](add_kernel, add_kernel.arg_names, configs(16, 32, 64), ["n"], None, None), _Filed.run.__code__
    alone = globals()[kind](add_kernel, add_kernel.arg_names, configs(16), ["n"], None, None)
    step = contextual_autotune(**QUICK)(lambda x: launch(alone, launch(kernel, x))[0].item())
    called = [step(torch.zeros(n)) for n in (N, N, N + 5, 2 * N)]
    outside = launch(kernel, torch.zeros(6 * N))[0].item()
    same = [kernel.cache[key].kwargs["BLOCK"] for key in kernel.cache]
    return called, outside, list(kernel.cache), same[:-1], same[-1], kernel.nargs, len(step.records), _Filed.run.__code__ is code


@pytest.mark.parametrize("kind", ["_Filed", "_Inherits"])
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


class _Keeps(KernelInterface):  # type: ignore[misc]  # Triton is not typed
    """As flag_gems' LibEntry: asks the tuner once for each kind of arguments, and launches the same kernel from then on."""

    def __init__(self, kernel: Any) -> None:
        self.fn, self.kept = kernel, (dict[Any, Any](), dict[Any, Any]())

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if args[2] in self.kept[0]:
            config = self.kept[0][args[2]]
            return self.fn.fn.run(*args, **{**kwargs, "grid": kwargs["grid"]}, **config.all_kwargs())
        result = self.fn.run(*args, **kwargs)
        self.kept[0][args[2]] = self.fn.best_config
        return result


def _kept(rank: int, kind: str) -> Any:
    tuner = _Filed(accumulate_kernel, accumulate_kernel.arg_names, configs(16, 32, 64), ["n"], None, None)
    timed: Any = {"do_bench": lambda call, quantiles: (call(), [1.0] * 3)[1]}
    kernel = _Keeps(tuner if kind == "own run" else autotuned(accumulate_kernel, blocks=(16, 32, 64), **timed))
    launch(kernel, torch.ones(2 * N), torch.zeros(2 * N))  # the library's own choice: it stays
    before = kernel.kept[0][2 * N]
    source = torch.zeros(N)
    if kind == "disputed":
        kernel.fn.cache[N, "torch.float32", "torch.float32"] = kernel.fn.configs[rank]

    @contextual_autotune(**QUICK)
    def step(x: torch.Tensor) -> float:
        launch(kernel, torch.ones(2 * N), torch.zeros(2 * N))
        total = launch(kernel, torch.ones(N), x if kind == "in place" else torch.zeros(N))
        return launch(kernel, total, torch.zeros(N))[0].item()

    called = [step(source) for _ in range(3)]
    (best,) = (kernel.fn.cache[key] for key in kernel.fn.cache if str(key).startswith(("(64", "6_")))
    return called, kernel.kept[0][N] is best, kernel.kept[0][2 * N] is before, best.kwargs["BLOCK"], len(step.records)


@pytest.mark.once
@pytest.mark.parametrize("kind", ["tuner", "own run", "in place", "disputed"])
def test_what_a_wrapper_keeps_of_replays_is_taken_from_it(kind: str):
    """Each replay asks the tuner, also after ranks had different configs, and then the winner is kept; what was kept before is, too."""
    outcomes = on_ranks(2, _kept, kind)
    first, second = values(outcomes)
    assert first == second
    called = [1.0, 2.0, 3.0] if kind == "in place" else [1.0] * 3
    assert first == (called, True, True, first[3], 1)
    for each in outcomes:
        assert "accumulate_kernel" in each.log
        assert "is not tuned" not in each.log


class _Interrupted(_Keeps):
    """Another thread's call ends while the first launch is under way."""

    n_runs = 0

    def run(self, *args: Any, **kwargs: Any) -> Any:
        result, self.n_runs = super().run(*args, **kwargs), self.n_runs + 1
        if self.n_runs == 1:
            kept = self.kept[0].pop(args[2])
            thread = threading.Thread(target=_raising)
            thread.start()
            thread.join()
            self.kept[0][args[2]] = kept
        return result


def _raising() -> None:
    with pytest.raises(ZeroDivisionError):
        contextual_autotune()(lambda: 1 / 0)()


def _beside_threads(rank: int) -> Any:
    kernel = _Interrupted(autotuned(accumulate_kernel, blocks=(16, 32, 64)))
    step = contextual_autotune(**QUICK)(lambda x: launch(kernel, x, torch.zeros(N))[0].item())
    return step(torch.ones(N)), kernel.fn.cache[N, "torch.float32", "torch.float32"] is kernel.kept[0].get(N)


@pytest.mark.once
def test_what_a_wrapper_keeps_is_taken_from_it_though_another_threads_call_ends_meanwhile():
    """Each thread takes away what its own launches have left."""
    outcomes = on_ranks(2, _beside_threads)
    assert [called for called, _ in values(outcomes)] == [1.0] * 2
    for each in outcomes:
        assert "is not tuned" not in each.log


_launched: dict[Any, Any] = {}


def _remembering(kernel: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As functions do that keep compiled kernels in a module's dict."""
    n = x.numel()
    if (rule := _launched.get((kernel, n))) is None:
        launch(kernel, x, y)
        _launched[kernel, n] = kernel.best_config
    else:
        kernel.fn[(triton.cdiv(n, rule.kwargs["BLOCK"]),)](x, y, n, **rule.all_kwargs())
    return y


def _remembered(rank: int) -> Any:
    kernel, other = autotuned(accumulate_kernel, blocks=(16, 32, 64)), autotuned(blocks=(16, 32, 64))
    step = contextual_autotune(**QUICK)(lambda x: _remembering(kernel, launch(other, x), torch.zeros(N))[0].item())
    return [step(torch.zeros(N)) for _ in range(3)], best(other)


@pytest.mark.once
def test_a_function_that_keeps_its_first_launch_is_told_of():
    """What no replay launches is not tuned, which is said; the other kernels of the step are."""
    outcomes = on_ranks(2, _remembered)
    first, second = values(outcomes)
    assert first == second
    assert first[0] == [1.0] * 3
    for each in outcomes:
        (line,) = [line for line in each.log.splitlines() if " is not tuned: the first run launched it and " in line]
        assert "WARNING" in line
        assert "accumulate_kernel" in line or "site 2 " in line


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
        assert "variant=2 is compiled: EVEN was True, is not given\n" in each.log


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
