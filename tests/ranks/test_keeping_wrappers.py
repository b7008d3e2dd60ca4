"""Wrappers and functions that keep what the first launch of a kernel has compiled, and ask no tuner again."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import triton
from triton.runtime.jit import KernelInterface

from dist_tune import contextual_autotune
from dist_tune.testing import values
from tests.ranks.kernels import accumulate_kernel, autotuned, best, configs, launch
from tests.ranks.test_library_wrappers import QUICK, Filed, N
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once


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
    tuner = Filed(accumulate_kernel, accumulate_kernel.arg_names, configs(16, 32, 64), ["n"], None, None)
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


@pytest.mark.parametrize("kind", ["tuner", "own run", "in place", "disputed"])
def test_what_a_wrapper_keeps_of_replays_is_taken_from_it(kind: str):
    """Each replay asks the tuner, also after ranks had different configs, and then the winner is kept; what was kept before is, too."""
    outcomes = on_ranks(2, _kept, kind)
    first, second = values(outcomes)
    assert first == second
    called = [1.0, 2.0, 3.0] if kind == "in place" else [1.0] * 3
    is_tuned = kind != "in place"
    assert first == (called, True, True, first[3], int(is_tuned))
    for each in outcomes:
        assert "accumulate_kernel" in each.log
        assert ("not tuned" in each.log) != is_tuned


class _Engine:
    """A part of the step whose method has the name of a launch."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.n_alive = kernel, 0

    def run(self, x: torch.Tensor) -> torch.Tensor:
        large = x + 1.0
        known = weakref.ref(large)
        y = launch(self.kernel, large)
        del large
        self.n_alive += known() is not None
        return y


def _released(rank: int) -> Any:
    engine = _Engine(autotuned(blocks=(16, 32, 64)))
    return contextual_autotune(**QUICK)(lambda x: engine.run(x)[0].item())(torch.ones(N)), engine.n_alive


def test_variables_of_the_step_live_no_longer_for_the_search_for_wrappers():
    """Reading a frame's variables keeps them as long as it runs, up to Python 3.12; a tuning would run out of memory by it."""
    assert values(on_ranks(2, _released)) == [(3.0, 0)] * 2


def _alone_for_long(rank: int) -> Any:
    kernel, tuned = _Keeps(autotuned(accumulate_kernel, blocks=(16, 32, 64))), []
    step = contextual_autotune(**QUICK)(lambda x: launch(kernel, x, torch.zeros_like(x))[0].item())
    for i in range(40):
        step(torch.ones(N if i < 2 or (rank == 1 and i < 30) else 2 * N))
        tuned.append(len(kernel.fn.cache))
    return tuned.index(2) if 2 in tuned else None, len(step.records)


def test_a_wrapper_around_an_untuned_kernel_keeps_nothing():
    """A rank that is alone with a size asks for a meeting now and then, and tunes the size when its peer has come to it."""
    assert values(on_ranks(2, _alone_for_long)) == [(34, 2)] * 2


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
