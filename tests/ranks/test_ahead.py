"""``tune_all``: a list of calls made on all ranks, one after the other."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton

from dist_tune import (
    AbsentRanksError,
    NestedTuningError,
    PeerFailedError,
    RankMismatchError,
    autotune,
    contextual_autotune,
    to_hashable,
    tune_all,
)
from dist_tune.testing import on_ranks
from tests.ranks.kernels import autotuned, best, launch, tuned
from tests.shared_worlds import log, on_each_rank

pytestmark = pytest.mark.once
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
    """Ranks compare their lists in that group: the other rank makes no call at all."""
    scaled = autotune([{"scale": 2.0}, {"scale": 3.0}], to_hashable, n_warmup=0, n_repeat=1)(lambda x, scale=0.0: x * scale)
    groups = [dist.new_group([0]), dist.new_group([1])]
    sizes = SIZES[: 1 + 2 * rank]
    assert len(tune_all(partial(scaled, autotune_pg=groups[rank]), map(torch.zeros, sizes))) == len(sizes)
    assert len(tune_all(scaled, map(torch.zeros, SIZES))) == 3  # of the world's


LISTS: dict[str, Callable[[int], Any]] = {
    "lists": lambda n: [(torch.zeros(size),) for size in SIZES[:n]],
    "generators": lambda n: map(torch.zeros, SIZES[:n]),
}


@on_each_rank(cases=["lists", "generators"])
def test_lists_of_different_lengths(rank: int, kind: str):
    """Lists end before the first call, and generators where one has no more; the error is the same on all ranks and names them."""
    step, runs = counted(autotuned())
    with pytest.raises(RankMismatchError) as raised:
        tune_all(step, LISTS[kind](3 - rank))
    more = " or more" * (kind == "generators")
    assert f"ranks [0] have 3 calls{more}, ranks [1] have 2 calls. Pass as many" in str(raised.value)
    assert {*runs} == ({*SIZES[:2]} if kind == "generators" else set())
    assert len(tune_all(step, map(torch.zeros, SIZES))) == (1 if kind == "generators" else 3)  # ranks are in step
    return str(raised.value)


@on_each_rank(cases=["first run", "plain call", "arguments"])
def test_an_error_in_the_middle(rank: int, where: str):
    """It is raised with the number of the call, and the other rank is told of it; both are in step after it."""
    kernel = autotuned()
    is_broken = [rank == 1]

    def body(x: torch.Tensor) -> torch.Tensor:
        if is_broken[0] and x.numel() == 128 and where != "arguments":
            raise ValueError("a bug")
        return launch(kernel, x)

    def arguments(n: int) -> torch.Tensor:
        if is_broken[0] and n == 128 and where == "arguments":
            raise ValueError("a bug")
        return torch.zeros(n)

    step = tuned(None, body)
    if where == "plain call":
        is_broken[0] = False
        tune_all(step, map(torch.zeros, SIZES))
        is_broken[0] = rank == 1
    with pytest.raises(ValueError if rank == 1 else PeerFailedError) as raised:
        tune_all(step, [partial(arguments, n) for n in SIZES])
    notes = getattr(raised.value, "__notes__", [])
    if rank == 1:
        assert str(raised.value) == "a bug"
        assert any("in call 2 of tune_all of" in each for each in notes) == (where != "arguments")
    else:
        assert "rank 1 raised ValueError: a bug" in str(raised.value)
    is_broken[0] = False
    tune_all(step, [partial(arguments, n) for n in SIZES])
    return best(kernel)


class Held(dict[str, Any]):
    """Memory whose life can be watched."""


@on_each_rank(cases=["generator", "functions"])
def test_arguments_and_values_are_free_after_each_call(rank: int, kind: str):
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

    def generated() -> Iterator[Any]:
        for n in SIZES:
            yield made(n)

    gc.collect()
    gc.disable()
    step = tuned(None, body)
    assert len(tune_all(step, generated() if kind == "generator" else [partial(made, n) for n in SIZES])) == 3
    alive.append(sum(each() is not None for each in held))
    assert alive == [0] * 4


@on_each_rank()
def test_a_step_that_may_not_be_replayed(rank: int):
    """Each call is made once, and one line says what to do."""
    kernel, total = autotuned(), torch.zeros(1)

    def body(x: torch.Tensor) -> torch.Tensor:
        total.add_(1)
        return launch(kernel, x) + total

    step = tuned(None, body)
    tune_all(step, map(torch.zeros, SIZES * 2))
    assert total.item() == 6
    assert log().count("was not tuned ahead: its calls may not be repeated") == 1
    assert "With reset= it is replayed" in log()


def _late(rank: int) -> Any:
    step = tuned(autotuned())
    tune_all(step, [torch.zeros(64)])
    if rank == 1:
        time.sleep(4.0)
    return len(tune_all(step, [torch.zeros(128)]))


def _gone(rank: int) -> Any:
    step = tuned(autotuned())
    tune_all(step, [torch.zeros(64)])
    return rank == 1 or tune_all(step, [torch.zeros(128)])


@pytest.mark.processes
def test_a_late_rank_is_awaited_and_named():
    """Beyond the deadline, as in a first call: it may be loading a model. One that has ended is an error that names it."""
    late = on_ranks(2, _late, env={"DIST_TUNE_DEADLINE_S": "1"})
    assert [each.value for each in late] == [1, 1]
    assert "rank 1 is late: rank 0 waits in the exchange 'the next call' of tune_all of" in late[0].log
    gone, _ = on_ranks(2, _gone, env={"DIST_TUNE_DEADLINE_S": "1"})
    assert gone.error == AbsentRanksError.__name__
    assert "ranks [1]" in gone.message or "rank 1" in gone.message


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
    outer = contextual_autotune()(lambda: tune_all(step, []))
    with pytest.raises(NestedTuningError, match="inside a tuned step"):
        outer()
