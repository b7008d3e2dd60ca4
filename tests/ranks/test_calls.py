"""Who calls a tuned closure, and how: subgroups, one process, nesting, threads, methods, reset, random numbers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton

from dist_tune import NestedTuningError, contextual_autotune
from dist_tune.testing import values
from tests.ranks.kernels import autotuned, best, launch
from tests.ranks.worlds import on_ranks

pytestmark = pytest.mark.once

QUICK: Any = {"n_repeat": 1, "n_warmup": 0}


def _late_key(rank: int) -> Any:
    kernel = autotuned(blocks=(16, 32))
    n = 64
    runs = []

    @contextual_autotune(is_dist=True, **QUICK)
    def step() -> float:
        runs.append(torch.rand(()).item())
        y = launch(kernel, torch.zeros(n))
        dist.all_reduce(y)
        return float(y[0])

    step()
    step()
    n, before = 128, len(runs)
    value = step()
    return len(kernel.cache), best(kernel), value, len(runs) - before


def test_a_new_key_in_a_later_call_is_tuned():
    """A closure without arguments gives no warning that its shapes changed; the miss itself starts the tuning."""
    got = values(on_ranks(2, _late_key))
    assert got[0] == got[1]
    assert got[0][0] == 2
    assert got[0][2] == 2.0


def _subgroup(rank: int) -> Any:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    kernel = autotuned(blocks=(16, 32))
    mine = groups[rank // 2]

    @contextual_autotune(is_dist=True, group=mine, **QUICK)
    def step(x: torch.Tensor) -> torch.Tensor:
        y = launch(kernel, x)
        dist.all_reduce(y, group=mine)
        return y

    if rank < 2:
        step(torch.zeros(64))
        alone = best(kernel)
    dist.barrier()
    if rank >= 2:
        step(torch.zeros(128))
    with pytest.raises(ValueError, match="not in the group"):
        contextual_autotune(is_dist=True, group=groups[1 - rank // 2])(lambda: None)()
    return alone if rank < 2 else best(kernel)


def test_a_subgroup_of_the_world_tunes_without_the_others():
    """Ranks 0 and 1 tune while 2 and 3 wait in a barrier of the world; a group one is not in is refused."""
    got = values(on_ranks(4, _subgroup))
    assert got[0] == got[1]
    assert got[2] == got[3]


def _nested(rank: int) -> Any:
    outer_kernel, inner_kernel = autotuned(blocks=(16, 32)), autotuned(blocks=(32, 64))
    pair = dist.new_group([0, 1])
    inner = contextual_autotune(is_dist=True, group=pair, **QUICK)(lambda x: launch(inner_kernel, x))
    outer = contextual_autotune(is_dist=True, **QUICK)(lambda x: inner(launch(outer_kernel, x)))
    y = outer(torch.zeros(64))
    steady = outer(torch.zeros(64))
    alone = contextual_autotune(**QUICK)(lambda x: inner(x))
    with pytest.raises(NestedTuningError, match=r"ranks \[0, 1\]"):
        alone(torch.zeros(64))
    return best(outer_kernel), best(inner_kernel), y[0].item(), steady[0].item(), len(inner.records), len(outer.records)


def test_a_nested_closure_is_tuned_by_the_outer_one():
    """The inner closure joins the outer tuning; inside one that does not ask its ranks it is refused."""
    got = values(on_ranks(2, _nested))
    assert got[0] == got[1]
    assert got[0][2:] == (2.0, 2.0, 0, 2)


def _threads(rank: int) -> Any:
    tuned, other = autotuned(blocks=(16, 32)), autotuned(blocks=(16, 32), do_bench=lambda call, quantiles: (call(), [1.0] * 3)[1])
    ready, go = threading.Event(), threading.Event()

    @contextual_autotune(**QUICK)
    def step(x: torch.Tensor) -> torch.Tensor:
        ready.set()
        go.wait(10)
        return launch(tuned, x)

    def vanilla() -> None:
        ready.wait(10)
        launch(other, torch.zeros(64))  # in another thread: left to Triton, also while a closure runs
        go.set()

    thread = threading.Thread(target=vanilla)
    thread.start()
    step(torch.zeros(64))
    thread.join()
    return len(best(tuned)), len(best(other)), len(other.configs_timings), len(step.records)


def test_other_threads_are_left_to_triton():
    """A kernel launched by another thread while a closure is tuned is tuned by Triton's own benchmark."""
    assert values(on_ranks(1, _threads, is_dist=False)) == [(1, 1, 2, 1)]


class _Layer:
    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    @contextual_autotune(is_dist=True, **QUICK)
    def forward(self, x: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
        """Adds one."""
        y = launch(self.kernel, x)
        return launch(self.kernel, y) if twice else y


def _method(rank: int) -> Any:
    layer = _Layer(autotuned(blocks=(16, 32)))
    y = layer.forward(torch.zeros(64), twice=True)
    return y[0].item(), len(best(layer.kernel)), _Layer.forward.__name__, _Layer.forward.__doc__, hasattr(_Layer.forward, "__wrapped__")


def test_methods_keep_their_name_and_documentation():
    """A decorated method is bound as any other, and takes keywords."""
    assert values(on_ranks(2, _method)) == [(2.0, 1, "forward", "Adds one.", True)] * 2


def _reset(rank: int) -> Any:
    kernel = autotuned(blocks=(16, 32, 64))
    total = torch.zeros(64)
    resets: list[int] = []

    def reset() -> None:
        resets.append(1)
        total.zero_()

    @contextual_autotune(is_dist=True, n_repeat=1, n_warmup=1, reset=reset, search="exhaustive")
    def step() -> float:
        total.add_(launch(kernel, torch.zeros(64)))
        return float(total[0])

    return step(), total[0].item(), len(resets), step(), len(resets)


def test_reset_is_called_before_every_replay_but_the_first():
    """The caller's state is left to the first run; afterwards the closure has acted once."""
    assert values(on_ranks(2, _reset)) == [(1.0, 1.0, 1 + 3 * 2 + 1, 2.0, 8)] * 2


def test_kernels_of_several_triton_versions_are_heard_the_same_way():
    """The copy of the tuning key agrees with the one Autotuner.run looks up."""
    from dist_tune.runtime.kernel import tuning_key

    class Spy(dict[Any, Any]):
        def __contains__(self, key: object) -> bool:
            raise KeyError(key)

    kernel = autotuned(key=("n", "x_ptr"))
    kernel.cache = Spy()
    x = torch.zeros(4)
    for args, kwargs in (((x, x, 4), {}), ((x,), {"y_ptr": x.half(), "n": 4})):
        with pytest.raises(KeyError) as looked_up:
            kernel.run(*args, grid=(1,), warmup=False, **kwargs)
        assert looked_up.value.args[0] == tuning_key(kernel, args, {**kwargs, "grid": (1,), "warmup": False})
    assert triton.Config({}).num_warps == 4
