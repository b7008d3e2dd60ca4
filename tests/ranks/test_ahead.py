"""``tune_all``: a list of calls made on all ranks, one after the other."""

from __future__ import annotations

import gc
import time
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton

from dist_tune import PeerFailedError, autotune, contextual_autotune, to_hashable, tune_all
from tests.steps import autotuned, best, launch, tuned
from tests.worlds import log, on_each_rank

SIZES = (64, 128, 256)


def slow(rank: int, ms: dict[int, tuple[float, float]]) -> Any:
    """A kernel whose launches take these milliseconds with a block on each of two ranks."""

    def hook(args: Any) -> None:
        time.sleep(ms[args["BLOCK"]][rank] / 1e3)

    return autotuned(configs=[triton.Config({"BLOCK": block}, pre_hook=hook) for block in ms])


def counted(kernel: Any, **options: Any) -> tuple[Any, list[int]]:
    """A step that all ranks tune, and the sizes of its runs."""
    runs = list[int]()

    def body(x: torch.Tensor) -> torch.Tensor:
        runs.append(x.numel())
        return launch(kernel, x)

    return tuned(None, body, **options), runs


@on_each_rank()
def test_each_call_is_tuned_and_the_slowest_rank_decides(rank: int):
    """Ranks are fast with other blocks and take the one in the middle for all sizes; a second list of these makes plain calls."""
    kernel = slow(rank, {16: (1.0, 9.0), 32: (4.0, 4.0), 64: (9.0, 1.0)})
    step, runs = counted(kernel)
    found = tune_all(step, [(torch.zeros(n),) for n in SIZES])
    assert found == step.records
    assert [each.best.config[:8] for each in found] == ["BLOCK=32"] * 3
    n_runs = len(runs)
    assert n_runs > 2 * len(SIZES)
    assert tune_all(step, ({"x": torch.zeros(n)} for n in SIZES)) == []
    assert runs[n_runs:] == [*SIZES]
    return [each.key for each in found], best(kernel)


@on_each_rank()
def test_records_on_disk_hit(rank: int):
    """A program that starts again replays nothing, and gets the records."""
    first = tune_all(counted(autotuned())[0], map(torch.zeros, SIZES))
    step, runs = counted(autotuned())
    again = tune_all(step, map(torch.zeros, SIZES))
    assert [each.best.config for each in again] == [each.best.config for each in first]
    assert runs == [*SIZES]


@on_each_rank()
def test_a_function_in_a_group_of_its_own(rank: int):
    """The other rank makes other calls."""
    scaled = autotune([{"scale": 2.0}, {"scale": 3.0}], to_hashable, n_warmup=0, n_repeat=1)(lambda x, scale=0.0: x * scale)
    groups = [dist.new_group([0]), dist.new_group([1])]
    sizes = SIZES[: 1 + 2 * rank]
    assert len(tune_all(partial(scaled, autotune_pg=groups[rank]), map(torch.zeros, sizes))) == len(sizes)
    assert len(tune_all(scaled, map(torch.zeros, SIZES))) == 3  # of the world's


@on_each_rank()
def test_a_call_that_one_rank_makes_is_not_tuned(rank: int):
    """The others are in a collective of the program: one line says so, and the config in use is the first."""
    kernel = autotuned()
    step, runs = counted(kernel)
    found = tune_all(step, map(torch.zeros, SIZES[: 3 - rank]))
    dist.all_reduce(torch.zeros(1))
    assert ({*runs}, len(found)) == ({*SIZES[: 3 - rank]}, 2)
    assert rank == 1 or "ranks [1] have passed it" in log()


@on_each_rank()
def test_an_error_in_the_middle(rank: int):
    """It is raised with the number of the call, and the rank that meets this one in it is told."""
    kernel = autotuned()

    def body(x: torch.Tensor) -> torch.Tensor:
        if rank == 1 and x.numel() == 128:
            raise ValueError("a bug")
        return launch(kernel, x)

    with pytest.raises(ValueError if rank == 1 else PeerFailedError, match="a bug") as raised:
        tune_all(tuned(None, body), map(torch.zeros, SIZES))
    assert "in call 2 of 3 of tune_all" in raised.value.__notes__


class Held(dict[str, Any]):
    """Memory whose life can be watched."""


@on_each_rank()
def test_arguments_and_values_are_free_after_each_call(rank: int):
    """References alone free them, also where the call was tuned."""
    kernel, held, alive = autotuned(), list[Any](), list[int]()

    def made(n: int) -> tuple[Any, ...]:
        alive.append(sum(each() is not None for each in held))
        argument = Held(x=torch.zeros(n))
        held.append(weakref.ref(argument))
        return (argument,)

    def body(given: Held) -> Held:
        value = Held(y=launch(kernel, given["x"]))
        held.append(weakref.ref(value))
        return value

    gc.collect()
    gc.disable()
    assert len(tune_all(tuned(None, body), [partial(made, n) for n in SIZES])) == 3
    alive.append(sum(each() is not None for each in held))
    assert alive == [0] * 4


@on_each_rank()
def test_a_step_that_may_not_be_replayed(rank: int):
    """Each call is made once, and the one line of such a step says why."""
    kernel, total = autotuned(), torch.zeros(1)

    def body(x: torch.Tensor) -> torch.Tensor:
        total.add_(1)
        return launch(kernel, x) + total

    step = tuned(None, body)
    tune_all(step, map(torch.zeros, SIZES * 2))
    assert total.item() == 6
    assert log().count("tuned in the calls to come") == 1


@on_each_rank(1, is_dist=False)
def test_progress_and_mistakes(rank: int):
    """The first and the last call of many that tune nothing have a line; what is no step or no list is told in one."""
    kernel = autotuned()
    step = contextual_autotune(n_repeat=1, n_warmup=0)(lambda x: launch(kernel, x))
    tune_all(step, [torch.zeros(64)])
    tune_all(step, [torch.zeros(64)] * 50)
    lines = [line for line in log().splitlines() if ": call " in line]
    assert [line.partition(": call ")[2] for line in lines] == ["1 of 1", "1 of 50", "50 of 50"]
    for wrong, calls, told in (
        (launch, [], "tune_all takes a step of contextual_autotune or a function of autotune, got the function launch"),
        (step, {"x": 1}, "calls must be a list with the arguments of each call"),
        (step, 7, "calls must be a list with the arguments of each call, got 7"),
    ):
        with pytest.raises(TypeError, match=told):
            tune_all(wrong, calls)  # type: ignore[arg-type]
