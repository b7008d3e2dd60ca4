"""Memory that a tuning holds: no workspace of failed configs, no value of the first run, no copies of dead temporaries."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from dist_tune import autotune, contextual_autotune
from dist_tune.measure import Snapshot
from tests.steps import autotuned, launch
from tests.worlds import on_each_rank


class Held(dict[str, Any]):
    """Memory whose life can be watched; tensors' own wrappers may be resurrected."""


def alive(held: list[Any]) -> int:
    return sum(each() is not None for each in held)


@on_each_rank(1, is_dist=False)
def test_a_failed_config_holds_nothing(rank: int):
    """Memory that its frames held is free when the next candidate is launched."""
    held, n_alive = list[Any](), list[int]()

    def hook(args: Any) -> None:
        n_alive.append(alive(held))
        workspace = Held()
        held.append(weakref.ref(workspace))
        if args["BLOCK"] != 64:
            raise RuntimeError(f"no room beside {workspace}")

    kernel = autotuned(configs=[triton.Config({"BLOCK": block}, pre_hook=hook) for block in (16, 32, 64)])
    gc.disable()  # references alone free it
    contextual_autotune(n_repeat=1, n_warmup=0)(lambda x: launch(kernel, x))(torch.zeros(64))
    assert len(n_alive) > 2
    assert set(n_alive) == {0}


@on_each_rank(1, cases=["kernel", "function"], is_dist=False)
def test_a_run_in_which_a_config_failed_is_freed(rank: int, case: str):
    """What the step held in it is free when the next run begins, though the error is kept."""
    held, n_alive = list[Any](), list[int]()

    @triton.jit
    def failing(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
        tl.static_assert(BLOCK != 32)
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y_ptr + at, tl.load(x_ptr + at))

    @autotune([{"block": each} for each in (16, 32, 64)], None, cache=False)
    def work(x: torch.Tensor, block: int) -> torch.Tensor:
        if block == 32:
            raise ValueError(f"no room for {block}")
        return x + 1

    kernel = autotuned(failing)

    def step(x: torch.Tensor) -> Any:
        n_alive.append(alive(held))
        activations = Held(x=x * 2)
        held.append(weakref.ref(activations))
        return launch(kernel, activations["x"]) if case == "kernel" else work(activations["x"])

    gc.disable()  # references alone free it
    contextual_autotune(n_repeat=1, n_warmup=0, reset=list, cache=False)(step)(torch.zeros(64))
    assert len(n_alive) > 3
    assert set(n_alive) == {0}


@on_each_rank(1, is_dist=False)
def test_an_error_that_a_step_handles_keeps_its_traceback(rank: int):
    """A step made in an except clause, with a config that fails: what the clause handles is the user's."""
    kernel = autotuned(configs=[triton.Config({"BLOCK": block}, pre_hook=hook) for block, hook in ((16, _raises), (32, None))])
    step = contextual_autotune(n_repeat=1, n_warmup=0, reset=list, cache=False)(lambda x: launch(kernel, x))

    def handle() -> None:
        try:
            raise ValueError("the user's")
        except ValueError:
            step(torch.zeros(64))
            raise

    with pytest.raises(ValueError, match="the user's") as raised:
        handle()
    assert len(raised.traceback) == 2


def _raises(args: Any) -> None:
    raise RuntimeError("no room")


def _watched(n_alive: list[int]) -> Callable[..., Any]:
    """A step that notes the values of its earlier runs that are alive when it begins."""
    kernel, values = autotuned(), list[Any]()

    def step(x: torch.Tensor, part: int = 0) -> Any:
        n_alive.append(alive(values))
        value = Held(y=launch(kernel, x.detach()) * x)
        values.append(weakref.ref(value))
        return value

    gc.disable()  # references alone free it
    return step


@on_each_rank(1, cases=["values", "with a graph", "with reset"], is_dist=False)
def test_the_first_value_is_freed(rank: int, case: str):
    """By the third run: until then it may be the call's, unless by ``reset`` the second one is as good."""
    n_alive: list[int] = []
    resets = case == "with reset"
    step = contextual_autotune(n_repeat=2, n_warmup=1, reset=(lambda: None) if resets else None)(_watched(n_alive))
    step(torch.zeros(64, requires_grad=case == "with a graph"))
    assert n_alive[:2] == [0, not resets]
    assert set(n_alive[2:]) == {0}


@on_each_rank(1, is_dist=False)
def test_the_value_of_a_function_from_the_cache_is_freed_before_its_kernel_is_tuned(rank: int):
    """Any run of it is as good as the first; at the second length its kernel is tuned for itself."""
    for n in (64, 128):
        n_alive: list[int] = []
        autotune([{"part": part} for part in range(2)], None, n_repeat=2, n_warmup=0, reset=lambda: None)(_watched(n_alive))(torch.zeros(n))
    assert len(n_alive) > 3
    assert set(n_alive) == {0}


def test_copies_die_with_their_tensors():
    """A hundred layers with temporaries hold one copy; one that lives is put back, also through a view."""
    undo, kept = Snapshot(), torch.ones(8)
    undo.copy([kept])
    for _ in range(100):
        undo.copy([torch.ones(1000)])
        assert len(undo._kept) <= 2
    view = kept[2:4]
    kept.fill_(3)
    del kept
    undo.put_back()
    assert view.tolist() == [1.0, 1.0]


class Foreign:
    """A tensor of a library's own."""

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def clone(self) -> Foreign:
        return Foreign([*self.values])

    def copy_(self, other: Foreign) -> None:
        self.values[:] = other.values


def test_what_can_be_cloned_and_copied_to_is_put_back_as_tensors_are():
    """Once, from the first copy, also through another snapshot."""
    undo, taken, value = Snapshot(), Snapshot(), Foreign([1])
    undo.copy([value])
    value.values[0] = 2
    undo.copy([value])
    taken.take(undo)
    value.values[0] = 3
    taken.put_back()
    assert value.values == [1]


@on_each_rank(1, is_dist=False)
def test_gradients_of_the_first_run_are_freed(rank: int):
    """Each run makes them anew, and the last run's are the call's."""
    kernel, made, n_alive = autotuned(), list[Any](), list[int]()

    @contextual_autotune(n_repeat=2, n_warmup=1)
    def step(x: torch.Tensor) -> None:
        assert x.grad is None
        n_alive.append(alive(made))
        (launch(kernel, x.detach()) * x).sum().backward()
        made.append(weakref.ref(x.grad))

    gc.disable()
    x: Any = torch.ones(64, requires_grad=True)
    step(x)
    assert x.grad[0].item() == 2.0
    assert set(n_alive[2:]) == {0}


@on_each_rank(1, is_dist=False)
def test_a_machine_without_memory_in_the_last_run_is_told_with_what_to_do(rank: int):
    """The error is the call's own, and says that the next call runs with the winners; it does, without a replay."""
    kernel, n_runs, is_short = autotuned(), 0, True

    @contextual_autotune(n_repeat=1, n_warmup=0)
    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal n_runs
        n_runs += 1
        if kernel.cache and is_short:  # the last run: kernels have their configs
            raise MemoryError("no memory left")
        return launch(kernel, x)

    with pytest.raises(MemoryError) as raised:
        step(torch.zeros(64))
    is_short, n_before = False, n_runs
    assert any("is tuned, and this was its last run" in note and "call again" in note for note in raised.value.__notes__)
    assert (step(torch.zeros(64)).sum().item(), n_runs - n_before) == (64.0, 1)
